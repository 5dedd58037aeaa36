"""The norm of the gradients, and the one multiplier that unscales, averages and clips them."""

from __future__ import annotations

import math

import torch

from wherry import native

# Off the host, norms are taken by blocks of this many elements and then summed in float64: the sum then does not depend
# on how a flat is cut into shards.
BLOCK = 128


def sum_squares(tensor: torch.Tensor) -> float | torch.Tensor:
    """The sum of squares in float64. On a device the result stays there: nothing waits for it."""
    if tensor.dtype == torch.float64:
        return tensor.square().sum()
    if tensor.device.type == "cpu":
        return native.sum_squares(tensor)
    return torch.linalg.vector_norm(tensor.view(-1, BLOCK), dim=1, dtype=torch.float32).double().square().sum()


def norm_and_multiplier(total_squares: float, scale: float, max_norm: float) -> tuple[float, float]:
    """The norm of the gradients times `scale`, and `scale` lowered to keep that norm within `max_norm` (0: no limit).

    >>> norm_and_multiplier(25.0, scale=1.0, max_norm=0.0)
    (5.0, 1.0)
    """
    norm = math.sqrt(total_squares) * scale if total_squares >= 0 else math.nan
    if max_norm > 0:
        return norm, scale * min(1.0, max_norm / (norm + 1e-6)) if norm == norm else math.nan
    return norm, scale
