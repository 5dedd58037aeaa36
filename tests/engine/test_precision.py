"""bf16, fp16 and torch_autocast: masters, accumulation dtype, loss scale, skipped steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    WIDTH,
    TinyLM,
    adamw,
    assert_close,
    assert_equal,
    assert_same,
    engine_of,
    make_model,
    on_ranks,
    settings,
    token_batch,
    train_engine,
    train_masters,
    train_plain,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import lr_scheduler as torch_schedules
from torch.utils._python_dispatch import TorchDispatchMode

import wherry
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.update.loss_scale import LossScaleError


@pytest.mark.parametrize(("stage", "accumulate"), [(0, "bf16"), (2, "fp32"), (3, "bf16"), (3, "fp32"), (2, "fp16")])
def test_half_precision_equals_fp32_masters_in_plain_pytorch(stage: int, accumulate: str) -> None:
    """Train in bf16, and in fp16 at a fixed scale."""
    model, half = make_model(), torch.float16 if accumulate == "fp16" else torch.bfloat16
    config: dict[str, Any] = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": accumulate}}
    how: dict[str, Any] = {"accumulate": torch.float32 if accumulate == "fp32" else half, "scale": 1.0}
    if half is torch.float16:
        config, how = {"fp16": {"enabled": True, "loss_scale": 256}}, {"scale": 256.0}
    oracle = train_masters(model, half, steps=6, accumulation=3, **how)
    ours = train_engine(model, stage=stage, accumulation=3, steps=6, config=config)
    assert ours.losses == pytest.approx(oracle.losses, rel=1e-3 if half is torch.float16 else 2e-3)
    for name, weight in oracle.weights.items():
        assert ours.weights[name].dtype == half
        torch.testing.assert_close(ours.weights[name], weight, rtol=1e-2, atol=1e-2)
    # The oracle rounds alike: nearly all working weights have the same bits.
    same = sum(int((ours.weights[n] == w).sum()) for n, w in oracle.weights.items())
    assert same > (0.9 if half is torch.float16 else 0.98) * sum(w.numel() for w in oracle.weights.values())


def test_weights_without_masters_have_the_same_bits_in_every_placement(tmp_path: Path) -> None:
    host, block = {"offload_optimizer": {"device": "cpu"}}, {"enabled": True, "bf16_master_weights_and_grads": True}
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}, "offload_param": {"device": "cpu"}}
    runs = []
    for zero, policy in (({}, "at_step"), (disk, "at_step"), ({}, "in_backward"), (host, "before_use")):
        config = {"bf16": block, "zero_optimization": zero, "wherry": {"update_policy": policy}}
        runs.append(train_engine(make_model(), stage=3, steps=4, config=config))
        assert_equal(runs[-1], runs[0])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_plain_backward_carries_no_loss_scale(stage: int) -> None:
    common: dict[str, Any] = {"ranks": 2, "steps": 3, "config": {"fp16": {"enabled": True, "loss_scale": 256}}}
    ours = train_engine(make_model(), stage=stage, **common)
    plain = train_engine(make_model(), stage=stage, plain_backward=True, **common)
    assert plain.losses == pytest.approx(ours.losses, rel=2e-3)
    assert plain.norms == pytest.approx(ours.norms, rel=2e-2)


def test_gradients_of_inputs_without_the_scale_are_outside_of_the_window() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    config = settings(3, 2, more={"fp16": {"enabled": True, "loss_scale": 128}})
    engine = engine_of(model, config)
    x = torch.ones(1, 4, dtype=torch.float16, requires_grad=True)
    engine.backward(engine(x).sum())
    assert torch.autograd.grad(engine(x).sum(), x)[0].isfinite().all()
    engine.backward(engine(x).sum())
    assert engine.has_gradients()
    engine.step()
    engine.backward(engine(x).sum())
    with pytest.raises(WherryError, match="carry the loss scale and some do not"):
        engine(x).sum().backward()
    engine.close()


def test_scale_is_for_a_plain_backward() -> None:
    model = make_model()
    more = {"fp16": {"enabled": True, "loss_scale": 256}}
    engine = engine_of(model, settings(2, 2, more=more))
    unused = engine.scale(engine(*token_batch(0, 0, 0)))
    assert float(unused.detach()) > 256
    norms = []
    for scaled in (True, False):
        for micro in range(2):
            loss = engine(*token_batch(0, micro, 0))
            (engine.scale(loss) if scaled else loss).backward()
        norms.append(math.hypot(*engine.gradient_norms().values()))
        engine.zero_grad()
    assert norms[0] == pytest.approx(norms[1], rel=2e-2)
    engine.scale(engine(*token_batch(0, 0, 0))).backward()
    with pytest.raises(WherryError, match=r"engine\.scale\(loss\)\.backward"):
        engine(*token_batch(0, 1, 0)).backward()


@pytest.mark.parametrize(("asked", "dtype"), [(None, torch.float32), ("fp16", torch.float16)])
def test_buffers_keep_their_dtype_unless_the_config_has_one(asked: str | None, dtype: torch.dtype) -> None:
    model: Any = nn.Linear(8, 8)
    model.register_buffer("frequencies", torch.arange(8) / 7)
    model.register_buffer("count", torch.tensor(3))
    config = {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": asked}}
    with wherry.initialize(model=model, config=config)[0]:
        assert (model.frequencies.dtype, model.count.dtype) == (dtype, torch.int64)
        assert model.weight.dtype == torch.bfloat16


def test_auto_cast_casts_the_inputs() -> None:
    model = nn.Linear(4, 4)
    engine, *_ = wherry.initialize(model=model, config={"fp16": {"enabled": True, "auto_cast": True}})
    assert engine(torch.ones(2, 4)).dtype == torch.float16
    model.forward = lambda given: (given["x"].dtype, given["n"][0].dtype)
    assert engine({"x": torch.ones(2), "n": [torch.arange(2)]}) == (torch.float16, torch.int64)


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_round_initial_weights_alike(stage: int) -> None:
    """Start from weights in the middle of two bf16 values; at stage 3 some stay whole."""
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(((parameter.view(torch.int32) & ~0xFFFF) | 0x8000).view(torch.float32))

    def use(engine: Any) -> dict[str, torch.Tensor]:
        seen: dict[str, torch.Tensor] = {}
        for name, module in engine.module.named_modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.register_forward_hook(lambda m, i, o, n=name: seen.update({n: m.weight.clone()}))
        with torch.no_grad():
            engine(*token_batch(0, 0, 0))
        return seen

    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage3_param_persistence_threshold": 1000}}
    first, *others = on_ranks(use, ranks=3, stage=stage, model=model, config=config)
    assert first
    for other in others:
        assert_same(other, first)


# torch_autocast.


class Cast(TinyLM):
    """A model whose forward enters autocast: the oracle."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids, targets)


