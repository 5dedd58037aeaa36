"""A folder that Transformers loads: its tokenizer, and its model on the meta device with values that files have."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.config.problems import path_meant
from wherry.errors import WherryError, one_line
from wherry.integrations.bits import bits_in, load_codes, to_bits
from wherry.regular import read_regular

if TYPE_CHECKING:
    import torch

EXPECTED = "a run's folder, checkpoints, or a folder with config.json, safetensors files and a tokenizer"
# Of a model on the hub: no code, and no weights but safetensors.
_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
_ADAPTER = "adapter_config.json"
_LONGEST = 1 << 20
FINISHED = "model"
"""In the folder of a run of `wherry finetune`: what has come of it."""
# Any of these is a tokenizer.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")


@contextlib.contextmanager
def opened(path: Path, command: str) -> Iterator[Path]:
    """A folder that transformers loads: the one given, or what a checkpoint is exported to as long as this lasts."""
    from wherry.checkpoint.errors import CheckpointError
    from wherry.checkpoint.export import find

    if not path.exists():
        hub = f"; a model of the hub is fetched by `hf download {path}`"
        raise WherryError(f"{command}: {path}: there is no such folder{path_meant(path) or hub}")
    for folder in (path, path / FINISHED):
        if (folder / "config.json").exists() and any(folder.glob("*.safetensors")):
            _refuse_incomplete(folder, command, "")
            yield folder
            return
    if (adapter := adapter_in(path)) is not None:
        base = base_of(adapter, command)
        raise WherryError(f"{command}: {path} has an adapter, and the whole model is asked for, which is {base}")
    try:
        checkpoint = find(path)
    except CheckpointError as error:
        raise WherryError(f"{command}: {error}; expected {EXPECTED}") from None
    with tempfile.TemporaryDirectory(prefix=f"wherry-{command}-") as made:
        _export(checkpoint, Path(made), command)
        cure = f"; add it to what `wherry export {checkpoint} OUT` writes, and give OUT here"
        _refuse_incomplete(Path(made), command, cure)
        yield Path(made)


def adapter_in(path: Path) -> Path | None:
    """The folder of an adapter of PEFT's: this one, or what a run has made."""
    return next((folder for folder in (path, path / FINISHED) if (folder / _ADAPTER).exists()), None)


def base_of(adapter: Path, command: str) -> Path:
    """Return the folder of the model that an adapter was trained for."""
    file = adapter / _ADAPTER
    try:
        base = json.loads(read_regular(file, _LONGEST))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WherryError(f"{command}: {file} does not say whose adapter it is: {error}") from None
    folder = folder_on(base, command, fetch=False) if isinstance(base, str) else Path()
    if not isinstance(base, str) or not os.path.exists(folder):  # Path.exists raises for a long name
        raise WherryError(
            f"{command}: {adapter} is an adapter of {one_line(str(base))}, which is not here; give that model's "
            f"folder as MODEL, and --adapter {adapter}"
        )
    return folder


def folder_on(model: str, command: str, *, fetch: bool) -> Path:
    """The folder that MODEL names: of this machine, or of the hub's cache on it, to where it may be fetched."""
    from wherry.sources import folder_of, without_page

    model = without_page(model)
    folder = folder_of(model, *_FILES, fetch=fetch, command=f"{command}: there is no such folder here, and")
    if folder == Path(model) or any(folder.glob("*.safetensors")):
        return folder
    if fetch:
        raise WherryError(f"{command}: {model} has no safetensors files on the hub, or in its cache on this machine")
    return Path(model)


