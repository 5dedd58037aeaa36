"""Validation of a draft by the schema's models, in words that say what to write instead."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import ValidationError

from wherry.config.draft import Draft
from wherry.config.fields import Block, about, block_of, field_of, key_names
from wherry.config.problems import did_you_mean, shown
from wherry.config.reference import paths_ending_in
from wherry.config.text import KeyPath

Model = TypeVar("Model", bound=Block)

# What a block looks like, by the key that it is mostly about.
_EXAMPLES = {"enabled": '{"enabled": true}', "stage": '{"stage": 2}', "device": '{"device": "cpu"}'}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


def validate(model: type[Model], draft: Draft, prefix: KeyPath = ()) -> Model | None:
    """The model of a part of the draft. What is wrong is noted and taken out, so that the rest is still checked.

    None when a required key of the part itself is missing.
    """
    while True:
        tree = draft.get(prefix) if prefix else draft.tree
        try:
            return model.model_validate(tree)
        except ValidationError as error:
            removed = False
            for item in error.errors(include_url=False):
                removed |= _note_one(model, draft, prefix, item)
            if not removed:
                return None


def _note_one(model: type[Block], draft: Draft, prefix: KeyPath, item: Any) -> bool:
    location = tuple(str(part) for part in item["loc"])
    path = (*prefix, *location)
    if not draft.is_bad(path):
        draft.problem(path, _message(model, location, item))
    removable = location[:-1] if item["type"] == "missing" else location
    return bool(removable) and draft.remove((*prefix, *removable))


def _message(model: type[Block], location: KeyPath, item: Any) -> str:
    kind, value = item["type"], item["input"]
    context = item.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key{_suggestion(model, location)}"
    if kind == "missing":
        return "this key is required"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return _not_a_choice(context["expected"], value)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"expected an object{_example(model, location)}, got {shown(value)}"
    if kind == "list_type":
        return f"expected a list, got {shown(value)}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"expected {words} {context[name]:g}, got {shown(value)}"
    return f"{item['msg'].lower()}, got {shown(value)}"


def _not_a_choice(expected: str, value: Any) -> str:
    choices = re.findall(r"'([^']*)'", expected)
    message = f"expected {expected.replace(chr(39), chr(34))}, got {shown(value)}"
    if isinstance(value, str) and value.endswith(","):
        return f"{message}; a value without quotes runs to the end of its line, so put it in quotes"
    return message + (did_you_mean(value, choices) if isinstance(value, str) else "")


def _example(model: type[Block], location: KeyPath) -> str:
    inner = _model_at(model, location)
    known = inner.model_fields if inner is not None else {}
    return next((f" like {text}" for name, text in _EXAMPLES.items() if name in known), "")


def _suggestion(model: type[Block], location: KeyPath) -> str:
    holder = _model_at(model, location[:-1])
    if holder is None:
        return ""
    known = {name: field for name, field in key_names(holder).items() if about(field, "effect") != "renamed"}
    elsewhere = paths_ending_in(location[-1])
    around = ".".join(location[:-1])
    moved = [path for path in elsewhere if path.startswith(around) or "." not in path]
    if moved:
        return f', did you mean "{moved[0]}"{" at the top" if around and "." not in moved[0] else ""}?'
    near = did_you_mean(location[-1], (name for name, field in known.items() if about(field, "effect") != "refused"))
    if near:
        return near
    if elsewhere:
        return f', did you mean "{elsewhere[0]}"?'
    return did_you_mean(location[-1], known) or _few(known)


def _few(known: dict[str, Any]) -> str:
    return "; the keys here are " + ", ".join(known) if len(known) <= 12 else ""


def _model_at(model: type[Block], location: KeyPath) -> type[Block] | None:
    current: type[Block] | None = model
    for name in location:
        field = field_of(current, name) if current is not None else None
        current = block_of(field) if field is not None else None
    return current
