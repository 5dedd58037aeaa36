"""One parameter's master, moments and gradient, read and written from outside the step, whole or this rank's part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from wherry.errors import WherryError
from wherry.observe.log import warn
from wherry.parallel.comm import Comm
from wherry.sharding.access import gathered
from wherry.sharding.gradients import Gradients
from wherry.sharding.layout import SegmentSpan, Slot
from wherry.sharding.unit import Unit
from wherry.update.optimizer_states import FlatState, OptimizerStates
from wherry.update.record import State
from wherry.update.rules import Groups

MASTER = "master"


class ParameterStates:
    """What the optimizer keeps for each parameter, by the parameter's name. Kinds are "master" and the moments' names.

    engine.states.full("head.weight", "exp_avg")          # on every rank
    engine.states.set_full("head.weight", "master", value)
    """

    def __init__(
        self,
        units: list[Unit],
        states: OptimizerStates | None,
        groups: Groups,
        gradients: Gradients,
        shards: Comm,
        everybody: Comm,
        gradient_scale: Callable[[], float],
    ) -> None:
        self._groups = groups
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
        for state in states.state_of.values() if states is not None else ():
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

    # What this rank has of all of them, as `optimizer.state_dict()` has it.

    def parts(self, names: Sequence[str]) -> list[dict[str, torch.Tensor]]:
        """Of each parameter the step count, the moments, and an fp32 master where the weights are not in fp32.

        Frozen ones have nothing.
        """
        found: dict[str, dict[str, torch.Tensor]] = {}
        places = [self._places[name] for name in names if name in self._places]
        for state, slot, _ in places:
            if state.bucket.on_disk:
                raise WherryError(
                    "optimizer.state_dict: this state rests on disk, and would be in memory as a whole; "
                    "engine.save_checkpoint(folder) writes it, and engine.load_checkpoint takes it back"
                )
            found[slot.name] = {"step": torch.tensor(float(state.steps[state.flat.layout.slots.index(slot)]))}
        for state in dict.fromkeys(state for state, *_ in places):
            with state.opened() as segments:
                for span, values in zip(state.segments, segments, strict=True):
                    slot = state.flat.layout.slots[span.slot]
                    shape = slot.shape if span.stop - span.start == slot.numel and slot.shape else (-1,)
                    for kind, value in values.items():
                        if not isinstance(value, torch.Tensor):
                            raise WherryError(
                                f"optimizer.state_dict: {slot.name} keeps {kind} in 8-bit blocks, which is no form of "
                                "torch.optim's; engine.save_checkpoint(folder) writes them"
                            )
                        if kind != MASTER or state.flat.dtype != torch.float32:
                            copy = value.detach().clone()
                            found[slot.name][kind] = copy.view(shape) if copy.dim() else copy
        return [found.get(name, {}) for name in names]

    def load_parts(self, given: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take back what `parts` gave, by name. Nothing is changed unless all of it fits. Every rank must call it."""
        self._everybody.meet("optimizer.load_state_dict()")
        if not any(given.values()) and any(any(state.steps) for state, _, _ in self._places.values()):
            warn("optimizer.load_state_dict: it holds no state: moments and step counts begin anew")
        given = {name: part for name, part in given.items() if part or name in self._places}
        wrong = [problem for name, part in given.items() for problem in self._problems(name, part)]
        for rank, problem in enumerate(self._everybody.gather_objects(wrong[0] if wrong else None)):
            if problem is not None:
                raise WherryError(
                    f"optimizer.load_state_dict, rank {rank}: {problem}; state_dict() holds one rank's part, for as "
                    "many ranks at the same stage: engine.save_checkpoint(folder) writes what any number of them loads"
                )
        for state in dict.fromkeys(self._place(name)[0] for name in given):
            names = [slot.name for slot in state.flat.layout.slots]
            for index, name in enumerate(names):
                part = given.get(name, {})
                state.steps[index] = int(part.get("step", bool(part)))  # torch's SGD counts none
            with torch.no_grad(), state.opened(write=True) as segments:
                for span, values in zip(state.segments, segments, strict=True):
                    self._load_part(state, span, values, given.get(names[span.slot], {}))
            if state.flat.resident and state.flat.layout.ranks > 1:
                self._comm.all_gather(state.flat.whole, state.flat.shard_memory).wait()

    def _problems(self, name: str, part: Mapping[str, torch.Tensor]) -> Iterator[str]:
        """Why a part cannot be loaded. One of nothing is a parameter that has had no update."""
        state, slot, _ = self._place(name)
        start, stop = self.local_range(name)
        for kind, value in part.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() != stop - start:
                got = tuple(value.shape)
                yield f"{name}: expected {kind} of {stop - start} elements, which this rank has of it, got {got}"
        kept = {field.name for field in state.rule.fields(self._groups[slot.group], 1)}
        if part and kept and stop > start and kept != part.keys() - {"step", MASTER}:
            yield f"{name}: expected {', '.join(sorted(kept))}, got {', '.join(sorted(part))}"

    def _load_part(
        self, state: FlatState, span: SegmentSpan, values: dict[str, State], part: Mapping[str, torch.Tensor]
    ) -> None:
        group = self._groups[span.group]
        for kind in [kind for kind in values if kind != MASTER and kind not in part]:
            state.begin_again(group, values, kind)
        for kind, value in part.items():
            target = values.get(kind)
            if kind == "step":
                continue
            if isinstance(target, torch.Tensor) and value.dim():
                target.copy_(value.flatten())
            elif value.dim():  # an optimizer of torch's makes its state at its first step: this is it
                values[kind] = value.flatten().to(values[MASTER].device, copy=True)  # type: ignore[union-attr]
            else:
                values[kind] = value.clone()

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
