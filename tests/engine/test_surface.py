"""Uses of a model around its training: other methods, copies, pickles, changes that the engine does not see."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    adamw,
    assert_near,
    assert_same,
    engine_of,
    make_model,
    masters_of,
    on_ranks,
    settings,
    token_batch,
    train,
    weights_of,
)
from tests.models import D, Stack, sgd, vectors
from torch import nn
from torch.nn import functional as F

import wherry
from wherry.errors import WherryError


class Encoder(Stack):
    """Methods other than forward that read weights of the root unit, as contrastive models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((D,), 1.5))

    def encode(self, x: torch.Tensor, *, double: bool = False) -> torch.Tensor:
        """Encode x."""
        x = self.run(x) * self.gain
        return x * 2 if double else x

    def size(self) -> int:
        return sum(p.numel() for p in self.parameters())


@pytest.mark.parametrize("stage", [0, 3])
def test_other_methods_through_the_engine(stage: int) -> None:
    def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
        x, y = vectors(step, 0, rank)
        with torch.no_grad():
            target = model.encode(y)
        return F.mse_loss(model.encode(x, double=True), target)

    def use(engine: Any) -> dict[str, torch.Tensor]:
        for step in range(3):
            engine.backward(loss_of(engine, step, engine.comm.rank))
            engine.step()
        assert engine.size() == sum(p.numel() for p in model.parameters())
        assert engine.encode.__doc__ == "Encode x."
        assert stage < 3 or engine.module.gain.isnan().all()
        return weights_of(engine)

    model = make_model(Encoder)
    weights = on_ranks(use, stage=stage, model=model, optimizer=sgd)[0]
    optimizer = sgd(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(model, step, rank) / 2).backward()
        optimizer.step()
    assert_near(weights, dict(model.named_parameters()))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_state_dict_of_a_part(stage: int) -> None:
    model: Any = make_model().bfloat16()
    other: Any = make_model(seed=9).bfloat16()

    def use(engine: Any) -> None:
        mine = engine.module
        assert_same(mine.blocks[1].state_dict(), model.blocks[1].state_dict())
        assert torch.equal(mine.embed.state_dict(prefix="x.")["x.weight"], model.embed.weight)
        mine.blocks[1].load_state_dict(other.blocks[1].state_dict())
        mine.norm.load_state_dict(other.norm.state_dict())
        loaded = {n: value for n, value in other.state_dict().items() if n.startswith(("blocks.1.", "norm."))}
        assert_same(mine.state_dict(), {**model.state_dict(), **loaded})
        masters = masters_of(engine)
        assert all(torch.equal(masters[name], value.float()) for name, value in loaded.items())

    on_ranks(use, stage=stage, model=model.float(), config={"bf16": {"enabled": True}})


def through_torch(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: list[Callable[[Any], nn.Module]] = [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_torch]


@pytest.mark.parametrize("stage", [0, 3])
def test_copies_and_pickles(stage: int) -> None:
    def use(engine: Any) -> None:
        for copied in COPIES if stage == 3 else ():
            with pytest.raises(WherryError, match=r"partitioned.*with wherry\.gathered"):
                copied(engine.module)
        with wherry.gathered(engine.module):
            others = [copied(engine.module) for copied in COPIES]
        train(engine, 1)
        for other in others:
            assert torch.equal(other(*token_batch(0, 0, 0)), model(*token_batch(0, 0, 0)))
            # It is an ordinary module: another engine may have it.
            train(engine_of(other, settings(2), engine.comm), 1)

    model = make_model()
    on_ranks(use, stage=stage, model=model)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_backward_after_the_update_is_refused(stage: int) -> None:
    def use(engine: Any) -> None:
        first, second = (engine(*token_batch(0, micro, engine.comm.rank)) for micro in range(2))
        engine.backward(first)
        engine.step()
        for backward in (engine.backward, torch.Tensor.backward):
            with pytest.raises(WherryError, match="updated 1 times since the forward"):
                backward(second)
        train(engine, 2, 1)
        assert engine.was_step_applied()

    on_ranks(use, stage=stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_replaced_and_unfrozen_parameters_are_errors(stage: int, tmp_path: Path) -> None:
    def use(engine: Any) -> None:
        frozen, mix = engine.module.blocks[0].up, engine.module.blocks[1].mix
        weight = mix.weight
        engine.backward(engine(*token_batch(0, 0, engine.comm.rank)))
        for call in (engine.step, lambda: engine.save_checkpoint(tmp_path)):
            frozen.requires_grad_(True)
            with pytest.raises(WherryError, match=r"blocks\.0\.up\.weight: this parameter was frozen"):
                call()
            frozen.requires_grad_(False)
            mix.weight = nn.Parameter(torch.zeros(16, 16))
            with pytest.raises(WherryError, match=r"blocks\.1\.mix\.weight: this parameter has been replaced"):
                call()
            mix.weight = weight
            engine.step()
        assert engine.global_steps == 1

    model: Any = make_model()
    model.blocks[0].requires_grad_(False)
    on_ranks(use, stage=stage, model=model)


def test_a_parameter_may_be_frozen_for_a_while() -> None:
    def use(engine: Any) -> None:
        for step in range(4):
            engine.module.blocks[1].requires_grad_(step % 2 == 0)
            before = {name: value.clone() for name, value in engine.module.state_dict().items()}
            train(engine, step + 1, step, vectors)
            for name, value in engine.module.state_dict().items():
                frozen = name.startswith("blocks.1.") and step % 2
                assert torch.equal(value, before[name]) == bool(frozen), (step, name)

    on_ranks(use, model=make_model(Stack), optimizer=sgd)


@pytest.mark.parametrize("by_iterator", [False, True])
def test_batch_sizes_that_change_while_training(by_iterator: bool, tmp_path: Path) -> None:
    """Train windows of one micro-batch of 2, then three of 2, then three of 4."""
    phases = ((1, 2), (3, 2), (3, 4))

    def use(engine: Any) -> dict[str, torch.Tensor]:
        for step, (micros, size) in enumerate(phases):
            engine.set_train_micro_batch_size(size)
            engine.set_train_batch_size(2 * micros * size)
            assert (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()) == (size, micros)
            if by_iterator:
                engine.train_batch(token_batch(step, micro, engine.comm.rank, size) for micro in range(micros))
            else:
                train(engine, step + 1, step, partial(token_batch, size=size))
        assert (engine.global_steps, engine.global_samples) == (3, 4 + 12 + 24)
        for wrong in (0, 7, -8):
            with pytest.raises(WherryError, match=r"a multiple of 8 \(micro-batch 4 x 2 ranks\), got"):
                engine.set_train_batch_size(wrong)
        with pytest.raises(WherryError, match="expected 1 or more, got 0"):
            engine.set_train_micro_batch_size(0)
        engine.save_checkpoint(tmp_path)
        engine.global_samples = 0
        engine.load_checkpoint(tmp_path)
        assert engine.global_samples == 40
        return weights_of(engine)

    plain = make_model()
    found = on_ranks(use, stage=2)[0]
    optimizer = adamw(plain.parameters())
    for step, (micros, size) in enumerate(phases):
        optimizer.zero_grad()
        for rank, micro in itertools.product(range(2), range(micros)):
            (plain(*token_batch(step, micro, rank, size)) / (2 * micros)).backward()
        optimizer.step()
    assert_near(found, dict(plain.named_parameters()))
