"""The part of a model that is run: few of its equal blocks, as the others do what their neighbors do, and of each
matrix what a tensor-parallel rank has."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from wherry.activations.saving import AHEAD
from wherry.errors import WherryError
from wherry.nn import GeluLinear
from wherry.plan.formulas import precision_of
from wherry.plan.model_states import WORKING_BYTES
from wherry.sharding.grouping import plan_units
from wherry.sharding.quantized import has_codes

if TYPE_CHECKING:
    from wherry.config import Config

FEWEST = 3
"""Blocks at each end of a run until as much is under way as may be: of two gradients are reduced beside a third's."""


@dataclass(frozen=True)
class Repetition:
    """Equal blocks that follow each other in a container."""

    container: nn.Module
    start: int
    length: int

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.container.children())[self.start : self.start + self.length]

    def keep(self, count: int) -> None:
        """Leave so many of them in the model."""
        blocks = list(self.container.named_children())
        del blocks[self.start + count : self.start + self.length]
        numbered = not isinstance(self.container, nn.ModuleDict)
        self.container._modules = {str(i) if numbered else name: block for i, (name, block) in enumerate(blocks)}


def longest_run(model: nn.Module) -> Repetition | None:
    """The most equal blocks that follow each other in a list of modules, if there are two."""
    best: Repetition | None = None
    for container in model.modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        start, kinds = 0, [_kind(block) for block in container.children()]
        for place, kind in enumerate(kinds):
            if kind != kinds[start]:
                start = place
            length = place + 1 - start
            if length > (1 if best is None else best.length):
                best = Repetition(container, start, length)
    return best


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """What equal blocks have alike: their modules as they describe themselves, and their weights but for the values."""
    weights = ((n, p.shape, p.dtype, p.requires_grad) for n, p in (*block.named_parameters(), *block.named_buffers()))
    return repr(block), *weights


@dataclass(frozen=True)
class Outline:
    """A model by its numbers: parameters, those of its largest unit, and of each of its equal `blocks`.

    Of weights in few bits a parameter is a byte of codes: how many are such, and how many of the largest unit's.
    """

    parameters: int
    trained: int
    largest_unit: int
    blocks: int
    of_block: int
    codes: int = 0
    largest_codes: int = 0
    # What goes from a block to the next of a token, as far as its norms tell.
    width: int = 0

    @classmethod
    def of(cls, model: nn.Module) -> Outline:
        run = longest_run(model)
        units = [[parameter for _, parameter in unit.parameters] for unit in plan_units(model)]
        largest = max(units, key=lambda unit: 2 * _numel(unit) - _numel(filter(has_codes, unit)))
        return cls(
            _numel(model.parameters()),
            sum(p.numel() for p in model.parameters() if p.requires_grad),
            _numel(largest),
            0 if run is None else run.length,
            0 if run is None else _numel(run.blocks[0].parameters()),
            _numel(filter(has_codes, model.parameters())),
            _numel(filter(has_codes, largest)),
            0 if run is None else _width(run.blocks[0]),
        )


def _numel(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _width(block: nn.Module) -> int:
    held = (p for child in block.children() for p in child._parameters.values())
    return min((p.numel() for p in held if p is not None and p.dim() == 1), default=0)


def is_away(config: Config) -> bool:
    """Whether activations wait on another tier for the backward."""
    return config.activation_checkpointing.cpu_checkpointing or config.activation_checkpointing.nvme_path is not None


def ends(config: Config, of: Outline, tokens: int) -> int | None:
    """How many blocks differ at each end from those between them: as many as an engine looks ahead, and a few.

    None where some budget is for the whole model, so that the first blocks have what the last ones do not: as of
    activations that are away, unless those of a block are more than is brought back ahead.
    """
    zero, block = config.zero_optimization, of.of_block
    offload, weights = zero.offload_optimizer, zero.offload_param
    few = is_away(config) and WORKING_BYTES[precision_of(config)] * of.width * tokens < AHEAD
    if few or (weights.device == "nvme" and weights.max_in_cpu) or (offload.device != "none" and offload.ratio < 1):
        return None
    ahead = int(is_away(config))
    if zero.stage == 3:
        ahead = math.ceil(min(zero.stage3_prefetch_bucket_size, zero.stage3_max_live_parameters) / max(1, block))
    for place in (offload, weights):
        if place.device == "nvme":
            ahead = max(ahead, place.buffer_count)
    return ahead + FEWEST


# What a tensor-parallel rank has.


class CutLinear(nn.Linear):
    """What a tensor-parallel rank has of a linear layer. `joins`: its outputs are summed over the ranks."""

    joins = False


class CutGeluLinear(CutLinear, GeluLinear):
    """The same of one behind a gelu."""


def cut(model: nn.Module, styles: Mapping[str, str], ranks: int) -> None:
    """Leave of the linear layers that `styles` names, by pattern, what one of `ranks` has: "colwise" or "rowwise"."""
    found = False
    for name, module in list(model.named_modules()):
        style = next((style for pattern, style in styles.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if style not in ("colwise", "rowwise") or not isinstance(module, nn.Linear):
            continue
        wide = module.out_features if style == "colwise" else module.in_features
        if wide % ranks:
            raise WherryError(f"{name}: {ranks} tensor-parallel ranks do not divide its width of {wide}")
        part = _part(module, style, ranks)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, part)
        found = True
    if not found:
        raise WherryError(f"the tensor-parallel plan names no linear layer of {type(model).__name__}")


def _part(module: nn.Linear, style: str, ranks: int) -> CutLinear:
    rows, columns = module.out_features, module.in_features
    rows, columns = (rows // ranks, columns) if style == "colwise" else (rows, columns // ranks)
    kind = CutGeluLinear if isinstance(module, GeluLinear) else CutLinear
    part = kind(columns, rows, module.bias is not None, device=module.weight.device, dtype=module.weight.dtype)
    part.joins = style == "rowwise"
    part.requires_grad_(module.weight.requires_grad)
    return part
