"""Counted, not guessed: the collectives and bytes of a step, and the bytes a rank holds."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from tests.engine.harness import PeakGathered, adamw, make_model, settings, token_batch
from tests.plan.measured import Unseen
from torch import nn

import wherry
from wherry.observe.footprint import Footprint
from wherry.parallel.comm import Comm
from wherry.sharding.unit import Weights
from wherry.testing import run_ranks
from wherry.tiers.elastic import Elastic

# A shard is a multiple of 128 elements, and a parameter starts on a multiple of 32.
SHARD, PARAMETER = 128, 32


def padded(model: torch.nn.Module, ranks: int) -> dict[str, int]:
    """Elements of each unit with its padding, worked out from the shapes alone."""
    units: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        unit = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else "root"
        units[unit] += -(-parameter.numel() // PARAMETER) * PARAMETER
    multiple = ranks * SHARD
    return {unit: -(-numel // multiple) * multiple for unit, numel in units.items()}


# Bytes of an element's weight and gradient, and of its state: Adam's moments, and what fp32 masters take beside them.
# The upper half of a bf16 weight's master is the weight itself.
PRECISIONS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "fp32": (4, 8, {}),
    "bf16": (2, 2 + 8, {"bf16": {"enabled": True}}),
    "fp16": (2, 4 + 8, {"fp16": {"enabled": True, "loss_scale": 128}}),
}


def measure(
    stage: int, ranks: int, accumulation: int, precision: str, steps: int = 3, **zero: int
) -> list[dict[str, Any]]:
    """Traffic of one step after the first two, by rank."""
    model = make_model()

    def body(comm: Comm) -> dict[str, Any]:
        mine = copy.deepcopy(model)
        config = settings(stage, accumulation, more=PRECISIONS[precision][2])
        config["zero_optimization"] |= zero
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=config, mesh=comm)
        for step in range(steps):
            comm.traffic.clear()
            for micro in range(accumulation):
                engine.backward(engine(*token_batch(step, micro, comm.rank)))
                engine.step()
        return {
            "calls": dict(comm.traffic.calls),
            "bytes": dict(comm.traffic.bytes),
            # What a rank sends in the limit of many: an all-reduce moves its tensor twice, the others once.
            "volume": sum(n * (2 if name == "all_reduce" else 1) for name, n in comm.traffic.bytes.items()),
        }

    return run_ranks(ranks, body)


NORM = 16  # two float64 scalars: the square, and whether gradients are missing
MISSING = 4  # at stage 0, where no norm travels, that alone
DIGEST = 32  # at stage 3 four more: what the rank has gathered, and which units it ran
ALL_TOGETHER = 10**6


@pytest.mark.parametrize(
    ("ranks", "accumulation", "precision", "bucket"),
    [
        *[(ranks, accumulation, "fp32", 0) for ranks in (2, 4) for accumulation in (1, 3)],
        (2, 1, "bf16", 0),
        (4, 3, "bf16", 0),
        (2, 3, "fp16", 0),
        (4, 1, "fp16", 0),
        (2, 1, "fp32", ALL_TOGETHER),
        (4, 3, "bf16", ALL_TOGETHER),
        (2, 1, "fp16", ALL_TOGETHER),
    ],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_collectives_of_a_step_equal_the_formulas(
    stage: int, ranks: int, accumulation: int, precision: str, bucket: int
) -> None:
    """2 psi at stages 0 to 2 and 3 psi at stage 3, of the working dtype; together flats have fewer calls, and no less
    or more bytes."""
    units = padded(make_model(), 1 if stage == 0 else ranks)
    word = PRECISIONS[precision][0]
    psi, count = word * sum(units.values()), len(units)
    k, flats = accumulation, 1 if bucket else count
    # Weights in forward and in backward, the root unit once for both: 2 psi less one of the root. Together: the root
    # unit, and of either pass the block that is waited for and those ahead of it.
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


# Bytes of single numbers: what the loss is scaled to, the norm, a NaN for each flat.
SMALL = 1024


def storages(engine: Any) -> dict[str, int]:
    """Bytes of each state at this moment, and of gradients that autograd has brought."""
    found: Counter[str] = Counter()
    for row in engine.memory():
        found["parameters" if row.state == "gathered" else row.state] += row.bytes_actual
    brought = {p.grad.untyped_storage() for p in engine.module.parameters() if p.grad is not None}
    found["gradients"] += sum(storage.nbytes() for storage in brought)
    return dict(found)


class Watch:
    """The most bytes of each state, looked at whenever a module begins and whenever a gradient comes."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.highest: Counter[str] = Counter()
        self.engine: Any = None
        self._on_gradients(model)

    def _on_gradients(self, model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self.look())

    def begin(self, engine: Any) -> None:
        """Looks twice at each gradient: before the engine has seen it, and after."""
        self.engine = engine
        self._on_gradients(engine.module)
        for module in engine.module.modules():
            module.register_forward_pre_hook(lambda *_: self.look())

    def look(self) -> None:
        if self.engine is not None:
            for state, nbytes in storages(self.engine).items():
                self.highest[state] = max(self.highest[state], nbytes)


def one_token(step: int, rank: int) -> tuple[torch.Tensor, ...]:
    """So little that activations hide nothing."""
    ids, targets = token_batch(step, 0, rank, size=1)
    return ids[:, :1].clone(), targets[:, :1].clone()


