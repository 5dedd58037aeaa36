"""GPT-2 in plain PyTorch: it knows nothing of how its states are placed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wherry.activations.recompute import checkpoint
from wherry.nn.gelu import GeluLinear
from wherry.train.presets import Shape


@dataclass(frozen=True)
class GPTConfig(Shape):
    """The shape of the model, and how its activations are kept."""

    checkpoint_activations: bool = False
    # Whether the head is the token embedding. Pipeline stages, which hold one of the two each, have them apart.
    tied: bool = True

    @classmethod
    def of(cls, shape: Shape, *, checkpoint_activations: bool = False, tied: bool = True) -> GPTConfig:
        return cls(**asdict(shape), checkpoint_activations=checkpoint_activations, tied=tied)


class Attention(nn.Module):
    """Causal self-attention over all heads at once, or over those that a tensor-parallel rank has."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.width = config.hidden // config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        # By head, and then query, key and value: a cut among ranks leaves each whole heads.
        qkv = self.qkv(x).view(batch, length, -1, 3, self.width)
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(3))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = GeluLinear(4 * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class Block(nn.Module):
    """Attention, then MLP, each on a normalised residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """GPT-2: learned positions, pre-norm blocks, and a head tied to the token embedding.

    >>> model = GPT(GPTConfig(layers=2, hidden=64, heads=2))
    >>> loss = model(ids, labels)        # both (batch, length), int64
    >>> logits = model(ids)              # (batch, length, vocabulary)
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(config.sequence, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        self._initialize()

    def _initialize(self) -> None:
        # GPT-2's scheme: what is added to the residual stream starts smaller the more layers add to it.
        residual = 0.02 / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and not (module is self.head and self.config.tied):
                nn.init.normal_(module.weight, std=residual if name.endswith(("out", "down")) else 0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def get_output_embeddings(self) -> nn.Linear:
        """As Transformers' models say which layer makes logits."""
        return self.head

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        length = ids.shape[1]
        if length > self.config.sequence:
            raise ValueError(
                f"GPT: the input is {length} tokens long and the model has {self.config.sequence} positions; "
                "build it with a longer sequence"
            )
        x = self.tokens(ids) + self.positions(torch.arange(length, device=ids.device))
        x = through(self.blocks, x, self.config)
        logits = self.head(self.norm(x))
        return logits if labels is None else loss_of(logits, labels)


def through(blocks: Iterable[nn.Module], x: Tensor, config: GPTConfig) -> Tensor:
    """The residual stream behind some blocks."""
    for block in blocks:
        x = checkpoint(block, x) if config.checkpoint_activations and torch.is_grad_enabled() else block(x)
    return x


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy over all tokens, in fp32."""
    return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.reshape(-1))
