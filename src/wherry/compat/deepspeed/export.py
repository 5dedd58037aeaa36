"""`deepspeed.utils.zero_to_fp32`: export the whole fp32 weights of Wherry's checkpoints, a tensor at a time."""

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
from wherry.compat.deepspeed import saved_files
from wherry.compat.deepspeed.importing import is_theirs
from wherry.errors import WherryError
from wherry.observe.log import say
from wherry.plan.quantities import parse_bytes

Folder = str | os.PathLike[str]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Folder, tag: str | None = None, exclude_frozen_parameters: bool = False
) -> dict[str, torch.Tensor]:
    """Read the fp32 weights of the checkpoint `tag`, or of the latest, by name; buffers keep their dtype.

    Tied weights are one tensor under each of their names.
    """
    folder, manifest = _find(checkpoint_dir, tag)
    entries = exporting.exported_entries(folder, manifest, exclude_frozen=exclude_frozen_parameters)
    with CheckpointReader(folder, manifest) as source:
        return _read(source, entries)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Folder,
    output_dir: Folder,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 weights to `output_dir`: as torch.save's files, or as safetensors with `safe_serialization`.

    At most one tensor of a safetensors file, or one of torch.save's files, is in memory.
    """
    text = f"{max_shard_size}B" if isinstance(max_shard_size, int) else max_shard_size
    size = sys.maxsize if text is None else parse_bytes(text, "max_shard_size")
    out, exclude = Path(output_dir), exclude_frozen_parameters
    folder, manifest = _find(checkpoint_dir, tag, check=not safe_serialization)
    if safe_serialization:
        exporting.export(folder, out, dtype=torch.float32, max_shard_size=size, exclude_frozen=exclude)
        return
    entries = exporting.exported_entries(folder, manifest, exclude_frozen=exclude)
    shards = list(_shards(entries, size))
    file_of: dict[str, str] = {}
    with CheckpointReader(folder, manifest) as source:
        for number, shard in enumerate(shards, 1):
            part = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
            weights = _read(source, shard)
            exporting.write_torch(weights, out / f"pytorch_model{part}.bin")
            file_of.update(dict.fromkeys(weights, f"pytorch_model{part}.bin"))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(map(_nbytes, entries.values()))}, "weight_map": file_of}
        write_text(out / "pytorch_model.bin.index.json", json.dumps(index, indent=2) + "\n")


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: Folder, tag: str | None = None) -> nn.Module:
    """Load a checkpoint's weights into `model`, on the host, a tensor at a time; returns the model.

    A model that an engine trains is taken out of it first, for which every rank makes the call. Tensors that are not
    in the checkpoint keep their values.
    """
    from wherry.compat.deepspeed.engine import give_back

    folder, manifest = _find(checkpoint_dir, tag)
    without_frozen = bool(manifest.engine.get("frozen_excluded"))
    entries = exporting.exported_entries(folder, manifest, exclude_frozen=without_frozen)
    give_back(model)
    model.cpu()
    own = {name: tensor.shape for name, tensor in model.state_dict().items()}
    names = {name: [each for each in (name, *entry.aliases) if each in own] for name, entry in entries.items()}
    wrong = [
        f"{name} is {entries[name].shape} in the checkpoint and {tuple(own[each])} in the model"
        for name, loaded in names.items()
        for each in loaded
        if tuple(own[each]) != tuple(entries[name].shape)
    ]
    if wrong:
        raise CheckpointError(f"{folder}: {'; '.join(wrong[:8])}; give the model that was trained")
    if not any(names.values()):
        raise CheckpointError(f"{folder}: the model has none of its {len(entries)} tensors; give the trained one")
    with CheckpointReader(folder, manifest) as source:
        for name, entry in entries.items():
            weights = _read(source, {name: entry})
            model.load_state_dict({each: weights[each] for each in names[name]}, strict=False)
    unused = [name for name in entries if not names[name]]
    missing = sorted(set(own) - {each for loaded in names.values() for each in loaded})
    for listed, what in ((unused, "the model has no"), (missing, "the checkpoint has no")):
        if listed:
            say("load_state_dict_from_zero_checkpoint: %s %s", what, ", ".join(listed[:8]))
    return model


def _find(checkpoint_dir: Folder, tag: str | None, *, check: bool = True) -> tuple[Path, Manifest]:
    """Find a checkpoint's folder, and read its manifest; `check` verifies every byte."""
    source = Path(checkpoint_dir)
    if tag is not None and not (source / tag).is_dir():
        tags = ", ".join(folders.newest_first(source)) or "none"
        raise CheckpointError(f"{source} holds no checkpoint {tag}; those that are there: {tags}")
    path = source if tag is None else source / folders.check_tag(tag)
    if is_theirs(path) or is_theirs(path / (folders.read_latest(path) or ".")):
        raise CheckpointError(
            f"{path} holds a checkpoint that DeepSpeed has written; turn it into one of Wherry's first: "
            f"wherry import-deepspeed {source} OUT"
        )
    folder = exporting.find(path)
    return folder, exporting.verified(folder) if check else read_manifest(folder)


