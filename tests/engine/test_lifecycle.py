"""Lifecycles of engines: closing, collecting, two at once, failed steps, and the names that scripts use."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections import namedtuple
from collections.abc import Callable
from contextlib import suppress
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
    on_ranks,
    settings,
    token_batch,
    train,
    train_plain,
    train_step,
    weights_of,
)
from tests.models import Stack, sgd, vectors
from torch import nn

import wherry
from wherry.errors import PeerError, WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.tickets import Ticket
from wherry.update.optimizer_states import UpdateBucket


def tensors() -> list[torch.Tensor]:
    return [each for each in gc.get_objects() if type(each) is torch.Tensor]


@pytest.mark.parametrize(("how", "stage"), [("close", 0), ("with", 2), ("close", 3), ("del", 3)])
def test_every_tensor_is_freed(how: str, stage: int) -> None:
    def body(comm: Comm) -> list[weakref.ref[Any]]:
        engine = engine_of(copy.deepcopy(shared), settings(stage), comm)
        train(engine, 2)
        references = [weakref.ref(tensor) for tensor in tensors() if id(tensor) not in before]
        if how == "close":
            engine.close()
            engine.close()
        elif how == "with":
            with engine:
                train(engine, 1)
        if how != "del":
            with pytest.raises(WherryError, match="closed"):
                engine(*token_batch(0, 0, 0))
        del engine
        return references

    shared = make_model()
    before = {id(tensor) for tensor in tensors()}
    references = [reference for rank in run_ranks(2, body) for reference in rank]
    gc.collect()
    assert len(references) > 20
    assert [r for r in references if r() is not None] == []


def test_a_closed_engine_leaves_an_ordinary_module() -> None:
    model = make_model()
    engine = engine_of(model, settings(2))
    train(engine, 2)
    with pytest.raises(WherryError, match=r"embed\.weight: this parameter belongs to another engine"):
        engine_of(model, settings(2))
    engine.close()
    assert_near(dict(model.named_parameters()), train_plain(make_model(), steps=2).weights)
    loss = model(*token_batch(5, 0, 0))
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    train(engine_of(model, settings(3)), 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_two_engines_in_one_process(stage: int) -> None:
    """Train a student on the outputs of a teacher in one graph, and the teacher on the batch."""

    def losses_of(student: Any, teacher: Any, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = vectors(0, 0, rank)
        taught = teacher(x, y)
        with torch.no_grad():
            target = teacher.run(x)
        return (student.run(x) - target).square().mean(), taught

    def body(comm: Comm) -> dict[str, torch.Tensor]:
        engines: list[Any] = []
        for model, level in zip(pair, (3, stage), strict=True):
            engines.append(engine_of(copy.deepcopy(model), settings(level), comm, sgd))
        for _ in range(2):
            for engine, loss in zip(engines, losses_of(*engines, comm.rank), strict=True):
                engine.backward(loss)
            for engine in engines:
                engine.step()
        named = [(number, weights_of(engine)) for number, engine in enumerate(engines)]
        return {f"{number}.{name}": weight for number, weights in named for name, weight in weights.items()}

    def both(step: int, micro: int, rank: int) -> Callable[[Any], torch.Tensor]:
        return lambda models: sum(losses_of(*models, rank))

    pair = [make_model(Stack, seed) for seed in (1, 2)]
    plain = train_plain(nn.ModuleList(pair), ranks=2, steps=2, optimizer=sgd, batch=both)
    assert_near(run_ranks(2, body)[0], plain.weights)


def test_attributes_that_scripts_read() -> None:
    model = make_model()
    model.nickname = "tiny"
    config = settings(2, 3, 0.7)
    before = copy.deepcopy(config)
    engine, optimizer, loader, schedule = wherry.initialize(
        model=model, optimizer=adamw(model.parameters()), config=config, training_data=[(1, n) for n in range(10)]
    )
    assert config == before and isinstance(engine.config, dict)
    assert isinstance(engine, nn.Module) and engine.module is model
    assert engine.nickname == "tiny"
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = engine.nothing_like_it
    assert loader is engine.training_dataloader and len(loader) == 5
    assert schedule is None and optimizer.param_groups[0]["lr"] == 3e-3 and engine.get_global_grad_norm() is None
    sizes = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    assert (*sizes, engine.gradient_clipping(), engine.zero_optimization_stage()) == (6, 2, 3, 0.7, 2)
    boundaries = []
    for step in range(6):
        boundaries.append(engine.is_gradient_accumulation_boundary())
        train_step(engine, step, 0)
        assert engine.was_step_applied() == boundaries[-1]
    assert boundaries == [False, False, True] * 2
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (2, 6, 0)
    assert engine.train() is engine and engine.eval() is engine


@pytest.mark.parametrize("boundary", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_backwards_before_one_step_add_up(stage: int, boundary: bool) -> None:
    """Reduce in the step the gradients of backwards before the boundary was set."""

    def use(engine: Any) -> dict[str, torch.Tensor]:
        for step in range(2):
            if boundary:
                engine.set_gradient_accumulation_boundary(False)
            for micro in range(2):
                engine.backward(engine(*token_batch(step, micro, engine.comm.rank)) / 2)
            if boundary:
                engine.set_gradient_accumulation_boundary(True)
            engine.step()
        return weights_of(engine)

    expected = train_plain(make_model(), ranks=2, accumulation=2, steps=2, clip=0.5).weights
    assert_near(on_ranks(use, stage=stage, clip=0.5)[0], expected)


@pytest.mark.parametrize("accumulation", ["step_major", "layer_major"])
def test_an_incomplete_window_is_left_out(accumulation: str) -> None:
    model = make_model()
    order = {"wherry": {"accumulation": accumulation}}
    engine = engine_of(model, settings(0, 3, more=order))
    expected = train_plain(model, accumulation=3, steps=2)
    losses = []
    for step in range(2):
        data = iter([token_batch(step, micro, 0) for micro in range(5)])
        losses.append(float(engine.train_batch(data)))
        with pytest.raises(StopIteration, match=r"after 2 of a window's 3 micro-batches, which are left out; .*iter"):
            engine.train_batch(data)
        with pytest.raises(StopIteration, match="the iterator has ended; for another pass"):
            engine.train_batch(data)
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    assert engine.global_steps == 2 and engine.is_gradient_accumulation_boundary() is False


Pair = namedtuple("Pair", ["ids", "targets"])


def test_batches_of_any_shape_are_trained() -> None:
    engine = engine_of(make_model(), settings(2))
    ids, targets = token_batch(0, 0, 0)
    batches = (Pair(ids, targets), [ids, targets], {"ids": ids, "targets": targets})
    losses = [float(engine.train_batch(iter([batch]))) for batch in batches]
    assert losses[0] > losses[1] > losses[2]


def test_steps_without_a_backward_update_nothing_and_do_not_shift_the_window(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(make_model(), settings(2, 2))
    train(engine, 1)
    before = weights_of(engine)
    engine.step()
    engine.step()
    assert "no backward came before it" in caplog.text
    assert not engine.was_step_applied()
    assert_same(weights_of(engine), before)
    applied = []
    for micro in range(4):
        train_step(engine, micro, 0)
        applied.append(engine.was_step_applied())
    assert applied == [False, True, False, True]


@pytest.mark.parametrize("managed", [True, False])
def test_no_sync_holds_a_step_back(managed: bool) -> None:
    def both(model: Any) -> torch.Tensor:
        return model(*token_batch(0, 0, 0)) + model(*token_batch(1, 0, 0))

    engine = engine_of(make_model(), settings(2, more={"managed_gradient_accumulation": managed}), optimizer=sgd)
    with engine.no_sync():
        train_step(engine, 0, 0)
    assert engine.global_steps == 0
    train_step(engine, 1, 0)
    assert engine.global_steps == 1
    plain = train_plain(make_model(), steps=1, optimizer=sgd, batch=lambda *_: both)
    assert_near(weights_of(engine), plain.weights)


REFUSED: list[tuple[Callable[[Any], object], str]] = [
    (lambda engine: engine.set_train_batch_size(8), "of which 1 of 2 micro-batches have run"),
    (lambda engine: engine.train_batch(engine.training_dataloader), r"got EpochLoader.*iter\(loader\)"),
    (lambda engine: engine.backward(torch.ones(2)), "one element"),
    (lambda engine: engine.backward(torch.ones(())), "no gradient"),
    (lambda engine: engine.backward(1.0), "float"),
    (
        lambda engine: engine.clip_grad_norm_(1.5),
        r'"gradient_clipping" of the config, which is 0\.25; set that to 1\.5',
    ),
    (lambda engine: engine.clip_grad_value_(1.5), r"clip_grad_value_: .*which is 0\.25; use that, as single values"),
    (copy.deepcopy, r"Copy its model: with wherry.gathered\(engine.module\)"),
    (pickle.dumps, r"Copy its model: with wherry.gathered\(engine.module\)"),
]


def test_calls_that_do_not_fit_are_refused_within_a_window() -> None:
    engine = engine_of(make_model(), settings(2, 2, 0.25), training_data=[(1,), (2,)])
    train_step(engine, 0, 0)
    for call, message in REFUSED:
        with pytest.raises(WherryError, match=message):
            call(engine)
    train_step(engine, 0, 0)
    assert engine.was_step_applied()
    train_step(engine, 0, 0)
    with pytest.raises(WherryError, match="scale_wrt_gas changed"):
        engine.backward(engine(*token_batch(0, 1, 0)), scale_wrt_gas=False)


@pytest.mark.parametrize("policy", ["at_step", "delayed"])
def test_a_load_recovers_from_a_failed_update(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an update fail on one rank of two; both load, and train on to the bit."""
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    config = settings(2, more=offload | {"wherry": {"update_policy": policy}})
    real, fails, both = UpdateBucket.update, threading.Event(), threading.Barrier(2)

    def update(bucket: UpdateBucket, *given: Any, **more: Any) -> Ticket:
        if fails.is_set() and bucket.states[0].flat.rank == 0:
            raise OSError("the machine is short of everything")
        return real(bucket, *given, **more)

    def body(comm: Comm) -> tuple[list[float], list[float]]:
        model = make_model()
        engine = engine_of(model, config, comm)
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        expected = train(engine, 4, 2)
        engine.load_checkpoint(tmp_path)
        if comm.rank == 0:
            fails.set()
        with pytest.raises((WherryError, PeerError)):
            train(engine, 4, 2)
        both.wait()
        if comm.rank == 0:
            fails.clear()
            other = tmp_path / "other"
            save, export = partial(engine.save_checkpoint, other), partial(engine.save_16bit_model, other)
            forward = partial(engine.module, *token_batch(0, 0, 0))
            for call in (forward, save, export, lambda: engine.states, engine.module.state_dict, engine.unwrap):
                with pytest.raises(WherryError, match="not those of one step"):
                    call()
            assert not other.exists()
        while True:
            with suppress(PeerError):  # until the other rank's failure has arrived
                engine.load_checkpoint(tmp_path, load_module_only=True)
                break
        with pytest.raises(WherryError, match="an update has failed before"):
            engine.settle()
        engine.load_checkpoint(tmp_path)
        return train(engine, 4, 2), expected

    monkeypatch.setattr(UpdateBucket, "update", update)
    for losses, expected in run_ranks(2, body):
        assert losses == expected


