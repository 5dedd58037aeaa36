"""The machines of a hostfile, and which of their devices to use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from wherry.errors import WherryError

_LINE = re.compile(r"^(?P<name>\S+)\s+slots\s*=\s*(?P<slots>\d+)\s*$")


@dataclass(frozen=True)
class Host:
    """A machine, and which of its devices (or, without any, how many processes) to use."""

    name: str
    slots: tuple[int, ...]


def read_hostfile(path: str) -> list[Host]:
    """Lines of `name slots=N`; empty lines and comments are skipped."""
    file = Path(path)
    if not file.is_file():
        raise WherryError(f"--hostfile {path}: there is no such file")
    hosts: list[Host] = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        found = _LINE.match(text)
        if found is None:
            raise WherryError(f"{path}:{number}: expected `name slots=N`, got {text!r}")
        if any(host.name == found["name"] for host in hosts):
            raise WherryError(f"{path}:{number}: {found['name']} stands in the file twice; keep one line of it")
        hosts.append(Host(found["name"], tuple(range(int(found["slots"])))))
    if not hosts:
        raise WherryError(f"{path}: the file names no host; expected lines of `name slots=N`")
    return hosts


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
            raise WherryError(f"{flag} {text}: unknown host {name!r}; the hosts are {', '.join(hosts)}")
        if colon and not all(slot.strip().isdigit() for slot in slots.split(",")):
            raise WherryError(f"{flag} {text}: expected host:0,1 with numbers of slots, got {part!r}")
        chosen = tuple(int(slot) for slot in slots.split(",")) if colon else hosts[name].slots
        missing = [slot for slot in chosen if slot not in hosts[name].slots]
        if missing:
            have = ", ".join(map(str, hosts[name].slots))
            raise WherryError(f"{flag} {text}: {name} has no slot {missing[0]}; it has {have}")
        named[name] = tuple(sorted({*named.get(name, ()), *chosen}))
    return named
