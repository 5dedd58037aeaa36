"""Modules that are gathered whole, "leaves": what marks them. Inside a block a module is gathered whole in any case."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel, Field, field_validator
from torch import nn

from wherry.observe.log import warn
from wherry.sharding.grouping import LEAF

# Mixtures of experts, whose experts run in an order that differs from one forward to the next.
DEFAULT_LEAF_MODULE_CLASSES = [
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


class DeepSpeedZeroLeafModuleConfig(BaseModel):
    """`zero_optimization.leaf_module`."""

    classes: list[str] = Field(default_factory=DEFAULT_LEAF_MODULE_CLASSES.copy)
    names: list[str] = Field(default_factory=DEFAULT_LEAF_MODULE_NAMES.copy)
    name_suffixes: list[str] = Field(default_factory=DEFAULT_LEAF_MODULE_NAME_SUFFIXES.copy)

    @field_validator("classes", "names", "name_suffixes", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return list(dict.fromkeys([value] if isinstance(value, str) else value))


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Have the modules of these classes gathered whole, when the model is given to `initialize`."""
    return _by_class(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    return _by_class(model, leaf_module_classes, False, raise_if_not_found)


def _by_class(
    model: nn.Module, classes: Iterable[type[nn.Module] | str], leaf: bool, required: bool
) -> list[nn.Module]:
    asked = list(classes)
    kinds = tuple(cls for cls in asked if isinstance(cls, type))

    def matches(module: nn.Module) -> bool:
        cls = type(module)
        return isinstance(module, kinds) or cls.__name__ in asked or f"{cls.__module__}.{cls.__qualname__}" in asked

    found = [module for module in model.modules() if matches(module)]
    if not found and required:
        listed = [cls if isinstance(cls, str) else cls.__name__ for cls in asked]
        raise ValueError(f"No modules of type {listed} found in model {type(model).__name__}")
    return _mark(found, leaf)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    return _by_name(str.__eq__, model, module_names, flag, raise_if_not_found)


def unset_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    return _by_name(str.__eq__, model, module_names, False, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    return _by_name(str.endswith, model, module_name_suffixes, flag, raise_if_not_found)


def unset_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    return _by_name(str.endswith, model, module_name_suffixes, False, raise_if_not_found)


def _by_name(
    matches: Callable[[str, str], bool], model: nn.Module, wanted: Iterable[str], leaf: bool, required: bool
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules that match a name; returns them, and the names that match none."""
    found = {one: [module for name, module in model.named_modules() if matches(name, one)] for one in wanted}
    missing = [one for one, modules in found.items() if not modules]
    if missing and required:
        raise ValueError(f"No modules named {missing} found in model {type(model).__name__}")
    return _mark([module for modules in found.values() for module in modules], leaf), missing


def _mark(modules: list[nn.Module], leaf: bool) -> list[nn.Module]:
    for module in modules:
        setattr(module, LEAF, leaf)
    return list(dict.fromkeys(modules))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(module: nn.Module) -> bool:
    return bool(getattr(module, LEAF, False))


def z3_leaf_parameter(parameter: nn.Parameter) -> bool:
    """Whether a parameter belongs to a leaf; here that is asked of modules."""
    return hasattr(parameter, "ds_z3_leaf_module")


def apply_zero_leaf_module_config(model: nn.Module, leaf_cfg: Any) -> list[nn.Module]:
    """Mark what a config's `zero_optimization.leaf_module` names, and mixtures of experts that are known."""
    block = DeepSpeedZeroLeafModuleConfig.model_validate(leaf_cfg or {})
    found = set_z3_leaf_modules(model, block.classes, raise_if_not_found=False)
    by_name, missing = set_z3_leaf_modules_by_name(model, block.names, raise_if_not_found=False)
    by_suffix, lacking = set_z3_leaf_modules_by_suffix(model, block.name_suffixes, raise_if_not_found=False)
    if missing or lacking:
        warn("zero_optimization.leaf_module: the model has no modules named %s", ", ".join(missing + lacking))
    return list(dict.fromkeys([*found, *by_name, *by_suffix]))
