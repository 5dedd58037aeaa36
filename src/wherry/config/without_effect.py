"""Keys that are known and do nothing here: the table `without_effect.csv`, one row a key, with the reason.

A row's `effect` is what becomes of the key. `none`: its value is checked, and nothing comes of it; `fine` is a value
that asks for what is so anyway. `renamed`: an older or other spelling, read as the key `why`. `refused`: an error,
unless it asks for nothing, as null, false, what is empty, and `fine` do, and a block whose key `switch` is not true.
What hints at speed, memory or logging has no effect; what would change results, or what is saved, is refused.
`of` names the optimizers that have a parameter, where not all do.
"""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import Field, TypeAdapter

from wherry.config.fields import Bucket, Bytes, Dtype, Flag, Integer, Number, Size, Text

_TYPES: dict[str, Any] = {
    "flag": Flag,
    "integer": Integer,
    "size": Size,
    "bucket": Bucket,
    "number": Number,
    "text": Text,
    "texts": list[Text],
    "bytes": Bytes,
    "dtype": Dtype,
    "object": dict[str, Any],
}
_BOUNDS = {">=": "ge", ">": "gt"}


@dataclass(frozen=True)
class IdleKey:
    """A row of the table."""

    effect: str
    path: str
    of: tuple[str, ...]
    type: str
    default: Any
    fine: Any
    switch: str
    text: str
    why: str

    @property
    def is_block(self) -> bool:
        return self.type == "block"

    @functools.cached_property
    def checker(self) -> TypeAdapter[Any]:
        """What takes its value, or says what is wrong with it."""
        name, _, bound = self.type.partition(" ")
        if not bound:
            return TypeAdapter(_TYPES[name])
        sign = bound.rstrip("0123456789")
        limit: dict[str, Any] = {_BOUNDS[sign]: int(bound.removeprefix(sign))}
        # The bound stands before the checks, as pydantic puts it for a field.
        kind, *checks = get_args(_TYPES[name])
        bounded: Any = Annotated[(kind, *Field(**limit).metadata, *checks)]
        return TypeAdapter(bounded)

    def asks(self, value: Any) -> bool:
        """Tell whether a value requests a feature that Wherry lacks."""
        if value in (None, False, "", {}, [], "auto", self.fine):
            return False
        if self.switch and isinstance(value, Mapping):
            return value.get(self.switch) not in (None, False, 0)
        return True

    def differs(self, value: Any) -> bool:
        """Whether a value asks for other than what happens."""
        if self.switch:
            return self.asks(value)
        if self.is_block and isinstance(value, Mapping):
            inside = idle_keys_in(self.path)
            return any(name in inside and inside[name].differs(given) for name, given in value.items())
        return value not in (None, "auto", self.default, self.fine)


@functools.cache
def idle_keys() -> dict[str, IdleKey]:
    """Every row, by its path."""
    table = Path(__file__).with_suffix(".csv").read_text(encoding="utf-8")
    rows: dict[str, IdleKey] = {}
    for row in csv.DictReader(table.splitlines()):
        default, fine = (json.loads(row[name]) if row[name] else None for name in ("default", "fine"))
        of, around = tuple(row["of"].split()), rows.get(row["key"].rpartition(".")[0])
        why = row["why"] or (around.why if around else "")
        rows[row["key"]] = IdleKey(
            row["effect"], row["key"], of, row["type"], default, fine, row["switch"], row["text"], why
        )
    return rows


@functools.cache
def idle_keys_in(block: str, of: str = "") -> dict[str, IdleKey]:
    """Those directly inside a block, by their names; of parameters those that the optimizer `of` has."""
    prefix = f"{block}." if block else ""
    inside = {path.removeprefix(prefix): row for path, row in idle_keys().items() if path.startswith(prefix)}
    return {name: row for name, row in inside.items() if "." not in name and (not row.of or of in row.of)}
