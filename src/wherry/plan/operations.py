"""The operations that a model's step comes to: what each computes, reads and writes, counted while it runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from wherry.fake import standing_for
from wherry.observe.footprint import WORKING, Footprint
from wherry.sharding.autograd import NO_TASK, backward_task

aten = torch.ops.aten


class Operation(NamedTuple):
    """Floating-point operations, and bytes read and written."""

    flops: float
    bytes: int
    backward: bool
    attention: bool
    update: bool = False


_ATTENTION = frozenset(
    getattr(aten, f"_scaled_dot_product_{kind}{way}")
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    for way in ("", "_backward")
)
# Products of rows with the experts that they go to, and how many a call makes.
_GROUPED = {"aten._grouped_mm": 1} | {
    f"transformers.grouped_mm_fallback{way}": products for way, products in (("", 1), ("_backward", 2))
}
_EMPTY = (aten.empty, aten.empty_like, aten.new_empty)
_NOTHING = (aten.detach, torch.ops.prim.device)


class Recorder(Footprint):
    """A footprint that counts operations too, and knows the highest sum of each phase by itself."""

    def __init__(self, elsewhere: Collection[str] = ()) -> None:
        super().__init__(elsewhere)
        self.operations: Counter[Operation] = Counter()
        # Whether they are an update's, which are told by the bytes of its states, but for the products of matrices that
        # some optimizers make: on a host updates are no operations of torch's.
        self.updating = False
        # By phase: bytes by category when their sum was highest. Of all phases: the highest of each category.
        self.phases: dict[str, dict[str, int]] = {}
        self.highest: dict[str, int] = {}
        self._phase: str | None = None

    def begin(self, phase: str | None) -> None:
        """From now on it is `phase`, perhaps once more."""
        if self._phase is not None:
            before = self.phases.get(self._phase)
            if before is None or self.peak > self.total(before):
                self.phases[self._phase] = self.at_peak
            for category, nbytes in self.peaks.items():
                self.highest[category] = max(nbytes, self.highest.get(category, 0))
        self._phase = phase
        self.reset()

    def clear(self) -> None:
        self.operations.clear()
        self.phases, self.highest, self._phase = {}, {}, None

    @property
    def working(self) -> int:
        return self.live[WORKING]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        packet = func._overloadpacket
        flops = _flops(packet, args, kwargs, result)
        if not func.is_view and packet not in _NOTHING and (flops or not self.updating):
            out = result if isinstance(result, tuple | list) else (result,)
            nbytes = tensor_bytes(out) + (0 if packet in _EMPTY else tensor_bytes(args))
            backward = backward_task() != NO_TASK
            self.operations[Operation(flops, nbytes, backward, packet in _ATTENTION, self.updating)] += (
                standing_for.get()
            )
        return result


def tensor_bytes(values: Any) -> int:
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, tuple | list):
            total += tensor_bytes(value)
    return total


def _flops(packet: Any, args: Any, kwargs: Any, result: Any) -> float:
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return _attention_flops(*args[:3])
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return 2.5 * _attention_flops(*args[1:4])
    if (passes := _GROUPED.get(str(packet))) is not None:
        return passes * 2.0 * math.prod(args[0].shape[-2:]) * args[1].shape[-1]
    count = flop_registry.get(packet)
    return float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> float:
    """Of scores and of what they mix, in a forward."""
    batch, heads, length, width = query.shape
    return 2.0 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])
