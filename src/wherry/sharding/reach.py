"""The distances that a search for the right look ahead tries: what a plan must know of it without torch."""

from __future__ import annotations


def further(limit: int, step: int) -> int:
    """The distance that is tried after this one."""
    return 2 * max(limit, step)


def furthest(step: int, most: int) -> int:
    """The longest look that a search may come to.

    >>> furthest(step=100, most=1000)
    800
    """
    limit = 0
    while step and further(limit, step) <= most:
        limit = further(limit, step)
    return limit
