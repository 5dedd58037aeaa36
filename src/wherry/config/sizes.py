"""Bytes that somebody has written without a unit."""

from __future__ import annotations

# No memory, disk or file is as small; what is asked for in GB or MB is mostly a smaller number.
FEW = 100_000


def unit_missing(count: float, written: object) -> str:
    """What to write instead of a number that is too few bytes to be meant so; nothing of any other.

    >>> unit_missing(5, 5)
    '; that is 5 bytes: write 5GB or 5MB, or 5B if bytes are meant'
    """
    if not 0 < count < FEW or not str(written).strip()[-1:].isdigit():
        return ""
    number = str(written).strip()
    meant = f"{count:,.0f} byte{'s' * (count != 1)}"
    return f"; that is {meant}: write {number}GB or {number}MB, or {number}B if bytes are meant"