# A forward or backward that runs out of memory: a note on the error says what to do.


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: Exception, phase: str) -> torch.Tensor:
        ctx.error = error
        if phase == "forward":
            raise error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise ctx.error


CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU"


@pytest.mark.parametrize(
    ("error", "asked", "phase"),
    [
        (torch.OutOfMemoryError(CUDA), "asked for 2.50 GiB more", "forward"),
        (torch.OutOfMemoryError(CUDA), "asked for 2.50 GiB more", "backward"),
        (MemoryError("no memory is left"), "needs more", "backward"),
        (KeyError("no error of memory"), "", "forward"),
    ],
)
def test_the_error_keeps_its_type_and_the_engine_works_again(error: Exception, asked: str, phase: str) -> None:
    model: Any = make_model()
    more = {"activation_checkpointing": {"policy": "recompute"}, "train_micro_batch_size_per_gpu": 1}
    engine = engine_of(model, settings(3, more=more))
    handle = model.norm.register_forward_hook(lambda module, args, output: Fails.apply(output, error, phase))
    with pytest.raises(type(error)) as raised:
        engine.backward(engine(*token_batch(0, 0, 0)))
    assert raised.value is error
    notes = error.__dict__.pop("__notes__", [])
    assert len(notes) == bool(asked)
    for note in notes:
        assert note.startswith(f"wherry: {phase} {asked}, and ")
        assert "States of the engine take: parameters " in note and "shorter samples" in note
    handle.remove()
    train_step(engine, 0, 0)
    engine.close()
