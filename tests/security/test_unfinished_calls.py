"""Calls of an engine after one that was cut short, and by a second thread during one.

Every call after an exception or Ctrl-C in a step says what has been updated, until that is answered. A second thread is
refused, and changes nothing.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.engine.harness import assert_same, engine_of, make_model, settings, token_batch, train_step, weights_of
from tests.guard.counts import SilentComm
from torch import nn

from wherry.errors import PeerError, WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.update.optimizer_states import UpdateBucket
from wherry.update.updater import Updater

IN_BACKWARD = {"wherry": {"update_policy": "in_backward"}}


class Stumbled(Exception):
    pass


@pytest.fixture(autouse=True)
def every_flat_alone(small_sizes: Any) -> None:
    """Small flats are updated together; with this each by itself, as large ones are."""
    small_sizes(bucket=1)


def loss_with(engine: Any, hook: Callable[..., None], block: int = 1) -> torch.Tensor:
    """A loss whose backward calls a hook before the gradients of a block's predecessors."""
    handle = engine.module.blocks[block].register_forward_pre_hook(lambda _, args: args[0].register_hook(hook) and None)
    loss = engine(*token_batch(1, 0, engine.global_rank))
    handle.remove()
    return loss


def abort(engine: Any, how: str) -> None:
    """Raise an error in the backward of the first block, whose successors have their gradients."""

    def stumble(grad: torch.Tensor) -> None:
        raise Stumbled

    loss = loss_with(engine, stumble, block=0)
    with pytest.raises(Stumbled):
        engine.backward(loss) if how == "engine.backward" else loss.backward()


class Program(NamedTuple):
    """A program's objects, which it has from before an engine refuses its calls."""

    engine: Any
    model: nn.Module
    loss: torch.Tensor
    folder: Path


CALLS: dict[str, Callable[[Program], object]] = {
    "forward": lambda mine: mine.engine(*token_batch(5, 0, 0)),
    "model": lambda mine: mine.model(*token_batch(5, 0, 0)),
    "backward": lambda mine: mine.engine.backward(mine.loss),
    "step": lambda mine: mine.engine.step(),
    "optimizer.step": lambda mine: mine.engine.optimizer.step(),
    "zero_grad": lambda mine: mine.engine.zero_grad(),
    "train_batch": lambda mine: mine.engine.train_batch(iter([token_batch(5, 0, 0)])),
    "save_checkpoint": lambda mine: mine.engine.save_checkpoint(mine.folder / "c"),
    "save_16bit_model": lambda mine: mine.engine.save_16bit_model(mine.folder / "m"),
    "settle": lambda mine: mine.engine.settle(),
    "states": lambda mine: mine.engine.states,
}
TOLD = r"updated 3 of 4 parts .*\(blocks\.0, blocks\.1, blocks\.2\)\. .*load_checkpoint.*accept_partial_update"


@pytest.mark.parametrize("how", ["engine.backward", "loss.backward"])
def test_every_call_after_a_partial_update_says_so(how: str, tmp_path: Path) -> None:
    """Until a checkpoint is loaded, as if nothing had happened, or the update is accepted."""
    (folder := tmp_path / "nothing").mkdir()
    engine = engine_of(make_model(), settings(0, more=IN_BACKWARD))
    mine = Program(engine, engine.module, torch.ones((), requires_grad=True) * 2, folder)
    train_step(engine, 0, 0)
    engine.save_checkpoint(tmp_path)
    train_step(engine, 1, 0)
    expected = weights_of(engine)
    engine.load_checkpoint(tmp_path)
    abort(engine, how)
    for name, call in [*CALLS.items(), *CALLS.items()]:
        with pytest.raises(WherryError, match=TOLD):
            call(mine)
        assert not list(folder.iterdir()) and engine.global_steps == 1, name
    engine.load_checkpoint(tmp_path)
    train_step(engine, 1, 0)
    assert_same(weights_of(engine), expected)
    abort(engine, how)
    assert sorted(engine.accept_partial_update()) == ["blocks.0", "blocks.1", "blocks.2"]
    assert engine.accept_partial_update() == []
    train_step(engine, 2, 0)
    engine.close()


