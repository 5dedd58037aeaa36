"""Parameters that are parts of one that the model had: where each lies in the whole, for whoever names or stores it.

A module that is cut so has a true `cut_into_tiles`, and a method `places`, which gives the place of each of its
parameters by its name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Place:
    """Where a tile's parameter lies in that of the whole layer."""

    whole: str
    whole_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[tuple(slice(o, o + n) for o, n in zip(self.offsets, self.shape, strict=True))]


def tile_places(model: nn.Module) -> dict[str, Place]:
    """For each tile's parameter, by its name in `model`, where it lies, with the whole's name in `model`."""
    found: dict[str, Place] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if getattr(module, "cut_into_tiles", False):
            dot = prefix + "." if prefix else ""
            for name, place in module.places().items():
                found[dot + name] = Place(dot + place.whole, place.whole_shape, place.offsets, place.shape)
    return found
