"""Memory over one step, by state and tier, with the units at work named: recorded while the step runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, zip_longest
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from wherry.observe.footprint import WORKING, Footprint, own_tensor
from wherry.placement import Tier, effective

# From the bottom of a picture to its top: what stays as it is, then what comes and goes.
STATES = ("optimizer", "parameters", "buffers", "other", "gradients", "gathered", WORKING)
# What a footprint calls tensors off the device, and those that the account of an engine tells of.
_ON_HOST, _COUNTED = "on the host", "counted"
# After asking for the account it is not asked for again for so many times as long, within a unit.
_PATIENCE = 5
# So many samples are written, of more the highest and the lowest of each stretch of time.
_MOST = 800


class NamedUnit(Protocol):
    """Parameters that travel together, and the modules whose forward needs them."""

    name: str
    modules: list[nn.Module]
    flats: list[Any]


@dataclass(frozen=True)
class Account:
    """What an engine knows of its memory."""

    model: nn.Module
    device: torch.device
    units: Sequence[NamedUnit]
    # Bytes of each state on each tier now, and the tensors that they lie in, by the unit whose they are.
    held: Callable[[], Mapping[tuple[str, Tier], int]]
    tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    # (state, tier, bytes expected, bytes now)
    rows: Callable[[], Iterable[tuple[str, str, int, int]]]


class Sample(NamedTuple):
    seconds: float
    phase: str
    unit: str
    # In the order of the series.
    bytes: tuple[int, ...]


class Timeline(Footprint):
    """Records from the first forward of a step to the end of its update.

    States are asked of the engine. Activations are whatever else operations make, counted by a dispatch mode that is
    entered inside forward, backward and step alone. On an accelerator "other" is what its allocator has handed out
    besides: what was there before, and what lies between tensors.
    """

    def __init__(self, account: Account) -> None:
        super().__init__()
        self.account = account
        self.gpu = account.device.type != "cpu"
        self._device, self._host = (self._place(tier) for tier in (Tier.DEVICE, Tier.HOST))
        self.series: list[tuple[str, str]] = []
        self.samples: list[Sample] = []
        self.began: float | None = None
        self.phase_now = ""
        self._unit = ""
        self._entered: list[str] = []
        self._states: dict[tuple[str, str], int] = {}
        self._homes: dict[int, str] = {}
        self._buffers = 0
        # When the account was last asked for, and how long that took.
        self._asked = self._took = 0.0
        self._hooks: list[Any] = []

    # Its life.

    def begin(self) -> None:
        account = self.account
        self.began = time.perf_counter()
        self._buffers = sum(own_tensor(buffer).nbytes for buffer in account.model.buffers())
        if not self._hooks:
            for unit in account.units:
                for module in unit.modules:
                    # Ahead of the engine's own hooks, which gather the unit that they come to.
                    enter = module.register_forward_pre_hook(partial(self._enter, unit.name), prepend=True)
                    leave = module.register_forward_hook(partial(self._leave, unit.name), prepend=True)
                    self._hooks += [enter, leave]

    def start_over(self) -> None:
        """The window was dropped: what comes next is the step."""
        if self.phase_now != "step":
            self.began = None
            self.samples.clear()

    def end(self) -> None:
        """Nothing is left on the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._entries.clear()
        self._homes.clear()

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        # A forward before it without gradients, as of a validation, is none of the step's.
        if self.began is None and phase != "step" and torch.is_grad_enabled():
            self.begin()
        if self.began is None:
            yield
            return
        self.phase_now, self._unit, self._entered = phase, "", []
        self.sample(anew=True)
        try:
            with self:
                yield
        finally:
            self.sample(anew=True)
            self.phase_now = self._unit = ""

    # Units.

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._entered.append(self._unit)
        self._comes_to(name)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tree_leaves(output) if torch.is_grad_enabled() else ():
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._backward_comes_to, name))
        self._comes_to(self._entered.pop() if self._entered else "")

    def _backward_comes_to(self, name: str, grad: torch.Tensor) -> None:
        if self._hooks:  # else the graph has outlived the step
            self._comes_to(name)

    def _comes_to(self, name: str) -> None:
        self.sample(anew=True)
        self._unit = name

    # Bytes.

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler, which takes seconds and memory, to keep it away from the method below."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_key(tensor) for tensor in _tensors((args, *kwargs.values()))}
        if self.phase_now == "step":
            self._unit = next((self._homes[key] for key in given if key in self._homes), self._unit)
        result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            # What an operation changes or gives a view of was there before.
            if _key(tensor) not in given and tensor.device.type != "meta":
                self._add(tensor, WORKING if tensor.device.type == self.account.device.type else _ON_HOST)
        self.sample()
        return result

    def sample(self, *, anew: bool = False) -> None:
        """Look at all bytes there are. `anew`: states too, of which else those of a moment before are good enough."""
        if self.began is None:
            return
        now = time.perf_counter()
        if anew or now - self._asked > _PATIENCE * self._took:
            self._ask(now)
        live, device, host = self.live, self._device, self._host
        found = dict(self._states)
        for state, place, category in (
            ("gradients", device, "gradients"), (WORKING, device, WORKING), (WORKING, host, _ON_HOST),
        ):  # fmt: skip
            found[state, place] = found.get((state, place), 0) + live.get(category, 0)
        self.series += [key for key in found if key not in self.series]
        sizes = tuple(found.get(key, 0) for key in self.series)
        before = self.samples[-1] if self.samples else None
        if before is None or anew or before.bytes != sizes or before.unit != self._unit:
            # A backward that the engine was not asked for is told by its units.
            self.samples.append(Sample(now - self.began, self.phase_now or "backward", self._unit, sizes))

    def _ask(self, now: float) -> None:
        account = self.account
        grads = (parameter.grad for unit in account.units for flat in unit.flats for parameter in flat.parameters)
        self.label("gradients", (grad for grad in grads if grad is not None))
        for name, tensor in account.tensors():
            self.label(_COUNTED, [tensor])
            self._homes[_key(tensor)] = name
        device = self._device
        found = {("buffers", device): self._buffers}
        for (state, tier), nbytes in account.held().items():
            # What is read of a state on disk, and weights to come, are the state's on the host.
            key = state.removesuffix(" read").removesuffix(" to come"), self._place(tier)
            found[key] = found.get(key, 0) + nbytes
        if self.gpu:
            counted = sum(nbytes for (_, tier), nbytes in found.items() if tier == device)
            counted += self.live[WORKING] + self.live.get("gradients", 0)
            found["other", device] = max(0, torch.accelerator.memory_allocated(account.device) - counted)
        self._states = found
        self._asked = time.perf_counter()
        self._took = self._asked - now

    def _place(self, tier: Tier) -> str:
        """Where device and host are one memory, it has one name."""
        return str(effective(tier, shared=not self.gpu))

    # What is written.

    def told(self, step: int, rank: int) -> dict[str, Any]:
        """As JSON holds it; `docs/profile.md` tells what is what."""
        # With nothing of the series that came later.
        columns = dict(zip(self.series, zip_longest(*(each.bytes for each in self.samples), fillvalue=0), strict=True))
        series = [(state, tier) for tier in map(str, Tier) for state in STATES if any(columns.get((state, tier), ()))]
        rows = zip(*(columns[key] for key in series), strict=True)
        samples = [sample._replace(bytes=row) for sample, row in zip(self.samples, rows, strict=True)]
        peaks = {}
        for tier in dict.fromkeys(tier for _, tier in series):
            on_it = [i for i, (_, other) in enumerate(series) if other == tier]
            top = max(samples, key=lambda sample: sum(sample.bytes[i] for i in on_it))
            peaks[tier] = top._replace(bytes=tuple(top.bytes[i] for i in on_it))._asdict()
        return {
            "step": step,
            "rank": rank,
            "device": self.account.device.type,
            "series": series,
            "peaks": peaks,
            "states": [list(row) for row in self.account.rows()],
            "phases": [
                [phase, found[0].seconds, found[-1].seconds]
                for phase, run in groupby(samples, key=lambda sample: sample.phase)
                if (found := list(run))
            ],
            "samples": [[round(s.seconds, 6), s.phase, s.unit, list(s.bytes)] for s in _thinned(samples)],
        }


def _thinned(samples: list[Sample]) -> list[Sample]:
    if len(samples) <= _MOST:
        return samples
    begin, end = samples[0].seconds, samples[-1].seconds
    kept: list[Sample] = []
    stretches = groupby(samples, key=lambda s: int((s.seconds - begin) / max(end - begin, 1e-9) * (_MOST // 2)))
    for _, stretch in stretches:
        found = list(stretch)
        ends = {id(choose(found, key=lambda sample: sum(sample.bytes))) for choose in (min, max)}
        kept += [sample for sample in found if id(sample) in ends]
    return kept


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if (own := own_tensor(value)).layout is torch.strided:
                yield own
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _key(tensor: torch.Tensor) -> int:
    return own_tensor(tensor).untyped_storage()._cdata
