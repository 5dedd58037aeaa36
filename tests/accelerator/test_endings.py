"""An exception, or a device that has no memory left, in any phase: it is said, nothing is lost, and nothing stays."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator import emulated
from tests.accelerator.machine import MACHINE
from tests.covering import Case, name_of, pairs
from tests.life import BASE, Leg, at, batch, one_step, sized, subject

import wherry
from wherry.errors import WherryError
from wherry.observe.memory import out_of_memory

PLACES: list[Case] = [
    at("device-0"),
    at("device-3") | {"window": "three", "activations": "recompute"},
    at("offload-2") | {"policy": "in_backward"},
    at("offload-3-parameters") | {"activations": "host", "clip": 0.5},
    at("parameters-only"),
    at("infinity") | {"activations": "disk"},
    at("infinity") | {"window": "layer-major"},
    at("disk-2") | {"policy": "delayed", "window": "three", "sums": "host"},
]
# How many of a phase's allocations fail, each in a try of its own, spread over all of them.
TRIES = 8
ALONE = (0, 1)


class Saved:
    """An engine that has made a step and been saved."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = BASE | case, folder
        with sized(self.case):
            leg = Leg(self.case, folder, None, ALONE, subject(self.case))
        self.engine, self.model = leg.engine, leg.model
        self.step(2)
        self.save("saved")

    def step(self, number: int = 3) -> None:
        one_step(self.engine, number, ALONE)
        self.engine.settle()

    def generate(self) -> None:
        with torch.no_grad(), self.engine.gathered_for_generation():
            self.model(*batch(9, 0))

    def evaluate(self) -> None:
        with torch.no_grad():
            self.engine(*batch(9, 0))

    def save(self, name: str = "again") -> None:
        self.engine.save_checkpoint(str(self.folder / name))
        self.engine.wait_for_checkpoint()

    def load(self) -> None:
        self.engine.load_checkpoint(str(self.folder / "saved"))

    def weights(self) -> dict[str, torch.Tensor]:
        with wherry.gathered(self.model):
            return {name: p.detach().cpu().clone() for name, p in self.model.named_parameters()}

    def at_rest(self) -> dict[tuple[str, str], int]:
        return {(row.state, row.tier): row.bytes_actual for row in self.engine.memory()}


PHASES: dict[str, Callable[[Saved], None]] = {
    "step": Saved.step,
    "generation": Saved.generate,
    "evaluation": Saved.evaluate,
    "save": Saved.save,
    "load": Saved.load,
}


# Every place steps and loads; each of the other phases meets every third place.
MET = [
    (case, phase)
    for number, case in enumerate(PLACES)
    for phase in ("step", "load", ("generation", "evaluation", "save")[number % 3])
]


@pytest.mark.parametrize(("case", "phase"), MET, ids=lambda value: value if isinstance(value, str) else name_of(value))
def test_no_memory_on_the_device(case: Case, phase: str, tmp_path: Path) -> None:
    """Repeat the call after its error: it has the result of a call without one, after a load if weights are spoilt."""
    before = MACHINE.held()
    subject, act = Saved(case, tmp_path), PHASES[phase]
    at_first = subject.weights()
    begun = emulated.allocations()
    act(subject)
    count = emulated.allocations() - begun
    wanted, rest = subject.weights(), subject.at_rest()
    met = 0
    for number in range(1, count + 1, max(1, count // TRIES)):
        subject.load()
        assert all(torch.equal(value, at_first[name]) for name, value in subject.weights().items())
        emulated.fail_after(number)
        try:
            act(subject)
        except Exception as error:
            met += 1
            assert out_of_memory(error) or any(map(out_of_memory, chain_of(error))), repr(error)
        finally:
            emulated.fail_after(None)
        try:
            subject.engine.zero_grad()
            if phase != "step" or subject.engine.global_steps == 1:
                act(subject)
            found = subject.weights()
        except WherryError as error:
            assert "fail" in str(error) or "already" in str(error), error
            subject.load()
            act(subject)
            found = subject.weights()
        for name, value in found.items():
            assert torch.equal(value, wanted[name]), (number, name)
        assert subject.at_rest() == rest, f"allocation {number} of {count}"
    assert met or not count, "no allocation of the phase has failed"
    subject.engine.close()
    del subject
    assert MACHINE.held() <= before


def chain_of(error: BaseException) -> list[BaseException]:
    found = []
    while (error := error.__cause__ or error.__context__) is not None:  # type: ignore[assignment]
        found.append(error)
    return found


class Broken(RuntimeError):
    """An error of a user's code."""


def breaks(place: int, backward: bool, kind: type[BaseException]) -> Callable[[Any], Any]:
    """Lets the block at that place raise, in its forward or in its backward."""

    def attach(model: Any) -> Any:
        def fail(*_: Any) -> None:
            raise kind("on purpose")

        block = model.blocks[place]
        return block.register_full_backward_hook(fail) if backward else block.register_forward_hook(fail)

    return attach


BREAKS = pairs(
    place=tuple(number for number, place in enumerate(PLACES) if place.get("policy") != "in_backward"),
    backward=(False, True),
    kind=(Broken, KeyboardInterrupt),
)


@pytest.mark.parametrize("how", BREAKS, ids=lambda how: f"{how['place']}-{how['backward']}-{how['kind'].__name__}")
def test_an_exception_in_a_block(how: Case, tmp_path: Path) -> None:
    case, backward, kind = PLACES[how["place"]], how["backward"], how["kind"]
    before = MACHINE.held()
    subject = Saved(case, tmp_path)
    subject.step()
    wanted, rest = subject.weights(), subject.at_rest()
    for place in range(2):
        subject.load()
        handle = breaks(place, backward, kind)(subject.model)
        with pytest.raises((kind, WherryError)):
            subject.step()
        handle.remove()
        subject.engine.zero_grad()
        subject.step()
        assert all(torch.equal(value, wanted[name]) for name, value in subject.weights().items()), place
        assert subject.at_rest() == rest, place
    subject.engine.close()
    del subject
    gc.collect()
    assert MACHINE.held() <= before


@pytest.mark.parametrize("case", PLACES, ids=name_of)
def test_no_memory_while_it_is_built(case: Case, tmp_path: Path) -> None:
    before = MACHINE.held()
    case = BASE | case
    model, begun = subject(case), emulated.allocations()

    def build() -> Any:
        return Leg(case, tmp_path, None, ALONE, model).engine

    build().close()
    count = emulated.allocations() - begun
    met = 0
    for number in range(1, count + 1, max(1, count // TRIES)):
        emulated.fail_after(number)
        try:
            build().close()
        except Exception as error:
            met += 1
            assert out_of_memory(error) or any(map(out_of_memory, chain_of(error))), repr(error)
        finally:
            emulated.fail_after(None)
        gc.collect()
        assert MACHINE.held() <= before, f"allocation {number} of {count}"
    assert met or not count
