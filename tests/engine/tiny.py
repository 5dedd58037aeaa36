"""A small language model, its batches, and an optimizer for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, LENGTH = 29, 16, 6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + torch.tanh(self.mix(h.cumsum(1) / 3))
        return x + self.down(F.gelu(self.up(x)))


class TinyLM(nn.Module):
    """Embedding, blocks, and a head tied to the embedding."""

    def __init__(self, blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def make_model(cls: Callable[[], nn.Module] = TinyLM, seed: int = 0) -> nn.Module:
    # The generator is the process's, and ranks are threads: models are built by one thread, and copied.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return cls()


def token_batch(step: int, micro: int, rank: int, size: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    ids = torch.randint(0, VOCABULARY, (size, LENGTH + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)