def test_ranks_of_different_partial_updates_accept_the_union(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Parts that rank 1 has not begun it gathers all the same, as the others do."""
    real = Updater.landed

    def landed(updater: Updater, gradient: Any) -> None:
        if fails.is_set() and updater.comm.rank == 1:
            raise Stumbled
        real(updater, gradient)

    def body(comm: Comm) -> list[str]:
        engine = engine_of(copy.deepcopy(model), settings(3, more=IN_BACKWARD), comm)
        train_step(engine, 0, comm.rank)
        loss = engine(*token_batch(1, 0, comm.rank))
        both.wait(50)
        fails.set()
        with pytest.raises((Stumbled, PeerError)):
            engine.backward(loss)
        both.wait(50)
        fails.clear()
        both.wait(50)
        changed: list[str] = []
        while not changed:
            with suppress(PeerError):  # the other rank's failure, until that has come as well
                changed = engine.accept_partial_update()
        train_step(engine, 2, comm.rank)
        engine.save_checkpoint(tmp_path)  # compares the weights of the ranks
        return changed

    model, fails, both = make_model(), threading.Event(), threading.Barrier(2)
    monkeypatch.setattr(Updater, "landed", landed)
    first, second = run_ranks(2, body)
    assert first == second and "blocks.2" in first


@pytest.mark.parametrize(
    ("policy", "where", "method"),
    [("at_step", UpdateBucket, "begin_update"), ("before_use", Updater, "step"), ("delayed", Updater, "step")],
)
def test_ctrl_c_in_a_step_leaves_a_reason_behind(
    policy: str, where: type[Any], method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"wherry": {"update_policy": policy, "delayed_update_warmup": 1}}
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    engine = engine_of(make_model(), settings(2, more=own | offload), SilentComm(0, 2))
    mine = Program(engine, engine.module, torch.ones((), requires_grad=True) * 2, tmp_path)
    train_step(engine, 0, 0)
    engine.backward(engine(*token_batch(1, 0, 0)))
    real = getattr(where, method)

    def interrupted(*args: Any, **more: Any) -> None:
        real(*args, **more)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(where, method, interrupted)
        engine.step()
    for call in ("forward", "step", "zero_grad", "save_checkpoint", "train_batch", "settle"):
        with pytest.raises(WherryError, match="an update has failed before: KeyboardInterrupt left it unfinished"):
            CALLS[call](mine)
    with pytest.raises(WherryError, match="KeyboardInterrupt"):
        engine.accept_partial_update()
    assert not list(tmp_path.iterdir())
    engine.close()


def test_ctrl_c_among_gathers_does_not_launch_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks launch them once."""
    own = {"wherry": {"update_policy": "delayed", "delayed_update_warmup": 1}}
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    engine = engine_of(make_model(), settings(1, more=own | offload), comm := SilentComm(0, 2))
    train_step(engine, 0, 0)
    real = comm.all_gather_together

    def interrupted(*args: Any) -> None:
        real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(comm, "all_gather_together", interrupted)
        engine.settle()
    asked = comm.asked
    with pytest.raises(WherryError, match="an update has failed before: KeyboardInterrupt left it unfinished"):
        engine.settle()
    assert comm.asked == asked
    engine.close()


PROGRAM = """
import os, signal, time
import torch, wherry
rank = int(os.environ["RANK"])

def interrupt(*_):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
engine, *_ = wherry.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
model[1].register_forward_pre_hook(lambda module, args: args[0].register_hook(interrupt) and None)
try:
    engine(torch.ones(2, 32)).sum().backward()
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""


def test_the_other_rank_is_told_that_it_was_ctrl_c(tmp_path: Path, forks: Any) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = forks.run(tmp_path / "program.py", ranks=2, folder=tmp_path)
    assert done.returncode == 130
    assert done.stdout.startswith("PeerError rank 1 has failed, while rank 0 waited for "), done.stdout
    assert done.stdout.endswith(": KeyboardInterrupt\n"), done.stdout


# Two threads.

Call = Callable[[], object]


class Stop:
    """A hook in which the first thread waits, inside of a call, until the second has made its own."""

    def __init__(self) -> None:
        self.here, self.goes_on = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        if threading.current_thread().name == "first_0" and not self.here.is_set():
            self.here.set()
            assert self.goes_on.wait(50)


def in_forward(engine: Any, stop: Stop, forward: Any) -> Call:
    engine.module.blocks[1].register_forward_pre_hook(stop)
    return lambda: engine.backward(forward(*token_batch(1, 0, 0)))


def in_step(engine: Any, step: Call) -> Call:
    """Run a step, in which the test's `Updater.step` stops."""
    engine.backward(engine(*token_batch(1, 0, 0)))
    return step


FIRST: dict[str, Callable[[Any, Stop], Call]] = {
    "forward": lambda engine, stop: in_forward(engine, stop, engine),
    "model": lambda engine, stop: in_forward(engine, stop, engine.module),
    "backward": lambda engine, stop: partial(engine.backward, loss_with(engine, stop)),
    "own backward": lambda engine, stop: loss_with(engine, stop).backward,
    "step": lambda engine, stop: in_step(engine, engine.step),
    "optimizer.step": lambda engine, stop: in_step(engine, engine.optimizer.step),
}
SECOND = CALLS | {"own backward": lambda mine: mine.loss.backward()}
OF_EACH = 2 * len(SECOND) // len(FIRST)


@pytest.mark.parametrize(("number", "first"), list(enumerate(FIRST)))
def test_a_second_thread_is_refused_wherever_the_first_is(
    number: int, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ends its step to the bit as if it was the only one; afterwards the second goes on."""
    stop, real = Stop(), Updater.step

    def step(*args: Any, **more: Any) -> None:
        stop()
        real(*args, **more)

    def end(run: Callable[[Any], None]) -> dict[str, torch.Tensor]:
        engine = engine_of(make_model(), settings((0, 1, 2, 3, 3, 0)[number]), SilentComm(0, 2))
        train_step(engine, 0, 0)
        run(engine)
        if "step" not in first:
            engine.step()
        train_step(engine, 2, 0)
        assert engine.global_steps == 3 and not list(tmp_path.iterdir())
        weights = weights_of(engine)
        engine.close()
        return weights

    def disturbed(engine: Any) -> None:
        mine = Program(engine, engine.module, engine(*token_batch(1, 0, 0)), tmp_path)
        message = "thread MainThread has come to this engine while thread first_0 is inside"
        with ThreadPoolExecutor(1, "first") as thread:
            call = thread.submit(FIRST[first](engine, stop))
            assert stop.here.wait(50)
            try:
                for name in (list(SECOND) * 2)[OF_EACH * number :][:OF_EACH]:
                    with pytest.raises(WherryError, match=message):
                        SECOND[name](mine)
            finally:
                stop.goes_on.set()
            call.result()

    monkeypatch.setattr(Updater, "step", step)
    assert_same(end(disturbed), end(lambda engine: FIRST[first](engine, stop)()))


def test_a_thread_that_has_failed_is_not_inside_any_more() -> None:
    """The next call clears its gathers and its window, like those of the same thread."""

    def stumble(*_: Any) -> None:
        raise KeyboardInterrupt

    def fail(call: Call) -> None:
        with ThreadPoolExecutor(1) as thread:
            assert type(thread.submit(call).exception()) is KeyboardInterrupt

    engine = engine_of(make_model(), settings(3), SilentComm(0, 2))
    for number, forward in enumerate((engine, engine.module)):
        handle = engine.module.blocks[1].register_forward_pre_hook(stumble)
        fail(partial(forward, *token_batch(0, 0, 0)))
        handle.remove()
        train_step(engine, 1, 0)
        assert engine.global_steps == number + 1
    fail(loss_with(engine, stumble).backward)
    train_step(engine, 1, 0)
    assert engine.global_steps == 3
    engine.close()
