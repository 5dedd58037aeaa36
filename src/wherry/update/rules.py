"""How segments are updated: by the native kernels on the host, by torch's optimizers elsewhere."""

from __future__ import annotations

import copy
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from wherry import native
from wherry.fake import address_of, is_fake
from wherry.tickets import DONE, Ticket
from wherry.update.record import Field, State

Group = Mapping[str, Any]
Groups = Sequence[Group]
Shape = tuple[int, ...]
# Elements that are in fp32 at once, where weights of 16 bits have no masters: some megabytes, which caches hold.
IN_FP32 = 1 << 18
# A count of steps that is one after itself, as fp32 has it, and at which Adam's corrections are 1.
UNCORRECTED = 1e12
# Moments that have no sign.
UNSIGNED = ("exp_avg_sq", "sum")
# Whose fused kernels all releases of torch have on a GPU: Adagrad's is on the CPU alone before 2.12, and refuses GPUs.
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


@dataclass(slots=True)
class UpdateSegment(native.Segment):
    """What a shard has of one parameter, and its tensors where the update finds them, on whatever device."""

    group: int = 0
    # That of the parameter, where the shard has all of it.
    shape: tuple[int, ...] | None = None
    # Where its update is made on the device and its state is not there, which of its tensors are.
    on_device: tuple[str, ...] = ()

    @property
    def whole_master(self) -> torch.Tensor:
        weights = self.working if self.master is None else self.master
        assert weights is not None
        return weights

    @property
    def is_half(self) -> bool:
        """Whether weights of 16 bits have no master."""
        return self.low is None and self.whole_master.dtype.itemsize < torch.float32.itemsize


def snapshot(groups: Groups) -> list[dict[str, Any]]:
    """The options as they are now: a schedule may change them while an update runs."""
    options = []
    for group in groups:
        copy = {key: value for key, value in group.items() if key != "params"}
        copy.update({k: float(v) for k, v in copy.items() if isinstance(v, torch.Tensor) and v.numel() == 1})
        options.append(copy)
    return options


class UpdateRule:
    """The update of a few segments."""

    # Whether a bf16 working weight may be the upper half of its master.
    splits = False

    # Whether state is not in records, so that it can rest in memory alone.
    keeps_state = False
    # Whether it is to be told the shape of parameters that the shard has all of.
    whole = False
    # Whether it may keep of a parameter what is no tensor: numbers, or lists of tensors.
    keeps_objects = False

    def fields(self, group: Group, shape: Shape, dtype: torch.dtype) -> list[Field]:
        """What it keeps for a segment, apart from weights; empty where it keeps its state itself.

        `shape` is the parameter's, or of elements of one; `dtype` that of what is updated.
        """
        return []

    def cuts(self, group: Group) -> bool:
        """Whether a part of a segment may be updated by itself."""
        return False

    def begin(self, group: Group, state: dict[str, State]) -> None:
        """Give new state, which is zeros, its first values."""

    def update(
        self, segments: Sequence[UpdateSegment], steps: Sequence[int], groups: Groups, multiplier: float
    ) -> Ticket:
        """Apply the gradients times `multiplier`, and write the new working weights.

        `steps` number the update for each segment, from 1. Segments without a gradient are left alone.
        """
        raise TypeError(f"{type(self).__name__} is no rule; use NativeRule or TorchRule")

    def forget(self) -> None:
        """Let go of memory that it knows from updates before. The next update says where everything is."""

    def kept(self) -> list[dict[str, torch.Tensor]]:
        """The state that it keeps itself, by segment; empty where that is none."""
        return []

    def load_kept(
        self, segments: Sequence[UpdateSegment], steps: Sequence[int], kept: Sequence[Mapping[str, State]]
    ) -> None:
        """Replace the state that it keeps itself, of segments that have been updated so often."""

    def objects(self) -> list[dict[str, Any]]:
        """What it keeps of each segment that is no tensor; empty where that is none."""
        return []

    def load_objects(self, number: int, step: int, objects: Mapping[str, Any]) -> None:
        """Replace that of one segment, which has been updated so often, and whose tensors have been loaded."""

    def nbytes(self) -> int:
        """Of the state that it keeps itself."""
        return 0


@dataclass(frozen=True)
class NativeFamily:
    """A rule that the native kernels have, and the names that torch.optim gives its state."""

    rule: type[native.Formula]
    state_names: tuple[str, ...]
    initial: Callable[[Group], float] = lambda group: 0.0

    def names(self, group: Group) -> tuple[str, ...]:
        return () if self.rule is native.SGD and not group["momentum"] else self.state_names


