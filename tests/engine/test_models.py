"""Models of every shape train unchanged, each against plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    assert_close,
    assert_equal,
    assert_near,
    gathered,
    make_model,
    on_ranks,
    train_engine,
    train_plain,
)
from tests.models import MODELS, Stack, sgd, vectors
from torch import nn

TOGETHER = {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}
# Stage, ranks, micro-batches, keys of the zero block, and whether the backward is the tensor's own.
WAYS: list[tuple[int, int, int, dict[str, Any], bool]] = [
    (3, 2, 2, {"stage3_prefetch_bucket_size": 0}, False),
    (3, 3, 2, TOGETHER, False),
    (3, 4, 1, {"zero_hpz_partition_size": 2}, False),
    (3, 4, 2, {"mics_shard_size": 2}, False),
    (0, 2, 2, {}, False),
    (1, 2, 2, {}, False),
    (2, 2, 1, {}, True),
    (2, 1, 2, {}, True),
]


@pytest.mark.parametrize(
    ("name", "way"), [(name, WAYS[number % 4 + first]) for first in (0, 4) for number, name in enumerate(MODELS)]
)
def test_trains_as_plain_pytorch(name: str, way: tuple[int, int, int, dict[str, Any], bool]) -> None:
    stage, ranks, accumulation, zero, plain_backward = way
    model = make_model(MODELS[name])
    # SGD, as Adam divides by gradients that are zero but for rounding, like those of attention's key bias.
    common: dict[str, Any] = {"ranks": ranks, "accumulation": accumulation, "batch": vectors, "optimizer": sgd}
    common["steps"] = 5 if "layer drop" in name else 2
    how: dict[str, Any] = {"stage": stage, "plain_backward": plain_backward, "config": {"zero_optimization": zero}}
    run = train_engine(model, finish=gathered, **how, **common)
    assert_close(run, train_plain(model, **common))
    assert run.extra == 0


def evaluate(engine: Any, step: int) -> None:
    inputs = vectors(step, 1, engine.comm.rank)
    engine.eval()
    with torch.no_grad() if step % 2 else torch.inference_mode():
        assert torch.isfinite(engine(*inputs))
        assert torch.isfinite(engine.module.blocks[1](inputs[0])).all()
    engine.train()
    # In grad mode, without a backward.
    assert torch.isfinite(engine(*inputs))


def discard(engine: Any, step: int) -> None:
    engine.backward(engine(*vectors(step, 1, engine.comm.rank)))
    engine.zero_grad()


def failing(error: type[BaseException], *, backward: bool) -> Callable[[Any, int], None]:
    """Let a block raise in one of the ways to run it; torch calls no hooks for a KeyboardInterrupt."""

    def fail(*_: Any) -> None:
        raise error

    def call(engine: Any, step: int) -> None:
        layer, inputs = engine.module.blocks[1].linear, vectors(step, 1, engine.comm.rank)
        handle = layer.register_full_backward_hook(fail) if backward else layer.register_forward_hook(fail)
        ways = [lambda: engine(*inputs), lambda: engine.module(*inputs), lambda: engine.run(inputs[0])]
        if backward:
            ways = [lambda: engine.backward(engine(*inputs)), lambda: engine(*inputs).backward()]
        with pytest.raises(error):
            ways[step % len(ways)]()
        handle.remove()

    return call


BETWEEN: dict[str, Callable[[Any, int], None]] = {
    "evaluate": evaluate,
    "discard": discard,
    "fail in forward": failing(RuntimeError, backward=False),
    "interrupt forward": failing(KeyboardInterrupt, backward=False),
    "fail in backward": failing(RuntimeError, backward=True),
}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_calls_between_steps_change_no_bit(stage: int) -> None:
    config = {"zero_optimization": TOGETHER} if stage == 3 else {}
    common: dict[str, Any] = {"ranks": 2, "steps": 3, "batch": vectors, "config": config, "stage": stage}
    undisturbed = train_engine(make_model(Stack), **common)
    for name, between in BETWEEN.items():
        run = train_engine(make_model(Stack), before_step=between, **common)
        assert run.losses == undisturbed.losses, name
        assert_equal(run, undisturbed)


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
