"""What becomes of activations: time of a step and peak memory by policy: python benchmarks/activations.py [--quick].

One GPT-2, the same seed and data for all; steps of the policies are interleaved. Those that share checkpoints out run
on two tensor-parallel ranks, the others on one. Peak memory is that of activations alone: of everything that a forward
and backward make on the device, counted by operation in a step that is not timed. On a CPU, where the device is the
host, a part of its memory stands for the host's. A second table has what torch's CUDA allocator holds beyond what is in
use, over steps of changing length: asked for on a GPU, and else simulated.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

import wherry
from benchmarks import alone, fragments
from benchmarks.rooms import Room, RoomFailed
from wherry.observe import bench
from wherry.observe.footprint import WORKING, Footprint
from wherry.parallel.topology import Topology, find
from wherry.tiers.buffers import Block, HostPool
from wherry.tiers.streams import Link
from wherry.train.model import GPT, GPTConfig

KEEP = "keep"
RANKS = 2
TOGETHER = f", {RANKS} ranks"
WORKER = Path(__file__).parent / "activations_worker.py"


def policies(folder: str, budget: int) -> dict[str, dict[str, Any]]:
    """By name, the block `activation_checkpointing`; those at the end are for ranks that share a model."""
    offload = {"policy": "offload", "cpu_checkpointing": True}
    partition = {"policy": "recompute", "partition_activations": True}
    return {
        KEEP: {"policy": "none"},
        "recompute": {"policy": "recompute"},
        "recompute every second": {"policy": "recompute", "every": 2},
        "recompute, keep matmul": {"policy": "recompute", "save_operations": ["matmul", "attention"]},
        "recompute, host": {"policy": "recompute", "cpu_checkpointing": True},
        "recompute, disk": {"policy": "recompute", "nvme_path": folder},
        "offload to host": offload,
        "offload to disk": {"policy": "offload", "nvme_path": folder},
        "auto": {"policy": "auto", "memory": budget, "cpu_checkpointing": True},
        KEEP + TOGETHER: {"policy": "none"},
        "recompute" + TOGETHER: {"policy": "recompute"},
        "partition" + TOGETHER: partition,
        "partition, host" + TOGETHER: {**partition, "cpu_checkpointing": True},
    }


class _Pool(HostPool):
    """Host buffers, known as such."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[torch.Tensor] = []

    def _allocate(self, size: int) -> Block:
        block = super()._allocate(size)
        self.buffers.append(block.tensor)
        return block


class _Apart(Link):
    """A part of the host's memory stands for a device, so that what leaves it is copied."""

    shared = False

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.host = self.buffers = _Pool()


class Trainee:
    """An engine on a GPT-2, and steps of it."""

    def __init__(
        self,
        config: GPTConfig,
        batch: int,
        block: Mapping[str, Any],
        mesh: Any = None,
        *,
        cut: Callable[[GPT], None] | None = None,
    ) -> None:
        torch.manual_seed(0)
        model = GPT(config)
        if cut is not None:
            cut(model)
        settings = {
            "train_micro_batch_size_per_gpu": batch,
            "activation_checkpointing": {"offload_min_bytes": 1 << 12, **block},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        }
        self._links: list[_Apart] = []
        if not torch.cuda.is_available():
            mesh = self._apart(find(mesh))
        self.engine: Any = wherry.initialize(model=model, config=settings, mesh=mesh)[0]
        self.ids = torch.zeros(batch, config.sequence, dtype=torch.int64, device=self.engine.device)
        for _ in range(2):  # the first is another one: `auto` has measured when it is over
            self.step()

    def _apart(self, place: Topology) -> Topology:
        def link(pin: bool) -> Link:
            self._links.append(_Apart())
            return self._links[-1]

        return replace(place, link=link)

    def step(self) -> float:
        """Seconds."""
        begin = time.perf_counter()
        self.engine.backward(self.engine(self.ids, self.ids))
        self.engine.step()
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def peak(self) -> int:
        """The most bytes of activations at once, in a step."""
        with Footprint() as footprint:
            footprint.label("weights", [flat.whole for unit in self.engine.units for flat in unit.flats])
            footprint.label("host", [buffer for link in self._links for buffer in link.buffers.buffers])
            self.step()
            # What that step has used and left was there before it: gradients, buffers.
            footprint.label_rest("resting")
            footprint.reset()
            self.engine.backward(self.engine(self.ids, self.ids))
            peak = footprint.peaks[WORKING]
        self.engine.step()
        return peak

    def chosen(self) -> str:
        """How many units have each policy."""
        found = [policy.value for policy in self.engine._activations.policies]
        return ", ".join(f"{name} {found.count(name)}" for name in dict.fromkeys(found))


class Together:
    """The same policies' engines on ranks that share the model, in processes of their own."""

    def __init__(self, config: GPTConfig, batch: int, blocks: Mapping[str, Mapping[str, Any]]) -> None:
        self.room: Room | None = None
        self.reason = ""
        self.names: list[str] = []
        if torch.cuda.is_available() and torch.cuda.device_count() < RANKS:
            self.reason = f"checkpoints are shared out among tensor-parallel ranks, and here is {RANKS - 1} GPU"
            return
        self.room = Room(RANKS, worker=WORKER)
        try:
            for name, block in blocks.items():
                self.room.ask(do="build", name=name, config=vars(config), batch=batch, block=block)
                self.names.append(name)
        except RoomFailed as failure:
            self.close()
            self.reason = str(failure)

    def step(self, name: str) -> float:
        assert self.room is not None
        return max(self.room.ask(do="step", name=name))

    def peak(self, name: str) -> int:
        assert self.room is not None
        return max(self.room.ask(do="peak", name=name))

    def close(self) -> None:
        self.names = []
        if self.room is not None:
            self.room.close()


