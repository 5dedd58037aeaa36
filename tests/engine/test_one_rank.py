"""One rank by itself: gradients that are looked at, that come late or never, and backwards that no module shows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    Run,
    adamw,
    assert_close,
    assert_equal,
    make_model,
    settings,
    token_batch,
    train_engine,
    train_plain,
)
from tests.engine.test_hazards import Box
from tests.engine.test_models import (
    MODELS,
    Stack,
    discard,
    evaluate,
    fail_backward,
    fail_forward,
    nothing,
    run_with,
    vectors,
)

import wherry


def test_gradients_can_be_read_and_replaced() -> None:
    model = make_model()
    plain, name = copy.deepcopy(model), "blocks.1.up.weight"
    optimizer = adamw(plain.parameters())
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=settings(0))
    for step in range(3):
        plain(*token_batch(step, 0, 0)).backward()
        engine.backward(engine(*token_batch(step, 0, 0)))
        grads = dict(plain.named_parameters())
        torch.testing.assert_close(engine.gradients("norm.weight"), grads["norm.weight"].grad, rtol=1e-4, atol=1e-6)
        if step == 1:
            engine.states.set_gradient(name, 3 * engine.gradients(name))
            grads[name].grad.mul_(3)
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    engine.close()


def test_looking_at_gradients_changes_no_bit(tmp_path: Path) -> None:
    """Norms by unit, single gradients, and a checkpoint between backward and step."""

    def train(more: dict[str, Any], *, look: bool) -> Run:
        model = copy.deepcopy(source)
        config = settings(1, clip=0.05, more=more)
        engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
        run = Run()
        for step in range(6):
            engine.backward(engine(*token_batch(step, 0, 0)))
            if look:
                norms = engine.gradient_norms()
                grad = engine.gradients("blocks.1.up.weight")
                assert 0 < float(grad.norm()) <= norms["blocks.1"] * (1 + 1e-6)
            if look and step % 2:
                engine.save_checkpoint(tmp_path)
            engine.step()
            run.norms.append(engine.get_global_grad_norm())
            if look:
                squares = sum(norm**2 for norm in norms.values())
                assert squares == pytest.approx(run.norms[-1] ** 2, rel=1e-12)
        run.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        engine.close()
        return run

    source = make_model()
    for more in ({}, {"bf16": {"enabled": True}}):
        plain, watched = train(more, look=False), train(more, look=True)
        assert watched.norms == plain.norms
        assert_equal(watched, plain)


def slow_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_on_one_rank(name: str) -> None:
    model = make_model(MODELS[name])
    common: dict[str, Any] = {"steps": 3, "batch": vectors, "optimizer": slow_sgd}
    plain = train_plain(model, **common)
    for plain_backward in (False, True):
        assert_close(train_engine(model, stage=2, plain_backward=plain_backward, **common), plain)


class Hiding(Stack):
    """Its loss is in an object of the user's own: no hook of a module sees it."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return Box(super().forward(x, y))


class Part(Stack):
    """One block is used in odd calls only, and one never."""

    calls = 0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.blocks[0](x)
        return self.out(self.blocks[1](x) if self.calls % 2 else x)


def both(model: Any, step: Callable[[Any, Any, int], None], steps: int = 4) -> None:
    """`step` of plain PyTorch and of an engine: the weights are the same after each, and what got no gradient stays."""
    plain = copy.deepcopy(model)
    optimizer = slow_sgd(plain.parameters())
    engine, *_ = wherry.initialize(model=model, optimizer=slow_sgd(model.parameters()), config=settings(1))
    for number in range(steps):
        step(plain, optimizer, number)
        optimizer.zero_grad()
        step(engine, engine, number)
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    assert engine.global_steps == steps
    engine.close()


def test_a_backward_that_no_module_shows_is_one() -> None:
    def step(model: Any, optimizer: Any, number: int) -> None:
        model(*vectors(number, 0, 0)).value.backward()
        optimizer.step()

    both(make_model(Hiding), step)


def test_what_no_backward_of_a_window_has_brought_is_left_alone() -> None:
    def once(model: Any, optimizer: Any, number: int) -> None:
        model(*vectors(number, 0, 0)).backward()
        optimizer.step()

    def twice(model: Any, optimizer: Any, number: int) -> None:
        for micro in range(2):
            model(*vectors(number, micro, 0)).backward()
        optimizer.step()

    both(make_model(Part), once)
    both(make_model(Part), twice)


def test_what_a_gradient_is_of() -> None:
    """A backward through a backward counts; one for the slope of the inputs alone is no micro-batch."""

    def penalised(model: Any, optimizer: Any, number: int) -> None:
        x, y = vectors(number, 0, 0)
        x.requires_grad_()
        loss = model(x, y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        optimizer.step()

    def of_inputs(model: Any, optimizer: Any, number: int) -> None:
        x, y = vectors(number, 0, 0)
        x.requires_grad_()
        assert torch.autograd.grad(model(x, y), x)[0].isfinite().all()
        model(x.detach(), y).backward()
        optimizer.step()

    for step in (penalised, of_inputs):
        both(make_model(Stack), step, steps=2)


@pytest.mark.parametrize("use", [evaluate, fail_forward, fail_backward, discard])
def test_what_happens_between_steps_changes_nothing(use: Callable[..., None]) -> None:
    model = make_model(Stack)
    assert_equal(run_with(model, use, 1, ranks=1), run_with(model, nothing, 1, ranks=1))
