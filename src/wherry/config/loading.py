"""From whatever holds a config to a checked `Config`, or to one error that lists all that is wrong."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from wherry.config import optimizer as optimizers
from wherry.config import renames
from wherry.config import scheduler as schedulers
from wherry.config.checks import check
from wherry.config.draft import Draft
from wherry.config.problems import Problem, config_error
from wherry.config.schema import Config
from wherry.config.source import Source, copied, read
from wherry.config.text import TextError, parse
from wherry.config.validate import validate

_PARAMS = ("optimizer", "params")
_SCHEDULE_PARAMS = ("scheduler", "params")


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


def _load(source: Source, overrides: list[Mapping[str, Any]]) -> Config:
    draft = Draft(source)
    draft.spread_dotted_keys()
    for layer in overrides:
        draft.override(layer)
    renames.apply(draft)
    chosen = _settle_types(draft)
    draft.settle(Config)
    _settle_optimizer(draft)
    _settle_schedule(draft)
    config = validate(Config, draft)
    assert config is not None, "the config as a whole has no required key"
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


def _settle_types(draft: Draft) -> list[str]:
    """A type that is "auto": AdamW, and the schedule that the parameters belong to. Returns what was chosen."""
    chosen = []
    if draft.get(("optimizer", "type")) == "auto":
        draft.tree["optimizer"]["type"] = "AdamW"
        draft.note(("optimizer", "type"), "auto, so AdamW")
        chosen.append("optimizer.type")
    if draft.get(("scheduler", "type")) == "auto":
        _settle_schedule_type(draft)
        chosen.append("scheduler.type")
    return chosen


def _settle_schedule_type(draft: Draft) -> None:
    path = ("scheduler", "type")
    params = draft.get(_SCHEDULE_PARAMS)
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


def _settle_optimizer(draft: Draft) -> None:
    type_name = draft.get(("optimizer", "type"))
    params = draft.get(_PARAMS)
    if isinstance(params, dict):
        _refuse_max_grad_norm(draft, params)
    model = optimizers.params_model(type_name)
    if model is None or not isinstance(params, dict | None):
        draft.settle_free(_PARAMS)
        return
    if params is None:
        draft.tree["optimizer"]["params"] = {}
    draft.settle(model, _PARAMS)
    checked = validate(model, draft, _PARAMS)
    assert checked is not None, "no optimizer has a required parameter"
    _refuse_coupled_adamw(draft, type_name, checked)
    name, resolved = optimizers.resolve(type_name, checked)
    draft.tree["optimizer"].update(type=name, params=resolved)


def _refuse_max_grad_norm(draft: Draft, params: dict[str, Any]) -> None:
    value = params.pop("max_grad_norm", None)
    if value not in (None, 0, "auto"):
        message = f'is not a parameter of an optimizer; write "gradient_clipping": {value} at the top instead'
        draft.problem((*_PARAMS, "max_grad_norm"), message)


def _refuse_coupled_adamw(draft: Draft, type_name: str, params: Any) -> None:
    if type_name.lower() == "adamw" and not params.adam_w_mode:
        message = 'false contradicts the type AdamW, whose weight decay is decoupled; use the type "Adam"'
        draft.problem((*_PARAMS, "adam_w_mode"), message)


def _settle_schedule(draft: Draft) -> None:
    params = draft.get(_SCHEDULE_PARAMS)
    model = schedulers.params_model(draft.get(("scheduler", "type")))
    if model is None or not isinstance(params, dict | None):
        draft.settle_free(_SCHEDULE_PARAMS)
        return
    if params is None:
        draft.tree["scheduler"]["params"] = {}
    draft.settle(model, _SCHEDULE_PARAMS)
    checked = validate(model, draft, _SCHEDULE_PARAMS)
    if checked is None:
        draft.remove(("scheduler",))
        return
    resolved = checked.model_dump()
    if ".".join((*_SCHEDULE_PARAMS, "total_num_steps")) in draft.autos:
        resolved["total_num_steps"] = "auto"  # nothing here knows it: whoever builds the schedule must give it
    draft.tree["scheduler"]["params"] = resolved
