"""A config as it was written, brought to the keys that are read: dotted keys, overrides, older spellings."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from wherry.config.fields import to_flag
from wherry.config.problems import MOST, Problem, config_error
from wherry.config.source import ConfigSource, KeyPath
from wherry.config.without_effect import IdleKey, idle_keys

_OVERRIDE: KeyPath = ("<override>",)
_ZERO = "zero_optimization"


class Draft:
    """The tree of keys, with overrides laid over it and older spellings read, and everything there is to say of it."""

    def __init__(self, source: ConfigSource, overrides: Sequence[Mapping[str, Any]] = ()) -> None:
        self.source = source
        self.overrides = list(overrides)
        self.tree: dict[str, Any] = copy.deepcopy(source.given)
        self.problems: list[Problem] = list(source.lines.problems)
        self._stop_at_many()
        self.notes: list[str] = []
        # Of the notes, those of keys without effect, and how to name the key to whoever is told in one line of all.
        self.idle: dict[str, str] = {}
        self.autos: list[str] = []
        self.chosen: list[str] = []  # keys that were "auto", and what they are has been found from others
        self.without_effect: dict[KeyPath, Any] = {}  # the checked values of keys that have none
        self.bad: set[KeyPath] = {tuple(problem.path.split(".")) for problem in self.problems}
        self._written_as: dict[KeyPath, KeyPath] = {}
        self._spread_dotted_keys()
        for layer in overrides:
            self._override(layer)
        self.written = copy.deepcopy(self.tree)
        self._read_older_spellings()

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
        self._stop_at_many()

    def _stop_at_many(self) -> None:
        if len(self.problems) >= MOST:
            raise config_error(self.problems, self.source.name)

    def problem_once(self, path: KeyPath, message: str) -> None:
        """The same, but that one mistake brings no second one with it."""
        if not self.is_bad(path):
            self.problem(path, message)

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
        return _at(self.tree, path)

    def _put(self, path: KeyPath, value: Any, written_as: KeyPath) -> bool:
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

    # --- the steps ---

    def _spread_dotted_keys(self) -> None:
        """`"zero_optimization.stage": 2` at the top means the key inside the block."""
        for name in [name for name in self.tree if "." in name]:
            path = tuple(name.split("."))
            value = self.tree.pop(name)
            present = self.get(path)
            if present not in (None, "auto"):
                if present != value:
                    self.note(path, f'has {present} in its block, so "{name}": {value} at the top is left aside')
            elif not self._put(path, value, written_as=(name,)):
                self.problem(path[:1], f'expected an object, as "{name}" is given too')

    def _override(self, overrides: Mapping[str, Any], prefix: KeyPath = ()) -> None:
        """Lay values over the file's; a key may be dotted."""
        for name, value in overrides.items():
            path = (*prefix, *str(name).split("."))
            if isinstance(value, Mapping):
                self._override(value, path)
            elif not self._put(path, copy.deepcopy(value), written_as=_OVERRIDE):
                self.problem(path, "cannot be set: what is around it is not an object")

    def _read_older_spellings(self) -> None:
        """Move every older spelling to the key it means, with a note; both at once is a problem."""
        self._move_bfloat16()
        value = self.tree.get(_ZERO)
        if isinstance(value, bool):
            self.tree[_ZERO] = {"stage": int(value)}
            self.note((_ZERO,), f"{str(value).lower()} is read as stage {int(value)}")
        before = copy.deepcopy(self.tree)
        for row in idle_keys().values():
            if row.effect == "renamed" and row.path != "bfloat16":
                self._move(row, before)
        self._share_pin_memory()

    def _move_bfloat16(self) -> None:
        """A spelling of a whole block, moved before the keys inside it."""
        if self.tree.get("bfloat16") is None:
            return
        value = self.tree.pop("bfloat16")
        if self.tree.get("bf16") is not None:
            self.problem(("bfloat16",), 'is another spelling of "bf16", which is given too; remove one of the two')
            return
        self._put(("bf16",), value, written_as=("bfloat16",))
        self.note(("bfloat16",), 'read as "bf16"')

    def _move(self, row: IdleKey, before: dict[str, Any]) -> None:
        old, new = tuple(row.path.split(".")), tuple(row.why.split("."))
        parent = self.get(old[:-1])
        value = parent.pop(old[-1], None) if isinstance(parent, dict) else None
        if value in (None, "auto"):
            return
        # An older flag for a device stands for the whole block that came in its place.
        newer = new[:-1] if new[-1] == "device" else new
        if _at(before, newer) not in (None, "auto"):
            told = f'is an older spelling of "{".".join(newer)}", which is given too; remove the older one'
            self.problem(old, told)
            return
        try:
            meant = _meant(new[-1], value)
        except ValueError as error:
            self.problem(old, str(error))
            return
        if meant is not None and self._put(new, meant, written_as=old):
            self.note(old, f'older spelling, read as "{row.why}"')

    def _share_pin_memory(self) -> None:
        """The older key for page-locked memory stood for both states."""
        written = self.source.given.get(_ZERO)
        parameters = self.get((_ZERO, "offload_param"))
        if isinstance(written, dict) and isinstance(parameters, dict) and "cpu_offload_use_pin_memory" in written:
            parameters.setdefault("pin_memory", written["cpu_offload_use_pin_memory"])


def _meant(newer: str, value: Any) -> Any:
    """What the value of an older key is as that of the newer one; None where it asks for nothing."""
    if newer == "device":
        return "cpu" if to_flag(value) else "none"
    if newer == "communication_data_type":
        return "fp32" if to_flag(value) else None
    return value


def _at(tree: Any, path: KeyPath) -> Any:
    for name in path:
        if not isinstance(tree, dict):
            return None
        tree = tree.get(name)
    return tree
