"""`deepspeed.runtime.sequence_parallel.ulysses_sp`: run a part of a model over the sequence, tile by tile.

Each tile is recomputed in the backward, so that one tile's activations exist at a time. The engine reduces gradients
of tiles as those of any other part; `compute_params` is accepted and not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from wherry.activations.recompute import recomputed
from wherry.errors import WherryError


class UnknownReduction(WherryError, ValueError):
    """A reduction other than mean, sum or None."""


def _tile(fn: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run a tile as a checkpoint, inside another checkpoint too, which would else hold all tiles at once."""
    return recomputed(fn, args, kwargs) if torch.is_grad_enabled() else fn(*args, **kwargs)


class TiledMLP:
    """An MLP run over the sequence in tiles."""

    @staticmethod
    def apply(
        fn: Callable[[Any, torch.Tensor], torch.Tensor], module: Any, x: torch.Tensor, shards: int,
        compute_params: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        return torch.cat([_tile(fn, module, tile) for tile in x.chunk(shards, -2)], -2)


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, torch.Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Any = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """Run `fn` on `shards` tiles of the sequence, the second dim of some arguments; join and reduce the results."""
    if output_reduction not in ("mean", "sum", None):
        raise UnknownReduction(
            f"sequence_tiled_compute: output_reduction: expected mean, sum or None, got {output_reduction!r}"
        )
    step = -(-seqlen // shards)
    tiles = [
        _tile(fn, **{key: value[:, at : at + step] for key, value in kwargs_to_shard.items()}, **kwargs_to_pass)
        for at in range(0, seqlen, step)
    ]
    dim = output_unshard_dimension
    joined = torch.stack(tiles) if dim == 0 else torch.cat(tiles, dim)
    return getattr(joined, output_reduction)() if output_reduction else joined
