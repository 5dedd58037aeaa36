"""What the schema says about itself: the list of keys, `explain`, and the JSON schema."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter

from wherry.config.fields import Block, about, block_of, key_names


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
    only: tuple[Any, ...] | None = None

    @property
    def status(self) -> str:
        """What the key does here, in a few words."""
        return status(self.effect, self.why, self.only)


def status(effect: str, why: str | None, only: Sequence[Any] | None = None) -> str:
    """What a key does here, in a few words."""
    if effect == "acts" and only is not None:
        return f"acts; the engine of this version has {' and '.join(json.dumps(value) for value in only)}"
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
    """Every key, in the order of the schema."""
    from wherry.config.optimizer import NATIVE
    from wherry.config.scheduler import SCHEDULES
    from wherry.config.schema import Config

    keys = list(_keys(Config, ""))
    for prefix, models in (("optimizer.params.", NATIVE), ("scheduler.params.", SCHEDULES)):
        for name, model in models.items():
            keys += _keys(model, prefix, of=name)
    return tuple(keys)


def _keys(model: type[BaseModel], prefix: str, of: str = "", idle: str = "") -> Iterator[KeyInfo]:
    """The keys of a block. `idle`: why the block as a whole has no effect."""
    for name, field in key_names(model).items():
        inner = block_of(field)
        effect = str(about(field, "effect"))
        why = idle if idle and effect == "acts" else _why(field, prefix, effect)
        effect = "none" if idle and effect == "acts" else effect
        yield KeyInfo(
            path=prefix + name,
            of=of,
            type=_type_name(field) if effect in ("acts", "none") else "",
            default=_default(field) if effect in ("acts", "none") else "",
            text=field.description or "",
            effect=effect,
            why=why,
            is_block=inner is not None,
            only=about(field, "only"),
        )
        if inner is not None:
            yield from _keys(inner, f"{prefix}{name}.", idle=why if effect == "none" else "")


def _why(field: Any, prefix: str, effect: str) -> str:
    why = str(about(field, "why") or "")
    return prefix + why if effect == "renamed" else why


def _default(field: Any) -> str:
    if block_of(field) is not None:
        return ""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return "unset" if default is None else json.dumps(default)


def _type_name(field: Any) -> str:
    return "object" if block_of(field) else _schema_type(TypeAdapter(_annotated(field)).json_schema())


def _annotated(field: Any) -> Any:
    from typing import Annotated

    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def _schema_type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        kinds = [_schema_type(option) for option in schema["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return ", ".join(json.dumps(choice) for choice in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_schema_type(schema.get('items', {}))}s"
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
    from wherry.config.optimizer import NATIVE
    from wherry.config.scheduler import SCHEDULES
    from wherry.config.schema import Config

    schema: dict[str, Any] = Config.model_json_schema()
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    schema["description"] = "A config of Wherry. `wherry config explain KEY` says what a key does."
    for holder in (schema, *schema["$defs"].values()):
        properties = holder.get("properties", {})
        for name, inner in properties.items():
            properties[name] = _or_auto(inner)
    for name, models in (("Optimizer", NATIVE), ("Scheduler", SCHEDULES)):
        holder = schema["$defs"][name]["properties"]
        holder["params"]["anyOf"][0]["properties"] = _params_properties(models)
    return schema


def _or_auto(schema: dict[str, Any]) -> dict[str, Any]:
    """The same key, where "auto" and null mean its default, and the description says what an editor should show."""
    outside = {name: value for name, value in schema.items() if name in ("description", "default", "deprecated")}
    effect, why, only = schema.get("x-effect", "acts"), schema.get("x-why"), schema.get("x-only")
    if effect != "acts" or only is not None:
        outside["description"] = f"{outside['description']} {sentence(status(effect, why, only).replace('`', ''))}"
    not_inside = {*outside, "title", "x-effect", "x-why", "x-neutral", "x-switch", "x-met", "x-only"}
    inside = {name: value for name, value in schema.items() if name not in not_inside}
    options = [_bounded(option) for option in inside.get("anyOf", [inside]) if option.get("type") != "null"]
    return {**outside, "anyOf": [*options, {"enum": ["auto", None]}]}


_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """pydantic leaves the bounds of an optional number under its own names."""
    return {_BOUNDS.get(word, word): value for word, value in schema.items()}


def _params_properties(models: dict[str, type[Block]]) -> dict[str, Any]:
    """The parameters of all types together, so that an editor can complete them."""
    merged: dict[str, Any] = {}
    for model in models.values():
        for name, inner in model.model_json_schema()["properties"].items():
            if name not in merged:
                merged[name] = _or_auto({key: value for key, value in inner.items() if key != "default"})
    return merged
