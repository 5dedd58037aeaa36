"""A name says one thing: no two classes of the package have the same."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import wherry

PACKAGE = Path(wherry.__file__).parent
# A rule of updates is called as the optimizer that it is of.
SAID_TWICE = {"Lion"}


def test_no_two_classes_have_one_name() -> None:
    found = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        if "compat" not in path.parts:  # the alias repeats names, as that is what it is for
            for name in {name.lstrip("_") for name in re.findall(r"^class (\w+)", path.read_text(), re.M)}:
                found[name].append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1 and name not in SAID_TWICE} == {}
