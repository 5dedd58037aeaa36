"""Resuming is exact: some steps, a save, a new engine, and more steps are all those steps, bit for bit."""

from __future__ import annotations

import copy
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoint.harness import BF16, Shape, assert_same, load_into, on, state_of, train
from tests.engine.harness import engine_of, make_model, settings, token_batch, train_step
from tests.engine.test_whole_optimizers import OPTIMIZERS as WHOLE
from tests.engine.test_whole_optimizers import VOUCHED, muon
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR

import wherry
from wherry.checkpoint.errors import CheckpointError
from wherry.parallel.comm import Comm
from wherry.update.optimizer import Lion

LOW = {**VOUCHED, **BF16, "wherry": {"master": "whole"}}
ON_HOST = {**LOW, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
# Optimizers whose kinds of state tests/life.py does not have, each with a shape to save and one to load.
OPTIMIZERS: dict[str, tuple[Any, Shape, Shape]] = {
    "dampened SGD": (partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1), Shape(2, 2), Shape(2, 3)),
    "plain SGD": (partial(torch.optim.SGD, lr=0.1), Shape(2, 2), Shape(2, 3)),
    "Lion": (partial(Lion, lr=1e-3), Shape(2, 2), Shape(2, 3)),
    "NAdam": (partial(torch.optim.NAdam, lr=1e-3), Shape(2, 2), Shape(2, 3)),
    "ASGD": (partial(torch.optim.ASGD, lr=1e-2, t0=3), Shape(2, 2), Shape(2, 3)),
    "Adafactor": (WHOLE["adafactor"], Shape(2, 3, more=LOW), Shape(2, 3, more=LOW)),
    "Muon": (muon, Shape(2, 2, more=ON_HOST), Shape(2, 2, more=ON_HOST)),
    "LAMB": (WHOLE["lamb"], Shape(2, 0, more=LOW), Shape(2, 0, more=LOW)),
    "sums of rows": (WHOLE["rows"], Shape(2, 2, more=ON_HOST), Shape(2, 2, more=ON_HOST)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_kind_of_state(tmp_path: Path, name: str) -> None:
    """Resume from a checkpoint, saved and loaded during an evaluation, and from `optimizer.state_dict()` alike."""
    make, source, target = OPTIMIZERS[name]

    def begin(engine: Any, comm: Comm) -> Any:
        train(engine, comm, 4)
        engine.eval()
        with torch.inference_mode():
            engine.save_checkpoint(tmp_path)
        engine.train()
        weights, states = copy.deepcopy((engine.module.state_dict(), engine.optimizer.state_dict()))
        expected = train(engine, comm, 3, first=4), state_of(engine)
        train(engine, comm, 1, first=9)
        engine.module.load_state_dict(weights)
        engine.optimizer.load_state_dict(states)
        assert train(engine, comm, 3, first=4) == expected[0]
        assert_same(state_of(engine), expected[1])
        return expected

    def go_on(engine: Any, comm: Comm) -> Any:
        train(engine, comm, 1, first=9)  # what it has of its own is replaced
        with torch.inference_mode():
            engine.load_checkpoint(tmp_path)
        return train(engine, comm, 3, first=4), state_of(engine)

    losses, states = on(source, begin, optimizer=make)[0]
    again, restored = on(target, go_on, optimizer=make)[0]
    assert again == losses
    assert_same(restored, states)


class Scaled(nn.Module):
    """So few elements that all ranks but the first have padding alone; a scalar is a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1.0, 1.0, 58).view(29, 2))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (self.scale * self.table[ids] - self.table[targets]).square().mean()


OF_TORCH: dict[str, Any] = {
    "RMSprop": partial(torch.optim.RMSprop, centered=True),
    "Adam with amsgrad": partial(torch.optim.Adam, amsgrad=True),
    **{name: getattr(torch.optim, name) for name in ("NAdam", "RAdam", "Adamax", "ASGD", "Rprop", "Adadelta")},
}


@pytest.mark.parametrize(("name", "stage"), [(name, 1 + number % 3) for number, name in enumerate(OF_TORCH)])
def test_ranks_that_have_nothing_of_a_group_load(tmp_path: Path, name: str, stage: int) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return OF_TORCH[name]([{"params": [p]} for p in parameters], lr=0.01)

    def begin(engine: Any, comm: Comm) -> Any:
        train(engine, comm, 2)
        engine.save_checkpoint(tmp_path)
        saved, states = state_of(engine), copy.deepcopy(engine.optimizer.state_dict())
        assert [len(state) > 1 for state in states["state"].values()] == [comm.rank == 0] * 2
        weights = copy.deepcopy(engine.module.state_dict())
        losses = train(engine, comm, 2, first=2)
        engine.module.load_state_dict(weights)
        engine.optimizer.load_state_dict(states)
        assert_same(state_of(engine), saved)
        return saved, losses

    def go_on(engine: Any, comm: Comm) -> Any:
        engine.load_checkpoint(tmp_path)
        return state_of(engine), train(engine, comm, 2, first=2)

    saved, losses = on(Shape(2, stage), begin, model=Scaled(), optimizer=make)[0]
    assert len(saved) > 4, saved.keys()
    for ranks in (2, 1, 3):
        found, again = on(Shape(ranks, stage), go_on, model=Scaled(), optimizer=make)[0]
        assert_same(found, saved)
        assert ranks != 2 or again == losses


def micro_batches(engine: Any, comm: Comm, first: int, last: int) -> None:
    for number in range(first, last):
        engine.backward(engine(*token_batch(0, number, comm.rank)))
        engine.step()


NOT_IN_IT = "{} of the {} micro-batches of this accumulation window have run, and are not in it: it is of the last"


@pytest.mark.parametrize("stage", [0, 3])
def test_within_a_window_it_is_of_the_last_update(tmp_path: Path, caplog: pytest.LogCaptureFixture, stage: int) -> None:
    """Saved after 5 micro-batches of windows of 3: the window begins anew, also on other ranks with another one."""
    shape = Shape(2, stage, 3)

    def whole(engine: Any, comm: Comm) -> Any:
        micro_batches(engine, comm, 0, 9)
        return engine.get_global_grad_norm(), state_of(engine)

    def begin(engine: Any, comm: Comm) -> Any:
        micro_batches(engine, comm, 0, 3)
        states = state_of(engine)
        micro_batches(engine, comm, 3, 5)
        engine.save_checkpoint(tmp_path, tag="middle")
        micro_batches(engine, comm, 5, 9)  # a save changes nothing
        return states, (engine.get_global_grad_norm(), state_of(engine))

    def go_on(engine: Any, comm: Comm) -> Any:
        micro_batches(engine, comm, 30, 31)  # a window of its own, which the load drops
        engine.load_checkpoint(tmp_path)
        assert (engine.global_steps, engine.micro_steps) == (1, 3)
        micro_batches(engine, comm, 3, 9)
        return engine.get_global_grad_norm(), state_of(engine)

    expected = on(shape, whole)[0]
    states, undisturbed = on(shape, begin)[0]
    assert len([text for text in caplog.messages if NOT_IN_IT.format(2, 3) in text]) == 1
    for outcome in (undisturbed, on(shape, go_on)[0]):
        assert outcome[0] == expected[0]
        assert_same(outcome[1], expected[1])
    assert_same(load_into(Shape(3, 3 - stage, 2), tmp_path), states)


@pytest.mark.parametrize("policy", ["before_use", "in_backward"])
def test_between_the_last_backward_and_the_step(tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: str) -> None:
    """Save the step before; refuse where the backward has updated weights, which are of no step."""

    def body(engine: Any, comm: Comm) -> None:
        train(engine, comm, 2)
        states = state_of(engine)
        engine.backward(engine(*token_batch(9, 0, comm.rank)))
        if policy == "in_backward":
            with pytest.raises(CheckpointError, match=r"updated weights already.*call step\(\) first"):
                engine.save_checkpoint(tmp_path)
            return
        engine.save_checkpoint(tmp_path)
        engine.step()
        engine.load_checkpoint(tmp_path)
        assert_same(state_of(engine), states)

    on(Shape(2, 2, more={"wherry": {"update_policy": policy}}), body)
    assert (NOT_IN_IT.format(1, 1) in caplog.text) is (policy != "in_backward")


@pytest.mark.parametrize(
    "schedule", [lambda o: MultiStepLR(o, [3, 5, 5], gamma=0.5), lambda o: OneCycleLR(o, max_lr=0.1, total_steps=30)]
)
def test_schedules_and_counts_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture, schedule: Any) -> None:
    def rates(engine: Any, first: int) -> list[Any]:
        rates = []
        for step in range(first, first + 4):
            train_step(engine, step, 0)
            rates.append(engine.get_lr())
        return rates

    one, other, without = (engine_of(make_model(), settings(0), lr_scheduler=s) for s in (schedule, schedule, None))
    without.save_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path)
    assert "holds no learning rate schedule: the engine's stays as it is" in caplog.text
    before = rates(one, 0)
    one.save_checkpoint(tmp_path)
    expected = rates(one, 4)
    other.load_checkpoint(tmp_path)
    assert rates(other, 4) == expected and len({str(rate) for rate in before + expected}) > 1
    assert other.global_steps == 8 and other.micro_steps == 8


def test_random_numbers_and_a_client_state_come_back(tmp_path: Path) -> None:
    state = {
        "step": 3, "loss": float("inf"), "nested": {"a": (1, [2.5, None]), 3: {"b"}}, "raw": b"\0\xff", "big": 1 << 70,
        "weights": torch.arange(6, dtype=torch.bfloat16).view(2, 3), "array": np.arange(4, dtype=np.uint16),
        "none": torch.empty(0, 3), "dtype": torch.float16, "counts": Counter("aab"), "$": "dollar",
    }  # fmt: skip

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(())), random.gauss(0, 1)]

    def body(engine: Any, comm: Comm) -> None:
        random.gauss(0, 1)
        engine.save_checkpoint(tmp_path, client_state=state)
        expected = draw()
        draw()
        _, client_state = engine.load_checkpoint(tmp_path)
        assert draw() == expected
        for key in ("weights", "none"):
            value = client_state.pop(key)
            assert torch.equal(value, state[key]) and value.dtype == state[key].dtype
        array = client_state.pop("array")
        assert array.dtype == np.uint16 and array.tolist() == [0, 1, 2, 3]
        assert client_state == {key: value for key, value in state.items() if key not in ("weights", "none", "array")}
        assert type(client_state["counts"]) is Counter

    on(Shape(1, 3), body)


def test_values_that_cannot_be_stored_are_refused_on_all_ranks_before_a_write(tmp_path: Path) -> None:
    refused = [
        ({"args": {"net": nn.Linear(1, 1)}}, r"client_state\['args'\]\['net'\]: a torch.nn.*Linear cannot be saved"),
        ({"x": torch.zeros(2, dtype=torch.complex128)}, r"client_state\['x'\]: .* torch.strided of torch.complex128"),
        ({"x": torch.eye(2).to_sparse()}, r"client_state\['x'\]: .* torch.sparse_coo of torch.float32"),
        ({"x": torch.empty(2, device="meta")}, r"client_state\['x'\]: .* on meta"),
        ([1], "rank 1: client_state is a list, expected a dict"),
    ]

    def body(engine: Any, comm: Comm) -> None:
        for state, error in refused:
            with pytest.raises(CheckpointError, match=error):
                engine.save_checkpoint(tmp_path, client_state=state if comm.rank or type(state) is dict else {})

    on(Shape(2, 3), body)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", [0, 3])
def test_inside_gathered(tmp_path: Path, stage: int) -> None:
    """A save works; a load would be undone by the weights that the context writes back at its end."""

    def body(engine: Any, comm: Comm) -> None:
        train(engine, comm, 1)
        states = state_of(engine)
        with wherry.gathered(engine.module):
            engine.save_checkpoint(tmp_path, tag="inside")
            with pytest.raises(CheckpointError, match=r"inside wherry\.gathered"):
                engine.load_checkpoint(tmp_path)
        train(engine, comm, 1)
        engine.load_checkpoint(tmp_path)
        assert_same(state_of(engine), states)

    on(Shape(2, stage, more=BF16), body)


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


@pytest.mark.parametrize("stage", [0, 3])
def test_everything_of_an_odd_model(tmp_path: Path, stage: int) -> None:
    model = make_model(Odd)

    def begin(engine: Any, comm: Comm) -> Any:
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(3):
            engine.backward(engine(torch.randn(6, 4, generator=generator)))
            engine.step()
        engine.save_checkpoint(tmp_path)
        engine.save_checkpoint(tmp_path, tag="small", save_latest=False, exclude_frozen_parameters=True)
        return state_of(engine)

    def go_on(engine: Any, comm: Comm) -> Any:
        codes = engine.module.codes
        with wherry.gathered([codes], modifier_rank=0):
            codes.data.zero_()
        engine.load_checkpoint(tmp_path)
        with wherry.gathered([codes]):
            assert engine.module.calls == 3 and codes.tolist() == [0, 1, 2, 3, 4]
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
