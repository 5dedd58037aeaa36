"""Mark "leaf" modules, which are gathered whole where a unit would be one of their submodules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel, Field, field_validator
from torch import nn

from wherry.observe.log import warn
from wherry.sharding.grouping import LEAF

# Mixtures of experts, whose experts run in another order in each forward.
DEFAULT_LEAF_MODULE_CLASSES = [
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]


class DeepSpeedZeroLeafModuleConfig(BaseModel):
    """`zero_optimization.leaf_module`."""

    classes: list[str] = Field(default_factory=DEFAULT_LEAF_MODULE_CLASSES.copy)
    names: list[str] = Field(default_factory=list)
    name_suffixes: list[str] = Field(default_factory=list)

    @field_validator("classes", "names", "name_suffixes", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Have the modules of these classes gathered whole by the engine that `initialize` builds of the model."""
    classes = list(leaf_module_classes)
    kinds = tuple(cls for cls in classes if isinstance(cls, type))

    def matches(module: nn.Module) -> bool:
        cls = type(module)
        return isinstance(module, kinds) or cls.__name__ in classes or f"{cls.__module__}.{cls.__qualname__}" in classes

    modules = [module for module in model.modules() if matches(module)]
    if not modules and raise_if_not_found:
        listed = [cls if isinstance(cls, str) else cls.__name__ for cls in classes]
        raise ValueError(f"No modules of type {listed} found in model {type(model).__name__}")
    return _mark(modules)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    return _mark_by_name(str.__eq__, model, module_names, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    return _mark_by_name(str.endswith, model, module_name_suffixes, raise_if_not_found)


def _mark_by_name(
    matches: Callable[[str, str], bool], model: nn.Module, wanted: Iterable[str], required: bool
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules that match a name; returns them, and the names without a match."""
    matched = {one: [module for name, module in model.named_modules() if matches(name, one)] for one in wanted}
    missing = [one for one, modules in matched.items() if not modules]
    if missing and required:
        raise ValueError(f"No modules named {missing} found in model {type(model).__name__}")
    return _mark([module for modules in matched.values() for module in modules]), missing


def _mark(modules: list[nn.Module]) -> list[nn.Module]:
    for module in modules:
        setattr(module, LEAF, True)
    return list(dict.fromkeys(modules))


def z3_leaf_module(module: nn.Module) -> bool:
    return bool(getattr(module, LEAF, False))


def apply_zero_leaf_module_config(model: nn.Module, leaf_cfg: Any) -> None:
    """Mark the modules of a config's `zero_optimization.leaf_module`, by default known mixtures of experts."""
    block = DeepSpeedZeroLeafModuleConfig.model_validate(leaf_cfg or {})
    set_z3_leaf_modules(model, block.classes, raise_if_not_found=False)
    _, missing = set_z3_leaf_modules_by_name(model, block.names, raise_if_not_found=False)
    _, lacking = set_z3_leaf_modules_by_suffix(model, block.name_suffixes, raise_if_not_found=False)
    if missing or lacking:
        warn("zero_optimization.leaf_module: the model has no modules named %s", ", ".join(missing + lacking))
