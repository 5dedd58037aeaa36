"""A checkpoint that is changed, with checksums that match again."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.security.hostile import content
from torch import nn

import wherry
from wherry.checkpoint.files import BLOCK
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


def digest(tensors: dict[str, Any], *values: Any) -> bytes:
    """A digest of tensors and of other values."""
    whole = hashlib.sha256(repr(values).encode())
    for name, tensor in tensors.items():
        whole.update(name.encode() + (tensor.numpy().tobytes() if isinstance(tensor, torch.Tensor) else b""))
    return whole.digest()


def everything(engine: Any) -> bytes:
    """A digest of everything that a load may change."""
    tensors = engine.module.state_dict() | {"generator": torch.get_rng_state()}
    for name, _ in engine.module.named_parameters():
        tensors |= {f"{name}:{kind}": engine.states.full(name, kind) for kind in ("exp_avg", "exp_avg_sq")}
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups
    ]
    counts = engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps
    schedule = engine.lr_scheduler.state_dict()
    return digest(tensors, groups, counts, schedule, engine.get_global_grad_norm(), engine.was_step_applied())


class Forgery:
    """A checkpoint of one rank in memory: change it, then `write` it."""

    def __init__(self, source: Path) -> None:
        self.manifest: dict[str, Any] = json.loads((source / "manifest.json").read_text())
        ((self.file, record),) = self.manifest["files"].items()
        whole = (source / self.file).read_bytes()
        self.header: Any = json.loads(whole[8 : record["data_start"]])
        self.data = whole[record["data_start"] :]

    def add(self, name: str, shape: list[int], data: bytes) -> None:
        """Add a tensor of fp32 to the file."""
        end = len(self.data)
        self.header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + len(data)]}
        self.data += data

    def write(self, folder: Path) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        text = content(self.header)
        text = text.ljust(-(-(8 + len(text)) // 4096) * 4096 - 8)
        start = len(text).to_bytes(8, "little") + text
        (folder / self.file).write_bytes(start + self.data)
        self.manifest["files"][self.file] |= {
            "bytes": len(start) + len(self.data),
            "data_start": len(start),
            "header_crc32": crc32(start),
            "blocks": [crc32(self.data[at : at + BLOCK]) for at in range(0, len(self.data), BLOCK)],
        }
        sign(folder, self.manifest | {"sha256": "0" * 64})
        return folder


def sign(folder: Path, manifest: Any) -> None:
    """Write a manifest of any content, with the checksum that it must have where it has one."""
    text = content(manifest)
    digest = hashlib.sha256(text).hexdigest().encode()
    (folder / "manifest.json").write_bytes(text.replace(b"0" * 64, digest, 1))
