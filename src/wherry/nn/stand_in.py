"""What stands in for a method of one module, as an attribute of the module."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class StandIn(RemovableHandle):
    """Takes the calls of one of a module's methods, until it is removed; `call` gets the method before the arguments.

    A copy or a pickle of the module has the module's own method.
    """

    def __init__(self, module: nn.Module, name: str, call: Callable[..., Any]) -> None:
        self._module = module
        self._name = name
        self._call = call
        self._own = name not in module.__dict__
        self.inner = MethodType(getattr(type(module), name), module) if self._own else module.__dict__[name]
        # So that whoever asks for the signature gets that of the module's own.
        self.__wrapped__ = self.inner
        module.__dict__[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.inner, *args, **kwargs)

    def remove(self) -> None:
        if self._module.__dict__.get(self._name) is not self:
            return  # somebody else's is around it, and calls on
        if self._own:
            del self._module.__dict__[self._name]
        else:
            self._module.__dict__[self._name] = self.inner

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        inner = self.inner
        if isinstance(inner, MethodType) and id(inner.__self__) in memo:
            return MethodType(inner.__func__, memo[id(inner.__self__)])
        return inner

    def __reduce__(self) -> Any:
        inner = self.inner
        if isinstance(inner, MethodType):
            return _bound, (self._name, inner.__self__)
        return _given, (inner,)


def _bound(name: str, module: nn.Module) -> Any:
    return MethodType(getattr(type(module), name), module)


def _given(value: Any) -> Any:
    return value
