"""The kinds of files that Wherry reads: of each a valid tree, how it is written, and how it is loaded."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.security.forgery import CLIENT_STATE, Forgery, Model, digest, engine_of, everything, sign
from tests.security.hostile import content

import wherry
from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.errors import CheckpointError
from wherry.compat.deepspeed.importing import import_checkpoint
from wherry.config import ConfigError
from wherry.config import load as load_config
from wherry.errors import WherryError
from wherry.integrations.model_folder import base_of
from wherry.parallel.hostfile import read_hostfile
from wherry.sources import find

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST, SECOND = "model-1.safetensors", "model-2.safetensors"
# Characters of an error, which are cut beyond.
LONGEST = 21_000


@dataclass
class Kind:
    """A kind of file, with a folder in which a valid one lies."""

    folder: Path
    file: Path
    tree: Any
    write: Callable[[Any], object]
    # Load the file: a digest of all that the load has set. It raises `error`, and then has set nothing.
    load: Callable[[], Any]
    error: type[WherryError] = WherryError
    pickled: bool = False
    # Paths, joined by "/", that are not walked, and those at which another value may load as another result.
    skipped: str = "$^"
    free: str = "$^"
    # Every node is replaced by each n-th bad value, and those at some paths by fewer.
    every: int = 1
    seldom: str = "$^"

    def flaw(self, error: Exception) -> str | None:
        """Say what is wrong with the message of an error, if anything is."""
        told = str(error)
        if str(self.folder) not in told and self.file.name not in told:
            return f"does not name its file: {told[:300]}"
        if len(told) > LONGEST or "Traceback" in told or not all(line.isprintable() for line in told.splitlines()):
            return f"is not a short message that can be printed: {told[:300]!r}"
        return None


def in_json(file: Path, tree: Any, load: Callable[[], Any], **more: Any) -> Kind:
    return Kind(file.parent, file, tree, lambda tree: file.write_bytes(content(tree)), load, **more)


# Checkpoints of Wherry's.


class Loads:
    """An engine that loads checkpoints and must stay as it is when a load is refused."""

    def __init__(self, folder: Path) -> None:
        trained = engine_of(3)
        trained.save_checkpoint(folder, client_state=CLIENT_STATE)
        trained.close()
        self.forgery = Forgery(folder / "global_step3")
        # Alone in its folder: a refused load looks for other checkpoints to propose.
        self.path = self.forgery.write(folder / "alone" / "forged")
        self.engine = engine_of(1, seed=7)
        self.engine.save_checkpoint(folder, tag="own")
        self.own = folder / "own"

    def __call__(self, **options: Any) -> Any:
        read_manifest(self.path)  # which the engine does first: most refusals are quick
        before = everything(self.engine)
        try:
            _, client_state = self.engine.load_checkpoint(self.path, **options)
        except CheckpointError as error:
            assert "broken off" not in str(error)
            assert everything(self.engine) == before, "a refused load has changed the engine"
            raise
        return everything(self.engine), repr(client_state)


def manifest(folder: Path) -> Kind:
    loads = Loads(folder)

    def write(tree: Any) -> None:
        sign(loads.path, tree if isinstance(tree, bytes) else {**tree, "sha256": "0" * 64})

    skipped = r"config/|format|sha256|entries/(?!first.weight|norm.num_batches_tracked)"
    free = "tag|created|versions|config|placement|tensors$|tensors/value|entries/[^/]+/(aliases|dtype|kind)|world_size"
    free += "|engine(/|$)|ranks(/|$)|entries/first.weight$"
    # The run's values are decoded by the engine, which takes longer than the manifest does.
    more: dict[str, Any] = {"skipped": skipped, "free": free, "every": 7, "seldom": "engine/|ranks/"}
    file = loads.path / "manifest.json"
    return Kind(loads.path, file, loads.forgery.manifest, write, loads, CheckpointError, **more)


def header(folder: Path) -> Kind:
    """The header of a checkpoint's file."""
    loads = Loads(folder)
    forgery = loads.forgery
    tree, file = forgery.header, loads.path / forgery.file

    def write(tree: Any) -> None:
        forgery.header = tree
        forgery.write(loads.path)

    skipped = r"(?!first.weight:weight|norm.num|value:0:0)"
    return Kind(loads.path, file, tree, write, loads, CheckpointError, skipped=skipped, every=8)


# Folders of weights.


def weights(seed: int = 5) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return Model().state_dict()


