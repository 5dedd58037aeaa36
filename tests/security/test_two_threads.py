"""A second thread that calls an engine during a call of the first is refused, and changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import assert_same, engine_of, make_model, settings, token_batch, train_step, weights_of
from tests.guard.counts import SilentComm
from torch import nn

from wherry.errors import WherryError
from wherry.update.updater import Updater

Call = Callable[[], object]


class Stop:
    """Where the first thread waits, inside of a call, for the second to come."""

    def __init__(self) -> None:
        self.here, self.goes_on = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        if threading.current_thread().name == "first" and not self.here.is_set():
            self.here.set()
            assert self.goes_on.wait(50)


def loss_with(engine: Any, hook: Callable[..., None]) -> torch.Tensor:
    """A loss whose backward calls a hook in the middle."""
    handle = engine.module.blocks[1].register_forward_pre_hook(lambda _, args: args[0].register_hook(hook) and None)
    loss = engine(*token_batch(1, 0, 0))
    handle.remove()
    return loss


def in_forward(engine: Any, stop: Stop, forward: Any) -> Call:
    engine.module.blocks[1].register_forward_pre_hook(stop)
    return lambda: engine.backward(forward(*token_batch(1, 0, 0)))


def in_step(engine: Any, step: Call) -> Call:
    """`Updater.step` stops."""
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
Second = Callable[[Any, nn.Module, torch.Tensor, Path], object]
SECOND: dict[str, Second] = {
    "forward": lambda engine, model, loss, folder: engine(*token_batch(5, 0, 0)),
    "model": lambda engine, model, loss, folder: model(*token_batch(5, 0, 0)),
    "backward": lambda engine, model, loss, folder: engine.backward(loss),
    "own backward": lambda engine, model, loss, folder: loss.backward(),
    "step": lambda engine, model, loss, folder: engine.step(),
    "optimizer.step": lambda engine, model, loss, folder: engine.optimizer.step(),
    "train_batch": lambda engine, model, loss, folder: engine.train_batch(iter([token_batch(5, 0, 0)])),
    "zero_grad": lambda engine, model, loss, folder: engine.zero_grad(),
    "save_checkpoint": lambda engine, model, loss, folder: engine.save_checkpoint(folder / "c"),
}


def in_a_thread(call: Call, name: str = "first") -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    return thread, errors


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
        found = weights_of(engine)
        engine.close()
        return found

    def disturbed(engine: Any) -> None:
        loss, model = engine(*token_batch(1, 0, 0)), engine.module
        thread, errors = in_a_thread(FIRST[first](engine, stop))
        assert stop.here.wait(50)
        told = "thread MainThread has come to this engine while thread first is inside"
        for name in (list(SECOND) * 2)[3 * number :][:3]:
            with pytest.raises(WherryError, match=told):
                SECOND[name](engine, model, loss, tmp_path)
        stop.goes_on.set()
        thread.join()
        assert not errors, errors

    monkeypatch.setattr(Updater, "step", step)
    assert_same(end(disturbed), end(lambda engine: FIRST[first](engine, stop)()))


def test_a_thread_that_has_failed_is_not_inside_any_more() -> None:
    """What it has left behind is cleared, as in one thread."""

    def stumble(*_: Any) -> None:
        raise KeyboardInterrupt

    def fail(call: Call) -> None:
        thread, errors = in_a_thread(call)
        thread.join()
        assert [type(error) for error in errors] == [KeyboardInterrupt]

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
