"""A dry run: the real engine's step for one rank of many, on tensors without values and a cluster without machines.

What it reports was counted while the engine ran: collectives, bytes, and the highest sum of all tensors' bytes. What
it cannot know is what lies below tensors: the allocator's fragments, a kernel's workspace, the time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, UnsupportedFakeTensorException

from wherry import config as configs
from wherry.build import initialize
from wherry.config import Config
from wherry.engine import Engine
from wherry.errors import WherryError
from wherry.observe.footprint import WORKING, Footprint
from wherry.parallel.topology import Topology
from wherry.plan.imagined import HOST, FakeComm, FakeLink, FakePool, FakeStore
from wherry.plan.trace import faked, loss_of, without_values
from wherry.sources import Batch, Source, told_by

# Micro-batches of a window that are run. The ones between the first and the last do the same, and are run once.
WINDOW = 3
STATES = ("parameters", "gradients", "optimizer")
# What a footprint calls the gradients that stay in autograd's own tensors until the next forward.


@dataclass(frozen=True)
class Line:
    """Bytes of one category on one tier: where the sum was highest, and its own highest."""

    category: str
    tier: str
    at_peak: int
    highest: int


@dataclass(frozen=True)
class DryRun:
    """What one rank does in a step, and keeps."""

    model: str
    placement: str
    parameters: int
    rank: int
    ranks: int
    micro_batch: int
    accumulation: int
    # Calls and bytes of whole tensors, of one step.
    calls: dict[str, int]
    bytes: dict[str, int]
    memory: tuple[Line, ...]
    seconds: float

    def peak(self, tier: str) -> int:
        """The highest sum of all tensors' bytes on a tier."""
        return sum(line.at_peak for line in self.memory if line.tier == tier)


def dry_run(
    source: Source,
    config: Config | dict[str, Any] | str | None,
    *,
    ranks: int,
    rank: int = 0,
    sequence: int | None = None,
    tensor: int = 1,
    gpu: bool = False,
) -> DryRun:
    """Build the engine for `rank` of `ranks` and make two steps; the second, with the order known, is reported.

    The model is what one of `tensor` ranks has of it. `gpu` says that the device has memory of its own, so that the
    host is another tier.
    """
    if not 0 <= rank < ranks:
        raise WherryError(f"rank: expected 0 to {ranks - 1}, got {rank}")
    resolved = config if isinstance(config, Config) else configs.load(config)
    micro = resolved.batch(ranks).micro
    begun = time.perf_counter()
    failing, faking = told_by(f"{source.name}: a step of it fails"), FakeTensorMode(allow_non_fake_inputs=True)
    with failing, _understood(source.name), faking as fake, Footprint() as footprint:
        model, batch = source.make(micro, sequence or source.sequence)
        model = without_values(fake, model)
        if batch is None:
            raise WherryError(
                f"{source.name}: a dry run needs the inputs of a micro-batch; let the callable return the model and "
                "its inputs, as a tuple"
            )
        batch = Batch(tuple(faked(fake, a) for a in batch.args), {k: faked(fake, v) for k, v in batch.kwargs.items()})
        comm = FakeComm(rank, ranks)
        topology = Topology(
            comm,
            torch.device("cpu"),
            rank,
            rank,
            ranks,
            tensor=FakeComm(0, tensor),
            link=lambda pin: FakeLink(FakePool(fake, footprint), shared=not gpu),
            open_store=FakeStore,  # type: ignore[arg-type]
        )
        parameters = sum(p.numel() for p in model.parameters())
        engine, *_ = initialize(
            model=model, config=resolved, mesh=topology, optimizer=None if resolved.optimizer else torch.optim.AdamW
        )
        observe(engine, footprint)
        accumulation = engine.gradient_accumulation_steps()
        make_step(engine, batch, accumulation)
        footprint.label_rest("resting")
        footprint.reset()
        calls, nbytes = make_step(engine, batch, accumulation)
        memory = tuple(memory_lines(engine, footprint))
        placement = engine.placement.name
        engine.close()
    return DryRun(
        model=source.name,
        placement=placement,
        parameters=parameters,
        rank=rank,
        ranks=ranks,
        micro_batch=micro,
        accumulation=accumulation,
        calls=dict(calls),
        bytes=dict(nbytes),
        memory=memory,
        seconds=time.perf_counter() - begun,
    )


