"""The engine on an accelerator has the results of one on the CPU: `pytest tests/gpu`, on a machine that has one."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import Run, adamw, assert_close, assert_equal, make_model, settings, token_batch, train_plain
from tests.gpu.warm import DEVICE, warm_up
from tests.scale.test_init import Mixed, whole
from tests.tiers.rows import offload

import wherry
from wherry.parallel.comm import Comm, SoloComm
from wherry.testing import run_ranks
from wherry.tiers.buffers import HostPool, PoolError
from wherry.tiers.streams import CudaPin
from wherry.train.model import GPT, GPTConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE is None, reason="needs an accelerator: run `pytest tests/gpu` where there is one"),
]


@pytest.fixture(autouse=True)
def exact_matmul() -> Any:
    """Multiply fp32 matrices in fp32, where TF32 is the default."""
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


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 2), (3, 2)])
def test_equals_plain_pytorch_on_the_cpu(stage: int, ranks: int) -> None:
    assert_close(train(stage, ranks), train_plain(make_model(), ranks=ranks, steps=10, clip=0.5), 2e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_stages_have_the_same_bits(precision: str) -> None:
    more = {} if precision == "fp32" else {precision: {"enabled": True}}
    runs = [train(stage, 2, steps=4, more=more) for stage in range(4)]
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
    """Hold shards, gradients and optimizer state after a step at stage 3, and no whole weights."""
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


# 25 million parameters, and 6 million on a device that a CPU computes for.
_HIDDEN = 256 if DEVICE is not None and DEVICE.type == "emulated" else 512
SHAPE = GPTConfig(layers=8, hidden=_HIDDEN, heads=8, sequence=64, vocabulary=256)


def _peak(config: dict[str, Any], stage: int) -> tuple[int, int]:
    """Device bytes at the peak of a step of a model of some millions of parameters, and those at rest, above before."""
    for _ in range(2):  # of the engine before: graphs, and what their hooks hold
        gc.collect()
    warm_up()
    torch.accelerator.empty_cache()
    torch.manual_seed(0)
    before = torch.accelerator.memory_allocated()
    model = GPT(SHAPE)
    engine, *_ = wherry.initialize(
        model=model, optimizer=adamw(model.parameters()), config=settings(stage, 1, 0.5, copy.deepcopy(config))
    )
    ids = torch.zeros(1, 64, dtype=torch.int64, device=DEVICE)
    for step in range(3):
        if step == 2:
            engine.settle()
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
        engine.backward(engine(ids, ids))
        engine.step()
    engine.settle()
    torch.accelerator.synchronize()
    found = torch.accelerator.max_memory_allocated() - before, torch.accelerator.memory_allocated() - before
    engine.close()
    return found


def test_states_on_the_host_take_no_device_memory(tmp_path: Path) -> None:
    parameters = sum(p.numel() for p in GPT(SHAPE).parameters())
    bf16 = {"bf16": {"enabled": True}}
    resident, _ = _peak(bf16, 2)
    offloaded, _ = _peak(offload("offload-2", tmp_path, "before_use", "bf16"), 2)
    # Master and moments, twelve bytes of a parameter, have left the device.
    assert resident - offloaded >= 11 * parameters
    config = offload("offload-3-parameters", tmp_path, "before_use", "bf16")
    unit = parameters // 8
    config["zero_optimization"] |= {"stage3_max_live_parameters": 2 * unit, "stage3_prefetch_bucket_size": unit}
    everything, at_rest = _peak(config, 3)
    # Two units' weights of eight, in two bytes.
    assert everything <= offloaded - 5 * 2 * unit
    # Buffers of three units' gradients, of which two may be on their way down, and little else.
    assert at_rest <= 3.3 * 2 * unit
