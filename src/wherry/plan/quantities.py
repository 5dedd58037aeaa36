"""Numbers as people type them, and bytes as the published tables print them."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

from wherry.config.problems import unit_missing
from wherry.errors import WherryError

GB = 10**9
# Far more than anything that is counted here.
_MOST = 10**30
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_BYTES = {
    "": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40,
}  # fmt: skip
_NUMBER = r"\d+(?:\.\d*)?(?:[eE]\+?\d{1,2})?"


def parse_count(text: str, flag: str) -> int:
    """A whole number of 1 or more, like 7.5e9, 7.5B, 350M or 1T.

    >>> parse_count("7.5B", "--params")
    7500000000
    """
    return _parse(text, flag, _COUNTS, "([KMBT]?)", "a whole number of 1 or more, like 7.5e9, 7.5B or 1T")


def parse_bytes(text: str, flag: str) -> int:
    """A number of bytes, like 32GB (10^9 bytes each) or 32GiB (2^30).

    >>> parse_bytes("32GiB", "--device-memory")
    34359738368
    """
    expected = "bytes, like 32GB or 24GiB"
    count = _parse(text, flag, _BYTES, "([KMGT]?I?)B?", expected)
    if missing := unit_missing(count, text):
        raise WherryError(f"{flag}: expected {expected}, got {text.strip()!r}{missing}")
    return count


def _parse(text: str, flag: str, units: dict[str, int], suffix: str, expected: str) -> int:
    match = re.fullmatch(rf"\s*({_NUMBER})\s*{suffix}\s*", text, re.IGNORECASE)
    if match and match[2].upper() in units:
        value = Decimal(match[1]) * units[match[2].upper()]
        if 1 <= value <= _MOST and value == int(value):
            return int(value)
    raise WherryError(f"{flag}: expected {expected}, got {text.strip()!r}")


def count_name(count: int) -> str:
    """A count with its suffix, if three decimals tell it exactly.

    >>> count_name(7_500_000_000), count_name(10**12), count_name(1_234_567)
    ('7.5B', '1T', '1,234,567')
    """
    for suffix in ("T", "B", "M"):
        unit = _COUNTS[suffix]
        if count >= unit and count * 1000 % unit == 0:
            return f"{count / unit:.3f}".rstrip("0").rstrip(".") + suffix
    return f"{count:,}"


def published_gigabytes(count: int) -> str:
    """Bytes in GB of 10^9, in the digits of the ZeRO-DP table: whole GB, cut off, from 100; else up to three figures.

    >>> [published_gigabytes(n) for n in (4_187_500_000_000, 41_250_000_000, 1_875_000_000, 117_187_500)]
    ['4187', '41.3', '1.88', '0.12']
    """
    value = Fraction(count, GB)
    if value >= 100:
        return str(int(value))
    decimals = 1 if value >= 10 else 2
    while 0 < value < Fraction(1, 10 ** (decimals - 1)) and decimals < 9:
        decimals += 1
    return rounded(value, decimals).rstrip("0").rstrip(".")


def rounded(value: Fraction, decimals: int) -> str:
    """With that many decimals, a half rounded up, as people round and as floats do not."""
    scaled = int(value * 10**decimals + Fraction(1, 2))
    whole, part = divmod(scaled, 10**decimals)
    return f"{whole}.{part:0{decimals}d}" if decimals else str(whole)


def size(count: int) -> str:
    """Bytes in GB of 10^9, or in MB below a tenth of one.

    >>> size(12_500_000), size(2_500_000_000)
    ('12.50 MB', '2.50 GB')
    """
    return f"{count / 1e9:,.2f} GB" if count >= 1e8 else f"{count / 1e6:,.2f} MB"


def seconds(value: float) -> str:
    """A time in seconds, or in milliseconds below one.

    >>> seconds(12.34), seconds(1.5), seconds(0.01016)
    ('12.3 s', '1.50 s', '10.2 ms')
    """
    return f"{value:,.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"
