"""The machines of a hostfile, and which of their devices to use."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from wherry.errors import WherryError
from wherry.regular import read_regular

MOST_SLOTS = 1024
_MOST_BYTES = 1 << 20
_LINE = re.compile(r"(?P<name>\S+)\s+slots\s*=\s*(?P<slots>\S+)")
# As ssh takes it: user@name, name or address. What begins with - would be an option of ssh's.
_NAME = re.compile(r"[A-Za-z0-9_\[:][A-Za-z0-9_.:%@\[\]-]{0,254}")


@dataclass(frozen=True)
class Host:
    """A machine, and which of its devices (or, without any, how many processes) to use."""

    name: str
    slots: tuple[int, ...]


def whole_number(text: str, most: int) -> int | None:
    """A number from 1 to `most` in plain digits, or None.

    >>> whole_number("8", 8), whole_number("0", 8), whole_number("9", 8), whole_number("eight", 8)
    (8, None, None, None)
    """
    # Python reads other scripts' digits too, and refuses to read thousands of them.
    if not re.fullmatch("[0-9]{1,9}", text):
        return None
    return int(text) if 1 <= int(text) <= most else None


@functools.cache
def _slots(count: int) -> tuple[int, ...]:
    return tuple(range(count))


def read_hostfile(path: str) -> list[Host]:
    """Lines of `name slots=N`; empty lines and comments are skipped."""
    try:
        text = read_regular(path, _MOST_BYTES).decode()
    except FileNotFoundError:
        raise WherryError(f"--hostfile {path}: there is no such file") from None
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise WherryError(
            f"{path}:{number}: expected text in UTF-8, got the byte {error.object[error.start]:#04x}"
        ) from None
    except OSError as error:
        raise WherryError(f"--hostfile {path}: {error.strerror}") from error
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split("#")[0].strip()
        if not words:
            continue
        found = _LINE.fullmatch(words)
        if found is None:
            raise WherryError(f"{path}:{number}: expected `name slots=N`, got {_short(words)}")
        name, slots = found["name"], whole_number(found["slots"], MOST_SLOTS)
        if not _NAME.fullmatch(name):
            raise WherryError(
                f"{path}:{number}: expected a host's name or address (letters, digits and . - _ : @, a letter or digit "
                f"first), got {_short(name)}"
            )
        if slots is None:
            raise WherryError(
                f"{path}:{number}: slots: expected a number from 1 to {MOST_SLOTS}, got {_short(found['slots'])}"
            )
        if name in hosts:
            raise WherryError(f"{path}:{number}: {name} stands in the file twice; keep one line of it")
        hosts[name] = Host(name, _slots(slots))
    if not hosts:
        raise WherryError(f"{path}: the file names no host; expected lines of `name slots=N`")
    return list(hosts.values())


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "...")


def select(hosts: list[Host], include: str, exclude: str) -> list[Host]:
    """The hosts and slots that are left after `--include` or `--exclude`.

    >>> select([Host("a", (0, 1)), Host("b", (0, 1))], "", "b:0")
    [Host(name='a', slots=(0, 1)), Host(name='b', slots=(1,))]
    """
    if include and exclude:
        raise WherryError("--include and --exclude cannot be given together; give one of them")
    if not include and not exclude:
        return hosts
    flag = "--include" if include else "--exclude"
    named = _parse_filter(flag, include or exclude, {host.name: host for host in hosts})
    left = [
        Host(host.name, tuple(slot for slot in host.slots if (slot in named.get(host.name, ())) is bool(include)))
        for host in hosts
    ]
    left = [host for host in left if host.slots]
    if not left:
        raise WherryError(f"{flag} {include or exclude}: no slot is left")
    return left


def _parse_filter(flag: str, text: str, hosts: dict[str, Host]) -> dict[str, tuple[int, ...]]:
    named: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        name, colon, slots = part.partition(":")
        if name not in hosts:
            raise WherryError(f"{flag} {_short(text)}: unknown host {_short(name)}; the hosts are {', '.join(hosts)}")
        if colon and not all(re.fullmatch("[0-9]{1,9}", slot.strip()) for slot in slots.split(",")):
            raise WherryError(f"{flag} {_short(text)}: expected host:0,1 with numbers of slots, got {_short(part)}")
        chosen = tuple(int(slot) for slot in slots.split(",")) if colon else hosts[name].slots
        missing = [slot for slot in chosen if slot not in hosts[name].slots]
        if missing:
            have = ", ".join(map(str, hosts[name].slots))
            raise WherryError(f"{flag} {_short(text)}: {name} has no slot {missing[0]}; it has {have}")
        named[name] = tuple(sorted({*named.get(name, ()), *chosen}))
    return named