def autocast(dtype: str = "bfloat16", **more: Any) -> dict[str, Any]:
    return {"torch_autocast": {"enabled": True, "dtype": dtype}, **more}


@pytest.mark.parametrize(
    ("stage", "zero", "order"),
    [
        (0, {}, "layer_major"),
        (1, {"offload_optimizer": {"device": "cpu"}}, "step_major"),
        (3, {}, "layer_major"),
        (3, {"offload_param": {"device": "cpu"}}, "step_major"),
    ],
)
def test_training_equals_plain_pytorch_under_autocast(stage: int, zero: dict[str, Any], order: str) -> None:
    common: dict[str, Any] = {"ranks": 2, "accumulation": 2, "steps": 3}
    exact, oracle = (train_plain(make_model(cls), **common) for cls in (TinyLM, Cast))
    config = autocast(zero_optimization=zero, wherry={"accumulation": order})
    ours = train_engine(make_model(), stage=stage, by_window=order == "layer_major", config=config, **common)
    assert_close(ours, oracle, 1e-4)
    assert abs(oracle.losses[0] - exact.losses[0]) > 5e-4 * exact.losses[0]
    assert all(weight.dtype is torch.float32 for weight in ours.weights.values())
    assert not torch.is_autocast_enabled("cpu")


def test_a_recomputation_runs_under_the_same_autocast() -> None:
    kept = train_engine(make_model(), stage=3, ranks=2, steps=2, config=autocast())
    again = autocast(activation_checkpointing={"policy": "recompute"})
    assert_equal(train_engine(make_model(), stage=3, ranks=2, steps=2, config=again), kept)