ADAM = NativeFamily(native.Adam, ("exp_avg", "exp_avg_sq"))
_ADAGRAD = NativeFamily(native.Adagrad, ("sum",), lambda group: group.get("initial_accumulator_value", 0.0))
_LION = NativeFamily(native.Lion, ("exp_avg",))
# By the class of the optimizer.
NATIVE_FAMILIES: dict[str, NativeFamily] = {
    "Adam": ADAM,
    "AdamW": ADAM,
    "CPUAdam": ADAM,
    "Adagrad": _ADAGRAD,
    "CPUAdagrad": _ADAGRAD,
    "Lion": _LION,
    "CPULion": _LION,
    "SGD": NativeFamily(native.SGD, ("momentum_buffer",)),
}


class NativeRule(UpdateRule):
    """One pass on the library's own threads: unscale, clip, decay, update, cast."""

    splits = True

    def __init__(self, family: NativeFamily, state_dtype: str = "fp32", pool: native.Pool | None = None) -> None:
        self.family = family
        self.state_dtype = state_dtype
        self.pool = pool
        # Where weights and state stay in memory, every step brings the same lists of segments, until `forget`.
        self._packed: dict[int, tuple[Sequence[UpdateSegment], native.PackedSegments]] = {}

    def fields(self, group: Group, shape: Shape, dtype: torch.dtype) -> list[Field]:
        fields, numel = [], math.prod(shape)
        for name in self.family.names(group):
            dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}[self.state_dtype]
            coded = dtype is torch.int8
            fields.append(Field(name, torch.uint8 if coded and name in UNSIGNED else dtype, numel, coded))
        return fields

    def cuts(self, group: Group) -> bool:
        return True

    def begin(self, group: Group, state: dict[str, State]) -> None:
        first = self.family.initial(group)
        if not first:
            return
        for value in state.values():
            if isinstance(value, native.Blocks8):
                native.quantize(torch.full((value.numel(),), first), value)
            else:
                value.fill_(first)

    def update(
        self, segments: Sequence[UpdateSegment], steps: Sequence[int], groups: Groups, multiplier: float
    ) -> Ticket:
        rules: dict[tuple[int, int], native.Formula] = {}
        present: list[UpdateSegment] = []
        chosen: list[native.Formula] = []
        for segment, step in zip(segments, steps, strict=True):
            if segment.grad is None:
                continue
            rule = rules.get((segment.group, step))
            if rule is None:
                rule = rules[segment.group, step] = self.family.rule.of(groups[segment.group], step)
            present.append(segment)
            chosen.append(rule)
        if not present:
            return DONE
        if is_fake(present[0].whole_master):
            return DONE
        if present[0].is_half:
            for segment, formula in zip(present, chosen, strict=True):
                self._update_half(segment, formula, multiplier)
            return DONE
        if not present[0].whole_master.is_cpu:
            native.update_on_device(present, chosen, multiplier)
            return DONE
        if len(present) < len(segments):
            return native.PackedSegments(present).submit(chosen, multiplier, self.pool)
        if id(segments) not in self._packed:
            self._packed[id(segments)] = segments, native.PackedSegments(segments)
        return self._packed[id(segments)][1].submit(chosen, multiplier, self.pool)

    def _update_half(self, segment: UpdateSegment, formula: native.Formula, multiplier: float) -> None:
        """In fp32, by gradients of the type of the weights, and rounded to the nearest."""
        for first in range(0, segment.numel, IN_FP32):
            part = segment.cut(first, min(first + IN_FP32, segment.numel))
            assert part.grad is not None and part.working is not None
            grad = part.grad.to(part.working.dtype) * multiplier
            state = tuple(kept.float() if isinstance(kept, torch.Tensor) else kept for kept in part.state)
            wide = replace(part, grad=grad, working=part.working.float(), state=state)
            if wide.whole_master.is_cpu:
                native.PackedSegments([wide]).run(formula, pool=self.pool)
            else:
                native.update_on_device([wide], [formula], 1.0)
            part.working.copy_(wide.whole_master)
            for kept, new in zip(part.state, state, strict=True):
                if isinstance(kept, torch.Tensor) and kept is not new:
                    kept.copy_(new)  # type: ignore[arg-type]

    def forget(self) -> None:
        self._packed.clear()


