"""What there is to say about each key: the list of keys, `explain`, and the JSON schema."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from wherry.config.fields import ConfigBlock, block_of, checker, key_names
from wherry.config.optimizer import OPTIMIZERS
from wherry.config.scheduler import SCHEDULES
from wherry.config.schema import Config
from wherry.config.without_effect import idle_keys_in

_PARAMS = (("optimizer.params", OPTIMIZERS), ("scheduler.params", SCHEDULES))


@dataclass(frozen=True)
class KeyInfo:
    """What there is to say about one key. `of` names the optimizer or the schedule whose parameter it is."""

    path: str
    of: str
    # The JSON schema of its values; empty of a key that takes none here.
    schema: dict[str, Any]
    default: str
    text: str
    effect: str
    why: str

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def block(self) -> str:
        """The path of the block that it is in."""
        return self.path.rpartition(".")[0]

    @property
    def is_block(self) -> bool:
        return self.schema is _BLOCK

    @property
    def type(self) -> str:
        return _type_name(self.schema) if self.schema else ""

    @property
    def status(self) -> str:
        """What the key does here, in a few words."""
        words = {"refused": "not part of Wherry: {}", "renamed": "read as `{}`", "none": "no effect here: {}"}
        return words.get(self.effect, "acts").format(self.why)


_BLOCK = {"type": "object", "additionalProperties": False}


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    text = text[:1].upper() + text[1:]
    return text if text.endswith(".") else text + "."


@functools.cache
def catalog() -> tuple[KeyInfo, ...]:
    """Every key: block by block, in each those that act, in the order of the schema, before those that do not."""
    keys = list(_keys(Config, ""))
    for path, models in _PARAMS:
        for name, model in models.items():
            keys += _keys(model, path, of=name)
    return tuple(keys)


def _keys(model: type[ConfigBlock], block: str, of: str = "") -> Iterator[KeyInfo]:
    prefix = f"{block}." if block else ""
    for name, field in key_names(model).items():
        inner, text = block_of(field), field.description or ""
        if inner is not None:
            yield KeyInfo(prefix + name, of, _BLOCK, "", text, "acts", "")
            yield from _keys(inner, prefix + name)
        else:
            default = "required" if field.is_required() else _default(field.get_default(call_default_factory=True))
            yield KeyInfo(prefix + name, of, checker(model, name).json_schema(), default, text, "acts", "")
    yield from _idle_keys(block, of)


def _idle_keys(block: str, of: str = "") -> Iterator[KeyInfo]:
    for row in idle_keys_in(block, of).values():
        acts_as = _BLOCK if row.is_block else row.checker.json_schema() if row.effect == "none" else {}
        default = _default(row.default) if row.effect == "none" and not row.is_block else ""
        yield KeyInfo(row.path, of, acts_as, default, row.text, row.effect, row.why)
        if row.is_block:
            yield from _idle_keys(row.path)


def _default(value: Any) -> str:
    return "unset" if value is None else json.dumps(value)


def _type_name(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        kinds = [_type_name(option) for option in schema["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return ", ".join(json.dumps(choice) for choice in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type_name(schema.get('items', {}))}s"
    return str(schema.get("type", "any"))


def paths_ending_in(name: str) -> list[str]:
    """Where a key of this name acts, shortest path first; for "did you mean" across blocks."""
    found = [info.path for info in catalog() if info.name == name and info.effect == "acts"]
    return sorted(dict.fromkeys(found), key=lambda path: path.count("."))


# --- explain ---


def explain(path: str) -> str | None:
    """What a person wants to know about a key, by its path or its last part; None if there is no such key."""
    infos = [info for info in catalog() if info.path == path]
    if not infos and "." not in path:
        infos = [info for info in catalog() if info.name == path]
    alike: dict[str, list[str]] = {}
    for info in infos:
        alike.setdefault(_explanation(info), []).append(info.of)
    return "\n\n".join(_headed(text, names) for text, names in alike.items()) or None


def suggestion(path: str) -> str:
    """`, did you mean ...?` for a key that does not exist."""
    elsewhere = paths_ending_in(path.split(".")[-1])
    if elsewhere:
        return f', did you mean "{elsewhere[0]}"?'
    # Whole paths and their last parts together: the nearest of all of them.
    by_name = {info.name: info.path for info in reversed(catalog())}
    by_name |= {info.path: info.path for info in catalog()}
    for word in (path, path.split(".")[-1]):
        if match := difflib.get_close_matches(word, by_name, n=1):
            return f', did you mean "{by_name[match[0]]}"?'
    return ""


def _headed(text: str, names: list[str]) -> str:
    first, rest = text.split("\n", 1)
    return f"{first} ({', '.join(names)})\n{rest}" if any(names) else text


def _explanation(info: KeyInfo) -> str:
    effect = info.status.replace("`", "").replace("no effect here", "none")
    rows = [("type", info.type), ("default", info.default), ("effect here", effect)]
    lines = [info.path, f"  {info.text}"]
    lines += [f"  {label + ':':<13}{value}" for label, value in rows if value]
    if info.is_block:
        inner = [key for key in catalog() if key.block == info.path and not key.of]
        shown = [key.name for key in inner if key.effect in ("acts", "none")]
        lines.append(f"  {'keys:':<13}{', '.join(shown)}")
    return "\n".join(lines)


# --- the JSON schema ---


def json_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a config in its plain form, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Wherry config",
        "description": "A config of Wherry. `wherry config explain KEY` says what a key does.",
        **_object(""),
    }


def _object(block: str) -> dict[str, Any]:
    inside = [info for info in catalog() if info.block == block]
    schema: dict[str, Any] = {**_BLOCK, "properties": {}}
    for info in inside:  # of the parameters of all optimizers, or schedules, each once, as any of them takes it
        taken = _property(info)
        options = schema["properties"].setdefault(info.name, taken)["anyOf"]
        options += [option for option in taken["anyOf"] if option not in options]
    if required := [info.name for info in inside if info.default == "required" and not info.of]:
        schema["required"] = required
    return schema


def _property(info: KeyInfo) -> dict[str, Any]:
    """A key, where "auto" and null mean its default."""
    acts = info.effect == "acts"
    outside: dict[str, Any] = {"description": info.text}
    if not acts:
        outside["description"] += f" {sentence(info.status.replace('`', ''))}"
    if info.default not in ("", "unset", "required") and not info.of:
        outside["default"] = json.loads(info.default)
    if info.effect == "renamed":
        outside["deprecated"] = True
    inside = info.schema
    if info.is_block:
        inside = _object(info.path)
    elif info.path in dict(_PARAMS):
        inside = {"type": "object", "properties": _object(info.path)["properties"]}
    options = [option for option in inside.get("anyOf", [inside]) if option.get("type") != "null"]
    # pydantic leaves the bounds of an optional number under its own names.
    options = [{_BOUNDS.get(word, word): value for word, value in option.items()} for option in options]
    return {**outside, "anyOf": [*options, {"enum": ["auto", None]}]}


_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
