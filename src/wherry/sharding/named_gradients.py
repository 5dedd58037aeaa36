"""One parameter's summed gradient, by its name: read and written from outside, once the window is reduced."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import torch

from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.sharding.flat_gradient import FlatGradient
from wherry.sharding.layout import Slot


class NamedGradients:
    """Of all trainable parameters. `shards` are the ranks that share out a sum, `tensor` those that cut a parameter."""

    def __init__(self, gradients: Sequence[FlatGradient], shards: Comm, tensor: Comm) -> None:
        self._gradients = gradients
        self._shards = shards
        self._tensor = tensor

    def whole(self, name: str) -> torch.Tensor:
        """The window's summed gradient of one parameter, from all ranks' parts."""
        gradient, slot = self._place_of(name)
        layout, device = gradient.flat.layout, gradient.flat.whole.device
        for comm in (*((self._shards,) if layout.ranks > 1 else ()), *((self._tensor,) if _is_cut(slot) else ())):
            comm.meet("gradients()")
        gradient.landing.wait()
        if layout.ranks == 1:
            return self._join(gradient.of_parameter(layout.slots.index(slot)).to(device), slot)
        owned = gradient.owned.to(device)
        whole = torch.empty(layout.numel, dtype=owned.dtype, device=device)
        self._shards.all_gather(whole, owned.contiguous()).wait()
        return self._join(whole[slot.start : slot.stop].view(slot.shape), slot)

    def local(self, name: str) -> torch.Tensor:
        """What this rank has of it, flat; empty if that is another rank's."""
        gradient, slot = self._place_of(name)
        gradient.landing.wait()
        layout = gradient.flat.layout
        if layout.ranks == 1:
            return gradient.of_parameter(layout.slots.index(slot)).flatten()
        start, stop, place = layout.overlap(slot, gradient.flat.rank) or (0, 0, 0)
        return gradient.owned[place : place + stop - start]

    def replace(self, name: str, value: torch.Tensor) -> None:
        """Put `value` in the place of the window's summed gradient of one parameter."""
        gradient, slot = self._place_of(name)
        part = gradient.flat.layout.overlap(slot, gradient.flat.rank)
        gradient.landing.wait()
        if part is not None:
            start, stop, place = part
            gradient.owned[place : place + stop - start].copy_(value.flatten()[start:stop])
        gradient.sum_squares = None

    def _join(self, local: torch.Tensor, slot: Slot) -> torch.Tensor:
        """The logical gradient, from the parts of all tensor-parallel ranks."""
        if not _is_cut(slot):
            return local
        assert slot.part is not None and slot.part.global_shape is not None
        joined = local.new_empty(slot.part.global_shape)
        for offsets, part in self._tensor.gather_objects((slot.part.offsets, local.cpu())):
            joined[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part.to(local.device)
        return joined

    def _place_of(self, name: str) -> tuple[FlatGradient, Slot]:
        slots = {slot.name: (gradient, slot) for gradient in self._gradients for slot in gradient.flat.layout.slots}
        if name not in slots:
            close = difflib.get_close_matches(name, slots, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise WherryError(f"gradients: no trainable parameter is named {name!r}{hint}")
        return slots[name]


def _is_cut(slot: Slot) -> bool:
    """Whether tensor-parallel ranks have a part of it each, and know which."""
    return slot.part is not None and slot.part.global_shape is not None and slot.part.offsets is not None
