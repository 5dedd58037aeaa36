"""`torch_autocast`: the engine's forward under torch.autocast, as plain PyTorch has it."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    Run,
    TinyLM,
    adamw,
    assert_close,
    assert_equal,
    make_model,
    settings,
    token_batch,
    train_engine,
    train_plain,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import wherry
from wherry.config import ConfigError, load
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks


class Cast(TinyLM):
    """The oracle's model."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids, targets)


def autocast(dtype: str = "bfloat16", **more: Any) -> dict[str, Any]:
    return {"torch_autocast": {"enabled": True, "dtype": dtype}, **more}


OFFLOADS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"offload_optimizer": {"device": "cpu"}},
    "parameters": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


@pytest.mark.parametrize(
    ("stage", "offload"), [(0, "device"), (1, "host"), (2, "device"), (2, "host"), (3, "device"), (3, "parameters")]
)
def test_training_equals_plain_pytorch_under_autocast(stage: int, offload: str) -> None:
    oracle = train_plain(make_model(Cast), ranks=2, accumulation=2, steps=8, clip=0.5)
    exact = train_plain(make_model(), ranks=2, accumulation=2, steps=8, clip=0.5)
    config = autocast(zero_optimization=OFFLOADS[offload])
    ours = train_engine(make_model(), stage=stage, ranks=2, accumulation=2, steps=8, clip=0.5, config=config)
    assert_close(ours, oracle, 1e-4)
    assert abs(oracle.losses[0] - exact.losses[0]) > 5e-4 * exact.losses[0]
    assert all(weight.dtype is torch.float32 for weight in ours.weights.values())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_recomputation_runs_under_the_same_autocast(stage: int) -> None:
    kept = train_engine(make_model(), stage=stage, ranks=2, steps=4, config=autocast())
    again = autocast(activation_checkpointing={"policy": "recompute"})
    assert_equal(train_engine(make_model(), stage=stage, ranks=2, steps=4, config=again), kept)


@pytest.mark.parametrize("stage", [0, 3])
def test_micro_batches_that_run_together_are_cast_alike(stage: int) -> None:
    model = make_model()

    def train(order: str) -> Run:
        def body(comm: Comm) -> Run:
            mine, run = copy.deepcopy(model), Run()
            config = settings(stage, 2, more=autocast(wherry={"accumulation": order}))
            engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=config, mesh=comm)
            data = iter([token_batch(step, micro, comm.rank) for step in range(5) for micro in range(2)])
            for _ in range(5):
                total = float(engine.train_batch(data))
                run.losses.append(sum(comm.gather_objects(total)) / comm.size)
                run.norms.append(engine.get_global_grad_norm() or 0.0)
            with wherry.gathered(engine.module):
                run.weights = {name: p.detach().clone() for name, p in mine.named_parameters()}
            engine.close()
            assert not torch.is_autocast_enabled("cpu")
            return run

        return run_ranks(2, body)[0]

    oracle = train_plain(make_model(Cast), ranks=2, accumulation=2, steps=5)
    assert_close(train("layer_major"), oracle, 1e-4)
    assert_close(train("step_major"), oracle, 1e-4)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_evaluation_gives_the_bits_of_plain_pytorch(stage: int) -> None:
    model = make_model()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(*token_batch(0, 0, 0))

    def body(comm: Comm) -> tuple[torch.Tensor, bool]:
        engine, *_ = wherry.initialize(model=copy.deepcopy(model), config=settings(stage, more=autocast()), mesh=comm)
        engine.eval()
        with torch.no_grad():
            found = engine(*token_batch(0, 0, 0))
        engine.close()
        return found, torch.is_autocast_enabled("cpu")

    for found, left_on in run_ranks(2, body):
        assert torch.equal(found, expected) and not left_on


class Casts(TorchDispatchMode):
    """The bf16 copies of weights that are made while it is entered."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self.shapes = shapes
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.shape in self.shapes and result.dtype is torch.bfloat16:
            self.made.append(StorageWeakRef(result.untyped_storage()))
        return result

    def alive(self) -> int:
        return sum(not cast.expired() for cast in self.made)


@pytest.mark.parametrize("training", [True, False])
def test_partitioned_weights_leave_no_copies_of_the_model_behind(training: bool) -> None:
    """Neither autocast's cache nor autograd keeps what was cast of a released unit's weights."""
    model = make_model()
    shapes = {p.shape for block in model.blocks for p in block.parameters() if p.dim() == 2}  # type: ignore[union-attr]

    def body(comm: Comm) -> tuple[int, int]:
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(
            model=mine, optimizer=adamw(mine.parameters()), config=settings(3, more=autocast()), mesh=comm
        )
        seen = []
        last = mine.norm.register_forward_pre_hook(lambda *_: seen.append(casts.alive()))
        with Casts(shapes) as casts, torch.set_grad_enabled(training):
            loss = engine(*token_batch(0, 0, comm.rank))
        last.remove()
        made = len(casts.made)
        if training:
            engine.backward(loss)
            engine.step()
        engine.close()
        return made, seen[0]

    assert run_ranks(2, body) == [(9, 0), (9, 0)]


def test_copies_of_frozen_weights_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for more, warned in (({}, True), ({"activation_checkpointing": {"policy": "recompute"}}, False)):
        model = make_model()
        model.blocks.requires_grad_(False)  # type: ignore[union-attr, operator]
        caplog.clear()
        wherry.initialize(model=model, config=settings(3, more=autocast(**more)))[0].close()
        assert ("torch_autocast: from forward to backward autograd keeps the bfloat16 copies" in caplog.text) == warned


def test_fp16_scales_the_loss_as_torchs_scaler() -> None:
    """Its first steps overflow, are skipped and halve the scale; then both train alike."""
    model = make_model()
    with torch.no_grad():
        model.norm.weight.mul_(40.0)  # type: ignore[union-attr]
    plain = copy.deepcopy(model)
    optimizer, scaler = adamw(plain.parameters()), torch.amp.GradScaler("cpu")
    scales, losses = [], []
    for step in range(8):
        with torch.autocast("cpu", torch.float16):
            loss = plain(*token_batch(step, 0, 0))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
        scales.append(scaler.get_scale())
    assert scales[-1] < 2.0**16

    engine, *_ = wherry.initialize(
        model=model, optimizer=adamw(model.parameters()), config=settings(2, more=autocast("float16"))
    )
    ours = []
    for step in range(8):
        loss = engine(*token_batch(step, 0, 0))
        engine.backward(loss)
        engine.step()
        assert engine.loss_scale == scales[step]
        ours.append(float(loss.detach()))
    assert ours == pytest.approx(losses, rel=1e-4)
    assert engine.skipped_steps == sum(later < earlier for earlier, later in pairwise([2.0**16, *scales]))
    engine.close()


def test_what_autocast_does_not_go_with() -> None:
    with pytest.raises(ConfigError, match=r'torch_autocast\.dtype: expected "bf16" or "fp16", got the string "fp32"'):
        load(autocast("float32"))
    with pytest.raises(ConfigError, match=r"wherry\.update_policy: in_backward excludes fp16"):
        load(autocast("fp16", wherry={"update_policy": "in_backward"}))
