"""How much updates take at a time: what a plan must know of it without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

BUCKET_NUMEL = 1 << 18
"""Flats together up to this many elements are updated in one call: below it, calling costs more than updating."""


def records_at_once(records: Iterable[int], count: int) -> int:
    """The most that so many records come to at a time.

    >>> records_at_once([10, 30, 20], 2)
    50
    """
    return sum(sorted(records, reverse=True)[:count])


def records_waiting(depth: int) -> int:
    """Records whose gradients may be there for updates in a backward, which waits with the next one's in hand.

    >>> records_waiting(depth=4)
    9
    """
    return 2 * depth + 1


def weights_at_once(shards: Sequence[int], buffers: int, updated: int, *, beside: bool) -> int:
    """The most bytes of host memory for weights on disk, whose shards have these sizes.

    There is room for `buffers` of the largest: what is read ahead, in use, or kept. What is `updated` at a time is in
    use whatever the room is; where updates run `beside` a forward, all of the room may be read ahead by then.

    >>> weights_at_once([10] * 100, buffers=5, updated=4, beside=True)
    80
    """
    count = buffers - 1 + max(1, updated) if beside else max(buffers, updated)
    return min(sum(shards), count * max(shards, default=0))
