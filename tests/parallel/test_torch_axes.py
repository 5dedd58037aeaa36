"""torch's own tensor and pipeline parallelism, over processes, with the engine on the data axis."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import Run, adamw, assert_close, assert_equal, make_model, settings, train_plain
from tests.engine.test_processes import Pool, train
from tests.tiers.test_placements import offload
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
    """Dropout on what attention and MLP add to the stream.

    A block draws from a seed that follows the micro-batch, so that the masks do not depend on which process it is in.
    """

    def drop(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return F.dropout(out, 0.2, training=module.training and torch.is_grad_enabled())

    for layer, block in enumerate(model.blocks):
        micro_batches = itertools.count(rank, ranks)

        def seed(module: nn.Module, args: Any, layer: int = layer, numbers: Iterator[int] = micro_batches) -> None:
            # Before its first micro-batch a pipeline asks for shapes, by a forward that counts for nothing.
            asked = any("metadata_inference" in frame.name for frame in traceback.extract_stack(limit=40))
            if torch.is_grad_enabled() and not asked:
                torch.manual_seed(1000 * layer + next(numbers))

        block.register_forward_pre_hook(seed)
        block.attention.register_forward_hook(drop)  # type: ignore[union-attr, operator]
        block.mlp.register_forward_hook(drop)  # type: ignore[union-attr, operator]


def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    ids = torch.randint(0, 32, (2, SEQUENCE + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def oracle(data: int, accumulation: int, dropout: bool = False) -> Run:
    model = model_of()
    if dropout:
        drop_out(model)
    run = train_plain(model, ranks=data, accumulation=accumulation, steps=STEPS, clip=CLIP, batch=batch)
    with torch.no_grad():
        model.load_state_dict(run.weights)
        run.extra = float(model(*batch(0, 0, 0)))
    return run


def whole_weights(engine: Any) -> dict[str, torch.Tensor]:
    with wherry.gathered(engine.module):
        return {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for name, p in engine.module.named_parameters()
        }


def over_tensor(
    rank: int, stage: int, data: int, tensor: int, accumulation: int, more: dict[str, Any], dropout: bool = False
) -> Run:
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))
    build.SMALLEST_PARTITIONED = 1  # these checkpoints are small
    model, run = model_of(), Run()
    cut_blocks(model, mesh)
    if dropout:
        drop_out(model, mesh["dp"].get_local_rank(), data)
    engine, *_ = wherry.initialize(
        model=model,
        optimizer=adamw([p for p in model.parameters() if p.requires_grad]),
        mesh=mesh,
        config=settings(stage, accumulation, CLIP, more),
    )
    for step in range(STEPS):
        total = 0.0
        for micro in range(accumulation):
            loss = engine(*batch(step, micro, engine.comm.rank))
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / accumulation
        run.losses.append(sum(engine.comm.gather_objects(total)) / data)
        run.norms.append(engine.get_global_grad_norm())
    run.weights = whole_weights(engine)
    run.extra = engine.topology.tensor.traffic.bytes["all_gather"]
    engine.close()
    return run


def over_three(
    rank: int,
    stage: int,
    pipe: int,
    data: int,
    tensor: int,
    micros: int,
    more: dict[str, Any] | None = None,
    dropout: bool = False,
) -> Run:
    mesh = init_device_mesh("cpu", (pipe, data, tensor), mesh_dim_names=("pp", "dp", "tp"))
    run = Run()
    whole = model_of()
    if tensor > 1:
        cut_blocks(whole, mesh)
    if dropout:
        drop_out(whole, mesh["dp"].get_local_rank(), data)
    names = {p: name for name, p in whole.named_parameters()}
    part = Stage(whole, mesh["pp"].get_local_rank(), pipe)
    mine = {name: names[p] for name, p in part.named_parameters()}
    engine, *_ = wherry.initialize(
        model=part,
        optimizer=adamw([p for p in part.parameters() if p.requires_grad]),
        mesh=mesh,
        config=settings(stage, micros, CLIP, more),
    )
    pipeline = Pipeline(engine)
    for step in range(STEPS):
        window = iter([batch(step, micro, engine.comm.rank) for micro in range(micros)])
        total = float(pipeline.train_batch(window))
        run.losses.append(sum(engine.comm.gather_objects(total)) / data)
        run.norms.append(engine.get_global_grad_norm())
    pipeline.train(False)
    evaluated = float(pipeline(*(torch.cat([t] * (micros // 2)) for t in batch(0, 0, 0))))
    run.weights = {mine[name]: weight for name, weight in whole_weights(engine).items()}
    run.extra = evaluated
    engine.close()
    return run


def assert_near(run: Run, plain: Run, names: Any) -> None:
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert run.norms == pytest.approx(plain.norms, rel=1e-4)
    for name in names:
        torch.testing.assert_close(run.weights[name], plain.weights[name], rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.close()


RECOMPUTE = {"activation_checkpointing": {"policy": "recompute"}}
PARTITION = {"activation_checkpointing": {"partition_activations": True}}


@pytest.fixture(scope="module")
def oracles() -> dict[tuple[int, bool], Run]:
    """Plain PyTorch on two data-parallel ranks' batches, by accumulation and dropout."""
    return {(k, dropout): oracle(2, k, dropout) for k in (2, 4) for dropout in (False, True)}


