"""A language model's logits that are not computed unless somebody looks at them: their loss needs a tile at a time."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from wherry.errors import WherryError
from wherry.nn.cross_entropy import chunked_cross_entropy
from wherry.nn.stand_in import StandIn
from wherry.observe.log import say
from wherry.parallel.partition import is_dtensor
from wherry.sharding.watched_params import Hook

# The head whose model is running with labels, so that its logits are for a loss.
_with_labels: ContextVar[LazyHead | None] = ContextVar("wherry_with_labels", default=None)
OFF = '"wherry": {"chunked_loss": false}'


@dataclass(frozen=True)
class _Losses:
    """What the head is called with beside hidden states, to return a loss."""

    labels: Tensor
    options: dict[str, Any]


class LazyHead:
    """A model's output head, that returns lazy logits where its model is called with labels.

    The loss is computed in a call of the head, so that whatever happens around its forward (weights that are gathered
    and released) happens around the loss. `now` changes whenever weights do, and is None once there are none. `handles`
    undo it all.
    """

    def __init__(self, model: nn.Module, now: Callable[[], Hashable]) -> None:
        found = _found(model)
        assert not isinstance(found, str), found
        language_model, self.head = found
        self.now = now
        self._said = False
        # Asked of the module, it would be gathered.
        weight = dict.__getitem__(self.head._parameters, "weight")
        assert weight is not None
        self.weight = weight
        self._call = StandIn(self.head, "_call_impl", Hook(self._called))
        self._forward = StandIn(self.head, "forward", Hook(self._forwarded))
        parameters = list(inspect.signature(language_model.forward).parameters)
        self._place = parameters.index("labels")
        self.handles: list[RemovableHandle] = [
            self._call,
            self._forward,
            language_model.register_forward_pre_hook(Hook(self._begin), with_kwargs=True),
            language_model.register_forward_hook(Hook(self._end), always_call=True),
        ]

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        labels = kwargs.get("labels", args[self._place] if len(args) > self._place else None)
        _with_labels.set(self if labels is not None else None)

    def _end(self, *_: Any) -> None:
        _with_labels.set(None)

    def _called(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        lazily = _with_labels.get() is self and len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        if not lazily or _has_hooks_of_others(self.head):
            return inner(*args, **kwargs)
        return LazyLogits.of(self, args[0])

    def _forwarded(self, inner: Callable[..., Any], hidden: Tensor, *more: Any, **kwargs: Any) -> Any:
        if not (more and isinstance(more[0], _Losses)):
            return inner(hidden, *more, **kwargs)
        weight, bias, asked = self.head.weight, self.head.bias, more[0]
        return chunked_cross_entropy(hidden, weight, asked.labels, bias=bias, **asked.options)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._call.inner(hidden)

    def loss(self, hidden: Tensor, labels: Tensor, **options: Any) -> Tensor:
        return self._call.inner(hidden, _Losses(labels, options))

    def tell(self, user: str) -> None:
        if not self._said:
            self._said = True
            say("chunked_loss: something uses the model's logits (`%s`), so they are computed whole after all", user)


def why_not(model: nn.Module) -> str | None:
    """What is in the way of a loss in pieces; None where nothing is."""
    found = _found(model)
    return found if isinstance(found, str) else None


def _found(model: nn.Module) -> tuple[nn.Module, nn.Linear] | str:
    """The language model within, and its head."""
    for module in model.modules():
        ask = getattr(module, "get_output_embeddings", None)
        head = ask() if callable(ask) and "labels" in inspect.signature(module.forward).parameters else None
        if head is None:
            continue
        forward = head.forward
        while hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
        if getattr(forward, "__func__", None) is not nn.Linear.forward or "weight" not in head._parameters:
            return f"its head is a {type(head).__name__}, and no plain nn.Linear"
        if is_dtensor(dict.__getitem__(head._parameters, "weight")):
            return "tensor-parallel ranks share its head"
        return module, head
    return "it has no module with get_output_embeddings() whose forward takes labels"


def _has_hooks_of_others(head: nn.Module) -> bool:
    """Hooks that expect logits. An engine's expect a tensor."""
    hooks = (*head._forward_pre_hooks.values(), *head._forward_hooks.values())
    return not all(isinstance(hook, Hook) for hook in hooks) or bool(head._backward_hooks or head._backward_pre_hooks)


