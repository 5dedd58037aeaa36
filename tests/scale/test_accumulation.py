"""Layer-major accumulation: the results of step-major, with the traffic of one micro-batch."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    PeakGathered,
    TinyLM,
    adamw,
    assert_close,
    assert_equal,
    gathered,
    make_model,
    settings,
    token_batch,
    train_plain,
)
from tests.engine.test_models import CalledTwice, SometimesUnused, Stack, UsedOutside, sgd, vectors
from tests.scale.windows import train_windows
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import wherry
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks


class Untied(TinyLM):
    """Every weight is used once: sums of two micro-batches have one order only."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 29, bias=False)


class Checkpointed(TinyLM):
    reentrant = False

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class Reentrant(Checkpointed):
    reentrant = True


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_equals_step_major_and_plain_training(stage: int, ranks: int) -> None:
    model = make_model()
    plain = train_plain(model, ranks=ranks, accumulation=4, steps=4, clip=0.5)
    one = train_windows(model, stage=stage, order="step_major", accumulation=4, ranks=ranks, clip=0.5)
    other = train_windows(model, stage=stage, order="layer_major", accumulation=4, ranks=ranks, clip=0.5)
    assert_close(one, plain)
    assert_close(other, one)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_micro_batches_give_the_same_bits(stage: int) -> None:
    model = make_model(Untied)
    one = train_windows(model, stage=stage, order="step_major", accumulation=2)
    other = train_windows(model, stage=stage, order="layer_major", accumulation=2)
    assert_equal(other, one)


def test_two_micro_batches_on_two_ranks_give_the_bits_of_stage_1() -> None:
    """Stage 1 adds micro-batches first and ranks then, as layer-major does at every stage."""
    names = [name for name, _ in make_model(Untied).named_parameters()]

    def gradients(engine: Any, step: int) -> dict[str, torch.Tensor]:
        return {name: engine.gradients(name) for name in names}

    def still(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    one, other = (
        train_windows(
            make_model(Untied), stage=stage, order=order, accumulation=2, ranks=2, steps=2, optimizer=still,
            each_step=gradients,
        ).extra[1]
        for stage, order in ((1, "step_major"), (3, "layer_major"))
    )  # fmt: skip
    for name in names:
        assert torch.equal(one[name], other[name]), name


def traffic(engine: Any, step: int) -> tuple[dict[str, int], dict[str, int]]:
    return dict(engine.comm.traffic.calls), dict(engine.comm.traffic.bytes)


@pytest.mark.parametrize("model_class", [TinyLM, Checkpointed, Reentrant])
@pytest.mark.parametrize("stage", [2, 3])
def test_eight_micro_batches_travel_like_one(stage: int, model_class: type[nn.Module]) -> None:
    model = make_model(model_class)
    one = train_windows(model, stage=stage, order="step_major", accumulation=1, ranks=2, each_step=traffic)
    eight = train_windows(model, stage=stage, order="layer_major", accumulation=8, ranks=2, each_step=traffic)
    late = set() if model_class is not Reentrant else {"all_reduce"}
    if model_class is not Reentrant:  # how often its gradients come, the first window finds out
        assert eight.extra[0][0]["reduce_scatter"] == one.extra[0][0]["reduce_scatter"]
    for step in (2, 3):
        for mine, theirs in zip(eight.extra[step], one.extra[step], strict=True):
            for operation in (mine.keys() | theirs.keys()) - late:
                assert mine[operation] == theirs[operation], operation


def test_the_peak_of_live_weights_is_that_of_one_micro_batch() -> None:
    watched: dict[Any, PeakGathered] = {}

    def peak(engine: Any, step: int) -> int:
        if step == 0:
            watched[engine] = PeakGathered(engine)
        return watched[engine].take()

    runs = [
        train_windows(
            make_model(), stage=3, order=order, accumulation=4, ranks=2, each_step=peak,
            config={"zero_optimization": {"stage3_prefetch_bucket_size": 0}},
        ).extra
        for order in ("step_major", "layer_major")
    ]  # fmt: skip
    assert runs[1][2] <= runs[0][2]


@pytest.mark.parametrize("model_class", [Checkpointed, Reentrant, CalledTwice, SometimesUnused, UsedOutside])
@pytest.mark.parametrize("ranks", [1, 2])
def test_models_of_many_shapes(model_class: type[nn.Module], ranks: int) -> None:
    model = make_model(model_class)
    batch, optimizer = (token_batch, adamw) if issubclass(model_class, TinyLM) else (vectors, sgd)
    plain = train_plain(model, ranks=ranks, accumulation=4, steps=4, batch=batch, optimizer=optimizer)
    for stage in (2, 3):
        run = train_windows(
            model, stage=stage, order="layer_major", accumulation=4, ranks=ranks, batch=batch, optimizer=optimizer
        )
        assert_close(run, plain)


class Branching(Stack):
    """Micro-batches of one window take different ways, and not the same one on every rank."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks if x.shape[0] % 2 else self.blocks[1:]:
            x = block(x)
        return self.out(x)


def turned(step: int, micro: int, rank: int) -> tuple[torch.Tensor, ...]:
    return vectors(step, micro + rank, 10 * rank + micro)


def test_ranks_whose_micro_batches_branch_in_another_order_agree() -> None:
    model = make_model(Branching)
    plain = train_plain(model, ranks=2, accumulation=4, steps=4, batch=turned, optimizer=sgd)
    assert_close(
        train_windows(model, stage=2, order="layer_major", accumulation=4, ranks=2, batch=turned, optimizer=sgd),
        plain,
    )


class Frozen(Stack):
    """An adapter beside frozen weights, whose gradients say nothing about when the frozen ones are done with."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.linear.requires_grad_(False)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_frozen_weights_are_gathered_once(reentrant: bool | None) -> None:
    class Model(Frozen):
        def run(self, x: torch.Tensor) -> torch.Tensor:
            x = self.out(x)
            for block in self.blocks:
                x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
            return x

    def trainable(parameters: Any) -> torch.optim.Optimizer:
        return sgd([p for p in parameters if p.requires_grad])

    model = make_model(Model)
    plain = train_plain(model, ranks=2, accumulation=4, steps=4, batch=vectors, optimizer=trainable)
    runs = [
        train_windows(
            model, stage=3, order=order, accumulation=k, ranks=2, batch=vectors, optimizer=trainable, each_step=traffic
        )
        for order, k in (("step_major", 1), ("layer_major", 4))
    ]
    assert_close(runs[1], plain)
    assert runs[1].extra[3][0]["all_gather"] == runs[0].extra[3][0]["all_gather"]


def test_gradients_of_bf16_weights_are_added_in_fp32() -> None:
    """One large gradient and many small ones: in bf16 the small ones would vanish one by one."""

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
    run = train_windows(
        make_model(Scale), stage=3, order="layer_major", accumulation=8, steps=2, batch=batch, config=more,
        each_step=gradient,
    )  # fmt: skip
    assert torch.equal(run.extra[1], torch.full((4, 4), 259.5))


@pytest.mark.parametrize("where", ["unit", "root"])
def test_an_exception_in_a_forward_leaves_the_engine_healthy(where: str) -> None:
    class Failing(TinyLM):
        trigger = -1

        def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu():
                loss = super().forward(ids, targets)
            if where == "root" and bool((ids == self.trigger).any()):
                raise RuntimeError("a bad batch")
            return loss

    model = make_model(Failing)
    left: list[int] = []

    class Bad(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).calls += 1
            if where == "unit" and type(self).calls == 2 * 2 + 2:
                raise RuntimeError("a bad batch")
            return x

    model.blocks[1].down = nn.Sequential(model.blocks[1].down, Bad())
    engine, *_ = wherry.initialize(
        model=copy.deepcopy(model),
        optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
        config=settings(3, 2, more={"wherry": {"accumulation": "layer_major"}}),
    )

    def window(step: int) -> torch.Tensor:
        return engine.train_batch(iter([token_batch(step, micro, 0) for micro in range(2)]))

    window(0)
    window(1)
    if where == "root":
        type(engine.module).trigger = int(token_batch(2, 1, 0)[0][0, 0])
    with pytest.raises(RuntimeError, match="a bad batch") as caught:
        window(2)
    assert any("step_major" in note for note in caught.value.__notes__)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert gathered(engine) == 0
    type(engine.module).trigger = -1
    losses = [float(window(step)) for step in range(2, 5)]
    engine.close()
    Bad.calls = -(10**9)
    plain = train_plain(model, accumulation=2, steps=5)
    assert losses == pytest.approx(plain.losses[2:], rel=1e-5)
    assert not left


def test_what_is_no_whole_window_says_so() -> None:
    model = make_model()
    config = settings(3, 2, more={"wherry": {"accumulation": "layer_major"}})
    plain = train_plain(model, accumulation=2, steps=2)
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config)

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


