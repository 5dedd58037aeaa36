"""Weights that are tied in the run that saves, or in the run that loads, or in both by other names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import Shape, assert_same, load_into, on, save_from, state_of, two_blocks
from tests.engine.harness import VOCABULARY, WIDTH, TinyLM, make_model
from torch import nn

from wherry.checkpoint.errors import CheckpointError
from wherry.parallel.comm import Comm


class Untied(TinyLM):
    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)


class HeadFirst(TinyLM):
    """The tied weight is named by the head, whose module comes first."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        modules = dict(self.named_children())
        for name in modules:
            delattr(self, name)
        for name in ("head", "blocks", "norm", "embed"):
            self.add_module(name, modules[name])


TIED, UNTIED, HEAD_FIRST = (make_model(cls) for cls in (two_blocks, Untied, HeadFirst))


def save(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    return save_from(Shape(2, 2), folder, steps=1, model=model)


def load(model: nn.Module, folder: Path, **arguments: Any) -> dict[str, torch.Tensor]:
    return load_into(Shape(3, 3), folder, model=model, **arguments)


def test_a_tied_weight_loads_into_each_of_two(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    states = save(TIED, tmp_path)
    found = load(UNTIED, tmp_path)
    for name, value in found.items():
        assert torch.equal(value, states[name.replace("head.weight", "embed.weight")]), name
    warning = "embed.weight and head.weight were one tensor there and are not tied here: each begins with its values"
    assert len([text for text in caplog.messages if warning in text]) == 1


def test_the_same_tie_by_another_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    states = save(TIED, tmp_path)
    found = load(HEAD_FIRST, tmp_path)
    assert_same({name.replace("head.", "embed."): value for name, value in found.items()}, states)
    assert "tied" not in caplog.text


def test_two_weights_do_not_load_into_a_tied_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    states = save(UNTIED, tmp_path)

    def refused(engine: Any, comm: Comm) -> None:
        before = state_of(engine)
        error = (
            r"it has head\.weight \(which is embed\.weight here\), which the model has not; load_module_strict=False"
        )
        with pytest.raises(CheckpointError, match=error):
            engine.load_checkpoint(tmp_path)
        assert_same(before, state_of(engine))

    on(Shape(2, 3), refused, model=TIED)
    found = load(TIED, tmp_path, load_module_strict=False)
    for name, value in found.items():
        assert torch.equal(value, states[name]), name
    assert "it has head.weight (which is embed.weight here), which the model has not" in caplog.text