@contextmanager
def _understood(name: str) -> Iterator[None]:
    try:
        yield
    except (DataDependentOutputException, UnsupportedFakeTensorException) as error:
        raise WherryError(
            f"{name}: its forward asks for the value of a tensor, and a dry run has none ({error}); keep such "
            "decisions out of the forward, or plan without --dry-run"
        ) from error


def observe(engine: Engine, footprint: Footprint) -> None:
    """What there is now rests through the step: give it its names."""
    flats = [flat for unit in engine.units for flat in unit.travelling]
    footprint.meter("gathered", [flat.whole for flat in flats], lambda: sum(flat.elastic.nbytes for flat in flats))
    footprint.label_rest("resting")
    footprint.label("buffers", engine.module.buffers())


def memory_lines(engine: Engine, footprint: Footprint) -> Iterator[Line]:
    """The footprint by category and tier. What rests is told apart by the engine's own account of it."""
    peak = footprint.at_peak
    stated = {tier: 0 for tier in ("device", "host")}
    for row in engine.memory():
        if row.state not in STATES:
            continue
        yield Line(row.state, row.tier, row.bytes_actual, row.bytes_actual)
        if row.tier in stated:
            stated[row.tier] += row.bytes_actual
    extra = peak.get("resting", 0) - stated["device"] + peak.get("buffers", 0)
    yield Line("buffers", "device", extra, extra)
    if peak.get(HOST):
        staging = peak[HOST] - stated["host"]
        yield Line("buffers", "host", staging, footprint.peaks[HOST] - stated["host"])
    for category in ("gathered", WORKING):
        yield Line(category, "device", peak.get(category, 0), footprint.peaks.get(category, 0))


def make_step(engine: Engine, batch: Batch, accumulation: int) -> tuple[Counter[str], Counter[str]]:
    """One accumulation window and its update; the collectives of all its micro-batches."""
    if accumulation > 1 and engine.config["wherry"].get("accumulation") == "layer_major":
        return _make_step_together(engine, batch, accumulation)
    calls: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    run = list(range(accumulation)) if accumulation <= WINDOW else [0, 1, accumulation - 1]
    for micro in run:
        for _, traffic in engine.topology.traffic():
            traffic.clear()
        engine.set_gradient_accumulation_boundary(micro == accumulation - 1)
        output = engine(*batch.args, **batch.kwargs)
        engine.backward(loss_of(output))
        del output
        engine.step()
        if micro == accumulation - 1:
            engine.settle()
        repeats = accumulation - 2 if len(run) < accumulation and micro == 1 else 1
        for total, sent in zip((calls, nbytes), _sent(engine), strict=True):
            for operation, count in sent.items():
                total[operation] += repeats * count
    engine.set_gradient_accumulation_boundary(None)
    return calls, nbytes


def _make_step_together(engine: Engine, batch: Batch, accumulation: int) -> tuple[Counter[str], Counter[str]]:
    """The same where all micro-batches go together, as the config asks for: none of them can be left out."""
    for _, traffic in engine.topology.traffic():
        traffic.clear()
    engine._loss_of = lambda batch: loss_of(engine(*batch.args, **batch.kwargs))  # type: ignore[method-assign]
    engine.train_batch(iter([batch] * accumulation))
    engine.settle()
    return _sent(engine)


def _sent(engine: Engine) -> tuple[Counter[str], Counter[str]]:
    """Calls and bytes by operation, of each group of ranks by itself."""
    calls: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for among, traffic in engine.topology.traffic():
        for operation in traffic.calls:
            calls[operation + among] += traffic.calls[operation]
            nbytes[operation + among] += traffic.bytes[operation]
    return calls, nbytes
