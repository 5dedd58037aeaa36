"""Which file imports which, and whether there are circles: python -m tests.structure.imports."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "wherry"


def modules() -> dict[str, Path]:
    """Every file of the package by its module's name."""
    files = [path for path in PACKAGE.rglob("*.py") if "alias" not in path.parts]
    return {
        ".".join(("wherry", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in files
    }


def imported(path: Path, known: Mapping[str, Path], *, at_once: bool) -> Iterator[str]:
    """The package's modules that a file imports, but for types alone; `at_once`: when it is imported itself."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if at_once and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
            if any(name in known for name in names[:-1]):
                names.pop()  # a module of the package, and not what its __init__ has
        else:
            names = []
        yield from (name for name in names if name in known and name != "wherry")
        # Imports are statements: expressions, which are most of a tree, hold none.
        waiting += (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Modules that reach each other, by Tarjan's strongly connected components."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            circle = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def room(module: str) -> str:
    """The folder that a module is in, or its own name at the root."""
    return module.split(".")[1] if "." in module else ""


def circles_of_rooms(*, at_once: bool) -> list[list[str]]:
    known = modules()
    graph = {name: set(imported(path, known, at_once=at_once)) - {name} for name, path in known.items()}
    return [circle for circle in circles(graph) if len({room(name) for name in circle}) > 1]


if __name__ == "__main__":
    for at_once in (True, False):
        print("imported at once:" if at_once else "and in functions:")
        for circle in circles_of_rooms(at_once=at_once):
            print("  ", *circle)
    sys.exit(bool(circles_of_rooms(at_once=False)))
