"""Weights from safetensors files into an engine or a model: each rank reads its own slices, into its shards."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wherry.engine import Engine
from wherry.errors import WherryError, one_line
from wherry.sharding.layout import Place, tile_places
from wherry.sharding.meta import Given, give, give_buffer, pieces, write
from wherry.sharding.model_checks import taken
from wherry.sharding.param_shard import ParamShard, own_values, shard_of
from wherry.sharding.quantized import is_wide, turned
from wherry.sharding.safetensors_folder import TensorBlock, TensorSource, Turned, open_folder


@dataclass
class Loaded:
    """What a load has left out: names of the model that no file has, and names in the files that the model has not."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def load_pretrained(engine_or_model: Engine | nn.Module, folder_or_file: str | Path, *, strict: bool = True) -> Loaded:
    """Load weights from a safetensors file, or from a folder with one or several of them and their index.

    Every rank reads the slices of its own shards and nothing else; master weights get the precision of the file. Every
    rank must call it. Missing, unexpected and mis-shaped keys are one error before anything is changed; with
    `strict=False` missing and unexpected ones are returned instead. Weights that are tied need to be there once.

    Of a model on the meta device nothing is read yet: `wherry.initialize` reads instead of drawing values, a unit at a
    time, so the files stay where they are until then. The model may be cast, copied and wrapped before; moving it off
    the meta device, writing to its weights and pickling it are errors.

        with wherry.Init(meta=True):
            model = MyModel()
        wherry.load_pretrained(model, "Llama-3.1-8B/")
        engine, *_ = wherry.initialize(model=model, config="config.json")
    """
    engine = engine_or_model if isinstance(engine_or_model, Engine) else None
    if engine is not None:
        engine.meet("load_pretrained()")
    model = engine.module if engine is not None else engine_or_model
    if engine is None:
        _refuse_held(model)
    sources, result = _matched(model, folder_or_file, strict, engine)
    if engine is not None:
        _load_engine(engine, sources)
    else:
        _load_model(model, sources)
    _load_others(model, sources)
    return result


def _refuse_held(model: nn.Module) -> None:
    """An engine holds more of its weights than the model does: masters, and shards."""
    name = taken(model)
    if name is not None:
        raise WherryError(
            f"load_pretrained: {name} belongs to an engine, which holds its shards and masters; give the engine "
            "that wherry.initialize has returned in the place of the model"
        )


# What goes where.


def _names(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the model's state_dict, by every name they have, without making one."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _matched(
    model: nn.Module, path: str | Path, strict: bool, engine: Engine | None
) -> tuple[dict[torch.Tensor, TensorSource], Loaded]:
    """For each tensor of the model the file's, or an error that says all that is wrong."""
    try:
        names = _names(model)
        sources = open_folder(path, model, names)
        places = tile_places(model)
        wrong, kinds = _cut_tiles(places, sources), dict[str, str]()
        for name in turned(model) & sources.keys():
            sources[name] = Turned(sources[name])
        by_tensor: dict[torch.Tensor, TensorSource] = {}
        other_names: dict[torch.Tensor, list[str]] = {}
        for name, tensor in names.items():
            other_names.setdefault(tensor, []).append(name)
            source = sources.get(name)
            if source is None:
                continue
            expected = _logical_shape(tensor, name, engine)
            if source.shape != expected:
                wrong[name] = _unlike(list(source.shape), list(expected))
            elif not _of_a_kind(source, tensor):
                kinds[name] = _unlike(source.dtype, tensor.dtype)  # type: ignore[attr-defined]
            by_tensor.setdefault(tensor, source)
        lacking = [group[0] for tensor, group in other_names.items() if tensor not in by_tensor]
        # A file has a tiled layer's weights whole, by one name.
        lacking = [places[name].whole if name in places else name for name in lacking]
        result = Loaded(
            missing=[name for name in dict.fromkeys(lacking) if name not in wrong],
            unexpected=sorted(set(sources) - set(names)),
        )
        problem = _problem(path, result if strict else Loaded(), wrong, kinds, names)
    except OSError as error:
        problem, by_tensor, result = f"load_pretrained: {error.filename or path}: {error.strerror}", {}, Loaded()
    except WherryError as error:
        problem, by_tensor, result = str(error), {}, Loaded()
    problems = [problem] if engine is None else engine.comm.gather_objects(problem)
    for rank, found in enumerate(problems):
        if found is not None:
            raise WherryError(found if found == problem else f"rank {rank}: {found}")
    return by_tensor, result


def _cut_tiles(places: Mapping[str, Place], sources: dict[str, TensorSource]) -> dict[str, str]:
    """Files have a tiled layer's weights whole: its tiles read their blocks of them. Returns those of another shape."""
    wrong: dict[str, str] = {}
    for name, place in places.items():
        whole = sources.get(place.whole)
        if whole is None or name in sources:
            continue
        if whole.shape == place.whole_shape:
            sources[name] = TensorBlock(whole, place.offsets, place.shape)
        else:
            wrong[place.whole] = _unlike(list(whole.shape), list(place.whole_shape))
    for whole_name in {place.whole for place in places.values()}:
        sources.pop(whole_name, None)
    return wrong


