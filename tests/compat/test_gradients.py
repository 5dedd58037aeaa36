"""`.grad` through the alias: what a script finds there, and what its changes do to the update."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wherry
from wherry.compat.deepspeed.engine import DeepSpeedEngine
from wherry.compat.deepspeed.tensor_fragment import (
    safe_get_full_grad,
    safe_set_full_grad,
    safe_update_full_grad_vectorized,
)
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks

HALF: list[dict[str, Any]] = [{}, {"bf16": {"enabled": True}}]


def made(model: nn.Module, comm: Comm | None = None, optimizer: Any = None, **config: Any) -> Any:
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    given = {"model": model, "model_parameters": model.parameters(), "optimizer": optimizer, "mesh": comm}
    return wherry.initialize(**given, config=settings | config, engine_class=DeepSpeedEngine)[0]


def line() -> nn.Module:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def backward(engine: Any, size: float, own: bool = False) -> None:
    loss = engine(torch.full((1, 2), size, dtype=engine.working_dtype)).sum()
    if own:
        loss.backward()
    else:
        engine.backward(loss)


# Stage, micro-batches, and `.grad` after each.
FOUND: list[tuple[int, int, list[float | None]]] = [
    (0, 1, [1.5]), (0, 2, [0.5, 1.5]), (1, 1, [None]), (1, 2, [0.5, None]), (2, 2, [None, None]), (3, 1, [None])
]  # fmt: skip


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("at", range(len(FOUND)))
def test_what_stands_in_grad(at: int, own: bool) -> None:
    """Of this rank's micro-batches so far until the boundary, then the mean over ranks; nothing after the step."""
    (stage, batches, found), half = FOUND[at], HALF[(at + own) % 2]

    def train(comm: Comm) -> list[float | None]:
        model, seen = line(), []
        more = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": batches, **half}
        engine = made(model, comm, **more)
        for _ in range(batches):
            backward(engine, 1.0 + comm.rank, own)
            seen.append(model.weight.grad)
            engine.step()
        assert model.weight.grad is None
        assert torch.equal(engine.states.full("weight", "master"), torch.full((1, 2), -1.5))
        engine.close()
        return [None if grad is None else float(grad.to(model.weight.dtype)[0, 0]) for grad in seen]

    ours = run_ranks(2, train)
    assert ours[0] == found
    # Until the boundary the other rank has its own; afterwards all have the mean.
    assert ours[1] == [None if grad is None else {0.5: 1.0, 1.5: 1.5}[grad] for grad in found]


