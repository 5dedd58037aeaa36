"""A config on its way from what was written to what is validated, with everything to say about it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from wherry.config.fields import Block, about, asks_for_something, block_of, differs, field_of, takes_auto
from wherry.config.problems import Problem
from wherry.config.source import Source
from wherry.config.text import KeyPath

_OVERRIDE: KeyPath = ("<override>",)


class Draft:
    """The tree of keys being brought into shape. Every step works on it and notes what it found."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.tree: dict[str, Any] = copy.deepcopy(source.given)
        self.problems: list[Problem] = list(source.problems)
        self.notes: list[str] = []
        # Of the notes, those of keys without effect, and how to name the key to whoever is told in one line of all.
        self.idle: dict[str, str] = {}
        self.autos: list[str] = []
        self.bad: set[KeyPath] = {tuple(problem.path.split(".")) for problem in source.problems}
        self._written_as: dict[KeyPath, KeyPath] = {}

    # --- speaking about keys ---

    def problem(self, path: KeyPath, message: str) -> None:
        """Note a mistake at a key, on the line where the user wrote it."""
        written = self._written(path)
        if written == _OVERRIDE:
            message, line = f"{message} (given as an override)", None
        else:
            line = self.source.lines.of(written)
        self.problems.append(Problem(".".join(path), line, message))
        self.bad.add(path)

    def note(self, path: KeyPath, message: str) -> None:
        self.notes.append(f"{'.'.join(path)}: {message}")

    def note_idle(self, path: KeyPath, message: str, named: str) -> None:
        self.note(path, message)
        self.idle[self.notes[-1]] = named

    def is_bad(self, path: KeyPath) -> bool:
        """Whether a key, a block around it, or something in it already has a problem."""
        return any(path[: len(bad)] == bad or bad[: len(path)] == path for bad in self.bad)

    def _written(self, path: KeyPath) -> KeyPath:
        for end in range(len(path), 0, -1):
            if path[:end] in self._written_as:
                origin = self._written_as[path[:end]]
                return origin if origin == _OVERRIDE else origin + path[end:]
        return path

    # --- reaching into the tree ---

    def get(self, path: KeyPath) -> Any:
        """The value at a path, or None."""
        value: Any = self.tree
        for name in path:
            if not isinstance(value, dict) or name not in value:
                return None
            value = value[name]
        return value

    def put(self, path: KeyPath, value: Any, written_as: KeyPath) -> bool:
        """Set a value, making blocks on the way. False when something that is no block is in the way."""
        inner = self.tree
        for name in path[:-1]:
            if inner.get(name) in (None, "auto"):
                inner[name] = {}
            if not isinstance(inner[name], dict):
                return False
            inner = inner[name]
        inner[path[-1]] = value
        self._written_as[path] = written_as
        return True

    def remove(self, path: KeyPath) -> bool:
        """Take a key out, or the innermost key on the way to it that is there."""
        inner: Any = self.tree
        holder: dict[str, Any] | None = None
        last = ""
        for name in path:
            if not isinstance(inner, dict) or name not in inner:
                break
            holder, last, inner = inner, name, inner[name]
        if holder is None:
            return False
        del holder[last]
        return True

    # --- the steps ---

    def spread_dotted_keys(self) -> None:
        """`"zero_optimization.stage": 2` at the top means the key inside the block."""
        for name in [name for name in self.tree if "." in name]:
            path = tuple(name.split("."))
            value = self.tree.pop(name)
            present = self.get(path)
            if present not in (None, "auto"):
                if present != value:
                    self.note(path, f'has {present} in its block, so "{name}": {value} at the top is left aside')
            elif not self.put(path, value, written_as=(name,)):
                self.problem(path[:1], f'expected an object, as "{name}" is given too')

    def override(self, overrides: Mapping[str, Any], prefix: KeyPath = ()) -> None:
        """Lay values over the file's; a key may be dotted."""
        for name, value in overrides.items():
            path = (*prefix, *str(name).split("."))
            if isinstance(value, Mapping):
                self.override(value, path)
            elif not self.put(path, copy.deepcopy(value), written_as=_OVERRIDE):
                self.problem(path, "cannot be set: what is around it is not an object")

    def settle(self, model: type[Block], path: KeyPath = (), *, quiet: bool = False) -> None:
        """Take out "auto", null and refused keys, and note the keys without effect."""
        tree = self.tree if not path else self.get(path)
        if not isinstance(tree, dict):
            return
        for name in list(tree):
            field = field_of(model, name)
            if field is not None:
                self._settle_key(tree, name, field, (*path, name), quiet)

    def _settle_key(self, tree: dict[str, Any], name: str, field: Any, path: KeyPath, quiet: bool) -> None:
        value, effect = tree[name], about(field, "effect")
        if value is None:
            del tree[name]
        elif effect == "refused":
            self._refuse(path, field, value)
            del tree[name]
        elif value == "auto" and not takes_auto(field):
            self.autos.append(".".join(path))
            del tree[name]
        else:
            if effect == "none" and not quiet:
                named = ".".join(path) if differs(field, value) else ""
                self.note_idle(path, f"no effect here: {about(field, 'why')}", named)
            inner = block_of(field)
            if inner is not None:
                self.settle(inner, path, quiet=quiet or effect == "none")

    def _refuse(self, path: KeyPath, field: Any, value: Any) -> None:
        if asks_for_something(field, value) and value != "auto":
            self.problem(path, f"not part of Wherry: {about(field, 'why')}")
        else:
            self.note(path, "not part of Wherry; accepted, as it asks for nothing")

    def settle_free(self, path: KeyPath) -> None:
        """As `settle`, for a block whose keys the schema does not list."""
        tree = self.get(path)
        for name in list(tree) if isinstance(tree, dict) else ():
            if tree[name] is None:
                del tree[name]
            elif tree[name] == "auto":
                self.autos.append(".".join((*path, name)))
                del tree[name]
