"""What an engine attaches to a user's modules and parameters, and what becomes of it in a copy or a pickle of them.

A copy of the model is an ordinary module with weights of its own: hooks do nothing there, and watched parameters are a
plain dictionary. Weights that are not whole cannot be copied: that is an error, and not a model of NaN.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from wherry.errors import WherryError


def nothing(*args: Any, **kwargs: Any) -> None:
    """What a hook is in a copy of its module."""


class Hook:
    """A hook on a module. Hooks look at what torch.compile cannot: storages, collectives, the state of a backward.

    What keeps it out of a graph loads torch's compiler with its first call, a second that is left to who compiles.
    """

    def __init__(self, call: Callable[..., Any], *, compiles: bool = False) -> None:
        self._call = call
        self._outside = None if compiles else torch._disable_dynamo(partial(call))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The first is true inside of a graph, where the second cannot be asked.
        if self._outside is not None and (torch.compiler.is_compiling() or "torch._dynamo" in sys.modules):
            return self._outside(*args, **kwargs)
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _give, (nothing,)


def _give(value: Any) -> Any:
    return value


# The attribute of a parameter that is its mark.
HANDLE = "_wherry"


class Mark:
    """On a parameter: whose it is, as long as that lives."""

    __slots__ = ("_owner",)

    def __init__(self, owner: object = None) -> None:
        self._owner = weakref.ref(owner) if owner is not None else nothing

    def __call__(self) -> Any:
        return self._owner()

    def __reduce__(self) -> Any:
        return Mark, ()


class Watcher(Protocol):
    """Told when parameters are read."""

    def read(self, parameter: nn.Parameter) -> None: ...

    def settle(self) -> None:
        """Completes updates that are under way, for whoever goes through all parameters."""

    def is_whole(self, parameter: nn.Parameter) -> bool: ...


class WatchedParameters(dict[str, "nn.Parameter | None"]):
    """A module's parameters, by name. Reading one whose unit is released, inside a forward, gathers it first.

    This is how a parameter can be used by code outside its own module.
    """

    __slots__ = ("_watcher",)

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], watcher: Watcher) -> None:
        super().__init__(parameters)
        self._watcher = watcher

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = dict.__getitem__(self, name)
        if parameter is not None:
            self._watcher.read(parameter)
        return parameter

    def items(self) -> Any:
        self._watcher.settle()
        return super().items()

    def values(self) -> Any:
        self._watcher.settle()
        return super().values()

    def __reduce_ex__(self, protocol: Any) -> Any:
        for name, parameter in self.items():
            if parameter is not None and not self._watcher.is_whole(parameter):
                raise WherryError(
                    f"{name} {tuple(parameter.shape)}: this weight is partitioned over the ranks, so that a module "
                    "that holds it cannot be copied or pickled as it is; on every rank, write "
                    "with wherry.gathered(engine.module): copy = copy.deepcopy(engine.module), or save "
                    "engine.module.state_dict(), which holds whole weights"
                )
        return dict, (dict(self),)
