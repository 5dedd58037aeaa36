"""torch.compile compiles each block alone, and never the model as a whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.engine.harness import engine_of, make_model, settings, token_batch, train, train_plain

import wherry
from wherry.errors import WherryError


class Graphs:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 3])
def test_the_engine_compiles_every_block_and_nothing_else(stage: int) -> None:
    torch._dynamo.reset()
    model = make_model()
    mine: Any = copy.deepcopy(model)
    engine = engine_of(mine, settings(stage))
    assert not engine.is_compiled
    graphs = Graphs()
    engine.compile(backend=graphs, compile_kwargs={"dynamic": False})
    assert engine.is_compiled
    assert [m._compiled_call_impl is not None for m in mine.blocks] == [True] * 3
    assert mine._compiled_call_impl is None and mine.norm._compiled_call_impl is None
    assert train(engine, 3) == pytest.approx(train_plain(model, steps=3).losses, rel=1e-5)
    assert 1 <= graphs.count <= 3, "one graph for the blocks' common code, or one for each"
    engine.close()


@pytest.mark.long
def test_a_model_or_an_engine_compiled_as_a_whole_is_refused() -> None:
    torch._dynamo.reset()
    model = make_model()
    with pytest.raises(WherryError, match=r"torch.compile\(TinyLM\), and one graph .* engine.compile\(\)"):
        engine_of(torch.compile(model), settings(3))
    engine = engine_of(model, settings(3))
    with pytest.raises(WherryError, match=r"torch.compile\(engine\), and one graph .* call engine.compile\(\)"):
        torch.compile(engine, backend="eager")(*token_batch(0, 0, 0))
    model.compile(backend="eager")
    with pytest.raises(WherryError, match=r"compiled as a whole by TinyLM.compile\(\).* call engine.compile\(\)"):
        engine(*token_batch(0, 0, 0))


def test_a_model_without_blocks_is_refused() -> None:
    model = torch.nn.Linear(4, 4)
    engine, *_ = wherry.initialize(model=model, config=settings(2))
    with pytest.raises(WherryError, match=r"no blocks to compile .*unit_classes"):
        engine.compile()
