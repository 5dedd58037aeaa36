"""What an exception or Ctrl-C leaves of a step is told by all that comes after, until somebody has answered it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import engine_of, make_model, settings, token_batch, train_step
from tests.guard.counts import SilentComm
from torch import nn

from wherry.errors import DivergenceError, PeerError, WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.update import optimizer_states
from wherry.update.optimizer_states import UpdateBucket
from wherry.update.updater import Updater

IN_BACKWARD = {"wherry": {"update_policy": "in_backward"}}
Call = Callable[[Any, Path], object]


class Stumbled(Exception):
    pass


@pytest.fixture
def every_flat_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small flats are updated together; with this each by itself, as large ones are."""
    monkeypatch.setattr(optimizer_states, "BUCKET_NUMEL", 1)


@contextmanager
def stumbling(engine: Any, error: type[BaseException], block: int = 0) -> Iterator[None]:
    """The backward comes to an error behind this block, whose successors have their gradients."""

    def stumble(grad: torch.Tensor) -> None:
        raise error

    def watch(module: nn.Module, args: Any) -> None:
        args[0].register_hook(stumble)

    handle = engine.module.blocks[block].register_forward_pre_hook(watch)
    try:
        yield
    finally:
        handle.remove()


def abort(engine: Any, how: str, error: type[BaseException] = Stumbled) -> None:
    with stumbling(engine, error):
        loss = engine(*token_batch(1, 0, engine.global_rank))
        with pytest.raises(error):
            engine.backward(loss) if how == "engine.backward" else loss.backward()


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def another_backward(engine: Any, folder: Path) -> None:
    engine.backward(torch.ones((), requires_grad=True) * 2)


CALLS: dict[str, Call] = {
    "forward": lambda engine, folder: engine(*token_batch(2, 0, 0)),
    "evaluation": lambda engine, folder: engine.eval()(*token_batch(2, 0, 0)),
    "model": lambda engine, folder: dict.get(vars(engine), "_modules")["module"](*token_batch(2, 0, 0)),
    "backward": another_backward,
    "step": lambda engine, folder: engine.step(),
    "optimizer.step": lambda engine, folder: engine.optimizer.step(),
    "zero_grad": lambda engine, folder: engine.zero_grad(),
    "optimizer.zero_grad": lambda engine, folder: engine.optimizer.zero_grad(),
    "train_batch": lambda engine, folder: engine.train_batch(iter([token_batch(2, 0, 0)])),
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder / "c"),
    "save_16bit_model": lambda engine, folder: engine.save_16bit_model(folder / "m"),
    "settle": lambda engine, folder: engine.settle(),
    "states": lambda engine, folder: engine.states,
    "offload_states": lambda engine, folder: engine.offload_states(),
}
TOLD = r"updated 3 of 4 parts .*\(blocks\.0, blocks\.1, blocks\.2\)\. .*load_checkpoint.*accept_partial_update"


@pytest.mark.parametrize("how", ["engine.backward", "loss.backward"])
@pytest.mark.usefixtures("every_flat_alone")
def test_an_aborted_backward_that_has_updated_a_part_is_told_by_what_comes_next(how: str, tmp_path: Path) -> None:
    engine = engine_of(make_model(), settings(0, more=IN_BACKWARD))
    train_step(engine, 0, 0)
    abort(engine, how)
    for name, call in [*CALLS.items(), *CALLS.items()]:
        with pytest.raises(WherryError, match=TOLD):
            call(engine, tmp_path)
        assert not list(tmp_path.iterdir()) and engine.global_steps == 1, name
    engine.train()
    assert sorted(engine.accept_partial_update()) == ["blocks.0", "blocks.1", "blocks.2"]
    assert engine.accept_partial_update() == []
    train_step(engine, 2, 0)
    engine.save_checkpoint(tmp_path / "c")
    assert engine.global_steps == 2
    engine.close()


