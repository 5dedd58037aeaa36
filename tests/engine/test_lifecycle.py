"""Lifecycles of engines: closing, collecting, two at once, failed steps, and the names that scripts use."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
)
from tests.models import Stack, vectors
from tests.tiers.rows import with_stores
from torch import nn

import wherry
from wherry.errors import PeerError, WherryError
from wherry.parallel.comm import Comm, SoloComm
from wherry.sharding.unit import Weights
from wherry.testing import run_ranks
from wherry.testing.late import topology
from wherry.tickets import CallbackTicket, Ticket
from wherry.tiers.disk import DiskStore
from wherry.update import updater
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


@pytest.mark.parametrize("stage", [0, 2])
def test_a_closed_engine_leaves_an_ordinary_module(stage: int) -> None:
    model = make_model()
    engine = engine_of(model, settings(stage))
    train(engine, 2)
    engine.close()
    assert_near(dict(model.named_parameters()), train_plain(make_model(), steps=2).weights)
    loss = model(*token_batch(5, 0, 0))
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    train(engine_of(model, settings(3)), 1)


@pytest.mark.parametrize("stages", [(2, 3), (3, 3)])
def test_two_engines_in_one_process(stages: tuple[int, int]) -> None:
    def body(comm: Comm) -> list[list[float]]:
        engines = [engine_of(copy.deepcopy(models[seed]), settings(stage), comm) for seed, stage in enumerate(stages)]
        losses: list[list[float]] = [[], []]
        for step in range(3):
            forwards = [engine(*token_batch(step, 0, comm.rank)) for engine in engines]
            for engine, loss, seen in zip(engines, forwards, losses, strict=True):
                engine.backward(loss)
                engine.step()
                seen.append(sum(comm.gather_objects(float(loss.detach()))) / comm.size)
        return losses

    models = [make_model(seed=seed) for seed in range(2)]
    for model, losses in zip(models, run_ranks(2, body)[0], strict=True):
        assert losses == pytest.approx(train_plain(model, ranks=2, steps=3).losses, rel=1e-5)


def test_one_loss_through_two_engines() -> None:
    """Train a student on the outputs of a frozen teacher, in one graph."""

    def distill(student: Any, teacher: Any, update: Callable[[torch.Tensor], None]) -> list[float]:
        losses = []
        for step in range(3):
            x = vectors(step, 0, 0)[0]
            loss = (student.run(x) - teacher.run(x)).square().mean()
            update(loss)
            losses.append(float(loss.detach()))
        return losses

    def body(comm: Comm) -> list[float]:
        student, teacher = copy.deepcopy(pair)
        student = engine_of(student, settings(3), comm)
        teacher = engine_of(teacher, settings(3), comm, optimizer=None)

        def update(loss: torch.Tensor) -> None:
            student.backward(loss)
            student.step()

        return distill(student, teacher, update)

    pair: list[Any] = [make_model(Stack, seed) for seed in (1, 2)]
    pair[1].requires_grad_(False)
    losses = run_ranks(2, body)[0]
    optimizer = adamw(pair[0].parameters())

    def plainly(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    assert losses == pytest.approx(distill(*pair, plainly), rel=1e-5)


def test_attributes_that_scripts_read() -> None:
    model = make_model()
    model.nickname = "tiny"
    engine, optimizer, loader, schedule = wherry.initialize(
        model=model,
        optimizer=adamw(model.parameters()),
        config=settings(2, 3, more={"gradient_clipping": 0.7}),
        training_data=[(torch.ones(1), index) for index in range(10)],
    )
    assert isinstance(engine, nn.Module)
    assert engine.module is model
    assert engine.nickname == "tiny"
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = engine.nothing_like_it
    assert loader is engine.training_dataloader and len(loader) == 5
    assert schedule is None
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (6, 2)
    assert engine.gradient_accumulation_steps() == 3
    assert engine.gradient_clipping() == 0.7
    assert engine.zero_optimization_stage() == 2
    assert engine.get_global_grad_norm() is None
    boundaries = []
    for step in range(6):
        boundaries.append(engine.is_gradient_accumulation_boundary())
        engine.backward(engine(*token_batch(step, 0, 0)))
        assert engine.is_gradient_accumulation_boundary() == boundaries[-1]
        engine.step()
        assert engine.was_step_applied() == boundaries[-1]
    assert boundaries == [False, False, True] * 2
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (2, 6, 0)
    assert isinstance(engine.config, dict)
    assert engine.train() is engine and engine.eval() is engine
    assert optimizer.param_groups[0]["lr"] == 3e-3


def test_boundaries_that_scripts_set() -> None:
    model = make_model()
    engine = engine_of(model, settings(2))
    for boundary in (False, False, True):
        engine.set_gradient_accumulation_boundary(boundary)
        engine.backward(engine(*token_batch(0, 0, 0)), scale_wrt_gas=False)
        engine.step()
    assert engine.global_steps == 1
    engine.set_gradient_accumulation_boundary(None)
    with engine.no_sync():
        engine(*token_batch(0, 0, 0)).backward()
    engine(*token_batch(1, 0, 0)).backward()
    engine.step()
    assert engine.global_steps == 2


def test_micro_batches_of_one_window_are_averaged_alike_and_its_size_stays() -> None:
    model = make_model()
    engine = engine_of(model, settings(2, 2))
    engine.backward(engine(*token_batch(0, 0, 0)))
    engine.step()
    with pytest.raises(WherryError, match="of which 1 of 2 micro-batches have run"):
        engine.set_train_batch_size(8)
    with pytest.raises(WherryError, match="scale_wrt_gas changed"):
        engine.backward(engine(*token_batch(0, 1, 0)), scale_wrt_gas=False)
    engine.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_boundary_set_after_the_backward(stage: int) -> None:
    """Reduce in the step the gradients that backward did not."""

    def use(engine: Any) -> dict[str, torch.Tensor]:
        for step in range(2):
            engine.set_gradient_accumulation_boundary(False)
            for micro in range(2):
                engine.backward(engine(*token_batch(step, micro, engine.comm.rank)) / 2)
            engine.set_gradient_accumulation_boundary(True)
            engine.step()
        return engine.module.state_dict()

    expected = train_plain(make_model(), ranks=2, accumulation=2, steps=2, clip=0.5).weights
    assert_near(on_ranks(use, stage=stage, clip=0.5)[0], expected)


def test_steps_without_a_backward_update_nothing_and_do_not_shift_the_window(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    engine = engine_of(model, settings(2, 2))
    train(engine, 1)
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.step()
    engine.step()
    assert "no backward came before it" in caplog.text
    assert not engine.was_step_applied()
    assert_same(engine.module.state_dict(), before)
    applied = []
    for micro in range(4):
        train_step(engine, micro, 0)
        applied.append(engine.was_step_applied())
    assert applied == [False, True, False, True]


def test_train_batch_needs_an_iterator() -> None:
    engine, _, loader, _ = wherry.initialize(model=make_model(), config=settings(2), training_data=[(1,), (2,)])
    with pytest.raises(WherryError, match=r"got EpochLoader.*iter\(loader\)"):
        engine.train_batch(loader)


def test_a_loader_without_a_batch_size_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    for size in ({}, {"train_batch_size": 2}, {"train_micro_batch_size_per_gpu": 1}):
        wherry.initialize(model=make_model(), config={"zero_optimization": {"stage": 2}, **size}, training_data=[1, 2])
    assert caplog.text.count("train_micro_batch_size_per_gpu: not given, so the loader's batches have size 1") == 1


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


def test_the_loader_shuffles_every_epoch() -> None:
    _, _, loader, _ = wherry.initialize(model=make_model(), config=settings(2), training_data=list(range(50)))
    epochs = [[int(x) for batch in loader for x in batch] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50))


def test_batches_of_any_shape_go_to_the_device() -> None:
    class Pair(NamedTuple):
        ids: torch.Tensor
        targets: torch.Tensor

    model = make_model()
    engine = engine_of(model, settings(2))
    ids, targets = token_batch(0, 0, 0)
    losses = [
        float(engine.train_batch(iter([batch])))
        for batch in (Pair(ids, targets), [ids, targets], {"ids": ids, "targets": targets})
    ]
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize(
    ("loss", "message"), [(torch.ones(2), "one element"), (torch.ones(()), "no gradient"), (1.0, "float")]
)
def test_backward_refuses_other_losses(loss: Any, message: str) -> None:
    engine, *_ = wherry.initialize(model=make_model())
    with pytest.raises(WherryError, match=message):
        engine.backward(loss)


def test_initialize_copies_the_config() -> None:
    config = settings(2)
    before = copy.deepcopy(config)
    engine, *_ = wherry.initialize(model=make_model(), config=config)
    assert config == before
    assert copy.deepcopy(engine.config) == engine.config


def test_an_engine_whose_gather_failed_frees_everything(tmp_path: Path) -> None:
    class Failing(DiskStore):
        fails = False

        def read(self, *args: Any, **more: Any) -> Ticket:
            return CallbackTicket(fail) if self.fails else super().read(*args, **more)

    def fail() -> None:
        raise PeerError("rank 1 is gone")

    model = make_model()
    disk = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0, "buffer_count": 1}
    config = settings(3, more={"zero_optimization": {"stage": 3, "offload_param": disk}})
    place, stores = with_stores(replace(topology(SoloComm()), open_store=Failing))
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config, mesh=place)
    flats = [flat for unit in engine.units for flat in unit.travelling]
    stores[0].fails = True
    with pytest.raises(PeerError, match="rank 1 is gone"):
        engine(*token_batch(0, 0, 0))
    engine.close()
    assert all(flat.weights is Weights.RELEASED for flat in flats)
    assert all(parameter.isnan().all() for flat in flats for parameter in flat.parameters)
    for module in model.modules():
        assert not (module._state_dict_hooks or module._load_state_dict_pre_hooks or module._forward_hooks)


@pytest.mark.parametrize("at", ["between updates", "in an update"])
def test_an_interrupted_step_is_neither_saved_nor_read(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    engine = engine_of(model, settings(0))
    train(engine, 1)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if at == "in an update":
            patch.setattr(UpdateBucket, "update", interrupt)
        else:
            patch.setattr(updater, "drive_all", interrupt)
        train(engine, 1)
    assert len(list(engine.module.parameters())) == len(list(model.parameters()))
    inputs = token_batch(0, 0, 0)
    for call in (
        partial(engine.save_checkpoint, tmp_path / "c"),
        partial(engine.save_16bit_model, tmp_path / "m"),
        partial(engine.eval(), *inputs),
        partial(engine.module, *inputs),
        lambda: engine.states,
        engine.module.state_dict,
        engine.unwrap,
    ):
        with pytest.raises(WherryError, match="not those of one step"):
            call()
    assert not list(tmp_path.iterdir())
    with pytest.raises(WherryError, match="KeyboardInterrupt"):
        train(engine.train(), 1)
    engine.close()


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
            with pytest.raises(WherryError, match="not those of one step"):
                engine.save_checkpoint(tmp_path / "other")
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


def test_wrong_arguments_of_offload_states_are_refused_before_any_change() -> None:
    model = make_model()
    engine = engine_of(model, settings(0))
    engine.backward(engine(*token_batch(0, 0, 0)))
    for wrong in ({"device": "bad"}, {"include": ["weights"]}):
        with pytest.raises(WherryError, match="offload_states"):
            engine.offload_states(**wrong)
    assert engine.has_gradients()
    engine.close()
