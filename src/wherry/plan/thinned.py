"""Models of many equal blocks with few of them: what the others do is what their neighbours do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from wherry.config import Config

FEWEST = 3
"""Blocks at each end of a run until as much is under way as may be: of two gradients are reduced beside a third's."""


@dataclass(frozen=True)
class Run:
    """Equal blocks that follow each other in a container."""

    container: nn.Module
    start: int
    length: int

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.container.children())[self.start : self.start + self.length]

    def keep(self, count: int) -> None:
        """Leave so many of them in the model."""
        blocks = list(self.container.named_children())
        del blocks[self.start + count : self.start + self.length]
        numbered = not isinstance(self.container, nn.ModuleDict)
        self.container._modules = {str(i) if numbered else name: block for i, (name, block) in enumerate(blocks)}


def longest_run(model: nn.Module) -> Run | None:
    """The most equal blocks that follow each other in a list of modules, if there are two."""
    best: Run | None = None
    for container in model.modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        start, kinds = 0, [_kind(block) for block in container.children()]
        for place, kind in enumerate(kinds):
            if kind != kinds[start]:
                start = place
            length = place + 1 - start
            if length > (1 if best is None else best.length):
                best = Run(container, start, length)
    return best


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """What equal blocks have alike: their modules as they describe themselves, and their weights but for the values."""
    weights = ((n, p.shape, p.dtype, p.requires_grad) for n, p in (*block.named_parameters(), *block.named_buffers()))
    return repr(block), *weights


def ends(config: Config, block: nn.Module) -> int | None:
    """How many blocks at each end differ from those between them: as many as an engine looks ahead, and a few.

    None where some budget is for the whole model, so that the first blocks have what the last ones do not.
    """
    zero, activations = config.zero_optimization, config.activation_checkpointing
    offload, weights = zero.offload_optimizer, zero.offload_param
    away = activations.cpu_checkpointing or activations.nvme_path is not None
    if away or (weights.device == "nvme" and weights.max_in_cpu) or (offload.device != "none" and offload.ratio < 1):
        return None
    ahead = 0
    if zero.stage == 3:
        numel = sum(parameter.numel() for parameter in block.parameters())
        ahead = math.ceil(min(zero.stage3_prefetch_bucket_size, zero.stage3_max_live_parameters) / max(1, numel))
    for place in (offload, weights):
        if place.device == "nvme":
            ahead = max(ahead, place.buffer_count)
    return ahead + FEWEST
