"""A checkpoint of `wherry train` and its export beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import wherry
from wherry.checkpoint.export import find
from wherry.checkpoint.reader import CheckpointReader
from wherry.cli import main
from wherry.train.gpt2 import is_tied, shape_in
from wherry.train.model import GPT, GPTConfig
from wherry.train.presets import Shape

SHAPE = Shape(layers=2, hidden=48, heads=3, sequence=24, vocabulary=300)


def saved(
    folder: Path, *, shape: Shape = SHAPE, tied: bool = True, config: dict[str, Any] | None = None, **told: Any
) -> Path:
    """A checkpoint as the job writes it, of a model whose every weight is drawn."""
    torch.manual_seed(0)
    model = GPT(GPTConfig.of(shape, tied=tied))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    # It writes ASCII rather than other bytes, and other tokens than bytes if it may.
    for matrix in dict.fromkeys([model.tokens.weight, model.head.weight]):
        matrix.data[128:256] *= 0.1
        matrix.data[256:] *= 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = wherry.initialize(model=model, optimizer=optimizer, config=config or {})
    engine.save_checkpoint(folder, client_state={"samples": 0, "samples_per_step": 1, **told})
    engine.close()
    return folder


def ours_of(folder: Path) -> GPT:
    """The model that a checkpoint is of."""
    with CheckpointReader(find(folder)) as reader:
        ours = GPT(GPTConfig(**shape_in(reader.manifest), tied=is_tied(reader.manifest)))
        weights = {name: reader.tensor(name, "weight") for name in reader.manifest.entries}
    missing = ours.load_state_dict(weights, strict=False).missing_keys
    assert missing == (["head.weight"] if ours.config.tied else [])
    return ours


def compared(folder: Path, out: Path, *flags: str) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """What transformers loads from the export, and the logits of our model and of that one."""
    transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    assert main(["export", str(folder), str(out), *flags]) == 0
    ours = ours_of(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    ids = torch.randint(0, 256, (2, ours.config.sequence), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return theirs, ours(ids), theirs(ids).logits
