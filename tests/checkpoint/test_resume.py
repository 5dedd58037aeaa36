"""Resuming is exact: 20 steps are 10, a save, a new engine, and 10 more, bit for bit."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoint.harness import Shape, assert_same, on, state_of, train
from tests.engine.harness import make_model, settings, token_batch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR

import wherry
from wherry.checkpoint.errors import CheckpointError
from wherry.parallel.comm import Comm
from wherry.update.lion import Lion

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 3}}
BF16 = {"bf16": {"enabled": True}}
CLIPPED = {"gradient_clipping": 0.5}


STRAIGHT: dict[str, Any] = {}


def twenty(shape: Shape, **more: Any) -> Any:
    def body(engine: Any, comm: Comm) -> Any:
        return train(engine, comm, 20, accumulation=shape.accumulation), state_of(engine)

    # Once for all that are compared with it.
    key = repr((shape, more))
    if key not in STRAIGHT:
        STRAIGHT[key] = on(shape, body, **more)[0]
    return STRAIGHT[key]


def ten_and_ten(folder: Path, first: Shape, second: Shape, **more: Any) -> Any:
    def begin(engine: Any, comm: Comm) -> list[float]:
        losses = train(engine, comm, 10, accumulation=first.accumulation)
        engine.save_checkpoint(folder)
        return losses

    def go_on(engine: Any, comm: Comm) -> Any:
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
        return train(engine, comm, 10, first=10, accumulation=second.accumulation), state_of(engine)

    losses = on(first, begin, **more)[0]
    rest, states = on(second, go_on, **more)[0]
    return losses + rest, states


def assert_exact(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert_same(one[1], other[1])


@pytest.mark.parametrize("more", [{}, BF16, FP16, CLIPPED], ids=["fp32", "bf16", "fp16", "clipped"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_twenty_is_ten_and_ten(tmp_path: Path, stage: int, more: dict[str, Any]) -> None:
    shape = Shape(2, stage, more=more)
    assert_exact(twenty(shape), ten_and_ten(tmp_path, shape, shape))


@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 1), (2, 0), (1, 2)])
def test_through_a_change_of_stage(tmp_path: Path, before: int, after: int) -> None:
    assert_exact(twenty(Shape(2, before)), ten_and_ten(tmp_path, Shape(2, before), Shape(2, after)))


def way(tier: str, policy: str, folder: Path, more: dict[str, Any]) -> Shape:
    """States on a tier, updated by a policy; in bf16 with whole masters, as a split one rounds otherwise."""
    where: dict[str, Any] = {"device": tier}
    if tier == "nvme":
        where["nvme_path"] = str(folder)
    zero = {"stage": 3} if tier == "device" else {"stage": 3, "offload_optimizer": where, "offload_param": where}
    return Shape(2, 3, more={**more, "zero_optimization": zero, "wherry": {"update_policy": policy, "master": "whole"}})


@pytest.mark.parametrize("more", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("device", "at_step"), ("nvme", "before_use")),
        (("nvme", "in_backward"), ("cpu", "at_step")),
        (("cpu", "before_use"), ("device", "in_backward")),
    ],
    ids=lambda given: "-".join(given),
)
def test_through_a_change_of_tier_and_policy(
    tmp_path: Path, before: tuple[str, str], after: tuple[str, str], more: dict[str, Any]
) -> None:
    first, second = (way(*given, tmp_path, more) for given in (before, after))
    straight = twenty(way("device", "at_step", tmp_path, more))
    assert_exact(straight, ten_and_ten(tmp_path / "saved", first, second))


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "Lion": lambda p: Lion(p, lr=1e-3),
    "AMSGrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=3),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(tmp_path: Path, name: str) -> None:
    make = OPTIMIZERS[name]
    whole = twenty(Shape(2, 2), optimizer=make)
    assert_exact(whole, ten_and_ten(tmp_path, Shape(2, 2), Shape(2, 3), optimizer=make))


def micro_batch(engine: Any, comm: Comm, number: int) -> None:
    engine.backward(engine(*token_batch(0, number, comm.rank)))
    engine.step()


@pytest.mark.parametrize("more", [{}, FP16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_in_the_middle_of_a_window(tmp_path: Path, stage: int, more: dict[str, Any]) -> None:
    """Saved after 5 micro-batches of windows of 3: the sums so far are in it."""
    shape = Shape(2, stage, 3, more)

    def whole(engine: Any, comm: Comm) -> Any:
        for number in range(12):
            micro_batch(engine, comm, number)
        return engine.get_global_grad_norm(), state_of(engine)

    def begin(engine: Any, comm: Comm) -> None:
        for number in range(5):
            micro_batch(engine, comm, number)
        engine.save_checkpoint(tmp_path, tag="middle")

    def go_on(engine: Any, comm: Comm) -> Any:
        engine.load_checkpoint(tmp_path)
        assert engine.micro_steps == 5
        for number in range(5, 12):
            micro_batch(engine, comm, number)
        return engine.get_global_grad_norm(), state_of(engine)

    expected = on(shape, whole)[0]
    on(shape, begin)
    norm, states = on(shape, go_on)[0]
    assert norm == expected[0]
    assert_same(states, expected[1])
    # Elsewhere the sums are the same, in another order of additions.
    for other in {3 - stage, 3, 0} - {stage}:
        _, states = on(Shape(2, other, 3, more), go_on)[0]
        for name, value in expected[1].items():
            torch.testing.assert_close(states[name], value, rtol=2e-2, atol=2e-3 if more else 1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_between_the_last_backward_and_the_step(tmp_path: Path, stage: int) -> None:
    def begin(engine: Any, comm: Comm) -> Any:
        train(engine, comm, 2)
        engine.backward(engine(*token_batch(9, 0, comm.rank)))
        engine.save_checkpoint(tmp_path)
        engine.step()
        return engine.get_global_grad_norm(), state_of(engine)

    def go_on(engine: Any, comm: Comm) -> Any:
        engine.load_checkpoint(tmp_path)
        engine.step()
        return engine.get_global_grad_norm(), state_of(engine)

    expected = on(Shape(2, stage), begin)[0]
    for other in range(4):
        norm, states = on(Shape(2, other), go_on)[0]
        assert norm == pytest.approx(expected[0], rel=1e-12)
        assert_same(states, expected[1])


def test_a_window_on_other_ranks_keeps_its_mean(tmp_path: Path) -> None:
    """Two of four micro-batches on two ranks, the rest on one rank: the mean of what both have seen."""

    def begin(engine: Any, comm: Comm) -> None:
        for _ in range(2):
            engine.backward(engine(*token_batch(0, 0, 0)))
            engine.step()
        engine.save_checkpoint(tmp_path)

    def go_on(engine: Any, comm: Comm) -> Any:
        if tmp_path.joinpath("latest").exists():
            engine.load_checkpoint(tmp_path)
        else:
            for _ in range(2):
                engine.backward(engine(*token_batch(0, 0, 0)))
                engine.step()
        for _ in range(2):
            engine.backward(engine(*token_batch(0, 0, 0)))
            engine.step()
        return state_of(engine)

    expected = on(Shape(1, 0, 4), go_on)[0]
    on(Shape(2, 2, 4), begin)
    for shape in (Shape(1, 0, 4), Shape(1, 2, 4), Shape(3, 3, 4), Shape(3, 1, 4)):
        for name, value in on(shape, go_on)[0].items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_a_window_that_cannot_go_on_is_dropped_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def begin(engine: Any, comm: Comm) -> None:
        micro_batch(engine, comm, 0)
        engine.save_checkpoint(tmp_path)

    def go_on(engine: Any, comm: Comm) -> None:
        engine.load_checkpoint(tmp_path)
        assert not engine.has_gradients()

    on(Shape(1, 2, 3), begin)
    on(Shape(1, 2, 2), go_on)
    assert "after 1 of the 3 micro-batches of a window" in caplog.text


def test_schedules_and_counts_go_on(tmp_path: Path) -> None:
    made = {
        "steps": lambda o: MultiStepLR(o, [3, 5, 5], gamma=0.5),
        "cycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=30),
    }
    for name, make in made.items():

        def build(make: Any = make) -> Any:
            model = make_model()
            engine, *_ = wherry.initialize(
                model=model, optimizer=torch.optim.AdamW(model.parameters()), lr_scheduler=make, config=settings(0)
            )
            return engine

        from wherry.parallel.comm import SoloComm

        one = build()
        rates = []
        for step in range(8):
            if step == 4:
                one.save_checkpoint(tmp_path / name)
            train(one, SoloComm(), 1, first=step)
            rates.append(one.get_lr())
        other = build()
        other.load_checkpoint(tmp_path / name)
        again = []
        for step in range(4, 8):
            train(other, SoloComm(), 1, first=step)
            again.append(other.get_lr())
        assert again == rates[4:] and len({str(rate) for rate in rates}) > 1
        assert other.global_steps == 8 and other.micro_steps == 8


def test_random_numbers_go_on(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(())), random.gauss(0, 1)]

    def body(engine: Any, comm: Comm) -> None:
        random.gauss(0, 1)
        engine.save_checkpoint(tmp_path)
        expected = draw()
        draw()
        engine.load_checkpoint(tmp_path)
        assert draw() == expected

    on(Shape(), body)


def test_a_client_state_comes_back(tmp_path: Path) -> None:
    state = {
        "step": 3, "loss": float("inf"), "nested": {"a": (1, [2.5, None]), 3: {"b"}}, "raw": b"\0\xff", "big": 1 << 70,
        "weights": torch.arange(6, dtype=torch.bfloat16).view(2, 3), "array": np.arange(4, dtype=np.uint16),
        "none": torch.empty(0, 3), "dtype": torch.float16, "counts": Counter("aab"), "$": "dollar",
    }  # fmt: skip

    def body(engine: Any, comm: Comm) -> None:
        engine.save_checkpoint(tmp_path, client_state=state)
        _, found = engine.load_checkpoint(tmp_path)
        for key in ("weights", "none"):
            value = found.pop(key)
            assert torch.equal(value, state[key]) and value.dtype == state[key].dtype
        array = found.pop("array")
        assert array.dtype == np.uint16 and array.tolist() == [0, 1, 2, 3]
        assert found == {key: value for key, value in state.items() if key not in ("weights", "none", "array")}
        assert type(found["counts"]) is Counter

    on(Shape(2, 3), body)


def test_what_cannot_be_stored_is_told_before_anything_is_written(tmp_path: Path) -> None:
    def body(engine: Any, comm: Comm) -> None:
        engine.save_checkpoint(tmp_path, client_state={"args": {"model": nn.Linear(1, 1)}})

    with pytest.raises(CheckpointError, match=r"client_state\['args'\]\['model'\]: a torch.nn.*Linear cannot be saved"):
        on(Shape(2, 3), body)
    assert not list(tmp_path.iterdir())


class Odd(nn.Module):
    """Buffers of each rank's own, frozen weights, an integer weight, a hidden buffer, a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.randn(3, 4), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(5), requires_grad=False)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("empty", torch.zeros(0, 2))
        self.register_buffer("flag", torch.tensor(True))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (self.norm(x) @ self.frozen.t()).square().sum()

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "seen": torch.tensor([self.calls])}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"] + int(state["seen"][0]) * 0