def _read(source: CheckpointReader, entries: dict[str, Entry]) -> dict[str, torch.Tensor]:
    """Read tensors, tied ones as one under each of their names."""
    weights: dict[str, torch.Tensor] = {}
    for name, entry in entries.items():
        tensor = source.tensor(name, WEIGHT, exporting.exported_dtype(entry, torch.float32))
        weights.update(dict.fromkeys((name, *entry.aliases), tensor))
    return weights


def _nbytes(entry: Entry) -> int:
    return entry.numel * exporting.exported_dtype(entry, torch.float32).itemsize


def _shards(entries: dict[str, Entry], size: int) -> Iterator[dict[str, Entry]]:
    """Split a model into files of at most `size` bytes; a larger tensor has a file of its own."""
    shard: dict[str, Entry] = {}
    held = 0
    for name, entry in entries.items():
        if shard and held + _nbytes(entry) > size:
            yield shard
            shard, held = {}, 0
        shard[name] = entry
        held += _nbytes(entry)
    yield shard


# Lightning's converter loads the client state and the stage from these files.


def get_model_state_file(checkpoint_dir: Folder, zero_stage: int = 0) -> str:
    """Find the file with a checkpoint's client state and counts.

    `import wherry` saves none: a temporary one without weights is written then, which lasts as long as the process.
    """
    if (path := Path(checkpoint_dir, saved_files.model_file(zero_stage))).exists():
        return str(path)
    folder, manifest = _find(checkpoint_dir, None, check=False)
    with CheckpointReader(folder, manifest) as source:
        return _write_temporary(folder, path.name, saved_files.model_states(manifest, source))


def get_optim_files(checkpoint_dir: Folder) -> list[str]:
    """List the files with a checkpoint's stage and number of ranks, by rank; one is written where none is saved."""
    if paths := [*Path(checkpoint_dir).glob("*_optim_states.pt")]:
        return [str(path) for path in sorted(paths, key=lambda path: [*map(int, re.findall(r"\d+", path.name))])]
    folder, manifest = _find(checkpoint_dir, None, check=False)
    stage = int(manifest.config.get("zero_optimization", {}).get("stage", 0))
    states = saved_files.optimizer_states(stage, manifest.world_size, manifest.config)
    return [_write_temporary(folder, saved_files.optimizer_file(0), states)]


def _write_temporary(folder: Path, name: str, value: dict[str, Any]) -> str:
    """Write a file outside the checkpoint, whose manifest lists all of its own."""
    made = Path(tempfile.mkdtemp(prefix=f"wherry-{folder.name}-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    torch.save(value, made / name)
    return str(made / name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `zero_to_fp32.py`."""
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32.py", description="Write a checkpoint's weights in fp32, whole, for other programs."
    )
    parser.add_argument("checkpoint_dir", help="folder of checkpoints, like path/checkpoint-12")
    parser.add_argument("output_dir", help="folder for pytorch_model.bin or model.safetensors")
    parser.add_argument("--max_shard_size", default="5GB", help="bytes of a file, like 5GB (default)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="checkpoint, like global_step1 (default: the latest)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**vars(parser.parse_args(argv)))
    except (WherryError, OSError) as error:
        print(f"zero_to_fp32: {error}", file=sys.stderr)
        return 2
    return 0
