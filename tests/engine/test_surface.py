"""Uses of a model around its training: other methods, copies, pickles, changes that the engine does not see."""

from __future__ import annotations

import copy
import io
import pickle
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
    on_ranks,
    settings,
    token_batch,
    train,
)
from tests.models import D, Stack, sgd, vectors
from torch import nn
from torch.nn import functional as F

import wherry
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks


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
    model: Any = make_model(Encoder)
    plain = copy.deepcopy(model)
    optimizer = sgd(plain.parameters())
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            x, y = vectors(step, 0, rank)
            loss = F.mse_loss(plain.encode(x, double=True), plain.encode(y).detach())
            (loss / 2).backward()
            if rank == 0:
                expected.append(float(loss.detach()))
        optimizer.step()

    def use(engine: Any) -> list[float]:
        losses = []
        for step in range(3):
            x, y = vectors(step, 0, engine.comm.rank)
            with torch.no_grad():
                target = engine.encode(y)
            loss = F.mse_loss(engine.encode(x, double=True), target)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        assert engine.size() == model.size()
        assert engine.encode.__doc__ == "Encode x."
        assert stage < 3 or engine.module.gain.isnan().all()
        return losses

    assert on_ranks(use, stage=stage, model=model, optimizer=sgd)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (2, "fp32"), (3, "fp32"), (3, "bf16")])
def test_state_dict_of_a_part(stage: int, precision: str) -> None:
    model: Any = make_model()
    other: Any = make_model(seed=9)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16

    def cast(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value.to(dtype) for name, value in state.items()}

    def use(engine: Any) -> None:
        assert_same(engine.module.blocks[1].state_dict(), cast(model.blocks[1].state_dict()))
        assert torch.equal(engine.module.embed.state_dict(prefix="x.")["x.weight"], model.embed.weight.to(dtype))
        engine.module.blocks[1].load_state_dict(other.blocks[1].state_dict())
        engine.module.norm.load_state_dict(other.norm.state_dict())
        loaded = {n: value for n, value in other.state_dict().items() if n.startswith(("blocks.1.", "norm."))}
        assert_same(engine.module.state_dict(), cast({**model.state_dict(), **loaded}))
        # The fp32 masters have followed: an update by a zero gradient changes little.
        engine.backward(0 * engine(*token_batch(0, 0, engine.comm.rank)))
        engine.step()
        after = engine.module.blocks[1].state_dict()
        for name, value in other.blocks[1].state_dict().items():
            torch.testing.assert_close(after[name].float(), value, rtol=0.05, atol=1e-3)

    on_ranks(use, stage=stage, optimizer=sgd, config={} if precision == "fp32" else {"bf16": {"enabled": True}})


@pytest.mark.parametrize(("how", "stage"), [("deepcopy", 3), ("pickle", 0), ("torch.save", 3)])
def test_copies_and_pickles(how: str, stage: int) -> None:
    def copied(module: nn.Module) -> nn.Module:
        if how == "deepcopy":
            return copy.deepcopy(module)
        if how == "pickle":
            return pickle.loads(pickle.dumps(module))
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def use(engine: Any) -> None:
        if stage == 3:
            with pytest.raises(WherryError, match=r"partitioned.*with wherry\.gathered"):
                copied(engine.module)
        with wherry.gathered(engine.module):
            other = copied(engine.module)
        train(engine, 1)
        ids = token_batch(0, 0, 0)
        assert torch.equal(other(*ids), model(*ids))
        other(*ids).backward()
        other.load_state_dict(other.state_dict())
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


@pytest.mark.parametrize(("stage", "resumed"), [(0, False), (3, False), (3, True)])
def test_a_replaced_parameter_is_an_error(stage: int, resumed: bool, tmp_path: Path) -> None:
    def use(engine: Any) -> None:
        engine.backward(engine(*token_batch(0, 0, engine.comm.rank)))
        if resumed:
            engine.step()
            engine.save_checkpoint(tmp_path)
            comm = engine.comm
            engine.close()
            engine = engine_of(copy.deepcopy(model), settings(stage), comm)
            engine.load_checkpoint(tmp_path)
            engine.backward(engine(*token_batch(0, 0, comm.rank)))
        engine.module.blocks[1].mix.weight = nn.Parameter(torch.zeros(16, 16))
        with pytest.raises(WherryError, match=r"blocks\.1\.mix\.weight: this parameter has been replaced"):
            engine.step()

    model = make_model()
    on_ranks(use, stage=stage, model=model)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_unfrozen_parameter_is_an_error(stage: int, tmp_path: Path) -> None:
    def use(engine: Any) -> None:
        layer = engine.module.blocks[0].up
        layer.requires_grad_(True)
        engine.backward(engine(*token_batch(0, 0, engine.comm.rank)))
        with pytest.raises(WherryError, match=r"blocks\.0\.up\.weight: this parameter was frozen"):
            engine.step()
        layer.requires_grad_(False)
        engine.step()
        layer.requires_grad_(True)
        with pytest.raises(WherryError, match=r"blocks\.0\.up\.weight: this parameter was frozen"):
            engine.save_checkpoint(tmp_path)

    model: Any = make_model()
    model.blocks[0].requires_grad_(False)
    on_ranks(use, stage=stage, model=model)