class TorchRule(UpdateRule):
    """Any torch optimizer, run on the segments as if they were its parameters; it keeps its state itself."""

    keeps_state = True

    def __init__(
        self, instance: torch.optim.Optimizer, optimizer_class: type[torch.optim.Optimizer], *, whole: bool = False
    ) -> None:
        self.instance = instance
        self.whole = whole
        self.optimizer_class = optimizer_class
        self.keeps_objects = not optimizer_class.__module__.startswith("torch.optim.")
        self.groups: Groups = instance.param_groups
        self.defaults = {k: v for k, v in instance.defaults.items() if k in _constructoroptions_of(optimizer_class)}
        self._inner: torch.optim.Optimizer | None = None
        # True if its constructor makes state, as Adagrad's does before torch 2.13.
        self._makes_state = False
        self._parameters: list[nn.Parameter] = []
        # The groups that its segments are of.
        self._used: list[int] = []

    def _bind(self, segments: Sequence[UpdateSegment]) -> torch.optim.Optimizer:
        if self._inner is None:
            self._parameters = [nn.Parameter(shown(segment), requires_grad=True) for segment in segments]
            members: dict[int, list[nn.Parameter]] = {}
            for segment, parameter in zip(segments, self._parameters, strict=True):
                members.setdefault(segment.group, []).append(parameter)
            fused = {"fused": True} if self._fuses() else {}
            groups = [
                {**options_of(self.groups[group]), **fused, "params": params} for group, params in members.items()
            ]
            if self.whole:
                self._inner = like(self.optimizer_class, groups, vars(self.instance))
            else:
                self._inner = self.optimizer_class(groups, **self.defaults)
                self._makes_state = bool(self._inner.state)
            self._used = list(members)
            for parameter, corrected in zip(self._parameters, self._corrected(segments), strict=True):
                if not corrected:
                    self._begin_again(parameter, corrected)
        for segment, parameter in zip(segments, self._parameters, strict=True):
            if address_of(parameter) != address_of(segment.whole_master):  # weights that rest on disk, or were moved
                parameter.data = shown(segment)
        return self._inner

    def _corrected(self, segments: Sequence[UpdateSegment]) -> list[bool]:
        """Of each segment, whether its moments are corrected for their start at zero: torch's Adam always does that."""
        can = self.optimizer_class in (torch.optim.Adam, torch.optim.AdamW)
        return [not can or self.groups[segment.group].get("bias_correction", True) for segment in segments]

    def _begin_again(self, parameter: nn.Parameter, corrected: bool) -> None:
        """Let a parameter have had no update."""
        assert self._inner is not None
        self._inner.state.pop(parameter, None)
        if self._makes_state:
            group = next(one for one in self._inner.param_groups if any(p is parameter for p in one["params"]))
            self._inner.state.update(self.optimizer_class([{**group, "params": [parameter]}], **self.defaults).state)
        if not corrected:
            amsgrad = any(options["amsgrad"] for options in self._inner.param_groups)
            names = (*ADAM.state_names, "max_exp_avg_sq") if amsgrad else ADAM.state_names
            moments = {name: torch.zeros_like(parameter) for name in names}
            self._inner.state[parameter].update({**moments, "step": self._step(parameter, UNCORRECTED)})

    def _step(self, parameter: nn.Parameter, count: float) -> torch.Tensor:
        assert self._inner is not None
        # The fused and capturable kernels read it on the device.
        on_device = any(options.get("fused") or options.get("capturable") for options in self._inner.param_groups)
        return torch.tensor(count, dtype=torch.float32, device=parameter.device if on_device else None)

    def _fuses(self) -> bool:
        """Whether one kernel on the device can do it all, and the user has not chosen otherwise."""
        chosen = self.defaults.get("fused") is not None or self.defaults.get("foreach") is not None
        on_device = all(p.device.type != "cpu" or is_fake(p) for p in self._parameters)
        return issubclass(self.optimizer_class, FUSED) and not chosen and on_device

    def update(
        self, segments: Sequence[UpdateSegment], steps: Sequence[int], groups: Groups, multiplier: float
    ) -> Ticket:
        inner = self._bind(segments)
        for number, options in zip(self._used, inner.param_groups, strict=True):
            fused = options.get("fused")
            options.update(options_of(groups[number]))
            if "fused" in options:
                options["fused"] = fused
        # Without a gradient, torch's optimizers leave a parameter alone too, and count no step.
        present = [one for one in zip(segments, self._parameters, strict=True) if one[0].grad is not None]
        for (_, parameter), grad in zip(present, scaled(present, multiplier), strict=True):
            parameter.grad = grad.view(parameter.shape)
        inner.step()
        round_weights(present)
        return DONE

    def kept(self) -> list[dict[str, torch.Tensor]]:
        if self._inner is None:
            return []
        states = [self._inner.state[parameter] for parameter in self._parameters]
        return [
            {
                name: value.reshape(-1) if value.shape == parameter.shape else value
                for name, value in state.items()
                if isinstance(value, torch.Tensor) and name != "step"
            }
            for state, parameter in zip(states, self._parameters, strict=True)
        ]

    def load_kept(
        self, segments: Sequence[UpdateSegment], steps: Sequence[int], kept: Sequence[Mapping[str, State]]
    ) -> None:
        if not segments:  # a rank of padding alone; torch's optimizers refuse to have no parameters
            return
        inner = self._bind(segments)
        for parameter, count, corrected, values in zip(
            self._parameters, steps, self._corrected(segments), kept, strict=True
        ):
            # Zeros before the first update are none: SGD's first has no dampening, which a buffer would bring.
            if values and (count or any(bool(data_of(value).any()) for value in values.values())):
                step = self._step(parameter, count if corrected else UNCORRECTED)
                had = inner.state[parameter]
                states = {name: _as(data_of(value), had.get(name), parameter.shape) for name, value in values.items()}
                inner.state[parameter].update({**states, "step": step})
            else:
                objects = _no_tensors(inner.state[parameter])
                self._begin_again(parameter, corrected)
                if count and objects:
                    inner.state[parameter].update({"step": self._step(parameter, count), **objects})

    def objects(self) -> list[dict[str, Any]]:
        if self._inner is None or not self.keeps_objects:
            return []
        return [_no_tensors(self._inner.state[parameter]) for parameter in self._parameters]

    def load_objects(self, number: int, step: int, objects: Mapping[str, Any]) -> None:
        if not self.keeps_objects or not step:
            return
        assert self._inner is not None
        parameter = self._parameters[number]
        state = self._inner.state[parameter]
        for name in _no_tensors(state):
            del state[name]
        if objects:
            own = copy.deepcopy(dict(objects))
            there = tree_map_only(torch.Tensor, lambda value: value.to(parameter.device), own)
            state.update({"step": self._step(parameter, step), **there})

    def nbytes(self) -> int:
        if self._inner is None:
            return 0
        states = (self._inner.state[p] for p in self._parameters)
        found = (value for state in states for value in tree_leaves(dict(state)))
        return sum(value.nbytes for value in found if isinstance(value, torch.Tensor) and value.dim())


