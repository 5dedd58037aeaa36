"""`TiledMLP` and its kin: a part of a model that is run over the sequence tile by tile, and again in the backward.

Each tile is a checkpoint of its own, so that one tile's activations are there at a time. Gradients are those of the
whole, and the engine takes them as those of any other part: nothing needs to be told of `compute_params`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from wherry.activations.recompute import recomputed
from wherry.errors import WherryError


class CannotTile(WherryError, ValueError):
    """Tensors that do not go together, or a reduction that there is not."""


def _tile(fn: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Computed again in the backward, inside another checkpoint as well: or all tiles would be there at once."""
    return recomputed(fn, args, kwargs) if torch.is_grad_enabled() else fn(*args, **kwargs)


def _reduced(results: Sequence[torch.Tensor], reduction: str | None, dim: int) -> torch.Tensor:
    joined = torch.stack(list(results)) if dim == 0 else torch.cat(list(results), dim)
    if reduction is None:
        return joined
    if reduction not in ("mean", "sum"):
        raise CannotTile(f"output_reduction: expected mean, sum or None, got {reduction!r}")
    return joined.mean() if reduction == "mean" else joined.sum()


class TiledMLP:
    """`TiledMLP.apply(forward, mlp, x, shards, compute_params)`: the MLP over the sequence, in so many tiles."""

    @staticmethod
    def apply(
        fn: Callable[[Any, torch.Tensor], torch.Tensor], module: Any, x: torch.Tensor, shards: int,
        compute_params: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        return torch.cat([_tile(fn, module, tile) for tile in x.chunk(shards, -2)], -2)


class TiledFusedLogitsLoss:
    """The logits and their loss, tile by tile: all logits at once are nowhere.

    `TiledFusedLogitsLoss.apply(loss_fn, module, x, y, mask, shards, compute_params, output_reduction)`
    """

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor], module: Any, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None,
        shards: int, compute_params: Any = None, output_reduction: str = "mean",
    ) -> torch.Tensor:  # fmt: skip
        if output_reduction not in ("mean", "sum"):
            raise CannotTile(f"output_reduction: expected mean or sum, got {output_reduction!r}")
        if x.dim() < 2 or y.dim() < 2 or x.shape[:2] != y.shape[:2]:
            raise CannotTile(
                f"x and y: expected a batch and a sequence of the same sizes, got {list(x.shape)} and {list(y.shape)}"
            )
        if mask is not None and mask.shape != x.shape[:2]:
            raise CannotTile(f"mask: expected the sizes {list(x.shape[:2])} of x, got {list(mask.shape)}")
        given = [x, y] if mask is None else [x, y, mask]
        tiles = zip(*(tensor.flatten(0, 1).chunk(shards) for tensor in given), strict=True)
        return _reduced([_tile(fn, module, *tile) for tile in tiles], output_reduction, 0)


class SequenceTiledCompute:
    """What `sequence_tiled_compute` comes to, with the keys and the values of its arguments apart."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor], seqlen: int, shards: int, keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str], grad_requiring_tensor_key: str, compute_params: Any,
        output_unshard_dimension: int, output_reduction: str | None, *args: Any,
    ) -> torch.Tensor:  # fmt: skip
        cut, whole = args[: len(keys_to_shard)], args[len(keys_to_shard) :]
        return sequence_tiled_compute(
            fn, seqlen, shards, dict(zip(keys_to_shard, cut, strict=True)), dict(zip(keys_to_pass, whole, strict=True)),
            grad_requiring_tensor_key, compute_params, output_unshard_dimension, output_reduction,
        )  # fmt: skip


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
    """`fn` with some arguments in `shards` tiles of their second dim, the sequence; the results joined and reduced."""
    step = -(-seqlen // shards)
    tiles = [
        _tile(fn, **{key: value[:, at : at + step] for key, value in kwargs_to_shard.items()}, **kwargs_to_pass)
        for at in range(0, seqlen, step)
    ]
    return _reduced(tiles, output_reduction, output_unshard_dimension)
