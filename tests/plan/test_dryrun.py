"""The dry run against real engines: the same collectives, and the same bytes by category."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from tests.plan.measured import config, make, measure

from wherry.errors import WherryError
from wherry.observe.footprint import Footprint
from wherry.parallel import comm
from wherry.plan.dry_run import dry_run
from wherry.sources import find, of_shape
from wherry.train.presets import Shape


@pytest.fixture(autouse=True)
def of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real engines' ranks are threads, which sum where gloo would exchange."""
    monkeypatch.setattr(comm, "EXCHANGED", -1)


def small(micro_batch: int = 2, sequence: int = 24) -> tuple[torch.nn.Module, Any]:
    """Few operations, for windows of many micro-batches."""
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()), (torch.zeros(micro_batch, sequence, 64),)


# Every stage, precision, kind of window and number of ranks once, of which the last is counted. A long window is
# counted by short ones.
CASES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "data parallel, alone": (make, 1, config(0, precision="fp32")),
    "data parallel": (make, 2, config(0)),
    "a long window": (small, 2, config(1, accumulation=5, precision="fp32")),
    "fp16, clipped, gradients in fp32": (
        make, 2, config(2, precision="fp16", gradient_clipping=1.0, data_types={"grad_accum_dtype": "fp32"}),
    ),
    "micro-batches together": (make, 2, config(3, accumulation=2, wherry={"accumulation": "layer_major"})),
    "ZeRO-3 in fp32": (make, 2, config(3, precision="fp32")),
    "ZeRO-3, a long window": (small, 2, config(3, accumulation=5, precision="fp32")),
    "recomputed": (make, 1, config(3, activation_checkpointing={"policy": "recompute"})),
    "some operations recomputed": (make, 1, config(3, activation_checkpointing={"save_operations": ["matmul"]})),
    "groups of ranks": (make, 4, config(3, zero_optimization=config(3)["zero_optimization"] | {"mics_shard_size": 2})),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_a_real_engine(name: str) -> None:
    build, ranks, given = CASES[name]
    real = measure(given, ranks, build=build)[-1]
    told = dry_run(find(build), given, ranks=ranks, rank=ranks - 1, sequence=24)
    assert (told.calls, told.bytes) == (real.calls, real.bytes)
    lines = real.lines(gpu=False)
    assert [(line.category, line.tier) for line in told.memory] == [(line.category, line.tier) for line in lines]
    for line, other in zip(told.memory, lines, strict=True):
        assert line.at_peak == pytest.approx(other.at_peak, rel=0.001, abs=64), line.category
        assert line.highest == pytest.approx(other.highest, rel=0.001, abs=64), line.category


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


def test_what_cannot_be_run_is_refused() -> None:
    class Asking(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y if y.sum().item() > 0 else -y

    for source, rank, message in (
        (lambda: (Asking(4, 4), torch.zeros(2, 4)), 0, "asks for the value of a tensor"),
        (lambda: torch.nn.Linear(4, 4), 0, "the model and its inputs"),
        (make, 2, "rank: expected 0 to 1, got 2"),
    ):
        with pytest.raises(WherryError, match=message):
            dry_run(find(source), config(0), ranks=2, rank=rank)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_there_is_already_is_left_alone(device: str) -> None:
    with torch.device(device):
        model, args = make()
    before = {name: (p, p.dtype, p.device, None if p.is_meta else p.clone()) for name, p in model.named_parameters()}
    told = dry_run(find(lambda: (model, args)), config(3), ranks=4, sequence=24)
    expected = dry_run(find(make), config(3), ranks=4, sequence=24)
    assert (told.calls, told.bytes) == (expected.calls, expected.bytes)
    for name, p in model.named_parameters():
        same, dtype, where, values = before[name]
        assert p is same and (p.dtype, p.device) == (dtype, where)
        assert values is None or torch.equal(p, values)


def test_inputs_in_a_mapping_that_torch_does_not_know() -> None:
    """Give a mapping with attributes, which a tokenizer returns, inside a tuple."""

    class Tokens(UserDict):  # type: ignore[type-arg]
        def __getattr__(self, name: str) -> Any:
            return self.data[name]

    class Reads(torch.nn.Linear):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch.rows[0]).sum()

    given = Tokens(rows=[torch.ones(4, 4)])
    assert dry_run(find(lambda: (Reads(4, 4), (given,))), config(0, precision="fp32"), ranks=2).parameters == 20
    assert torch.equal(given["rows"][0], torch.ones(4, 4))


def test_the_footprint_follows_storages() -> None:
    with Footprint() as footprint:
        x = torch.zeros(100)
        view = x[10:20]
        del x
        footprint.label("kept", [view])
        y = torch.ones(50)
        assert footprint.now() == {"activations": 200, "kept": 400}
        del view, y
        grown = torch.zeros(10)
        grown.untyped_storage().resize_(0)
        footprint.follow_resized("elastic")
        assert footprint.now() == {"activations": 0, "kept": 0, "elastic": 0}
        grown.untyped_storage().resize_(4000)
        footprint.sample()
    assert footprint.peaks["elastic"] == 4000 == footprint.peak
