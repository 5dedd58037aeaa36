"""Tensors in safetensors files, by the names a model has for them. Nothing is read before it is asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wherry.errors import WherryError


class TensorSource:
    """One tensor that can be read in part."""

    shape: tuple[int, ...]

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """So many of the first dim."""
        raise AssertionError("a source says how its rows are read")

    def block(self, offsets: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """A block of the tensor."""
        rows = self.rows(offsets[0], offsets[0] + shape[0])
        return rows[(slice(None), *(slice(o, o + n) for o, n in zip(offsets[1:], shape[1:], strict=True)))]

    def elements(self, start: int, stop: int) -> torch.Tensor:
        """Consecutive elements of the flattened tensor: the rows that hold them are read."""
        if not self.shape:
            return self.rows(0, 1).reshape(-1)
        row = max(1, math.prod(self.shape[1:]))
        first, last = start // row, -(-stop // row)
        return self.rows(first, last).reshape(-1)[start - first * row : stop - first * row]


class InFile(TensorSource):
    def __init__(self, handle: Any, name: str) -> None:
        self._slice = handle.get_slice(name)
        self._whole = lambda: handle.get_tensor(name)
        self.shape = tuple(self._slice.get_shape())

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self._slice[start:stop] if self.shape else self._whole()


class TensorBlock(TensorSource):
    """A block of another tensor."""

    def __init__(self, whole: TensorSource, offsets: tuple[int, ...], shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._whole = whole
        self._offsets = offsets

    def rows(self, start: int, stop: int) -> torch.Tensor:
        offsets = (self._offsets[0] + start, *self._offsets[1:])
        return self._whole.block(offsets, (stop - start, *self.shape[1:]))


class Converted(TensorSource):
    """A tensor that is put together from others; it is read whole."""

    def __init__(self, shape: tuple[int, ...], make: Callable[[], torch.Tensor]) -> None:
        self.shape = shape
        self._make = make

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self._make()[start:stop]


def open_folder(path: str | Path, model: nn.Module, names: Mapping[str, torch.Tensor]) -> dict[str, TensorSource]:
    """The tensors of a file, or of a folder, by the names that `model` has for them."""
    sources: dict[str, TensorSource] = {}
    files = _files(Path(path))
    owners = {name: file for file, expected in files.items() for name in expected}
    for file, expected in files.items():
        handle = _open(file)
        found = set(handle.keys())
        absent = sorted(set(expected) - found)
        if absent:
            raise WherryError(f"load_pretrained: the index says that {file} has {absent[0]}, and it does not")
        for name in found:
            if owners.get(name, file) == file:  # an index says which of several files counts
                sources[name] = InFile(handle, name)
    if getattr(type(model), "from_pretrained", None) is not None and hasattr(model, "config"):
        return _converted(sources, model, names)
    return sources


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(file), framework="pt", device="cpu").__enter__()
    except SafetensorError as error:
        raise WherryError(f"load_pretrained: {file} is not a whole safetensors file: {error}") from error


def _files(path: Path) -> dict[Path, Iterable[str]]:
    """The files to read, and what an index says that they have."""
    if path.is_file() and path.suffix == ".json":
        return _indexed(path)
    if path.is_file():
        return {path: ()}
    if not path.is_dir():
        raise WherryError(f"load_pretrained: there is no file or folder {path}")
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        shown = ", ".join(index.name for index in indexes)
        raise WherryError(f"load_pretrained: {path} has {len(indexes)} indexes, {shown}; give the path of one of them")
    if indexes:
        return _indexed(indexes[0])
    files = sorted(path.glob("*.safetensors"))
    if not files:
        seen = ", ".join(sorted(entry.name for entry in path.iterdir())[:10]) or "nothing"
        raise WherryError(f"load_pretrained: {path} has no *.safetensors file; it has {seen}")
    if len(files) > 1 and (path / "model.safetensors") in files:
        files = [path / "model.safetensors"]
    return {file: () for file in files}


def _indexed(index: Path) -> dict[Path, Iterable[str]]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files: dict[Path, list[str]] = {}
        for name, file in weight_map.items():
            files.setdefault(index.parent / file, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WherryError(f"load_pretrained: {index} is not an index of safetensors files: {error!r}") from error
    lacking = [file.name for file in files if not file.is_file()]
    if lacking:
        raise WherryError(f"load_pretrained: {index} names files that are not there: {', '.join(sorted(lacking))}")
    return dict(files)


# Models of transformers: names and layouts on disk may be older than those in memory.


def _converted(
    sources: dict[str, TensorSource], model: Any, names: Mapping[str, torch.Tensor]
) -> dict[str, TensorSource]:
    """The sources under the names in memory, by the conversions that transformers itself has for the model."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key
    except ImportError:  # releases before these had one layout, in memory and on disk
        return _prefixed(sources, model, names)
    conversions: list[Any] = get_model_conversion_mapping(model)
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in conversions if not isinstance(entry, WeightConverter)]
    converter_of = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    result: dict[str, TensorSource] = {}
    groups: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(sources, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, dict(names))
        if renamed not in names and name in names:
            renamed, pattern = name, None
        if pattern is None:
            result[renamed] = sources[name]
        else:
            groups.setdefault(renamed, []).append((pattern, name))
    for first, members in groups.items():
        converter = converter_of[members[0][0]]

        def convert(
            read: Callable[[TensorSource], torch.Tensor],
            first: str = first,
            members: list[tuple[str, str]] = members,
            converter: Any = converter,
        ) -> dict[str, torch.Tensor]:
            mapping = deepcopy(converter)
            for pattern, name in members:
                mapping.add_tensor(first, name, pattern, lambda name=name: read(sources[name]))
            made = mapping.convert(first, model=model, config=model.config)
            return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

        outline = convert(lambda source: torch.empty(source.shape, device="meta"))
        for name, tensor in outline.items():
            result[name] = Converted(tuple(tensor.shape), partial(_made, convert, name))
    return result


def _made(convert: Callable[..., dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    return convert(_whole)[name]


def _whole(source: TensorSource) -> torch.Tensor:
    return source.elements(0, math.prod(source.shape)).view(source.shape)


def _prefixed(
    sources: dict[str, TensorSource], model: Any, names: Mapping[str, torch.Tensor]
) -> dict[str, TensorSource]:
    """A base model's file for a model with a head, or the other way round."""
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix or set(sources) & set(names):
        return sources
    dotted = prefix + "."
    return {
        name.removeprefix(dotted) if name.removeprefix(dotted) in names else dotted + name: source
        for name, source in sources.items()
    }
