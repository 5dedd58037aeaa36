"""From whatever holds a config to a checked `Config`, or to one error that lists all that is wrong."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from wherry.config.checks import check
from wherry.config.draft import Draft
from wherry.config.fields import ConfigBlock, Constructed, block_of, checker, key_names, takes_auto
from wherry.config.problems import Problem, config_error, did_you_mean, shown
from wherry.config.reference import paths_ending_in
from wherry.config.scheduler import with_parameters
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
    source: str | os.PathLike[str] | Mapping[str, Any] | Config | ConfigSource | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Load a config from a path, a dict, JSON or Hjson text, or base64 of such text.

    `overrides` are laid over it; their keys may be dotted. The source is not changed. Raises one `ConfigError` that
    lists every problem, each with its key, its line where there is a file, and what to write instead.

    >>> load({"bf16": {"enabled": True}}, overrides={"zero_optimization.stage": 3}).zero_optimization.stage
    3
    """
    laid_over = [copied(overrides)] if overrides else []
    if isinstance(source, Config):
        return source if not overrides else _load(Draft(source._draft.source, [*source._draft.overrides, *laid_over]))
    return _load(Draft(read(source), laid_over))


def _load(draft: Draft) -> Config:
    _choose_types(draft)
    config = _Reader(draft).block(Config, draft.tree, ())
    assert isinstance(config, Config), "the config as a whole has no required key"
    check(config, draft)
    if draft.problems:
        raise config_error(draft.problems, draft.source.name)
    config._draft = draft
    defaults = [path for path in draft.autos if path not in config.planned]
    for meaning, paths in (("chosen when training begins", config.planned), ("left at their defaults", defaults)):
        if paths:
            config.add_note(f"auto, so {meaning}: {', '.join(paths)}")
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
    except ValueError:
        raise config_error([Problem("", None, "a number has thousands of digits")], None) from None


# --- the types that are "auto" ---


def _choose_types(draft: Draft) -> None:
    """A type that is "auto": AdamW, and the schedule that the parameters belong to."""
    for block, choose in (("optimizer", _choose_optimizer), ("scheduler", _choose_schedule)):
        if draft.get((block, "type")) == "auto":
            draft.chosen.append(f"{block}.type")
            choose(draft, draft.tree[block])


def _choose_optimizer(draft: Draft, block: dict[str, Any]) -> None:
    block["type"] = "AdamW"
    draft.note(("optimizer", "type"), "auto, so AdamW")