def with_adapter(model: Any, adapter: Path, command: str) -> Any:
    """A model of the meta device with an adapter around it, which is in memory."""
    import peft

    from wherry.sharding.meta import StayingInMemory

    folder = adapter_in(adapter)
    if folder is None:
        raise WherryError(f"{command}: --adapter {adapter}: there is no {_ADAPTER} in it")
    try:
        with StayingInMemory(), warnings.catch_warnings(action="ignore", category=FutureWarning):
            return peft.PeftModel.from_pretrained(model, str(folder), local_files_only=True)
    except WherryError:
        raise
    except Exception as error:  # PEFT has as many errors as kinds of adapters
        raise WherryError(f"{command}: {adapter} does not fit the model: {' '.join(str(error).split())}") from error


def _export(checkpoint: Path, folder: Path, command: str) -> None:
    from wherry.checkpoint.checks import read_manifest
    from wherry.checkpoint.export import export
    from wherry.observe.memory import format_bytes
    from wherry.train.gpt2 import translation_of

    needed = sum(4 * entry.numel for entry in read_manifest(checkpoint).entries.values())
    if (free := shutil.disk_usage(folder).free) < needed:
        raise WherryError(
            f"{command}: {checkpoint} is exported first, which takes {format_bytes(needed)}, and {folder.parent} has "
            f"{format_bytes(free)} free; set TMPDIR to a folder with more"
        )
    try:
        export(checkpoint, folder, translation_of=translation_of)
    except OSError as error:
        raise WherryError(f"{command}: {error.filename or folder}: {error.strerror}") from error


def _refuse_incomplete(folder: Path, command: str, cure: str) -> None:
    if not (folder / "config.json").exists():
        raise WherryError(f"{command}: the checkpoint's model has no config.json that transformers knows{cure}")
    if not any((folder / name).exists() for name in _TOKENIZERS):
        raise WherryError(f"{command}: the model has no tokenizer, without which a prompt has no ids{cure}")


def stored(folder: Path) -> tuple[int, int, torch.dtype]:
    """How many weights a folder has, how many bytes of codes beside them, and the dtype of the largest tensor."""
    from torch import nn

    from wherry.sharding.quantized import is_wide
    from wherry.sharding.safetensors_folder import InFile, open_folder

    sources = [source for source in open_folder(folder, nn.Module(), {}).values() if isinstance(source, InFile)]
    wide = [source for source in sources if is_wide(source.dtype)]
    count, every = (sum(math.prod(source.shape) for source in found) for found in (wide, sources))
    return count, every - count, max(wide or sources, key=lambda source: math.prod(source.shape)).dtype


def tokenizer_of(folder: Path, adapter: str | None) -> Path:
    """The folder of a model's tokenizer: its adapter's, if that has one, as chats may be written otherwise there."""
    own = adapter_in(Path(adapter)) if adapter is not None else None
    return own if own is not None and any((own / name).exists() for name in _TOKENIZERS) else folder


def read_tokenizer(folder: Path, command: str) -> Any:
    import transformers

    from wherry.sources import around

    try:
        with around(str(folder)):
            return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # each kind of tokenizer reads its files in its own way
        why = " ".join(str(error).split())
        raise WherryError(f"{command}: the tokenizer in {folder} cannot be read: {why}") from error


def read_model(folder: Path, dtype: torch.dtype, command: str, bits: int | None = None) -> Any:
    """A causal language model on the meta device. Its values are in the folder's files until an engine reads them, and
    makes codes of so many bits of them where that is asked for."""
    import torch

    import wherry
    from wherry.sources import around, find

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # a cast would reach tables that a model keeps in fp32 as well
    try:
        with around(str(folder)), wherry.Init(meta=True):
            model: Any = find(str(folder.absolute())).make(1, 1)[0]
    finally:
        torch.set_default_dtype(before)
    if not getattr(model, "can_generate", bool)() or model.config.is_encoder_decoder:
        raise WherryError(f"{command}: {folder} holds a {type(model).__name__}, which is no causal language model")
    if bits_in(folder, command, bits) is not None:
        return load_codes(model, folder, dtype, command)
    if bits is not None:
        to_bits(model, bits, dtype, command)
    wherry.load_pretrained(model, folder)
    return model
