"""Parameters and buffers on the meta device that have values in files: each is read when it gets memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from wherry.errors import WherryError
from wherry.fake import is_fake
from wherry.parallel.partition import LogicalSlice
from wherry.sharding.layout import FlatLayout
from wherry.sharding.safetensors_folder import Source

# On a tensor: where its values are. On a module: which of its tensors were given some.
SOURCE, GIVEN = "_wherry_source", "_wherry_given"


def give(module: nn.Module, name: str, source: Source) -> None:
    """A tensor of the module, by its name there, has values in a file."""
    tensor = _held(module, name)
    assert tensor is not None, name
    tensor.__dict__[SOURCE] = source
    module.__dict__.setdefault(GIVEN, set()).add(name)


def _held(module: nn.Module, name: str) -> torch.Tensor | None:
    parameter = module._parameters.get(name)
    return module._buffers.get(name) if parameter is None else parameter


def given(tensor: torch.Tensor) -> Source | None:
    """Where the values of a tensor are that has not been read yet."""
    return tensor.__dict__.get(SOURCE)


def forget(tensor: torch.Tensor) -> None:
    """It has been read."""
    tensor.__dict__.pop(SOURCE, None)


def refuse_lost(model: nn.Module) -> None:
    """What took the place of a tensor with values in a file would be drawn anew, without a word."""
    for prefix, module in model.named_modules():
        for name in module.__dict__.get(GIVEN, ()):
            tensor = _held(module, name)
            if tensor is None or not tensor.is_meta or is_fake(tensor):
                continue
            source, full = given(tensor), f"{prefix}.{name}" if prefix else name
            if source is None:
                raise WherryError(
                    f"{full}: load_pretrained has given it values, and another tensor "
                    "on the meta device has taken its place since, which has none; load after the model is changed "
                    "or copied, or into the engine that wherry.initialize returns"
                )
            if tuple(source.shape) != tuple(tensor.shape):
                raise WherryError(
                    f"{full}: load_pretrained has given it values of shape {list(source.shape)}, and it has been made "
                    f"{list(tensor.shape)} since; load after the model is changed, or change it when it has its values"
                )


def pieces(layout: FlatLayout, rank: int, chosen: Iterable[tuple[int, Source]]) -> Iterator[tuple[int, torch.Tensor]]:
    """What of the sources, by the numbers of their slots, lies in a rank's shard: where, and its values, flattened."""
    for index, source in chosen:
        slot = layout.slots[index]
        overlap = layout.overlap(slot, rank)
        if overlap is None:
            continue
        first, last, start = overlap
        if _is_cut(source, slot.shape, slot.part):
            yield start, values_of(source, slot.shape, slot.part).reshape(-1)[first:last]
        else:
            yield start, source.elements(first, last)


def values_of(source: Source, shape: tuple[int, ...], part: LogicalSlice | None) -> torch.Tensor:
    """All of a tensor that a rank holds: of `shape`, which may be a part of the logical one."""
    if _is_cut(source, shape, part):
        assert part is not None and part.offsets is not None, shape
        return source.block(part.offsets, shape)
    return source.elements(0, math.prod(shape)).view(shape)


def _is_cut(source: Source, shape: tuple[int, ...], part: LogicalSlice | None) -> bool:
    """Whether the file has more than the part that a rank holds; a rank may have files of its own."""
    return part is not None and tuple(source.shape) != tuple(shape)
