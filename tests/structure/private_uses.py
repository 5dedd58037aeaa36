"""Private names of the package that tests use: python -m tests.structure.private_uses --update stores their counts."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
ALLOWED = Path(__file__).with_name("private_uses.json")
# Functions that take a name as a string.
NAMING = {"setattr", "delattr", "getattr", "hasattr", "object", "patch", "import_module"}


PRIVATE_WORD = re.compile(r"((?<!self)(?<!torch)(?<!cls)\.|import |, |^ {4}|['\"])_(?!_)\w", re.M)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _has_private_part(dotted: str) -> bool:
    return dotted.split(".")[0] == "wherry" and any(map(is_private, dotted.split(".")))


def _imported(nodes: list[ast.AST]) -> set[str]:
    """Local names of the package's modules, classes and functions."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "wherry":
                    names.add(alias.asname or "wherry")
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "wherry":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _root(node: ast.AST) -> str | None:
    """The name that an expression of attributes, calls and subscripts begins with."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _strings(nodes: list[ast.expr]) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def private_uses(text: str) -> Iterator[str]:
    """Every import, attribute, and string of a patch that names a private part of the package."""
    if "wherry" not in text or not PRIVATE_WORD.search(text):
        return  # most files: parsing takes its time
    nodes = list(ast.walk(ast.parse(text)))
    ours = _imported(nodes)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _has_private_part(alias.name))
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if _has_private_part(name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and _root(node) in ours:
            yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if called in NAMING:
                yield from filter(_has_private_part, _strings(node.args))
                if node.args and _root(node.args[0]) in ours:
                    yield from filter(is_private, _strings(node.args))
        elif isinstance(node, ast.Tuple) and any(_root(each) in ours for each in node.elts):
            yield from filter(is_private, _strings(node.elts))  # a row of a table of patches


def counts(part: slice = slice(None)) -> dict[str, int]:
    """By file, uses of private names; `part`: of the files in the order of their names."""
    found = {}
    for path in sorted(TESTS.rglob("*.py"))[part]:
        name = str(path.relative_to(TESTS))
        if not name.startswith("mutants/"):
            found[name] = sum(1 for _ in private_uses(path.read_text()))
    return {name: count for name, count in found.items() if count}


if __name__ == "__main__":
    uses = counts()
    if "--update" in sys.argv:
        ALLOWED.write_text(json.dumps(uses, indent=1) + "\n")
    print(sum(uses.values()), "uses in", len(uses), "files")
