"""What a tensor-parallel rank has of a model's matrices."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from torch import nn

from wherry.errors import WherryError
from wherry.nn import GeluLinear


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
