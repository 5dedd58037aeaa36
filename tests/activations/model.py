"""A small model with dropout, whose blocks have several inputs, one of them shared by all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.harness import LENGTH, VOCABULARY, WIDTH
from torch import nn
from torch.nn import functional as F

import wherry
from wherry.activations import build
from wherry.testing.late import ChaosLink, late_link


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # the gradient of a bias of keys is noise
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("scale", torch.ones(LENGTH, WIDTH))

        self.calls = 0

    def forward(self, x: torch.Tensor, *, mask: dict[str, torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask["bias"])
        x = x + self.dropout(self.out(mixed)) * self.scale.type_as(x)
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    """Blocks with a shared input; `by_hand` checkpoints pairs of blocks in the model's code."""

    def __init__(self, blocks: int = 4, by_hand: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)
        self.bias = nn.Linear(LENGTH, LENGTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.by_hand = by_hand

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position
        mask = {"bias": self.bias(torch.eye(LENGTH, device=ids.device, dtype=x.dtype))}
        if self.by_hand:
            for place in range(0, len(self.blocks), 2):
                x = wherry.checkpoint(self._pair, x, place, mask=mask)
        else:
            for block in self.blocks:
                x = block(x, mask=mask)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())

    def _pair(self, x: torch.Tensor, place: int, mask: dict[str, torch.Tensor]) -> torch.Tensor:
        for block in list(self.blocks)[place : place + 2]:
            x = block(x, mask=mask)
        return x


def by_hand() -> Model:
    return Model(by_hand=True)


Settings = dict[str, Any]


def late_links(monkeypatch: pytest.MonkeyPatch) -> list[ChaosLink]:
    """Make copies of activations late, as those of a device apart; returns the links that engines make."""
    links: list[ChaosLink] = []

    def link_to(device: torch.device) -> ChaosLink:
        links.append(late_link(device))
        return links[-1]

    monkeypatch.setattr(build, "link_to", link_to)
    return links
