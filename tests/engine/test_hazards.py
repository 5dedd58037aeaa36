"""Programs that train wrongly in silence elsewhere: each equals plain PyTorch, or is refused."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    assert_close,
    assert_near,
    engine_of,
    make_model,
    on_ranks,
    settings,
    token_batch,
    train,
    train_engine,
    train_plain,
)
from tests.models import Buffers, Residual, Stack, sgd, vectors
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
def test_trains_as_plain_pytorch(cls: type[nn.Module], stage: int, policy: str) -> None:
    model = make_model(cls)
    common: dict[str, Any] = {"ranks": 2, "steps": 3, "batch": vectors, "optimizer": sgd}
    config = {"wherry": {"update_policy": policy}}
    assert_close(train_engine(model, stage=stage, config=config, **common), train_plain(model, **common))


@pytest.mark.parametrize("stage", [0, 3])
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


def test_an_infinite_gradient_is_clipped_as_torch_clips_it() -> None:
    plain = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1))
    model, x = copy.deepcopy(plain), torch.tensor([1.0, float("inf"), 1.0])
    plain[0](x).sum().backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    sgd(plain.parameters()).step()
    config = settings(2, clip=1.0, more={"wherry": {"nonfinite": "ignore"}})
    engine = engine_of(model, config, optimizer=sgd)
    engine.backward(engine.module[0](x).sum())
    engine.step()
    assert engine.get_global_grad_norm() == float("inf")
    assert_near(engine.module.state_dict(), plain.state_dict())
    engine.close()


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "half": nn.Module.half,
    "to(dtype)": lambda module: module.to(torch.bfloat16),
    "to(meta)": lambda module: module.to("meta"),
    "to_empty": lambda module: module.to_empty(device="cpu"),
}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_move_or_cast_of_an_engines_model_is_refused_at_the_call(stage: int) -> None:
    """Move the engine, the model, or a module of it: the error comes before any change."""

    def use(engine: Any) -> None:
        mine = engine.module
        parts = ((engine, "blocks.0.norm.weight"), (mine, "blocks.0.norm.weight"), (mine.out, "out.weight"))
        for move, (part, name) in itertools.product(MOVES.values(), parts):
            with pytest.raises(WherryError, match=rf"{name}: .* cannot be moved or cast") as raised:
                move(part)
            assert '"bf16"' in str(raised.value) and "engine.unwrap()" in str(raised.value)
        assert mine.shift.dtype == torch.float64
        assert {(p.dtype, p.device.type) for p in mine.parameters()} == {(torch.float32, "cpu")}
        for part in (engine, mine, mine.out):
            assert part.to("cpu") is part and part.float() is part and part.to(torch.float32) is part
        train(engine, 1, batch=vectors)
        with wherry.gathered(mine):
            copies = [copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))]
        for other in copies:
            assert {p.dtype for p in other.half().parameters()} == {torch.float16}
        assert engine.unwrap().double().out.weight.dtype == torch.float64

    on_ranks(use, stage=stage, model=make_model(Buffers))


@pytest.mark.parametrize("how", ["data", "set_", "swap_tensors"])
def test_other_data_in_a_parameter_are_refused_by_the_step(how: str) -> None:
    model: Any = make_model()
    engine = engine_of(model, settings(2))
    weight = model.blocks[0].mix.weight
    other = weight.detach().clone()
    if how == "data":
        weight.data = other
    elif how == "set_":
        with torch.no_grad():
            weight.set_(other)
    else:
        torch.utils.swap_tensors(weight, nn.Parameter(other))
    engine.backward(engine(*token_batch(0, 0, 0)))
    with pytest.raises(WherryError, match=r"blocks\.0\.mix\.weight: this parameter has been given other data"):
        engine.step()
    engine.close()