Oracles = dict[tuple[int, bool], Run]


@pytest.mark.parametrize(
    ("stage", "more", "dropout"),
    [
        *((stage, {}, False) for stage in range(4)),
        (3, PARTITION, False),
        (1, {}, True),
        (2, RECOMPUTE, True),
        (3, PARTITION, True),
    ],
)
def test_a_parallelised_module_on_every_stage(
    four: Pool, oracles: Oracles, stage: int, more: dict[str, Any], dropout: bool
) -> None:
    runs = four.run(over_tensor, stage, 2, 2, 2, more, dropout)
    plain = oracles[2, dropout]
    # Each block's input, of every micro-batch, is put together again.
    parts = STEPS * 2 * CONFIG.layers * (2 * SEQUENCE * CONFIG.hidden * 4)
    for run in runs:
        assert_near(run, plain, plain.weights)
        assert all(torch.equal(run.weights[name], runs[0].weights[name]) for name in plain.weights)
        assert run.extra == (parts if more == PARTITION else 0)


@pytest.mark.parametrize(
    ("row", "policy"),
    [
        ("offload-0", "at_step"),
        ("offload-2", "before_use"),
        ("offload-3-parameters", "before_use"),
        ("disk-2", "at_step"),
        ("infinity", "before_use"),
    ],
)
def test_a_parallelised_module_on_every_tier(
    four: Pool, oracles: Oracles, row: str, policy: str, tmp_path: Path
) -> None:
    config = offload(row, tmp_path, policy)
    stage = config["zero_optimization"]["stage"]
    plain = oracles[2, False]
    for run, resident in zip(
        four.run(over_tensor, stage, 2, 2, 2, config), four.run(over_tensor, stage, 2, 2, 2, {}), strict=True
    ):
        assert_near(run, plain, plain.weights)
        assert all(torch.equal(run.weights[name], resident.weights[name]) for name in plain.weights)
    assert not list(tmp_path.iterdir())


def test_dropout_changes_what_is_compared(oracles: Oracles) -> None:
    assert oracles[2, True].losses != pytest.approx(oracles[2, False].losses, rel=1e-3)


@pytest.mark.parametrize(
    ("stage", "more", "dropout"),
    [*((stage, {}, False) for stage in range(4)), (1, {}, True), (3, RECOMPUTE, True)],
)
def test_pipeline_stages_on_every_stage(
    four: Pool, oracles: Oracles, stage: int, more: dict[str, Any], dropout: bool
) -> None:
    runs = four.run(over_three, stage, 2, 2, 1, 4, more, dropout)
    plain = oracles[4, dropout]
    for run in runs:
        assert_near(run, plain, run.weights)
    assert {name for run in runs for name in run.weights} == set(plain.weights)
    assert runs[0].extra == pytest.approx(plain.extra, rel=1e-5)


