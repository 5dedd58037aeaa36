"""The delayed update is the published schedule, and nothing else differs from plain training."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.covering import Case, name_of, pairs
from tests.engine.harness import Run, adamw, assert_equal, engine_of, make_model, settings, token_batch, train_step
from tests.tiers.rows import ROWS, offload
from tests.tiers.test_placements import train

import wherry
from wherry.errors import WherryError


def simulate(ranks: int, steps: int, first_late: int, clip: float, accumulation: int = 1) -> Run:
    """Plain PyTorch: from step `first_late` on, a step is updated with the gradients of the one before it."""
    model = make_model()
    opt = adamw(model.parameters())
    run = Run()
    kept: list[torch.Tensor] | None = None
    run.extra = []  # the weights that each forward uses
    for step in range(steps):
        run.extra.append({name: p.detach().clone() for name, p in model.named_parameters()})
        opt.zero_grad()
        total = 0.0
        for micro, rank in itertools.product(range(accumulation), range(ranks)):
            loss = model(*token_batch(step, micro, rank)) / (ranks * accumulation)
            loss.backward()
            total += float(loss.detach())
        run.losses.append(total)
        run.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if step + 1 < first_late:
            opt.step()
            continue
        mine = [p.grad.clone() for p in model.parameters()]
        if kept is not None:
            for parameter, grad in zip(model.parameters(), kept, strict=True):
                parameter.grad = grad
            opt.step()
        kept = mine
    # At the end the last update is made.
    assert kept is not None
    for parameter, grad in zip(model.parameters(), kept, strict=True):
        parameter.grad = grad
    opt.step()
    run.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


CASES = pairs(
    row=("offload-1", "offload-2", "offload-3-parameters", "infinity"), ranks=(1, 2), clip=(0.0, 0.5), seed=(None, 5)
)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_published_schedule(case: Case, tmp_path: Path) -> None:
    config = offload(case["row"], tmp_path, "delayed")
    config["wherry"]["delayed_update_warmup"] = 3
    how: dict[str, Any] = {"ranks": case["ranks"], "clip": case["clip"], "accumulation": 2 if case["clip"] else 1}
    run = train(config, stage=ROWS[case["row"]][0], seed=case["seed"], steps=6, **how)
    expected = simulate(steps=6, first_late=3, **how)
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert run.norms == pytest.approx(expected.norms, rel=1e-5)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(run.weights[name], weight, rtol=0, atol=1e-5)


def test_every_other_step_is_skipped(tmp_path: Path) -> None:
    config = offload("offload-2", tmp_path, "delayed", "fp16")
    config["wherry"]["delayed_update_warmup"] = 2
    config["fp16"] |= {"initial_scale_power": 16, "loss_scale_window": 1, "hysteresis": 1}
    how: dict[str, Any] = {"stage": 2, "ranks": 2, "steps": 8, "finish": lambda engine: engine.skipped_steps}
    calm, late = (train(copy.deepcopy(config), seed=seed, **how) for seed in (None, 1))
    assert 2 < calm.extra < 6
    calm.norms = late.norms = []
    assert_equal(late, calm)


def look_everywhere(engine: Any, folder: Path) -> None:
    """All the ways to see weights and state; what is seen is the same by each of them."""
    with wherry.gathered(engine.module):
        seen = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    states = engine.module.state_dict()
    weights = engine.consolidated_state_dict()
    engine.save_16bit_model(folder)
    saved = load_file(folder / "model.safetensors")
    for name, weight in seen.items():
        assert torch.equal(states[name], weight), name
        assert weights is None or torch.equal(weights[name], weight), name
        assert torch.equal(saved[name], weight), name
    with wherry.gathered_for_generation(engine), torch.no_grad():
        engine.module(*token_batch(99, 0, 0))
    name = "blocks.1.up.weight"
    masters = engine.consolidated_state_dict(torch.float32)
    full = engine.states.full(name, "master")
    assert masters is None or torch.equal(masters[name], full)
    engine.gradient_norms()
    if engine.global_steps:
        engine.gradients(name)
    engine.save_checkpoint(folder / "checkpoints")  # where ranks meet, after they have read the file


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize(("row", "precision"), [("offload-1", "fp32"), ("infinity", "bf16")])
def test_whoever_looks_sees_the_last_update(row: str, precision: str, tmp_path: Path) -> None:
    """Reads make it before its time: where something is read after every step, no update is late."""

    def look(engine: Any, step: int) -> None:
        look_everywhere(engine, tmp_path / "seen")

    how: dict[str, Any] = {"stage": ROWS[row][0], "ranks": 2, "clip": 0.5, "seed": 9, "steps": 4}
    late = offload(row, tmp_path, "delayed", precision)
    late["wherry"]["delayed_update_warmup"] = 2
    run = train(late, **how, before_step=look)
    assert_equal(run, train(offload(row, tmp_path, "before_use", precision), **how))


@pytest.mark.parametrize("row", ["offload-2", "infinity"])
def test_an_edit_is_of_the_last_update(row: str, tmp_path: Path) -> None:
    """The other weights have had theirs too, and the master follows the edit."""
    config = offload(row, tmp_path, "delayed", "bf16")
    config["wherry"]["delayed_update_warmup"] = 2
    edited = "blocks.1.up.weight"
    masters: list[torch.Tensor] = []

    def edit(engine: Any, step: int) -> None:
        if step == 4:
            if edits:
                with wherry.gathered(weight := dict(engine.module.named_parameters())[edited], modifier_rank=1):
                    if engine.global_rank == 1:
                        weight.data.fill_(3.0)
            masters.append(engine.states.full(edited, "master"))
            engine.step = lambda: None  # the weights that are compared are those of here

    edits = False
    how: dict[str, Any] = {"stage": ROWS[row][0], "ranks": 2, "steps": 5, "before_step": edit}
    plain = train(copy.deepcopy(config), **how)
    assert not any((master == 3).any() for master in masters)
    masters.clear()
    edits = True
    run = train(config, **how)
    assert all((master == 3).all() for master in masters)
    assert (run.weights.pop(edited) == 3).all()
    assert all(torch.equal(weight, plain.weights[name]) for name, weight in run.weights.items())


def test_a_read_between_a_forward_and_its_backward_is_told(tmp_path: Path) -> None:
    """It has published weights that the forward did not have. To take the model reads nothing yet."""
    config = offload("offload-3-parameters", tmp_path, "delayed")
    config["wherry"]["delayed_update_warmup"] = 1
    model = make_model()
    engine = engine_of(model, settings(3, more=config))
    for step in range(2):
        loss = engine(*token_batch(step, 0, 0))
        assert engine.module is model
        engine.backward(loss)
        engine.step()
    loss = engine(*token_batch(2, 0, 0))
    model.state_dict()
    with pytest.raises(WherryError, match="updated 1 times since the forward"):
        engine.backward(loss)
    train_step(engine, 2, 0)
    engine.close()
