"""The pieces that the schema is written with: what a key says about itself, and the types of values."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.fields import FieldInfo

from wherry.config.problems import shown
from wherry.config.sizes import unit_missing


class Block(BaseModel):
    """A block of the config. Unknown keys are errors; a resolved block does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), populate_by_name=True)


# --- what a key says about itself ---


def key(
    default: Any,
    text: str,
    *,
    inert: str | None = None,
    met: Any = None,
    only: tuple[Any, ...] | None = None,
    **constraints: Any,
) -> Any:
    """A key of the schema. `inert`: it is accepted and has no effect here, for this reason.

    An inert key is left out of the resolved config, which holds what acts and nothing else. `met`: the value that asks
    for what is so anyway. `only`: the values that the engine of this version has; a config with another is whole, and
    no engine is built from it.
    """
    extra = _effect(inert) | {f"x-{name}": value for name, value in (("met", met), ("only", only)) if value is not None}
    return Field(default, description=text, json_schema_extra=extra, exclude=bool(inert), **constraints)


def block(model: type[Block], text: str, *, inert: str | None = None) -> Any:
    """A block that is always there, with its defaults."""
    return Field(default_factory=model, description=text, json_schema_extra=_effect(inert), exclude=bool(inert))


def _effect(inert: str | None) -> dict[str, Any]:
    return {"x-effect": "none", "x-why": inert} if inert else {"x-effect": "acts"}


def refused(text: str, why: str, *, neutral: Any = False, switch: str | None = None) -> Any:
    """A key that is known and not part of Wherry.

    It is accepted while it asks for nothing: when it is `neutral` (or null, false, or empty), or, for a block with
    a `switch`, while that member is not true.
    """
    extra: dict[str, Any] = {"x-effect": "refused", "x-why": why, "x-neutral": neutral, "x-switch": switch}
    return Field(None, description=text, json_schema_extra=extra, exclude=True, repr=False)


def renamed(to: str, text: str) -> Any:
    """An older or other spelling; `wherry.config.renames` moves its value to the key `to`."""
    extra: dict[str, Any] = {"x-effect": "renamed", "x-why": to, "deprecated": True}
    return Field(None, description=text, json_schema_extra=extra, exclude=True, repr=False)


def about(field: FieldInfo, what: str) -> Any:
    """One of the things that `key`, `refused` and `renamed` recorded: effect, why, neutral or switch."""
    extra = field.json_schema_extra
    return extra.get(f"x-{what}") if isinstance(extra, Mapping) else None


def field_of(model: type[BaseModel], name: str) -> FieldInfo | None:
    """The field that a key of the file means."""
    return key_names(model).get(name)


def key_names(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys of a block, as they stand in a file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def block_of(field: FieldInfo) -> type[Block] | None:
    """The model of a key that holds a block."""
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Block):
            return candidate
    return None


def takes_auto(field: FieldInfo) -> bool:
    """Whether "auto" is one of the key's own values, and not a word for its default."""

    def choices(annotation: Any) -> list[Any]:
        return [annotation, *(choice for inner in get_args(annotation) for choice in choices(inner))]

    return "auto" in choices(field.annotation)


def asks_for_something(field: FieldInfo, value: Any) -> bool:
    """Whether a value of a refused key wants what is not there."""
    if value in (None, False, "", {}, []) or value == about(field, "neutral"):
        return False
    switch = about(field, "switch")
    if switch and isinstance(value, Mapping):
        return value.get(switch) not in (None, False, 0)
    return True


def differs(field: FieldInfo, value: Any) -> bool:
    """Whether a key without effect is given a value that asks for other than what happens."""
    inner = block_of(field)
    if inner is not None and isinstance(value, Mapping):
        known = key_names(inner)
        return any(name in known and differs(known[name], given) for name, given in value.items())
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return value not in (None, "auto", default, about(field, "met"))


# --- the types of values ---


def to_flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError(f"expected true or false, got {shown(value)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unquoted(value: Any) -> str:
    try:
        float(value)
    except (TypeError, ValueError):
        return ""
    return "; write it without quotes" if isinstance(value, str) else ""


def _integer(value: Any) -> int:
    if _is_number(value) and math.isfinite(value) and value == int(value):
        return int(value)
    raise ValueError(f"expected an integer, got {shown(value)}{_unquoted(value)}")


def _size(value: Any) -> int:
    if _is_number(value) and value > -math.inf:
        return sys.maxsize if value >= sys.maxsize else int(value)
    raise ValueError(f"expected a number of elements, got {shown(value)}{_unquoted(value)}")


# No machine has as many elements.
_MOST = 10**13


def _bucket(value: Any) -> int:
    """A size that memory is taken for, where no end is no size."""
    size = _size(value)
    if size > _MOST:
        raise ValueError(f"expected a number of elements that has room somewhere, up to {_MOST:g}, got {shown(value)}")
    return size


def _number(value: Any) -> float:
    if _is_number(value) and math.isfinite(value):
        return float(value)
    raise ValueError(f"expected a number, got {shown(value)}{_unquoted(value)}")


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"expected a string, got {shown(value)}")


_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", re.IGNORECASE)


def _bytes(value: Any) -> int:
    if _is_number(value) and math.isfinite(value):
        return int(value)
    match = _BYTES.fullmatch(value) if isinstance(value, str) else None
    if match and match[2].upper() in _UNITS:
        return int(float(match[1]) * _UNITS[match[2].upper()])
    raise ValueError(f'expected bytes, as a number or like "3GB" or "512MiB", got {shown(value)}')


def _memory(value: Any) -> int:
    count = _bytes(value)
    if missing := unit_missing(count, value):
        raise ValueError(f'expected bytes, as a number or like "3GB" or "512MiB", got {shown(value)}{missing}')
    return count


_DTYPES = {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float": "fp32", "float32": "fp32"}


def to_dtype(value: Any) -> Any:
    name = str(value).removeprefix("torch.").lower()
    return _DTYPES.get(name, name)


def _every_steps(value: Any) -> int | None:
    if (_is_number(value) and value == math.inf) or value in ("inf", "Infinity"):
        return None
    return _integer(value)


def lowered(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def uppered(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


def one_or_list(one: Callable[[Any], Any], what: str) -> Callable[[Any], Any]:
    """A check for a value that may be given once, or as a list with one for each."""

    def check(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return one(value)
        if not value:
            raise ValueError(f"expected {what}, got an empty list")
        return [one(item) for item in value]

    return check


Flag = Annotated[bool, BeforeValidator(to_flag)]
Integer = Annotated[int, BeforeValidator(_integer)]
Size = Annotated[int, BeforeValidator(_size), WithJsonSchema({"type": "number"})]
Bucket = Annotated[int, BeforeValidator(_bucket), WithJsonSchema({"type": "number"})]
Number = Annotated[float, BeforeValidator(_number)]
Text = Annotated[str, BeforeValidator(_text)]
Bytes = Annotated[
    int, BeforeValidator(_bytes), WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string"}]})
]
Memory = Annotated[int, BeforeValidator(_memory), WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string"}]})]
Dtype = Annotated[Literal["fp16", "bf16", "fp32"], BeforeValidator(to_dtype)]
EverySteps = Annotated[int | None, BeforeValidator(_every_steps), WithJsonSchema({"type": "number"})]
Folders = Annotated[
    str | list[str],
    BeforeValidator(one_or_list(_text, "a folder or a list of folders")),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
Numbers = Annotated[
    float | list[float],
    BeforeValidator(one_or_list(_number, "a number or a list of numbers")),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "number"}}]}),
]