def like(
    optimizer_class: type[torch.optim.Optimizer], groups: list[dict[str, Any]], more: Mapping[str, Any] | None = None
) -> torch.optim.Optimizer:
    """One of the class with these groups and no state, and with all else that an instance has: as it is unpickled."""
    inner = optimizer_class.__new__(optimizer_class)
    own = ("param_groups", "state", "step")  # a schedule has wrapped the instance's `step`
    kept = {name: value for name, value in (more or {}).items() if "hooks" not in name and name not in own}
    # A count of steps, say, is each one's: parameters alone are not copied.
    same = {id(p): p for group in (more or {}).get("param_groups", ()) for p in group["params"]}
    kept = copy.deepcopy(kept, same)
    # A constructor sets the last, without which torch looks for "capturable" in groups on CUDA: Adafactor's have none.
    fresh = {"state": defaultdict(dict), "_warned_capturable_if_run_uncaptured": True}
    inner.__setstate__({"defaults": {}, **kept, "param_groups": groups, **fresh})
    return inner


def shown(segment: UpdateSegment) -> torch.Tensor:
    """What is updated, as an optimizer of torch's is to see it."""
    weights = segment.whole_master
    return weights if segment.shape is None else weights.view(segment.shape)


def _no_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}


def _as(value: torch.Tensor, had: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    """A state as the one before, if there was one; else in the parameter's shape if it has as many elements."""
    if had is not None and had.numel() == value.numel():
        return value.view(had.shape)
    return value.view(shape) if value.dim() == 1 and value.numel() == shape.numel() else value


def round_weights(present: Sequence[tuple[UpdateSegment, nn.Parameter]]) -> None:
    """An optimizer has updated masters: the working weights follow."""
    for _, parameter in present:
        parameter.grad = None
    cast = [(s.working, s.master) for s, _ in present if s.working is not None and s.master is not None]
    if cast:
        torch._foreach_copy_([working for working, _ in cast], [master for _, master in cast])


def scaled(present: Sequence[tuple[UpdateSegment, nn.Parameter]], multiplier: float) -> list[torch.Tensor]:
    """Gradients times `multiplier` in the dtype of the master, by one pass over each; themselves if they are that."""
    # Without masters gradients, too, are of the type of the weights.
    half = bool(present) and present[0][0].is_half
    grads = [s.grad.to(p.dtype) if half else s.grad for s, p in present if s.grad is not None]
    if all(grad.dtype == parameter.dtype for grad, (_, parameter) in zip(grads, present, strict=True)):
        return grads if multiplier == 1.0 or not grads else list(torch._foreach_mul(grads, multiplier))
    # Neither is a number beside tensors: the product is in the wider dtype of the two, and rounded once.
    factor = torch.full((1,), multiplier, dtype=present[0][1].dtype, device=grads[0].device)
    return [grad * factor for grad in grads]


def data_of(value: State) -> torch.Tensor:
    return value.codes if isinstance(value, native.Blocks8) else value


def options_of(group: Group) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "initial_lr", "param_names")}


def _constructoroptions_of(optimizer_class: type[torch.optim.Optimizer]) -> set[str]:
    return set(inspect.signature(optimizer_class.__init__).parameters) - {"self", "params"}
