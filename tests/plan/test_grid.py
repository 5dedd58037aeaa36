"""Models that several ranks share: what the planner says of one rank's part, and what an engine holds of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.plan.measured import config
from torch.testing._internal.distributed.fake_pg import FakeStore

import wherry
from wherry import config as configs
from wherry.cli.plan_answer import page
from wherry.errors import WherryError
from wherry.parallel import topology
from wherry.plan.dry_run import count
from wherry.plan.forecaster import Forecaster
from wherry.plan.grid import Grid
from wherry.plan.machines import known
from wherry.sources import find, of_shape
from wherry.train import parallel
from wherry.train.model import GPT, GPTConfig
from wherry.train.presets import Shape

SHAPE = Shape(layers=4, hidden=64, heads=4, sequence=32, vocabulary=256)
WORLD = 8


@pytest.mark.long
def test_a_rank_of_an_engine_holds_what_is_said() -> None:
    """Build the last of eight ranks, the others of which do not exist."""
    dist.init_process_group("fake", rank=WORLD - 1, world_size=WORLD, store=FakeStore())
    try:
        place, mesh = parallel.lay_out(topology.find(), Grid(2, 2))
        whole = GPT(GPTConfig.of(SHAPE, tied=False))
        parallel.cut_blocks(whole, mesh)
        model = parallel.Stage(whole, place.pipe.rank, place.pipe.size)
        engine, *_ = wherry.initialize(model=model, config=config(1), mesh=place, optimizer=torch.optim.AdamW)
        held = {row.state: row.bytes_actual for row in engine.memory()}
        engine.close()
    finally:
        dist.destroy_process_group()
    grid = Grid(2, 2, place.pipe.rank)
    source = of_shape("small", SHAPE).share(grid, torch.bfloat16)
    found = count(source, configs.load(config(1)), ranks=place.data.size, rank=place.data.rank, tensor=2)
    for state in ("parameters", "gradients", "optimizer"):
        told = sum(nbytes for (name, _), nbytes in found.states.items() if name == state)
        # Parts that are cut and parts that are not are padded apart in an engine.
        assert told == pytest.approx(held[state], rel=0.03), state


@pytest.mark.long
def test_shares_of_states_activations_and_time() -> None:
    source = of_shape("wide", Shape(layers=4, hidden=1024, heads=16, sequence=256, vocabulary=512))
    machine = replace(known("h100"), overhead=0.0)  # a little model would be all launches

    def answer(tensor: int, pipe: int, accumulation: int = 1) -> Any:
        forecaster = Forecaster(source, machine, 8, grid=Grid(tensor, pipe))
        return forecaster.exact(configs.load(config(0, accumulation)))

    def row(found: Any, category: str) -> int:
        return sum(each.bytes for each in found.rows if each.category == category)

    alone, cut, staged = answer(1, 1), answer(4, 1), answer(1, 4, accumulation=4)
    assert alone.parameters == cut.parameters == staged.parameters
    # A quarter of the blocks; the embeddings, 2 % of the weights, are whole: 7 % more than a quarter of all.
    assert row(cut, "optimizer") == pytest.approx(row(alone, "optimizer") / 4, rel=0.1)
    assert row(staged, "optimizer") == pytest.approx(row(alone, "optimizer") / 4, rel=0.1)
    # One of four layers, kept for four micro-batches: what one keeps of all four.
    assert 0.7 < row(staged, "activations") / row(alone, "activations") < 1.3
    assert row(cut, "activations") < 0.6 * row(alone, "activations")
    assert cut.samples == alone.samples / 4
    assert cut.time.terms["compute"] < 0.6 * alone.time.terms["compute"]
    assert cut.time.terms["collectives"] > 0
    assert staged.time.terms["bubble"] == pytest.approx(3 / 4 * staged.time.terms["compute"])
    short = wherry.estimate(10**9, config(0, 2), machine, ranks=8, pipeline_parallel=4)
    assert any("is full with 4 micro-batches" in note for note in short.notes)
    shared = wherry.estimate(10**9, {}, machine, ranks=8, tensor_parallel=2, pipeline_parallel=2)
    assert "2 tensor-parallel x 2 stages x 2 data-parallel ranks; bytes of stage 0" in page(shared, [])


def test_a_hugging_face_model_is_cut_as_transformers_says(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers comes with `pip install '.[transformers]'`")
    values = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    source = find(str(tmp_path))
    blocks = 2 * (64 * (64 + 64 + 32 + 32) + 3 * 64 * 128)
    whole = sum(p.numel() for p in source.make(1, 16)[0].parameters())
    model, batch = source.share(Grid(tensor=2), None).make(1, 16)
    assert sum(p.numel() for p in model.parameters()) == whole - blocks // 2
    assert batch is not None
    model(*batch.args, **batch.kwargs)
    with pytest.raises(WherryError, match="only the presets are known by their stages"):
        source.share(Grid(pipe=2), None)
