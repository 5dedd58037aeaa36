"""From whatever holds a config to a checked `Config`, or to one error that lists all that is wrong."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from wherry.config import optimizer as optimizers
from wherry.config import scheduler as schedulers
from wherry.config.checks import check
from wherry.config.draft import Draft
from wherry.config.fields import ConfigBlock, block_of, checker, key_names, takes_auto
from wherry.config.problems import Problem, config_error, did_you_mean, shown
from wherry.config.reference import paths_ending_in
from wherry.config.schema import Config
from wherry.config.source import ConfigSource, KeyPath, TextError, copied, parse, read
from wherry.config.without_effect import IdleKey, idle_keys_in

# What a block looks like, by the key that it is mostly about.
_EXAMPLES = {"enabled": '{"enabled": true}', "stage": '{"stage": 2}', "device": '{"device": "cpu"}'}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


def load(
    source: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Load a config from a path, a dict, JSON or Hjson text, or base64 of such text.

    `overrides` are laid over it; their keys may be dotted. The source is not changed. Raises one `ConfigError` that
    lists every problem, each with its key, its line where there is a file, and what to write instead.

    >>> load({"bf16": {"enabled": True}}, overrides={"zero_optimization.stage": 3}).zero_optimization.stage
    3
    """
    laid_over: list[Mapping[str, Any]] = [copied(overrides)] if overrides else []
    if isinstance(source, Config):
        return _load(source._source, [*source._overrides, *laid_over]) if overrides else source
    return _load(read(source), laid_over)


def _load(source: ConfigSource, overrides: list[Mapping[str, Any]]) -> Config:
    draft = Draft(source)
    draft.spread_dotted_keys()
    for layer in overrides:
        draft.override(layer)
    draft.read_older_spellings()
    chosen = _choose_types(draft)
    config = _Reader(draft).block(Config, draft.tree, ())
    assert isinstance(config, Config), "the config as a whole has no required key"
    check(config, draft)
    if draft.problems:
        raise config_error(draft.problems, draft.source.name)
    if draft.autos:
        draft.notes.append(f"auto, so left at their defaults: {', '.join(draft.autos)}")
    config._source = source
    config._overrides[:] = copy.deepcopy(overrides)
    config._notes[:] = draft.notes
    config._idle = draft.idle
    config._auto = (*draft.autos, *chosen)
    return config


def parse_overrides(assignments: Iterable[str]) -> dict[str, Any]:
    """`["zero_optimization.stage=3", "bf16.enabled=true"]` as the overrides of `load`.

    >>> parse_overrides(["gradient_clipping=1.0", "wherry.run_dir=runs/a"])
    {'gradient_clipping': 1.0, 'wherry.run_dir': 'runs/a'}
    """
    overrides: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            message = f'expected KEY=VALUE, like zero_optimization.stage=3, got "{assignment}"'
            raise config_error([Problem("", None, message)], None)
        overrides[name.strip()] = _override_value(text.strip())
    return overrides


def _override_value(text: str) -> Any:
    if text[:1] in ("{", "["):
        try:
            return parse(text)[0]
        except TextError as error:
            raise config_error([Problem("", None, f"{text}: {error}")], None) from None
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


# --- the types that are "auto" ---


def _choose_types(draft: Draft) -> list[str]:
    """A type that is "auto": AdamW, and the schedule that the parameters belong to. Returns what was chosen."""
    chosen = []
    if draft.get(("optimizer", "type")) == "auto":
        draft.tree["optimizer"]["type"] = "AdamW"
        draft.note(("optimizer", "type"), "auto, so AdamW")
        chosen.append("optimizer.type")
    if draft.get(("scheduler", "type")) == "auto":
        _choose_schedule(draft)
        chosen.append("scheduler.type")
    return chosen