class LoadsWeights:
    """A model and an engine that load weights and must stay as they are when a load is refused."""

    def __init__(self, path: Path) -> None:
        self.path, self.model, self.engine = path, Model(), engine_of(0)

    def __call__(self) -> bytes:
        for target, model in ((self.engine, self.engine.module), (self.model, self.model)):
            torch.nn.init.zeros_(model.first.weight)
            before = digest(model.state_dict())
            try:
                wherry.load_pretrained(target, self.path)
            except WherryError:
                assert digest(model.state_dict()) == before, "a refused load has changed the model"
                if target is self.model:
                    raise
        loaded = digest(self.model.state_dict())
        assert digest(self.engine.module.state_dict()) == loaded
        return loaded


def write_two_files(folder: Path) -> dict[str, Any]:
    """Write weights in two files and their index; return its content."""
    state = weights()
    names = {name: (FIRST if name.startswith("first") else SECOND) for name in state}
    for file in (FIRST, SECOND):
        save_file({name: value for name, value in state.items() if names[name] == file}, folder / file)
    tree = {"metadata": {}, "weight_map": names}
    (folder / INDEX).write_text(json.dumps(tree))
    return tree


def index(folder: Path) -> Kind:
    tree = write_two_files(folder)
    (folder / "folder").mkdir()
    return in_json(folder / INDEX, tree, LoadsWeights(folder), free="metadata")


def with_header(header: Any, data: bytes = bytes(64), length: int | None = None) -> bytes:
    """A safetensors file of any header."""
    text = content(header)
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def weights_file(folder: Path) -> Kind:
    file = folder / WEIGHTS
    save_file(weights(), file, {"format": "pt"})
    whole = file.read_bytes()
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    tree = json.loads(whole[8:start])

    def write(tree: Any) -> None:
        file.write_bytes(tree if isinstance(tree, bytes) else with_header(tree, whole[start:]))

    skipped = r"(?!__metadata__|first.weight|norm.num)"
    return Kind(folder, file, tree, write, LoadsWeights(folder), free="__metadata__", skipped=skipped, every=2)


# Checkpoints of DeepSpeed's.

SHAPES: list[dict[str, Any]] = [{"a.weight": (4, 3), "b.weight": (5,)}, {"a.bias": (3,)}]
RANKS = 2
MODEL = "mp_rank_00_model_states.pt"


