"""Layer-major accumulation: the results of step-major, with the communication of one micro-batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    PeakGathered,
    TinyLM,
    assert_close,
    assert_equal,
    assert_same,
    engine_of,
    gathered,
    make_model,
    on_ranks,
    settings,
    token_batch,
    train_plain,
)
from tests.models import MODELS, Stack, sgd, vectors
from tests.scale.windows import VECTORS, windows
from torch import nn
from torch.utils.checkpoint import checkpoint

from wherry.errors import WherryError


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 2), (2, 2), (3, 2)])
def test_equals_step_major_and_plain_training(stage: int, ranks: int) -> None:
    common: dict[str, Any] = {"ranks": ranks, "accumulation": 3, "clip": 0.5, "steps": 3}
    plain = train_plain(make_model(), **common)
    for order in ("step_major", "layer_major"):
        assert_close(windows(make_model(), order, stage=stage, **common), plain)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_micro_batches_give_the_same_bits(stage: int) -> None:
    """Use each weight once: sums of two micro-batches have one order only."""
    orders = ("step_major", "layer_major")
    one, other = (windows(make_model(Stack), order, stage=stage, accumulation=2, **VECTORS) for order in orders)
    assert_equal(other, one)


def test_two_micro_batches_on_two_ranks_give_the_bits_of_stage_1() -> None:
    """Add micro-batches first and ranks then, as stage 1 does, at stage 3."""

    def gradients(engine: Any, step: int) -> dict[str, torch.Tensor]:
        return {name: engine.gradients(name) for name, _ in engine.module.named_parameters()}

    def still(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    common: dict[str, Any] = {"accumulation": 2, "ranks": 2, "steps": 2, "batch": vectors, "optimizer": still}
    one, other = (
        windows(make_model(Stack), order, stage=stage, each_step=gradients, **common).extra[1]
        for stage, order in ((1, "step_major"), (3, "layer_major"))
    )
    assert_same(one, other)


def traffic(engine: Any, step: int) -> tuple[dict[str, int], dict[str, int]]:
    return dict(engine.comm.traffic.calls), dict(engine.comm.traffic.bytes)


@pytest.mark.parametrize(("kind", "stage"), [("stack", 2), ("checkpointed", 3), ("checkpointed, reentrant", 3)])
def test_four_micro_batches_communicate_like_one(kind: str, stage: int) -> None:
    common: dict[str, Any] = {"stage": stage, "ranks": 2, "each_step": traffic, **VECTORS}
    one = windows(make_model(MODELS[kind]), "step_major", **common)
    four = windows(make_model(MODELS[kind]), "layer_major", accumulation=4, **common)
    late = {"all_reduce"} if "reentrant" in kind else set()
    if not late:  # the first window learns how often gradients of reentrant checkpoints arrive
        assert four.extra[0][0]["reduce_scatter"] == one.extra[0][0]["reduce_scatter"]
    for mine, theirs in zip(four.extra[2], one.extra[2], strict=True):
        for operation in (mine.keys() | theirs.keys()) - late:
            assert mine[operation] == theirs[operation], operation


def test_the_peak_of_gathered_weights_is_that_of_one_micro_batch() -> None:
    watched: dict[Any, PeakGathered] = {}

    def peak(engine: Any, step: int) -> int:
        if step == 0:
            watched[engine] = PeakGathered(engine)
        return watched[engine].take()

    config = {"zero_optimization": {"stage3_prefetch_bucket_size": 0}}
    common: dict[str, Any] = {"accumulation": 3, "ranks": 2, "each_step": peak, "config": config}
    one, other = (windows(make_model(), order, **common).extra for order in ("step_major", "layer_major"))
    assert 0 < other[2] <= one[2]


@pytest.mark.parametrize(
    ("kind", "stage", "ranks"),
    [
        ("checkpointed", 3, 2),
        ("checkpointed, reentrant", 2, 2),
        ("checkpointed, reentrant", 3, 1),
        ("called twice", 3, 2),
        ("unused", 3, 2),
        ("used outside", 3, 2),
    ],
)
def test_models_of_many_shapes(kind: str, stage: int, ranks: int) -> None:
    common: dict[str, Any] = {"ranks": ranks, "accumulation": 4, "steps": 3, **VECTORS}
    plain = train_plain(make_model(MODELS[kind]), **common)
    assert_close(windows(make_model(MODELS[kind]), "layer_major", stage=stage, **common), plain)


class Branching(Stack):
    """Blocks of which micro-batches of one window run different ones."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks if x.shape[0] % 2 else list(self.blocks)[1:]:
            x = block(x)
        return self.out(x)