@pytest.mark.parametrize(
    ("stage", "how", "error"),
    [
        (0, "engine.backward", Stumbled),
        (1, "loss.backward", KeyboardInterrupt),
        (2, "engine.backward", KeyboardInterrupt),
        (3, "loss.backward", Stumbled),
    ],
)
@pytest.mark.usefixtures("every_flat_alone")
def test_it_is_answered_by_accepting_it_or_by_going_back(
    stage: int, how: str, error: type[BaseException], tmp_path: Path
) -> None:
    """Accepted, all ranks go on with the same weights; and from a checkpoint as if nothing had been."""

    def body(comm: Comm) -> tuple[Any, Any]:
        engine = engine_of(copy.deepcopy(model), settings(stage, more=IN_BACKWARD), comm)
        train_step(engine, 0, comm.rank)
        engine.save_checkpoint(tmp_path)
        before = weights(engine)
        train_step(engine, 1, comm.rank)
        expected = weights(engine)
        abort(engine, how, error)
        engine.load_checkpoint(tmp_path)
        assert all(torch.equal(value, before[name]) for name, value in weights(engine).items())
        train_step(engine, 1, comm.rank)
        assert all(torch.equal(value, expected[name]) for name, value in weights(engine).items())
        abort(engine, how, error)
        with pytest.raises(WherryError, match="accept_partial_update"):
            engine.save_checkpoint(tmp_path / "other")
        comm.gather_objects(None)
        changed = engine.accept_partial_update()
        found = weights(engine)
        parted = {name for name, value in found.items() if not torch.equal(value, expected[name])}
        engine.save_checkpoint(tmp_path / "accepted")
        for step in range(2, 4):
            train_step(engine, step, comm.rank)
        engine.save_checkpoint(tmp_path / "after")
        return changed, (parted, {name: value.tolist() for name, value in weights(engine).items()})

    model = make_model()
    results = run_ranks(2, body)
    assert results[0] == results[1]
    changed, (parted, _) = results[0]
    assert changed and set(changed) <= {"blocks.0", "blocks.1", "blocks.2"}
    assert parted and all(name.startswith("blocks.") for name in parted)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.usefixtures("every_flat_alone")