def _choose_schedule(draft: Draft) -> None:
    path = ("scheduler", "type")
    params = draft.get(("scheduler", "params"))
    given = {name: value for name, value in params.items() if value is not None} if isinstance(params, dict) else {}
    if all(value == "auto" for value in given.values()):
        del draft.tree["scheduler"]
        draft.note(path, "auto, and no parameters tell which, so the config has no schedule")
        return
    name = schedulers.with_parameters(given)
    if name is None:
        draft.problem(path, f"auto, but no schedule has all of {', '.join(given)}; name one")
        del draft.tree["scheduler"]
        return
    draft.tree["scheduler"]["type"] = name
    draft.note(path, f"auto, so {name}, which has these parameters")


# --- reading the tree ---


class _Invalid:
    """In place of a value that has a problem."""


_INVALID = _Invalid()


class _Reader:
    """One walk over the keys of a draft. What is wrong is noted and left out, so that the rest is still checked."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def block(
        self, model: type[ConfigBlock], tree: dict[str, Any], path: KeyPath, of: str = ""
    ) -> ConfigBlock | _Invalid:
        """The block of a part of the tree; of an optimizer's or a schedule's parameters `of` says which."""
        fields, idle = key_names(model), idle_keys_in(".".join(path), of)
        values: dict[str, Any] = {}
        for name, value in tree.items():
            here = (*path, name)
            if name not in fields and name not in idle:
                self._draft.problem_once(here, f"unknown key{_suggestion(here, fields, idle)}")
            elif value is None:
                continue
            elif name in idle:
                self._idle(idle[name], here, value)
            elif value == "auto" and not takes_auto(fields[name]):
                self._draft.autos.append(".".join(here))
            elif (taken := self._value(model, name, here, value)) is not _INVALID:
                values[name] = taken
        missing = [name for name, field in fields.items() if field.is_required() and name not in values]
        for name in missing:
            self._draft.problem_once((*path, name), "this key is required")
        return _INVALID if missing else model.model_construct(**values)

    def _value(self, model: type[ConfigBlock], name: str, path: KeyPath, value: Any) -> Any:
        inner = block_of(key_names(model)[name])
        if inner is None:
            return self._checked(checker(model, name), path, value)
        if not isinstance(value, dict):
            self._expected_object(path, value, {*key_names(inner), *idle_keys_in(".".join(path))})
            return _INVALID
        if inner is optimizers.Optimizer:
            value = self._with_optimizer_params(value)
        elif inner is schedulers.Scheduler:
            value = self._with_schedule_params(value)
        return value if value is _INVALID else self.block(inner, value, path)

    def _checked(self, adapter: TypeAdapter[Any], path: KeyPath, value: Any) -> Any:
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                self._draft.problem_once((*path, *map(str, item["loc"])), _message(item))
            return _INVALID

    def _expected_object(self, path: KeyPath, value: Any, known: set[str]) -> None:
        example = next((f" like {text}" for name, text in _EXAMPLES.items() if name in known), "")
        self._draft.problem_once(path, f"expected an object{example}, got {shown(value)}")

    # --- keys without effect ---

    def _idle(self, row: IdleKey, path: KeyPath, value: Any, *, quiet: bool = False) -> None:
        """A key of the table; quiet inside a block that has been told of as a whole."""
        if row.effect == "refused":
            if row.is_refused(value):
                self._draft.problem(path, f"not part of Wherry: {row.why}")
            else:
                self._draft.note(path, "not part of Wherry; accepted, as it asks for nothing")
            return
        if value == "auto":
            self._draft.autos.append(row.path)
            return
        if not quiet:
            self._draft.note_idle(path, f"no effect here: {row.why}", row.path if row.differs(value) else "")
        if not row.is_block:
            self._draft.without_effect[path] = self._checked(row.checker, path, value)
        elif not isinstance(value, dict):
            self._expected_object(path, value, {*idle_keys_in(row.path)})
        else:
            self._idle_block(path, value)

    def _idle_block(self, path: KeyPath, tree: dict[str, Any]) -> None:
        inside = idle_keys_in(".".join(path))
        for name, value in tree.items():
            here = (*path, name)
            if name not in inside:
                self._draft.problem_once(here, f"unknown key{_suggestion(here, (), inside)}")
            elif value is not None:
                self._idle(inside[name], here, value, quiet=True)

    # --- what an optimizer and a schedule are constructed with ---

    def _with_optimizer_params(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The optimizer with its parameters resolved, where they are known here."""
        draft, path = self._draft, ("optimizer", "params")
        params = self._given_params(tree, path)
        if isinstance(params, dict) and (norm := params.pop("max_grad_norm", None)) not in (None, 0, "auto"):
            message = f'is not a parameter of an optimizer; write "gradient_clipping": {norm} at the top instead'
            draft.problem((*path, "max_grad_norm"), message)
        name, model = optimizers.params_model(tree.get("type"))
        if model is None or not isinstance(params, dict | None):
            return {**tree, "params": self._without_auto(params, path)}
        checked = self.block(model, params or {}, path, of=name)
        assert isinstance(checked, ConfigBlock), "no optimizer has a required parameter"
        if name == "AdamW" and isinstance(checked, optimizers.AdamParams) and not checked.adam_w_mode:
            message = 'false contradicts the type AdamW, whose weight decay is decoupled; use the type "Adam"'
            draft.problem((*path, "adam_w_mode"), message)
        name, resolved = optimizers.resolve(tree["type"], checked)
        return {**tree, "type": name, "params": resolved}

    def _with_schedule_params(self, tree: dict[str, Any]) -> Any:
        """The same of a schedule."""
        path = ("scheduler", "params")
        params = self._given_params(tree, path)
        name, model = schedulers.params_model(tree.get("type"))
        if model is None or not isinstance(params, dict | None):
            return {**tree, "params": self._without_auto(params, path)}
        checked = self.block(model, params or {}, path, of=name)
        if not isinstance(checked, ConfigBlock):
            return _INVALID
        resolved = checked.model_dump()
        if "scheduler.params.total_num_steps" in self._draft.autos:
            resolved["total_num_steps"] = "auto"  # nothing here knows it: whoever builds the schedule must give it
        return {**tree, "params": resolved}

    def _given_params(self, tree: dict[str, Any], path: KeyPath) -> Any:
        params = tree.get("params")
        if params == "auto":
            self._draft.autos.append(".".join(path))
            return None
        return params

    def _without_auto(self, params: Any, path: KeyPath) -> Any:
        """Parameters that only their own constructor can check."""
        if not isinstance(params, dict):
            return params
        self._draft.autos += [".".join((*path, name)) for name, value in params.items() if value == "auto"]
        return {name: value for name, value in params.items() if value is not None and value != "auto"}


# --- what is said of a mistake ---


def _message(item: Any) -> str:
    kind, value = item["type"], item["input"]
    context = item.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return _not_a_choice(context["expected"], value)
    if kind == "dict_type":
        return f"expected an object, got {shown(value)}"
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


def _suggestion(path: KeyPath, acting: Iterable[str], idle: Mapping[str, IdleKey]) -> str:
    """What an unknown key perhaps means, of those beside it and those elsewhere."""
    here = [*acting, *(name for name, row in idle.items() if row.effect == "none")]
    refused = [name for name, row in idle.items() if row.effect == "refused"]
    elsewhere = paths_ending_in(path[-1])
    around = "" if path[1:2] == ("params",) else ".".join(path[:-1])
    moved = [found for found in elsewhere if found.startswith(around) or "." not in found]
    if moved:
        return f', did you mean "{moved[0]}"{" at the top" if around and "." not in moved[0] else ""}?'
    if near := did_you_mean(path[-1], here):
        return near
    if elsewhere:
        return f', did you mean "{elsewhere[0]}"?'
    known = [*here, *refused]
    few = "; the keys here are " + ", ".join(known) if len(known) <= 12 else ""
    return did_you_mean(path[-1], known) or few
