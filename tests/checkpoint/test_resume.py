"""Resuming is exact: some steps, a save, a new engine, and more steps are all those steps, bit for bit."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoint.harness import Shape, assert_same, forged, on, state_of, train
from tests.engine.harness import make_model, settings, token_batch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR

import wherry
from wherry.checkpoint.errors import CheckpointError
from wherry.parallel.comm import Comm
from wherry.update.optimizer import Lion

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 3}}
BF16 = {"bf16": {"enabled": True}}
CLIPPED = {"gradient_clipping": 0.5}
STEPS = 4  # on each side of the save


def straight(shape: Shape, **more: Any) -> Any:
    def body(engine: Any, comm: Comm) -> Any:
        return train(engine, comm, 2 * STEPS), state_of(engine)

    return on(shape, body, **more)[0]


def resumed(folder: Path, first: Shape, second: Shape, **more: Any) -> Any:
    def begin(engine: Any, comm: Comm) -> list[float]:
        losses = train(engine, comm, STEPS)
        engine.save_checkpoint(folder)
        return losses

    def go_on(engine: Any, comm: Comm) -> Any:
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
        return train(engine, comm, STEPS, first=STEPS), state_of(engine)

    losses = on(first, begin, **more)[0]
    rest, states = on(second, go_on, **more)[0]
    return losses + rest, states


def assert_exact(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert_same(one[1], other[1])


@pytest.mark.parametrize(
    ("before", "after", "more"),
    [(0, 3, FP16), (3, 1, BF16), (1, 2, CLIPPED), (2, 0, {})],
    ids=["fp16", "bf16", "clipped", "fp32"],
)
def test_a_resumed_run_has_the_bits_of_a_straight_one(
    tmp_path: Path, before: int, after: int, more: dict[str, Any]
) -> None:
    first, second = (Shape(2, stage, more=more) for stage in (before, after))
    assert_exact(straight(first), resumed(tmp_path, first, second))


# Those whose states are of other kinds than those of the optimizers in tests/life.py.
OPTIMIZERS = {
    "dampened SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Lion": lambda p: Lion(p, lr=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=3),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_kind_of_state(tmp_path: Path, name: str) -> None:
    make = OPTIMIZERS[name]
    assert_exact(straight(Shape(2, 2), optimizer=make), resumed(tmp_path, Shape(2, 2), Shape(2, 3), optimizer=make))


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

    def elsewhere(engine: Any, comm: Comm) -> Any:
        engine.load_checkpoint(tmp_path)
        return state_of(engine)

    expected = on(shape, whole)[0]
    states, undisturbed = on(shape, begin)[0]
    assert len([text for text in caplog.messages if NOT_IN_IT.format(2, 3) in text]) == 1
    for found in (undisturbed, on(shape, go_on)[0]):
        assert found[0] == expected[0]
        assert_same(found[1], expected[1])
    assert_same(on(Shape(3, 3 - stage, 2), elsewhere)[0], states)


def test_between_the_last_backward_and_the_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is of the step before; where the backward has updated weights, it is of no step, and refused."""

    def body(engine: Any, comm: Comm) -> None:
        train(engine, comm, 2)
        states = state_of(engine)
        engine.backward(engine(*token_batch(9, 0, comm.rank)))
        if engine.config["wherry"]["update_policy"] == "in_backward":
            with pytest.raises(CheckpointError, match=r"updated weights already.*call step\(\) first"):
                engine.save_checkpoint(tmp_path)
            engine.step()
            engine.save_checkpoint(tmp_path)
            states = state_of(engine)
        else:
            engine.save_checkpoint(tmp_path)
            engine.step()
        engine.load_checkpoint(tmp_path)
        assert_same(state_of(engine), states)

    for policy in ("at_step", "before_use", "in_backward"):
        caplog.clear()
        on(Shape(2, 2, more={"wherry": {"update_policy": policy}}), body)
        assert (NOT_IN_IT.format(1, 1) in caplog.text) is (policy != "in_backward")


def test_sums_of_an_older_checkpoint_are_left_out_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Versions before saved the sums of an open window, and weights that a delayed update had yet to change."""

    def begin(engine: Any, comm: Comm) -> Any:
        micro_batches(engine, comm, 0, 3)
        engine.save_checkpoint(tmp_path, tag="old")
        return state_of(engine)

    def as_before(manifest: dict[str, Any]) -> None:
        engine = manifest["engine"]
        engine["window"] = {"backwards": 2, "steps": 2, "accumulation": 3, "boundary": False}
        engine["micro_steps"] += 2
        for rank in manifest["ranks"]:
            rank["absent"] = ["embed.weight"]
        for entry in manifest["entries"].values():
            (weight,) = entry["states"]["weight"]
            entry["states"]["gradient"] = [{**weight, "addend": rank} for rank in range(2)]
            entry["states"]["behind"] = [weight]

    def go_on(engine: Any, comm: Comm) -> Any:
        engine.load_checkpoint(tmp_path)
        found = state_of(engine)
        assert engine.micro_steps == 3
        micro_batches(engine, comm, 3, 6)
        assert engine.global_steps == 2
        return found

    states = on(Shape(1, 2, 3), begin)[0]
    forged(tmp_path / "old" / "manifest.json", as_before)
    for shape in (Shape(1, 0, 3), Shape(2, 3, 3)):
        caplog.clear()
        assert_same(on(shape, go_on)[0], states)
        told = "was saved after 2 of the 3 micro-batches of an accumulation window: it is loaded as of the last update"
        assert len([text for text in caplog.messages if told in text]) == 1


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
