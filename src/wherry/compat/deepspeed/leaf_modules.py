"""Mark "leaf" modules, which are gathered whole where a unit would be one of their submodules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from wherry.compat.deepspeed import not_part_of_wherry
from wherry.observe.log import warn
from wherry.sharding.grouping import LEAF

# Mixtures of experts, whose experts run in another order in each forward.
_DEFAULT = [
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]


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


def _mark_named(
    matches: Callable[[str, str], bool],
    model: nn.Module,
    names: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules that match a name; return them, and the names without a match."""
    if not flag:
        raise not_part_of_wherry("set_z3_leaf_modules_by_name(flag=False)", "build the model anew without marks")
    matched = {one: [module for name, module in model.named_modules() if matches(name, one)] for one in names}
    missing = [one for one, modules in matched.items() if not modules]
    if missing and raise_if_not_found:
        raise ValueError(f"No modules named {missing} found in model {type(model).__name__}")
    return _mark([module for modules in matched.values() for module in modules]), missing


set_z3_leaf_modules_by_name = partial(_mark_named, str.__eq__)
set_z3_leaf_modules_by_suffix = partial(_mark_named, str.endswith)


def _mark(modules: list[nn.Module]) -> list[nn.Module]:
    for module in modules:
        setattr(module, LEAF, True)
    return list(dict.fromkeys(modules))


def apply_zero_leaf_module_config(model: nn.Module, leaf_cfg: dict[str, Any] | None) -> None:
    """Mark the modules of a config's `zero_optimization.leaf_module`, by default known mixtures of experts."""
    block = leaf_cfg or {}
    set_z3_leaf_modules(model, block.get("classes", _DEFAULT), raise_if_not_found=False)
    _, missing = set_z3_leaf_modules_by_name(model, block.get("names", ()), raise_if_not_found=False)
    _, lacking = set_z3_leaf_modules_by_suffix(model, block.get("name_suffixes", ()), raise_if_not_found=False)
    if missing or lacking:
        warn("zero_optimization.leaf_module: the model has no modules named %s", ", ".join(missing + lacking))
