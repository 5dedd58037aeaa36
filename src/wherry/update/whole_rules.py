"""How optimizers that look at whole parameters update them: as they are written, with their state in records."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from wherry import native, optim
from wherry.fake import faking
from wherry.tickets import DONE, Ticket, TicketGroup
from wherry.update.record import Field
from wherry.update.rules import (
    ADAM,
    Group,
    Groups,
    NativeRule,
    Shape,
    UpdateRule,
    UpdateSegment,
    data_of,
    like,
    options_of,
    round_weights,
    scaled,
    shown,
)

# The option of a group that says whether Muon updates it, where AdamW updates the others.
BY_MUON = "use_muon"


@dataclass(frozen=True)
class KnownOptimizer:
    """A torch optimizer, and what it keeps of a parameter: the names, each with its shape, for one of a shape."""

    optimizer_class: type[torch.optim.Optimizer]
    kept: Callable[[Group, Shape], dict[str, Shape]]
    # Whether it keeps that in fp32 where weights of 16 bits have no masters.
    in_fp32: bool = False
    # Beside that, and the count of steps as it has it.
    beside: Mapping[str, Any] = field(default_factory=dict)
    counts: Callable[[int], Any] = lambda steps: torch.tensor(float(steps))


def _muon(group: Group, shape: Shape) -> dict[str, Shape]:
    return {"momentum_buffer": shape}


def _two_moments(group: Group, shape: Shape) -> dict[str, Shape]:
    return {"exp_avg": shape, "exp_avg_sq": shape}


def _adafactor(group: Group, shape: Shape) -> dict[str, Shape]:
    if len(shape) < 2:
        return {"variance": shape}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


def _adafactor_of_transformers(group: Group, shape: Shape) -> dict[str, Shape]:
    first = {"exp_avg": shape} if group["beta1"] is not None else {}
    if len(shape) < 2:
        return {**first, "exp_avg_sq": shape}
    return {**first, "exp_avg_sq_row": shape[:-1], "exp_avg_sq_col": (*shape[:-2], shape[-1])}


def is_known(instance: torch.optim.Optimizer) -> bool:
    """Whether it looks at whole parameters, and what it keeps of each is known."""
    return _is_our_muon(instance) or _known(type(instance)) is not None


def _is_our_muon(instance: torch.optim.Optimizer) -> bool:
    """Or one of ours under another name. A user's own may update in another way."""
    return isinstance(instance, optim.Muon) and type(instance).__module__.startswith("wherry.")


def _known(cls: type[torch.optim.Optimizer]) -> KnownOptimizer | None:
    if issubclass(cls, optim.Lamb) and cls.__module__.startswith("wherry."):
        return KnownOptimizer(optim.Lamb, _two_moments)
    if cls is torch.optim.Muon:
        return KnownOptimizer(cls, _muon)
    if cls is torch.optim.Adafactor:
        return KnownOptimizer(cls, _adafactor)
    if cls.__module__.startswith("transformers.") and cls.__name__ == "Adafactor":  # who has one has imported it
        return KnownOptimizer(cls, _adafactor_of_transformers, in_fp32=True, beside={"RMS": 0}, counts=int)
    return None


def whole_groups(instance: torch.optim.Optimizer) -> frozenset[int]:
    """The groups whose parameters it updates as a whole."""
    by_muon = _is_our_muon(instance)
    return frozenset(n for n, group in enumerate(instance.param_groups) if not by_muon or group[BY_MUON])


def rule_of(
    instance: torch.optim.Optimizer, state_dtype: str, *, on_host: bool, pool: native.Pool | None
) -> UpdateRule | None:
    """The rule of such an optimizer; None for any other."""
    if _is_our_muon(instance):
        beside = RecordedRule(KnownOptimizer(torch.optim.AdamW, _two_moments))
        adamw = NativeRule(ADAM, state_dtype, pool) if on_host else beside
        return GroupedRule({True: RecordedRule(KnownOptimizer(torch.optim.Muon, _muon)), False: adamw})
    found = _known(type(instance))
    return RecordedRule(found) if found is not None else None


