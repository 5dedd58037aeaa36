"""Models of every shape train unchanged, each against plain PyTorch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    Run,
    assert_close,
    assert_equal,
    assert_near,
    gathered,
    make_model,
    on_ranks,
    train_engine,
    train_plain,
)
from tests.models import MODELS, Stack, rotate, sgd, vectors
from torch import nn

TOGETHER = {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}
STAGE_3: dict[str, dict[str, Any]] = {
    "without prefetch": {
        "ranks": 2,
        "accumulation": 2,
        "config": {"zero_optimization": {"stage3_prefetch_bucket_size": 0}},
    },
    "small flats together": {"ranks": 3, "accumulation": 2, "config": {"zero_optimization": TOGETHER}},
    "secondary shards": {"ranks": 4, "config": {"zero_optimization": {"zero_hpz_partition_size": 2}}},
    "groups": {"ranks": 4, "accumulation": 2, "config": {"zero_optimization": {"mics_shard_size": 2}}},
}
LOWER: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0, "ranks": 2, "accumulation": 2},
    "stage 1": {"stage": 1, "ranks": 2, "accumulation": 2},
    "stage 2": {"stage": 2, "ranks": 2, "plain_backward": True},
    "one rank": {"stage": 2, "ranks": 1, "accumulation": 2, "plain_backward": True},
}


def train_both(name: str, *, stage: int, **how: Any) -> None:
    model = make_model(MODELS[name])
    # SGD, as Adam divides by gradients that are zero but for rounding, like those of attention's key bias.
    common: dict[str, Any] = {"ranks": how.pop("ranks"), "accumulation": how.pop("accumulation", 1)}
    common |= {"steps": 5 if "layer drop" in name else 2, "batch": vectors, "optimizer": sgd}
    run = train_engine(model, stage=stage, finish=gathered, **how, **common)
    assert_close(run, train_plain(model, **common))
    assert run.extra == 0


@pytest.mark.parametrize(("name", "how"), rotate(MODELS, list(STAGE_3)))
def test_trains_as_plain_pytorch_at_stage_3(name: str, how: str) -> None:
    train_both(name, stage=3, **STAGE_3[how])


@pytest.mark.parametrize(("name", "how"), rotate(MODELS, list(LOWER)))
def test_trains_as_plain_pytorch_at_lower_stages(name: str, how: str) -> None:
    train_both(name, **LOWER[how])


# Calls between steps that must not change the training.


def nothing(engine: Any, step: int) -> None:
    pass


def evaluate(engine: Any, step: int) -> None:
    engine.eval()
    with torch.no_grad() if step % 2 else torch.inference_mode():
        assert torch.isfinite(engine(*vectors(step, 1, engine.comm.rank)))
        assert torch.isfinite(engine.module.blocks[1](vectors(step, 1, engine.comm.rank)[0])).all()
    engine.train()
    # In grad mode, without a backward.
    assert torch.isfinite(engine(*vectors(step, 2, engine.comm.rank)))


class Hiccup(RuntimeError):
    pass


def fail_forward(engine: Any, step: int) -> None:
    def fail(*_: Any) -> None:
        raise Hiccup

    handle = engine.module.blocks[1].linear.register_forward_hook(fail)
    with pytest.raises(Hiccup):
        engine(*vectors(step, 1, engine.comm.rank))
    handle.remove()


def interrupt(engine: Any, step: int) -> None:
    """Raise a KeyboardInterrupt, for which torch calls no hooks, as it is no Exception."""

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = engine.module.blocks[1].linear.register_forward_hook(fail)
    inputs = vectors(step, 1, engine.comm.rank)
    calls = (lambda: engine(*inputs), lambda: engine.module(*inputs), lambda: engine.run(inputs[0]))
    with pytest.raises(KeyboardInterrupt):
        calls[step % 3]()
    handle.remove()


def fail_backward(engine: Any, step: int) -> None:
    def fail(*_: Any) -> None:
        raise Hiccup

    handle = engine.module.blocks[1].linear.register_full_backward_hook(fail)
    for backward in (engine.backward, torch.Tensor.backward):
        loss = engine(*vectors(step, 1, engine.comm.rank))
        with pytest.raises(Hiccup):
            backward(loss)
    handle.remove()


def discard(engine: Any, step: int) -> None:
    engine.backward(engine(*vectors(step, 1, engine.comm.rank)))
    engine.zero_grad()


@functools.cache
def with_calls_between(use: Callable[[Any, int], None], stage: int) -> Run:
    config = {"zero_optimization": TOGETHER} if stage == 3 else {}
    common: dict[str, Any] = {"ranks": 2, "steps": 3, "batch": vectors, "before_step": use, "config": config}
    return train_engine(make_model(Stack), stage=stage, **common)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("use", [evaluate, fail_forward, interrupt, fail_backward, discard])
def test_calls_between_steps_change_no_bit(use: Callable[[Any, int], None], stage: int) -> None:
    assert_equal(with_calls_between(use, stage), with_calls_between(nothing, stage))


@pytest.mark.parametrize("stage", [0, 3])
def test_several_forwards_before_one_backward(stage: int) -> None:
    model = make_model(Stack)
    plain: nn.Module = copy.deepcopy(model)
    (sum(plain(*vectors(0, micro, rank)) for micro in range(3) for rank in range(2)) / 2).backward()

    def use(engine: Any) -> dict[str, torch.Tensor]:
        losses = [engine(*vectors(0, micro, engine.comm.rank)) for micro in range(3)]
        engine.backward(losses[0] + losses[1] + losses[2])
        return {name: engine.gradients(name) for name, _ in model.named_parameters()}

    for grads in on_ranks(use, stage=stage, model=model, optimizer=None):
        assert_near(grads, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