class LazyLogits(Tensor):
    """Logits by what they are made of: `bent * tanh(factor * head(hidden))`, or `factor * head(hidden)`.

    What models do between head and loss gives lazy logits again, `F.cross_entropy` of them is the loss in pieces, and
    anything else gets the logits.
    """

    lazy_head: LazyHead
    hidden: Tensor
    factor: float
    bent: float | None
    # Computes them, in `around`; what they are then, and the hooks that wait for it.
    make: Callable[[], Tensor]
    around: Callable[[], AbstractContextManager[Any]]
    _whole: Tensor | None
    _waiting: dict[int, Any]

    @staticmethod
    def of(head: LazyHead, hidden: Tensor) -> LazyLogits:
        kind = hidden.device.type
        autocast, dtype = torch.is_autocast_enabled(kind), hidden.dtype
        if autocast and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        grad = torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad)
        self = LazyLogits._new(head, hidden, dtype, grad)
        made = head.now()

        def around() -> AbstractContextManager[Any]:
            """As it was where the head was called."""
            if head.now() is None or head.now() != made:
                raise WherryError(
                    "logits of a forward were used after the weights that make them had changed, and chunked_loss does "
                    f"not compute them before; use them before the update (with the policy in_backward: before the "
                    f"backward), or set {OFF}"
                )
            return torch.autocast(kind, dtype=dtype, enabled=autocast) if autocast else nullcontext()

        def make() -> Tensor:
            with around(), torch.enable_grad() if grad else nullcontext():
                return head.logits(hidden)

        self.factor, self.bent, self.make, self.around = 1.0, None, make, around
        return self

    @staticmethod
    def _new(head: LazyHead, hidden: Tensor, dtype: torch.dtype, grad: bool) -> LazyLogits:
        shape = (*hidden.shape[:-1], head.weight.shape[0])
        self: LazyLogits = Tensor._make_wrapper_subclass(
            LazyLogits, shape, dtype=dtype, device=hidden.device, requires_grad=grad
        )
        self.lazy_head, self.hidden = head, hidden
        self._whole = None
        self._waiting = OrderedDict()
        return self

    def then(self, make: Callable[[], Tensor], **changes: Any) -> LazyLogits:
        """What one more operation makes of them."""
        hidden = changes.pop("hidden", self.hidden)
        other = LazyLogits._new(self.lazy_head, hidden, changes.pop("dtype", self.dtype), self.requires_grad)
        other.factor, other.bent, other.around, other.make = self.factor, self.bent, self.around, make
        for name, value in changes.items():
            setattr(other, name, value)
        return other

    def whole(self) -> Tensor:
        """The logits, computed once."""
        if self._whole is None:
            self._whole = self.make()
            for hook in self._waiting.values():
                self._whole.register_hook(hook)
        return self._whole

    def loss(self, labels: Tensor, **options: Any) -> Tensor:
        if self.bent is not None:
            options |= {"softcap": self.bent, "scale": self.factor * self.bent}
        elif self.factor != 1:
            options["scale"] = self.factor
        with self.around():
            return self.lazy_head.loss(self.hidden, labels, **options)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _LAZILY:
            result = _LAZILY[func](func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        lazy: list[LazyLogits] = []
        tree_map_only(LazyLogits, lazy.append, (args, kwargs))
        if lazy:
            lazy[0].lazy_head.tell(getattr(func, "__name__", str(func)))
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise WherryError(f"{func} met logits that chunked_loss has not computed; set {OFF}")


# What is asked of them without looking at a value.
_METADATA = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.is_floating_point, Tensor.is_complex),
    *(Tensor.element_size, Tensor.__len__, torch.is_floating_point, torch.numel),
}


def _register_hook(_: Any, self: LazyLogits, hook: Any) -> RemovableHandle:
    """A hook that waits for logits, which may never come."""
    if self._whole is not None:
        return self._whole.register_hook(hook)
    handle = RemovableHandle(self._waiting)
    self._waiting[handle.id] = hook
    return handle


