"""One parameter's master, moments and gradient, read and written from outside the step, whole or this rank's part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.sharding.access import gathered
from wherry.sharding.gradients import Gradients
from wherry.sharding.layout import Slot
from wherry.sharding.unit import Unit
from wherry.update.pipeline import Updater
from wherry.update.state import FlatState

MASTER = "master"


class ParameterStates:
    """What the optimizer keeps for each parameter, by the parameter's name. Kinds are "master" and the moments' names.

    engine.states.full("head.weight", "exp_avg")          # on every rank
    engine.states.set_full("head.weight", "master", value)
    """

    def __init__(
        self,
        units: list[Unit],
        updater: Updater | None,
        gradients: Gradients,
        shards: Comm,
        everybody: Comm,
        gradient_scale: Callable[[], float],
    ) -> None:
        self._comm = shards
        # What is written has to be written by all, replicas too.
        self._everybody = everybody
        self._gradients = gradients
        self._gradient_scale = gradient_scale
        self._names = {
            parameter: slot.name
            for unit in units
            for flat in unit.flats
            for parameter, slot in zip(flat.parameters, flat.layout.slots, strict=True)
        }
        self._places: dict[str, tuple[FlatState, Slot, torch.nn.Parameter]] = {}
        for state in updater.holdings.state_of.values() if updater is not None else ():
            for slot, parameter in zip(state.flat.layout.slots, state.flat.parameters, strict=True):
                self._places[slot.name] = (state, slot, parameter)

    def name_of(self, parameter: torch.Tensor) -> str:
        """The name of a parameter of this engine."""
        return self._names[parameter]  # type: ignore[index]

    def local_range(self, name: str) -> tuple[int, int]:
        """The stretch of the flattened parameter that this rank updates; empty if it is another rank's."""
        state, slot, _ = self._place(name)
        part = state.flat.layout.overlap(slot, state.flat.rank)
        return part[:2] if part is not None else (0, 0)

    def local(self, name: str, kind: str) -> torch.Tensor:
        """This rank's part, flat, in fp32; a copy."""
        with self._part(name, kind, write=False) as part:
            return part.to(torch.float32, copy=True)

    def full(self, name: str, kind: str) -> torch.Tensor:
        """The whole, in fp32; a copy. Every rank must call it."""
        state, slot, _ = self._place(name)
        if state.flat.layout.ranks > 1:
            self._comm.meet("states.full()")
        start, stop = self.local_range(name)
        whole = torch.zeros(slot.numel, dtype=torch.float32, device=state.flat.whole.device)
        with self._part(name, kind, write=False) as part:
            whole[start:stop].copy_(part)
        if state.flat.layout.ranks > 1:
            self._comm.all_reduce(whole).wait()
        return whole.view(slot.shape)

    def set_local(self, name: str, kind: str, value: torch.Tensor) -> None:
        """Write this rank's part. Every rank must call it, with its own."""
        start, stop = self.local_range(name)
        if value.numel() != stop - start:
            raise WherryError(
                f"{name}: expected {stop - start} elements for this rank's part of {kind}, got {tuple(value.shape)}"
            )
        if kind == MASTER:
            state, slot, parameter = self._place(name)
            whole = torch.zeros(slot.numel, dtype=torch.float32, device=parameter.device)
            whole[start:stop].copy_(value.flatten())
            if state.flat.layout.ranks > 1:
                self._comm.meet("states.set_local()")
                self._comm.all_reduce(whole).wait()
            self._write(name, kind, whole.view(slot.shape))
            return
        with self._part(name, kind, write=True) as part:
            part.copy_(value.flatten())

    def set_full(self, name: str, kind: str, value: torch.Tensor) -> None:
        """Write the whole; the working weights follow the master.

        Every rank must call it, with the same value: each writes the part that it updates, and nobody compares them.
        """
        slot = self._place(name)[1]
        if tuple(value.shape) != slot.shape:
            raise WherryError(f"{name}: expected {kind} of shape {slot.shape}, got {tuple(value.shape)}")
        self._everybody.meet("states.set_full()")
        self._write(name, kind, value)

    def _write(self, name: str, kind: str, value: torch.Tensor) -> None:
        parameter = self._place(name)[2]
        if kind == MASTER:
            with gathered(parameter), torch.no_grad():
                parameter.data.copy_(value)
        start, stop = self.local_range(name)
        with self._part(name, kind, write=True) as part:
            part.copy_(value.flatten()[start:stop])

    def local_gradient(self, name: str) -> torch.Tensor:
        """This rank's part of the window's mean gradient, flat, in fp32; a copy."""
        return self._gradients.named.local(name).to(torch.float32, copy=True) * self._gradient_scale()

    def set_gradient(self, name: str, value: torch.Tensor) -> None:
        """Replace the window's mean gradient, between the boundary's backward and the step.

        Every rank must call it, with the same value: each writes the part that it updates, and nobody compares them.
        """
        self._everybody.meet("states.set_gradient()")
        self.set_gradient_here(name, value)

    def set_gradient_here(self, name: str, value: torch.Tensor) -> None:
        """As `set_gradient`, of this rank's part alone; the rest of `value` is not looked at."""
        self._gradients.named.replace(name, value.float() / self._gradient_scale())

    def _place(self, name: str) -> tuple[FlatState, Slot, torch.nn.Parameter]:
        if name not in self._places:
            raise WherryError(f"{name}: the optimizer does not update a parameter of this name")
        return self._places[name]

    @contextmanager
    def _part(self, name: str, kind: str, *, write: bool) -> Iterator[torch.Tensor]:
        state, slot, _ = self._place(name)
        overlap = state.flat.layout.overlap(slot, state.flat.rank)
        if overlap is None:
            yield torch.empty(0)
            return
        first, last, in_shard = overlap
        with state.opened(write=write) as opened:
            for segment, tensors in zip(state.segments, opened, strict=True):
                if state.flat.layout.slots[segment.slot] is not slot:
                    continue
                if kind not in tensors:
                    raise WherryError(
                        f"{name}: the optimizer keeps no {kind!r} for it; it keeps {', '.join(sorted(tensors))}"
                    )
                tensor = tensors[kind]
                if not isinstance(tensor, torch.Tensor):
                    raise WherryError(f'{name}: {kind} is kept in 8-bit blocks ("wherry": {{"state_dtype": "int8"}})')
                yield tensor[in_shard - segment.start : in_shard - segment.start + last - first]
                return
        raise AssertionError(f"{name} has no segment on rank {state.flat.rank}")
