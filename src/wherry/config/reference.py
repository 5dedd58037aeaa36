"""What there is to say about each key: the list of keys, `explain`, and the JSON schema."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from wherry.config.fields import ConfigBlock, block_of, checker, key_names
from wherry.config.optimizer import NATIVE
from wherry.config.scheduler import SCHEDULES
from wherry.config.schema import Config
from wherry.config.without_effect import IdleKey, idle_keys_in

_PARAMS = (("optimizer.params", NATIVE), ("scheduler.params", SCHEDULES))


@dataclass(frozen=True)
class KeyInfo:
    """What there is to say about one key. `of` names the optimizer or the schedule whose parameter it is."""

    path: str
    of: str
    type: str
    default: str
    text: str
    effect: str
    why: str
    is_block: bool

    @property
    def status(self) -> str:
        """What the key does here, in a few words."""
        return _status(self.effect, self.why)


def _status(effect: str, why: str) -> str:
    if effect == "refused":
        return f"not part of Wherry: {why}"
    if effect == "renamed":
        return f"read as `{why}`"
    return f"no effect here: {why}" if effect == "none" else "acts"


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
        inner = block_of(field)
        kind = "object" if inner else _type_name(checker(model, name).json_schema())
        default = "" if inner else "required"
        if not inner and not field.is_required():
            default = _default(field.get_default(call_default_factory=True))
        yield KeyInfo(prefix + name, of, kind, default, field.description or "", "acts", "", inner is not None)
        if inner is not None:
            yield from _keys(inner, prefix + name)
    yield from _idle_keys(block, of)


def _idle_keys(block: str, of: str = "") -> Iterator[KeyInfo]:
    for row in idle_keys_in(block, of).values():
        kind = default = ""
        if row.is_block:
            kind = "object"
        elif row.effect == "none":
            kind, default = _type_name(row.checker.json_schema()), _default(row.default)
        yield KeyInfo(row.path, of, kind, default, row.text, row.effect, row.why, row.is_block)
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
    found = [info.path for info in catalog() if info.path.split(".")[-1] == name and info.effect == "acts"]
    return sorted(dict.fromkeys(found), key=lambda path: path.count("."))


# --- explain ---


def explain(path: str) -> str | None:
    """What a person wants to know about a key, by its path or its last part; None if there is no such key."""
    infos = [info for info in catalog() if info.path == path]
    if not infos and "." not in path:
        infos = [info for info in catalog() if info.path.rpartition(".")[2] == path]
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
    by_name = {info.path.split(".")[-1]: info.path for info in reversed(catalog())}
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
        inner = [key for key in catalog() if key.path.rpartition(".")[0] == info.path and not key.of]
        shown = [key.path.rpartition(".")[2] for key in inner if key.effect in ("acts", "none")]
        lines.append(f"  {'keys:':<13}{', '.join(shown)}")
    return "\n".join(lines)


# --- the JSON schema ---


def json_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a config in its plain form, for editors."""
    schema: dict[str, Any] = Config.model_json_schema()
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    schema["description"] = "A config of Wherry. `wherry config explain KEY` says what a key does."
    _complete(schema, Config, "", schema["$defs"])
    for path, models in _PARAMS:
        # The parameters of all types together, so that an editor can complete them.
        merged: dict[str, Any] = {}
        for name, model in models.items():
            properties = model.model_json_schema()["properties"]
            for key, inner in properties.items():
                merged.setdefault(key, _or_auto({word: value for word, value in inner.items() if word != "default"}))
            merged = {**_idle_properties(path, name), **merged}
        holder = schema["$defs"][path.split(".")[0].capitalize()]["properties"]
        holder["params"]["anyOf"][0]["properties"] = merged
    return schema


def _complete(schema: dict[str, Any], model: type[ConfigBlock], block: str, definitions: dict[str, Any]) -> None:
    """The keys of a block with "auto", and with those that have no effect."""
    properties = {name: _or_auto(inner) for name, inner in schema["properties"].items()}
    schema["properties"] = properties | _idle_properties(block)
    for name, field in key_names(model).items():
        if (inner := block_of(field)) is not None:
            _complete(definitions[inner.__name__], inner, f"{block}.{name}".removeprefix("."), definitions)


def _idle_properties(block: str, of: str = "") -> dict[str, Any]:
    return {name: _idle_property(row) for name, row in idle_keys_in(block, of).items()}


def _idle_property(row: IdleKey) -> dict[str, Any]:
    outside: dict[str, Any] = {"description": f"{row.text} {sentence(_status(row.effect, row.why).replace('`', ''))}"}
    if row.default is not None:
        outside["default"] = row.default
    if row.effect == "renamed":
        outside["deprecated"] = True
    inside: dict[str, Any] = {}
    if row.is_block:
        inside = {"type": "object", "additionalProperties": False, "properties": _idle_properties(row.path)}
    elif row.effect == "none":
        inside = row.checker.json_schema()
    return _or_auto(outside | inside)


_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def _or_auto(schema: dict[str, Any]) -> dict[str, Any]:
    """The same key, where "auto" and null mean its default."""
    outside = {name: value for name, value in schema.items() if name in ("description", "default", "deprecated")}
    inside = {name: value for name, value in schema.items() if name not in (*outside, "title")}
    options = [option for option in inside.get("anyOf", [inside]) if option.get("type") != "null"]
    # pydantic leaves the bounds of an optional number under its own names.
    options = [{_BOUNDS.get(word, word): value for word, value in option.items()} for option in options]
    return {**outside, "anyOf": [*options, {"enum": ["auto", None]}]}
