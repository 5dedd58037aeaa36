"""Weights that are tied in the run that saves, or in the one that loads, or in both by other names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import Shape, assert_same, on, state_of, train
from tests.engine.harness import VOCABULARY, WIDTH, TinyLM, make_model
from torch import nn

from wherry.checkpoint.errors import CheckpointError
from wherry.parallel.comm import Comm


class Untied(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)


class HeadFirst(TinyLM):
    """The tied weight is known by its other name: that of the module that comes first."""

    def __init__(self) -> None:
        super().__init__()
        modules = dict(self.named_children())
        for name in modules:
            delattr(self, name)
        for name in ("head", "blocks", "norm", "embed"):
            self.add_module(name, modules[name])


TIED, UNTIED, HEAD_FIRST = (make_model(cls) for cls in (TinyLM, Untied, HeadFirst))


def save(model: nn.Module, folder: Path, *, steps: int = 2) -> dict[str, torch.Tensor]:
    def body(engine: Any, comm: Comm) -> dict[str, torch.Tensor]:
        train(engine, comm, steps, accumulation=2)
        engine.save_checkpoint(folder)
        return state_of(engine)

    return on(Shape(2, 2, 2), body, model=model)[0]


def load(model: nn.Module, folder: Path, ranks: int = 3, **arguments: Any) -> dict[str, torch.Tensor]:
    def body(engine: Any, comm: Comm) -> dict[str, torch.Tensor]:
        engine.load_checkpoint(folder, **arguments)
        found = state_of(engine)
        train(engine, comm, 1, accumulation=2)
        return found

    return on(Shape(ranks, 3, 2), body, model=model)[0]


def test_what_was_tied_loads_into_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    states = save(TIED, tmp_path)
    found = load(UNTIED, tmp_path)
    for name, value in found.items():
        assert torch.equal(value, states[name.replace("head.weight", "embed.weight")]), name
    told = "embed.weight and head.weight were one tensor there and are not tied here: each begins with its values"
    assert len([text for text in caplog.messages if told in text]) == 1


def test_the_same_tie_by_another_name_is_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    states = save(TIED, tmp_path)
    found = load(HEAD_FIRST, tmp_path)
    assert_same({name.replace("head.", "embed."): value for name, value in found.items()}, states)
    assert "tied" not in caplog.text


def test_two_are_not_taken_for_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    states = save(UNTIED, tmp_path)

    def refused(engine: Any, comm: Comm) -> None:
        before = state_of(engine)
        told = r"it has head\.weight \(which is embed\.weight here\), which the model has not; load_module_strict=False"
        with pytest.raises(CheckpointError, match=told):
            engine.load_checkpoint(tmp_path)
        assert_same(before, state_of(engine))

    on(Shape(2, 3), refused, model=TIED)
    found = load(TIED, tmp_path, load_module_strict=False)
    for name, value in found.items():
        assert torch.equal(value, states[name]), name
    assert "it has head.weight (which is embed.weight here), which the model has not" in caplog.text