def turned(step: int, micro: int, rank: int) -> tuple[torch.Tensor, ...]:
    return vectors(step, micro + rank, 10 * rank + micro)


def test_micro_batches_that_branch_in_another_order_on_each_rank() -> None:
    common: dict[str, Any] = {"ranks": 2, "accumulation": 4, "steps": 3, "batch": turned, "optimizer": sgd}
    model = make_model(Branching)
    assert_close(windows(model, "layer_major", stage=2, **common), train_plain(model, **common))


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_frozen_weights_are_gathered_once(reentrant: bool | None) -> None:
    """Freeze the layers of blocks: their gradients do not tell when they are done with."""

    class Frozen(Stack):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.linear.requires_grad_(False)

        def run(self, x: torch.Tensor) -> torch.Tensor:
            x = self.out(x)
            for block in self.blocks:
                x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
            return x

    def trainable(parameters: Any) -> torch.optim.Optimizer:
        return sgd([p for p in parameters if p.requires_grad])

    model = make_model(Frozen)
    common: dict[str, Any] = {"ranks": 2, "steps": 3, "batch": vectors, "optimizer": trainable}
    one = windows(model, "step_major", each_step=traffic, **common)
    four = windows(model, "layer_major", accumulation=4, each_step=traffic, **common)
    assert_close(four, train_plain(model, accumulation=4, **common))
    assert four.extra[2][0]["all_gather"] == one.extra[2][0]["all_gather"]


