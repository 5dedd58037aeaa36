"""Numbers as people type them, and bytes as the published tables print them."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction

from wherry.config.problems import unit_missing
from wherry.errors import WherryError

GB = 10**9
TB = 10**12
# Far more than anything that is counted here.
_MOST = 10**30
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_BYTES = {
    "": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40, "PI": 2**50,
}  # fmt: skip
_NUMBER = r"\d+(?:\.\d*)?(?:[eE]\+?\d{1,2})?"


def parse_count(text: str, flag: str) -> int:
    """A whole number of 1 or more, like 7.5e9, 7.5B, 350M or 1T.

    >>> parse_count("7.5B", "--params")
    7500000000
    """
    return _parse(text, flag, _COUNTS, "([KMBT]?)", "a whole number of 1 or more, like 7.5e9, 7.5B or 1T")


def parse_bytes(text: str, flag: str, most: int | None = None) -> int:
    """A number of bytes, like 32GB (10^9 bytes each) or 32GiB (2^30). With `most`, it is from 1 MB to so many.

    >>> parse_bytes("32GiB", "--device-memory")
    34359738368
    """
    expected = "bytes, like 32GB or 24GiB"
    count = _parse(text, flag, _BYTES, "([KMGTP]?I?)B?", expected)
    if missing := unit_missing(count, text):
        raise WherryError(f"{flag}: expected {expected}, got {text.strip()!r}{missing}")
    if most is not None and not 10**6 <= count <= most:
        raise WherryError(f"{flag}: expected from 1 MB to {most // TB:,} TB, got {text.strip()!r}")
    return count


def _parse(text: str, flag: str, units: dict[str, int], suffix: str, expected: str) -> int:
    match = re.fullmatch(rf"\s*({_NUMBER})\s*{suffix}\s*", text, re.IGNORECASE)
    if match and match[2].upper() in units:
        value = Decimal(match[1]) * units[match[2].upper()]
        if 1 <= value <= _MOST and value == int(value):
            return int(value)
    raise WherryError(f"{flag}: expected {expected}, got {text.strip()!r}{_one_number(text, units)}")


def _one_number(text: str, units: dict[str, int]) -> str:
    """What to write instead of a count or a size with a comma in it."""
    if re.fullmatch(r"\s*\d+,\d{1,2}\s*", text):  # of whole counts there is no half
        return without_comma(f"{text.strip()}GB") if units is _BYTES else "; give one number"
    return without_comma(text)


def without_comma(text: str) -> str:
    """What to write instead of a number with a comma in it; nothing for other text.

    >>> without_comma("7,5GB"), without_comma("1,000"), without_comma("1,000,000")
    ('; write 7.5GB', '; write 1000, or 1.000 if that is meant', '; write 1000000')
    """
    text = text.strip()
    whole, point = text.replace(",", ""), text.replace(",", ".")
    if re.fullmatch(r"\d{1,3}(,\d{3})+([^\d,].*)?", text):
        return f"; write {whole}" + (f", or {point} if that is meant" if text.count(",") == 1 else "")
    return f"; write {point}" if re.fullmatch(r"\d+,\d+([^\d,].*)?", text) else ""


def apart(text: str, flag: str, *, counts: bool = False) -> list[str]:
    """The parts of a list with commas, none of which is half of a number. `counts`: none is below a thousand.

    >>> apart("7e9,13B", "--params", counts=True)
    ['7e9', '13B']
    """
    parts = [part.strip() for part in text.split(",")]
    half = r"0\d*|\d{1,3}" if counts else r"0\d*"
    if len(parts) > 1 and any(re.fullmatch(half, part) for part in parts):
        units = ", or each with its unit, like 7B,13B" if counts else ""
        raise WherryError(
            f"{flag}: commas stand between several, so {text.strip()!r} would be {' and '.join(parts)}"
            f"{without_comma(text)}{units}"
        )
    return parts


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


def size(count: int, beside: int = 0) -> str:
    """Bytes in GB of 10^9, or, below a tenth of one, in MB; and so on. From a hundredth on, in the unit of `beside`.

    >>> size(2_500_000_000), size(12_500_000), size(8192), size(8), size(92_000_000, beside=190_000_000)
    ('2.50 GB', '12.50 MB', '8.19 KB', '8 B', '0.09 GB')
    """
    for suffix in ("G", "M", "K"):
        unit = _BYTES[suffix]
        if 10 * count >= unit or 100 * count >= unit <= 10 * beside:
            return f"{count / unit:,.2f} {suffix}B"
    return f"{count} B"


def amount(value: float) -> str:
    """A number in three digits, or more where they are whole: never none.

    >>> amount(3361.9), amount(24.0), amount(0.01234)
    ('3,362', '24', '0.0123')
    """
    if value >= 100 or not value > 0:
        return f"{value:,.0f}"
    return f"{value:.{2 - math.floor(math.log10(value))}f}".rstrip("0").rstrip(".")


def seconds(value: float) -> str:
    """A time in seconds, or in milliseconds below one, and from ten minutes on as people tell it.

    >>> seconds(12.34), seconds(1.5), seconds(0.01016), seconds(45_000)
    ('12.3 s', '1.50 s', '10.2 ms', '12.5 hours')
    """
    for unit, name in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if value >= (10 if unit == 60 else 2) * unit:
            return f"{value / unit:,.1f} {name}"
    return f"{value:,.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"