def drop(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.grad = None


BETWEEN: dict[str, Callable[[Any, nn.Module], None]] = {
    "nothing": lambda engine, model: None,
    "the model's zero_grad": lambda engine, model: model.zero_grad(),
    "zeros": lambda engine, model: model.zero_grad(set_to_none=False),
    "the engine's zero_grad": lambda engine, model: engine.zero_grad(),
    "the optimizer's zero_grad": lambda engine, model: engine.optimizer.zero_grad(),
    "none": lambda engine, model: drop(model),
}


@pytest.mark.parametrize("at", range(len(BETWEEN)))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_dropped_between_two_backwards_of_a_step(stage: int, at: int) -> None:
    between, half = list(BETWEEN)[at], HALF[(stage + at) % 2]
    drops = {0: between != "nothing", 3: between == "the optimizer's zero_grad"}
    drops[1] = drops[2] = between in ("the engine's zero_grad", "the optimizer's zero_grad")
    model = line()
    engine = made(model, zero_optimization={"stage": stage}, **half)
    for steps in (1, 2):
        backward(engine, 1.0)
        BETWEEN[between](engine, model)
        backward(engine, 2.0)
        engine.step()
        moved = -engine.states.full("weight", "master")[0, 0].item()
        assert moved == steps * (2.0 if drops[stage] else 3.0)
    # Before the step there is nothing to begin anew: what has been reduced is applied.
    backward(engine, 1.0)
    if stage:
        BETWEEN[between](engine, model)
    engine.step()
    assert -engine.states.full("weight", "master")[0, 0].item() == moved + 1.0
    engine.close()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def double(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.grad = weight.grad * 2


def leave_out_the_first(model: nn.Module) -> None:
    next(model.parameters()).grad = None


@pytest.mark.parametrize("change", [clip, double, leave_out_the_first])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_script_makes_of_gradients_is_what_moves_the_weights(ranks: int, change: Callable[..., None]) -> None:
    torch.manual_seed(0)
    plain, data = net(), torch.randn(6, 2, 4)
    first = copy.deepcopy(plain.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for number, pair in enumerate(data):
        optimizer.zero_grad()
        (plain(pair).square().sum(1).mean()).backward()
        if number % 2:
            change(plain)
        optimizer.step()

    def train(comm: Comm) -> dict[str, torch.Tensor]:
        model = net()
        model.load_state_dict(first)
        engine = made(model, comm, torch.optim.AdamW(model.parameters(), lr=0.1))
        for number, pair in enumerate(data):
            engine.backward(engine(pair[comm.rank :: ranks]).square().sum(1).mean())
            if number % 2:
                change(model)
            engine.step()
        engine.close()
        return {name: weight.clone() for name, weight in model.state_dict().items()}

    for found in run_ranks(ranks, train):
        torch.testing.assert_close(found, dict(plain.state_dict()))


def test_two_models_of_which_one_judges_the_other() -> None:
    """What a loss of the generator leaves in the judge is dropped by `judge.zero_grad()`."""
    torch.manual_seed(1)
    generator, judge, data = nn.Linear(3, 4), nn.Linear(4, 1), torch.randn(5, 2, 4)
    plain = copy.deepcopy((generator, judge))

    def train(models: Any, step: Callable[[int], None], backward: Callable[[int, torch.Tensor], None]) -> None:
        generator, judge = models
        for real in data:
            judge.zero_grad()
            backward(1, (judge(real) - 1).square().mean())
            fake = generator(real[:, :3])
            backward(1, judge(fake.detach()).square().mean())
            step(1)
            generator.zero_grad()
            backward(0, (judge(fake) - 1).square().mean())
            step(0)

    optimizers = [torch.optim.Adam(model.parameters(), lr=0.05) for model in plain]
    train(plain, lambda which: optimizers[which].step(), lambda which, loss: loss.backward())
    engines = [made(model, None, torch.optim.Adam(model.parameters(), lr=0.05)) for model in (generator, judge)]
    train(
        (generator, judge),
        lambda which: engines[which].step(),
        lambda which, loss: engines[which].backward(loss),
    )
    for ours, theirs in zip((generator, judge), plain, strict=True):
        torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))
    for engine in engines:
        engine.close()


# What else could go wrong with gradients that stand there.


class Noise(nn.Module):
    """A weight that no module's forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.log_sigma = nn.Linear(2, 1, bias=False), nn.Parameter(torch.tensor([0.5]))
        nn.init.constant_(self.body.weight, 0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@pytest.mark.parametrize(("batches", "stage", "ranks"), [(1, 0, 2), (1, 1, 1), (3, 0, 1), (3, 1, 2)])
def test_a_gradient_that_comes_past_the_model_counts_once(batches: int, stage: int, ranks: int) -> None:
    """It reaches a weight before the engine hears of the backward, and `.grad` has one of the micro-batch before."""
    plain, data = Noise(), [torch.full((1, 2), 1.0 + number) for number in range(2 * batches)]

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        sigma = (model.module if isinstance(model, DeepSpeedEngine) else model).log_sigma.exp()
        return ((model(x) - 1).square() / sigma).sum() + sigma.log().sum()

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for first in range(0, len(data), batches):
        for x in data[first : first + batches]:
            (loss(plain, x) / batches).backward()
        if batches == 1:
            plain.log_sigma.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def train(comm: Comm) -> dict[str, torch.Tensor]:
        model = Noise()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        more = {"gradient_accumulation_steps": batches, "zero_optimization": {"stage": stage}}
        engine = made(model, comm, optimizer, **more)
        for first in range(0, len(data), batches):
            for x in data[first : first + batches]:
                loss(engine, x).backward()
                if batches == 1:  # of the weight alone, which no module's forward comes before
                    model.log_sigma.square().sum().backward()
                engine.step()
        engine.close()
        return {name: weight.clone() for name, weight in model.state_dict().items()}

    for found in run_ranks(ranks, train):
        torch.testing.assert_close(found, dict(plain.state_dict()))


def halve_data(grad: torch.Tensor) -> None:
    grad.data.mul_(0.5)


def halve_array(grad: torch.Tensor) -> None:
    array = grad.numpy()
    array *= 0.5


def of_another(grad: torch.Tensor) -> None:
    grad.data = grad.data * 0.5


@pytest.mark.parametrize("change", [halve_data, halve_array, of_another])
def test_changes_that_autograd_does_not_see_count(change: Callable[[torch.Tensor], None]) -> None:
    model = line()
    engine = made(model)
    backward(engine, 1.0)
    change(model.weight.grad)
    engine.step()
    assert torch.equal(model.weight, torch.full((1, 2), -0.5))
    engine.close()


def test_gradients_that_are_reduced_by_hand_stand_there_and_can_be_changed() -> None:
    def train(comm: Comm) -> list[float]:
        model = line()
        engine = made(model, comm)
        with engine.no_sync():
            backward(engine, 1.0 + 2 * comm.rank)
        own = float(model.weight.grad[0, 0])
        model.weight.grad *= 2
        engine.set_gradient_accumulation_boundary(True)
        engine.allreduce_gradients()
        mean = float(model.weight.grad[0, 0])
        model.weight.grad *= 2
        engine.step()
        engine.close()
        return [own, mean, float(model.weight.detach()[0, 0])]

    assert run_ranks(2, train) == [[1.0, 4.0, -8.0], [3.0, 4.0, -8.0]]


def test_the_functions_for_gradients_and_grad_say_the_same() -> None:
    model = line()
    engine = made(model)
    for change, moved in (
        (lambda weight: weight.grad.mul_(3), 3.0),
        (lambda weight: safe_set_full_grad(weight, torch.full((1, 2), 5.0)), 5.0),
        (lambda weight: safe_update_full_grad_vectorized([weight], lambda grad, _: grad * 2), 2.0),
    ):
        before = model.weight.detach().clone()
        backward(engine, 1.0)
        change(model.weight)
        assert torch.equal(model.weight.grad, torch.full((1, 2), moved))
        assert torch.equal(safe_get_full_grad(model.weight), model.weight.grad)
        engine.step()
        assert torch.equal(before - model.weight, torch.full((1, 2), moved))
    engine.close()


def test_a_window_that_is_begun_anew_is_one_with_gradients() -> None:
    model = line()
    engine = made(model, gradient_accumulation_steps=2, zero_optimization={"stage": 1})
    for _ in range(2):
        backward(engine, 1.0)
        engine.step()
    engine.optimizer.zero_grad()  # nothing waits for a step
    backward(engine, 1.0)
    engine.step()
    backward(engine, 3.0)
    engine.step()
    assert engine.global_steps == 2 and -model.weight[0, 0] == 3.0
    # A backward for inputs alone drops nothing.
    for _ in range(2):
        backward(engine, 1.0)
        if engine.has_gradients():
            engine.zero_grad()
            x = torch.ones(1, 2, requires_grad=True)
            torch.autograd.grad(engine(x).sum(), x)
        engine.step()
    assert engine.global_steps == 3 and -model.weight[0, 0] == 4.0
    engine.close()


def test_what_a_script_sets_after_a_drop_is_added_to() -> None:
    model = line()
    engine = made(model)
    backward(engine, 1.0)
    engine.zero_grad()
    model.weight.grad = torch.full((1, 2), 7.0)
    backward(engine, 1.0)
    engine.step()
    assert torch.equal(model.weight, torch.full((1, 2), -8.0))
    engine.close()
    assert model.weight.grad is None
