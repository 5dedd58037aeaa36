"""`.grad` and `deepspeed.utils.safe_*`: what a script finds there, and what its changes do to the update."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compat.harness import BF16, FP16, HOST, batch, engine_of, line, loss_of, make_model, step
from torch import nn

import wherry
from wherry.compat.deepspeed import tensor_fragment as safe
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks


def made(model: nn.Module, comm: Comm | None = None, optimizer: Any = None, stage: int = 0, **config: Any) -> Any:
    config = {"gradient_clipping": 0.0, "zero_allow_untested_optimizer": True, **config}
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    return engine_of(stage, model=model, given=optimizer, mesh=comm, **config)


def backward(engine: Any, size: float, own: bool = False) -> None:
    loss = engine(torch.full((1, 2), size, dtype=engine.working_dtype)).sum()
    if own:
        loss.backward()
    else:
        engine.backward(loss)


def moved(engine: Any) -> float:
    return -engine.states.full("weight", "master")[0, 0].item()


@pytest.mark.parametrize(
    ("stage", "batches", "found", "own", "half"),
    [
        (0, 1, [1.5], False, {}), (0, 2, [0.5, 1.5], True, BF16), (1, 1, [None], True, {}),
        (1, 2, [0.5, None], False, BF16), (2, 2, [None, None], True, {}), (3, 1, [None], False, BF16),
    ],
)  # fmt: skip
def test_what_stands_in_grad(
    stage: int, batches: int, found: list[float | None], own: bool, half: dict[str, Any]
) -> None:
    """Hold this rank's micro-batches so far until the boundary, then the mean over ranks; nothing after the step."""

    def train(comm: Comm) -> list[float | None]:
        model, seen = line(0.0, 2), []
        engine = made(model, comm, stage=stage, gradient_accumulation_steps=batches, **half)
        for _ in range(batches):
            backward(engine, 1.0 + comm.rank, own)
            seen.append(model.weight.grad)
            engine.step()
        assert model.weight.grad is None and moved(engine) == 1.5
        engine.close()
        return [None if grad is None else float(grad.to(model.weight.dtype)[0, 0]) for grad in seen]

    ours = run_ranks(2, train)
    assert ours[0] == found
    # Until the boundary the other rank has its own; afterwards all have the mean.
    assert ours[1] == [None if grad is None else {0.5: 1.0, 1.5: 1.5}[grad] for grad in found]


BETWEEN: dict[str, Callable[[Any, nn.Module], Any]] = {
    "the model's zero_grad": lambda engine, model: model.zero_grad(),
    "zeros": lambda engine, model: model.zero_grad(set_to_none=False),
    "the engine's zero_grad": lambda engine, model: engine.zero_grad(),
    "the optimizer's zero_grad": lambda engine, model: engine.optimizer.zero_grad(),
    "none": lambda engine, model: [setattr(weight, "grad", None) for weight in model.parameters()],
}


@pytest.mark.parametrize(
    ("stage", "between", "drops"),
    [
        *((0, between, True) for between in BETWEEN),
        (1, "the model's zero_grad", False),
        (1, "the engine's zero_grad", True),
        (2, "the optimizer's zero_grad", True),
        (3, "the engine's zero_grad", False),
        (3, "the optimizer's zero_grad", True),
    ],
)
def test_what_is_dropped_between_two_backwards_of_a_step(stage: int, between: str, drops: bool) -> None:
    model = line(0.0, 2)
    engine = made(model, stage=stage, **(BF16 if stage % 2 else {}))
    for steps in (1, 2):
        backward(engine, 1.0)
        BETWEEN[between](engine, model)
        backward(engine, 2.0)
        engine.step()
        assert moved(engine) == steps * (2.0 if drops else 3.0)
    # Before the step there is nothing to begin anew: what has been reduced is applied.
    before = moved(engine)
    backward(engine, 1.0)
    if stage:
        BETWEEN[between](engine, model)
    engine.step()
    assert moved(engine) == before + 1.0
    engine.close()