class RecordedRule(UpdateRule):
    """A torch optimizer with its state in the record, run on whole parameters, or on runs of elements as vectors."""

    whole = True

    def __init__(self, optimizer: KnownOptimizer) -> None:
        self.optimizer = optimizer

    def fields(self, group: Group, shape: Shape, dtype: torch.dtype) -> list[Field]:
        if self.optimizer.in_fp32 and dtype.itemsize < torch.float32.itemsize:
            dtype = torch.float32
        kept = self.optimizer.kept(group, shape)
        return [Field(name, dtype, math.prod(own), shape=None if own == shape else own) for name, own in kept.items()]

    def update(
        self, segments: Sequence[UpdateSegment], steps: Sequence[int], groups: Groups, multiplier: float
    ) -> Ticket:
        counts = [step - 1 for segment, step in zip(segments, steps, strict=True) if segment.grad is not None]
        present = [(segment, nn.Parameter(shown(segment))) for segment in segments if segment.grad is not None]
        members: dict[int, list[nn.Parameter]] = {}
        for segment, parameter in present:
            members.setdefault(segment.group, []).append(parameter)
        given = [{**options_of(groups[number]), "params": params} for number, params in members.items()]
        inner = like(self.optimizer.optimizer_class, given)
        for (segment, parameter), grad, count in zip(present, scaled(present, multiplier), counts, strict=True):
            parameter.grad = grad.view(parameter.shape)
            shapes = self.optimizer.kept(groups[segment.group], tuple(parameter.shape))
            kept = {n: data_of(v).view(own) for (n, own), v in zip(shapes.items(), segment.state, strict=True)}
            inner.state[parameter] = {**kept, **self.optimizer.beside, "step": self.optimizer.counts(count)}
        with WideProducts():
            _step(inner)
        round_weights(present)
        return DONE


class WideProducts(TorchFunctionMode):
    """Products of bf16 matrices on a CPU that has no units for them are made in fp32 and rounded, as units make them.

    That is 5 to 60 times faster than torch's; one element in ten thousand is rounded otherwise.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [arg for arg in args if isinstance(arg, torch.Tensor)] if func in _PRODUCTS else []
        if not given or not all(t.is_cpu and t.dtype is torch.bfloat16 for t in given) or _has_bf16_units():
            return func(*args, **(kwargs or {}))
        wide = [arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args]
        return func(*wide, **(kwargs or {})).bfloat16()


_PRODUCTS = (torch.Tensor.__matmul__, torch.Tensor.matmul, torch.matmul, torch.addmm, torch.Tensor.addmm)


@functools.cache
def _has_bf16_units() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _step(inner: torch.optim.Optimizer) -> None:
    from torch._subclasses.fake_tensor import DataDependentOutputException

    try:
        inner.step()
    except DataDependentOutputException:
        assert faking()  # a norm that the host reads: in a dry run there is none, and the state is there


class GroupedRule(UpdateRule):
    """Muon for some groups, AdamW for the others."""

    whole = True

    def __init__(self, rules: Mapping[bool, UpdateRule]) -> None:
        self.rules = rules

    def fields(self, group: Group, shape: Shape, dtype: torch.dtype) -> list[Field]:
        return self._rule(group).fields(group, shape, dtype)

    def cuts(self, group: Group) -> bool:
        return self._rule(group).cuts(group)

    def _rule(self, group: Group) -> UpdateRule:
        return self.rules[bool(group[BY_MUON])]

    def update(
        self, segments: Sequence[UpdateSegment], steps: Sequence[int], groups: Groups, multiplier: float
    ) -> Ticket:
        tickets = []
        for by_muon, rule in self.rules.items():
            mine = [one for one in zip(segments, steps, strict=True) if bool(groups[one[0].group][BY_MUON]) is by_muon]
            if mine:
                part, counts = zip(*mine, strict=True)
                tickets.append(rule.update(part, counts, groups, multiplier))
                rule.forget()  # the next ones come in another list
        return TicketGroup(tickets)
