"""The engine on an accelerator has the results of one on the CPU: `pytest tests/gpu`, on a machine that has one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.harness import (
    Run,
    assert_close,
    assert_equal,
    engine_of,
    make_model,
    settings,
    token_batch,
    train_engine,
    train_plain,
)
from tests.gpu.warm import DEVICE
from tests.scale.test_init import Mixed, whole

import wherry
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.tiers.buffers import FallbackPinning, HostPool, PoolError
from wherry.tiers.streams import CudaPin, TorchPin

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


def train(stage: int, ranks: int, **how: Any) -> Run:
    """Train on ranks that are threads and share the device, with a clipped norm."""

    def batch(step: int, micro: int, rank: int) -> list[torch.Tensor]:
        return [tensor.to(DEVICE) for tensor in token_batch(step, micro, rank)]

    run = train_engine(make_model(), stage=stage, ranks=ranks, clip=0.5, batch=batch, **how)
    assert all(weight.device.type == DEVICE.type for weight in run.weights.values())
    run.weights = {name: weight.cpu() for name, weight in run.weights.items()}
    return run


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 2), (3, 2)])
def test_equals_plain_pytorch_on_the_cpu(stage: int, ranks: int) -> None:
    plain = train_plain(make_model(), ranks=ranks, steps=10, clip=0.5)
    assert_close(train(stage, ranks, steps=10), plain, 2e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_stages_have_the_same_bits(precision: str) -> None:
    runs = [train(stage, 2, steps=4, config={precision: {"enabled": True}}) for stage in range(4)]
    for run in runs[1:]:
        assert_equal(run, runs[0])


@pytest.mark.skipif(DEVICE is None or DEVICE.type != "cuda", reason="CUDA graphs")
def test_blocks_compiled_to_cuda_graphs_equal_plain_pytorch() -> None:
    plain = train_plain(make_model(), steps=6)
    engine = engine_of(make_model(), settings(2))
    engine.compile(backend="cudagraphs")
    losses = []
    for step in range(6):
        loss = engine(*(tensor.to(DEVICE) for tensor in token_batch(step, 0, 0)))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    engine.close()
    assert losses == pytest.approx(plain.losses, rel=2e-4)


@pytest.mark.skipif(DEVICE is None or DEVICE.type != "cuda", reason="an error that CUDA alone keeps")
def test_memory_that_cannot_be_pinned_is_no_error_of_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    with HostPool(pinning=CudaPin()) as pool:
        buffer = pool.take(4096)
        with pytest.raises(PoolError, match="CUDA error"):
            CudaPin().pin(buffer.data_ptr(), 4096)  # it is pinned already
        assert float(torch.ones(8, device=DEVICE).sum()) == 8.0
        failing = CudaPin()
        monkeypatch.setattr(failing, "pin", lambda *_: CudaPin().pin(buffer.data_ptr(), 4096))
        with HostPool(pinning=FallbackPinning(failing, TorchPin())) as other:
            pinned = other.take_zeros(4096)
            assert pinned.is_pinned() and other.kind == "torch"
            assert float(pinned.to(DEVICE, non_blocking=True).sum()) == 0.0
            other.give(pinned)
        pool.give(buffer)


def test_what_is_built_on_a_gpu_within_init_has_the_first_ranks_values() -> None:
    plain = Mixed(0)

    def body(comm: Comm) -> None:
        with wherry.Init({"zero_optimization": {"stage": 3}}, mesh=comm):
            model = Mixed(comm.rank).to(DEVICE)
        for name, value in whole(model).items():
            assert torch.equal(value.cpu(), plain.get_parameter(name)), name

    run_ranks(2, body)
