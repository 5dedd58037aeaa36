"""Which parameters travel together: a model's modules, cut into units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from wherry.errors import WherryError

# A layer outside every block (an embedding, a language-model head) with at least this many parameters is a unit of
# its own, so that it need not stay gathered for the whole step as the root unit does.
LARGE_LAYER = 1_000_000

# What marks a module that must not be cut: outside every block it is one, whatever is repeated inside it.
LEAF = "_z3_leaf"


@dataclass
class UnitPlan:
    """The modules whose forward gathers the unit, and the parameters that it holds, by name."""

    name: str
    modules: list[nn.Module]
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    root: bool = False


def plan_units(model: nn.Module, unit_classes: Sequence[str] = ()) -> list[UnitPlan]:
    """Cut `model` into units, in registration order; the root unit comes first.

    Blocks are found as repeated modules of one class in a container, or by class name from `unit_classes`, or from the
    model's own `_no_split_modules`; a module that is marked as a leaf is one too. Parameters outside every
    block, and those that more than one unit uses, belong to the root unit.
    """
    names = {module: name for name, module in model.named_modules()}
    wanted = _wanted_classes(model, unit_classes)
    blocks = list(_blocks_by_class(model, wanted)) if wanted else list(_blocks_by_repetition(model))
    blocks = list(dict.fromkeys(blocks))
    blocks += [module for module in model.modules() if _is_tile(module) and module not in blocks]
    blocks += _large_layers(model, blocks)
    order = {module: position for position, module in enumerate(names)}
    blocks.sort(key=order.__getitem__)

    root = UnitPlan("root", [model], root=True)
    plans = [UnitPlan(names[block], [block]) for block in blocks]
    owner = _owners(model, blocks)
    for name, parameter in model.named_parameters():
        index = owner[parameter]
        (root if index is None else plans[index]).parameters.append((name, parameter))
    # Whoever holds a root parameter may be called by itself, without the root module's forward.
    holders = {p for _, p in root.parameters}
    root.modules += [
        module for module in model.modules() if module is not model and holders & set(module._parameters.values())
    ]
    return [root, *(plan for plan in plans if plan.parameters)]


def _wanted_classes(model: nn.Module, unit_classes: Sequence[str]) -> set[str]:
    present = {type(module).__name__ for module in model.modules()}
    if unit_classes:
        missing = sorted(set(unit_classes) - present)
        if missing:
            raise WherryError(
                f"wherry.unit_classes: the model has no module of class {', '.join(missing)}; "
                f"its classes are {', '.join(sorted(present))}"
            )
        return set(unit_classes)
    return set(getattr(model, "_no_split_modules", None) or ()) & present


def _blocks_by_class(module: nn.Module, wanted: set[str]) -> Iterator[nn.Module]:
    for child in _distinct_children(module):
        if type(child).__name__ in wanted or _is_leaf(child):
            yield child
        else:
            yield from _blocks_by_class(child, wanted)


def _blocks_by_repetition(module: nn.Module) -> Iterator[nn.Module]:
    children = _distinct_children(module)
    is_container = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    with_parameters = [child for child in children if _has_parameters(child)]
    classes = [type(child) for child in with_parameters]
    for child in with_parameters:
        if _is_leaf(child) or (is_container and classes.count(type(child)) > 1 and not _is_plain_container(child)):
            yield child
        else:
            yield from _blocks_by_repetition(child)


def _is_leaf(module: nn.Module) -> bool:
    return bool(getattr(module, LEAF, False)) and not _is_plain_container(module)


def _is_plain_container(module: nn.Module) -> bool:
    """A ModuleList has no forward of its own, so no hook of it would ever run."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _large_layers(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    inside = {id(module) for block in blocks for module in block.modules()}
    large = []
    for module in model.modules():
        if module is model or id(module) in inside or any(True for _ in module.children()):
            continue
        if sum(p.numel() for p in module.parameters(recurse=False)) >= LARGE_LAYER:
            large.append(module)
    return large


def _is_tile(module: nn.Module) -> bool:
    """Whether a module is a unit wherever it is, and within another one too."""
    return bool(getattr(module, "always_a_unit", False))


def _owners(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[nn.Parameter, int | None]:
    """For each parameter the one block that uses it; None where that is none, or several."""
    users: dict[nn.Parameter, set[int | None]] = {}
    tiles = {index: block for index, block in enumerate(blocks) if _is_tile(block)}
    in_tile = {module: index for index, block in tiles.items() for module in block.modules()}
    seen_inside: set[int] = set()
    for index, block in enumerate(blocks):
        for module in block.modules():
            seen_inside.add(id(module))
            for parameter in module.parameters(recurse=False):
                users.setdefault(parameter, set()).add(in_tile.get(module, index))
    for module in model.modules():
        if id(module) not in seen_inside:
            for parameter in module.parameters(recurse=False):
                users.setdefault(parameter, set()).add(None)
    return {p: next(iter(who)) if len(who) == 1 else None for p, who in users.items()}


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _distinct_children(module: nn.Module) -> list[nn.Module]:
    return list(dict.fromkeys(module.children()))
