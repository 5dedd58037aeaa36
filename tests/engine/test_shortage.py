"""A forward or backward that runs out of memory: a note on the error says what to do, and its type stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.harness import engine_of, make_model, settings, token_batch, train_step


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


CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU"


@pytest.mark.parametrize(
    ("error", "asked", "phase"),
    [
        (torch.OutOfMemoryError(CUDA), "asked for 2.50 GiB more", "forward"),
        (torch.OutOfMemoryError(CUDA), "asked for 2.50 GiB more", "backward"),
        (MemoryError("no memory is left"), "needs more", "backward"),
        (KeyError("no error of memory"), "", "forward"),
    ],
)
def test_the_error_keeps_its_type_and_the_engine_works_again(error: Exception, asked: str, phase: str) -> None:
    model: Any = make_model()
    more = {"activation_checkpointing": {"policy": "recompute"}, "train_micro_batch_size_per_gpu": 1}
    engine = engine_of(model, settings(3, more=more))
    handle = model.norm.register_forward_hook(lambda module, args, output: Fails.apply(output, error, phase))
    with pytest.raises(type(error)) as raised:
        engine.backward(engine(*token_batch(0, 0, 0)))
    assert raised.value is error
    notes = error.__dict__.pop("__notes__", [])
    assert len(notes) == bool(asked)
    for note in notes:
        assert note.startswith(f"wherry: {phase} {asked}, and ")
        assert "States of the engine take: parameters " in note and "shorter samples" in note
    handle.remove()
    train_step(engine, 0, 0)
    engine.close()
