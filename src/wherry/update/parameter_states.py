"""One parameter by its name: master, moments and gradient, read and written from outside, whole or this rank's part."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from wherry.errors import WherryError
from wherry.observe.log import warn
from wherry.parallel.topology import Topology
from wherry.sharding.access import Access
from wherry.sharding.flat_gradient import FlatGradient
from wherry.sharding.gradients import Gradients
from wherry.sharding.layout import SegmentSpan, Slot
from wherry.sharding.unit import Flat
from wherry.update.optimizer_states import FlatState
from wherry.update.record import Field, State
from wherry.update.rules import Groups, Shape

MASTER = "master"


def own_shape(value: State, numel: int) -> Shape | None:
    """The shape of a state that has not an element for each of the `numel` of its segment; None of those that have."""
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else (numel,)
    return None if shape in ((), (numel,)) else shape


def kept_fields(state: FlatState, groups: Groups) -> list[list[Field]]:
    """What the optimizer keeps of each segment beside its weights, wherever that rests.

    One of torch's that keeps its state itself has none before its first step.
    """
    kept = state.rule.kept() if state.rule.keeps_state else []
    found = []
    for number, span in enumerate(state.segments):
        numel = span.stop - span.start
        if not state.rule.keeps_state:
            fields = state.rule.fields(groups[span.group], state.shape_of(span) or (numel,), torch.float32)
            found.append([replace(field, shape=None) if field.shape == (numel,) else field for field in fields])
            continue
        own = kept[state.first + number] if kept else {}
        found.append([Field(k, v.dtype, v.numel(), shape=own_shape(v, numel)) for k, v in own.items() if v.dim()])
    return found


class ParameterStates:
    """What the optimizer keeps for each parameter, by the parameter's name. Kinds are "master" and the moments' names.

    engine.states.full("head.weight", "exp_avg")          # on every rank
    engine.states.set_full("head.weight", "master", value)
    """

    def __init__(
        self,
        access: Access,
        state_of: Mapping[Flat, FlatState],
        groups: Groups,
        gradients: Gradients,
        topology: Topology,
    ) -> None:
        self._access = access
        self._state_of = state_of
        self._groups = groups
        self._gradients = gradients
        self._comm = topology.shards
        # What is written has to be written by all, replicas too.
        self._everybody = topology.data
        self._tensor = topology.tensor
        self._places = {flat.layout.slots[index].name: (flat, index) for flat, index in access.place_of.values()}

    def name_of(self, parameter: torch.Tensor) -> str:
        """The name of a parameter of this engine."""
        flat, index = self._access.place_of[parameter]  # type: ignore[index]
        return flat.layout.slots[index].name

    def local_range(self, name: str) -> tuple[int, int]:
        """The stretch of the flattened parameter that this rank updates; empty if it is another rank's."""
        state, slot = self._place(name)
        part = state.flat.layout.overlap(slot, state.flat.rank)
        return part[:2] if part is not None else (0, 0)

    def local(self, name: str, kind: str) -> torch.Tensor:
        """This rank's part, flat, in fp32; a copy. A state that has not the parameter's shape is in its own."""
        with self._part(name, kind, write=False) as part:
            return part.to(torch.float32, copy=True)

    def full(self, name: str, kind: str) -> torch.Tensor:
        """The whole, in fp32; a copy. Every rank must call it."""
        state = self._place(name)[0]
        if state.flat.layout.ranks > 1:
            self._comm.meet("states.full()")
        part, shape = self._agreed(name, kind)
        start = self.local_range(name)[0]
        whole = torch.zeros(math.prod(shape), dtype=torch.float32, device=state.flat.whole.device)
        whole[start : start + part.numel()].copy_(part.flatten())
        if state.flat.layout.ranks > 1:
            self._comm.all_reduce(whole).wait()
        return whole.view(shape)

    def _agreed(self, name: str, kind: str) -> tuple[torch.Tensor, Shape]:
        """This rank's part, a copy, and the shape of the whole, which the rank knows that has it where it is not the
        parameter's. What is wrong with a kind on the rank that has the part is so on all of them."""
        part, own, wrong = torch.empty(0), None, None
        start, stop = self.local_range(name)
        try:
            part = self.local(name, kind)
            own = own_shape(part, stop - start)
        except WherryError as error:
            wrong = str(error)
        state, slot = self._place(name)
        shape: Shape = slot.shape
        mine = wrong, own
        for problem, known in self._comm.gather_objects(mine) if state.flat.layout.ranks > 1 else [mine]:
            if problem is not None:
                raise WherryError(problem)
            shape = shape if known is None else known
        return part, shape

    def set_local(self, name: str, kind: str, value: torch.Tensor) -> None:
        """Write this rank's part. Every rank must call it, with its own."""
        start, stop = self.local_range(name)
        wrong = self._unlike(name, kind, value)
        if wrong is not None:
            raise WherryError(f"{name}: {wrong}")
        if kind == MASTER:
            state, slot = self._place(name)
            whole = torch.zeros(slot.numel, dtype=torch.float32, device=state.flat.whole.device)
            whole[start:stop].copy_(value.flatten())
            if state.flat.layout.ranks > 1:
                self._comm.meet("states.set_local()")
                self._comm.all_reduce(whole).wait()
            self._write(name, kind, whole.view(slot.shape))
            return
        with self._part(name, kind, write=True) as part:
            part.copy_(value.reshape(part.shape))

    def set_full(self, name: str, kind: str, value: torch.Tensor) -> None:
        """Write the whole; the working weights follow the master.

        Every rank must call it, with the same value: each writes the part that it updates, and nobody compares them.
        """
        self._place(name)
        self._everybody.meet("states.set_full()")
        shape = self._agreed(name, kind)[1]
        if tuple(value.shape) != shape:
            raise WherryError(f"{name}: expected {kind} of shape {shape}, got {tuple(value.shape)}")
        self._write(name, kind, value)

    def _write(self, name: str, kind: str, value: torch.Tensor) -> None:
        state, slot = self._place(name)
        if kind == MASTER:
            with self._access.gathered([state.flat], None), torch.no_grad():
                state.flat.parameters[state.flat.layout.slots.index(slot)].data.copy_(value)
        start = self.local_range(name)[0]
        with self._part(name, kind, write=True) as part:
            part.copy_(value.flatten()[start : start + part.numel()].view(part.shape))

    # What this rank has of all of them, as `optimizer.state_dict()` has it.

    def parts(self, names: Sequence[str], *, copy: bool = True) -> list[dict[str, Any]]:
        """Of each parameter the step count, the moments, and an fp32 master where the weights are not in fp32.

        Frozen ones have nothing. Without `copy` moments are the memory where they rest, and there are no masters.
        """
        found: dict[str, dict[str, Any]] = {}
        places = [self._place(name) for name in names if self.updates(name)]
        for state, slot in places:
            if state.bucket.on_disk:
                raise WherryError(
                    "optimizer.state_dict: this state rests on disk, and would be in memory as a whole; "
                    "engine.save_checkpoint(folder) writes it, and engine.load_checkpoint takes it back"
                )
            found[slot.name] = {"step": torch.tensor(float(state.steps[state.flat.layout.slots.index(slot)]))}
        for state in dict.fromkeys(state for state, _ in places):
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
                        if kind == MASTER and (state.flat.dtype == torch.float32 or not copy):
                            continue
                        if slot.name in found:
                            shown = value.detach().clone() if copy else value.detach()
                            whole = shown.dim() and own_shape(value, span.stop - span.start) is None
                            found[slot.name][kind] = shown.view(shape) if whole else shown
            for span, objects in zip(state.segments, state.objects(), strict=True):
                if (name := state.flat.layout.slots[span.slot].name) in found:
                    found[name].update(deepcopy(objects) if copy else objects)
        return [found.get(name, {}) for name in names]

    def load_parts(self, given: Mapping[str, Mapping[str, Any]]) -> None:
        """Take back what `parts` gave, by name. Nothing is changed unless all of it fits. Every rank must call it."""
        self._everybody.meet("optimizer.load_state_dict()")
        if not any(given.values()) and any(any(state.steps) for state in self._state_of.values()):
            warn("optimizer.load_state_dict: it holds no state: moments and step counts begin anew")
        given = {name: part for name, part in given.items() if part or self.updates(name)}
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
            for number, span in enumerate(state.segments):
                part = given.get(names[span.slot], {})
                state.load_objects(number, {k: v for k, v in part.items() if not isinstance(v, torch.Tensor)})
            if state.flat.resident and state.flat.layout.ranks > 1:
                self._comm.all_gather(state.flat.whole, state.flat.shard_memory).wait()

    def _problems(self, name: str, part: Mapping[str, Any]) -> Iterator[str]:
        """Why a part cannot be loaded. One of nothing is a parameter that has had no update."""
        kept, rule = self._kept(name).keys(), self._place(name)[0].rule
        for kind, value in part.items():
            tensor = isinstance(value, torch.Tensor)
            wrong = self._unlike(name, kind, value) if tensor and value.dim() else None
            if kind == "step" and not tensor and not isinstance(value, int | float):
                wrong = f"expected a number of steps, got {type(value).__name__}"
            elif kind != "step" and not tensor and (kind in kept or not rule.keeps_objects):
                wrong = f"expected {kind} to be a tensor, got {type(value).__name__}"
            if wrong is not None:
                yield f"{name}: {wrong}"
        if part and kept and not rule.keeps_state and kept != part.keys() - {"step", MASTER}:
            yield f"{name}: expected {', '.join(sorted(kept))}, got {', '.join(sorted(part))}"

    def _kept(self, name: str) -> dict[str, Shape | None]:
        """What this rank keeps of a parameter beside its master: with a shape where that is not the parameter's."""
        state, slot = self._place(name)
        for span, fields in zip(state.segments, kept_fields(state, self._groups), strict=True):
            if state.flat.layout.slots[span.slot] is slot:
                return {field.name: field.shape for field in fields}
        return {}

    def _unlike(self, name: str, kind: str, value: torch.Tensor) -> str | None:
        """Why a value cannot be this rank's part of a state."""
        rule, (start, stop) = self._place(name)[0].rule, self.local_range(name)
        kept, got = self._kept(name), tuple(value.shape)
        own = kept.get(kind)
        if own is not None:
            return None if got == own else f"expected {kind} of shape {own}, got {got}"
        # Of one of torch's that keeps its state itself and has made none, the shapes are not known.
        unknown = kind not in kept and kind != MASTER and rule.keeps_state and rule.whole
        if value.numel() == stop - start or (unknown and stop > start):
            return None
        return f"expected {kind} of {stop - start} elements, which this rank has of it, got {got}"

    def _load_part(
        self, state: FlatState, span: SegmentSpan, values: dict[str, State], part: Mapping[str, Any]
    ) -> None:
        group = self._groups[span.group]
        for kind in [kind for kind in values if kind != MASTER and kind not in part]:
            state.begin_again(group, values, kind)
        for kind, value in part.items():
            target = values.get(kind)
            if kind == "step" or not isinstance(value, torch.Tensor):
                continue
            if isinstance(target, torch.Tensor) and value.dim():
                target.copy_(value.reshape(target.shape))
            elif value.dim():  # an optimizer of torch's makes its state at its first step: this is it
                alike = value.numel() == span.stop - span.start
                values[kind] = (value.flatten() if alike else value).to(values[MASTER].device, copy=True)  # type: ignore[union-attr]
            else:
                values[kind] = value.clone()

    # The gradient of the window, from its boundary's backward until the next window's first.

    def gradient(self, name: str) -> torch.Tensor:
        """The whole mean gradient, in fp32; a copy. Every rank must call it."""
        gradient, index = self._gradient(name)
        layout, device = gradient.flat.layout, gradient.flat.whole.device
        slot = layout.slots[index]
        cut = slot.part is not None and slot.part.global_shape is not None and slot.part.offsets is not None
        for comm in (*((self._comm,) if layout.ranks > 1 else ()), *((self._tensor,) if cut else ())):
            comm.meet("gradients()")
        if layout.ranks == 1:
            local = gradient.part(index).to(device)
        else:
            gradient.landing.wait()
            owned = gradient.owned.to(device)
            whole = torch.empty(layout.numel, dtype=owned.dtype, device=device)
            self._comm.all_gather(whole, owned.contiguous()).wait()
            local = whole[slot.start : slot.stop]
        local = local.view(slot.shape)
        return (self._join(local, slot) if cut else local).float() * self._gradients.scale

    # And of the micro-batches that have run, before the boundary too. Where gradients are replicated, what is summed
    # until then is of this rank's own.

    def gradient_so_far(self, name: str) -> torch.Tensor | None:
        """As `gradient`; None before the window's first micro-batch."""
        gradient, index = self._so_far(name)
        if gradient is None or self._gradients.complete:
            return self.gradient(name) if gradient is not None else None
        layout, device = gradient.flat.layout, gradient.flat.whole.device
        slot = layout.slots[index]
        if not (gradient.partitioned or gradient.reduced):
            whole = gradient.accumulated
        else:
            gradient.landing.wait()
            whole = gradient.own_so_far.to(device)
            if layout.ranks > 1:
                self._comm.meet("gradients()")
                own, whole = whole, torch.empty(layout.numel, dtype=whole.dtype, device=device)
                self._comm.all_gather(whole, own.contiguous()).wait()
        return whole[slot.start : slot.stop].view(slot.shape).float() * self._scale_so_far(gradient)

    def local_gradient_so_far(self, name: str) -> torch.Tensor | None:
        """As `local_gradient`; None before the window's first micro-batch."""
        gradient, index = self._so_far(name)
        if gradient is None or self._gradients.complete:
            return self.local_gradient(name) if gradient is not None else None
        return gradient.part_so_far(index).to(torch.float32, copy=True) * self._scale_so_far(gradient)

    def set_gradient_so_far(self, name: str, value: torch.Tensor) -> None:
        """As `set_gradient`; what comes after is added."""
        gradient, index = self._so_far(name)
        if gradient is None or self._gradients.complete:
            self.set_gradient(name, value)
            return
        slot, value = gradient.flat.layout.slots[index], value.flatten().float() / self._scale_so_far(gradient)
        if gradient.partitioned or gradient.reduced:
            start, stop = self.local_range(name)
            gradient.part_so_far(index).copy_(value[start:stop])
        else:
            gradient.accumulated[slot.start : slot.stop].copy_(value)
        gradient.sum_squares = None

    def _scale_so_far(self, gradient: FlatGradient) -> float:
        summed = gradient.partitioned or gradient.reduced
        return self._gradients.scale if summed else self._gradients.own_scale

    def _so_far(self, name: str) -> tuple[FlatGradient | None, int]:
        """The gradient that a window under way has of a parameter; None where it has none."""
        flat, index = self._places.get(name, (None, 0))
        gradient = self._gradients.of(flat) if flat is not None else None
        return (None if gradient is None or gradient.fresh or gradient.brief else gradient), index

    def _join(self, local: torch.Tensor, slot: Slot) -> torch.Tensor:
        """The logical gradient, from the parts of all tensor-parallel ranks."""
        assert slot.part is not None and slot.part.global_shape is not None
        joined = local.new_empty(slot.part.global_shape)
        for offsets, part in self._tensor.gather_objects((slot.part.offsets, local.cpu())):
            joined[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part.to(local.device)
        return joined

    def local_gradient(self, name: str) -> torch.Tensor:
        """This rank's part of the window's mean gradient, flat, in fp32; a copy."""
        gradient, index = self._gradient(name)
        return gradient.part(index).to(torch.float32, copy=True) * self._gradients.scale

    def set_gradient(self, name: str, value: torch.Tensor) -> None:
        """Replace the window's mean gradient, between the boundary's backward and the step.

        Every rank must call it, with the same value: each writes the part that it updates, and nobody compares them.
        """
        self._everybody.meet("states.set_gradient()")
        self.set_gradient_here(name, value)

    def set_gradient_here(self, name: str, value: torch.Tensor) -> None:
        """As `set_gradient`, of this rank's part alone; the rest of `value` is not looked at."""
        gradient, index = self._gradient(name)
        gradient.replace(index, value.float() / self._gradients.scale)

    def _gradient(self, name: str) -> tuple[FlatGradient, int]:
        """Every rank finds the same here: they meet where they have found one."""
        flat, index = self._places.get(name, (None, 0))
        gradient = self._gradients.of(flat) if flat is not None else None
        if gradient is None:
            trained = [slot.name for gradient in self._gradients.all for slot in gradient.flat.layout.slots]
            close = difflib.get_close_matches(name, trained, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise WherryError(f"gradients: no trainable parameter is named {name!r}{hint}")
        if not self._gradients.complete:
            raise WherryError(
                f"gradients: there is none of {name} now; they are complete from the backward of a window's last "
                "micro-batch until the first one of the next window, unless zero_grad() or an error drops them"
            )
        if gradient.brief:
            raise gradient.gone()
        return gradient, index

    def updates(self, name: str) -> bool:
        """Whether the optimizer has state for a parameter."""
        if name not in self._places:
            return False
        flat, index = self._places[name]
        return flat in self._state_of and flat.layout.slots[index].group < len(self._groups)

    def _place(self, name: str) -> tuple[FlatState, Slot]:
        if not self.updates(name):
            raise WherryError(f"{name}: the optimizer does not update a parameter of this name")
        flat, index = self._places[name]
        return self._state_of[flat], flat.layout.slots[index]

    @contextmanager
    def _part(self, name: str, kind: str, *, write: bool) -> Iterator[torch.Tensor]:
        state, slot = self._place(name)
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
                own = own_shape(tensor, segment.stop - segment.start) is not None
                yield tensor if own else tensor[in_shard - segment.start : in_shard - segment.start + last - first]
                return
        raise AssertionError(f"{name} has no segment on rank {state.flat.rank}")
