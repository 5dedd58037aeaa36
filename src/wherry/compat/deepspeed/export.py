"""`deepspeed.utils.zero_to_fp32`: a checkpoint's fp32 weights, for programs that know nothing of its ranks.

The checkpoints are Wherry's. They are read a tensor at a time, and checked before.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wherry.checkpoint import export as exporting
from wherry.checkpoint import folder as folders
from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.files import write_text
from wherry.checkpoint.format import WEIGHT, Entry, Manifest
from wherry.checkpoint.reader import CheckpointReader
from wherry.compat.deepspeed import universal
from wherry.compat.deepspeed.importing import is_theirs
from wherry.errors import WherryError
from wherry.observe.log import say
from wherry.plan.quantities import parse_bytes


class LazyTensor:
    """A weight of a checkpoint that is read when `contiguous()` is called."""

    def __init__(self, folder: Path, manifest: Manifest, name: str, entry: Entry) -> None:
        self._folder, self._manifest, self._name = folder, manifest, name
        self.shape = torch.Size(entry.shape)
        self.dtype = exporting.exported_dtype(entry, torch.float32)

    def numel(self) -> int:
        return self.shape.numel()

    def contiguous(self) -> torch.Tensor:
        with CheckpointReader(self._folder, self._manifest) as source:
            return source.tensor(self._name, WEIGHT, self.dtype)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """The fp32 weights of the checkpoint `tag`, or of the latest, by name; buffers in their own dtype.

    Tied weights are one tensor under each of their names. With `lazy_mode` each is read by its `contiguous()`.
    """
    folder, manifest, entries = _open(checkpoint_dir, tag, exclude_frozen_parameters)
    found: dict[str, Any] = {}
    with CheckpointReader(folder, manifest) as source:
        for name, entry in entries.items():
            value: Any = LazyTensor(folder, manifest, name, entry)
            if not lazy_mode:
                value = source.tensor(name, WEIGHT, value.dtype)
            found.update(dict.fromkeys((name, *entry.aliases), value))
    return found


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 weights to `output_dir`: as torch.save's files, or as safetensors with `safe_serialization`.

    No more than one tensor of a safetensors file, or one of torch.save's files, is in memory.
    """
    size = sys.maxsize
    if max_shard_size is not None:
        given = f"{max_shard_size}B" if isinstance(max_shard_size, int) else max_shard_size
        size = parse_bytes(given, "max_shard_size")
    out = Path(output_dir)
    folder, manifest, entries = _open(checkpoint_dir, tag, exclude_frozen_parameters, check=not safe_serialization)
    if safe_serialization:
        exporting.export(
            folder, out, dtype=torch.float32, max_shard_size=size, exclude_frozen=exclude_frozen_parameters
        )
        return
    parts = list(_shards(entries, size))
    files = [f"pytorch_model-{number:05}-of-{len(parts):05}.bin" for number in range(1, len(parts) + 1)]
    if len(parts) == 1:
        files = ["pytorch_model.bin"]
    places: dict[str, str] = {}
    total = 0
    with CheckpointReader(folder, manifest) as source:
        for file, names in zip(files, parts, strict=True):
            weights: dict[str, torch.Tensor] = {}
            for name in names:
                tensor = source.tensor(name, WEIGHT, exporting.exported_dtype(entries[name], torch.float32))
                total += tensor.nbytes
                weights.update(dict.fromkeys((name, *entries[name].aliases), tensor))
            exporting.write_torch(weights, out / file)
            places.update(dict.fromkeys(weights, file))
    if len(parts) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_text(out / "pytorch_model.bin.index.json", json.dumps(index, indent=2) + "\n")


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load a checkpoint's weights into `model`, on the host, a tensor at a time; returns the model.

    A model that an engine trains is taken out of it first, for which every rank makes the call. Tensors that the model
    has and the checkpoint has not stay as they are.
    """
    from wherry.compat.deepspeed.engine import give_back

    folder, manifest, entries = _open(checkpoint_dir, tag, partial=True)
    give_back(model)
    model.cpu()
    own = {name: tensor.shape for name, tensor in model.state_dict().items()}
    names = {name: [each for each in (name, *entry.aliases) if each in own] for name, entry in entries.items()}
    wrong = [
        f"{name} is {entry.shape} in the checkpoint and {tuple(own[each])} in the model"
        for name, entry in entries.items()
        for each in names[name]
        if tuple(own[each]) != tuple(entry.shape)
    ]
    if wrong:
        raise CheckpointError(f"{folder}: {'; '.join(wrong[:8])}; give the model that was trained")
    if not any(names.values()):
        raise CheckpointError(f"{folder}: the model has none of its {len(entries)} tensors; give the trained one")
    with CheckpointReader(folder, manifest) as source:
        for name, entry in entries.items():
            value = source.tensor(name, WEIGHT, exporting.exported_dtype(entry, torch.float32))
            model.load_state_dict(dict.fromkeys(names[name], value), strict=False)
    strange = [name for name in entries if not names[name]]
    missing = sorted(set(own) - {each for found in names.values() for each in found})
    for found, what in ((strange, "the model has no"), (missing, "the checkpoint has no")):
        if found:
            say("load_state_dict_from_zero_checkpoint: %s %s", what, ", ".join(found[:8]))
    return model


def _open(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None,
    exclude_frozen: bool = False,
    *,
    check: bool = True,
    partial: bool = False,
) -> tuple[Path, Manifest, dict[str, Entry]]:
    """A checkpoint's folder, its manifest, and what of it is wanted."""
    given = Path(checkpoint_dir)
    if tag is not None and not (given / tag).is_dir():
        there = ", ".join(folders.newest_first(given)) or "none"
        raise CheckpointError(f"{given} holds no checkpoint {tag}; those that are there: {there}")
    place = given if tag is None else given / folders.check_tag(tag)
    if is_theirs(place) or is_theirs(place / (folders.read_latest(place) or ".")):
        raise CheckpointError(
            f"{place} holds a checkpoint that DeepSpeed has written; turn it into one of Wherry's first: "
            f"wherry import-deepspeed {given} OUT"
        )
    folder = exporting.find(place)
    manifest = exporting.verified(folder) if check else read_manifest(folder)
    left_out = partial and bool(manifest.engine.get("frozen_excluded"))
    return folder, manifest, exporting.exported_entries(folder, manifest, exclude_frozen=exclude_frozen or left_out)