def _cast(func: Any, self: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """`float`, `to` and the like."""
    dtype = _CASTS.get(func)
    if func is Tensor.to:
        if "copy" in kwargs or not all(isinstance(value, torch.dtype | torch.device) for value in args):
            return NotImplemented
        given = (*args, *kwargs.values())
        if any(isinstance(value, torch.device) and value != self.device for value in given):
            return NotImplemented
        dtype = next((value for value in given if isinstance(value, torch.dtype)), self.dtype)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return NotImplemented
    return self.then(lambda: func(self.whole(), *args, **kwargs), dtype=dtype)


def _contiguous(func: Any, self: LazyLogits) -> Any:
    return self.then(lambda: func(self.whole()))


def _times(func: Any, one: Any, other: Any) -> Any:
    """By a number."""
    self, number = (one, other) if isinstance(one, LazyLogits) else (other, one)
    divides = func in _DIVISIONS
    if (divides and self is not one) or type(number) not in (int, float) or not 0 < number < math.inf:
        return NotImplemented
    factor = 1 / number if divides else number
    changes = {"factor": self.factor * factor} if self.bent is None else {"bent": self.bent * factor}
    return self.then(lambda: func(self.whole(), number), **changes)


def _tanh(func: Any, self: LazyLogits) -> Any:
    return NotImplemented if self.bent is not None else self.then(lambda: func(self.whole()), bent=1.0)


def _view(func: Any, self: LazyLogits, *shape: Any, **kwargs: Any) -> Any:
    """Rows in another shape; classes stay the last dim."""
    wanted = list(shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape)
    if kwargs or not wanted or not all(type(size) is int for size in wanted) or wanted.count(-1) > 1:
        return NotImplemented
    if -1 in wanted:
        wanted[wanted.index(-1)] = self.numel() // max(1, -math.prod(wanted))
    if wanted[-1] != self.shape[-1] or math.prod(wanted) != self.numel():
        return NotImplemented
    hidden = self.hidden.reshape(*wanted[:-1], self.hidden.shape[-1])
    return self.then(lambda: func(self.whole(), *shape), hidden=hidden)


def _flatten(func: Any, self: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim % self.dim() == self.dim() - 1:
        return NotImplemented
    hidden = self.hidden.flatten(start_dim, end_dim)
    return self.then(lambda: func(self.whole(), start_dim, end_dim), hidden=hidden)


def _getitem(func: Any, self: LazyLogits, index: Any) -> Any:
    """Of rows; classes stay whole."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is None or part is ... or type(part) in (int, slice, Tensor) for part in parts):
        return NotImplemented
    taken = sum(_dims_of(part) for part in parts)
    whole = isinstance(parts[-1], slice) and parts[-1] == slice(None)
    open_ended = any(part is ... for part in parts) and parts[-1] is not ...
    if not whole and (open_ended or taken >= self.dim()):
        return NotImplemented
    return self.then(lambda: func(self.whole(), index), hidden=self.hidden[index])


def _dims_of(part: Any) -> int:
    if part is None or part is ...:
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1


def _cross_entropy(
    func: Any,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    plain = weight is None and size_average is None and reduce is None and not isinstance(target, LazyLogits)
    rows = isinstance(input, LazyLogits) and input.dim() == 2 and target.dim() == 1 and target.dtype == torch.int64
    if not (plain and rows) or input._whole is not None:
        return NotImplemented
    loss = input.loss(target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
    return loss if torch.is_autocast_enabled(input.device.type) else loss.to(input.dtype)


_CASTS = {Tensor.float: torch.float32, Tensor.bfloat16: torch.bfloat16, Tensor.half: torch.float16}
_DIVISIONS = {Tensor.div, Tensor.__truediv__, torch.div, Tensor.true_divide, torch.true_divide}
_PRODUCTS = {Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul}
_LAZILY: dict[Any, Callable[..., Any]] = {
    Tensor.register_hook: _register_hook,
    **dict.fromkeys((*_CASTS, Tensor.to), _cast),
    Tensor.contiguous: _contiguous,
    **dict.fromkeys((*_DIVISIONS, *_PRODUCTS), _times),
    **dict.fromkeys((Tensor.tanh, torch.tanh), _tanh),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _view),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _flatten),
    Tensor.__getitem__: _getitem,
    F.cross_entropy: _cross_entropy,
}