def test_what_a_script_makes_of_gradients_is_what_moves_the_weights() -> None:
    def change(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        next(model.parameters()).grad = None

    plain, data = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(6, 2, 4)
    first = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for number, pair in enumerate(data):
        optimizer.zero_grad()
        (plain(pair).square().sum(1).mean()).backward()
        if number % 2:
            change(plain)
        optimizer.step()

    def train(comm: Comm) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(first)
        engine = made(model, comm, torch.optim.AdamW(model.parameters(), lr=0.1))
        for number, pair in enumerate(data):
            engine.backward(engine(pair[comm.rank :: 2]).square().sum(1).mean())
            if number % 2:
                change(model)
            engine.step()
        engine.close()
        return dict(model.state_dict())

    for weights in run_ranks(2, train):
        torch.testing.assert_close(weights, dict(plain.state_dict()))


class Noise(nn.Module):
    """A weight that no module's forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.sigma = line(0.25, 2), nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@pytest.mark.parametrize(("stage", "sizes"), [(0, (1.0,)), (1, (1.0, 2.0, 6.0))])
def test_a_gradient_that_comes_past_the_model_counts_once(stage: int, sizes: tuple[float, ...]) -> None:
    """Count a gradient that reaches a weight before the engine's backward begins, on top of the `.grad` before."""
    alone = len(sizes) == 1

    def train(comm: Comm) -> list[float]:
        model = Noise()
        engine = made(model, comm, stage=stage, gradient_accumulation_steps=len(sizes))
        for size in sizes:
            (engine(torch.full((1, 2), size)).sum() * model.sigma).sum().backward()
            if alone:  # of the weight alone, which no module's forward comes before
                (model.sigma * 3).sum().backward()
            engine.step()
        engine.close()
        return [*(0.25 - model.body.weight[0]).tolist(), 0.5 - model.sigma.item()]

    # The gradients of weight * sigma * size: by the body sigma, and by sigma the body's output.
    size = sum(sizes) / len(sizes)
    for found in run_ranks(2, train):
        assert found == pytest.approx([0.5 * size, 0.5 * size, 2 * 0.25 * size + 3 * alone])


def test_gradients_that_are_reduced_by_hand_stand_there_and_can_be_changed() -> None:
    def train(comm: Comm) -> list[float]:
        model = line(0.0, 2)
        engine = made(model, comm)
        with engine.no_sync():
            backward(engine, 1.0 + 2 * comm.rank)
        own = float(model.weight.grad[0, 0])
        model.weight.grad *= 2
        engine.set_gradient_accumulation_boundary(True)
        engine.allreduce_gradients()
        mean = float(model.weight.grad[0, 0])
        model.weight.grad.data.mul_(2)  # which autograd does not see
        engine.step()
        engine.close()
        return [own, mean, float(model.weight.detach()[0, 0])]

    assert run_ranks(2, train) == [[1.0, 4.0, -8.0], [3.0, 4.0, -8.0]]


def test_a_window_that_is_begun_anew_is_one_with_gradients() -> None:
    model = line(0.0, 2)
    engine = made(model, stage=1, gradient_accumulation_steps=2)
    for _ in range(2):
        backward(engine, 1.0)
        engine.step()
    engine.optimizer.zero_grad()  # nothing waits for a step
    for size in (1.0, 3.0):
        backward(engine, size)
        engine.step()
    assert engine.global_steps == 2 and moved(engine) == 3.0
    # A backward for inputs alone drops nothing.
    for _ in range(2):
        backward(engine, 1.0)
        if engine.has_gradients():
            engine.zero_grad()
            x = torch.ones(1, 2, requires_grad=True)
            torch.autograd.grad(engine(x).sum(), x)
        engine.step()
    assert engine.global_steps == 3 and moved(engine) == 4.0
    engine.close()


GET = (
    safe.safe_get_full_grad,
    safe.safe_get_local_grad,
    safe.safe_get_full_fp32_param,
    safe.safe_get_local_fp32_param,
    lambda parameter: safe.safe_get_full_optimizer_state(parameter, "exp_avg"),
    lambda parameter: safe.safe_get_local_optimizer_state(parameter, "exp_avg_sq"),
)


@pytest.mark.parametrize(("stage", "more"), [(0, {}), (3, {}), (3, FP16)])
def test_a_frozen_weight_has_none_of_it_and_stays(stage, more):
    model = make_model()
    model[0].weight.requires_grad_(False)
    engine = engine_of(stage, model=model, **more)
    engine.backward(loss_of(engine))
    frozen, trained = list(engine.module.parameters())[:2]
    before = engine.consolidated_state_dict()["0.weight"].clone()
    assert all(get(frozen) is None for get in GET)
    assert all(get(trained) is not None for get in GET)
    safe.safe_set_full_fp32_param(frozen, torch.zeros(8, 4))
    safe.safe_set_full_grad(frozen, torch.zeros(8, 4))
    safe.safe_set_local_grad(frozen, torch.zeros(32))
    safe.safe_set_full_optimizer_state(frozen, torch.zeros(8, 4), "exp_avg")
    safe.safe_update_full_grad_vectorized([frozen, trained], lambda gradient, parameter: gradient * 0)
    assert safe.safe_get_full_grad(trained).abs().sum() == 0
    if stage == 3:
        safe.safe_set_local_grad(trained, torch.arange(8.0))
        assert torch.equal(safe.safe_get_full_grad(trained).float(), torch.arange(8.0))
    with pytest.raises(wherry.WherryError, match="expected 8 elements"):
        safe.safe_set_local_grad(trained, torch.zeros(3))
    with pytest.raises(wherry.WherryError, match="belongs to no engine"):
        safe.safe_set_full_grad(torch.nn.Parameter(torch.ones(1)), torch.ones(1))
    engine.step()
    assert torch.equal(engine.consolidated_state_dict()["0.weight"], before)
    engine.destroy()


@pytest.mark.parametrize(
    ("stage", "zero", "more"), [(0, {}, FP16), (1, {}, {}), (1, HOST, FP16), (2, HOST, {}), (3, HOST, FP16)]
)
def test_full_and_local_gradients_within_a_window(stage, zero, more):
    """Give the micro-batches so far: at stages 0 and 1 the rank's own until the boundary, else the ranks' mean."""

    def body(comm: Any) -> list[torch.Tensor]:
        engine = engine_of(stage, zero=zero, mesh=comm, gradient_accumulation_steps=2, **more)
        weight, found = next(engine.module.parameters()), []
        assert safe.safe_get_full_grad(weight) is None
        for micro in range(2):
            engine.backward(loss_of(engine, 2 * micro + comm.rank))
            found.append(safe.safe_get_full_grad(weight).float().clone())
            assert safe.safe_get_local_grad(weight).dim() == 1
            safe.safe_set_full_grad(weight, found[-1] * 2)
            torch.testing.assert_close(safe.safe_get_full_grad(weight).float(), found[-1] * 2, rtol=1e-2, atol=1e-3)
            safe.safe_set_full_grad(weight, found[-1])
            engine.step()
        assert safe.safe_get_full_grad(weight) is safe.safe_get_local_grad(weight) is None
        engine.destroy()
        return [gradient / (16 if more else 1) for gradient in found]  # they carry the loss scale

    found = run_ranks(2, body)
    plain = [make_model() for _ in range(2)]
    for micro in range(2):
        for rank, one in enumerate(plain):
            (one(batch(2 * micro + rank)).mean() / 2).backward()
        own = [one[0].weight.grad for one in plain]
        for rank, grad in enumerate(own):
            expected = grad if stage < 2 and micro == 0 else (own[0] + own[1]) / 2
            torch.testing.assert_close(found[rank][micro], expected, rtol=2e-2, atol=2e-3)


def test_masters_and_states_that_a_script_sets_are_those_of_the_next_step():
    def body(comm: Any) -> list[torch.Tensor]:
        engine = engine_of(3, mesh=comm, gradient_clipping=0.0)
        weight, bias = list(engine.module.parameters())[:2]
        step(engine)
        safe.safe_set_full_fp32_param(bias, torch.full((8,), 0.125))
        moment = safe.safe_get_full_optimizer_state(weight, "exp_avg")
        safe.safe_set_full_optimizer_state(weight, moment * 2, "exp_avg")
        local = safe.safe_get_local_optimizer_state(weight, "exp_avg_sq")
        safe.safe_set_local_optimizer_state(weight, local * 4, "exp_avg_sq")
        step(engine, 1)
        return [safe.safe_get_full_fp32_param(parameter) for parameter in engine.module.parameters()]

    plain = make_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    for seed in range(2):
        plain(batch(seed)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if seed == 0:
            plain[0].bias.data.fill_(0.125)
            optimizer.state[plain[0].weight]["exp_avg"].mul_(2)
            optimizer.state[plain[0].weight]["exp_avg_sq"].mul_(4)
    for found in run_ranks(2, body):
        torch.testing.assert_close(found, [parameter.detach() for parameter in plain.parameters()])
