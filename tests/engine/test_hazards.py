"""Where sharded training goes wrong in silence elsewhere: each of these equals plain PyTorch, or is refused."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.harness import adamw, assert_close, make_model, settings, token_batch, train_engine, train_plain
from tests.engine.test_models import Residual, Stack, sgd, vectors
from torch import nn
from torch.nn import functional as F

import wherry
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks


def built(model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], comm: Comm) -> wherry.Engine:
    return wherry.initialize(model=model, optimizer=optimizer, config=config, mesh=comm)[0]


class Box:
    """An object of the user's own, in which no hook finds a tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class BoxedOutputs(Stack):
    class Boxing(Residual):
        def forward(self, box: Box) -> Box:  # type: ignore[override]
            return Box(super().forward(box.value) * self.norm.weight.view(1, -1))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Boxing() for _ in range(3))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        box = Box(x)
        for block in self.blocks:
            box = block(box)
        return self.out(box.value)


class LossesAside(Stack):
    """Blocks that keep a loss on themselves, as routers of experts do."""

    class Routing(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.aside = torch.tanh(self.linear(x)).square().mean()
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Routing() for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x, y)
        return loss + 0.1 * sum(block.aside for block in self.blocks)


class DetachedWeight(Stack):
    class Both(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0.1 * F.linear(x, self.linear.weight.detach())

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Both() for _ in range(3))


