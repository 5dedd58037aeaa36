"""How one flat's owned part is updated: by the native kernels on the host, by torch's optimizers elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from wherry import native
from wherry.fake import address_of
from wherry.tiers.tickets import DONE, Ticket

Group = Mapping[str, Any]


@dataclass
class Segment:
    """A stretch of a shard with one set of hyper-parameters.

    `master` is what the rule updates, in fp32. Where the working weights are fp32 themselves it is the same memory.
    """

    group: int
    start: int
    stop: int
    master: torch.Tensor
    working: torch.Tensor
    grad: torch.Tensor
    state: dict[str, torch.Tensor | native.Blocks8] = field(default_factory=dict)
    # Where the segment begins in its flat.
    first: int = 0

    @property
    def in_place(self) -> bool:
        return address_of(self.master) == address_of(self.working)


class Rule(Protocol):
    """One flat's update."""

    def update(self, groups: list[dict[str, Any]], multiplier: float) -> Ticket:
        """Apply the gradients times `multiplier`, and write the new working weights."""

    def steps(self) -> int:
        """Updates made so far."""

    def load_steps(self, steps: int) -> None: ...


RuleFactory = Callable[[list[Segment]], Rule]


# Native: option names as torch.optim has them, in a group -> a native rule.


def _adam(group: Group, step: int) -> Any:
    beta1, beta2 = group["betas"]
    return native.Adam(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group.get("decoupled_weight_decay", False),
        step=step,
        maximize=group.get("maximize", False),
        bias_correction=group.get("bias_correction", True),
    )


def _adagrad(group: Group, step: int) -> Any:
    return native.Adagrad(
        lr=float(group["lr"]),
        lr_decay=group["lr_decay"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        step=step,
        maximize=group.get("maximize", False),
    )


def _lion(group: Group, step: int) -> Any:
    beta1, beta2 = group["betas"]
    return native.Lion(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        weight_decay=group["weight_decay"],
        step=step,
        maximize=group.get("maximize", False),
    )


def _sgd(group: Group, step: int) -> Any:
    return native.SGD(
        lr=float(group["lr"]),
        momentum=group["momentum"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        weight_decay=group["weight_decay"],
        first=step == 1,
        maximize=group.get("maximize", False),
    )


@dataclass(frozen=True)
class NativeFamily:
    """A rule that the native kernels have, and the names that torch.optim gives its state."""

    make: Callable[[Group, int], Any]
    state_names: tuple[str, ...]
    initial: Callable[[Group], float] = lambda group: 0.0

    def names(self, group: Group) -> tuple[str, ...]:
        return () if self.make is _sgd and not group["momentum"] else self.state_names


NATIVE_FAMILIES: dict[str, NativeFamily] = {
    "adam": NativeFamily(_adam, ("exp_avg", "exp_avg_sq")),
    "adagrad": NativeFamily(_adagrad, ("sum",), lambda group: group.get("initial_accumulator_value", 0.0)),
    "lion": NativeFamily(_lion, ("exp_avg",)),
    "sgd": NativeFamily(_sgd, ("momentum_buffer",)),
}


UNSIGNED = ("exp_avg_sq", "sum")


def _new_state(numel: int, initial: float, unsigned: bool, dtype: str) -> torch.Tensor | native.Blocks8:
    if dtype != "int8":
        return torch.full((numel,), initial, dtype=torch.float32 if dtype == "fp32" else torch.bfloat16)
    codes = native.Blocks8.zeros(numel, signed=not unsigned)
    if initial:
        native.quantize(torch.full((numel,), initial), codes)
    return codes


class NativeRule:
    """One pass on the library's own threads: unscale, clip, decay, update, cast."""

    def __init__(
        self, family: NativeFamily, segments: list[Segment], groups: list[dict[str, Any]], state_dtype: str = "fp32"
    ) -> None:
        self.family = family
        self.segments = segments
        for segment in segments:
            group = groups[segment.group]
            segment.state = {
                name: _new_state(segment.master.numel(), family.initial(group), name in UNSIGNED, state_dtype)
                for name in family.names(group)
            }
        self._steps = 0
        self._plan = native.Plan(
            [
                native.Segment(
                    grad=segment.grad,
                    working=segment.working,
                    master=None if segment.in_place else segment.master,
                    state=tuple(segment.state.values()),
                    # The draws of stochastic rounding follow the element, however the flat is cut.
                    start=segment.first,
                )
                for segment in segments
            ]
        )

    def update(self, groups: list[dict[str, Any]], multiplier: float) -> Ticket:
        self._steps += 1
        rules = [self.family.make(groups[segment.group], self._steps) for segment in self.segments]
        return self._plan.submit(rules, multiplier)

    def steps(self) -> int:
        return self._steps

    def load_steps(self, steps: int) -> None:
        self._steps = steps


class TorchRule:
    """Any element-wise torch optimizer, run on the segments as if they were its parameters."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: dict[str, Any],
        segments: list[Segment],
        groups: list[dict[str, Any]],
    ) -> None:
        self.segments = segments
        self._parameters = [nn.Parameter(segment.master, requires_grad=True) for segment in segments]
        inner_groups = [
            {**_options(groups[segment.group]), "params": [parameter]}
            for segment, parameter in zip(segments, self._parameters, strict=True)
        ]
        accepted = {key: value for key, value in defaults.items() if key in _constructor_options(optimizer_class)}
        self._inner = optimizer_class(inner_groups, **accepted)
        self._steps = 0

    def update(self, groups: list[dict[str, Any]], multiplier: float) -> Ticket:
        self._steps += 1
        for segment, parameter, inner in zip(self.segments, self._parameters, self._inner.param_groups, strict=True):
            inner.update(_options(groups[segment.group]))
            parameter.grad = segment.grad.to(segment.master.dtype, copy=True).mul_(multiplier)
        self._inner.step()
        for segment, parameter in zip(self.segments, self._parameters, strict=True):
            parameter.grad = None
            if not segment.in_place:
                segment.working.copy_(segment.master)
            segment.state = {
                name: value
                for name, value in self._inner.state[parameter].items()
                if isinstance(value, torch.Tensor) and name != "step" and value.shape in ((), segment.master.shape)
            }
        return DONE

    def steps(self) -> int:
        return self._steps

    def load_steps(self, steps: int) -> None:
        self._steps = steps
        for segment, parameter in zip(self.segments, self._parameters, strict=True):
            if segment.state:
                self._inner.state[parameter].update({**segment.state, "step": torch.tensor(float(steps))})


def _options(group: Group) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "initial_lr", "param_names")}


def _constructor_options(optimizer_class: type[torch.optim.Optimizer]) -> set[str]:
    import inspect

    return set(inspect.signature(optimizer_class.__init__).parameters) - {"self", "params"}
