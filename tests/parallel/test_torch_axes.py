"""The engine on the data axis beside torch's own tensor and pipeline parallelism, over processes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import Run, adamw, engine_of, settings, train_plain
from tests.tiers.rows import offload
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

import wherry
from wherry.activations import build
from wherry.parallel import topology
from wherry.parallel.partition import local_gradient
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


def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    ids = torch.randint(0, 32, (2, SEQUENCE + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


@cache
def oracle(data: int, accumulation: int) -> Run:
    """Train by plain PyTorch on the batches of `data` ranks."""
    model = model_of()
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


def trained(parameters: Any) -> torch.optim.Optimizer:
    return adamw([p for p in parameters if p.requires_grad])


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


def over_tensor(rank: int, stage: int, more: dict[str, Any]) -> Run:
    """Train on two data-parallel times two tensor-parallel ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    build.SMALLEST_PARTITIONED = 1  # the checkpoints of this model are small
    model = model_of()
    cut_blocks(model, mesh)
    engine = engine_of(model, settings(stage, 2, CLIP, more), mesh, trained)
    run = train(engine, 2)
    run.extra = engine.topology.tensor.traffic.bytes["all_gather"]
    engine.close()
    return run


def over_three(rank: int, stage: int, tensor: int, more: dict[str, Any]) -> Run:
    """Train on two pipeline times two data-parallel times `tensor` tensor-parallel ranks."""
    mesh = init_device_mesh("cpu", (2, 2, tensor), mesh_dim_names=("pp", "dp", "tp"))
    run, micros, whole = Run(), 4, model_of()
    if tensor > 1:
        cut_blocks(whole, mesh)
    names = {p: name for name, p in whole.named_parameters()}
    part = Stage(whole, mesh["pp"].get_local_rank(), 2)
    mine = {name: names[p] for name, p in part.named_parameters()}
    engine = engine_of(part, settings(stage, micros, CLIP, more), mesh, trained)
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


@pytest.mark.parametrize(("stage", "more"), [(0, {}), (2, RECOMPUTE), (3, PARTITION)])
def test_a_parallelized_module_on_every_stage(warm: Any, stage: int, more: dict[str, Any]) -> None:
    plain = oracle(2, 2)
    # With PARTITION each block's input is gathered for every micro-batch.
    parts = STEPS * 2 * CONFIG.layers * (2 * SEQUENCE * CONFIG.hidden * 4)
    runs = warm(4).run(over_tensor, stage, more)
    for run in runs:
        assert_near(run, plain, plain.weights)
        assert all(torch.equal(run.weights[name], runs[0].weights[name]) for name in plain.weights)
        assert run.extra == (parts if more == PARTITION else 0)


def partial_gradient(rank: int) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2,))
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
    grad = DTensor.from_local(torch.full((3,), rank + 1.0), mesh, [Partial()])
    return local_gradient(weight, grad).clone()


def test_partial_sums_of_a_gradient_are_added_over_tensor_ranks(warm: Any) -> None:
    """Give a replicated parameter, as a norm between parts of a sequence has them."""
    for grad in warm(2).run(partial_gradient):
        assert grad.tolist() == [3.0] * 3


def test_a_parallelized_module_beside_host_memory(warm: Any, tmp_path: Path) -> None:
    config = offload("offload-3-parameters", tmp_path, "before_use")
    resident = warm(4).run(over_tensor, 3, {})[0]
    for run in warm(4).run(over_tensor, 3, config):
        assert run.losses == resident.losses
        assert all(torch.equal(run.weights[name], weight) for name, weight in resident.weights.items())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("stage", "tensor", "more"), [pytest.param(2, 1, {}, marks=pytest.mark.smoke), (3, 1, RECOMPUTE), (2, 2, RECOMPUTE)]
)
def test_pipeline_stages(warm: Any, stage: int, tensor: int, more: dict[str, Any]) -> None:
    plain = oracle(2, 4)
    runs = warm(4 * tensor).run(over_three, stage, tensor, more)
    for run in runs:
        assert_near(run, plain, run.weights)
    assert {name for run in runs for name in run.weights} == set(plain.weights)
    assert runs[0].extra == pytest.approx(plain.extra, rel=1e-5)


def in_groups(rank: int) -> tuple[Run, dict[str, dict[str, int]]]:
    """Train with states sharded over two ranks and replicated twice."""
    axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    engine = engine_of(model_of(), settings(3, 2, CLIP), axes, trained)
    run = train(engine, 2)
    calls = {group: dict(traffic.calls) for group, traffic in engine.topology.traffic()}
    engine.close()
    return run, calls


def test_groups_of_ranks(warm: Any) -> None:
    plain = oracle(4, 2)
    results = warm(4).run(in_groups)
    for run, calls in results:
        assert_near(run, plain, plain.weights)
        assert all(torch.equal(run.weights[name], results[0][0].weights[name]) for name in plain.weights)
        assert set(calls[" within groups of 2"]) == {"all_gather", "reduce_scatter"}
        assert set(calls[" across groups"]) == {"all_reduce"}
        assert "reduce_scatter" not in calls[""]


def read_axes(rank: int) -> tuple[list[int], int]:
    """Find the ranks that share this rank's sequences, and the number of its batches."""
    place = topology.find(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")))
    return place.context.gather_objects(rank), place.readers[0]


def test_ranks_along_a_context_axis_share_a_sequence(warm: Any) -> None:
    assert warm(4).run(read_axes) == [([0, 1], 0), ([0, 1], 0), ([2, 3], 1), ([2, 3], 1)]
