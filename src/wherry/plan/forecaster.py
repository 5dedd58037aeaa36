"""Estimates of one model on one machine, for many configs: from dry runs of the engine, each made once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from wherry import config as configs
from wherry.config import Config
from wherry.observe.footprint import WORKING
from wherry.plan.choose import ACCUMULATION, MICRO, OPTIMIZER, ORDER, PARAM, RATIO, RECOMPUTE, STAGE, TRAIN
from wherry.plan.counts import Counts
from wherry.plan.dry_run import WINDOW, UnknownInputs, count_by_blocks
from wherry.plan.estimate import Estimate, Row, answer, answer_of_count
from wherry.plan.grid import ALONE, Grid
from wherry.plan.machine import Machine
from wherry.plan.roofline import Computing, computing, is_fp32, step_time
from wherry.plan.source import Source

# Micro-batches that a search runs, to go by the straight line through them.
NEAR, FAR = 1, 8
PLAIN: Mapping[str, Any] = {STAGE: 0, OPTIMIZER: "none", PARAM: "none", RATIO: 1.0}


class Run(NamedTuple):
    """What a step does, and how long its forwards and backwards compute."""

    counts: Counts
    work: Computing


class Forecaster:
    """`exact` runs the engine as a config has it; `quick`, for searching, puts together what was run for others."""

    def __init__(
        self, source: Source, machine: Machine, ranks: int, sequence: int | None = None, grid: Grid = ALONE
    ) -> None:
        self.source = source
        self.machine = machine
        self.ranks = ranks
        self.grid = grid
        self.data_ranks = grid.data_ranks(ranks)
        self.sequence = sequence or source.sequence
        self._runs: dict[tuple[str, int, Grid], Run] = {}
        self._parameters: int | None = None

    def exact(self, config: Config) -> Estimate:
        """From a dry run of this very config."""
        return self._fullest(config, quick=False)

    def quick(self, config: Config) -> Estimate:
        """From dry runs with small micro-batches, and without recomputation, where these tell enough."""
        return self._fullest(config, quick=True)

    def _fullest(self, config: Config, *, quick: bool) -> Estimate:
        # The first stage has the embeddings and keeps the most activations, the last one has the head.
        stages = [replace(self.grid, stage=stage) for stage in sorted({0, self.grid.pipe - 1})]
        try:
            runs = [self._quick(config, grid) if quick else self._run(config, self.data_ranks, grid) for grid in stages]
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
        parameters = round(counts.parameters) if grid.size == 1 else self._whole()
        time = step_time(counts, work, config, self.machine, self.ranks, grid)
        return answer(
            self.source.name, parameters, rows, time, config, self.machine, self.ranks, grid, sequence=self.sequence
        )

    def _whole(self) -> int:
        """Parameters of the whole model, where ranks share it."""
        if self._parameters is None:
            import torch

            with torch.device("meta"):
                model, _ = self.source.make(1, self.sequence)
            self._parameters = sum(parameter.numel() for parameter in model.parameters())
        return self._parameters

    def _run(self, config: Config, ranks: int, grid: Grid) -> Run:
        """A dry run of this config, of as few micro-batches as tell of all."""
        sizes = config.batch(ranks)
        if config.wherry.accumulation == "layer_major" and sizes.accumulation > WINDOW:
            few, more = (self._made(_sized(config, ranks, sizes.micro, k), ranks, grid) for k in (2, 3))
            return _toward(few, more, sizes.accumulation - 2)
        ran = min(sizes.accumulation, WINDOW + 1)
        run = self._made(_sized(config, ranks, sizes.micro, ran), ranks, grid)
        counts = run.counts.with_more(sizes.accumulation - WINDOW) if ran > WINDOW else run.counts
        return Run(counts, self._computing(counts, config))

    def _made(self, config: Config, ranks: int, grid: Grid) -> Run:
        key = json.dumps(config.to_dict(), sort_keys=True), ranks, grid
        if key not in self._runs:
            counts = count_by_blocks(
                self.source.share(grid, config.working_dtype()),
                config,
                ranks=ranks,
                sequence=self.sequence,
                tensor=grid.tensor,
                gpu=self.machine.gpus > 0,
            )
            self._runs[key] = Run(counts, self._computing(counts, config))
        return self._runs[key]

    def _computing(self, counts: Counts, config: Config) -> Computing:
        share = 1 if self.machine.gpus else self.machine.ranks_per_node(self.ranks)
        return computing(counts.operations, self.machine, fp32=is_fp32(config), share=share)

    def _quick(self, config: Config, grid: Grid) -> Run:
        """The placement's run with the smallest micro-batch, and the difference that micro-batch and recomputation make
        where nothing is placed elsewhere."""
        sizes, policy = config.batch(self.data_ranks), config.activation_checkpointing.resolved_policy()
        offload = config.zero_optimization.offload_optimizer
        if offload.device != "none" and 0 < offload.ratio < 1:
            away, here = (
                self._quick(_with(config, {OPTIMIZER: d, RATIO: 1.0}), grid) for d in (offload.device, "none")
            )
            return _toward(away, here, 1 - offload.ratio)
        if policy not in ("none", "recompute") or not self.source.scales:
            return self._run(config, self.data_ranks, grid)
        small = _sized(config, self.data_ranks, NEAR, sizes.accumulation)
        base = self._run(_with(small, {RECOMPUTE: "none"}), self.data_ranks, grid)
        if sizes.micro == NEAR and policy == "none":
            return base
        few, plain = self._plain(config, NEAR, "none", grid), self._plain(config, sizes.micro, policy, grid)
        times = sizes.accumulation
        work = Computing(*(b + times * (p - f) for b, p, f in zip(base.work, plain.work, few.work, strict=True)))
        together = times if config.wherry.accumulation == "layer_major" else 1
        more = {kind: _working(plain.counts, kind) - _working(few.counts, kind) for kind in ("forward", "backward")}
        peaks = {
            phase: {**found, WORKING: found.get(WORKING, 0.0) + together * more.get(phase.partition(" ")[0], 0.0)}
            for phase, found in base.counts.peaks.items()
        }
        kept = base.counts.kept + plain.counts.kept - few.counts.kept
        return Run(replace(base.counts, peaks=peaks, kept=kept), work)

    def _plain(self, config: Config, micro: int, policy: str, grid: Grid) -> Run:
        """Of one micro-batch on one rank that has all states on its device."""

        def run(micro: int) -> Run:
            order = {ORDER: "step_major"} if config.wherry.accumulation == "layer_major" else {}
            return self._run(_sized(_with(config, {**PLAIN, **order, RECOMPUTE: policy}), 1, micro, 1), 1, grid)

        near = run(NEAR)
        return near if micro == NEAR else _toward(near, run(FAR), (micro - NEAR) / (FAR - NEAR))


def _working(counts: Counts, kind: str) -> float:
    """Bytes of activations where they are highest in the phases of a forward, or of a backward."""
    return max(found.get(WORKING, 0.0) for phase, found in counts.peaks.items() if phase.startswith(kind))


def _with(config: Config, values: Mapping[str, Any]) -> Config:
    return configs.load(config, overrides=dict(values))


def _sized(config: Config, ranks: int, micro: int, accumulation: int) -> Config:
    sizes: dict[str, Any] = {MICRO: micro, ACCUMULATION: accumulation, TRAIN: micro * accumulation * ranks}
    if config.activation_checkpointing.policy == "auto":
        sizes[RECOMPUTE] = "recompute"
    return _with(config, sizes)


def _toward(one: Run, two: Run, steps: float) -> Run:
    work = Computing(*(a + steps * (b - a) for a, b in zip(one.work, two.work, strict=True)))
    return Run(one.counts.toward(two.counts, steps), work)


def _in_flight(counts: Counts, config: Config, ranks: int, grid: Grid) -> Counts:
    """With the activations of all micro-batches that a stage of a pipeline keeps at a time."""
    more = (grid.in_flight(config.batch(ranks).accumulation) - 1) * counts.kept
    if not more:
        return counts
    peaks = {phase: {**found, WORKING: found.get(WORKING, 0.0) + more} for phase, found in counts.peaks.items()}
    return replace(counts, peaks=peaks)