class Measured(Footprint):
    """Memory that stays at its addresses counts as much as is filled of it."""

    gathered: tuple[Elastic, ...] = ()

    def now(self) -> dict[str, int]:
        return super().now() | {"gathered": sum(elastic.nbytes for elastic in self.gathered)}


def watched(stage: int, ranks: int, precision: str) -> list[dict[str, Any]]:
    """Memory of three steps by rank: at rest, at the peak, and of all tensors that the rank's thread has made."""
    model = make_model()

    def body(comm: Comm) -> dict[str, Any]:
        comm.__class__ = Unseen
        mine = copy.deepcopy(model)
        watch = Watch(mine)
        with Measured() as footprint:
            config = settings(stage, more=PRECISIONS[precision][2])
            config["zero_optimization"]["stage3_max_live_parameters"] = 0
            engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=config, mesh=comm)
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
                comm.barrier()  # until then another rank may hold what it reads of this one's
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
    """The most bytes that plain PyTorch's forward and backward make, with every gradient let go as it comes."""
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


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_of_a_rank_equals_the_formulas(stage: int, ranks: int, precision: str) -> None:
    """In fp16 2 psi + 2 psi + 12 psi, each divided by the ranks where it is partitioned; 4 + 4 + 8 in fp32.

    In bf16 the working weights are the upper halves of the masters: weights and optimizer together are 12 psi. Psi has
    the padding in it. At the peak there are besides, of whole flats: at stage 3 the root unit and the unit at work; of
    gradients those that autograd has brought of the root unit and of one other, and from stage 2 on two on their way
    and the root's.
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
    brought = root + block
    on_the_way = root + 2 * block if stage >= 2 and ranks > 1 else 0
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
        # Of the tensors themselves.
        assert peak["parameters"] == rest["parameters"] + word * live
        assert peak["gradients"] >= rest["gradients"]
        assert peak["gradients"] <= rest["gradients"] + word * brought
        assert rest["optimizer"] - padding <= peak["optimizer"] <= rest["optimizer"] + lines
        # And nothing else rests, nor is there at the peak, but buffers of gradients on their way and single numbers.
        on_the_way = word * on_the_way + SMALL
        assert -SMALL <= seen["everything at rest"] - sum(seen["rest"].values()) <= on_the_way
        assert seen["everything at peak"] <= sum(peak.values()) + on_the_way + activations(precision)


@pytest.mark.parametrize("ranks", [2, 4])
def test_gathered_weights_stay_within_the_budget(ranks: int) -> None:
    """At most the root unit, the unit at work and the ones prefetched are whole; with no prefetch, two units."""
    model = make_model()
    units = padded(model, ranks)

    def body(comm: Comm) -> int:
        mine = copy.deepcopy(model)
        config = settings(3)
        config["zero_optimization"]["stage3_max_live_parameters"] = 0
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=config, mesh=comm)
        peak = PeakGathered(engine)
        for step in range(2):
            engine.backward(engine(*token_batch(step, 0, comm.rank)))
            engine.step()
        return peak.take() // 4

    block = max(numel for unit, numel in units.items() if unit != "root")
    assert run_ranks(ranks, body) == [units["root"] + block] * ranks


def test_prefetch_follows_the_schedule() -> None:
    """From the second step on, a unit's gather is under way before its forward asks for it."""
    model = make_model()

    def body(comm: Comm) -> list[int]:
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=settings(3), mesh=comm)
        peak, peaks = PeakGathered(engine), []
        for step in range(2):
            peak.take()
            loss = engine(*token_batch(step, 0, comm.rank))
            peaks.append(peak.take())
            engine.backward(loss)
            engine.step()
        return peaks

    first, second = run_ranks(2, body)[0]
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


def test_a_small_unit_does_not_take_the_place_of_the_large_one_behind_it() -> None:
    model = make_model(Unlike)

    def body(comm: Comm) -> list[set[str]]:
        mine = copy.deepcopy(model)
        zero = {"stage3_prefetch_bucket_size": 1100, "allgather_bucket_size": 500}
        engine, *_ = wherry.initialize(
            model=mine, optimizer=adamw(mine.parameters()), config=settings(3, more={"zero_optimization": zero}),
            mesh=comm,
        )  # fmt: skip
        on_the_way: list[set[str]] = []

        def note(*_: Any) -> None:
            flats = [flat for unit in engine.units for flat in unit.travelling]
            on_the_way.append({flat.name for flat in flats if flat.weights is Weights.GATHERING})

        mine.blocks[0][0].register_forward_pre_hook(note)
        mine.blocks[4][1].register_full_backward_hook(note)
        for _ in range(3):
            on_the_way.clear()
            engine.backward(engine(torch.ones(2, 32)))
            engine.step()
        engine.close()
        return on_the_way

    forward, backward = run_ranks(2, body)[0]
    assert "blocks.2" in forward and "blocks.2" in backward


def test_small_flats_stay_whole_below_the_persistence_threshold() -> None:
    model = make_model()

    def body(comm: Comm) -> dict[str, int]:
        mine = copy.deepcopy(model)
        config = settings(3)
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 10**6
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=config, mesh=comm)
        comm.traffic.clear()
        engine.backward(engine(*token_batch(0, 0, comm.rank)))
        engine.step()
        return dict(comm.traffic.calls)

    # Gathered once, after the update, as at stage 2.
    assert run_ranks(2, body)[0]["all_gather"] == len(padded(model, 2))
