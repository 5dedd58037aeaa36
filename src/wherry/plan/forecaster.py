"""Estimates of one model on one machine, for many configs: from dry runs of the engine, each made once."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NamedTuple

from wherry import config as configs
from wherry.config import Config
from wherry.observe.footprint import WORKING
from wherry.placement import Tier
from wherry.plan.choose import RECOMPUTE
from wherry.plan.counts import HOST, TENSOR, Counts
from wherry.plan.dry_run import UnknownInputs, count_by_blocks, outline, with_window
from wherry.plan.estimate import Estimate, Row, answer, answer_of_count
from wherry.plan.formulas import placed
from wherry.plan.grid import ALONE, Grid
from wherry.plan.machines import Machine
from wherry.plan.model_source import ModelSource
from wherry.plan.parts import Outline, is_away
from wherry.plan.roofline import Computing, computing, is_fp32, step_time

HOSTS_PRODUCTS = (
    "the products of matrices that the host makes for the update are counted as if the device made them: a host takes "
    "some hundred times longer"
)
# Micro-batches that a search runs, to go by the straight line through them.
NEAR, FAR = 1, 8
# What one forward and backward does also goes by these keys.
_OF_PASSES = {"unit_classes", "tile_linear", "chunked_loss", "sequence_tiles", "context_parallel"}


class Forecast(NamedTuple):
    """What a step does, and how long its forwards and backwards compute."""

    counts: Counts
    work: Computing


class Forecaster:
    """`exact` runs the engine as a config has it; `quick`, for searching, goes by formulas and what was run before."""

    def __init__(
        self, source: ModelSource, machine: Machine, ranks: int, sequence: int | None = None, grid: Grid = ALONE
    ) -> None:
        self.source = source
        self.machine = machine
        self.ranks = ranks
        self.grid = grid
        self.data_ranks = grid.data_ranks(ranks)
        self.sequence = sequence or source.sequence
        self._runs: dict[tuple[Any, ...], Forecast] = {}
        # The configs whose very steps were run.
        self._exact: list[tuple[Config, Grid, Counts]] = []
        self._outlines: dict[Grid, Outline] = {}

    def exact(self, config: Config) -> Estimate:
        """From a dry run of this very config."""
        return self._fullest(config, quick=False)

    def quick(self, config: Config) -> Estimate:
        """From the formulas of its placement, a run of the model in a micro-batch, and what runs of others told."""
        return self._fullest(config, quick=True)

    def _fullest(self, config: Config, *, quick: bool) -> Estimate:
        # The first stage has the embeddings and keeps the most activations, the last one has the head.
        stages = [replace(self.grid, stage=stage) for stage in sorted({0, self.grid.pipe - 1})]
        try:
            runs = [self._near(config, grid) if quick else self._run(config, grid) for grid in stages]
        except UnknownInputs:
            return self._by_count(config)
        found = [self._answer(config, *run, grid) for run, grid in zip(runs, stages, strict=True)]
        fullest = max(found, key=lambda each: each.tightest.share)
        slowest = max(found, key=lambda each: each.seconds or 0.0)
        return replace(fullest, time=slowest.time)

    def _by_count(self, config: Config) -> Estimate:
        notes = ("activations and time are not counted: the model's inputs are not known",)
        return answer_of_count(
            self._whole(), config, self.machine, self.ranks, self.grid, name=self.source.name, notes=notes
        )

    def _answer(self, config: Config, counts: Counts, work: Computing, grid: Grid) -> Estimate:
        rows = [
            Row(line.category, line.tier, line.at_peak)
            for line in _in_flight(counts, config, self.data_ranks, grid).lines(gpu=self.machine.gpus > 0)
        ]
        time = step_time(counts, work, config, self.machine, self.ranks, grid)
        on_host = config.placement().optimizer.tier is not Tier.DEVICE and not counts.moved.get("streamed")
        muon = config.optimizer is not None and config.optimizer.type == "Muon"
        notes = (HOSTS_PRODUCTS,) if muon and on_host and self.machine.gpus else ()
        return answer(
            self.source.name, self._whole(), rows, time, config, self.machine, self.ranks, grid,
            sequence=self.sequence, notes=notes,
        )  # fmt: skip

    def _whole(self) -> int:
        """Parameters of the whole model, where ranks share it."""
        return self._outline(ALONE).parameters

    def _outline(self, grid: Grid, config: Config | None = None) -> Outline:
        if grid not in self._outlines:
            source = self.source if config is None else self._part(config, grid)
            self._outlines[grid] = outline(source, self.sequence)
        return self._outlines[grid]

    def _part(self, config: Config, grid: Grid) -> ModelSource:
        return self.source.share(grid, config.working_dtype())

    def _run(self, config: Config, grid: Grid) -> Forecast:
        """A dry run of this config."""
        key = json.dumps(config.to_dict(), sort_keys=True), grid
        if key not in self._runs:
            counts = self._made(config, self.data_ranks, grid)
            self._exact.append((config, grid, counts))
            self._runs[key] = Forecast(counts, self._computing(counts, config))
        return self._runs[key]

    def _made(self, config: Config, ranks: int, grid: Grid, **how: Any) -> Counts:
        if config.activation_checkpointing.policy == "auto":
            config = configs.load(config, overrides={RECOMPUTE: "recompute"})
        return count_by_blocks(
            self._part(config, grid),
            config,
            self._outline(grid, config),
            **how,
            ranks=ranks,
            sequence=self.sequence,
            tensor=grid.tensor,
            gpu=self.machine.gpus > 0,
        )

    def _computing(self, counts: Counts, config: Config) -> Computing:
        share = 1 if self.machine.gpus else self.machine.ranks_per_node(self.ranks)
        return computing(counts.operations, self.machine, fp32=is_fp32(config), share=share)

    def _near(self, config: Config, grid: Grid) -> Forecast:
        """By the formulas of the placement, and what the model does in a micro-batch of this size.

        What an engine holds and moves besides is known from a run of it, best of one with the same placement.
        """
        counts = self._by_formula(config, grid)
        order = config.wherry.accumulation  # layer by layer an engine holds other things at a time
        alike_in = (run for run in self._exact if run[1] == grid and run[0].wherry.accumulation == order)
        if runs := [(ran, found) for ran, _, found in alike_in]:
            alike = [run for run in runs if run[0].placement() == config.placement()]
            ran, found = (alike or runs)[-1]
            counts = found.with_difference(self._by_formula(ran, grid), counts)
        passes, work = self._passes(config, grid)
        accumulation = config.batch(self.data_ranks).accumulation
        working = max(found.get(WORKING, 0.0) for found in passes.peaks.values())
        top = {**counts.top(), WORKING: working + (self._together(config) - 1) * passes.kept}
        sums = {name: accumulation * sent for name, sent in passes.bytes.items() if name.endswith(TENSOR)}
        counts = replace(counts, peaks={"top": top}, kept=passes.kept, bytes={**counts.bytes, **sums})
        return Forecast(counts, Computing(*(accumulation * seconds for seconds in work)))

    def _by_formula(self, config: Config, grid: Grid) -> Counts:
        found = placed(self._outline(grid, config), config, self.data_ranks, gpu=self.machine.gpus > 0)
        if not is_away(config):
            return found
        passes, together = self._passes(config, grid).counts, self._together(config)
        host = found.highest[HOST] + together * passes.highest.get(HOST, 0.0)
        return replace(
            found,
            peaks={"top": {**found.top(), HOST: host}},
            highest={**found.highest, HOST: host},
            on_disk=found.on_disk + together * passes.on_disk,
        )

    def _together(self, config: Config) -> int:
        """Micro-batches whose activations are there at a time."""
        return config.batch(self.data_ranks).accumulation if config.wherry.accumulation == "layer_major" else 1

    def _passes(self, config: Config, grid: Grid) -> Forecast:
        """The forward and backward of one micro-batch, on a rank that has all states on its device."""
        micro = config.batch(self.data_ranks).micro
        if micro == NEAR or not self.source.scales:
            return self._passes_of(config, micro, grid)
        near, far = (self._passes_of(config, size, grid) for size in (NEAR, FAR))
        steps = (micro - NEAR) / (FAR - NEAR)
        work = Computing(*(a + steps * (b - a) for a, b in zip(near.work, far.work, strict=True)))
        return Forecast(near.counts.toward(far.counts, steps), work)

    def _passes_of(self, config: Config, micro: int, grid: Grid) -> Forecast:
        policy = config.activation_checkpointing.model_dump_json()
        own = config.wherry.model_dump(include=_OF_PASSES)
        key = policy, json.dumps(own), config.working_precision(), micro, grid
        if key not in self._runs:
            ranks = config.wherry.context_parallel
            plain = with_window(
                configs.load(config.written | {"zero_optimization": {}, "wherry": own}), ranks, 1, micro
            )
            # Behind the first blocks and before the last ones stand some while others come and go.
            counts = self._made(plain, ranks, grid, apart=2 if is_away(plain) else 1, updates=False)
            self._runs[key] = Forecast(counts, self._computing(counts, plain))
        return self._runs[key]


def _in_flight(counts: Counts, config: Config, ranks: int, grid: Grid) -> Counts:
    """With the activations of all micro-batches that a stage of a pipeline keeps at a time."""
    more = (grid.in_flight(config.batch(ranks).accumulation) - 1) * counts.kept
    if not more:
        return counts
    peaks = {phase: {**found, WORKING: found.get(WORKING, 0.0) + more} for phase, found in counts.peaks.items()}
    return replace(counts, peaks=peaks)
