"""Layer to layer: states on the host and a budget of one unit leave only the running layer on the device."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.harness import Run, TinyLM, adamw, assert_equal, make_model, settings, token_batch
from tests.engine.test_counts import padded
from tests.plan import measured
from torch import nn

import wherry
from wherry.activations import saving
from wherry.parallel.comm import Comm
from wherry.plan.counts import Line
from wherry.plan.dry_run import dry_run
from wherry.sources import of_shape
from wherry.testing import run_ranks
from wherry.testing.late import Chaos, ChaosLink
from wherry.testing.late import topology as chaotic
from wherry.train.model import GPT, GPTConfig
from wherry.train.presets import Shape

HALF = 2


def layer_to_layer(**more: Any) -> dict[str, Any]:
    zero = {
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        # A unit at a time, and none ahead of it.
        "stage3_max_live_parameters": 0,
        "stage3_prefetch_bucket_size": 0,
    }
    blocks = {"activation_checkpointing": {"policy": "recompute", "cpu_checkpointing": True, "offload_min_bytes": 1}}
    return settings(3, 1, 1.0, {"bf16": {"enabled": True}, "zero_optimization": zero, **blocks, **more})


def on_device(lines: Any) -> dict[str, Line]:
    return {line.category: line for line in lines if line.tier == "device"}


def test_an_engine_has_one_layer_and_the_root_on_the_device() -> None:
    config = layer_to_layer(optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
    found = on_device(measured.measure(config, 1, gpu=True)[0].lines(gpu=True))
    assert not {"parameters", "gradients", "optimizer"} & {c for c, line in found.items() if line.highest}
    units = padded(measured.make()[0], 1)
    block = max(numel for name, numel in units.items() if name != "root")
    assert found["gathered"].highest == HALF * (units["root"] + block)
    # Gradients of a layer that are filled, of one that is reduced, and of two on their way down.
    assert found["buffers"].highest <= 4 * HALF * max(block, units["root"]) + 8192


def peak(layers: int, config: dict[str, Any]) -> int:
    shape = Shape(layers=layers, hidden=128, heads=4, sequence=64, vocabulary=128)
    given = {**config, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    return dry_run(of_shape("a GPT-2", shape), given, ranks=1, gpu=True).peak("device")


@pytest.mark.long
def test_depth_takes_no_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "AHEAD", 1)  # here 64 MB would be all checkpoints: one at a time is brought back ahead
    few, many = (peak(layers, layer_to_layer()) for layers in (5, 8))
    # Three more layers, each with a handle of its checkpoint.
    assert abs(many - few) <= 3 * 512
    model = GPT(GPTConfig(layers=1, hidden=128, heads=4, sequence=64, vocabulary=128))
    block = sum(p.numel() for p in model.blocks[0].parameters())
    root = sum(p.numel() for p in model.parameters()) - block
    stream = HALF * 2 * 64 * 128
    # Weights of the root and the layer, their gradients on the way down, four layers' at most, and a layer computed
    # again beside what its backward makes.
    assert many <= HALF * (2 * root + 5 * block) + 28 * stream
    # Where states and activations stay, a layer takes all of both.
    resident = {key: value for key, value in layer_to_layer().items() if key in ("bf16", "gradient_clipping")}
    resident["train_micro_batch_size_per_gpu"] = 2
    assert peak(3, resident) - peak(2, resident) >= 14 * block + 12 * stream


def test_its_results_are_those_of_a_model_that_stays() -> None:
    """With dropout, on a device whose copies are late."""

    def dropping() -> TinyLM:
        made = TinyLM()
        for block in made.blocks:
            block.down = nn.Sequential(block.down, nn.Dropout(0.2))
        return made

    model = make_model(dropping)

    def train(config: dict[str, Any], late: bool) -> Run:
        def body(comm: Comm) -> Run:
            mine, run = copy.deepcopy(model), Run()
            torch.manual_seed(1)
            chaos = Chaos(3)
            mesh = chaotic(comm, chaos if late else None)
            if late:
                mesh = replace(mesh, link=lambda pin: ChaosLink(chaos))
            engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=config, mesh=mesh)
            for step in range(4):
                loss = engine(*token_batch(step, 0, 0))
                engine.backward(loss)
                engine.step()
                run.losses.append(float(loss.detach()))
                run.norms.append(engine.get_global_grad_norm() or 0.0)
            with wherry.gathered(mine):
                run.weights = {name: p.detach().clone() for name, p in mine.named_parameters()}
            engine.close()
            return run

        return run_ranks(1, body)[0]

    assert_equal(train(layer_to_layer(), True), train(settings(0, 1, 1.0, {"bf16": {"enabled": True}}), False))