def _choose_schedule(draft: Draft, block: dict[str, Any]) -> None:
    path, params = ("scheduler", "type"), block.get("params")
    given = {name: value for name, value in params.items() if value is not None} if isinstance(params, dict) else {}
    block["type"] = with_parameters(given)
    if all(value == "auto" for value in given.values()):
        draft.tree["scheduler"] = None
        draft.note(path, "auto, and no parameters tell which, so the config has no schedule")
    elif block["type"] is None:
        draft.tree["scheduler"] = None
        draft.problem(path, f"auto, but no schedule has all of {', '.join(given)}; name one")
    else:
        draft.note(path, f"auto, so {block['type']}, which has these parameters")


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
        fields, values = key_names(model), {}
        for name, value in self._acting(fields, tree, path, of=of):
            here = (*path, name)
            if value == "auto" and not takes_auto(fields[name]):
                self._draft.autos.append(".".join(here))
            elif (taken := self._value(model, name, here, value)) is not _INVALID:
                values[name] = taken
        missing = [name for name, field in fields.items() if field.is_required() and name not in values]
        for name in missing:
            self._draft.problem_once((*path, name), "this key is required")
        return _INVALID if missing else model.model_construct(**values)

    def _acting(
        self, known: Collection[str], tree: dict[str, Any], path: KeyPath, *, of: str = "", quiet: bool = False
    ) -> Iterator[tuple[str, Any]]:
        """The keys that are known; what there is to say of the others is said."""
        idle = idle_keys_in(".".join(path), of)
        for name, value in tree.items():
            here = (*path, name)
            if name not in known and name not in idle:
                if of and ".".join(here) in paths_ending_in(name):  # another's
                    message = f"{of} has no such parameter; it takes {', '.join(known)}"
                else:
                    message = f"unknown key{_suggestion(here, known, idle)}"
                self._draft.problem_once(here, message)
            elif value is None:
                continue
            elif name in idle:
                self._idle(idle[name], here, value, quiet=quiet)
            else:
                yield name, value

    def _value(self, model: type[ConfigBlock], name: str, path: KeyPath, value: Any) -> Any:
        inner = block_of(key_names(model)[name])
        if inner is None:
            return self._checked(checker(model, name), path, value)
        if not self._is_object(path, value, key_names(inner)):
            return _INVALID
        if issubclass(inner, Constructed):
            value = self._with_params(inner, value, path)
        return value if value is _INVALID else self.block(inner, value, path)

    def _checked(self, adapter: TypeAdapter[Any], path: KeyPath, value: Any) -> Any:
        try:
            found = adapter.validate_python(value)
            if isinstance(found, int) and abs(found) > sys.maxsize:
                raise OverflowError
            return found
        except OverflowError:
            self._draft.problem_once(path, f"nothing that can be set here is as large as {shown(value)}")
            return _INVALID
        except ValidationError as error:
            for item in error.errors(include_url=False):
                self._draft.problem_once((*path, *map(str, item["loc"])), _message(item))
            return _INVALID

    def _is_object(self, path: KeyPath, value: Any, known: Collection[str] = ()) -> bool:
        if isinstance(value, dict):
            return True
        example = next((f" like {text}" for name, text in _EXAMPLES.items() if name in known), "")
        self._draft.problem_once(path, f"expected an object{example}, got {shown(value)}")
        return False

    def _idle(self, row: IdleKey, path: KeyPath, value: Any, *, quiet: bool) -> None:
        """A key of the table; quiet inside a block that has been told of as a whole."""
        draft = self._draft
        if row.effect == "refused":
            if row.asks(value):
                draft.problem(path, f"not part of Wherry: {row.why}")
            else:
                draft.note(path, "not part of Wherry; accepted, as it asks for nothing")
            return
        if value == "auto":
            draft.autos.append(row.path)
            return
        if not quiet:
            draft.note_idle(path, f"no effect here: {row.why}", row.path if row.differs(value) else "")
        if not row.is_block:
            draft.without_effect[path] = self._checked(row.checker, path, value)
        elif self._is_object(path, value):
            list(self._acting((), value, path, quiet=True))

    def _with_params(self, kind: type[Constructed], tree: dict[str, Any], block: KeyPath) -> Any:
        """An optimizer or a schedule with its parameters resolved, where they are known here."""
        draft, path, params = self._draft, (*block, "params"), tree.get("params")
        if params == "auto":
            draft.autos.append(".".join(path))
            params = None
        if not isinstance(params, dict | None):
            return tree
        params = params or {}
        if block == ("optimizer",) and (norm := params.pop("max_grad_norm", None)) not in (None, 0, "auto"):
            message = f'is not a parameter of an optimizer; write "gradient_clipping": {norm} at the top instead'
            draft.problem((*path, "max_grad_norm"), message)
        name, model = kind.model_of(tree.get("type"))
        if model is None:  # only its own constructor can check them
            draft.autos += [".".join((*path, name)) for name, value in params.items() if value == "auto"]
            return {**tree, "params": {n: value for n, value in params.items() if value not in (None, "auto")}}
        checked = self.block(model, params, path, of=name)
        if not isinstance(checked, ConfigBlock):
            return _INVALID
        name, resolved = kind.resolve(name, checked)
        if "scheduler.params.total_num_steps" in draft.autos and block == ("scheduler",):
            resolved["total_num_steps"] = "auto"  # nothing here knows it: whoever builds the schedule must give it
        return {**tree, "type": name, "params": resolved}


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
