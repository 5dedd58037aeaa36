"""Parameters and buffers on the meta device that have values in files: each is read when it gets memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from wherry.errors import WherryError
from wherry.fake import is_fake
from wherry.parallel.partition import LogicalSlice
from wherry.sharding.layout import FlatLayout
from wherry.sharding.safetensors_folder import Cast, Source

# On a tensor: where its values are, and its version then. On a module: what its tensors were given, by their names.
SOURCE, GIVEN = "_wherry_source", "_wherry_given"


def give(module: nn.Module, name: str, source: Source, *, written: bool = False) -> None:
    """A tensor of the module, by its name there, has values in a file; or had, and was `written` to."""
    tensor = _held(module, name)
    assert tensor is not None, name
    _mark(tensor, source, written=written)
    module.__dict__.setdefault(GIVEN, {})[name] = source
    # What `to` and `to_empty` put in the place of a tensor does not know of it.
    module.__dict__["_apply"] = MethodType(_applied, module)


def settle(model: nn.Module) -> None:
    """All has been read: modules are as they were."""
    for module in model.modules():
        if module.__dict__.pop(GIVEN, None) is not None:
            module.__dict__.pop("_apply", None)


def _held(module: nn.Module, name: str) -> torch.Tensor | None:
    parameter = module._parameters.get(name)
    return module._buffers.get(name) if parameter is None else parameter


def _mark(tensor: torch.Tensor, source: Source, *, written: bool = False) -> None:
    tensor.__dict__[SOURCE] = source, -1 if written else _version(tensor)
    if isinstance(tensor, nn.Parameter):
        tensor.__dict__["__deepcopy__"] = partial(_copied, tensor)  # torch copies what is set on buffers alone


def _copied(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """A copy has its values in the same file."""
    copy: nn.Parameter = type(parameter).__deepcopy__(parameter, memo)
    source = given(parameter)
    if source is not None and copy.is_meta and not is_fake(copy):
        _mark(copy, source, written=is_written(parameter))
    return copy


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def is_written(tensor: torch.Tensor) -> bool:
    """Whether code has written to it since: on the meta device that does nothing, and torch counts it."""
    mark = tensor.__dict__.get(SOURCE)
    return mark is not None and mark[1] != _version(tensor)


def given(tensor: torch.Tensor) -> Source | None:
    """Where the values of a tensor are that has not been read yet."""
    mark = tensor.__dict__.get(SOURCE)
    return None if mark is None else mark[0]


def forget(tensor: torch.Tensor) -> None:
    """It has been read."""
    if tensor.__dict__.pop(SOURCE, None) is not None:
        tensor.__dict__.pop("__deepcopy__", None)


def _applied(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> nn.Module:
    """`module._apply`, of which `to`, `half` and `to_empty` are made: its new tensors have the values of the old."""
    _refuse_memory(module, fn)
    before = {
        name: (source, tensor.dtype, is_written(tensor))
        for name in module.__dict__[GIVEN]
        if (tensor := _held(module, name)) is not None and (source := given(tensor)) is not None
    }
    type(module)._apply(module, fn, *args, **kwargs)
    for name, (source, dtype, written) in before.items():
        tensor = _held(module, name)
        if tensor is None or is_fake(tensor):
            continue
        if not isinstance(tensor, nn.Parameter) and tensor.dtype != dtype:
            source = Cast(source, dtype)  # what a file has more than that, the buffer would not have had
        _mark(tensor, source, written=written)
    return module


def _refuse_memory(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Memory without the values would be taken for them; and `to_empty` leaves what no file has without any too."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if given(tensor) is None or not tensor.is_meta:
            continue
        try:
            made = fn(torch.empty(0, dtype=tensor.dtype, device="meta"))
            moved = not made.is_meta and not is_fake(made)
        except NotImplementedError:  # what torch says where there is nothing to copy
            moved = True
        if moved:
            raise WherryError(
                f"{name} of {type(module).__name__}: load_pretrained has found its values in a file, and "
                "wherry.initialize gives it memory and reads them there; leave out the to_empty() or to() that moves "
                "it off the meta device (or call to_empty() before load_pretrained, which then reads all of the model "
                "on every rank)"
            )


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
        _refuse_written(prefix, module)


def _refuse_written(prefix: str, module: nn.Module) -> None:
    if isinstance(module, ParametrizationList) and not any(hasattr(each, "right_inverse") for each in module):
        return  # torch has set the parameter to itself
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta and is_written(parameter):
            full = f"{prefix}.{name}" if prefix else name
            raise WherryError(
                f"{full}: load_pretrained has given it values, and it has been written to since, which does nothing on "
                "the meta device: its values are still in the file. Write to it after wherry.initialize, inside "
                "wherry.gathered; or put a new parameter that is in memory, or a new module, in its place"
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
