"""Models and losses of every shape train unchanged at every stage, each against plain PyTorch."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.covering import Case, name_of, pairs
from tests.engine.harness import (
    Run,
    assert_close,
    assert_equal,
    gathered,
    make_model,
    on_ranks,
    train_engine,
    train_plain,
)
from tests.models import MODELS, D, Residual, Stack, sgd, vectors
from torch import nn
from torch.nn import functional as F

import wherry
from wherry.errors import WherryError

STEPS = 4


@functools.cache
def ours(stage: int, ranks: int, accumulation: int, clip: float, plain_backward: bool = False) -> Run:
    how: dict[str, Any] = {"ranks": ranks, "accumulation": accumulation, "clip": clip, "steps": STEPS}
    return train_engine(make_model(), stage=stage, plain_backward=plain_backward, **how)


CASES = pairs(stage=(0, 1, 2, 3), ranks=(1, 2, 4), accumulation=(1, 3), clip=(0.0, 0.5))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_plain_pytorch(case: Case) -> None:
    stage, ranks, accumulation, clip = case.values()
    plain = train_plain(make_model(), ranks=ranks, accumulation=accumulation, clip=clip, steps=STEPS)
    assert_close(ours(stage, ranks, accumulation, clip), plain)
    assert min(plain.norms) > clip, "clipping clips"


@pytest.mark.parametrize(("ranks", "accumulation", "clip"), [(1, 3, 0.0), (2, 3, 0.5), (4, 1, 0.0)])
def test_stages_have_the_same_bits(ranks: int, accumulation: int, clip: float) -> None:
    """0 and 1 sum the window before the ranks, 2 and 3 after: with one micro-batch there is no difference."""
    runs = [ours(stage, ranks, accumulation, clip) for stage in range(4)]
    assert_equal(runs[1], runs[0])
    assert_equal(runs[3], runs[2])
    if accumulation == 1 or ranks == 1:
        assert_equal(runs[2], runs[0])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_plain_backward_is_the_same(stage: int) -> None:
    assert_equal(ours(stage, 2, 3, 0.5, plain_backward=True), ours(stage, 2, 3, 0.5))


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


@pytest.mark.parametrize("stage", [1, 2])
def test_collectives_are_not_shared_by_two_dtypes(stage: int) -> None:
    common: dict[str, Any] = {"stage": stage, "ranks": 2, "steps": 3, "batch": vectors, "optimizer": sgd}
    model = make_model(MODELS["mixed dtypes"])
    together = train_engine(model, config={"zero_optimization": TOGETHER}, **common)
    assert_equal(together, train_engine(model, **common))


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


class Box:
    """A user's object, in which no hook finds a tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class BoxedOutputs(Stack):
    class Block(Residual):
        def forward(self, box: Box) -> Box:  # type: ignore[override]
            return Box(super().forward(box.value) * self.norm.weight.view(1, -1))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        box = Box(x)
        for block in self.blocks:
            box = block(box)
        return self.out(box.value)


class LossesAside(Stack):
    """Blocks that keep a loss in an attribute, as routers of experts do."""

    class Block(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.aside = torch.tanh(self.linear(x)).square().mean()
            return super().forward(x)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x, y)
        return loss + 0.1 * sum(block.aside for block in self.blocks)


class DetachedWeight(Stack):
    class Block(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0.1 * F.linear(x, self.linear.weight.detach())


class LaterWeight(Stack):
    """Use a weight of the last block in all of them: its gradient is complete after the backward of all."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x + F.linear(x, self.blocks[2].linear.weight) / 4)
        return self.out(x)


class UndefinedGradient(Stack):
    """Weights that autograd reaches through a function without a gradient for them."""

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x + weight.mean()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
            return grad, None

    def __init__(self) -> None:
        super().__init__()
        self.straight = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in self.blocks)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block, weight in zip(self.blocks, self.straight, strict=True):
            x = self.Straight.apply(block(x), weight)
        return self.out(x)


class ReturnedWeights(Stack):
    """Modules that return a weight of their own, as it is and as a view."""

    class Bare(nn.Module):
        def __init__(self, *, turned: bool) -> None:
            super().__init__()
            self.weight, self.turned = nn.Parameter(torch.eye(D) + 0.1), turned

        def forward(self) -> torch.Tensor:
            return self.weight.t() if self.turned else self.weight

    def __init__(self) -> None:
        super().__init__()
        self.bare = nn.ModuleList([self.Bare(turned=False), self.Bare(turned=True)])

    def run(self, x: torch.Tensor) -> torch.Tensor:
        weights = [bare() for bare in self.bare]
        for block in self.blocks:
            x = block(x)
        return self.out(x @ weights[0] @ weights[1])


@pytest.mark.parametrize(
    ("cls", "stage", "policy"),
    [
        (ReturnedWeights, 2, "before_use"),
        (ReturnedWeights, 3, "before_use"),
        (BoxedOutputs, 2, "at_step"),
        (BoxedOutputs, 3, "before_use"),
        (LossesAside, 0, "before_use"),
        (LossesAside, 3, "before_use"),
        (DetachedWeight, 3, "before_use"),
        (LaterWeight, 0, "in_backward"),
        (LaterWeight, 2, "before_use"),
        (LaterWeight, 3, "in_backward"),
        (UndefinedGradient, 2, "in_backward"),
        (UndefinedGradient, 3, "at_step"),
    ],
)
def test_hazards_train_as_plain_pytorch(cls: type[nn.Module], stage: int, policy: str) -> None:
    model = make_model(cls)
    common: dict[str, Any] = {"ranks": 2, "steps": 3, "batch": vectors, "optimizer": sgd}
    config = {"wherry": {"update_policy": policy}}
    assert_close(train_engine(model, stage=stage, config=config, **common), train_plain(model, **common))


class Encoder(Stack):
    """Methods other than forward that read weights of the root unit, as contrastive models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((D,), 1.5))

    def encode(self, x: torch.Tensor, *, double: bool = False) -> torch.Tensor:
        """Encode x."""
        x = self.run(x) * self.gain
        return x * 2 if double else x

    def size(self) -> int:
        return sum(p.numel() for p in self.parameters())


