"""The dry run against real engines: the same collectives, and the same bytes by category."""

from __future__ import annotations

import json
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plan.measured import config, deep, make, measure

from wherry.errors import WherryError
from wherry.observe.footprint import Footprint
from wherry.parallel import comm
from wherry.plan.counts import Counts
from wherry.plan.dry_run import DryRun, dry_run
from wherry.sources import find, of_shape
from wherry.train.presets import Shape


@pytest.fixture(autouse=True)
def of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real engines' ranks are threads, which sum where gloo would exchange."""
    monkeypatch.setattr(comm, "EXCHANGED", -1)


def checkpoints(block: dict[str, Any]) -> dict[str, Any]:
    return {"activation_checkpointing": block}


def small(micro_batch: int = 2, sequence: int = 24) -> tuple[torch.nn.Module, Any]:
    """Few operations, for windows of many micro-batches."""
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()), (torch.zeros(micro_batch, sequence, 64),)


# Every stage, precision, kind of window and number of ranks once, of which the last is counted.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "data parallel, alone": (1, config(0, precision="fp32")),
    "data parallel": (2, config(0)),
    "fp16, clipped, gradients in fp32": (
        2, config(2, precision="fp16", gradient_clipping=1.0, data_types={"grad_accum_dtype": "fp32"}),
    ),
    "micro-batches together": (2, config(3, accumulation=2, wherry={"accumulation": "layer_major"})),
    "ZeRO-3 in fp32": (2, config(3, precision="fp32")),
    "groups of ranks": (4, config(3, zero_optimization=config(3)["zero_optimization"] | {"mics_shard_size": 2})),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_a_real_engine(name: str) -> None:
    ranks, given = CASES[name]
    assert_same(make, given, ranks)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_long_window_is_counted_by_short_ones(stage: int) -> None:
    assert_same(small, config(stage, accumulation=5, precision="fp32"), 2)


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 3])
def test_every_rank_of_four_as_a_real_engine(stage: int) -> None:
    assert_same(make, config(stage, accumulation=2), 4, every=True)


def assert_same(build: Any, given: dict[str, Any], ranks: int, *, every: bool = False) -> None:
    found = measure(given, ranks, build=build)
    for rank in range(0 if every else ranks - 1, ranks):
        assert_as_real(dry_run(find(build), given, ranks=ranks, rank=rank, sequence=24), found[rank])


def assert_as_real(told: DryRun, real: Counts) -> None:
    assert (told.calls, told.bytes) == (real.calls, real.bytes)
    lines = real.lines(gpu=False)
    assert [(line.category, line.tier) for line in told.memory] == [(line.category, line.tier) for line in lines]
    for line, other in zip(told.memory, lines, strict=True):
        assert line.at_peak == pytest.approx(other.at_peak, rel=0.001, abs=64), line.category
        assert line.highest == pytest.approx(other.highest, rel=0.001, abs=64), line.category


RECOMPUTE: list[Any] = [
    (make, {"policy": "recompute"}), (make, {"save_operations": ["matmul"]}),
    pytest.param(deep, {"every": 2}, marks=pytest.mark.long),
]  # fmt: skip


@pytest.mark.parametrize(("build", "block"), RECOMPUTE, ids=["recompute", "save_operations", "every"])
def test_recomputation_keeps_less_as_a_real_engine(build: Any, block: dict[str, Any]) -> None:
    (real,) = measure(config(3) | checkpoints(block), 1, build=build)
    kept, recomputed = (
        dry_run(find(build), config(3) | more, ranks=1, sequence=24) for more in ({}, checkpoints(block))
    )
    assert_as_real(recomputed, real)
    of_activations = [max(line.highest for line in told.memory if line.category == "activations")
                      for told in (kept, recomputed)]  # fmt: skip
    assert of_activations[1] < of_activations[0]


def test_a_thousand_ranks_hold_a_thousandth() -> None:
    source = of_shape("wide", Shape(layers=2, hidden=2048, heads=16, sequence=64))
    told = dry_run(source, config(3), ranks=1024, rank=1000)
    lines = {line.category: line for line in told.memory}
    share = told.parameters / 1024
    assert lines["parameters"].at_peak == pytest.approx(2 * share, rel=0.01)
    assert lines["gradients"].at_peak == pytest.approx(2 * share, rel=0.01)
    assert lines["optimizer"].at_peak <= 12.1 * share
    units = 2 + 1  # two blocks, and the root with both embeddings; blocks gather twice, the root once
    assert told.calls["reduce_scatter"] == units
    assert told.calls["all_gather"] <= 2 * units