def _shards(entries: dict[str, Entry], size: int) -> Iterator[list[str]]:
    """Names, in files of at most `size` bytes; a larger tensor has one of its own."""
    names: list[str] = []
    held = 0
    for name, entry in entries.items():
        nbytes = entry.numel * exporting.exported_dtype(entry, torch.float32).itemsize
        if names and held + nbytes > size:
            yield names
            names, held = [], 0
        names.append(name)
        held += nbytes
    yield names


# Programs that look into a checkpoint's files, as Lightning does for what it has saved beside the weights, find files
# of torch's made for them, with all that DeepSpeed's have but tensors of weights and of optimizer state.


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int = 0) -> str:
    """A file for `torch.load` with the client state and the counts of a checkpoint.

    It is the one in its folder. Where `import wherry` has saved there is none: then one is made, without weights, which
    lasts as long as the process.
    """
    there = _there(checkpoint_dir, ("zero_pp_rank_0_" if zero_stage == 3 else "") + "mp_rank_00_model_states.pt")
    if there:
        return there[0]
    folder, manifest, _ = _open(checkpoint_dir, None, check=False)
    with CheckpointReader(folder, manifest) as source:
        return _made_for(folder, "mp_rank_00_model_states.pt", universal.model_states(manifest, source))


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """Files for `torch.load` that say at which stage a checkpoint was saved and by how many ranks, in their order.

    They are those in its folder; where `import wherry` has saved, one that is made as above.
    """
    there = _there(checkpoint_dir, "*_optim_states.pt")
    if there:
        return there
    folder, manifest, _ = _open(checkpoint_dir, None, check=False)
    stage = int(manifest.config.get("zero_optimization", {}).get("stage", 0))
    states = universal.optimizer_states(stage, manifest.world_size, manifest.config)
    return [_made_for(folder, "zero_pp_rank_0_mp_rank_00_optim_states.pt", states)]


def _there(checkpoint_dir: str | os.PathLike[str], pattern: str) -> list[str]:
    def order(path: str) -> list[Any]:
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]

    return sorted(map(str, Path(checkpoint_dir).glob(pattern)), key=order)


def _made_for(folder: Path, name: str, value: dict[str, Any]) -> str:
    """`value` in a file of torch's, beside nobody's checkpoint: what is not in a manifest has no place there."""
    made = Path(tempfile.mkdtemp(prefix=f"wherry-{folder.name}-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    torch.save(value, made / name)
    return str(made / name)


def main(argv: Sequence[str] | None = None) -> int:
    """The command `zero_to_fp32.py`."""
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32.py", description="Write a checkpoint's weights in fp32, whole, for other programs."
    )
    parser.add_argument("checkpoint_dir", help="folder of checkpoints, like path/checkpoint-12")
    parser.add_argument("output_dir", help="folder for pytorch_model.bin or model.safetensors")
    parser.add_argument("--max_shard_size", default="5GB", help="bytes of a file, like 5GB (default)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="checkpoint, like global_step1 (default: the latest)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    parser.add_argument("-d", "--debug", action="store_true", help="show where an error comes from")
    given = parser.parse_args(argv)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            given.checkpoint_dir,
            given.output_dir,
            max_shard_size=given.max_shard_size,
            safe_serialization=given.safe_serialization,
            tag=given.tag,
            exclude_frozen_parameters=given.exclude_frozen_parameters,
        )
    except (WherryError, OSError) as error:
        if given.debug:
            raise
        print(f"zero_to_fp32: {error}", file=sys.stderr)
        return 2
    return 0
