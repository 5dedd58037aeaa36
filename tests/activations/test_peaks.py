"""Peak bytes of activations against the published formulas, on fake tensors: no memory, no GPU."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import wherry
from wherry.observe.footprint import WORKING, Footprint
from wherry.plan.gpt import GptShape
from wherry.train.model import Block, GPTConfig

HALF = 2


class Trunk(nn.Module):
    """The blocks of a GPT-2, checkpointed every `interval` blocks by the model's own code; 0 for not at all."""

    def __init__(self, config: GPTConfig, interval: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.interval = interval

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.interval:
            return self._some(x, 0, len(self.blocks))
        for start in range(0, len(self.blocks), self.interval):
            x = wherry.checkpoint(self._some, x, start, start + self.interval)
        return x

    def _some(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        for block in list(self.blocks)[start:stop]:
            x = block(x)
        return x


def measured(config: GPTConfig, batch: int, interval: int) -> tuple[int, int]:
    """Bytes between forward and backward, and at the peak, of everything that forward and backward make."""
    with FakeTensorMode(), ExitStack() as stack:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)  # a fake model cannot be cast
        stack.callback(torch.set_default_dtype, before)
        trunk = Trunk(config, interval)
        x = torch.empty(batch, config.sequence, config.hidden, dtype=torch.bfloat16, requires_grad=True)
        for parameter in trunk.parameters():
            # Gradients of weights are model states: they have their own place.
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        footprint = stack.enter_context(Footprint())
        footprint.label("weights", [x, *trunk.parameters()])
        out = trunk(x)
        loss = F.mse_loss(out, torch.zeros_like(out), reduction="sum")
        del out
        kept = footprint.live[WORKING]
        loss.backward()
        return kept, footprint.peaks[WORKING]


def test_checkpoints_by_their_interval() -> None:
    """2 x batch x sequence x hidden x layers / interval, and the blocks between two of them at the peak."""
    config = GPTConfig(layers=4, hidden=128, heads=4, sequence=256)
    shape = GptShape(config.layers, config.hidden, config.heads)
    residual = HALF * 8 * config.sequence * config.hidden
    kept, _ = measured(config, 8, interval=0)
    # By block: inputs of the norms 2, of matrices 2, of attention 4, and of the gelu 4; beside them statistics, and
    # one that the loss keeps.
    assert kept - residual == pytest.approx(config.layers * 12 * residual, rel=0.01)
    for interval in (1, 2):
        kept, peak = measured(config, 8, interval)
        assert kept == shape.checkpoints(8, config.sequence, interval) + residual + HALF
        # One block computed again, as without checkpoints, and the gradients of its backward beside it.
        assert interval * 12 * residual < peak - kept < (interval * 12 + 12) * residual