class Unused(Stack):
    """Blocks that some steps use, that none does, and that one rank alone uses."""

    step = 0
    rank = 0

    def __init__(self) -> None:
        super().__init__(blocks=5)
        self.gain = nn.Parameter(torch.ones(D))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        if self.step % 2:
            x = self.blocks[1](x) * self.gain
        if self.rank == 1:
            x = self.blocks[3](x)
        return self.out(self.blocks[4](x))


MAKERS = {
    "sgd": sgd,
    "sgd, no momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.3),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, weight_decay=0.3),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, weight_decay=0.3),
}


@pytest.mark.parametrize(
    ("optimizer", "stage", "precision"),
    [
        ("sgd", 0, "fp32"),
        ("sgd", 3, "bf16"),
        ("sgd, no momentum", 1, "fp32"),
        ("rmsprop", 2, "fp32"),
        ("rmsprop", 3, "fp32"),
        ("adagrad", 2, "bf16"),
        ("adagrad", 3, "fp32"),
    ],
)
def test_parameters_without_a_gradient_stay_unchanged(optimizer: str, stage: int, precision: str) -> None:
    """Apply neither weight decay nor momentum, as plain PyTorch does with a gradient of None."""
    model = make_model(Unused)
    plain: Any = copy.deepcopy(model)
    steps = MAKERS[optimizer](plain.parameters())
    history = []
    for step in range(4):
        plain.step = step
        steps.zero_grad()
        for rank in range(2):
            plain.rank = rank
            (plain(*vectors(step, 0, rank)) / 2).backward()
        steps.step()
        history.append(copy.deepcopy(plain.state_dict()))

    def use(engine: Any) -> None:
        mine = engine.module
        dtype = next(mine.parameters()).dtype
        before = {name: value.clone() for name, value in mine.state_dict().items()}
        for step in range(4):
            mine.step, mine.rank = step, engine.comm.rank
            x, y = vectors(step, 0, engine.comm.rank)
            engine.backward(engine(x.to(dtype), y.to(dtype)))
            engine.step()
            after = {name: value.clone() for name, value in engine.module.state_dict().items()}
            if precision == "fp32":
                assert_near(after, history[step])
            for name, value in after.items():
                unused = name.startswith("blocks.2.") or (name.startswith(("blocks.1.", "gain")) and step % 2 == 0)
                changed = not torch.equal(value, before[name])
                assert not changed if unused else changed or precision == "bf16", (step, name)
            before = after

    config = {} if precision == "fp32" else {"bf16": {"enabled": True}}
    on_ranks(use, stage=stage, model=model, optimizer=MAKERS[optimizer], config=config)


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
    source = make_model()
    plain = copy.deepcopy(source)
    optimizer = adamw(plain.parameters())
    for step, (micros, size) in enumerate(phases):
        optimizer.zero_grad()
        for rank in range(2):
            for micro in range(micros):
                (plain(*token_batch(step, micro, rank, size)) / (2 * micros)).backward()
        optimizer.step()

    def body(comm: Comm) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(source)
        config = settings(2) | {"train_micro_batch_size_per_gpu": 2}
        engine = engine_of(model, config, comm)
        for step, (micros, size) in enumerate(phases):
            engine.set_train_micro_batch_size(size)
            engine.set_train_batch_size(2 * micros * size)
            assert (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()) == (size, micros)
            batches = [token_batch(step, micro, comm.rank, size) for micro in range(micros)]
            if by_iterator:
                engine.train_batch(iter(batches))
            else:
                for number, batch in enumerate(batches):
                    engine.backward(engine(*batch))
                    if number == 0 and micros > 1:
                        with pytest.raises(WherryError, match="within an accumulation window, of which 1 of 3"):
                            engine.set_train_batch_size(16)
                    engine.step()
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
        return engine.module.state_dict()

    for weights in run_ranks(2, body):
        assert_near(weights, plain.state_dict())


def test_clipping_by_hand_names_the_key() -> None:
    model = make_model()
    engine = engine_of(model, settings(1, 1, 0.25))
    with pytest.raises(WherryError, match=r'"gradient_clipping" of the config, which is 0\.25; set that to 1\.5 and'):
        engine.clip_grad_norm_(1.5)
    engine.close()


def test_a_copy_or_pickle_of_an_engine_is_refused() -> None:
    model = make_model()
    engine = engine_of(model, settings(1))
    for attempt in (copy.deepcopy, pickle.dumps, lambda engine: torch.save(engine, io.BytesIO())):
        with pytest.raises(WherryError, match=r"Copy its model: with wherry.gathered\(engine.module\)"):
            attempt(engine)
    engine.close()
