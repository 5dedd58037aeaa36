"""Tensors in safetensors files, by the names a model has for them. Nothing is read before it is asked for."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from functools import partial, reduce
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

from wherry.errors import WherryError, one_line
from wherry.regular import leads_out, open_regular, read_regular

# Bytes: that of a trillion parameters in small tensors has a quarter of it.
LONGEST_INDEX = 128 << 20
# Bytes of a file that may be mapped beside the tensor that is read.
MAPPED = 32 << 20


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


class OpenFile:
    """A file that is opened anew after so many bytes: what has been read of it is mapped until it is closed, and counts
    as memory of this process, which would be another whole model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: Any = _open(path)
        self._as_it_was = _version(path)
        self._mapped = 0

    def handle(self, nbytes: int = 0) -> Any:
        """What is about to be read from, so many bytes."""
        if self._mapped > MAPPED:
            self._handle, self._mapped = _open(self.path), 0
            if _version(self.path) != self._as_it_was:
                raise WherryError(
                    f"load_pretrained: {self.path} has been changed since load_pretrained looked at it; call it again "
                    "once the files are whole"
                )
        self._mapped += nbytes
        return self._handle


class InFile(TensorSource):
    def __init__(self, file: OpenFile, name: str, dtypes: dict[str, torch.dtype]) -> None:
        """`dtypes`: those of the file that torch has, which are found as they come."""
        self._file, self._name = file, name
        outline = file.handle().get_slice(name)
        self.shape = tuple(outline.get_shape())
        kind = outline.get_dtype()
        if kind not in dtypes:
            try:
                dtypes[kind] = (outline[0:0] if self.shape else file.handle().get_tensor(name)).dtype
            except Exception as error:  # safetensors' own, or torch's: it depends on the dtype
                raise WherryError(
                    f"load_pretrained: {file.path}: {one_line(name)} is of dtype {kind}, which cannot be read here: "
                    f"{error}"
                ) from None
        self.dtype = dtypes[kind]

    def rows(self, start: int, stop: int) -> torch.Tensor:
        handle = self._file.handle((stop - start) * math.prod(self.shape[1:]) * self.dtype.itemsize)
        found: torch.Tensor = handle.get_slice(self._name)[start:stop] if self.shape else handle.get_tensor(self._name)
        return found


