"""On an accelerator: the same engine, the same results. `pytest tests/gpu`, on a machine that has one."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from tests.engine.harness import Run, adamw, assert_close, assert_equal, make_model, settings, token_batch, train_plain
from tests.gpu.warm import DEVICE
from tests.scale.test_init import Mixed, whole

import wherry
from wherry.parallel.comm import Comm, SoloComm
from wherry.testing import run_ranks
from wherry.tiers.buffers import HostPool, PoolError
from wherry.tiers.streams import CudaPin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE is None, reason="needs an accelerator: run `pytest tests/gpu` where there is one"),
]


@pytest.fixture(autouse=True)
def exact_matmul() -> Any:
    """Where products in fp32 may be rounded to less."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def train(stage: int, ranks: int, *, steps: int = 10, clip: float = 0.5, more: dict[str, Any] | None = None) -> Run:
    """One rank is the program's own thread, and autograd has another for the device; two are threads that share it."""
    model = make_model()

    def body(comm: Comm) -> Run:
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(
            model=mine, optimizer=adamw(mine.parameters()), config=settings(stage, 1, clip, more), mesh=comm
        )
        assert all(p.device.type == DEVICE.type for p in mine.parameters())
        run = Run()
        for step in range(steps):
            loss = engine(*(t.to(DEVICE) for t in token_batch(step, 0, comm.rank)))
            engine.backward(loss)
            engine.step()
            run.losses.append(sum(comm.gather_objects(float(loss.detach()))) / comm.size)
            run.norms.append(engine.get_global_grad_norm() or -1.0)
        with wherry.gathered(mine):
            run.weights = {name: p.detach().cpu().clone() for name, p in mine.named_parameters()}
        engine.close()
        return run

    return body(SoloComm()) if ranks == 1 else run_ranks(ranks, body)[0]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_equals_plain_pytorch_on_the_cpu(stage: int, ranks: int) -> None:
    assert_close(train(stage, ranks), train_plain(make_model(), ranks=ranks, steps=10, clip=0.5), 2e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_stages_have_the_same_bits(precision: str) -> None:
    more = {} if precision == "fp32" else {precision: {"enabled": True}}
    runs = [train(stage, 2, more=more) for stage in range(4)]
    for run in runs[1:]:
        assert_equal(run, runs[0])


def test_every_byte_is_given_back() -> None:
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    train(3, 2, steps=2)
    gc.collect()
    if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        torch._C._cuda_clearCublasWorkspaces()
    assert torch.accelerator.memory_allocated() - before <= 0


def test_a_released_unit_holds_no_device_memory() -> None:
    """After a step at stage 3 a rank holds its shards, gradients and optimizer state, and nothing whole."""
    model = make_model()

    def body(comm: Comm) -> None:
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=settings(3), mesh=comm)
        engine.backward(engine(*(t.to(DEVICE) for t in token_batch(0, 0, comm.rank))))
        engine.step()
        assert next(row.bytes_actual for row in engine.memory() if row.state == "gathered") == 0

    run_ranks(2, body)


@pytest.mark.skipif(DEVICE is None or DEVICE.type != "cuda", reason="an error that CUDA alone keeps")
def test_memory_that_cannot_be_pinned_is_no_error_of_the_next_kernel() -> None:
    with HostPool(pinning=CudaPin()) as pool:
        buffer = pool.take(4096)
        with pytest.raises(PoolError, match="CUDA error"):
            CudaPin().pin(buffer.data_ptr(), 4096)  # it is pinned already
        assert float(torch.ones(8, device=DEVICE).sum()) == 8.0
        pool.give(buffer)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_built_on_a_gpu_within_init_has_the_first_ranks_values(ranks: int) -> None:
    plain = Mixed(0)

    def body(comm: Comm) -> None:
        with wherry.Init(settings(3), mesh=comm):
            model = Mixed(comm.rank).to(DEVICE)
        for name, value in whole(model).items():
            assert torch.equal(value.cpu(), plain.get_parameter(name)), name

    run_ranks(ranks, body)
