"""Gradual unfreezing: parameters that the optimizer was given frozen are trained once they require a gradient."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wherry
from wherry.errors import WherryError
from wherry.testing import run_ranks

from .harness import (
    Run,
    adamw,
    assert_close,
    assert_equal,
    engine_of,
    make_model,
    on_ranks,
    settings,
    token_batch,
    train,
    train_engine,
    train_plain,
    weights_of,
)

STEPS = 6


def frozen_model() -> Any:
    """Make a model of which the last block alone is trained."""
    model: Any = make_model()
    model.requires_grad_(False)
    model.blocks[2].requires_grad_(True)
    return model


def unfreeze(model: Any, step: int) -> None:
    """Unfreeze part of a block, then the rest of it and another, then everything."""
    for module in {2: [model.blocks[1].up], 3: [model.blocks[1], model.blocks[0].norm], 4: [model]}.get(step, ()):
        module.requires_grad_(True)


def block(stage: int, tier: str, folder: Path) -> dict[str, Any]:
    device = {"device": tier, "nvme_path": str(folder)} if tier else {}
    parameters = {"offload_param": device} if stage == 3 else {}
    return {"stage": stage, **({"offload_optimizer": device, **parameters} if tier else {})}


def train_unfreezing(stage: int, ranks: int, more: dict[str, Any], accumulation: int = 1, clip: float = 0.0) -> Run:
    return train_engine(
        frozen_model(),
        stage=stage,
        ranks=ranks,
        steps=STEPS,
        accumulation=accumulation,
        clip=clip,
        config=more,
        before_step=lambda engine, step: unfreeze(engine.module, step),
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_unfrozen_parameters_are_trained_as_by_plain_pytorch(ranks: int, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "wherry")
    how: Any = {"accumulation": 2, "clip": 0.5}
    plain = train_plain(frozen_model(), ranks=ranks, steps=STEPS, before_step=unfreeze, **how)
    assert_close(train_unfreezing(3, ranks, {}, **how), plain)
    messages = [record.getMessage() for record in caplog.records if "trained from here on" in record.getMessage()]
    assert [message.split(":")[0] for message in messages] == ["step 3", "step 4", "step 5"]
    assert "2 frozen parameters" in messages[0] and "blocks.1.up.weight, blocks.1.up.bias" in messages[0]


@pytest.mark.parametrize(
    ("ranks", "stage", "tier"), [(1, 3, "nvme"), (2, 1, ""), (2, 2, "cpu"), (2, 3, ""), (2, 3, "nvme")]
)
def test_unfreezing_gives_the_bits_of_stage_0(ranks: int, stage: int, tier: str, tmp_path: Path) -> None:
    run = train_unfreezing(stage, ranks, {"zero_optimization": block(stage, tier, tmp_path)})
    assert_equal(run, train_unfreezing(0, ranks, {}))


@pytest.mark.parametrize("stage", [0, 3])
def test_one_block_is_frozen_while_another_is_unfrozen(stage: int) -> None:
    def rotate(model: Any, step: int) -> None:
        if step >= 2:
            for number, one in enumerate(model.blocks):
                one.requires_grad_(number == step % 3)

    plain = train_plain(frozen_model(), ranks=2, steps=STEPS, before_step=rotate)
    run = train_engine(
        frozen_model(), stage=stage, ranks=2, steps=STEPS, before_step=lambda engine, step: rotate(engine.module, step)
    )
    assert_close(run, plain)


@pytest.mark.parametrize("stage", [0, 3])
def test_flats_that_somebody_uses_are_laid_out_anew_later(stage: int, tmp_path: Path) -> None:
    """Unfreeze inside `gathered` and while weights are held for generation; save there, and train after it."""

    def use(engine: Any) -> dict[str, torch.Tensor]:
        train(engine, 1)
        before = weights_of(engine)
        with wherry.gathered(engine.module):
            engine.module.requires_grad_(True)
            engine.save_checkpoint(tmp_path)
        with wherry.gathered_for_generation(engine):
            engine.save_16bit_model(tmp_path / "model")
        train(engine, 2, 1)
        after = weights_of(engine)
        assert not any(torch.equal(after[name], value) for name, value in before.items())
        return after

    on_ranks(use, stage=stage, model=frozen_model())


def test_parts_of_a_resident_flat_stay_resident() -> None:
    """The limit of what stays gathered is as large as the model; its parts have more padding."""
    model = frozen_model()
    limit = sum(parameter.numel() for parameter in model.parameters()) + 300
    zero = {"stage3_param_persistence_threshold": 10**6, "stage3_model_persistence_threshold": limit}
    assert_equal(train_unfreezing(3, 2, {"zero_optimization": zero}), train_unfreezing(0, 2, {}))


@pytest.mark.parametrize("policy", ["before_use", "in_backward", "delayed"])
def test_updates_under_way_end_before_flats_are_laid_out_anew(policy: str) -> None:
    more = {"wherry": {"update_policy": policy}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    run = train_unfreezing(3, 2, more)
    if policy != "delayed":
        assert_equal(run, train_unfreezing(3, 2, {}))
    else:
        assert_close(
            run, train_unfreezing(1, 2, {**more, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
        )


def test_a_checkpoint_of_an_unfrozen_model_resumes_before_and_after_unfreezing(tmp_path: Path, caplog: Any) -> None:
    """Load states of parameters that are unfrozen before the load, and train on to the same bits."""

    def begin(engine: Any) -> dict[str, torch.Tensor]:
        for step in range(STEPS):
            unfreeze(engine.module, step)
            train(engine, step + 1, step)
            if step == 3:
                engine.save_checkpoint(tmp_path)
        return weights_of(engine)

    def resume(engine: Any) -> dict[str, torch.Tensor]:
        for step in range(4):
            unfreeze(engine.module, step)
        engine.load_checkpoint(tmp_path)
        for step in range(4, STEPS):
            unfreeze(engine.module, step)
            train(engine, step + 1, step)
        return weights_of(engine)

    whole = on_ranks(begin, stage=3, model=frozen_model())[0]
    for stage in (0, 3):
        resumed = on_ranks(resume, stage=stage, model=frozen_model())[0]
        assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    assert "not loaded" not in caplog.text
    on_ranks(lambda engine: engine.load_checkpoint(tmp_path), stage=3, model=frozen_model())
    assert "its optimizer state of blocks.0.norm.weight" in caplog.text and "unfreeze them before" in caplog.text


def test_unfreezing_within_a_window_or_what_the_optimizer_lacks_is_an_error() -> None:
    model = frozen_model()
    engine = engine_of(model, settings(3, 2))
    engine.backward(engine(*token_batch(0, 0, 0)))
    engine.step()
    model.blocks[1].requires_grad_(True)
    engine.backward(engine(*token_batch(0, 1, 0)))
    with pytest.raises(WherryError, match=r"blocks\.1\..*within an accumulation window.*before the next forward"):
        engine.step()
    engine.zero_grad()
    train(engine, 1)
    assert engine.global_steps == 1
    engine.close()


def test_ranks_that_unfreeze_other_parameters_are_refused() -> None:
    def body(comm: Any) -> None:
        model = frozen_model()
        with wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=settings(3), mesh=comm)[0] as e:
            model.blocks[comm.rank].requires_grad_(True)
            e(*token_batch(0, 0, comm.rank))

    with pytest.raises(WherryError, match=r"the list of parameters that are no longer frozen is .* on rank 0 and"):
        run_ranks(2, body)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_modules_that_come_after_initialize_are_refused_by_the_step(stage: int) -> None:
    """Refuse a module that was added or replaced after steps, but not one without weights or around the same ones."""

    def use(engine: Any) -> None:
        blocks, before = engine.module.blocks, engine.module.blocks[1]
        train(engine, 1)
        blocks.append(nn.Identity())
        blocks[1] = nn.Sequential(before, nn.Identity())
        train(engine, 2, 1)
        for step, change in enumerate((lambda: blocks.append(other()), lambda: blocks.insert(1, other())), 2):
            kept = list(blocks)
            change()
            with pytest.raises(WherryError, match=r"blocks\.\d\..*: this parameter has come into the model since"):
                train(engine, step + 1, step)
            engine.zero_grad()
            blocks._modules = {str(number): block for number, block in enumerate(kept)}

    def other() -> nn.Module:
        return copy.deepcopy(source.blocks[0])

    source: Any = make_model()
    on_ranks(use, stage=stage, model=source, ranks=1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_other_data_in_a_released_parameter_are_refused_by_the_next_forward(ranks: int) -> None:
    def use(engine: Any) -> None:
        train(engine, 1)
        engine.module.blocks[1].up.weight.data = torch.zeros(32, 16)
        with pytest.raises(WherryError, match=r"blocks\.1\.up\.weight: this parameter has been given other data"):
            train(engine, 2, 1)

    on_ranks(use, ranks=ranks, config={"zero_optimization": {"offload_param": {"device": "cpu"}}})
