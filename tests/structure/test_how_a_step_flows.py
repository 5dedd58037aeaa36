"""Every file and every name that docs/how-a-step-flows.md tells of is there."""

from __future__ import annotations

import ast
import re

import pytest
from tests.structure.imports import PACKAGE

PAGE = (PACKAGE.parents[1] / "docs" / "how-a-step-flows.md").read_text()
TOLD = re.findall(r"`([\w/]+\.py)`(?:[,\s]+\(?`(\w+(?:\.\w+)?)`)?|`(\w+(?:\.\w+)?)`", PAGE)
# Words of the page that are no names of the code's.
OTHERS = {"src/wherry", "initialize"}


def defined() -> dict[str, set[str]]:
    """By file: its classes, functions, and methods as `Class.method`."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        names = found.setdefault(str(path.relative_to(PACKAGE)), set())
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.add(node.name)
            if isinstance(node, ast.ClassDef):
                names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


NAMES = defined()


@pytest.mark.parametrize("file", sorted({file for file, _, _ in TOLD if file}))
def test_a_file_is_there(file):
    assert file in NAMES


@pytest.mark.parametrize(("file", "name"), sorted({(file, name) for file, name, _ in TOLD if name}))
def test_a_file_has_the_name_that_stands_behind_it(file, name):
    assert name in NAMES[file]


@pytest.mark.parametrize("name", sorted({name for _, _, name in TOLD if "." in name}))
def test_a_method_that_is_named_by_itself_is_somewhere(name):
    assert any(name in names for names in NAMES.values())


def test_the_page_is_two_pages_and_names_many_files():
    assert len(PAGE.split()) < 1200
    assert len({file for file, _, _ in TOLD if file}) > 20
