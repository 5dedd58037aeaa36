"""The kinds of files that Wherry reads: of each a valid tree, how it is written, and how it is loaded."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
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
from tests.security.hostile import text

import wherry
from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.errors import CheckpointError
from wherry.compat.deepspeed.importing import import_checkpoint
from wherry.config import ConfigError
from wherry.config import load as load_config
from wherry.errors import WherryError
from wherry.integrations.bits import bits_in
from wherry.integrations.model_folder import base_of
from wherry.parallel.hostfile import read_hostfile
from wherry.sources import find

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST, SECOND = "model-1.safetensors", "model-2.safetensors"


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

    def is_skipped(self, path: tuple[Any, ...]) -> bool:
        return re.match(self.skipped, "/".join(map(str, path))) is not None

    def is_free(self, path: tuple[Any, ...]) -> bool:
        return re.match(self.free, "/".join(map(str, path))) is not None


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
        self.state = everything(self.engine)

    def __call__(self) -> Any:
        try:
            read_manifest(self.path)  # which the engine does first: most refusals are quick
            _, client_state = self.engine.load_checkpoint(self.path)
        except CheckpointError as error:
            assert "broken off" not in str(error)
            assert everything(self.engine) == self.state, "a refused load has changed the engine"
            raise
        self.state = everything(self.engine)
        return self.state, repr(client_state)


def manifest(folder: Path) -> Kind:
    loads = Loads(folder)

    def write(tree: Any) -> None:
        sign(loads.path, text({**tree, "sha256": "0" * 64}))

    # The run's values are decoded by the engine, which takes longer than the manifest does.
    skipped = r"config/|format|sha256|engine/|ranks/|entries/(?!first.weight|norm.num_batches_tracked)"
    free = "tag|created|versions|config|placement|tensors$|tensors/value|entries/[^/]+/(aliases|dtype|kind)|world_size"
    free += "|engine$|ranks$|entries/first.weight$"
    tree = loads.forgery.manifest
    return Kind(
        loads.path,
        loads.path / "manifest.json",
        tree,
        write,
        loads,
        CheckpointError,
        skipped=skipped,
        free=free,
        every=7,
    )


def values_of_a_run(folder: Path) -> Kind:
    kind = manifest(folder)
    kind.skipped = r"(?!engine/|ranks/)"
    kind.free, kind.every = "engine/|ranks/", 17
    return kind


def header(folder: Path) -> Kind:
    """The header of a checkpoint's file."""
    loads = Loads(folder)
    base = loads.forgery
    name = base.file

    def write(tree: Any) -> None:
        forged = base.copy()
        forged.headers[name] = text(tree).encode()
        forged.write(loads.path)

    skipped = r"(?!first.weight:weight|norm.num|value:0:0)"
    return Kind(loads.path, loads.path / name, base.header, write, loads, CheckpointError, skipped=skipped, every=8)


# Folders of weights.


def digest(model: torch.nn.Module) -> bytes:
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).digest()


def weights(seed: int = 5) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return Model().state_dict()


class LoadsWeights:
    """A model that loads weights and must stay as it is when a load is refused."""

    def __init__(self, path: Path) -> None:
        self.path, self.model = path, Model()

    def __call__(self) -> bytes:
        torch.nn.init.zeros_(self.model.first.weight)
        before = digest(self.model)
        try:
            wherry.load_pretrained(self.model, self.path)
        except WherryError:
            assert digest(self.model) == before, "a refused load has changed the model"
            raise
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
    file = folder / INDEX
    return Kind(folder, file, tree, lambda tree: file.write_text(text(tree)), LoadsWeights(folder), free="metadata")


def with_header(content: Any, data: bytes = bytes(64), length: int | None = None) -> bytes:
    """A safetensors file of any header."""
    content = content if isinstance(content, bytes) else text(content).encode()
    return struct.pack("<Q", len(content) if length is None else length) + content + data


def weights_file(folder: Path) -> Kind:
    file = folder / WEIGHTS
    save_file(weights(), file, {"format": "pt"})
    content = file.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    tree = json.loads(content[8:start])

    def write(tree: Any) -> None:
        file.write_bytes(with_header(tree, content[start:]))

    skipped = r"(?!__metadata__|first.weight|norm.num)"
    return Kind(folder, file, tree, write, LoadsWeights(folder), free="__metadata__", skipped=skipped, every=2)


# Checkpoints of DeepSpeed's.

SHAPES: list[dict[str, Any]] = [{"a.weight": (4, 3), "b.weight": (5,)}, {"a.bias": (3,)}]
RANKS = 2


