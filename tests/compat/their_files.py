"""Checkpoints as DeepSpeed writes them at stages 1, 2 and 3."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.engine.harness import TinyLM, make_model


def frozen_model() -> torch.nn.Module:
    model = TinyLM()
    model.blocks[1].up.bias.requires_grad_(False)
    model.register_buffer("seen", torch.tensor([3, 1, 4]))
    return model


MODEL = make_model(frozen_model)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    named = [p for p in parameters if p.requires_grad]
    groups = [{"params": [p for p in named if p.dim() > 1]}, {"params": [p for p in named if p.dim() == 1]}]
    return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1)


@contextmanager
def foreign(*paths: str) -> Iterator[list[Any]]:
    """Make classes under DeepSpeed's names, so that pickles name them."""
    classes = []
    with pytest.MonkeyPatch.context() as patch:
        for path in paths:
            parts = path.split(".")
            for depth in range(1, len(parts)):
                module = ".".join(parts[:depth])
                if module not in sys.modules:
                    patch.setitem(sys.modules, module, ModuleType(module))
            classes.append(type(parts[-1], (), {"__module__": module}))
            setattr(sys.modules[module], parts[-1], classes[-1])
        yield classes


def write(folder: Path, states: dict[str, torch.Tensor], stage: int, ranks: int) -> None:
    """Write the states of an engine in the files that DeepSpeed's ranks would write."""
    tag = folder / "global_step5"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step5")
    trained = [(n, p) for n, p in MODEL.named_parameters() if p.requires_grad]
    groups = [[(n, p.shape) for n, p in trained if (p.dim() > 1) == matrix] for matrix in (True, False)]
    model: dict[str, Any] = {
        "module": OrderedDict((n, torch.empty(0) if stage == 3 and n != "seen" else t)
                              for n, t in MODEL.state_dict().items()),
        "buffer_names": ["seen"], "param_shapes": [OrderedDict(group) for group in groups],
        "shared_params": {"head.weight": "embed.weight"}, "global_steps": 5, "skipped_steps": 0, "global_samples": 20,
        "dp_world_size": ranks, "mp_world_size": 1, "lr_scheduler": {"last_batch_iteration": 4}, "ds_version": "0.19.8",
        "frozen_param_shapes": None, "frozen_param_fragments": None, "ds_config": {}, "epoch": 7,
    }  # fmt: skip
    frozen = "blocks.1.up.bias"
    names = ("deepspeed.runtime.fp16.loss_scaler.LossScaler", "deepspeed.utils.tensor_fragment.fragment_address")
    with foreign(*names) as (scaler, address):
        scale = scaler()
        scale.cur_scale = 64.0
        for rank in range(ranks):
            if stage == 3:
                whole = MODEL.get_parameter(frozen).detach()
                size = -(-whole.numel() // ranks)
                model["frozen_param_shapes"] = OrderedDict({frozen: whole.shape})
                model["frozen_param_fragments"] = OrderedDict({frozen: whole[rank * size : (rank + 1) * size].clone()})
                torch.save(model, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
            elif rank == 0:
                torch.save(model, tag / "mp_rank_00_model_states.pt")
            flats = {s: _flats(states, groups, s, stage, rank, ranks) for s in ("master", "exp_avg", "exp_avg_sq")}
            inner = {
                "state": {
                    i: {"step": torch.tensor(5.0), "exp_avg": m, "exp_avg_sq": v}
                    for i, (m, v) in enumerate(zip(flats["exp_avg"], flats["exp_avg_sq"], strict=True))
                },
                "param_groups": [{"lr": 0.5, "weight_decay": decay, "params": [0]} for decay in (0.1, 0.0)],
            }
            saved = {
                "loss_scaler": scale, "zero_stage": stage, "mapping": address(),
                **({"fp32_flat_groups": flats["master"], "optimizer_state_dict": inner} if stage == 3 else
                   {"single_partition_of_fp32_groups": flats["master"], "base_optimizer_state": inner}),
            }  # fmt: skip
            file = tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": saved, "ds_version": "0.19.8"}, file)


def _flats(states: Any, groups: Any, state: str, stage: int, rank: int, ranks: int) -> list[torch.Tensor]:
    flats = []
    for group in groups:
        if stage == 3:
            parts = []
            for name, shape in group:
                size = -(-math.prod(shape) // ranks)
                padded = torch.zeros(size * ranks)
                padded[: math.prod(shape)] = states[f"{name}:{state}"]
                parts.append(padded[rank * size : (rank + 1) * size])
            flats.append(torch.cat(parts))
            continue
        whole = torch.cat([states[f"{name}:{state}"] for name, _ in group])
        size = -(-whole.numel() // (2 * ranks)) * 2
        part = whole[rank * size : (rank + 1) * size]
        # Weights are saved without the padding, moments with it.
        flats.append(part.clone() if state == "master" else torch.cat([part, torch.zeros(size - part.numel())]))
    return flats