def _unlike(found: Any, expected: Any) -> str:
    return f"{found} in the file, {expected} in the model"


def _problem(
    path: str | Path, result: Loaded, wrong: Mapping[str, str], kinds: Mapping[str, str], names: Iterable[str]
) -> str | None:
    parts = []
    if result.missing:
        parts.append(f"{len(result.missing)} missing from the files: {_shown(result.missing)}")
    if result.unexpected:
        close = difflib.get_close_matches(one_line(result.unexpected[0]), list(names), n=1)
        hint = f" (the model has {close[0]})" if close else ""
        parts.append(f"{len(result.unexpected)} that the model does not have: {_shown(result.unexpected)}{hint}")
    if wrong:
        parts.append(f"{len(wrong)} of another shape: {_shown([': '.join(item) for item in wrong.items()])}")
    if kinds:
        parts.append(f"{len(kinds)} of another kind: {_shown([': '.join(item) for item in kinds.items()])}")
    if not parts:
        return None
    return f"load_pretrained: {path} does not fit the model; nothing was loaded.\n  " + "\n  ".join(parts)


def _of_a_kind(source: TensorSource, tensor: torch.Tensor) -> bool:
    """Numbers to compute with and codes are not made of each other by a cast."""
    dtype = getattr(source, "dtype", tensor.dtype)
    return not isinstance(tensor, nn.Parameter) or is_wide(dtype) == is_wide(tensor.dtype)


def _shown(names: list[str]) -> str:
    more = f", and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(map(one_line, names[:20])) + more


def _logical_shape(tensor: torch.Tensor, name: str, engine: Engine | None) -> tuple[int, ...]:
    """The shape in a file, where tensor-parallel ranks may hold a part each."""
    place = engine.access.place_of.get(tensor) if engine is not None else None  # type: ignore[call-overload]
    if place is not None:
        slot = place[0].layout.slots[place[1]]
        if slot.part is not None:
            if slot.part.global_shape is None:
                raise WherryError(
                    f"{name}: this parameter is cut among tensor-parallel ranks and does not say along which dim; "
                    "set its partition_dim"
                )
            return tuple(slot.part.global_shape)
    return tuple(tensor.shape)


# Into an engine.


@torch.no_grad()
def _load_engine(engine: Engine, sources: Mapping[torch.Tensor, TensorSource]) -> None:
    access = engine.access
    pinned = [flat.name for unit in engine.units for flat in unit.flats if flat.pins]
    if pinned:
        raise WherryError(f"load_pretrained: {pinned[0]} is inside wherry.gathered; leave that context first")
    engine.zero_grad()
    access.gatherer.forget_near()
    for unit in engine.units:
        access.gatherer.release(unit)
        for flat in unit.flats:
            chosen = {i: sources[p] for i, p in enumerate(flat.parameters) if p in sources}
            if not chosen:
                continue
            state = access.state_of.get(flat)
            masters: AbstractContextManager[list[Any]] = nullcontext([]) if state is None else state.opened(write=True)
            with flat.opened(write=True) as shard, masters as opened:
                for start, values in pieces(flat.layout, flat.rank, chosen):
                    write(start, values, shard)
                    for segment, held in zip(state.segments if state is not None else (), opened, strict=True):
                        write(start, values, held["master"], segment.start)
            if flat.resident and flat.layout.ranks > 1:
                access.comm.all_gather(flat.whole, flat.shard_memory).wait()


# Into a model that no engine has.


@torch.no_grad()
def _load_model(model: nn.Module, sources: Mapping[torch.Tensor, TensorSource]) -> None:
    own_values(model.parameters())
    given = {p: Given(n, sources[p]) for n, p in model.named_parameters() if p in sources}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and parameter in given:
                give(module, name, given[parameter])
    for parameter, (_, source) in given.items():
        shard = shard_of(parameter)
        if shard is not None:
            _load_shard(shard, source)
        elif not parameter.is_meta:
            parameter.data.copy_(_whole(source))


def _load_shard(shard: ParamShard, source: TensorSource) -> None:
    shard.release()
    start = shard.comm.rank * shard.shard.numel()
    stop = min(start + shard.shard.numel(), shard.shape.numel())
    if start < stop:
        shard.shard[: stop - start].copy_(source.elements(start, stop))


@torch.no_grad()
def _load_others(model: nn.Module, sources: Mapping[torch.Tensor, TensorSource]) -> None:
    """Buffers: all of each, on every rank."""
    off_meta: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or buffer not in sources:
                continue
            give_buffer(module, name)
            memory = buffer
            if buffer.is_meta:
                memory = module._buffers[name] = off_meta.setdefault(buffer, torch.empty_like(buffer, device="cpu"))
            memory.copy_(_whole(sources[buffer]))


def _whole(source: TensorSource) -> torch.Tensor:
    return source.elements(0, math.prod(source.shape)).view(source.shape)