def test_three_axes_on_eight_ranks(oracles: Oracles) -> None:
    """Pipeline x data x tensor, 2 each."""
    eight = Pool(8)
    try:
        for more, dropout in (({}, False), (RECOMPUTE, True)):
            runs = eight.run(over_three, 2, 2, 2, 2, 4, more, dropout)
            plain = oracles[4, dropout]
            for run in runs:
                assert_near(run, plain, run.weights)
            assert {name for run in runs for name in run.weights} == set(plain.weights)
    finally:
        eight.close()


def in_groups(rank: int, mesh: bool, more: dict[str, Any]) -> tuple[Run, dict[str, dict[str, int]]]:
    """States shared out by two, held twice: as the mesh says, or as the config does."""
    axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")) if mesh else None
    model, run = model_of(), Run()
    engine, *_ = wherry.initialize(
        model=model,
        optimizer=adamw([p for p in model.parameters() if p.requires_grad]),
        mesh=axes,
        config=settings(3, 2, CLIP, more),
    )
    for step in range(STEPS):
        total = 0.0
        for micro in range(2):
            loss = engine(*batch(step, micro, engine.comm.rank))
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / 2
        run.losses.append(sum(engine.comm.gather_objects(total)) / engine.comm.size)
        run.norms.append(engine.get_global_grad_norm())
    run.weights = whole_weights(engine)
    counted = {among: dict(traffic.calls) for among, traffic in engine.topology.traffic()}
    engine.close()
    return run, counted


def test_groups_of_ranks_by_the_mesh_and_by_the_config(four: Pool) -> None:
    plain = oracle(4, 2)
    for mesh, more in ((True, {}), (False, {"zero_optimization": {"mics_shard_size": 2}})):
        answers = four.run(in_groups, mesh, more)
        for run, counted in answers:
            assert_near(run, plain, plain.weights)
            assert all(torch.equal(run.weights[name], answers[0][0].weights[name]) for name in plain.weights)
            assert set(counted[" within groups of 2"]) == {"all_gather", "reduce_scatter"}
            assert set(counted[" across groups"]) == {"all_reduce"}
            assert "reduce_scatter" not in counted[""]


def along_a_sequence(rank: int, mesh: bool) -> Any:
    """Two ranks on each sequence: as the mesh says, or as the config does."""
    from tests.integrations import test_context_parallel as shared

    axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")) if mesh else None
    return shared.train(shared.model_of("llama"), 1 if mesh else 2, {}, {"stage": 3}, axes)


def test_ranks_share_a_sequence_by_the_mesh_and_by_the_config(four: Pool) -> None:
    shared = pytest.importorskip("tests.integrations.test_context_parallel")
    losses, weights = shared.plain(shared.model_of("llama"), 2)
    for mesh in (True, False):
        for found, state, exchanged, _ in four.run(along_a_sequence, mesh):
            assert exchanged == shared.STEPS * 2 * 8
            assert len(found) == len(losses)
            for name, tensor in (state or {}).items():
                torch.testing.assert_close(tensor, weights[name], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_four_processes_share_the_data_alone(four: Pool, stage: int) -> None:
    """No other axis than that of the data, in as many processes; without a mesh and with one."""
    accumulation = 1 + stage % 2
    first, *others = four.run(train, stage, accumulation, {}, stage > 1)
    plain = train_plain(make_model(), ranks=4, accumulation=accumulation, steps=8, clip=0.5)
    plain.weights["head.weight"] = plain.weights["embed.weight"]
    assert_close(first, plain)
    for run in others:
        assert_equal(run, first)