def odd_steps(engine: Any, comm: Comm) -> None:
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(3):
        engine.backward(engine(torch.randn(6, 4, generator=generator)))
        engine.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_everything_of_an_odd_model(tmp_path: Path, stage: int) -> None:
    model = make_model(Odd)

    def begin(engine: Any, comm: Comm) -> Any:
        odd_steps(engine, comm)
        engine.save_checkpoint(tmp_path)
        engine.save_checkpoint(tmp_path, tag="small", save_latest=False, exclude_frozen_parameters=True)
        return state_of(engine)

    def go_on(engine: Any, comm: Comm) -> Any:
        engine.module.codes.data.zero_()
        engine.load_checkpoint(tmp_path)
        assert engine.module.calls == 3 and engine.module.codes.tolist() == [0, 1, 2, 3, 4]
        states = state_of(engine)
        engine.load_checkpoint(tmp_path, tag="small")
        assert_same(states, state_of(engine))
        return states

    expected = on(Shape(2, stage), begin, model=model)
    # Statistics that differ between the ranks go back to their ranks.
    assert not torch.equal(expected[0]["norm.running_mean:buffer"], expected[1]["norm.running_mean:buffer"])
    for one, other in zip(expected, on(Shape(2, 3 - stage), go_on, model=model), strict=True):
        assert_same(one, other)
    alone = on(Shape(1, 0), go_on, model=model)[0]
    assert_same(alone, expected[0])
