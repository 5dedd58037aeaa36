"""Hostile variants of every kind of file: the load gives the valid file's result, or one public error that names the
file, and neither runs code nor writes elsewhere nor takes absurd memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.security import hostile
from tests.security.kinds import KINDS, Kind

# Address space that a load may take: far more than it needs, and far less than a hostile size asks for.
ROOM = 2 << 30
BADS = {**hostile.BAD, **hostile.PICKLED}
# Damages of a file's bytes: a bit that is changed, and an end that is missing.
DAMAGES = 16


def _peak() -> int:
    """The most address space that this process has had, in bytes."""
    return int(re.search(r"VmPeak:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]


def _listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _mistake(kind: Kind, free: bool, valid: Any) -> str | None:
    """Load the file: what is wrong with the outcome, if anything is."""
    try:
        if kind.load() != valid:
            if not free:
                return "loaded as something else"
            kind.write(kind.tree)
            kind.load()  # what was accepted keeps no valid file from being loaded
    except kind.error as error:
        return kind.flaw(error)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "group"),
    [(name, group) for name in KINDS for group in BADS if group in hostile.BAD or "deepspeed" in name or "uni" in name],
)
def test_a_hostile_file_is_refused_or_does_no_harm(
    name: str, group: str, kind_of: Callable[[str], Kind], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = kind_of(name)
    monkeypatch.chdir(kind.folder)
    valid = kind.load()
    there, peak = _listing(kind.folder.parent), _peak()
    mistakes, count = {}, 0
    paths = [path for path in hostile.paths(kind.tree) if not re.match(kind.skipped, hostile.name(path))]
    for number, path in enumerate(paths):
        every = 3 * kind.every if re.match(kind.seldom, hostile.name(path)) else kind.every
        for rank, value in enumerate(BADS[group]):
            if (number + rank) % every or (value is hostile.REPEAT and kind.pickled):
                continue
            kind.write(hostile.changed(kind.tree, path, value))
            count += 1
            mistake = _mistake(kind, re.match(kind.free, hostile.name(path)) is not None, valid)
            if mistake is None and not _listing(kind.folder.parent) <= there:
                mistake = "has written something"
            if mistake is not None:
                mistakes[f"{hostile.name(path)}: value {rank}"] = mistake
    assert count and mistakes == {}
    assert _peak() - peak < ROOM


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_is_refused_or_does_no_harm(name: str, kind_of: Callable[[str], Kind]) -> None:
    """Files without checksums may load as something else."""
    kind = kind_of(name)
    valid, whole = kind.load(), kind.file.read_bytes()
    mistakes = {}
    for number, at in enumerate(range(0, len(whole), -(-len(whole) // DAMAGES))):
        changed = bytearray(whole)
        changed[at] ^= 1 << number % 8
        for how, damaged in (("changed", bytes(changed)), ("cut", whole[:at])):
            kind.file.write_bytes(damaged)
            mistakes[f"{how} at {at}"] = _mistake(kind, name not in ("manifest", "header"), valid)
    assert {where: mistake for where, mistake in mistakes.items() if mistake is not None} == {}
