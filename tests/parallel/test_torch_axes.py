"""The engine on the data axis beside torch's own tensor and pipeline parallelism, over processes."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import Run, adamw, settings, train_plain
from tests.tiers.rows import offload
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import wherry
from wherry.activations import build
from wherry.train.model import GPT, GPTConfig
from wherry.train.parallel import Pipeline, Stage, cut_blocks

STEPS, SEQUENCE, CLIP = 4, 8, 0.4
CONFIG = GPTConfig(layers=2, hidden=16, heads=2, sequence=SEQUENCE, vocabulary=32, tied=False)


def model_of() -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT(CONFIG)
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                # Ones and zeros hide mistakes. The gradient of keys' biases is noise, which Adam makes large.
                with torch.no_grad():
                    parameter += torch.randn_like(parameter) / 10
            if name.endswith("qkv.bias"):
                parameter.requires_grad_(False)
        return model


def drop_out(model: GPT, rank: int = 0, ranks: int = 1) -> None:
    """Add dropout to the outputs of attention and MLP.

    A block seeds the generator by the micro-batch, so that masks do not depend on the process that the block is in.
    """

    def drop(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return F.dropout(out, 0.2, training=module.training and torch.is_grad_enabled())

    for layer, block in enumerate(model.blocks):
        micro_batches = itertools.count(rank, ranks)

        def seed(module: nn.Module, args: Any, layer: int = layer, numbers: Iterator[int] = micro_batches) -> None:
            # Before its first micro-batch a pipeline infers shapes by a forward that is no micro-batch.
            infers = any("metadata_inference" in frame.name for frame in traceback.extract_stack(limit=40))
            if torch.is_grad_enabled() and not infers:
                torch.manual_seed(1000 * layer + next(numbers))

        block.register_forward_pre_hook(seed)
        block.attention.register_forward_hook(drop)  # type: ignore[union-attr, operator]
        block.mlp.register_forward_hook(drop)  # type: ignore[union-attr, operator]


def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    ids = torch.randint(0, 32, (2, SEQUENCE + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


@cache
def oracle(data: int, accumulation: int, dropout: bool = False) -> Run:
    """Train by plain PyTorch on the batches of `data` ranks."""
    model = model_of()
    if dropout:
        drop_out(model)
    run = train_plain(model, ranks=data, accumulation=accumulation, steps=STEPS, clip=CLIP, batch=batch)
    with torch.no_grad():
        model.load_state_dict(run.weights)
        run.extra = float(model(*batch(0, 0, 0)))
    return run


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    with wherry.gathered(engine.module):
        return {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for name, p in engine.module.named_parameters()
        }


def engine_of(model: nn.Module, mesh: Any, stage: int, accumulation: int, more: dict[str, Any] | None) -> Any:
    return wherry.initialize(
        model=model,
        optimizer=adamw([p for p in model.parameters() if p.requires_grad]),
        mesh=mesh,
        config=settings(stage, accumulation, CLIP, more),
    )[0]


def train(engine: Any, accumulation: int) -> Run:
    run = Run()
    for step in range(STEPS):
        total = 0.0
        for micro in range(accumulation):
            loss = engine(*batch(step, micro, engine.comm.rank))
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / accumulation
        run.losses.append(sum(engine.comm.gather_objects(total)) / engine.comm.size)
        run.norms.append(engine.get_global_grad_norm())
    run.weights = weights_of(engine)
    return run


def over_tensor(rank: int, stage: int, more: dict[str, Any], dropout: bool = False) -> Run:
    """Train on two data-parallel times two tensor-parallel ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    build.SMALLEST_PARTITIONED = 1  # the checkpoints of this model are small
    model = model_of()
    cut_blocks(model, mesh)
    if dropout:
        drop_out(model, mesh["dp"].get_local_rank(), 2)
    engine = engine_of(model, mesh, stage, 2, more)
    run = train(engine, 2)
    run.extra = engine.topology.tensor.traffic.bytes["all_gather"]
    engine.close()
    return run