@pytest.mark.nightly
def test_a_trillion_parameters_over_a_thousand_ranks(forks: Any, tmp_path: Path) -> None:
    (tmp_path / "zero3.json").write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}')
    program = (
        "import sys\n"
        "from wherry.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "held = open('/proc/self/status').read().split('VmHWM:')[1].split()[0]\n"
        "print(int(held) * 1024, file=sys.stderr)\n"
    )
    flags = ("gpt-1t", "--dry-run", "--ranks", "1024", "--gpus", "0", "--config", "zero3.json", "--json")
    done = forks.run("-c", program, "plan", *flags, folder=tmp_path, launched=False, timeout=600.0)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["parameters"] > 1e12 and told["ranks"] == 1024
    assert int(done.stderr.splitlines()[-1]) < 8e9


def test_a_forward_that_asks_for_values_is_told_so() -> None:
    class Asking(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y if y.sum().item() > 0 else -y

    def asking() -> Any:
        return Asking(4, 4), torch.zeros(2, 4)

    with pytest.raises(WherryError, match="asks for the value of a tensor"):
        dry_run(find(asking), config(0), ranks=2)


def test_a_model_without_inputs_and_a_wrong_rank() -> None:
    with pytest.raises(WherryError, match="the model and its inputs"):
        dry_run(find(lambda: torch.nn.Linear(4, 4)), config(0), ranks=2)
    with pytest.raises(WherryError, match="rank: expected 0 to 1, got 2"):
        dry_run(find(make), config(0), ranks=2, rank=2)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_there_is_already_is_left_alone(device: str) -> None:
    with torch.device(device):
        model, args = make()
    before = {name: (p, p.dtype, p.device, None if p.is_meta else p.clone()) for name, p in model.named_parameters()}
    told = dry_run(find(lambda: (model, args)), config(3), ranks=4, sequence=24)
    expected = dry_run(find(make), config(3), ranks=4, sequence=24)
    assert (told.calls, told.bytes) == (expected.calls, expected.bytes)
    for line, other in zip(told.memory, expected.memory, strict=True):
        assert line.at_peak == pytest.approx(other.at_peak, abs=1024), line.category  # of the inputs, two or one
    for name, p in model.named_parameters():
        same, dtype, where, values = before[name]
        assert p is same and (p.dtype, p.device) == (dtype, where)
        assert values is None or torch.equal(p, values)


def test_inputs_in_a_mapping_that_torch_does_not_know() -> None:
    """As what a tokenizer returns, with attributes, inside a tuple."""

    class Tokens(UserDict):  # type: ignore[type-arg]
        def __getattr__(self, name: str) -> Any:
            return self.data[name]

    class Reads(torch.nn.Linear):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch.rows[0]).sum()

    given = Tokens(rows=[torch.ones(4, 4)])
    told = dry_run(find(lambda: (Reads(4, 4), (given,))), config(0, precision="fp32"), ranks=2)
    assert told.parameters == 20
    assert torch.equal(given["rows"][0], torch.ones(4, 4))


def test_the_footprint_follows_storages() -> None:
    with Footprint() as footprint:
        x = torch.zeros(100)
        view = x[10:20]
        del x
        assert footprint.live["activations"] == 400
        footprint.label("kept", [view])
        y = torch.ones(50)
        assert footprint.now() == {"activations": 200, "kept": 400}
        del view, y
        assert footprint.now() == {"activations": 0, "kept": 0}
        grown = torch.zeros(10)
        grown.untyped_storage().resize_(0)
        footprint.follow_resized("elastic")
        assert footprint.now() == {"activations": 0, "kept": 0, "elastic": 0}
        grown.untyped_storage().resize_(4000)
        footprint.sample()
        assert footprint.peaks["elastic"] == 4000
    assert footprint.peak == 4000


@pytest.mark.long
def test_checkpoints_are_shared_out_over_tensor_parallel_ranks() -> None:
    layers, width, tokens = 3, 512, 4 * 256
    source = of_shape("gpt2", Shape(layers, width, 8, 256, 512))

    def highest(**more: Any) -> int:
        given = config(0, precision="fp32") | {"train_micro_batch_size_per_gpu": 4}
        given["activation_checkpointing"] = {"policy": "recompute", **more}
        told = dry_run(source, given, ranks=1, tensor=4, gpu=True)
        return next(line.highest for line in told.memory if line.category == "activations")

    # Each of four keeps a quarter of every checkpoint, and has one whole while it is needed.
    checkpoint = 4 * tokens * width
    assert highest() - highest(partition_activations=True) >= (layers * 3 / 4 - 1) * checkpoint
