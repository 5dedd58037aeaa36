"""A forward or backward that runs out of memory: the error says what takes it and what to do, and stays what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import adamw, make_model, settings, token_batch
from tests.forks import ENGINE, Forks

import wherry

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


def test_a_process_that_may_have_no_more_is_told_what_to_do(tmp_path: Path) -> None:
    with Forks(*ENGINE) as forks:
        done = forks.run("-c", PROGRAM, folder=tmp_path, launched=False)
    assert done.returncode == 1
    assert "you tried to allocate 67108864 bytes" in done.stderr
    told = done.stderr[done.stderr.index("wherry: forward asked for 64.0 MiB more, and ") :]
    assert "on this host. States of the engine take: parameters 8.1 MiB on host" in told
    assert "optimizer 16.1 MiB on host" in told
    assert '"activation_checkpointing": {"policy": "recompute"} (now none;' in told
    assert "train_micro_batch_size_per_gpu 2048 with more gradient_accumulation_steps (now 4096)" in told


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


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU"), "asked for 2.50 GiB more"),
        (MemoryError("no memory is left"), "needs more"),
        (KeyError("no error of memory"), None),
    ],
)
def test_the_error_keeps_its_type_and_the_engine_goes_on(phase: str, error: Exception, asked: str | None) -> None:
    model = make_model()
    given = {"activation_checkpointing": {"policy": "recompute"}, "train_micro_batch_size_per_gpu": 1}
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=settings(3, more=given))
    handle = model.norm.register_forward_hook(lambda module, args, output: Fails.apply(output, error, phase))
    with pytest.raises(type(error)) as told:
        engine.backward(engine(*token_batch(0, 0, 0)))
    assert told.value is error
    notes = getattr(error, "__notes__", [])
    assert len(notes) == (asked is not None)
    if asked is not None:
        assert notes[0].startswith(f"wherry: {phase} {asked}, and ")
        assert '"policy": "recompute", "nvme_path": "/a/folder"} (now recompute' in notes[0]
        assert "shorter samples" in notes[0]
        del error.__notes__
    handle.remove()
    engine.backward(engine(*token_batch(0, 0, 0)))
    engine.step()
    engine.close()
