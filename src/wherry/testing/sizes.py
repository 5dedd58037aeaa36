"""Shrink the sizes at which the engine changes its path, so that a tiny model takes the path of a large one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from wherry.errors import WherryError

SIZES = {
    # Flats up to this size share an update bucket.
    "bucket": "wherry.update.optimizer_states.BUCKET_NUMEL",
    # The host updates a large flat in pieces of this size.
    "piece": "wherry.update.optimizer_states.PIECE_NUMEL",
    # State is streamed through the device in pieces of this size.
    "streamed": "wherry.update.optimizer_states.STREAMED_NUMEL",
    # The kernels of the fallback walk a device's tensors in chunks of this size.
    "device_chunk": "wherry.native.fallback.DEVICE_CHUNK",
    # A layer with this many parameters is a unit of its own.
    "large_layer": "wherry.sharding.grouping.LARGE_LAYER",
}


@contextmanager
def small_sizes(**numel: int) -> Iterator[None]:
    """Set sizes in elements, by their names in SIZES, for engines that are built and run inside of the `with`."""
    if unknown := numel.keys() - SIZES.keys():
        raise WherryError(f"small_sizes: expected {', '.join(SIZES)}, got {', '.join(sorted(unknown))}")
    with ExitStack() as patches:
        for name, count in numel.items():
            patches.enter_context(patch(SIZES[name], count))
        yield
