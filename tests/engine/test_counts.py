"""Collectives and bytes of a step, and the bytes that a rank holds, equal their formulas."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from tests.engine.harness import PeakGathered, engine_of, make_model, on_ranks, settings, token_batch, train
from tests.plan.measured import Unseen
from torch import nn

from wherry.observe.footprint import Footprint
from wherry.parallel.comm import Comm
from wherry.sharding.unit import Weights
from wherry.testing import run_ranks
from wherry.tiers.elastic import Elastic

# A shard is a multiple of 128 elements, and a parameter starts on a multiple of 32.
SHARD, PARAMETER = 128, 32


def padded(model: torch.nn.Module, ranks: int) -> dict[str, int]:
    """Compute each unit's elements with its padding from the shapes alone."""
    units: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        unit = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else "root"
        units[unit] += -(-parameter.numel() // PARAMETER) * PARAMETER
    multiple = ranks * SHARD
    return {unit: -(-numel // multiple) * multiple for unit, numel in units.items()}


# Bytes of an element's weight and gradient; of its state: Adam's moments, and an fp32 master beside them; the config.
# The upper half of a bf16 weight's master is the weight itself.
PRECISIONS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "fp32": (4, 8, {}),
    "bf16": (2, 2 + 8, {"bf16": {"enabled": True}}),
    "fp16": (2, 4 + 8, {"fp16": {"enabled": True, "loss_scale": 128}}),
}


def measure(stage: int, ranks: int, accumulation: int, precision: str, **zero: int) -> list[dict[str, Any]]:
    """Return the traffic of the third step, by rank."""

    def use(engine: Any) -> dict[str, Any]:
        traffic = engine.comm.traffic
        train(engine, 2)
        traffic.clear()
        train(engine, 3, 2)
        # In the limit of many ranks, an all-reduce sends its tensor twice, other collectives once.
        volume = sum(n * (2 if name == "all_reduce" else 1) for name, n in traffic.bytes.items())
        return {"calls": dict(traffic.calls), "bytes": dict(traffic.bytes), "volume": volume}

    config = {**PRECISIONS[precision][2], "zero_optimization": zero}
    return on_ranks(use, ranks=ranks, stage=stage, accumulation=accumulation, config=config)


NORM = 16  # two float64 scalars: the square, and whether gradients are missing
MISSING = 4  # at stage 0, without a norm, the second alone
DIGEST = 32  # at stage 3 four more: the gathers of the rank, and the units that it ran
ALL_TOGETHER = 10**6


@pytest.mark.parametrize(
    ("ranks", "accumulation", "precision", "bucket"),
    [(2, 3, "fp32", 0), (4, 1, "bf16", ALL_TOGETHER), (2, 1, "fp16", 0)],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_collectives_of_a_step_equal_the_formulas(
    stage: int, ranks: int, accumulation: int, precision: str, bucket: int
) -> None:
    """Expect 2 psi at stages 0 to 2 and 3 psi at stage 3, of the working dtype; flats together take fewer calls."""
    units = padded(make_model(), 1 if stage == 0 else ranks)
    word = PRECISIONS[precision][0]
    psi, count = word * sum(units.values()), len(units)
    k, flats = accumulation, 1 if bucket else count
    # Weights in forward and in backward, the root unit once for both: 2 psi less one of the root. Together: the root
    # unit, and in each pass the current block and the prefetched ones.
    gathers = 5 if bucket else 2 * count - 1
    gathered = 2 * psi - word * units["root"]
    calls, nbytes, volume = {
        # Gradients once a window, all-reduced: 2 psi.
        0: ({"all_reduce": flats + 1}, {"all_reduce": psi + MISSING}, 2 * (psi + MISSING)),
        # Gradients once a window, reduce-scattered, and updated weights gathered: 2 psi.
        1: (
            {"reduce_scatter": flats, "all_gather": flats, "all_reduce": 1},
            {"reduce_scatter": psi, "all_gather": psi, "all_reduce": NORM},
            2 * psi + 2 * NORM,
        ),
        # Gradients every micro-batch, and updated weights: (k + 1) psi.
        2: (
            {"reduce_scatter": k * flats, "all_gather": flats, "all_reduce": 1},
            {"reduce_scatter": k * psi, "all_gather": psi, "all_reduce": NORM},
            (k + 1) * psi + 2 * NORM,
        ),
        # Weights twice and gradients, every micro-batch: 3 psi.
        3: (
            {"reduce_scatter": k * flats, "all_gather": k * gathers, "all_reduce": 1},
            {"reduce_scatter": k * psi, "all_gather": k * gathered, "all_reduce": NORM + DIGEST},
            k * (psi + gathered) + 2 * (NORM + DIGEST),
        ),
    }[stage]
    zero = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    for seen in measure(stage, ranks, accumulation, precision, **zero):
        assert seen["calls"] == calls
        assert seen["bytes"] == nbytes
        assert seen["volume"] == volume


# Bytes of scalars: the loss scale, the norm, a NaN for each flat.
SMALL = 1024


def storages(engine: Any) -> dict[str, int]:
    """Return the current bytes of each state, and of the gradients that autograd holds."""
    nbytes: Counter[str] = Counter()
    for row in engine.memory():
        nbytes["parameters" if row.state == "gathered" else row.state] += row.bytes_actual
    storages = {p.grad.untyped_storage() for p in engine.module.parameters() if p.grad is not None}
    nbytes["gradients"] += sum(storage.nbytes() for storage in storages)
    return dict(nbytes)


class Watch:
    """The most bytes of each state, sampled at each module's forward and at each gradient."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.highest: Counter[str] = Counter()
        self.engine: Any = None
        self._on_gradients(model)

    def _on_gradients(self, model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self.look())

    def begin(self, engine: Any) -> None:
        """Sample each gradient a second time, after the engine's hook."""
        self.engine = engine
        self._on_gradients(engine.module)
        for module in engine.module.modules():
            module.register_forward_pre_hook(lambda *_: self.look())

    def look(self) -> None:
        if self.engine is not None:
            for state, nbytes in storages(self.engine).items():
                self.highest[state] = max(self.highest[state], nbytes)


def one_token(step: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Return a batch whose activations are small beside all else."""
    ids, targets = token_batch(step, 0, rank, size=1)
    return ids[:, :1].clone(), targets[:, :1].clone()


class Measured(Footprint):
    """A footprint that counts the used part of memory which keeps its addresses."""

    gathered: tuple[Elastic, ...] = ()

    def now(self) -> dict[str, int]:
        return super().now() | {"gathered": sum(elastic.nbytes for elastic in self.gathered)}


def watched(stage: int, ranks: int, precision: str) -> list[dict[str, Any]]:
    """Measure each rank's memory in the last of three steps: at rest, at the peak, and of all tensors of its thread."""
    model = make_model()

    def body(comm: Comm) -> dict[str, Any]:
        comm.__class__ = Unseen
        mine = copy.deepcopy(model)
        watch = Watch(mine)
        with Measured() as footprint:
            config = settings(stage, more=PRECISIONS[precision][2])
            config["zero_optimization"]["stage3_max_live_parameters"] = 0
            engine = engine_of(mine, config, comm)
            watch.begin(engine)
            footprint.gathered = tuple(flat.elastic for unit in engine.units for flat in unit.travelling)
            footprint.label("gathered", [elastic.tensor for elastic in footprint.gathered])
            footprint.label_rest("engine")
            for step in range(3):
                batch = one_token(step, comm.rank)
                footprint.label("batch", batch)
                footprint.reset()
                engine.backward(engine(*batch))
                engine.step()
                comm.barrier()  # until then another rank may read tensors of this one
            rest = storages(engine)
            del batch
            return {
                "rows": {row.state: row for row in engine.memory()},
                "rest": rest,
                "peak": dict(watch.highest),
                "everything at rest": sum(footprint.now().values()),
                "everything at peak": footprint.peak,
            }

    return run_ranks(ranks, body)


@functools.cache
def activations(precision: str) -> int:
    """Measure the peak of plain PyTorch's forward and backward, with every gradient freed at once."""
    with Footprint() as footprint:
        model = copy.deepcopy(make_model())
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        batch = one_token(0, 0)
        footprint.label_rest("rest")
        footprint.reset()
        model(*batch).backward()
        return footprint.peaks["activations"]


@pytest.mark.parametrize(
    ("stage", "ranks", "precision"),
    [
        (0, 2, "fp16"),
        (1, 2, "bf16"),
        (2, 2, "fp32"),
        (3, 1, "bf16"),
        (3, 2, "fp16"),
        (3, 4, "fp32"),
    ],
)
def test_memory_of_a_rank_equals_the_formulas(stage: int, ranks: int, precision: str) -> None:
    """Expect 2 psi + 2 psi + 12 psi in fp16, each divided by the ranks where it is partitioned; 4 + 4 + 8 in fp32.

    In bf16 the working weights are the upper halves of the masters: weights and optimizer together are 12 psi. Psi
    includes the padding. The peak adds whole flats: at stage 3 the root unit and the current unit; gradients that
    autograd holds of the root unit and of one other, and from stage 2 on the root's and two that are being reduced.
    """
    units = padded(make_model(), ranks if stage else 1)
    root, block = units["root"], max(numel for unit, numel in units.items() if unit != "root")
    psi = sum(units.values())
    payload = sum(parameter.numel() for parameter in make_model().parameters())
    word, state, _ = PRECISIONS[precision]
    per = {
        name: ranks if stage >= level else 1 for name, level in (("optimizer", 1), ("gradients", 2), ("parameters", 3))
    }
    rest = {
        "parameters": word * psi // per["parameters"],
        "gradients": word * psi // per["gradients"],
        "optimizer": state * psi // per["optimizer"],
    }
    live = root + block if stage == 3 and ranks > 1 else 0
    held = root + block
    in_flight = word * (root + 2 * block if stage >= 2 and ranks > 1 else 0) + SMALL
    # Rules keep state for parameters and not for padding; its fields begin at cache lines.
    padding, lines = state * (psi - payload), 64 * 4 * len(list(make_model().parameters()))
    for seen in watched(stage, ranks, precision):
        rows, peak = seen["rows"], seen["peak"]
        assert rows["parameters"].bytes_actual == rest["parameters"]
        assert rows["gradients"].bytes_actual == rest["gradients"]
        assert rest["optimizer"] - padding <= rows["optimizer"].bytes_actual <= rest["optimizer"]
        assert rows["gathered"].bytes_actual == 0
        for row in rows.values():
            if row.state != "optimizer":
                assert row.bytes_actual <= row.bytes_expected
        # Measured on the tensors themselves.
        assert peak["parameters"] == rest["parameters"] + word * live
        assert peak["gradients"] >= rest["gradients"]
        assert peak["gradients"] <= rest["gradients"] + word * held
        assert rest["optimizer"] - padding <= peak["optimizer"] <= rest["optimizer"] + lines
        # Nothing else exists, but buffers of gradients in flight and scalars.
        assert -SMALL <= seen["everything at rest"] - sum(seen["rest"].values()) <= in_flight
        assert seen["everything at peak"] <= sum(peak.values()) + in_flight + activations(precision)


@pytest.mark.parametrize("ranks", [2, 4])
def test_gathered_weights_stay_within_the_budget(ranks: int) -> None:
    """Expect, without a prefetch, two whole units: the root unit and the current one."""
    units = padded(make_model(), ranks)

    def use(engine: Any) -> int:
        peak = PeakGathered(engine)
        train(engine, 2)
        return peak.take() // 4

    block = max(numel for unit, numel in units.items() if unit != "root")
    config = {"zero_optimization": {"stage3_max_live_parameters": 0}}
    assert on_ranks(use, ranks=ranks, config=config) == [units["root"] + block] * ranks


def test_prefetch_follows_the_schedule() -> None:
    """Expect a unit's gather to start before its forward from the second step on."""

    def use(engine: Any) -> list[int]:
        peak, peaks = PeakGathered(engine), []
        for step in range(2):
            peak.take()
            loss = engine(*token_batch(step, 0, engine.comm.rank))
            peaks.append(peak.take())
            engine.backward(loss)
            engine.step()
        return peaks

    first, second = on_ranks(use)[0]
    assert second > first


class Unlike(nn.Module):
    """Large units with small ones between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(n, n), nn.Tanh()) for n in (32, 4, 32, 4, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x.repeat(1, 8)[:, : block[0].in_features])
        return x.square().mean()


def test_a_small_unit_does_not_displace_the_large_one_behind_it() -> None:
    def use(engine: Any) -> list[set[str]]:
        in_flight: list[set[str]] = []

        def note(*_: Any) -> None:
            flats = [flat for unit in engine.units for flat in unit.travelling]
            in_flight.append({flat.name for flat in flats if flat.weights is Weights.GATHERING})

        engine.module.blocks[0][0].register_forward_pre_hook(note)
        engine.module.blocks[4][1].register_full_backward_hook(note)
        for _ in range(3):
            in_flight.clear()
            engine.backward(engine(torch.ones(2, 32)))
            engine.step()
        return in_flight

    zero = {"stage3_prefetch_bucket_size": 1100, "allgather_bucket_size": 500}
    forward, backward = on_ranks(use, model=make_model(Unlike), config={"zero_optimization": zero})[0]
    assert "blocks.2" in forward and "blocks.2" in backward


def test_flats_below_the_persistence_threshold_stay_whole() -> None:
    def use(engine: Any) -> int:
        engine.comm.traffic.clear()
        train(engine, 1)
        return engine.comm.traffic.calls["all_gather"]

    # Gathered once, after the update, as at stage 2.
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 10**6}}
    assert on_ranks(use, config=config)[0] == len(padded(make_model(), 2))


def test_the_persistence_limit_bounds_their_sum() -> None:
    def use(engine: Any) -> list[str]:
        return [flat.name for unit in engine.units for flat in unit.flats if flat.resident]

    zero = {"stage3_param_persistence_threshold": 10**6, "stage3_model_persistence_threshold": 2500}
    assert on_ranks(use, config={"zero_optimization": zero})[0] == ["root", "blocks.0"]