class Theirs:
    """A checkpoint of DeepSpeed's of two ranks in memory: change it, then `write` it."""

    def __init__(self, stage: int) -> None:
        torch.manual_seed(0)
        self.stage = stage
        weights = {name: torch.randn(shape) for shapes in SHAPES for name, shape in shapes.items()}
        module = {name: torch.empty(0) if stage == 3 else value for name, value in weights.items()}
        self.model: dict[str, Any] = {
            "module": OrderedDict(module | {"seen": torch.tensor([3, 1])}),
            "buffer_names": ["seen"],
            "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in shapes.items()) for shapes in SHAPES],
            "shared_params": {"head": "a.weight"},
            "frozen_param_shapes": {"f": torch.Size([3])},
            "frozen_param_fragments": {"f": torch.ones(2 if stage == 3 else 3)},
            "global_steps": 5,
            "skipped_steps": 0,
            "global_samples": 20,
            "dp_world_size": RANKS,
            "ds_version": "0.19",
            "lr_scheduler": {"last_batch_iteration": 4},
            "epoch": 7,
        }
        self.models = [self.model, copy.deepcopy(self.model)]
        keys = ("fp32_flat_groups", "optimizer_state_dict") if stage == 3 else (
            "single_partition_of_fp32_groups", "base_optimizer_state",
        )  # fmt: skip
        self.flats, self.inner = keys
        self.optimizers = []
        for _ in range(RANKS):
            flats = [torch.randn(self._size(shapes)) for shapes in SHAPES]
            inner = {
                "state": {i: {"step": torch.tensor(5.0), "exp_avg": torch.rand_like(f)} for i, f in enumerate(flats)},
                "param_groups": [{"lr": 0.5, "params": [0]}, {"lr": 0.5, "params": [1]}],
            }
            self.optimizers.append({"optimizer_state_dict": dict(zip(keys, (flats, inner), strict=True))})

    def _size(self, shapes: dict[str, Any]) -> int:
        sizes = [math.prod(shape) for shape in shapes.values()]
        return sum(-(-size // RANKS) for size in sizes) if self.stage == 3 else -(-sum(sizes) // RANKS)

    def write(self, folder: Path) -> Path:
        (tag := folder / "step").mkdir(parents=True)
        for rank, model in enumerate(self.models[: RANKS if self.stage == 3 else 1]):
            name = f"zero_pp_rank_{rank}_" if self.stage == 3 else ""
            torch.save(model, tag / f"{name}mp_rank_00_model_states.pt")
        for rank, optimizer in enumerate(self.optimizers):
            torch.save(optimizer, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        (folder / "latest").write_text("step")
        return folder


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
        return json.dumps([forgery.manifest["entries"], forgery.engine, forgery.headers]), forgery.data


def _pickle(folder: Path, file: str, tree: Any, **more: Any) -> Kind:
    path = folder / "step" / file
    return Kind(folder, path, tree, lambda tree: torch.save(tree, path), Imports(folder), CheckpointError, True, **more)


def deepspeed_model(folder: Path) -> Kind:
    theirs = Theirs(2)
    theirs.write(folder)
    free = r"module$|module/seen|buffer_names|param_shapes/|shared_params|frozen|lr_scheduler|global|skipped|epoch"
    free += "|dp_world_size|ds_version"
    return _pickle(folder, "mp_rank_00_model_states.pt", theirs.model, free=free, every=9)


def deepspeed_optimizer(folder: Path, stage: int = 2) -> Kind:
    theirs = Theirs(stage)
    theirs.write(folder)
    free = "optimizer_state_dict/(base_optimizer_state|optimizer_state_dict)/(param_groups|state)"
    file = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    return _pickle(folder, file, theirs.optimizers[1], free=free, every=11)


def deepspeed_optimizer_3(folder: Path) -> Kind:
    return deepspeed_optimizer(folder, 3)


def deepspeed_stage_0(folder: Path) -> Kind:
    (folder / "step").mkdir(parents=True)
    base = {"state": {0: {"step": 5, "exp_avg": torch.ones(15)}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    whole = {"optimizer_state_dict": base, "fp32_groups_flat": [torch.ones(15)], "cur_scale": 2.0, "scale_window": 5}
    tree = {"module": {"a": torch.ones(4, 3), "b": torch.ones(3)}, "optimizer": whole}
    (folder / "latest").write_text("step")
    free = "module|optimizer$|optimizer/(cur_scale|scale_window|fp32_groups_flat)"
    free += "|optimizer/optimizer_state_dict/(param_groups|state)"
    return _pickle(folder, "mp_rank_00_model_states.pt", tree, free=free, every=7)


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

    return Kind(folder, file, tree, lambda tree: file.write_text(text(tree)), load, ConfigError, free=".*", every=3)


GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 8, "n_positions": 8}


def model_config(folder: Path) -> Kind:
    file = folder / "config.json"

    tree = GPT2 | {"resid_pdrop": 0.1, "architectures": ["GPT2LMHeadModel"], "torch_dtype": "float32", "num_labels": 2}

    def load() -> Any:
        with torch.device("meta"):
            model, _ = find(str(folder)).make(1, 8)
        return {name: value.shape for name, value in model.state_dict().items()}

    return Kind(folder, file, tree, lambda tree: file.write_text(text(tree)), load, free=".*", every=5)


def adapter(folder: Path) -> Kind:
    (folder / "base").mkdir()
    tree = {"base_model_name_or_path": str(folder / "base"), "peft_type": "LORA"}
    file = folder / "adapter_config.json"
    write = lambda tree: file.write_text(text(tree))  # noqa: E731
    return Kind(
        folder, file, tree, write, lambda: base_of(folder, "generate"), free="peft_type|base_model_name_or_path"
    )


def bits(folder: Path) -> Kind:
    file = folder / "config.json"
    tree = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    return Kind(folder, file, tree, lambda tree: file.write_text(text(tree)), lambda: bits_in(folder, "x"), free=".*")


def hostfile(folder: Path) -> Kind:
    file = folder / "hosts"

    def write(tree: Any) -> None:
        lines = [" ".join(map(str, line)) if isinstance(line, list) else str(line) for line in tree or ()]
        file.write_bytes("\n".join(lines).encode(errors="surrogatepass"))

    load = lambda: {host.name: host.slots for host in read_hostfile(str(file))}  # noqa: E731
    return Kind(folder, file, [["alpha", "slots=2"], ["beta", "slots=3"]], write, load, free=".*")


KINDS: dict[str, Callable[[Path], Kind]] = {
    kind.__name__: kind
    for kind in (
        manifest, values_of_a_run, header, index, weights_file, deepspeed_model, deepspeed_optimizer,
        deepspeed_optimizer_3, deepspeed_stage_0, universal_optimizer, universal_state, config, model_config, adapter,
        bits, hostfile,
    )
}  # fmt: skip