def by_other_methods(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = model.encode(y)
    return F.mse_loss(model.encode(x, double=True), target)


def with_a_penalty(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Run a backward through a backward."""
    x.requires_grad_()
    loss = model(x, y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


def of_several_forwards(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x, y) + model(y, x) + model(x + y, y)


def of_a_forward_inside_gathered(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with wherry.gathered(model.blocks[1]):
        return model(x, y)


def of_weights_inside_gathered(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Run the backward after the end of gathered."""
    loss = model(x, y)
    with wherry.gathered(model.parameters()):
        return loss + sum(parameter.pow(2).sum() for parameter in model.parameters())


def of_external_weights(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    kept = list(model.parameters())
    handles = [wherry.register_external_parameter(model.out, parameter) for parameter in kept]
    loss = model(x, y) + sum(parameter.pow(2).sum() for parameter in kept)
    for handle in handles:
        handle.remove()
    return loss


LOSSES = [
    by_other_methods,
    with_a_penalty,
    of_several_forwards,
    of_a_forward_inside_gathered,
    of_weights_inside_gathered,
    of_external_weights,
]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_more_than_one_forward(loss: Callable[..., torch.Tensor], stage: int) -> None:
    def batch(step: int, micro: int, rank: int) -> Callable[[Any], torch.Tensor]:
        return lambda model: loss(model, *vectors(step, micro, rank))

    def look(engine: Any) -> None:
        assert engine.size() == Encoder().size()
        assert engine.encode.__doc__ == "Encode x."
        assert stage < 3 or engine.module.gain.isnan().all()

    model, common = make_model(Encoder), dict[str, Any](ranks=2, steps=3, batch=batch, optimizer=sgd)
    assert_close(train_engine(model, stage=stage, finish=look, **common), train_plain(model, **common))


# Transforms of a model, and whether partitioned weights, and recomputation, refuse them.
TRANSFORMS: dict[str, tuple[Callable[[Any, Any, Any], torch.Tensor], bool, bool]] = {
    "grad": (lambda model, x, y: torch.func.grad(model)(x, y), True, True),
    "hessian": (lambda model, x, y: torch.func.hessian(model)(x, y), True, True),
    "jvp": (lambda model, x, y: torch.func.jvp(model, (x, y), (y, x))[1], True, False),
    "vmap": (lambda model, x, y: torch.func.vmap(model)(x, y), False, False),
    "vjp of autograd": (lambda model, x, y: torch.autograd.functional.vjp(model, (x, y))[1][0], False, False),
    "functional_call": (
        lambda model, x, y: torch.func.functional_call(
            model, {name: torch.full(p.shape, 0.1) for name, p in model.named_parameters()}, (x, y)
        ),
        False,
        False,
    ),
}


@pytest.mark.parametrize(("stage", "recomputes"), [(2, False), (2, True), (3, False), (3, True)])
def test_transforms_of_torch_func_give_their_results_or_are_refused(stage: int, recomputes: bool) -> None:
    batch = vectors(0, 0, 0)
    # Levels of forward derivatives are the process's, and ranks are threads here.
    one_at_a_time = threading.Lock()
    config: dict[str, Any] = {"activation_checkpointing": {"policy": "recompute"}} if recomputes else {}
    model = make_model(Stack)

    def use(engine: Any) -> None:
        for name, (call, refused_in_parts, refused_in_saving) in TRANSFORMS.items():
            for target in (engine.module,) if name == "functional_call" else (engine, engine.module):
                if (refused_in_parts and stage == 3) or (refused_in_saving and recomputes):
                    with (
                        one_at_a_time,
                        pytest.raises(WherryError, match=r"forward: torch\.func\..*torch\.autograd\.functional"),
                    ):
                        call(target, *batch)
                else:
                    torch.testing.assert_close(call(target, *batch), call(model, *batch))
        engine.backward(engine(*batch))
        engine.step()

    on_ranks(use, ranks=1 if stage < 3 else 2, stage=stage, model=model, config=config, optimizer=sgd)
