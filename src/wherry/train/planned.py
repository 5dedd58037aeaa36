"""GPT-2s of a shape as plans run them: the model with a micro-batch, whole or one rank's part of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from wherry.plan.grid import Grid
from wherry.plan.parts import cut
from wherry.train.model import GPT, GPTConfig, loss_of
from wherry.train.parallel import CUT, Stage
from wherry.train.presets import Shape


def part_of(
    shape: Shape, grid: Grid, dtype: torch.dtype | None, micro_batch: int, sequence: int
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """One stage's blocks, with what a tensor-parallel rank has of their matrices."""
    shape.check_grid(grid)
    shape = dataclasses.replace(shape, sequence=max(shape.sequence, sequence))
    model = GPT(GPTConfig.of(shape, tied=grid.pipe == 1))
    if grid.tensor > 1:
        cut(model, {f"*.{name}": style for name, style in CUT.items()}, grid.tensor)
    ids = torch.zeros(micro_batch, sequence, dtype=torch.int64)
    if grid.pipe == 1:
        return model, (ids, ids)
    stage = Stage(model, grid.stage, grid.pipe)
    came = torch.zeros(micro_batch, sequence, shape.hidden, dtype=dtype, requires_grad=True)
    first = ids if stage.first else came
    return (_StageWithLoss(stage, loss_of), (first, ids)) if stage.last else (stage, (first,))


class _StageWithLoss(nn.Module):
    """A pipeline's last stage, whose outputs meet the labels."""

    def __init__(self, stage: nn.Module, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.stage, self.loss = stage, loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.stage(x), labels)
