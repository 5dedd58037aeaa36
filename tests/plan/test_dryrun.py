"""The dry run against real engines: the same collectives, and the same bytes by category."""

from __future__ import annotations

import json
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forks import ENGINE, Forks
from tests.plan.measured import make, measure

from wherry.errors import WherryError
from wherry.observe.footprint import Footprint
from wherry.parallel import comm
from wherry.plan.dry_run import dry_run
from wherry.sources import find, of_shape
from wherry.train.presets import Shape

# Every flat by itself: which small ones travel together depends on buffers that this compares.
ALONE = {"reduce_bucket_size": 0, "allgather_bucket_size": 0}


@pytest.fixture(autouse=True)
def of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real engines' ranks are threads here, which sum in place of what gloo would send."""
    monkeypatch.setattr(comm, "EXCHANGED", -1)


def config(stage: int, accumulation: int = 1, precision: str = "bf16", **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **ALONE},
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
        **more,
    }


def assert_same(given: dict[str, Any], ranks: int) -> None:
    for rank, real in enumerate(measure(given, ranks)):
        told = dry_run(find(make), given, ranks=ranks, rank=rank, sequence=24)
        assert (told.calls, told.bytes) == (real.calls, real.bytes)
        lines = real.lines(gpu=False)
        assert [(line.category, line.tier) for line in told.memory] == [(line.category, line.tier) for line in lines]
        for line, other in zip(told.memory, lines, strict=True):
            assert line.at_peak == pytest.approx(other.at_peak, rel=0.001, abs=64), line.category
            assert line.highest == pytest.approx(other.highest, rel=0.001, abs=64), line.category


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_as_a_real_engine(stage: int, ranks: int) -> None:
    assert_same(config(stage), ranks)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_other_precisions(precision: str) -> None:
    assert_same(config(3, precision=precision), 2)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_long_window_is_told_by_short_ones(stage: int) -> None:
    assert_same(config(stage, accumulation=5), 2)


def test_a_window_whose_micro_batches_go_together() -> None:
    assert_same(config(3, accumulation=3, wherry={"accumulation": "layer_major"}), 2)


@pytest.mark.parametrize("block", [{"policy": "recompute"}, {"every": 2}, {"save_operations": ["matmul"]}])
def test_recomputation(block: dict[str, Any]) -> None:
    again = config(3, activation_checkpointing=block)
    assert_same(again, 2)
    kept, recomputed = (
        next(line.highest for line in dry_run(find(make), given, ranks=2, sequence=24).memory
             if line.category == "activations")
        for given in (config(3), again)
    )  # fmt: skip
    assert recomputed < kept


def test_clipping_loss_scale_and_fp32_gradients() -> None:
    assert_same(config(2, precision="fp16", gradient_clipping=1.0, data_types={"grad_accum_dtype": "fp32"}), 2)


@pytest.mark.parametrize("stage", [1, 3])
def test_groups_of_ranks(stage: int) -> None:
    given = config(stage, accumulation=2)
    given["zero_optimization"]["mics_shard_size"] = 2
    assert_same(given, 4)


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


def test_a_trillion_parameters_over_a_thousand_ranks(tmp_path: Path) -> None:
    (tmp_path / "zero3.json").write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}')
    program = (
        "import sys, time\n"
        "from wherry.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "held = open('/proc/self/status').read().split('VmHWM:')[1].split()[0]\n"
        "print(int(held) * 1024, time.process_time(), file=sys.stderr)\n"
    )
    flags = ("gpt-1t", "--dry-run", "--ranks", "1024", "--gpus", "0", "--config", "zero3.json", "--json")
    with Forks(*ENGINE) as forks:
        done = forks.run("-c", program, "plan", *flags, folder=tmp_path, launched=False, timeout=600.0)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    held, worked = map(float, done.stderr.splitlines()[-1].split())
    assert told["parameters"] > 1e12 and told["ranks"] == 1024
    assert held < 8e9
    assert worked < 120


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


def test_checkpoints_are_shared_out_over_tensor_parallel_ranks() -> None:
    layers, width, tokens = 8, 512, 4 * 256
    source = of_shape("gpt2", Shape(layers, width, 8, 256, 512))

    def highest(**more: Any) -> int:
        given = config(0, precision="fp32") | {"train_micro_batch_size_per_gpu": 4}
        given["activation_checkpointing"] = {"policy": "recompute", **more}
        told = dry_run(source, given, ranks=1, tensor=4, gpu=True)
        return next(line.highest for line in told.memory if line.category == "activations")

    # Each of four keeps a quarter of every checkpoint, and has one whole while it is needed.
    checkpoint = 4 * tokens * width
    assert highest() - highest(partition_activations=True) >= (layers * 3 / 4 - 1) * checkpoint
