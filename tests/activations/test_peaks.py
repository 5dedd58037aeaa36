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


XL = GPTConfig(layers=48, hidden=1600, heads=25, sequence=1024)


@pytest.mark.long
def test_gpt2_of_1_5_billion_at_batch_32() -> None:
    """Published with ZeRO: about 60 GB without checkpoints, and about 8 GB with them."""
    tokens, hidden, layers = 32 * XL.sequence, XL.hidden, XL.layers
    residual = HALF * tokens * hidden
    kept, _ = measured(XL, 32, interval=0)
    # Twelve times the residual stream for each block, as the published estimate counts.
    assert kept == pytest.approx(layers * 12 * residual, rel=0.01)
    assert layers * 12 * residual == pytest.approx(60e9, rel=0.01)
    kept, peak = measured(XL, 32, interval=1)
    checkpoints = GptShape(layers, hidden, XL.heads).checkpoints(32, XL.sequence)
    assert checkpoints == layers * residual == pytest.approx(5.03e9, rel=1e-2)
    # The trunk's input is the first of them and counts elsewhere; the loss keeps two tensors, and is one number.
    assert kept == checkpoints + residual + HALF
    assert 6.5e9 < peak < 8.5e9


def test_the_tensors_that_a_block_saves_by_operation() -> None:
    """In units of the residual stream. Attention's probabilities are not among it: its kernel computes them again."""
    config, batch = GPTConfig(layers=1, hidden=128, heads=4, sequence=256), 8
    block = Block(config).bfloat16()
    names = {
        block.norm1: "norm", block.attention.qkv: "matrix", block.attention: "attention",
        block.attention.out: "matrix", block.norm2: "norm", block.mlp.up: "matrix", block.mlp.down: "gelu, matrix",
    }  # fmt: skip
    inside: list[str] = []
    for module, name in names.items():
        module.register_forward_pre_hook(lambda m, a, name=name: inside.append(name))
        module.register_forward_hook(lambda m, a, out: inside.pop() and None)
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    # Storages by the operation that saves them first; kept, so that none is another's successor.
    found: dict[torch.UntypedStorage, str] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and all(s.data_ptr() != storage.data_ptr() for s in found):
            found[storage] = inside[-1]
        return tensor

    residual = HALF * batch * config.sequence * config.hidden
    x = torch.randn(batch, config.sequence, config.hidden, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(x)
    assert out.shape == x.shape
    units: dict[str, float] = {}
    for storage, name in found.items():
        units[name] = units.get(name, 0) + storage.nbytes() / residual
    # Both inputs of the normalisations and what they give to a matrix; query, key and value together and the values
    # that they mix, which the next matrix shares; and the widest tensor, before its gelu.
    expected = {"norm": 2, "matrix": 2, "attention": 4, "gelu, matrix": 4}
    assert {name: round(share) for name, share in units.items()} == expected
    # Beside these, statistics of rows and heads.
    assert sum(units.values()) == pytest.approx(12, rel=0.02)


@pytest.mark.parametrize("interval", [1, 4])
def test_checkpoints_by_their_interval(interval: int) -> None:
    """2 x batch x sequence x hidden x layers / interval, and the blocks between two of them at the peak."""
    config = GPTConfig(layers=8, hidden=128, heads=4, sequence=256)
    shape = GptShape(config.layers, config.hidden, config.heads)
    residual = HALF * 8 * config.sequence * config.hidden
    kept, peak = measured(config, 8, interval)
    assert kept == shape.checkpoints(8, config.sequence, interval) + residual + HALF
    # One block computed again, as without checkpoints, and what its backward makes beside it.
    assert interval * 12 * residual < peak - kept < (interval * 12 + 12) * residual
