"""An exception, or a device that has no memory left, in any phase: it is said, nothing is lost, and nothing stays."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator import emulated
from tests.accelerator.test_engine import BASE, Case, batch, config_of, held, one_step
from tests.engine.harness import adamw, make_model

import wherry
from wherry.errors import WherryError
from wherry.observe.memory import out_of_memory

# Row, activations, window, policy.
PLACES: list[Case] = [
    {"row": "device-0"},
    {"row": "device-3", "window": "three", "activations": "recompute"},
    {"row": "offload-2", "policy": "in_backward"},
    {"row": "offload-3-parameters", "activations": "host", "clip": 0.5},
    {"row": "parameters-only"},
    {"row": "infinity", "activations": "disk"},
    {"row": "infinity", "window": "layer-major"},
    {"row": "disk-2", "policy": "delayed", "window": "three", "sums": "host"},
]
# How many of a phase's allocations fail, each in a try of its own, spread over all of them.
TRIES = 12


class Subject:
    """An engine that has made a step and been saved, and what it is at that moment."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = BASE | case, folder
        self.model = make_model()
        self.engine, *_ = wherry.initialize(
            model=self.model, optimizer=adamw(self.model.parameters()), config=config_of(self.case, folder)
        )
        one_step(self.engine, 0, 0)
        self.engine.settle()
        self.engine.save_checkpoint(str(folder / "saved"))
        self.engine.wait_for_checkpoint()

    def step(self) -> None:
        one_step(self.engine, 1, 0)
        self.engine.settle()

    def generate(self) -> None:
        with torch.no_grad(), self.engine.gathered_for_generation():
            self.model(*batch(9, 0, 0))

    def evaluate(self) -> None:
        with torch.no_grad():
            self.engine(*batch(9, 0, 0))

    def save(self) -> None:
        self.engine.save_checkpoint(str(self.folder / "again"))
        self.engine.wait_for_checkpoint()

    def load(self) -> None:
        self.engine.load_checkpoint(str(self.folder / "saved"))

    def weights(self) -> dict[str, torch.Tensor]:
        with wherry.gathered(self.model):
            return {name: p.detach().cpu().clone() for name, p in self.model.named_parameters()}

    def at_rest(self) -> dict[tuple[str, str], int]:
        return {(row.state, row.tier): row.bytes_actual for row in self.engine.memory()}


PHASES: dict[str, Callable[[Subject], None]] = {
    "step": Subject.step,
    "generation": Subject.generate,
    "evaluation": Subject.evaluate,
    "save": Subject.save,
    "load": Subject.load,
}


def name_of(case: Case) -> str:
    return "-".join(map(str, case.values()))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("case", PLACES, ids=name_of)
def test_no_memory_on_the_device(case: Case, phase: str, tmp_path: Path) -> None:
    """After the error the same call does the same as if there had been none; where weights are spoilt, after a load."""
    before = held()
    subject, act = Subject(case, tmp_path), PHASES[phase]
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
    assert held() <= before


def chain_of(error: BaseException) -> list[BaseException]:
    found = []
    while (error := error.__cause__ or error.__context__) is not None:  # type: ignore[assignment]
        found.append(error)
    return found


class Broken(RuntimeError):
    """What a user's code raises."""


def breaks(place: int, backward: bool, kind: type[BaseException]) -> Callable[[Any], Any]:
    """Lets the block at that place raise, in its forward or in its backward."""

    def attach(model: Any) -> Any:
        def fail(*_: Any) -> None:
            raise kind("on purpose")

        block = model.blocks[place]
        return block.register_full_backward_hook(fail) if backward else block.register_forward_hook(fail)

    return attach


@pytest.mark.parametrize("kind", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", [place for place in PLACES if place.get("policy") != "in_backward"], ids=name_of)
def test_an_exception_in_a_block(case: Case, backward: bool, kind: type[BaseException], tmp_path: Path) -> None:
    before = held()
    subject = Subject(case, tmp_path)
    subject.step()
    wanted, rest = subject.weights(), subject.at_rest()
    for place in range(3):
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
    assert held() <= before


@pytest.mark.parametrize("case", PLACES, ids=name_of)
def test_no_memory_while_it_is_built(case: Case, tmp_path: Path) -> None:
    before = held()
    config, model = config_of(BASE | case, tmp_path), make_model()
    begun = emulated.allocations()

    def build() -> Any:
        mine = copy.deepcopy(model)
        return wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=copy.deepcopy(config))[0]

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
        assert held() <= before, f"allocation {number} of {count}"
    assert met or not count