class LaterWeight(Stack):
    """A block uses a weight of one after it, whose gradient comes when the backward is through with both."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x + F.linear(x, self.blocks[2].linear.weight) / 4)
        return self.out(x)


class UndefinedGradient(Stack):
    """Weights that autograd reaches by a function that has no gradient for them."""

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


@pytest.mark.parametrize("policy", ["at_step", "before_use", "in_backward"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("cls", [LaterWeight, UndefinedGradient])
def test_gradients_that_come_after_their_unit_and_those_that_are_none(
    cls: type[nn.Module], stage: int, policy: str
) -> None:
    model = make_model(cls)
    common: dict[str, Any] = {"ranks": 2, "steps": 3, "batch": vectors, "optimizer": adamw}
    config = {"wherry": {"update_policy": policy}}
    assert_close(train_engine(model, stage=stage, config=config, **common), train_plain(model, **common))


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("cls", [BoxedOutputs, LossesAside, DetachedWeight])
def test_weights_that_backward_wants_by_other_ways(cls: type[nn.Module], stage: int) -> None:
    model = make_model(cls)
    common: dict[str, Any] = {"ranks": 2, "steps": 3, "batch": vectors, "optimizer": sgd}
    assert_close(train_engine(model, stage=stage, **common), train_plain(model, **common))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gradient_penalty(stage: int) -> None:
    """A backward through a backward."""

    def penalised(model: Any, rank: int) -> torch.Tensor:
        x, y = vectors(0, 0, rank)
        x.requires_grad_()
        loss = model(x, y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()

    def body(comm: Comm) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        engine = built(mine, sgd(mine.parameters()), settings(stage), comm)
        for _ in range(2):
            engine.backward(penalised(engine, comm.rank))
            engine.step()
        assert stage < 3 or engine.module.out.weight.isnan().all()
        return engine.module.state_dict()

    model = make_model(Stack)
    plain = copy.deepcopy(model)
    optimizer = sgd(plain.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        sum(penalised(plain, rank) / 2 for rank in range(2)).backward()
        optimizer.step()
    weights = run_ranks(2, body)[0]
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_of_inputs_are_no_micro_batch(stage: int) -> None:
    def body(comm: Comm) -> list[bool]:
        mine = copy.deepcopy(model)
        engine = built(mine, sgd(mine.parameters()), settings(stage, 2), comm)
        applied = []
        for micro in range(4):
            x, y = vectors(0, micro, comm.rank)
            x.requires_grad_()
            (slope,) = torch.autograd.grad(engine(x, y), x)
            assert slope.isfinite().all()
            engine.backward(engine(x.detach(), y))
            engine.step()
            applied.append(engine.was_step_applied())
        return applied

    model = make_model(Stack)
    assert run_ranks(2, body) == [[False, True] * 2] * 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_backwards_before_one_step(stage: int) -> None:
    """Their gradients add up, as in plain PyTorch."""

    def body(comm: Comm) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        engine = built(mine, adamw(mine.parameters()), settings(stage), comm)
        for step in range(3):
            for micro in range(2):
                engine.backward(engine(*token_batch(step, micro, comm.rank)))
            engine.step()
        return engine.module.state_dict()

    model = make_model()
    plain = copy.deepcopy(model)
    optimizer = adamw(plain.parameters())
    for step in range(3):
        optimizer.zero_grad()
        for micro, rank in itertools.product(range(2), range(2)):
            (plain(*token_batch(step, micro, rank)) / 2).backward()
        optimizer.step()
    weights = run_ranks(2, body)[0]
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_zero_grad_drops_what_no_step_has_used(stage: int) -> None:
    def body(comm: Comm, drop: bool) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        engine, optimizer, *_ = wherry.initialize(
            model=mine, optimizer=adamw(mine.parameters()), config=settings(stage), mesh=comm
        )
        if drop:
            engine.backward(engine(*token_batch(7, 0, comm.rank)))
        for step in range(2):
            optimizer.zero_grad()
            engine.backward(engine(*token_batch(step, 0, comm.rank)))
            engine.step()
        return engine.module.state_dict()

    model = make_model()
    dropped, never = (run_ranks(2, lambda comm, drop=drop: body(comm, drop))[0] for drop in (True, False))
    assert all(torch.equal(dropped[name], value) for name, value in never.items())


@pytest.mark.parametrize("stage", [0, 3])
def test_an_infinite_gradient_is_clipped_as_torch_clips_it(stage: int) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, factor: torch.Tensor) -> torch.Tensor:
            return (self.a * factor).sum() + self.b.sum()

    factor = torch.tensor([1.0, float("inf"), 1.0])
    plain = Plain()
    plain(factor).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()

    def body(comm: Comm) -> dict[str, torch.Tensor]:
        mine = Plain()
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        given = settings(stage, clip=1.0, more={"wherry": {"nonfinite": "ignore"}})
        engine, *_ = wherry.initialize(model=mine, optimizer=optimizer, config=given, mesh=comm)
        engine.backward(engine(factor))
        engine.step()
        assert engine.get_global_grad_norm() == float("inf")
        return engine.module.state_dict()

    weights = run_ranks(2, body)[0]
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(weights[name], value, equal_nan=True)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_forward_inside_gathered(stage: int) -> None:
    """As for generation: units stay whole, and their forwards release nothing."""

    def body(comm: Comm) -> list[float]:
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(model=mine, config=settings(stage), mesh=comm)
        with torch.no_grad(), wherry.gathered(mine):
            comm.traffic.clear()
            losses = [float(engine(*token_batch(0, micro, 0))) for micro in range(3)]
            assert not comm.traffic.calls
        assert stage < 3 or mine.head.weight.isnan().all()
        return losses

    model = make_model()
    with torch.no_grad():
        expected = [float(model(*token_batch(0, micro, 0))) for micro in range(3)]
    assert run_ranks(2, body)[0] == pytest.approx(expected)


def test_a_parameter_has_one_engine_at_a_time() -> None:
    model = make_model()
    engine, *_ = wherry.initialize(model=model, config=settings(2))
    with pytest.raises(WherryError, match=r"embed\.weight: this parameter belongs to another engine"):
        wherry.initialize(model=model, config=settings(2))
    engine.close()
    wherry.initialize(model=model, config=settings(2))[0].close()


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


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_move_or_cast_of_what_an_engine_holds_is_refused_where_it_is_made(stage: int, move: str) -> None:
    """Of the engine, the model, or a module of it: and nothing of it has changed by then."""

    def body(comm: Comm) -> None:
        mine = copy.deepcopy(model)
        engine = built(mine, adamw(mine.parameters()), settings(stage), comm)
        for module, name in ((engine, "inner.0.weight"), (mine, "inner.0.weight"), (mine.inner[1], "inner.1.weight")):
            with pytest.raises(WherryError, match=rf"{name}: .* cannot be moved or cast") as told:
                MOVES[move](module)
            assert '"bf16"' in str(told.value) and "engine.unwrap()" in str(told.value)
        assert {buffer.dtype for buffer in mine.buffers()} == {torch.float64}
        assert {(p.dtype, p.device.type) for p in mine.parameters()} == {(torch.float32, "cpu")}
        engine.backward(engine(torch.ones(1, 3, 8, 8)))
        engine.step()
        whole = engine.unwrap()
        MOVES[move](whole)

    model = make_model(Images)
    run_ranks(2, body)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_move_that_changes_nothing_goes_through_and_copies_move_as_they_like(stage: int) -> None:
    def body(comm: Comm) -> list[float]:
        mine = copy.deepcopy(model)
        engine = built(mine, adamw(mine.parameters()), settings(stage), comm)
        losses = []
        for step in range(3):
            for module in (engine, mine, mine.blocks[1]):
                assert module.to("cpu") is module
                assert module.float() is module and module.cpu() is module and module.to(torch.float32) is module
            mine.share_memory()
            loss = engine(*token_batch(step, 0, comm.rank))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        with wherry.gathered(mine):
            copies = [copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))]
        for other in copies:
            assert {p.dtype for p in other.half().parameters()} == {torch.float16}
            assert copy.deepcopy(other).double().head.weight.dtype == torch.float64
        engine.close()
        assert not any("_apply" in vars(module) for module in mine.modules())
        return losses

    model = make_model()
    expected = train_engine(model, stage=stage, ranks=2, steps=3)
    losses = run_ranks(2, body)
    assert [sum(step) / 2 for step in zip(*losses, strict=True)] == expected.losses


@pytest.mark.parametrize("how", ["data", "set_", "swap_tensors"])
def test_other_data_in_a_parameter_are_told_of_and_not_left_untrained(how: str) -> None:
    model = make_model()
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=settings(2))
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