def test_gradients_of_inputs_may_be_asked_for_between_windows() -> None:
    model = make_model(Stack)
    config = settings(3, 2, more={"wherry": {"accumulation": "layer_major"}})
    engine, *_ = wherry.initialize(model=model, optimizer=sgd(model.parameters()), config=config)
    engine.train_batch(iter([vectors(0, micro, 0) for micro in range(2)]))
    x, y = vectors(1, 0, 0)
    (grad,) = torch.autograd.grad(engine(x.requires_grad_(), y), x)
    assert grad.shape == x.shape
    engine.train_batch(iter([vectors(1, micro, 0) for micro in range(2)]))
    assert engine.global_steps == 2
    engine.close()


def test_counters_of_the_engine_move_as_in_step_major() -> None:
    def counters(engine: Any, step: int) -> tuple[int, ...]:
        return engine.global_steps, engine.micro_steps, engine.global_samples

    runs = [
        train_windows(make_model(), stage=3, order=order, accumulation=3, each_step=counters)
        for order in ("step_major", "layer_major")
    ]
    assert runs[0].extra == runs[1].extra


def test_fp16_losses_carry_the_scale() -> None:
    config = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    runs = [
        train_windows(make_model(Untied), stage=3, order=order, accumulation=2, config=config)
        for order in ("step_major", "layer_major")
    ]
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=2e-3)
    assert all(math.isfinite(norm) for norm in runs[1].norms)


def test_a_compiled_block() -> None:
    model = make_model()
    plain = train_plain(model, accumulation=3, steps=3)
    for block in model.blocks:
        block.compile(backend="eager")
    run = train_windows(model, stage=3, order="layer_major", accumulation=3, steps=3)
    assert_close(run, plain)


class Picky(TinyLM):
    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not len(ids):
            raise ValueError("an empty batch")
        return super().forward(ids, targets)


def test_on_two_ranks_an_error_of_one_ends_both() -> None:
    model = make_model(Picky)

    def body(comm: Comm) -> None:
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), mesh=comm, config=settings(3, 2))
        for step in range(3):
            batches = [token_batch(step, micro, comm.rank) for micro in range(2)]
            if step == 2 and comm.rank == 1:
                batches[1] = (batches[1][0][:0], batches[1][1][:0])
            engine.train_batch(iter(batches))

    with pytest.raises(ValueError, match="an empty batch"):
        run_ranks(2, body)
