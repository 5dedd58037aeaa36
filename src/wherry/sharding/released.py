"""The class of a parameter whose values are not here: a look at it is NaN, a use of it an error.

A tensor has no other place to see a use of it before the use is over. torch's parameters of lazy layers change their
class in the same way when they get their values (`torch.nn.parameter.UninitializedParameter`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass
from torch.utils._pytree import tree_leaves

from wherry.errors import WherryError
from wherry.sharding.param_shard import is_plain
from wherry.sharding.watched_params import HANDLE, nothing

# Methods that end in "_" and leave the values alone.
_METADATA = ("requires_grad_", "detach_", "share_memory_", "rename_")
# In-place operators are "__iadd__" and the like; these are not.
_NOT_IN_PLACE = ("__index__", "__int__", "__invert__")
# The calls by which torch reports that an attribute is read or set, and attributes that are no computation.
_OF_ATTRIBUTES = ("__get__", "__set__", "__delete__")
_ATTRIBUTES = (torch.Tensor.data, torch.Tensor.grad)


class ReleasedError(WherryError, RuntimeError):
    """A released weight was used or edited. torch's own errors of tensors are RuntimeErrors as well."""


class Released:
    """A placeholder's part of its class: computations, edits and copies raise; a look at the weight alone is NaN."""

    plain_parameter = True
    # The class without this one.
    whole: type = torch.Tensor

    @classmethod
    def __torch_function__(
        cls, call: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(call, "__name__", "")
        if name in _OF_ATTRIBUTES:
            attribute, name = call.__self__, call.__self__.__name__
            looks = attribute in _ATTRIBUTES or call.__name__ == "__set__"
        else:
            attribute, looks = None, name == "detach" or name.endswith("_like") or name.startswith("new_")
        with DisableTorchFunctionSubclass():
            operands = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
            own: Any = next((tensor for tensor in operands if isinstance(tensor, Released)), None)
            if own is None:
                return call(*args, **kwargs)
            if attribute is None and (kwargs.get("out") is not None or _edits(name)):
                raise _refusal(own, name)
            result = call(*args, **kwargs)
            results = [
                value
                for value in (result if isinstance(result, list | tuple) else [result])
                if isinstance(value, torch.Tensor) and not any(value is tensor for tensor in operands)
            ]
            if not looks and any(_is_computation(value, own, operands) for value in results):
                raise _refusal(own, name)
            if attribute is torch.Tensor.data and call.__name__ == "__set__":
                own.__class__ = own.whole  # it has values again
            if results and results[0] is result and attribute is not torch.Tensor.grad:
                return _as_view(result, own)
            return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        tensor = cast(torch.Tensor, self)
        return f"Parameter(released, shape={tuple(tensor.shape)}, dtype={tensor.dtype}, device={tensor.device})"

    def __deepcopy__(self, memo: Any) -> Any:
        raise _refusal(cast(torch.Tensor, self), "copy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal(cast(torch.Tensor, self), "copy")


class ReleasedView(Released, torch.Tensor):  # type: ignore[misc]
    """A released parameter's `data`, or another view of its placeholder."""

    # The parameter.
    of: torch.Tensor


def classes_of(parameter: torch.Tensor) -> tuple[type, type] | None:
    """Return the classes of a parameter: whole, and released. None for kinds that override operations themselves."""
    if not is_plain(parameter):
        return None
    whole = parameter.whole if isinstance(parameter, Released) else type(parameter)
    return whole, _released(whole)


def change_class(parameter: torch.Tensor, change: Callable[[type], type]) -> None:
    """Change the class that a parameter has when it is whole."""
    if isinstance(parameter, Released):
        parameter.__class__ = _released(change(parameter.whole))
    else:
        parameter.__class__ = change(type(parameter))


@cache
def _released(kind: type) -> type:
    return type(kind.__name__, (Released, kind), {"__module__": kind.__module__, "whole": kind})


def _refusal(tensor: torch.Tensor, name: str) -> ReleasedError:
    """Describe a use of a released parameter, and the ways to use it."""
    parameter = tensor.of if isinstance(tensor, ReleasedView) else tensor
    access = parameter.__dict__.get(HANDLE, nothing)()
    where = access.name_of(parameter) if access is not None else None
    if where is None:
        return ReleasedError(
            f"{name}: this weight of shape {tuple(parameter.shape)} was partitioned by an engine that has been closed, "
            "and its values are gone; take a model back with engine.unwrap() in the place of engine.close()"
        )
    return ReleasedError(
        f"{where}: {name} was called on a partitioned weight that is released, and holds a placeholder of NaN; use or "
        "edit it inside wherry.gathered(...), on every rank. Where a forward, or a loss after it, uses a weight that "
        "its module does not hold, call wherry.register_external_parameter(module, weight) before: the weight is then "
        "whole from each forward of that module to the end of the backward"
    )


def _edits(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_") and name not in _METADATA


def _is_computation(result: torch.Tensor, own: torch.Tensor, operands: list[torch.Tensor]) -> bool:
    """Tell whether a result is part of a model's computation, trained or not, and no look at the weight alone."""
    if result.requires_grad:
        return True
    in_graph = torch.is_grad_enabled() and isinstance(own, nn.Parameter)
    with_others = not all(isinstance(tensor, Released) for tensor in operands)
    return (in_graph or with_others) and result.is_floating_point()


def _as_view(result: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Let a view of the placeholder refuse the same."""
    if result.layout is not torch.strided or result.untyped_storage()._cdata != own.untyped_storage()._cdata:
        return result
    view = result.as_subclass(ReleasedView)
    view.of = own.of if isinstance(own, ReleasedView) else own
    return view