def two_ranks() -> dict[str, Any]:
    """Make the files of a checkpoint of stage 2, by name."""
    torch.manual_seed(0)
    weights = {name: torch.randn(shape) for shapes in SHAPES for name, shape in shapes.items()}
    model: dict[str, Any] = {
        "module": OrderedDict(weights | {"seen": torch.tensor([3, 1])}),
        "buffer_names": ["seen"],
        "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in shapes.items()) for shapes in SHAPES],
        "shared_params": {"head": "a.weight"},
        "frozen_param_shapes": {"f": torch.Size([3])},
        "frozen_param_fragments": {"f": torch.ones(3)},
        "global_steps": 5,
        "skipped_steps": 0,
        "global_samples": 20,
        "dp_world_size": RANKS,
        "ds_version": "0.19",
        "lr_scheduler": {"last_batch_iteration": 4},
        "epoch": 7,
    }
    files = {MODEL: model}
    for rank in range(RANKS):
        sizes = [sum(math.prod(shape) for shape in shapes.values()) for shapes in SHAPES]
        flats = [torch.randn(-(-size // RANKS)) for size in sizes]
        states = {i: {"step": torch.tensor(5.0), "exp_avg": torch.rand_like(flat)} for i, flat in enumerate(flats)}
        inner = {"state": states, "param_groups": [{"lr": 0.5, "params": [0]}, {"lr": 0.5, "params": [1]}]}
        parts = {"single_partition_of_fp32_groups": flats, "base_optimizer_state": inner}
        files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {"optimizer_state_dict": parts}
    return files


def universal() -> dict[str, Any]:
    """Make the files of a universal checkpoint, by name."""
    shapes = {"a": (4, 3), "b": (3,)}
    optimizer = {"param_groups": [{"lr": 0.5, "params": [0]}], "optimizer_state_dict": {"state": {0: {"step": 5}}}}
    files = {MODEL: {"module": {}, "param_shapes": [shapes]}, "zero/optimizer_state.pt": optimizer}
    for name, shape in shapes.items():
        files |= {f"zero/{name}/{kind}.pt": {"param": torch.ones(shape), "cat_dim": 0} for kind in ("fp32", "exp_avg")}
        files[f"zero/{name}/step.pt"] = 5
    return files


class Imports:
    """Imports a checkpoint of DeepSpeed's into a folder in which nothing may stay when that is refused."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder.parent / f"{folder.name}.out"

    def __call__(self) -> Any:
        shutil.rmtree(self.out, ignore_errors=True)
        try:
            made = import_checkpoint(self.folder, self.out, None)
        except CheckpointError:
            assert not self.out.exists() or not list(self.out.iterdir()), "a refused import has left something"
            raise
        forgery = Forgery(made)
        return json.dumps([forgery.manifest["entries"], forgery.manifest["engine"], forgery.header]), forgery.data


def _pickle(folder: Path, files: dict[str, Any], file: str, **more: Any) -> Kind:
    """One of the files of a checkpoint."""
    for name, value in files.items():
        (each := folder / "step" / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, each)
    (folder / "latest").write_text("step")
    path = folder / "step" / file

    def write(tree: Any) -> None:
        if isinstance(tree, bytes):
            path.write_bytes(tree)
        else:
            torch.save(tree, path)

    return Kind(folder, path, files[file], write, Imports(folder), CheckpointError, True, **more)


def deepspeed_model(folder: Path) -> Kind:
    free = r"module$|module/seen|buffer_names|param_shapes/|shared_params|frozen|lr_scheduler|global|skipped|epoch"
    free += "|dp_world_size|ds_version"
    return _pickle(folder, two_ranks(), MODEL, free=free, every=9)


def deepspeed_optimizer(folder: Path) -> Kind:
    free = "optimizer_state_dict/base_optimizer_state/(param_groups|state)"
    return _pickle(folder, two_ranks(), "zero_pp_rank_1_mp_rank_00_optim_states.pt", free=free, every=11)


def universal_optimizer(folder: Path) -> Kind:
    return _pickle(folder, universal(), "zero/optimizer_state.pt", free=".*", every=4)


def universal_state(folder: Path) -> Kind:
    return _pickle(folder, universal(), "zero/a/fp32.pt", free="cat_dim")


# Configs.


def config(folder: Path) -> Kind:
    tree = {
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 5e8,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/a", "pin_memory": True},
        },
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "wherry": {"host_memory": "3GB", "unit_classes": ["Block"], "run_dir": "runs", "timeout_s": 60},
    }
    file = folder / "config.json"

    def load() -> Any:
        resolved = load_config(file).to_dict()
        assert load_config(resolved).to_dict() == resolved
        return resolved

    return in_json(file, tree, load, error=ConfigError, free=".*", every=3)


GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 8, "n_positions": 8}


def write_model(folder: Path, **values: Any) -> str:
    """Write the config of a model; return its folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(GPT2 | values))
    return str(folder)


def model_config(folder: Path) -> Kind:
    tree = GPT2 | {"resid_pdrop": 0.1, "architectures": ["GPT2LMHeadModel"], "torch_dtype": "float32", "num_labels": 2}

    def load() -> Any:
        with torch.device("meta"):
            model, _ = find(str(folder)).make(1, 8)
        return {name: value.shape for name, value in model.state_dict().items()}

    return in_json(folder / "config.json", tree, load, free=".*", every=5)


def adapter(folder: Path) -> Kind:
    (folder / "base").mkdir()
    tree = {"base_model_name_or_path": str(folder / "base"), "peft_type": "LORA"}
    free = "peft_type|base_model_name_or_path"
    return in_json(folder / "adapter_config.json", tree, lambda: base_of(folder, "generate"), free=free)


def hostfile(folder: Path) -> Kind:
    file = folder / "hosts"

    def write(tree: Any) -> None:
        if not isinstance(tree, bytes):
            lines = [" ".join(map(str, line)) if isinstance(line, list) else str(line) for line in tree or ()]
            tree = "\n".join(lines).encode(errors="surrogatepass")
        file.write_bytes(tree)

    load = lambda: {host.name: host.slots for host in read_hostfile(str(file))}  # noqa: E731
    return Kind(folder, file, [["alpha", "slots=2"], ["beta", "slots=3"]], write, load, free=".*")


KINDS: dict[str, Callable[[Path], Kind]] = {
    kind.__name__: kind
    for kind in (
        manifest, header, index, weights_file, deepspeed_model, deepspeed_optimizer,
        universal_optimizer, universal_state, config, model_config, adapter, hostfile,
    )
}  # fmt: skip
