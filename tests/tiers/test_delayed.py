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
from tests.engine.harness import (
    Run,
    adamw,
    assert_equal,
    assert_near,
    assert_same,
    engine_of,
    make_model,
    masters_of,
    settings,
    token_batch,
    train_step,
    weights_of,
)
from tests.engine.harness import train as train_steps
from tests.tiers.rows import ROWS, offload
from tests.tiers.test_placements import train

import wherry
from wherry.errors import WherryError
from wherry.tickets import Ticket
from wherry.tiers.streams import Link


def simulate(ranks: int, steps: int, first_late: int, clip: float, accumulation: int = 1) -> Run:
    """Train by plain PyTorch: from step `first_late` on, a step is updated with the gradients of the one before it."""
    model = make_model()
    opt, run = adamw(model.parameters()), Run()
    kept: list[torch.Tensor] | None = None

    def update(gradients: list[torch.Tensor]) -> None:
        for parameter, grad in zip(model.parameters(), gradients, strict=True):
            parameter.grad = grad
        opt.step()

    for step in range(steps):
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
        mine = [p.grad.clone() for p in model.parameters()]
        if step + 1 < first_late:
            update(mine)
            continue
        if kept is not None:
            update(kept)
        kept = mine
    # At the end the last update is made.
    assert kept is not None
    update(kept)
    run.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


CASES = pairs(row=("offload-1", "offload-3-parameters", "infinity"), ranks=(1, 2), clip=(0.0, 0.5), seed=(None, 5))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_published_schedule(case: Case, tmp_path: Path) -> None:
    config = offload(case["row"], tmp_path, "delayed")
    config["wherry"]["delayed_update_warmup"] = 3
    how: dict[str, Any] = {"ranks": case["ranks"], "clip": case["clip"], "accumulation": 2 if case["clip"] else 1}
    run = train(config, stage=ROWS[case["row"]][0], seed=case["seed"], steps=6, **how)
    expected = simulate(steps=6, first_late=3, **how)
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert run.norms == pytest.approx(expected.norms, rel=1e-5)
    assert_near(run.weights, expected.weights)


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
    """See weights and state in all ways; each shows the same."""
    seen = weights_of(engine)
    weights, masters = engine.consolidated_state_dict(), engine.consolidated_state_dict(torch.float32)
    engine.save_16bit_model(folder)
    saved = load_file(folder / "model.safetensors")
    for other in (engine.module.state_dict(), saved, weights):
        for name, weight in seen.items() if other is not None else ():  # None but on the first rank
            assert torch.equal(other[name], weight), name
    with wherry.gathered_for_generation(engine), torch.no_grad():
        engine.module(*token_batch(99, 0, 0))
    name = "blocks.1.up.weight"
    master = engine.states.full(name, "master")
    assert masters is None or torch.equal(masters[name], master)
    engine.gradient_norms()
    if engine.global_steps:
        engine.gradients(name)
    engine.save_checkpoint(folder / "checkpoints")  # where ranks meet, after they have read the file


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize(("row", "precision"), [("offload-1", "fp32"), ("infinity", "bf16")])
def test_whoever_looks_sees_the_last_update(row: str, precision: str, tmp_path: Path) -> None:
    """Reads make it before its time: where something is read after every step, no update is late."""
    how: dict[str, Any] = {"stage": ROWS[row][0], "ranks": 2, "clip": 0.5, "seed": 9}
    late = offload(row, tmp_path, "delayed", precision)
    late["wherry"]["delayed_update_warmup"] = 2
    run = train(late, **how, before_step=lambda engine, _: look_everywhere(engine, tmp_path / "seen"))
    assert_equal(run, train(offload(row, tmp_path, "before_use", precision), **how))


def test_an_edit_is_of_the_last_update(tmp_path: Path) -> None:
    """The other weights have had theirs too, and the master follows the edit."""
    config = offload("infinity", tmp_path, "delayed", "bf16")
    config["wherry"]["delayed_update_warmup"] = 2
    edited = "blocks.1.up.weight"

    def run(value: float | None) -> list[dict[str, torch.Tensor]]:
        engine = engine_of(make_model(), settings(3, more=copy.deepcopy(config)))
        train_steps(engine, 3)
        with wherry.gathered(weight := engine.module.get_parameter(edited)):
            if value is not None:
                weight.data.fill_(value)
        seen = [masters_of(engine), weights_of(engine)]
        engine.close()
        return seen

    for before, after in zip(run(None), run(3.0), strict=True):
        assert (after[edited] == 3).all()
        assert_same(after, before | {edited: after[edited]})


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


@pytest.mark.parametrize("then", ["settle", "train"])
@pytest.mark.parametrize("row", ["offload-1", "offload-3"])
def test_weights_that_ctrl_c_has_held_up_arrive_later(
    row: str, then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(*, interrupted: bool) -> dict[str, torch.Tensor]:
        config = offload(row, tmp_path, "delayed")
        config["wherry"]["delayed_update_warmup"] = 1
        engine = engine_of(make_model(), settings(ROWS[row][0], more=config))
        train_steps(engine, 3)
        if interrupted:
            sent = itertools.count()

            def up(link: Link, *args: Any, **more: Any) -> Ticket:
                if next(sent) == 1:
                    raise KeyboardInterrupt
                return real(link, *args, **more)

            real = Link.up
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(Link, "up", up)
                engine.settle()
            assert next(sent) == 2
        if then == "settle" or not interrupted:
            engine.settle()
        train_steps(engine, 4, 3)
        engine.settle()
        weights = weights_of(engine)
        engine.close()
        return weights

    assert_same(trained(interrupted=True), trained(interrupted=False))
