"""Checkpoints as DeepSpeed writes them at stages 1, 2 and 3, and universal ones."""

from __future__ import annotations

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


TRAINED = [(n, p) for n, p in MODEL.named_parameters() if p.requires_grad]
GROUPS = [[(n, p.shape) for n, p in TRAINED if (p.dim() > 1) == matrix] for matrix in (True, False)]
OPTIONS: list[dict[str, Any]] = [{"lr": 0.5, "weight_decay": decay, "params": [0]} for decay in (0.1, 0.0)]
MOMENTS = ("exp_avg", "exp_avg_sq")
TAG = "global_step5"
SCALER = "deepspeed.runtime.fp16.loss_scaler.LossScaler"


def start(folder: Path) -> Path:
    """Make the folder of a checkpoint, which `latest` names."""
    (folder / TAG).mkdir(parents=True)
    (folder / "latest").write_text(TAG)
    return folder / TAG


def counts(ranks: int) -> dict[str, Any]:
    """Make the entries of a model's file beside tensors; `epoch` is the client state."""
    return {
        "buffer_names": ["seen"], "global_steps": 5, "skipped_steps": 0, "global_samples": 20, "dp_world_size": ranks,
        "lr_scheduler": {"last_batch_iteration": 4}, "epoch": 7,
    }  # fmt: skip


def write_model(tag: Path, stage: int, ranks: int, rank: int = 0) -> None:
    module = OrderedDict((n, torch.empty(0) if stage == 3 and n != "seen" else t)
                         for n, t in MODEL.state_dict().items())  # fmt: skip
    model: dict[str, Any] = {
        **counts(ranks), "module": module, "param_shapes": [OrderedDict(group) for group in GROUPS], "mp_world_size": 1,
        "shared_params": {"head.weight": "embed.weight"}, "ds_version": "0.19.8", "ds_config": {},
        "frozen_param_shapes": None, "frozen_param_fragments": None,
    }  # fmt: skip
    if stage == 3:
        frozen = "blocks.1.up.bias"
        whole = MODEL.get_parameter(frozen).detach()
        model["frozen_param_shapes"] = OrderedDict({frozen: whole.shape})
        model["frozen_param_fragments"] = OrderedDict({frozen: _part(whole, rank, ranks).clone()})
    prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
    torch.save(model, tag / f"{prefix}mp_rank_00_model_states.pt")


def write(folder: Path, states: dict[str, torch.Tensor], stage: int, ranks: int) -> None:
    """Write the states of an engine in the files that DeepSpeed's ranks would write."""
    tag = start(folder)
    with foreign(SCALER, "deepspeed.utils.tensor_fragment.fragment_address") as (scaler, address):
        scale = scaler()
        scale.cur_scale = 64.0
        for rank in range(ranks):
            if stage == 3 or rank == 0:
                write_model(tag, stage, ranks, rank)
            flats = {s: _flats(states, s, stage, rank, ranks) for s in ("master", *MOMENTS)}
            inner = {
                "state": {i: {"step": torch.tensor(5.0), **{m: flats[m][i] for m in MOMENTS}} for i in range(2)},
                "param_groups": OPTIONS,
            }
            saved = {
                "loss_scaler": scale, "zero_stage": stage, "mapping": address(),
                **({"fp32_flat_groups": flats["master"], "optimizer_state_dict": inner} if stage == 3 else
                   {"single_partition_of_fp32_groups": flats["master"], "base_optimizer_state": inner}),
            }  # fmt: skip
            file = tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": saved, "ds_version": "0.19.8"}, file)


def write_universal(folder: Path, states: dict[str, torch.Tensor], stage: int) -> None:
    """Write the states of an engine as `ds_to_universal` would; from stage 3 it leaves flat tensors without counts."""
    tag = folder / f"{TAG}_universal"
    for name, parameter in TRAINED:
        (own := tag / "zero" / name).mkdir(parents=True)
        for file, state in (("fp32", "master"), *zip(MOMENTS, MOMENTS, strict=True)):
            whole = states[f"{name}:{state}"]
            saved = whole.clone() if stage == 3 else {"param": whole.view(parameter.shape).clone(), "cat_dim": 0}
            torch.save(saved, own / f"{file}.pt")
        if stage < 3:
            torch.save(5, own / "step.pt")
    inner = {"state": {0: {"step": torch.tensor(5.0)}}, "param_groups": OPTIONS}
    with foreign(SCALER) as (scaler,):
        scale = scaler()
        scale.cur_scale = 64.0
        optimizer = {"param_groups": OPTIONS, "optimizer_state_dict": inner, "loss_scaler": scale, "zero_stage": stage}
        torch.save(optimizer, tag / "zero" / "optimizer_state.pt")
    write_model(tag, stage, 1)
    (folder / "latest_universal").write_text(tag.name)


def _part(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    size = -(-whole.numel() // ranks)
    return whole[rank * size : (rank + 1) * size]


def _flats(states: Any, state: str, stage: int, rank: int, ranks: int) -> list[torch.Tensor]:
    flats = []
    for group in GROUPS:
        values = [states[f"{name}:{state}"] for name, _ in group]
        if stage == 3:
            padded = [torch.cat([whole, torch.zeros(-whole.numel() % ranks)]) for whole in values]
            flats.append(torch.cat([_part(whole, rank, ranks) for whole in padded]))
            continue
        whole = torch.cat(values)
        padded = torch.cat([whole, torch.zeros(-whole.numel() % (2 * ranks))])
        # Weights are saved without the padding, moments with it.
        size = padded.numel() // ranks
        flats.append((whole if state == "master" else padded)[rank * size : (rank + 1) * size].clone())
    return flats
