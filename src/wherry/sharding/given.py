"""Parameters and buffers on the meta device that have values in files: each is read when it gets memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from wherry.errors import WherryError
from wherry.fake import is_fake
from wherry.parallel.comm import SoloComm
from wherry.parallel.partition import LogicalSlice, local, slice_of
from wherry.sharding.layout import FlatLayout
from wherry.sharding.safetensors_folder import Cast, Source

# On a tensor: where its values are, and its version then. On a module: which of its tensors were given some.
SOURCE, GIVEN = "_wherry_source", "_wherry_given"


@dataclass
class _Given:
    """A tensor that has values in a file. Its copy has them too, in the same file."""

    tensor: torch.Tensor
    source: Source

    def __deepcopy__(self, memo: dict[int, Any]) -> _Given:
        tensor = deepcopy(self.tensor, memo)
        if tensor is not self.tensor and tensor.is_meta and not is_fake(tensor):
            _mark(tensor, self.source, written=_is_written(self.tensor))
        return _Given(tensor, self.source)


def give(module: nn.Module, name: str, source: Source) -> None:
    """A tensor of the module, by its name there, has values in a file."""
    tensor = _held(module, name)
    assert tensor is not None, name
    _mark(tensor, source)
    module.__dict__.setdefault(GIVEN, {})[name] = _Given(tensor, source)
    # What `to` and `to_empty` put in the place of a tensor does not know of it.
    module.__dict__["_apply"] = MethodType(_applied, module)


def settled(module: nn.Module) -> None:
    """From now on nobody asks what it was given."""
    if module.__dict__.pop(GIVEN, None) is not None:
        module.__dict__.pop("_apply", None)


def _held(module: nn.Module, name: str) -> torch.Tensor | None:
    parameter = module._parameters.get(name)
    return module._buffers.get(name) if parameter is None else parameter


def _mark(tensor: torch.Tensor, source: Source, *, written: bool = False) -> None:
    tensor.__dict__[SOURCE] = source, -1 if written else _version(tensor)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_written(tensor: torch.Tensor) -> bool:
    """Whether code has written to it since: on the meta device that does nothing, and torch counts it."""
    mark = tensor.__dict__.get(SOURCE)
    return mark is not None and mark[1] != _version(tensor)


def given(tensor: torch.Tensor) -> Source | None:
    """Where the values of a tensor are that has not been read yet."""
    mark = tensor.__dict__.get(SOURCE)
    return None if mark is None else mark[0]


def forget(tensor: torch.Tensor) -> None:
    """It has been read."""
    tensor.__dict__.pop(SOURCE, None)


def _applied(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`module._apply`, of which `to`, `half` and `to_empty` are made: its new tensors have the values of the old.

    Those on the meta device have them in the files still, and those that got memory, by `to_empty`, are read at once.
    """
    records: dict[str, _Given] = module.__dict__[GIVEN]
    before = {
        name: (record.source, record.tensor.dtype, _is_written(record.tensor))
        for name, record in records.items()
        if _held(module, name) is record.tensor
    }
    type(module)._apply(module, *args, **kwargs)
    for name, (source, dtype, written) in before.items():
        tensor = _held(module, name)
        if tensor is None or is_fake(tensor):
            continue
        if not isinstance(tensor, nn.Parameter) and tensor.dtype != dtype:
            source = Cast(source, dtype)  # what a file has more than that, the buffer would not have had
        if tensor.is_meta:
            _mark(tensor, source, written=written)
            records[name] = _Given(tensor, source)
        else:
            read(name, tensor, source)
            del records[name]
    if not records:
        settled(module)
    return module


@torch.no_grad()
def read(name: str, tensor: torch.Tensor, source: Source) -> None:
    """Into a tensor that no flat holds: all that this rank has of it."""
    held = local(tensor)
    part = slice_of(name, tensor, SoloComm()) if isinstance(tensor, nn.Parameter) else None
    held.copy_(values_of(source, tuple(held.shape), part))
    forget(tensor)


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
                    "on the meta device has taken its place since, which has none; load after the model is changed, "
                    "or into the engine that wherry.initialize returns"
                )
            if tuple(source.shape) != tuple(tensor.shape):
                raise WherryError(
                    f"{full}: load_pretrained has given it values of shape {list(source.shape)}, and it has been made "
                    f"{list(tensor.shape)} since; load after the model is changed, or change it when it has its values"
                )
    for full, parameter in model.named_parameters():
        if parameter.is_meta and _is_written(parameter):
            raise WherryError(
                f"{full}: load_pretrained has given it values, and it has been written to since, which does nothing on "
                "the meta device: its values are still in the file. Write to it after wherry.initialize, inside "
                "wherry.gathered; or give the module a new parameter that has its values, or none to have it drawn"
            )


def waiting_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers on the meta device, of modules of which files have something."""
    for prefix, module in model.named_modules():
        if GIVEN not in module.__dict__:
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                yield f"{prefix}.{name}" if prefix else name, buffer


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
