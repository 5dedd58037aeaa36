"""A forward or backward that runs out of memory: a note on the error says what to do, and its type stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import engine_of, make_model, settings, token_batch, train_step
from tests.forks import Forks

PROGRAM = """
import resource
import torch, wherry
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 64)) for _ in range(4)))
config = {"train_micro_batch_size_per_gpu": 4096, "optimizer": {"type": "AdamW", "params": {}}}
engine, *_ = wherry.initialize(model=model, config=config)
engine(torch.ones(1, 64))
used = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize"))) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000, resource.RLIM_INFINITY))
engine(torch.ones(4096, 64))
"""


def test_a_process_at_its_limit_is_advised(tmp_path: Path, forks: Forks) -> None:
    done = forks.run("-c", PROGRAM, folder=tmp_path, launched=False)
    assert done.returncode == 1
    assert "you tried to allocate 67108864 bytes" in done.stderr
    advice = done.stderr[done.stderr.index("wherry: forward asked for 64.0 MiB more, and ") :]
    assert "on this host. States of the engine take: parameters 8.1 MiB on host" in advice
    assert "optimizer 16.1 MiB on host" in advice
    assert '"activation_checkpointing": {"policy": "recompute"} (now none;' in advice
    assert "train_micro_batch_size_per_gpu 2048 with more gradient_accumulation_steps (now 4096)" in advice


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: Exception, phase: str) -> torch.Tensor:
        ctx.error = error
        if phase == "forward":
            raise error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise ctx.error


@pytest.mark.parametrize(
    ("error", "asked", "phase"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU"),
            "asked for 2.50 GiB more",
            "forward",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU"),
            "asked for 2.50 GiB more",
            "backward",
        ),
        (MemoryError("no memory is left"), "needs more", "backward"),
        (KeyError("no error of memory"), None, "forward"),
    ],
)
def test_the_error_keeps_its_type_and_the_engine_works_again(error: Exception, asked: str | None, phase: str) -> None:
    model: Any = make_model()
    given = {"activation_checkpointing": {"policy": "recompute"}, "train_micro_batch_size_per_gpu": 1}
    engine = engine_of(model, settings(3, more=given))
    handle = model.norm.register_forward_hook(lambda module, args, output: Fails.apply(output, error, phase))
    with pytest.raises(type(error)) as raised:
        engine.backward(engine(*token_batch(0, 0, 0)))
    assert raised.value is error
    notes = getattr(error, "__notes__", [])
    assert len(notes) == (asked is not None)
    if asked is not None:
        assert notes[0].startswith(f"wherry: {phase} {asked}, and ")
        assert '"policy": "recompute", "nvme_path": "/a/folder"} (now recompute' in notes[0]
        assert "shorter samples" in notes[0]
        del error.__notes__
    handle.remove()
    train_step(engine, 0, 0)
    engine.close()
