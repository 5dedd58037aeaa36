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
# Characters of an error, which are cut beyond.
LONGEST = 21_000


def _peak() -> int:
    """The most address space that this process has had, in bytes."""
    return int(re.search(r"VmPeak:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]


def _listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _mistake(kind: Kind, path: tuple[Any, ...], valid: Any) -> str | None:
    """Load the file: what is wrong with the outcome, if anything is."""
    try:
        if kind.load() != valid:
            if not kind.is_free(path):
                return "loaded as something else"
            kind.write(kind.tree)
            kind.load()  # what was accepted keeps no valid file from being loaded
    except kind.error as error:
        told = str(error)
        if str(kind.folder) not in told and kind.file.name not in told:
            return f"does not name its file: {told[:300]}"
        if len(told) > LONGEST or "Traceback" in told or not all(line.isprintable() for line in told.splitlines()):
            return f"is not a short message that can be printed: {told[:300]!r}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None


BADS = {**hostile.BAD, **hostile.PICKLED}


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
    paths = [path for path in hostile.paths(kind.tree) if not kind.is_skipped(path)]
    for number, path in enumerate(paths):
        for rank, value in enumerate(BADS[group]):
            if (number + rank) % kind.every or (value is hostile.REPEAT and kind.pickled):
                continue
            kind.write(hostile.changed(kind.tree, path, value))
            count += 1
            mistake = _mistake(kind, path, valid)
            if mistake is None and not _listing(kind.folder.parent) <= there:
                mistake = "has written something"
            if mistake is not None:
                mistakes[f"{'/'.join(map(str, path))}: value {rank}"] = mistake
    assert count and mistakes == {}
    assert _peak() - peak < ROOM
