"""A small model with tensor parallelism made by hand, as in Megatron-style code, over any `Comm`."""

from __future__ import annotations

from typing import Any

import torch
from tests.engine.harness import LENGTH, VOCABULARY, WIDTH
from torch import nn
from torch.nn import functional as F

from wherry.parallel.comm import Comm


class Copy(torch.autograd.Function):
    """Pass values through forward; sum the gradients of all ranks backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm) -> torch.Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone()
        ctx.comm.all_reduce(grad).wait()
        return grad, None


class Sum(torch.autograd.Function):
    """Sum over ranks forward; pass the gradient through backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm) -> torch.Tensor:
        x = x.clone()
        comm.all_reduce(x).wait()
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.randn(WIDTH) / 10)
        self.comm: Comm | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.mix(x.cumsum(1) / 3))
        h = self.norm(x)
        if self.comm is None:
            return x + self.down(F.gelu(self.up(h))) + self.bias
        h = Sum.apply(self.down(F.gelu(self.up(Copy.apply(h, self.comm)))), self.comm)
        return x + h + self.bias

    def cut(self, comm: Comm, dim_is_known: bool) -> None:
        """Keep this rank's columns of `up` and rows of `down`, and mark them as Megatron does."""
        self.comm = comm
        for owner, name, dim in ((self.up, "weight", 0), (self.up, "bias", 0), (self.down, "weight", 1)):
            part = nn.Parameter(getattr(owner, name).detach().chunk(comm.size, dim)[comm.rank].clone())
            if dim_is_known:
                part.tensor_model_parallel = True  # type: ignore[attr-defined]
                part.partition_dim = dim  # type: ignore[attr-defined]
            else:
                part.model_parallel = True  # type: ignore[attr-defined]
            setattr(owner, name, part)


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert ids.shape[1] == LENGTH
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())

    def cut(self, comm: Comm, dim_is_known: bool = True) -> None:
        for block in self.blocks:
            assert isinstance(block, Block)
            block.cut(comm, dim_is_known)
