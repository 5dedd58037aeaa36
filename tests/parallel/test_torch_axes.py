"""torch's own tensor and pipeline parallelism, over processes, with the engine on the data axis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.engine.harness import Run, adamw, settings
from tests.engine.test_processes import Pool
from torch.distributed.device_mesh import init_device_mesh

import wherry
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


def oracle(data: int, accumulation: int) -> Run:
    model, run = model_of(), Run()
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(accumulation):
            for rank in range(data):
                loss = model(*batch(step, micro, rank)) / (data * accumulation)
                loss.backward()
                total += float(loss.detach())
        trained = [p for p in model.parameters() if p.requires_grad]
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
        run.losses.append(total)
    run.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    run.extra = float(model(*batch(0, 0, 0)).detach())
    return run


def whole_weights(engine: Any) -> dict[str, torch.Tensor]:
    with wherry.gathered(engine.module):
        return {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for name, p in engine.module.named_parameters()
        }


def over_tensor(rank: int, stage: int, data: int, tensor: int, accumulation: int, more: dict[str, Any]) -> Run:
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))
    model, run = model_of(), Run()
    cut_blocks(model, mesh)
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
    engine.close()
    return run


def over_three(rank: int, stage: int, pipe: int, data: int, tensor: int, micros: int, schedule: str) -> Run:
    mesh = init_device_mesh("cpu", (pipe, data, tensor), mesh_dim_names=("pp", "dp", "tp"))
    run = Run()
    whole = model_of()
    if tensor > 1:
        cut_blocks(whole, mesh)
    names = {p: name for name, p in whole.named_parameters()}
    part = Stage(whole, mesh["pp"].get_local_rank(), pipe)
    mine = {name: names[p] for name, p in part.named_parameters()}
    engine, *_ = wherry.initialize(
        model=part,
        optimizer=adamw([p for p in part.parameters() if p.requires_grad]),
        mesh=mesh,
        config=settings(stage, micros, CLIP),
    )
    pipeline = Pipeline(engine, schedule)
    for step in range(STEPS):
        window = iter([batch(step, micro, engine.comm.rank) for micro in range(micros)])
        total = float(pipeline.train_batch(window))
        run.losses.append(sum(engine.comm.gather_objects(total)) / data)
        run.norms.append(engine.get_global_grad_norm())
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


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (0, {}),
        (1, {}),
        (2, {}),
        (3, {}),
        (3, {"activation_checkpointing": {"partition_activations": True}}),
    ],
)
def test_a_parallelised_module_on_every_stage(four: Pool, stage: int, more: dict[str, Any]) -> None:
    runs = four.run(over_tensor, stage, 2, 2, 2, more)
    plain = oracle(2, 2)
    for run in runs:
        assert_near(run, plain, plain.weights)
        assert all(torch.equal(run.weights[name], runs[0].weights[name]) for name in plain.weights)


@pytest.mark.parametrize(("stage", "schedule"), [(0, "gpipe"), (1, "1f1b"), (2, "1f1b"), (3, "1f1b")])
def test_pipeline_stages_on_every_stage(four: Pool, stage: int, schedule: str) -> None:
    runs = four.run(over_three, stage, 2, 2, 1, 4, schedule)
    plain = oracle(2, 4)
    for run in runs:
        assert_near(run, plain, run.weights)
    assert {name for run in runs for name in run.weights} == set(plain.weights)
    assert runs[0].extra == pytest.approx(plain.extra, rel=1e-5)


def test_three_axes_on_eight_ranks() -> None:
    """Pipeline x data x tensor, 2 each."""
    eight = Pool(8)
    try:
        runs = eight.run(over_three, 2, 2, 2, 2, 4, "1f1b")
    finally:
        eight.close()
    plain = oracle(2, 4)
    for run in runs:
        assert_near(run, plain, run.weights)
    assert {name for run in runs for name in run.weights} == set(plain.weights)