class TensorBlock(TensorSource):
    """A block of another tensor."""

    def __init__(self, whole: TensorSource, offsets: tuple[int, ...], shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._whole = whole
        self._offsets = offsets

    def rows(self, start: int, stop: int) -> torch.Tensor:
        offsets = (self._offsets[0] + start, *self._offsets[1:])
        return self._whole.block(offsets, (stop - start, *self.shape[1:]))


class Turned(TensorSource):
    """A matrix whose rows are the columns of another."""

    def __init__(self, whole: TensorSource) -> None:
        self.shape = whole.shape[::-1]
        self._whole = whole

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self._whole.block((0, start), (self.shape[1], stop - start)).T


class Converted(TensorSource):
    """A tensor that is put together from others; it is read whole."""

    def __init__(self, shape: tuple[int, ...], make: Callable[[], torch.Tensor]) -> None:
        self.shape = shape
        self._make = make

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self._make()[start:stop]


def open_folder(path: str | Path, model: nn.Module, names: Mapping[str, torch.Tensor]) -> dict[str, TensorSource]:
    """The tensors of a file, or of a folder, by the names that `model` has for them."""
    sources: dict[str, InFile] = {}
    files = _files(Path(path))
    owners = {name: file for file, expected in files.items() for name in expected}
    for file, expected in files.items():
        opened = OpenFile(file)
        found = opened.handle().keys()
        absent = sorted(set(expected) - set(found))
        if absent:
            raise WherryError(f"load_pretrained: the index says that {file} has {one_line(absent[0])}, and it does not")
        dtypes: dict[str, torch.dtype] = {}
        for name in found:
            if owners.setdefault(name, file) == file:  # an index says which of several files counts
                sources[name] = InFile(opened, name, dtypes)
            elif name not in files[owners[name]]:
                raise WherryError(
                    f"load_pretrained: {owners[name]} and {file} both have {one_line(name)}, and no index says which "
                    "counts; give the path of one of them"
                )
    if getattr(type(model), "from_pretrained", None) is None or not hasattr(model, "config"):
        return dict(sources)
    try:
        return _converted(sources, model, names)
    except Exception as error:  # of transformers' own, about names and shapes that it does not expect
        told = f"{type(error).__name__}: {error}"
        raise WherryError(f"load_pretrained: transformers cannot convert what {path} holds: {told}") from None


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        os.close(open_regular(file))
        return safe_open(str(file), framework="pt", device="cpu").__enter__()
    except OSError as error:
        raise WherryError(f"load_pretrained: {file} {error.strerror or error}") from None
    except SafetensorError as error:
        raise WherryError(f"load_pretrained: {file} is not a whole safetensors file: {error}") from None


def _version(file: Path) -> tuple[int, ...]:
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _files(path: Path) -> dict[Path, Collection[str]]:
    """The files to read, and what an index says that they have."""
    if not os.path.exists(path):
        raise WherryError(f"load_pretrained: there is no file or folder {path}")
    if not path.is_dir():
        return _indexed(path) if path.suffix == ".json" else {path: ()}
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        shown = ", ".join(index.name for index in indexes)
        raise WherryError(f"load_pretrained: {path} has {len(indexes)} indexes, {shown}; give the path of one of them")
    if indexes:
        return _indexed(_inside(path, indexes[0]))
    files = sorted(path.glob("*.safetensors"))
    if not files:
        seen = ", ".join(sorted(entry.name for entry in path.iterdir())[:10]) or "nothing"
        raise WherryError(f"load_pretrained: {path} has no *.safetensors file; it has {seen}")
    if len(files) > 1 and (path / "model.safetensors") in files:
        files = [path / "model.safetensors"]
    return {_inside(path, file): () for file in files}


def _inside(folder: Path, file: Path) -> Path:
    """A file of a folder, which is there. A link leads inside the folder, or, in the hub's cache, to its blobs."""
    real = leads_out(folder, file)
    if real is not None:
        raise WherryError(
            f"load_pretrained: {file} is a link that leads out of its folder, to {real}; give the path of the folder "
            "that has the files"
        )
    return file


def _indexed(index: Path) -> dict[Path, Collection[str]]:
    try:
        told = json.loads(read_regular(index, LONGEST_INDEX), object_pairs_hook=_without_contradiction)
    except OSError as error:
        raise WherryError(f"load_pretrained: {index} {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise WherryError(f"load_pretrained: {index} is not an index of safetensors files: {error}") from None
    weight_map = told.get("weight_map") if isinstance(told, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WherryError(
            f"load_pretrained: {index} is not an index of safetensors files: it has no weight_map of names and files"
        )
    files: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or "\0" in file or not _stays_inside(PurePath(file)):
            raise WherryError(
                f"load_pretrained: {index} is not an index of safetensors files: {one_line(name)} is in "
                f"{one_line(repr(file))}; expected the name of a file in its folder"
            )
        files.setdefault(index.parent / file, []).append(name)
    lacking = sorted(str(file.relative_to(index.parent)) for file in files if not os.path.exists(file))
    if lacking:
        more = f", and {len(lacking) - 20} more" if len(lacking) > 20 else ""
        names = ", ".join(map(one_line, lacking[:20]))
        raise WherryError(f"load_pretrained: {index} names files that are not there: {names}{more}")
    return {_inside(index.parent, file): expected for file, expected in files.items()}


def _stays_inside(file: PurePath) -> bool:
    return bool(file.parts) and not file.is_absolute() and ".." not in file.parts


def _without_contradiction(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        for name, value in pairs:
            if made[name] != value:
                raise ValueError(f"{one_line(name)} is there twice, and not the same")
    return made


# Models of transformers: names and layouts on disk may be older than those in memory.


def _converted(sources: Mapping[str, InFile], model: Any, names: Mapping[str, torch.Tensor]) -> dict[str, TensorSource]:
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
        # What cannot be put together raises here: on the meta device it would not.
        reduce(torch.promote_types, (sources[name].dtype for _, name in members))

        def convert(
            read: Callable[[InFile], torch.Tensor],
            first: str = first,
            members: list[tuple[str, str]] = members,
            converter: Any = converter,
        ) -> dict[str, torch.Tensor]:
            mapping = deepcopy(converter)
            for pattern, name in members:
                mapping.add_tensor(first, name, pattern, lambda name=name: read(sources[name]))
            made = mapping.convert(first, model=model, config=model.config)
            return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

        outline = convert(lambda source: torch.empty(source.shape, dtype=source.dtype, device="meta"))
        for name, tensor in outline.items():
            result[name] = Converted(tuple(tensor.shape), partial(_made, convert, name))
    return result


def _made(convert: Callable[..., dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    return convert(_whole)[name]


def _whole(source: TensorSource) -> torch.Tensor:
    return source.elements(0, math.prod(source.shape)).view(source.shape)


def _prefixed(sources: Mapping[str, InFile], model: Any, names: Mapping[str, torch.Tensor]) -> dict[str, TensorSource]:
    """A base model's file for a model with a head, or the other way round."""
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix or set(sources) & set(names):
        return dict(sources)
    dotted = prefix + "."
    return {
        name.removeprefix(dotted) if name.removeprefix(dotted) in names else dotted + name: source
        for name, source in sources.items()
    }
