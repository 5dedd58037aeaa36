"""Programs that train wrongly in silence elsewhere: each equals plain PyTorch, or is refused."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    adamw,
    assert_close,
    assert_near,
    assert_same,
    engine_of,
    make_model,
    on_ranks,
    settings,
    token_batch,
    train,
    train_engine,
    train_plain,
)
from tests.models import Residual, Stack, rotate, sgd, vectors
from torch import nn
from torch.nn import functional as F

import wherry
from wherry.errors import WherryError


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
    """Blocks that use a weight of the last one, whose gradient comes after the backward of all."""

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


@pytest.mark.parametrize(
    ("cls", "stage", "policy"),
    [
        (LaterWeight, 0, "in_backward"),
        (LaterWeight, 2, "before_use"),
        (LaterWeight, 3, "in_backward"),
        (UndefinedGradient, 2, "in_backward"),
        (UndefinedGradient, 3, "before_use"),
        (UndefinedGradient, 3, "at_step"),
    ],
)
def test_late_and_undefined_gradients(cls: type[nn.Module], stage: int, policy: str) -> None:
    model = make_model(cls)
    common: dict[str, Any] = {"ranks": 2, "steps": 3, "batch": vectors, "optimizer": adamw}
    config = {"wherry": {"update_policy": policy}}
    assert_close(train_engine(model, stage=stage, config=config, **common), train_plain(model, **common))


@pytest.mark.parametrize(
    ("cls", "stage"), [(BoxedOutputs, 3), (LossesAside, 3), (DetachedWeight, 3), (BoxedOutputs, 2), (LossesAside, 0)]
)
def test_released_weights_that_backward_reads(cls: type[nn.Module], stage: int) -> None:
    model = make_model(cls)
    common: dict[str, Any] = {"ranks": 2, "steps": 3, "batch": vectors, "optimizer": sgd}
    assert_close(train_engine(model, stage=stage, **common), train_plain(model, **common))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gradient_penalty(stage: int) -> None:
    """Run a backward through a backward."""

    def penalized(model: Any, rank: int) -> torch.Tensor:
        x, y = vectors(0, 0, rank)
        x.requires_grad_()
        loss = model(x, y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()

    def use(engine: Any) -> dict[str, torch.Tensor]:
        for _ in range(2):
            engine.backward(penalized(engine, engine.comm.rank))
            engine.step()
        assert stage < 3 or engine.module.out.weight.isnan().all()
        return engine.module.state_dict()

    model = make_model(Stack)
    plain = copy.deepcopy(model)
    optimizer = sgd(plain.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        sum(penalized(plain, rank) / 2 for rank in range(2)).backward()
        optimizer.step()
    assert_near(on_ranks(use, stage=stage, model=model, optimizer=sgd)[0], plain.state_dict())


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_of_inputs_are_no_micro_batch(stage: int) -> None:
    def use(engine: Any) -> list[bool]:
        applied = []
        for micro in range(4):
            x, y = vectors(0, micro, engine.comm.rank)
            x.requires_grad_()
            (slope,) = torch.autograd.grad(engine(x, y), x)
            assert slope.isfinite().all()
            engine.backward(engine(x.detach(), y))
            engine.step()
            applied.append(engine.was_step_applied())
        return applied

    applied = on_ranks(use, stage=stage, accumulation=2, model=make_model(Stack), optimizer=sgd)
    assert applied == [[False, True] * 2] * 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_of_two_backwards_before_one_step_add_up(stage: int) -> None:
    def use(engine: Any) -> dict[str, torch.Tensor]:
        for step in range(2):
            for micro in range(2):
                engine.backward(engine(*token_batch(step, micro, engine.comm.rank)))
            engine.step()
        return engine.module.state_dict()

    plain = make_model()
    optimizer = adamw(plain.parameters())
    for step in range(2):
        optimizer.zero_grad()
        for micro, rank in itertools.product(range(2), range(2)):
            (plain(*token_batch(step, micro, rank)) / 2).backward()
        optimizer.step()
    assert_near(on_ranks(use, stage=stage)[0], plain.state_dict())


@pytest.mark.parametrize("stage", [0, 3])
def test_zero_grad_drops_gradients_that_no_step_used(stage: int) -> None:
    def use(engine: Any, drop: bool) -> dict[str, torch.Tensor]:
        if drop:
            engine.backward(engine(*token_batch(7, 0, engine.comm.rank)))
        for step in range(2):
            engine.optimizer.zero_grad()
            train(engine, step + 1, step)
        return engine.module.state_dict()

    assert_same(*(on_ranks(partial(use, drop=drop), stage=stage)[0] for drop in (True, False)))


@pytest.mark.parametrize("stage", [0, 3])
def test_an_infinite_gradient_is_clipped_as_torch_clips_it(stage: int) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, factor: torch.Tensor) -> torch.Tensor:
            return (self.a * factor).sum() + self.b.sum()

    def use(engine: Any) -> dict[str, torch.Tensor]:
        engine.backward(engine(factor))
        engine.step()
        assert engine.get_global_grad_norm() == float("inf")
        return engine.module.state_dict()

    factor = torch.tensor([1.0, float("inf"), 1.0])
    tenth = partial(torch.optim.SGD, lr=0.1)
    config = {"wherry": {"nonfinite": "ignore"}}
    weights = on_ranks(use, stage=stage, clip=1.0, model=Plain(), optimizer=tenth, config=config)[0]
    plain = Plain()
    plain(factor).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    tenth(plain.parameters()).step()
    assert_near(weights, plain.state_dict())


@pytest.mark.parametrize("stage", [2, 3])
def test_forwards_inside_gathered_gather_nothing(stage: int) -> None:
    def use(engine: Any) -> list[float]:
        with torch.no_grad(), wherry.gathered(engine.module):
            engine.comm.traffic.clear()
            losses = [float(engine(*token_batch(0, micro, 0))) for micro in range(3)]
            assert not engine.comm.traffic.calls
        assert stage < 3 or engine.module.head.weight.isnan().all()
        return losses

    model = make_model()
    with torch.no_grad():
        expected = [float(model(*token_batch(0, micro, 0))) for micro in range(3)]
    assert on_ranks(use, stage=stage, optimizer=None)[0] == pytest.approx(expected)


def test_a_parameter_has_one_engine_at_a_time() -> None:
    model = make_model()
    engine = engine_of(model, settings(2))
    with pytest.raises(WherryError, match=r"embed\.weight: this parameter belongs to another engine"):
        engine_of(model, settings(2))
    engine.close()
    engine_of(model, settings(2)).close()


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "half": nn.Module.half,
    "double": nn.Module.double,
    "bfloat16": nn.Module.bfloat16,
    "to(dtype)": lambda module: module.to(torch.bfloat16),
    "to(meta)": lambda module: module.to("meta"),
    "to_empty": lambda module: module.to_empty(device="cpu"),
    "to(memory_format)": lambda module: module.to(memory_format=torch.channels_last),
}


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
        self.register_buffer("counts", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).mean()


@pytest.mark.parametrize(("move", "stage"), rotate(MOVES, [0, 3]))
def test_a_move_or_cast_of_an_engines_model_is_refused_at_the_call(stage: int, move: str) -> None:
    """Move the engine, the model, or a module of it: the error comes before any change."""

    def use(engine: Any) -> None:
        mine = engine.module
        for module, name in ((engine, "inner.0.weight"), (mine, "inner.0.weight"), (mine.inner[1], "inner.1.weight")):
            with pytest.raises(WherryError, match=rf"{name}: .* cannot be moved or cast") as raised:
                MOVES[move](module)
            assert '"bf16"' in str(raised.value) and "engine.unwrap()" in str(raised.value)
        assert {buffer.dtype for buffer in mine.buffers()} == {torch.float64}
        assert {(p.dtype, p.device.type) for p in mine.parameters()} == {(torch.float32, "cpu")}
        engine.backward(engine(torch.ones(1, 3, 8, 8)))
        engine.step()
        MOVES[move](engine.unwrap())

    on_ranks(use, stage=stage, model=make_model(Images))


@pytest.mark.parametrize("stage", [0, 3])
def test_moves_without_effect_and_moves_of_copies_are_allowed(stage: int) -> None:
    def use(engine: Any) -> list[float]:
        mine = engine.module
        for module in (engine, mine, mine.blocks[1]):
            assert module.to("cpu") is module
            assert module.float() is module and module.cpu() is module and module.to(torch.float32) is module
        mine.share_memory()
        losses = train(engine, 2)
        with wherry.gathered(mine):
            copies = [copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))]
        for other in copies:
            assert {p.dtype for p in other.half().parameters()} == {torch.float16}
            assert copy.deepcopy(other).double().head.weight.dtype == torch.float64
        engine.close()
        assert not any("_apply" in vars(module) for module in mine.modules())
        return losses

    expected = on_ranks(lambda engine: train(engine, 2), stage=stage)
    assert on_ranks(use, stage=stage) == expected


@pytest.mark.parametrize("how", ["data", "set_", "swap_tensors"])
def test_other_data_in_a_parameter_are_refused_by_the_step(how: str) -> None:
    model: Any = make_model()
    engine = engine_of(model, settings(2))
    weight = model.blocks[0].mix.weight
    other = weight.detach().clone()
    if how == "data":
        weight.data = other
    elif how == "set_":
        weight.data.set_(other)
        with torch.no_grad():
            weight.set_(other)
    else:
        torch.utils.swap_tensors(weight, nn.Parameter(other))
    engine.backward(engine(*token_batch(0, 0, 0)))
    with pytest.raises(WherryError, match=r"blocks\.0\.mix\.weight: this parameter has been given other data"):
        engine.step()
    engine.close()
