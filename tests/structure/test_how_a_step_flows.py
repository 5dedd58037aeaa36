"""docs/how-a-step-flows.md names files, and names in them, that are there."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "wherry"
PAGE = (PACKAGE.parents[1] / "docs" / "how-a-step-flows.md").read_text()
# A file, with the name behind it if there is one; or a name by itself.
NAMED = re.findall(r"`([\w/]+\.py)`(?:[,\s]+\(?`(\w+(?:\.\w+)?)`)?|`(\w+(?:\.\w+)?)`", PAGE)


def defined() -> dict[str, set[str]]:
    """By file: its classes, functions, and methods as `Class.method`."""
    names: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        of_file, owner = names.setdefault(str(path.relative_to(PACKAGE)), set()), ""
        for indent, kind, name in re.findall(r"^( {4})?(?:async )?(class|def) (\w+)", path.read_text(), re.M):
            if indent:
                of_file.add(f"{owner}.{name}")
            else:
                of_file.add(name)
                owner = name if kind == "class" else ""
    return names


def test_the_page_names_what_is_there():
    names = defined()
    files = {file for file, _, _ in NAMED if file}
    assert files - names.keys() == set()
    assert {(file, name) for file, name, _ in NAMED if name and name not in names.get(file, ())} == set()
    methods = {name for _, _, name in NAMED if "." in name}
    assert methods - set().union(*names.values()) == set()
    assert len(files) > 20 and methods
