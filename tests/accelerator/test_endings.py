"""An exception, or a device without memory, in any phase: the error is raised, and no state or memory is lost."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.accelerator import emulated
from tests.accelerator.machine import MACHINE
from tests.covering import Case, name_of
from tests.engine.harness import assert_same
from tests.life import BASE, Leg, at, one_step, sized, subject

from wherry.errors import WherryError
from wherry.observe.memory import out_of_memory

PLACES: list[Case] = [
    at("device-3") | {"window": "three", "activations": "recompute"},
    at("offload-3-parameters") | {"activations": "host", "clip": 0.5},
    at("infinity") | {"activations": "disk"},
    at("infinity") | {"window": "layer-major"},
    at("disk-2") | {"policy": "delayed", "window": "three", "sums": "host"},
    at("offload-2") | {"policy": "in_backward"},
]
# Allocations of a phase that fail, each in a try of its own, spread over all of them.
TRIES = 6
ALONE = (0, 1)


class Saved(Leg):
    """An engine that has made a step and been saved."""

    def __init__(self, case: Case, folder: Path) -> None:
        case = BASE | case
        with sized(case):
            super().__init__(case, folder, None, ALONE, subject(case))
        self.folder = folder
        self.step(2)
        self.save("saved")

    def step(self, number: int = 3) -> None:
        one_step(self.engine, number, ALONE)
        self.engine.settle()

    def save(self, name: str = "again") -> None:
        self.engine.save_checkpoint(str(self.folder / name))
        self.engine.wait_for_checkpoint()

    def load(self) -> None:
        self.engine.load_checkpoint(str(self.folder / "saved"))

    def at_rest(self) -> dict[tuple[str, str], int]:
        return {(row.state, row.tier): row.bytes_actual for row in self.engine.memory()}


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def each_failure(count: int, prepare: Callable[[], None], act: Callable[[], None]) -> Iterator[str]:
    """Act with one of `count` allocations failing at a time; yield the place of each after its error."""
    failures = 0
    for number in range(1, count + 1, max(1, count // TRIES)):
        prepare()
        emulated.fail_after(number)
        try:
            act()
        except Exception as error:
            failures += 1
            assert any(map(out_of_memory, chain_of(error))), repr(error)
        finally:
            emulated.fail_after(None)
        yield f"allocation {number} of {count}"
    assert failures or not count, "no allocation has failed"


# Every place steps; each of the other phases meets two places.
PHASES = [
    (case, phase)
    for number, case in enumerate(PLACES)
    for phase in (Saved.step, (Saved.load, Saved.generate, Saved.save)[number % 3])
]


@pytest.mark.parametrize(("case", "act"), PHASES, ids=lambda value: getattr(value, "__name__", None) or name_of(value))
def test_no_memory_on_the_device(case: Case, act: Callable[[Saved], None], tmp_path: Path) -> None:
    """Repeat the call after its error: it has the result of a call without one, after a load if weights are spoilt."""
    before = MACHINE.held()
    leg = Saved(case, tmp_path)
    begun = emulated.allocations()
    act(leg)
    count = emulated.allocations() - begun
    expected, rest = leg.states(), leg.at_rest()
    for place in each_failure(count, leg.load, partial(act, leg)):
        try:
            leg.engine.zero_grad()
            if act is not Saved.step or leg.engine.global_steps == 1:
                act(leg)
            states = leg.states()
        except WherryError as error:
            assert "fail" in str(error) or "already" in str(error), error
            leg.load()
            act(leg)
            states = leg.states()
        assert_same(states, expected)
        assert leg.at_rest() == rest, place
    leg.engine.close()
    del leg
    assert MACHINE.held() <= before


@pytest.mark.parametrize("case", PLACES, ids=name_of)
def test_no_memory_while_it_is_built(case: Case, tmp_path: Path) -> None:
    before = MACHINE.held()
    case = BASE | case
    model, begun = subject(case), emulated.allocations()

    def build() -> None:
        Leg(case, tmp_path, None, ALONE, model).engine.close()

    build()
    for place in each_failure(emulated.allocations() - begun, lambda: None, build):
        gc.collect()
        assert MACHINE.held() <= before, place


class Broken(RuntimeError):
    """An error of a user's code."""


@pytest.mark.parametrize("number", range(len(PLACES) - 1), ids=lambda number: name_of(PLACES[number]))
def test_an_exception_in_a_block(number: int, tmp_path: Path) -> None:
    """In a forward or a backward, by the user's code or by Ctrl-C."""
    before = MACHINE.held()
    leg = Saved(PLACES[number], tmp_path)
    leg.step()
    expected, rest = leg.states(), leg.at_rest()
    kind = KeyboardInterrupt if number % 2 else Broken

    def fail(*_: Any) -> None:
        raise kind("on purpose")

    for index, block in enumerate(leg.model.blocks):
        leg.load()
        forward = (index + number // 2) % 2
        handle = block.register_forward_hook(fail) if forward else block.register_full_backward_hook(fail)
        with pytest.raises((kind, WherryError)):
            leg.step()
        handle.remove()
        leg.engine.zero_grad()
        leg.step()
        assert_same(leg.states(), expected)
        assert leg.at_rest() == rest, index
    leg.engine.close()
    del leg, block, handle
    gc.collect()
    assert MACHINE.held() <= before