def test_gradients_of_bf16_weights_are_added_in_fp32() -> None:
    """Add one large gradient and many small ones, which would vanish in bf16."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x)).sum() * 0 + (self.layers[0].weight * x[0, 0]).sum()

    def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, ...]:
        return (torch.full((2, 4), 256.0 if micro == 7 else 0.5, dtype=torch.bfloat16),)

    def gradient(engine: Any, step: int) -> torch.Tensor:
        return engine.gradients("layers.0.weight") * 8

    more = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    common: dict[str, Any] = {"accumulation": 8, "steps": 2, "batch": batch, "config": more}
    run = windows(make_model(Scale), "layer_major", each_step=gradient, **common)
    assert torch.equal(run.extra[1], torch.full((4, 4), 259.5))


@pytest.mark.parametrize("where", ["unit", "root"])
def test_an_exception_in_a_forward_leaves_the_engine_healthy(where: str) -> None:
    class Failing(TinyLM):
        fails = False

        def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu():
                loss = super().forward(ids, targets)
            if self.fails and where == "root" and torch.equal(ids, token_batch(2, 1, 0)[0]):
                raise RuntimeError("a bad batch")
            return loss

    class Bad(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if where == "unit" and self.calls == 2 * 2 + 2:
                raise RuntimeError("a bad batch")
            return x

    model: Any = make_model(Failing)
    plain = train_plain(model, accumulation=2, steps=5)
    model.blocks[1].down = nn.Sequential(model.blocks[1].down, Bad())
    model.fails = True
    engine = engine_of(model, settings(3, 2, more={"wherry": {"accumulation": "layer_major"}}))

    def window(step: int) -> float:
        return float(engine.train_batch(iter([token_batch(step, micro, 0) for micro in range(2)])))

    window(0)
    window(1)
    with pytest.raises(RuntimeError, match="a bad batch") as caught:
        window(2)
    assert any("step_major" in note for note in caught.value.__notes__)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert gathered(engine) == 0
    model.fails = False
    assert [window(step) for step in range(2, 5)] == pytest.approx(plain.losses[2:], rel=1e-5)
    engine.close()


def test_calls_that_are_no_whole_window_are_refused() -> None:
    model = make_model()
    plain = train_plain(model, accumulation=2, steps=2)
    engine = engine_of(model, settings(3, 2, more={"wherry": {"accumulation": "layer_major"}}))

    def micros(step: int) -> list[tuple[torch.Tensor, ...]]:
        return [token_batch(step, micro, 0) for micro in range(2)]

    losses = [float(engine.train_batch(iter(micros(0))))]
    with engine.no_sync(), pytest.raises(WherryError, match="decided by hand"):
        engine.train_batch(iter(micros(1)))
    with pytest.raises(WherryError, match=r"backward of one of them; call engine\.train_batch\(iterator\)"):
        engine.backward(engine(*micros(1)[0]))
    with pytest.raises(WherryError, match=r"call engine\.train_batch\(iterator\)"):
        engine(*micros(1)[0]).backward()
    weight = next(engine.parameters())
    assert torch.autograd.grad(engine(*micros(1)[0]), weight)[0].isfinite().all()
    engine.step()
    with pytest.raises(WherryError, match="window's 2 micro-batches 1 have run already"):
        engine.train_batch(iter(micros(1)))
    engine.zero_grad()
    losses.append(float(engine.train_batch(iter(micros(1)))))
    engine.close()
    assert losses == pytest.approx(plain.losses, rel=1e-5)


def test_gradients_of_inputs_between_windows() -> None:
    engine = engine_of(make_model(Stack), settings(3, 2, more={"wherry": {"accumulation": "layer_major"}}))
    engine.train_batch(iter([vectors(0, micro, 0) for micro in range(2)]))
    x, y = vectors(1, 0, 0)
    (grad,) = torch.autograd.grad(engine(x.requires_grad_(), y), x)
    assert grad.shape == x.shape
    engine.train_batch(iter([vectors(1, micro, 0) for micro in range(2)]))
    assert engine.global_steps == 2
    engine.close()


def test_counters_of_the_engine_are_those_of_step_major() -> None:
    def counters(engine: Any, step: int) -> tuple[int, ...]:
        return engine.global_steps, engine.micro_steps, engine.global_samples

    orders = ("step_major", "layer_major")
    one, other = (windows(make_model(), order, accumulation=3, each_step=counters).extra for order in orders)
    assert one == other


def test_fp16_losses_carry_the_scale() -> None:
    common: dict[str, Any] = {"accumulation": 2, "config": {"fp16": {"enabled": True, "initial_scale_power": 8}}}
    one, other = (windows(make_model(), order, **common) for order in ("step_major", "layer_major"))
    assert other.losses == pytest.approx(one.losses, rel=2e-3)
    assert other.norms == pytest.approx(one.norms, rel=2e-2) and all(math.isfinite(norm) for norm in other.norms)


@pytest.mark.long
def test_a_compiled_block() -> None:
    model: Any = make_model()
    plain = train_plain(model, accumulation=3, steps=3)
    for block in model.blocks:
        block.compile(backend="eager")
    assert_close(windows(model, "layer_major", accumulation=3), plain)


class Picky(TinyLM):
    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not len(ids):
            raise ValueError("an empty batch")
        return super().forward(ids, targets)


@pytest.mark.parametrize("order", ["step_major", "layer_major"])
def test_an_error_of_one_rank_ends_all(order: str) -> None:
    def use(engine: Any) -> None:
        for step in range(3):
            batches = [token_batch(step, micro, engine.comm.rank) for micro in range(2)]
            if step == 2 and engine.comm.rank == 1:
                batches[1] = (batches[1][0][:0], batches[1][1][:0])
            engine.train_batch(iter(batches))

    with pytest.raises(ValueError, match="an empty batch"):
        on_ranks(use, accumulation=2, model=make_model(Picky), config={"wherry": {"accumulation": order}})