class Casts(TorchDispatchMode):
    """Record the copies of matrices of blocks that operations make in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and WIDTH in result.shape[-2:] and result.dim() == 2:
            self.made.append(StorageWeakRef(result.untyped_storage()))
        return result


@pytest.mark.parametrize("training", [True, False])
def test_no_copies_of_partitioned_weights_stay(training: bool) -> None:
    """Check that neither autocast's cache nor autograd keeps copies of a released unit's weights."""

    def use(engine: Any) -> tuple[int, int]:
        alive = []
        engine.module.norm.register_forward_pre_hook(
            lambda *_: alive.append(sum(not copied.expired() for copied in casts.made))
        )
        with Casts() as casts, torch.set_grad_enabled(training):
            engine(*token_batch(0, 0, engine.comm.rank))
        return len(casts.made), alive[0]

    made = 3 * 3 + 1  # of three blocks, and of the head after them
    assert on_ranks(use, config=autocast()) == [(made, 0)] * 2


def test_fp16_scales_the_loss_as_torchs_scaler() -> None:
    """Let the first steps overflow: they are skipped and halve the scale; later steps train alike."""
    model = make_model()
    with torch.no_grad():
        model.norm.weight.mul_(40.0)  # type: ignore[union-attr]
    plain = copy.deepcopy(model)
    optimizer, scaler = adamw(plain.parameters()), torch.amp.GradScaler("cpu")
    scales, losses = [], []
    for step in range(6):
        with torch.autocast("cpu", torch.float16):
            loss = plain(*token_batch(step, 0, 0))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
        scales.append(scaler.get_scale())
    assert scales[-1] < 2.0**16
    ours = train_engine(
        model, stage=2, steps=6, config=autocast("float16"), each_step=lambda engine, step: engine.loss_scale
    )
    assert ours.extra == scales
    assert ours.losses == pytest.approx(losses, rel=1e-4)


# Steps that all ranks skip as one rank's gradients overflow: the loss scale, and schedules that do not advance.


RATE = 0.5


class Line(nn.Module):
    """A model whose gradient is its input, ones: every SGD update subtracts the learning rate from each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


@dataclass
class Seen:
    """Observations of one rank, step by step."""

    # Write x for a skipped step, as in the pattern.
    steps: str = ""
    overflows: str = ""
    scales: list[float] = field(default_factory=list)
    # Learning rates before each step, and after the last.
    rates: list[float] = field(default_factory=list)
    # Steps that raised, as the scale was at its minimum.
    raised: list[int] = field(default_factory=list)
    counts: tuple[int, int] = (0, 0)