def test_ranks_that_have_come_to_different_parts_accept_what_any_of_them_has_updated(
    stage: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What rank 1 has not begun it gathers all the same, as the others do."""
    real = Updater.landed

    def landed(updater: Updater, gradient: Any) -> None:
        if fails.is_set() and updater.comm.rank == 1:
            raise Stumbled
        real(updater, gradient)

    def body(comm: Comm) -> list[str]:
        engine = engine_of(copy.deepcopy(model), settings(stage, more=IN_BACKWARD), comm)
        train_step(engine, 0, comm.rank)
        engine.save_checkpoint(tmp_path)
        loss = engine(*token_batch(1, 0, comm.rank))
        both.wait(50)
        fails.set()
        with pytest.raises((Stumbled, PeerError)):
            engine.backward(loss)
        both.wait(50)
        fails.clear()
        both.wait(50)
        changed: list[str] = []
        with pytest.raises(DivergenceError, match="the ranks hold different weights") if stage == 0 else nullcontext():
            while not changed:
                with suppress(PeerError):  # the other rank's failure, until that has come as well
                    changed = engine.accept_partial_update()
        if stage == 0:  # there each has updated a copy of its own
            engine.load_checkpoint(tmp_path)
        for step in range(2, 4):
            train_step(engine, step, comm.rank)
        engine.save_checkpoint(tmp_path)  # compares what they hold
        return changed

    model, fails, both = make_model(), threading.Event(), threading.Barrier(2)
    monkeypatch.setattr(Updater, "landed", landed)
    first, second = run_ranks(2, body)
    assert first == second and ("blocks.2" in first) is (stage > 0)


def test_gradients_that_are_dropped_on_purpose_are_answered_alike() -> None:
    engine = engine_of(make_model(), settings(0, more=IN_BACKWARD))
    engine.backward(engine(*token_batch(0, 0, 0)))
    with pytest.raises(WherryError, match=r"zero_grad: .* updated \d+ parts .* already .*accept_partial_update"):
        engine.zero_grad()
    with pytest.raises(WherryError, match="accept_partial_update"):
        engine(*token_batch(0, 0, 0))
    engine.accept_partial_update()
    train_step(engine, 1, 0)
    engine.close()


@pytest.mark.parametrize(("policy", "how"), [("at_step", "engine.backward"), ("before_use", "loss.backward")])
def test_where_nothing_was_updated_training_goes_on_by_itself(policy: str, how: str) -> None:
    engine = engine_of(make_model(), settings(0, more={"wherry": {"update_policy": policy}}))
    train_step(engine, 0, 0)
    abort(engine, how, KeyboardInterrupt)
    train_step(engine, 1, 0)
    assert engine.accept_partial_update() == [] and engine.global_steps == 2
    engine.close()


# Ctrl-C in a step.


class After:
    """Raises Ctrl-C in place of the n-th call of a function, or behind it."""

    def __init__(self, real: Any, calls: int, *, behind: bool = False) -> None:
        self.real, self.left, self.behind = real, calls, behind

    def __call__(self, *args: Any, **more: Any) -> Any:
        self.left -= 1
        result = self.real(*args, **more) if self.left or self.behind else None
        if self.left:
            return result
        raise KeyboardInterrupt


# Where the step is when Ctrl-C comes: a method, and at which of its calls.
INSTANTS: list[tuple[str, type[Any], str, int, bool]] = [
    ("at_step", UpdateBucket, "update", 1, False),
    ("at_step", UpdateBucket, "begin_update", 2, False),
    ("at_step", Updater, "step", 1, True),
    ("before_use", Updater, "_send", 2, False),
    ("before_use", Updater, "step", 1, True),
    ("in_backward", Updater, "_end_window", 1, True),
    ("in_backward", Updater, "step", 1, True),
    ("delayed", Updater, "_arrange", 1, True),
    ("delayed", Updater, "step", 1, True),
]


@pytest.mark.parametrize(("policy", "where", "method", "calls", "behind"), INSTANTS, ids=str)
@pytest.mark.usefixtures("every_flat_alone")
def test_ctrl_c_in_a_step_leaves_a_reason_behind(
    policy: str, where: type[Any], method: str, calls: int, behind: bool, tmp_path: Path
) -> None:
    own = {"wherry": {"update_policy": policy, "delayed_update_warmup": 1}}
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    engine = engine_of(make_model(), settings(2, more=own | offload), SilentComm(0, 2))
    train_step(engine, 0, 0)
    engine.backward(engine(*token_batch(1, 0, 0)))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(where, method, _method(After(getattr(where, method), calls, behind=behind)))
        engine.step()
    for call in ("forward", "step", "zero_grad", "save_checkpoint", "train_batch", "settle"):
        with pytest.raises(WherryError, match="an update has failed before: KeyboardInterrupt left it unfinished"):
            CALLS[call](engine, tmp_path)
    with pytest.raises(WherryError, match="KeyboardInterrupt"):
        engine.accept_partial_update()
    assert not list(tmp_path.iterdir())
    engine.close()


def _method(call: After) -> Any:
    return lambda *args, **more: call(*args, **more)


PROGRAM = """
import os, sys, signal, time
import torch, wherry
torch.set_num_threads(1)
where, rank = sys.argv[1], int(os.environ["RANK"])

def interrupt():
    if rank == 1:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

class Interrupted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        interrupt()
        return grad

model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
engine, *_ = wherry.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
try:
    for step in range(3):
        if step == 1 and where == "forward":
            model[1].register_forward_pre_hook(lambda *_: interrupt())
        if step == 1 and where == "backward":
            model[1].register_forward_pre_hook(lambda module, args: (Interrupted.apply(args[0]),))
        if step == 1 and where == "step":
            from wherry.update.optimizer_states import UpdateBucket
            UpdateBucket.update = lambda *_, **__: interrupt()
        if step == 1 and where == "between":
            interrupt()
        engine(torch.ones(2, 32)).sum().backward()
        engine.step()
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""


def test_the_other_rank_is_told_that_it_was_ctrl_c(tmp_path: Path, forks: Any, launched: Any) -> None:
    """As ranks of `wherry run`, wherever Ctrl-C comes; all at once, as they wait most of the time."""
    (tmp_path / "program.py").write_text(PROGRAM)
    children: dict[str, list[Any]] = {}
    for where in ("forward", "backward", "step", "between"):
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launched.free_port()), "WORLD_SIZE": "2"}
        children[where] = []
        for rank in range(2):
            with open(tmp_path / f"{where}.{rank}", "wb") as file:
                ranks = launched.environment(**place, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
                command = [str(tmp_path / "program.py"), where]
                child = forks.start(command, stdout=file, stderr=file, env=ranks, folder=tmp_path, launched=True)
                children[where].append(child)
    for where, pair in children.items():
        assert [child.wait(60) for child in pair] == [0, 130], where
        told = (tmp_path / f"{where}.0").read_text()
        assert "PeerError rank 1 has failed, while rank 0 waited for " in told, (where, told)
        assert told.endswith(": KeyboardInterrupt\n"), (where, told)
