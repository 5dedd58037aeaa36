"""Hostile checkpoints: a whole one that is changed, with checksums that match again."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import wherry
from wherry.checkpoint import files
from wherry.native.checksum import crc32

CONFIG = {
    "zero_optimization": {"stage": 1},
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
}
CLIENT_STATE = {
    "epoch": 3,
    "tensor": torch.arange(6.0).view(2, 3),
    "array": np.arange(4),
    "words": ("a", {"b"}),
    "bytes": b"abc",
    7: 1.5,
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))).square().mean()


def engine_of(steps: int, seed: int = 0, more: dict[str, Any] | None = None) -> Any:
    torch.manual_seed(seed)
    engine, *_ = wherry.initialize(model=Model(), config=CONFIG | (more or {}))
    for _ in range(steps):
        engine.backward(engine(torch.randn(3, 4)))
        engine.step()
    return engine


def everything(engine: Any) -> bytes:
    """A digest of everything that a load may change."""
    digest = hashlib.sha256()
    for name, tensor in engine.module.state_dict().items():
        digest.update(name.encode() + (tensor.numpy().tobytes() if isinstance(tensor, torch.Tensor) else b""))
    for name, _ in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            digest.update(engine.states.full(name, key).numpy().tobytes())
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups
    ]
    counts = engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps
    schedule = engine.lr_scheduler.state_dict()
    digest.update(repr((groups, counts, schedule, engine.get_global_grad_norm(), engine.was_step_applied())).encode())
    digest.update(torch.get_rng_state().numpy().tobytes())
    return digest.digest()


class Forgery:
    """A checkpoint in memory: change it, then `write` it."""

    def __init__(self, source: Path) -> None:
        self.manifest: dict[str, Any] = json.loads((source / "manifest.json").read_text())
        self.headers: dict[str, Any] = {}
        self.data: dict[str, bytes] = {}
        for name, record in self.manifest["files"].items():
            content = (source / name).read_bytes()
            self.headers[name] = json.loads(content[8 : record["data_start"]])
            self.data[name] = content[record["data_start"] :]
        self.file = next(iter(self.headers))

    def copy(self) -> Forgery:
        return copy.deepcopy(self)

    # Parts that cases change.

    @property
    def header(self) -> dict[str, Any]:
        return self.headers[self.file]

    @property
    def entries(self) -> dict[str, Any]:
        return self.manifest["entries"]

    @property
    def piece(self) -> dict[str, Any]:
        """The one slice of the first weight."""
        return self.entries["first.weight"]["states"]["weight"][0]

    @property
    def engine(self) -> dict[str, Any]:
        return self.manifest["engine"]

    def add(self, name: str, dtype: str, shape: list[int], data: bytes) -> None:
        """One more tensor in the file."""
        end = len(self.data[self.file])
        self.header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        self.data[self.file] += data

    def write(self, folder: Path) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, header in self.headers.items():
            text = header if isinstance(header, bytes) else json.dumps(header).encode()
            text = text.ljust(-(-(8 + len(text)) // 4096) * 4096 - 8)
            start = len(text).to_bytes(8, "little") + text
            (folder / name).write_bytes(start + self.data[name])
            if name in (self.manifest.get("files") or {}):
                data, size = self.data[name], files.BLOCK
                blocks = [crc32(data[at : at + size]) for at in range(0, len(data), size)]
                self.manifest["files"][name] |= {
                    "bytes": len(start) + len(data),
                    "data_start": len(start),
                    "header_crc32": crc32(start),
                    "blocks": blocks,
                }
        self.write_manifest(folder)
        return folder

    def write_manifest(self, folder: Path) -> None:
        sign(folder, json.dumps({**self.manifest, "sha256": "0" * 64}))


def sign(folder: Path, text: str) -> None:
    """A manifest of any text, with the checksum that it must have."""
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
    (folder / "manifest.json").write_text(text.replace("0" * 64, digest, 1))
