"""`torch_autocast`: the engine's forward runs under torch.autocast, as in plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    WIDTH,
    TinyLM,
    adamw,
    assert_close,
    assert_equal,
    make_model,
    on_ranks,
    token_batch,
    train_engine,
    train_plain,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


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
