"""Checkpoints as DeepSpeed writes them at stages 1, 2 and 3 come over bit for bit; nothing in them is run."""

from __future__ import annotations

import math
import os
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import Shape, assert_same, on, state_of, train
from tests.engine.harness import VOCABULARY, WIDTH, TinyLM, make_model

from wherry.checkpoint.export import find, verified
from wherry.cli import main
from wherry.parallel.comm import Comm


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


class Foreign:
    """Classes under DeepSpeed's names, so that pickles name them."""

    def __enter__(self) -> Any:
        self.made: list[str] = []
        scaler = self._module("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
        scaler.__init__ = lambda self: self.__dict__.update(cur_scale=64.0)  # type: ignore[misc]
        address = self._module("deepspeed.utils.tensor_fragment", "fragment_address")
        return scaler, address

    def _module(self, path: str, name: str) -> Any:
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            module = ".".join(parts[:depth])
            if module not in sys.modules:
                sys.modules[module] = ModuleType(module)
                self.made.append(module)
        cls = type(name, (), {"__module__": path})
        setattr(sys.modules[path], name, cls)
        return cls

    def __exit__(self, *_: object) -> None:
        for module in self.made:
            del sys.modules[module]


def write(folder: Path, states: dict[str, torch.Tensor], stage: int, ranks: int) -> None:
    """The states of an engine, in the files that DeepSpeed's ranks would write."""
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
    with Foreign() as (scaler, address):
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
                "loss_scaler": scaler(), "zero_stage": stage, "mapping": address(),
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


@pytest.mark.parametrize(("stage", "ranks"), [(1, 3), (2, 2), (3, 1), (3, 3)])
def test_import(tmp_path: Path, stage: int, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    def begin(engine: Any, comm: Comm) -> Any:
        train(engine, comm, 5)
        return state_of(engine)

    states = on(Shape(), begin, model=MODEL, optimizer=adamw)[0]
    write(tmp_path / "theirs", states, stage, ranks)
    assert main(["import-deepspeed", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    path = find(tmp_path / "ours")
    assert capsys.readouterr().out.strip() == str(path) and path.name == "global_step5"
    assert verified(path).entries["embed.weight"].shape == (VOCABULARY, WIDTH)

    def go_on(engine: Any, comm: Comm) -> Any:
        _, client_state = engine.load_checkpoint(tmp_path / "ours")
        assert client_state == {"epoch": 7} and engine.global_steps == 5
        assert engine.optimizer.param_groups[1]["weight_decay"] == 0.0 and engine.get_lr() == [0.5, 0.5]
        loaded = state_of(engine)
        assert {int(part["step"]) for part in engine.optimizer.state_dict()["state"].values() if part} == {5}
        return loaded

    for shape in (Shape(1, 0), Shape(2, 3)):
        assert_same(states, on(shape, go_on, model=MODEL, optimizer=adamw)[0])


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/wherry-was-here",)


def test_nothing_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tag = tmp_path / "theirs" / "tag"
    tag.mkdir(parents=True)
    torch.save({"module": {}, "evil": Evil()}, tag / "mp_rank_00_model_states.pt")
    marker = Path("/tmp/wherry-was-here")
    marker.unlink(missing_ok=True)
    assert main(["import-deepspeed", str(tag), str(tmp_path / "ours")]) == 2
    said = capsys.readouterr().err
    assert "nothing in a checkpoint is run" in said and "system" in said
    assert not marker.exists() and not (tmp_path / "ours").exists()
    # Nor is anything written elsewhere than where it was asked for.
    torch.save({"module": {}}, tmp_path / "mp_rank_00_model_states.pt")
    (tag.parent / "latest").write_text("..")
    assert main(["import-deepspeed", str(tag.parent), str(tmp_path / "in" / "ours")]) == 2
    assert "expected the name of a folder" in capsys.readouterr().err and not (tmp_path / "in").exists()


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-deepspeed", str(tmp_path / "none"), str(tmp_path / "ours")]) == 2
    assert main(["import-deepspeed", str(tmp_path), str(tmp_path / "ours")]) == 2
    assert "is no checkpoint of DeepSpeed's" in capsys.readouterr().err
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(b"not a file of torch's")
    assert main(["import-deepspeed", str(tmp_path), str(tmp_path / "ours")]) == 2
    assert "mp_rank_00_model_states.pt cannot be read" in capsys.readouterr().err