def over_three(rank: int, stage: int, tensor: int, more: dict[str, Any], dropout: bool = False) -> Run:
    """Train on two pipeline times two data-parallel times `tensor` tensor-parallel ranks."""
    mesh = init_device_mesh("cpu", (2, 2, tensor), mesh_dim_names=("pp", "dp", "tp"))
    run, micros, whole = Run(), 4, model_of()
    if tensor > 1:
        cut_blocks(whole, mesh)
    if dropout:
        drop_out(whole, mesh["dp"].get_local_rank(), 2)
    names = {p: name for name, p in whole.named_parameters()}
    part = Stage(whole, mesh["pp"].get_local_rank(), 2)
    mine = {name: names[p] for name, p in part.named_parameters()}
    engine = engine_of(part, mesh, stage, micros, more)
    pipeline = Pipeline(engine)
    for step in range(STEPS):
        window = iter([batch(step, micro, engine.comm.rank) for micro in range(micros)])
        total = float(pipeline.train_batch(window))
        run.losses.append(sum(engine.comm.gather_objects(total)) / 2)
        run.norms.append(engine.get_global_grad_norm())
    pipeline.train(False)
    run.extra = float(pipeline(*(torch.cat([t] * (micros // 2)) for t in batch(0, 0, 0))))
    run.weights = {mine[name]: weight for name, weight in weights_of(engine).items()}
    engine.close()
    return run


def assert_near(run: Run, plain: Run, names: Any) -> None:
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert run.norms == pytest.approx(plain.norms, rel=1e-4)
    for name in names:
        torch.testing.assert_close(run.weights[name], plain.weights[name], rtol=0, atol=2e-5)


RECOMPUTE = {"activation_checkpointing": {"policy": "recompute"}}
PARTITION = {"activation_checkpointing": {"partition_activations": True}}


@pytest.mark.parametrize(
    ("stage", "more", "dropout"), [(0, {}, False), (1, {}, True), (2, RECOMPUTE, True), (3, PARTITION, True)]
)
def test_a_parallelized_module_on_every_stage(warm: Any, stage: int, more: dict[str, Any], dropout: bool) -> None:
    plain = oracle(2, 2, dropout)
    # With PARTITION each block's input is gathered for every micro-batch.
    parts = STEPS * 2 * CONFIG.layers * (2 * SEQUENCE * CONFIG.hidden * 4)
    runs = warm(4).run(over_tensor, stage, more, dropout)
    for run in runs:
        assert_near(run, plain, plain.weights)
        assert all(torch.equal(run.weights[name], runs[0].weights[name]) for name in plain.weights)
        assert run.extra == (parts if more == PARTITION else 0)


@pytest.mark.parametrize(("row", "policy"), [("offload-3-parameters", "before_use"), ("disk-2", "at_step")])
def test_a_parallelized_module_on_every_tier(warm: Any, row: str, policy: str, tmp_path: Path) -> None:
    config = offload(row, tmp_path, policy)
    stage = config["zero_optimization"]["stage"]
    resident = warm(4).run(over_tensor, stage, {})[0]
    assert_near(resident, oracle(2, 2), resident.weights)
    for run in warm(4).run(over_tensor, stage, config):
        assert run.losses == resident.losses
        assert all(torch.equal(run.weights[name], weight) for name, weight in resident.weights.items())
    assert not list(tmp_path.iterdir())


def test_dropout_changes_the_oracle() -> None:
    assert oracle(2, 2, True).losses != pytest.approx(oracle(2, 2).losses, rel=1e-3)


@pytest.mark.parametrize(
    ("stage", "tensor", "more", "dropout"),
    [
        (1, 1, {}, True),
        pytest.param(2, 1, {}, False, marks=pytest.mark.smoke),
        (3, 1, RECOMPUTE, True),
        (2, 2, RECOMPUTE, True),
    ],
)
def test_pipeline_stages(warm: Any, stage: int, tensor: int, more: dict[str, Any], dropout: bool) -> None:
    plain = oracle(2, 4, dropout)
    runs = warm(4 * tensor).run(over_three, stage, tensor, more, dropout)
    for run in runs:
        assert_near(run, plain, run.weights)
    assert {name for run in runs for name in run.weights} == set(plain.weights)
    if not dropout:
        assert runs[0].extra == pytest.approx(plain.extra, rel=1e-5)


def in_groups(rank: int, mesh: bool, more: dict[str, Any]) -> tuple[Run, dict[str, dict[str, int]]]:
    """Train with states sharded over two ranks and replicated twice, by the mesh or by the config."""
    axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")) if mesh else None
    engine = engine_of(model_of(), axes, 3, 2, more)
    run = train(engine, 2)
    calls = {group: dict(traffic.calls) for group, traffic in engine.topology.traffic()}
    engine.close()
    return run, calls


def test_groups_of_ranks_by_the_mesh_and_by_the_config(warm: Any) -> None:
    plain = oracle(4, 2)
    for mesh, more in ((True, {}), (False, {"zero_optimization": {"mics_shard_size": 2}})):
        answers = warm(4).run(in_groups, mesh, more)
        for run, calls in answers:
            assert_near(run, plain, plain.weights)
            assert all(torch.equal(run.weights[name], answers[0][0].weights[name]) for name in plain.weights)
            assert set(calls[" within groups of 2"]) == {"all_gather", "reduce_scatter"}
            assert set(calls[" across groups"]) == {"all_reduce"}
            assert "reduce_scatter" not in calls[""]


def along_a_sequence(rank: int, mesh: bool) -> Any:
    """Train with two ranks on each sequence, by the mesh or by the config."""
    from tests.integrations import test_context_parallel as shared

    axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")) if mesh else None
    return shared.train(shared.model_of("llama"), 1 if mesh else 2, {}, {"stage": 3}, axes)


def test_ranks_share_a_sequence_by_the_mesh_and_by_the_config(warm: Any) -> None:
    shared = pytest.importorskip("tests.integrations.test_context_parallel")
    losses, weights = shared.plain(shared.model_of("llama"), 2)
    for mesh in (True, False):
        for found, state, exchanged, _ in warm(4).run(along_a_sequence, mesh):
            assert exchanged == shared.STEPS * 2 * 8
            assert len(found) == len(losses)
            for name, tensor in (state or {}).items():
                torch.testing.assert_close(tensor, weights[name], atol=2e-5, rtol=2e-5)