def times_and_peaks(results: bench.Results, config: GPTConfig, batch: int, rounds: int) -> list[str]:
    """The rows of every policy; what is to be said of some of them."""
    case = {"layers": config.layers, "hidden": config.hidden, "sequence": config.sequence, "batch": batch}
    stream = 4 * batch * config.sequence * config.hidden
    with tempfile.TemporaryDirectory() as folder:
        blocks = policies(folder, budget=6 * config.layers * stream)
        shared = {name: block for name, block in blocks.items() if name.endswith(TOGETHER)}
        alone = {name: Trainee(config, batch, block) for name, block in blocks.items() if name not in shared}
        together = Together(config, batch, shared)
        try:
            subjects: dict[str, Callable[[], float]] = {name: trainee.step for name, trainee in alone.items()}
            subjects |= {name: partial(together.step, name) for name in together.names}
            seconds = bench.interleave(subjects, rounds, "steps")
            for name in blocks:
                if name in subjects:
                    peak = alone[name].peak() if name in alone else together.peak(name)
                    row = bench.row(case, name, "s", seconds[name], peak_bytes=peak)
                    kept = KEEP + TOGETHER if name.endswith(TOGETHER) else KEEP
                    row["of_limit"] = bench.paired_ratio(seconds[kept], seconds[name]) if name != kept else None
                    results.add(row)
                else:
                    results.add(bench.row(case, name, "s", reason=together.reason))
            notes = [f"auto, in the memory of half of what is kept: {alone['auto'].chosen()}"]
        finally:
            together.close()
            for trainee in alone.values():
                trainee.engine.close()
    if together.reason:
        notes.append(f"on {RANKS} ranks: {together.reason}")
    return notes


def unused_memory(results: bench.Results, config: GPTConfig, batch: int, steps: int) -> str:
    """The rows of what the allocator holds and nobody uses; which allocator that is."""
    device = "cuda" if torch.cuda.is_available() else "simulated"
    asked = [(system, config, batch, steps, device) for system in fragments.SYSTEMS]
    if device == "cuda" or steps < fragments.STEPS:
        measured = [fragments.measure(*of) for of in asked]
    else:  # nothing is timed, so every core simulates one
        processes = multiprocessing.get_context("spawn").Pool(min(len(asked), os.cpu_count() or 1))
        with processes:
            measured = processes.starmap(fragments.measure, asked, chunksize=1)
    for system, found in zip(fragments.SYSTEMS, measured, strict=True):
        results.add(found.row(system, config, batch, device))
    return device


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.parser("activations", __doc__ or "")
    parser.add_argument("--rounds", type=bench.positive, help="steps of each (default 7)")
    options = bench.parse(parser, argv)
    rounds = options.rounds or (2 if options.quick else 7)
    on_gpu = torch.cuda.is_available()
    config, batch = (fragments.LARGE_MODEL if on_gpu else GPTConfig(8, 256, 4, 256)), 4
    varied, steps = (fragments.LARGE_MODEL if on_gpu else fragments.SIMULATED_MODEL), fragments.STEPS
    if options.quick:
        config, batch = GPTConfig(layers=6, hidden=128, heads=4, sequence=64), 2
        varied, steps = fragments.TOY_MODEL, 4
    results = bench.Results("activations", options, {"layers": config.layers, "hidden": config.hidden, "batch": batch})
    notes = times_and_peaks(results, config, batch, rounds)
    device = unused_memory(results, varied, fragments.BATCH, steps)
    results.close()
    show(results.rows, config, notes)
    show_unused(results.rows, varied, steps, device)
    return 0


def show(rows: Sequence[bench.Row], config: GPTConfig, notes: Sequence[str]) -> None:
    lines = []
    for row in rows:
        if row["unit"] != "s" or row["reason"] is not None:
            continue
        base = KEEP + TOGETHER if row["system"].endswith(TOGETHER) else KEEP
        ratio = "1.00" if row["system"] == base else bench.ratio_words(row, base)
        time, peak = f"{1e3 * row['value']:.1f} ms", f"{row['peak_bytes'] / 1e6:.2f} MB"
        lines.append((row["system"], time, bench.spread_words(row), ratio, peak))
    title = f"Activations of a GPT-2: {config.layers} blocks, {config.hidden} wide, {config.sequence} tokens"
    bench.show(title, ("policy", "step", "spread", "keep/this", "peak"), lines, [*notes, ""])


def show_unused(rows: Sequence[bench.Row], config: GPTConfig, steps: int, device: str) -> None:
    def gb(nbytes: float) -> str:
        return f"{nbytes / 1e9:.3f} GB"

    lines = [
        (row["system"], gb(row["highest_bytes"]), gb(row["reserved_bytes"]), gb(row["excess_bytes"]), gb(row["value"]))
        for row in rows
        if row["case"].get("measure") == "fragments"
    ]
    name = "torch's CUDA allocator" if device == "cuda" else "torch's CUDA allocator, simulated"
    bench.show(
        f"{name}: {steps} steps of {config.sequence // 4} to {config.sequence} tokens",
        ("system", "in use", "held", "never used", "unused"),
        lines,
        ["in use: at its highest; unused: held and not in use where a forward ends, the median of the steps"],
    )


if __name__ == "__main__":
    alone(main)
