"""The kinds of files that Wherry reads: of each a valid tree, how it is written, and how it is loaded."""

from __future__ import annotations

import hashlib
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
from tests.security.forgery import CLIENT_STATE, Forgery, Model, engine_of, everything, sign
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
    # Every node is replaced by each n-th bad value.
    every: int = 1

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

    # The run's values are decoded by the engine, which takes longer than the manifest does.
    skipped = r"config/|format|sha256|engine/|ranks/|entries/(?!first.weight|norm.num_batches_tracked)"
    free = "tag|created|versions|config|placement|tensors$|tensors/value|entries/[^/]+/(aliases|dtype|kind)|world_size"
    free += "|engine$|ranks$|entries/first.weight$"
    more: dict[str, Any] = {"skipped": skipped, "free": free, "every": 7}
    file = loads.path / "manifest.json"
    return Kind(loads.path, file, loads.forgery.manifest, write, loads, CheckpointError, **more)


def values_of_a_run(folder: Path) -> Kind:
    kind = manifest(folder)
    kind.skipped = r"(?!engine/|ranks/)"
    kind.free, kind.every = "engine/|ranks/", 23
    return kind


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


def digest(model: torch.nn.Module) -> bytes:
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).digest()


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
            before = digest(model)
            try:
                wherry.load_pretrained(target, self.path)
            except WherryError:
                assert digest(model) == before, "a refused load has changed the model"
                if target is self.model:
                    raise
        assert digest(self.model) == digest(self.engine.module)
        return digest(self.model)


def write_two_files(folder: Path) -> dict[str, str]:
    """Weights in two files, without their index; returns its map."""
    state = weights()
    names = {name: (FIRST if name.startswith("first") else SECOND) for name in state}
    for file in (FIRST, SECOND):
        save_file({name: value for name, value in state.items() if names[name] == file}, folder / file)
    return names


def index(folder: Path) -> Kind:
    names = write_two_files(folder)
    (folder / "folder").mkdir()
    tree = {"metadata": {}, "weight_map": names}
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


def write_two_ranks(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write a checkpoint of DeepSpeed's stage 2; return the tree of the model's file, and of the last optimizer's."""
    torch.manual_seed(0)
    (tag := folder / "step").mkdir(parents=True)
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
    torch.save(model, tag / "mp_rank_00_model_states.pt")
    optimizer: dict[str, Any] = {}
    for rank in range(RANKS):
        sizes = [sum(math.prod(shape) for shape in shapes.values()) for shapes in SHAPES]
        flats = [torch.randn(-(-size // RANKS)) for size in sizes]
        states = {i: {"step": torch.tensor(5.0), "exp_avg": torch.rand_like(flat)} for i, flat in enumerate(flats)}
        inner = {"state": states, "param_groups": [{"lr": 0.5, "params": [0]}, {"lr": 0.5, "params": [1]}]}
        parts = {"single_partition_of_fp32_groups": flats, "base_optimizer_state": inner}
        optimizer = {"optimizer_state_dict": parts}
        torch.save(optimizer, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (folder / "latest").write_text("step")
    return model, optimizer


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


def _pickle(folder: Path, file: str, tree: Any, **more: Any) -> Kind:
    path = folder / "step" / file

    def write(tree: Any) -> None:
        if isinstance(tree, bytes):
            path.write_bytes(tree)
        else:
            torch.save(tree, path)

    return Kind(folder, path, tree, write, Imports(folder), CheckpointError, True, **more)


def deepspeed_model(folder: Path) -> Kind:
    model, _ = write_two_ranks(folder)
    free = r"module$|module/seen|buffer_names|param_shapes/|shared_params|frozen|lr_scheduler|global|skipped|epoch"
    free += "|dp_world_size|ds_version"
    return _pickle(folder, "mp_rank_00_model_states.pt", model, free=free, every=9)


def deepspeed_optimizer(folder: Path) -> Kind:
    _, optimizer = write_two_ranks(folder)
    free = "optimizer_state_dict/base_optimizer_state/(param_groups|state)"
    file = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    return _pickle(folder, file, optimizer, free=free, every=11)


def write_universal(folder: Path) -> Path:
    tag = folder / "step"
    for name, shape in {"a": (4, 3), "b": (3,)}.items():
        (tag / "zero" / name).mkdir(parents=True)
        for state in ("fp32", "exp_avg"):
            torch.save({"param": torch.ones(shape), "cat_dim": 0}, tag / "zero" / name / f"{state}.pt")
        torch.save(5, tag / "zero" / name / "step.pt")
    torch.save({"module": {}, "param_shapes": [{"a": (4, 3), "b": (3,)}]}, tag / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("step")
    return tag


def universal_optimizer(folder: Path) -> Kind:
    write_universal(folder)
    scale = {"scale": 2.0, "patience": 1, "good_steps": 0}
    tree = {"param_groups": [{"lr": 0.5, "params": [0]}], "loss_scale": scale}
    return _pickle(folder, "zero/optimizer_state.pt", tree, free=".*", every=4)


def universal_state(folder: Path) -> Kind:
    torch.save({"param_groups": [{"lr": 0.5, "params": [0]}]}, write_universal(folder) / "zero" / "optimizer_state.pt")
    return _pickle(folder, "zero/a/fp32.pt", {"param": torch.ones(4, 3), "cat_dim": 0}, free="cat_dim")


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
        manifest, values_of_a_run, header, index, weights_file, deepspeed_model, deepspeed_optimizer,
        universal_optimizer, universal_state, config, model_config, adapter, hostfile,
    )
}  # fmt: skip