def run(
    pattern: str,
    config: dict[str, Any],
    *,
    stage: int,
    accumulation: int = 1,
    schedule: Callable[[Any], Any] | None = None,
    given: str = "",
) -> Seen:
    """Train two ranks, of which the second's gradients overflow where the pattern has an x; check that both agree."""
    model = Line()

    def body(comm: Comm) -> tuple[Seen, float | None]:
        mine = copy.deepcopy(model)
        own = torch.optim.SGD(mine.parameters(), lr=RATE)
        built = schedule(own) if schedule is not None and given == "instance" else None
        engine, optimizer, _, _ = wherry.initialize(
            model=mine, optimizer=own, lr_scheduler=built, config=settings(stage, accumulation, more=config), mesh=comm
        )
        by_hand = schedule(optimizer) if schedule is not None and given == "by hand" else None
        if schedule is not None and given == "assigned":
            engine.lr_scheduler = schedule(optimizer)
        seen = Seen(rates=engine.get_lr())
        for step, letter in enumerate(pattern):
            for micro in range(accumulation):
                loss = engine(torch.ones(300))
                if letter == "x" and comm.rank == 1 and micro == 0:
                    loss = loss * 2.0**24
                engine.backward(loss)
                try:
                    engine.step()
                except LossScaleError:
                    seen.raised.append(step)
            seen.steps += "." if engine.was_step_applied() else "x"
            seen.overflows += "x" if optimizer.overflow else "."
            if by_hand is not None and not optimizer.overflow:
                by_hand.step()
            seen.scales.append(engine.loss_scale)
            seen.rates += engine.get_lr()
        seen.counts = (engine.global_steps, engine.skipped_steps)
        masters = engine.consolidated_state_dict(torch.float32)
        engine.close()
        return seen, None if masters is None else float(masters["weight"].double().mean())

    (first, weight), *others = run_ranks(2, body)
    assert all(seen == first for seen, _ in others)
    assert first.steps == pattern and first.counts == (len(pattern), pattern.count("x"))
    # The reported rates are those of the updates.
    made = [rate for letter, rate in zip(pattern, first.rates, strict=False) if letter == "."]
    assert weight == pytest.approx(-sum(made), rel=1e-5)
    return first


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (1, 2), (2, 1), (3, 2)])
def test_the_scale_follows_the_overflows_of_any_rank(stage: int, accumulation: int) -> None:
    """Halve the scale at the second overflow, double it after three good steps, and raise at the minimum."""
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 2, "min_loss_scale": 64}
    seen = run("xx...xxxx.", {"fp16": fp16}, stage=stage, accumulation=accumulation)
    assert seen.scales == [256, 128, 128, 128, 256, 256, 128, 64, 64, 64]
    assert seen.raised == [8]
    # A step that raises reports nothing else.
    assert seen.overflows[:8] + seen.overflows[9:] == "xx...xxx."


def test_a_static_scale_stays_and_skips() -> None:
    seen = run("x.x.", {"fp16": {"enabled": True, "loss_scale": 256}}, stage=3)
    assert seen.scales == [256] * 4 and seen.overflows == "x.x." and not seen.raised


# Learning rates.

PATIENT = {"enabled": True, "initial_scale_power": 8, "hysteresis": 100}
PATTERN = "x..x.....x."


def updates_before(pattern: str) -> list[int]:
    """Count the updates before each step, and after the last."""
    return [pattern[:step].count(".") for step in range(len(pattern) + 1)]


@pytest.mark.filterwarnings("error:Detected call of")
def test_schedules_of_the_config_count_updates() -> None:
    params = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_type": "linear", "warmup_num_steps": 4}
    config = {"scheduler": {"type": "WarmupLR", "params": params}, "fp16": PATIENT}
    rates = [0.1 + 0.4 * min(1.0, n / 4) for n in updates_before(PATTERN)]
    assert run(PATTERN, config, stage=1).rates == pytest.approx(rates)


def sequential(optimizer: Any) -> Any:
    parts = [torch_schedules.LinearLR(optimizer, 0.25, total_iters=3), torch_schedules.ExponentialLR(optimizer, 0.5)]
    return torch_schedules.SequentialLR(optimizer, parts, [3])


TORCHS: dict[str, Callable[[Any], Any]] = {
    "assigned": lambda optimizer: torch_schedules.LambdaLR(optimizer, lambda n: 1 / (1 + n)),
    "by hand": partial(torch_schedules.OneCycleLR, max_lr=RATE, total_steps=12, cycle_momentum=False),
    "instance": sequential,
}


@pytest.mark.filterwarnings("error:Detected call of")
@pytest.mark.parametrize(("given", "stage"), [("assigned", 0), ("by hand", 2), ("instance", 3)])
def test_torchs_schedules_count_updates(given: str, stage: int) -> None:
    make = TORCHS[given]
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=RATE)
    schedule = make(plain)
    expected = [plain.param_groups[0]["lr"]]
    for _ in range(PATTERN.count(".")):
        plain.step()
        schedule.step()
        expected.append(plain.param_groups[0]["lr"])
    seen = run(PATTERN, {"fp16": PATIENT}, stage=stage, schedule=make, given=given)
    assert seen.rates == pytest.approx([expected[n] for n in updates_before(PATTERN)])
