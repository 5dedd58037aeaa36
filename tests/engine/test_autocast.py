"""`torch_autocast`: the engine's forward runs under torch.autocast, as in plain PyTorch."""

from __future__ import annotations

import copy
import functools
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
    on_ranks,
    settings,
    token_batch,
    train_engine,
    train_plain,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import wherry
from wherry.config import ConfigError, load


class Cast(TinyLM):
    """A model whose forward enters autocast: the oracle."""

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


@functools.cache
def oracle() -> Run:
    return train_plain(make_model(Cast), ranks=2, accumulation=2, steps=4)


@pytest.mark.parametrize(
    ("stage", "offload", "order"),
    [
        (0, "device", "layer_major"),
        (1, "host", "step_major"),
        (2, "device", "step_major"),
        (3, "device", "layer_major"),
        (3, "parameters", "step_major"),
    ],
)
def test_training_equals_plain_pytorch_under_autocast(stage: int, offload: str, order: str) -> None:
    exact = train_plain(make_model(), ranks=2, accumulation=2, steps=4)
    config = autocast(zero_optimization=OFFLOADS[offload], wherry={"accumulation": order})
    common: dict[str, Any] = {"ranks": 2, "accumulation": 2, "steps": 4, "config": config}
    ours = train_engine(make_model(), stage=stage, by_window=order == "layer_major", **common)
    assert_close(ours, oracle(), 1e-4)
    assert abs(oracle().losses[0] - exact.losses[0]) > 5e-4 * exact.losses[0]
    assert all(weight.dtype is torch.float32 for weight in ours.weights.values())
    assert not torch.is_autocast_enabled("cpu")


def test_a_recomputation_runs_under_the_same_autocast() -> None:
    kept = train_engine(make_model(), stage=3, ranks=2, steps=2, config=autocast())
    again = autocast(activation_checkpointing={"policy": "recompute"})
    assert_equal(train_engine(make_model(), stage=3, ranks=2, steps=2, config=again), kept)


def test_an_evaluation_gives_the_bits_of_plain_pytorch() -> None:
    model = make_model()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(*token_batch(0, 0, 0))

    def use(engine: Any) -> tuple[torch.Tensor, bool]:
        engine.eval()
        with torch.no_grad():
            return engine(*token_batch(0, 0, 0)), torch.is_autocast_enabled("cpu")

    for value, left_on in on_ranks(use, model=model, optimizer=None, config=autocast()):
        assert torch.equal(value, expected) and not left_on


class Casts(TorchDispatchMode):
    """Record the bf16 copies of weights that operations make."""

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
def test_no_copies_of_partitioned_weights_stay(training: bool) -> None:
    """Check that neither autocast's cache nor autograd keeps copies of a released unit's weights."""
    shapes = {p.shape for name, p in make_model().named_parameters() if "blocks" in name and p.dim() == 2}

    def use(engine: Any) -> tuple[int, int]:
        alive = []
        handle = engine.module.norm.register_forward_pre_hook(lambda *_: alive.append(casts.alive()))
        with Casts(shapes) as casts, torch.set_grad_enabled(training):
            loss = engine(*token_batch(0, 0, engine.comm.rank))
        handle.remove()
        if training:
            engine.backward(loss)
            engine.step()
        return len(casts.made), alive[0]

    assert on_ranks(use, config=autocast()) == [(9, 0), (9, 0)]


def test_copies_of_frozen_weights_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    for more, warned in (({}, True), ({"activation_checkpointing": {"policy": "recompute"}}, False)):
        model = make_model()
        model.blocks.requires_grad_(False)  # type: ignore[union-attr, operator]
        caplog.clear()
        wherry.initialize(model=model, config=settings(3, more=autocast(**more)))[0].close()
        assert ("torch_autocast: from forward to backward autograd keeps the bfloat16 copies" in caplog.text) == warned


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

    engine, *_ = wherry.initialize(
        model=model, optimizer=adamw(model.parameters()), config=settings(2, more=autocast("float16"))
    )
    ours = []
    for step in range(6):
        loss = engine(*token_batch(step, 0, 0))
        engine.backward(loss)
        engine.step()
        assert engine.loss_scale == scales[step]
        ours.append(float(loss.detach()))
    assert ours == pytest.approx(losses, rel=1e-4)
    assert engine.skipped_steps == sum(later < earlier for earlier, later in pairwise([2.0**16, *scales]))
    engine.close()


def test_keys_that_autocast_excludes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r'torch_autocast\.dtype: expected "bf16" or "fp16", got the string "fp32"'):
        load(autocast("float32"))
    with pytest.raises(ConfigError, match=r"wherry\.update_policy: in_backward excludes fp16"):
        load(autocast("fp16", wherry={"update_policy": "in_backward"}))
