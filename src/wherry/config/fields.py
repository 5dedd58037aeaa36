"""The pieces that the schema is written with: keys, blocks, and the types of values."""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, WithJsonSchema
from pydantic.fields import FieldInfo

from wherry.config.problems import did_you_mean, named, shown, unit_missing


class ConfigBlock(BaseModel):
    """A block of the config. Unknown keys are errors; a resolved block does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), populate_by_name=True)


class Constructed(ConfigBlock):
    """A block whose `type` names a class, with what that is constructed with in `params`."""

    models: ClassVar[Mapping[str, type[ConfigBlock]]]
    """The parameters of those that are checked here."""

    @classmethod
    def model_of(cls, type_name: Any) -> tuple[str, type[ConfigBlock] | None]:
        """The name of a type and the schema of its parameters; None where only its own constructor can check them."""
        name = (named(type_name, cls.models) if isinstance(type_name, str) else None) or ""
        return name, cls.models.get(name)

    @classmethod
    def resolve(cls, type_name: str, params: ConfigBlock) -> tuple[str, dict[str, Any]]:
        """What a type and its parameters mean, and the parameters with every default written out."""
        return type_name, params.model_dump()


def key(default: Any, text: str, **constraints: Any) -> Any:
    """A key that acts, with what the reference says of it."""
    return Field(default, description=text, **constraints)


def block(model: type[ConfigBlock], text: str) -> Any:
    """A block that is always there, with its defaults."""
    return Field(default_factory=model, description=text)


def key_names(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys of a block, as they stand in a file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def block_of(field: FieldInfo) -> type[ConfigBlock] | None:
    """The model of a key that holds a block."""
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, ConfigBlock):
            return candidate
    return None


@functools.cache
def checker(model: type[ConfigBlock], name: str) -> TypeAdapter[Any]:
    """What takes a value of one key of a block, or says what is wrong with it."""
    field = key_names(model)[name]
    kind: Any = field.annotation
    return TypeAdapter(Annotated[(kind, *field.metadata)] if field.metadata else kind)


def takes_auto(field: FieldInfo) -> bool:
    """Whether "auto" is one of the key's own values, and not a word for its default."""

    def choices(annotation: Any) -> list[Any]:
        return [annotation, *(choice for inner in get_args(annotation) for choice in choices(inner))]

    return "auto" in choices(field.annotation)


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


_STEPS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def to_steps(value: Any) -> str:
    """`5`, or `5-7`."""
    match = None if isinstance(value, bool) else _STEPS.fullmatch(str(value).strip())
    if match and 1 <= int(match[1]) <= int(match[2] or match[1]):
        return match[0]
    raise ValueError(f'expected the number of a step, from 1 on, or steps like "5-7", got {shown(value)}')


_WHERE = ("host", "device", "auto")


def _share(value: Any) -> Any:
    if isinstance(value, str) and value.lower() in _WHERE:
        return value.lower()
    if _is_number(value) and 0 <= value <= 1:
        return float(value)
    meant = did_you_mean(value, _WHERE) if isinstance(value, str) else ""
    raise ValueError(
        f'expected "host", "device", "auto", or a number from 0 to 1, got {shown(value)}{meant or _unquoted(value)}'
    )


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
Bytes = Annotated[int, BeforeValidator(_bytes), WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string"}]})]
Memory = Annotated[int, BeforeValidator(_memory), WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string"}]})]
Dtype = Annotated[Literal["fp16", "bf16", "fp32"], BeforeValidator(to_dtype)]
EverySteps = Annotated[int | None, BeforeValidator(_every_steps), WithJsonSchema({"type": "number"})]
Steps = Annotated[str, BeforeValidator(to_steps), WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string"}]})]
Share = Annotated[
    Literal["host", "device", "auto"] | float,
    BeforeValidator(_share),
    WithJsonSchema({"anyOf": [{"enum": list(_WHERE)}, {"type": "number", "minimum": 0, "maximum": 1}]}),
]
Folders = Annotated[str | list[str], BeforeValidator(one_or_list(_text, "a folder or a list of folders"))]
Numbers = Annotated[float | list[float], BeforeValidator(one_or_list(_number, "a number or a list of numbers"))]
