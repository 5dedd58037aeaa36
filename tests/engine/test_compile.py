"""torch.compile: each block by itself, and never the model as a whole."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.engine.harness import TinyLM, adamw, make_model, settings, token_batch, train_plain

import wherry
from wherry.errors import WherryError


class Graphs:
    """A backend that runs what it is given, and counts the graphs."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_engine_compiles_every_block_and_nothing_else(stage: int) -> None:
    torch._dynamo.reset()
    model = make_model(lambda: TinyLM(blocks=3))
    mine = copy.deepcopy(model)
    engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=settings(stage))
    assert not engine.is_compiled
    graphs = Graphs()
    engine.compile(backend=graphs, compile_kwargs={"dynamic": False})
    assert engine.is_compiled
    assert [m._compiled_call_impl is not None for m in mine.blocks] == [True] * 3
    assert mine._compiled_call_impl is None and mine.norm._compiled_call_impl is None
    losses = []
    for step in range(3):
        loss = engine(*token_batch(step, 0, 0))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert losses == pytest.approx(train_plain(model, steps=3).losses, rel=1e-5)
    assert 1 <= graphs.count <= 3, "one graph for the blocks' common code, or one for each"
    engine.close()


def test_a_model_compiled_as_a_whole_is_refused_with_what_to_call() -> None:
    model = make_model()
    with pytest.raises(WherryError, match=r"torch.compile\(TinyLM\), and one graph .* engine.compile\(\)"):
        wherry.initialize(model=torch.compile(model), optimizer=adamw(model.parameters()), config=settings(3))
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=settings(3))
    model.compile(backend="eager")
    with pytest.raises(WherryError, match=r"compiled as a whole by TinyLM.compile\(\).* call engine.compile\(\)"):
        engine(*token_batch(0, 0, 0))


def test_an_engine_that_is_compiled_is_refused() -> None:
    torch._dynamo.reset()
    model = make_model()
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=settings(2))
    with pytest.raises(WherryError, match=r"torch.compile\(engine\), and one graph .* call engine.compile\(\)"):
        torch.compile(engine, backend="eager")(*token_batch(0, 0, 0))
    engine.close()


def test_a_model_without_blocks_says_how_to_name_them() -> None:
    model = torch.nn.Linear(4, 4)
    engine, *_ = wherry.initialize(model=model, config=settings(2))
    with pytest.raises(WherryError, match=r"no blocks to compile .*unit_classes"):
        engine.compile()
