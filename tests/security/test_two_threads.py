"""A second thread that calls an engine during a call of the first is refused, and changes nothing."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import engine_of, make_model, settings, token_batch, train_step
from tests.guard.counts import SilentComm
from torch import nn

import wherry
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


def watch_backward(engine: Any, stop: Stop) -> torch.Tensor:
    """A loss whose backward stops in the middle."""

    def watch(module: nn.Module, args: Any) -> None:
        args[0].register_hook(stop)

    handle = engine.module.blocks[1].register_forward_pre_hook(watch)
    loss = engine(*token_batch(1, 0, 0))
    handle.remove()
    return loss


def in_forward(engine: Any, stop: Stop) -> Call:
    engine.module.blocks[1].register_forward_pre_hook(stop)
    return lambda: engine.backward(engine(*token_batch(1, 0, 0)))


def in_model(engine: Any, stop: Stop) -> Call:
    """Called by itself, as what `engine.module` gives."""
    engine.module.blocks[1].register_forward_pre_hook(stop)
    model = engine.module
    return lambda: engine.backward(model(*token_batch(1, 0, 0)))


def in_backward(engine: Any, stop: Stop) -> Call:
    loss = watch_backward(engine, stop)
    return lambda: engine.backward(loss)


def in_own_backward(engine: Any, stop: Stop) -> Call:
    return watch_backward(engine, stop).backward


def in_step(engine: Any, stop: Stop) -> Call:
    engine.backward(engine(*token_batch(1, 0, 0)))
    return engine.step


def in_optimizer_step(engine: Any, stop: Stop) -> Call:
    engine.backward(engine(*token_batch(1, 0, 0)))
    return engine.optimizer.step


FIRST: dict[str, Callable[[Any, Stop], Call]] = {
    "forward": in_forward,
    "model": in_model,
    "backward": in_backward,
    "own backward": in_own_backward,
    "step": in_step,
    "optimizer.step": in_optimizer_step,
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


def weights_after(
    stage: int, first: str, second: Second | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """Of a step that `first` is in when `second` comes from another thread; None for nobody."""
    model, stop, real = make_model(), Stop(), Updater.step

    def step(*args: Any, **more: Any) -> None:
        stop()
        real(*args, **more)

    monkeypatch.setattr(Updater, "step", step)
    engine = engine_of(model, settings(stage), SilentComm(0, 2))
    train_step(engine, 0, 0)
    loss = engine(*token_batch(1, 0, 0))
    run = FIRST[first](engine, stop)
    thread, errors = in_a_thread(run)
    if second is None:
        stop.goes_on.set()
    else:
        assert stop.here.wait(50)
        with pytest.raises(WherryError, match="thread MainThread has come to this engine while thread first is inside"):
            second(engine, model, loss, tmp_path)
        stop.goes_on.set()
    thread.join()
    monkeypatch.undo()
    assert not errors, errors
    if "step" not in first:
        engine.step()
    train_step(engine, 2, 0)
    assert engine.global_steps == 3 and not list(tmp_path.iterdir())
    with wherry.gathered(model):
        found = [parameter.detach().clone() for parameter in model.parameters()]
    engine.close()
    return found


@pytest.mark.parametrize(("number", "first"), list(enumerate(FIRST)))
def test_a_second_thread_is_refused_wherever_the_first_is(
    number: int, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ends its step to the bit as if nobody had come; each call is refused beside two others."""
    stage = (0, 1, 2, 3, 3, 0)[number]
    expected = weights_after(stage, first, None, tmp_path, monkeypatch)
    for name in (list(SECOND) * 2)[3 * number :][:3]:
        weights = weights_after(stage, first, SECOND[name], tmp_path, monkeypatch)
        assert all(map(torch.equal, weights, expected)), name


def test_threads_may_take_turns() -> None:
    """Each part of a step in a thread of its own, one after another; an error of one is no error of the next."""

    def trained(run: Callable[[Call], None]) -> list[torch.Tensor]:
        model = copy.deepcopy(shared)
        engine = engine_of(model, settings(3), SilentComm(0, 2))
        for step in range(3):
            losses: list[torch.Tensor] = []
            run(lambda step=step, losses=losses: losses.append(engine(*token_batch(step, 0, 0))))
            run(partial(engine.backward, losses[0]) if step % 2 else losses[0].backward)
            run(engine.step)
        with wherry.gathered(model):
            return [parameter.detach().clone() for parameter in model.parameters()]

    def elsewhere(call: Call) -> None:
        thread, errors = in_a_thread(call)
        thread.join()
        assert not errors, errors

    shared = make_model()
    assert all(map(torch.equal, trained(elsewhere), trained(lambda call: call())))


def test_a_thread_that_has_failed_is_not_inside_any_more() -> None:
    """What it has left behind is cleared, as in one thread."""

    def stumble(*_: Any) -> None:
        raise KeyboardInterrupt

    engine = engine_of(make_model(), settings(3), SilentComm(0, 2))
    model = engine.module
    for step, failed in enumerate(("forward", "model", "own backward")):
        if failed == "own backward":
            handle = model.blocks[1].register_forward_pre_hook(lambda _, args: args[0].register_hook(stumble) and None)
            call = engine(*token_batch(0, 0, 0)).backward
        else:
            handle = model.blocks[1].register_forward_pre_hook(stumble)
            call = partial(engine if failed == "forward" else model, *token_batch(0, 0, 0))
        thread, errors = in_a_thread(call)
        thread.join()
        assert [type(error) for error in errors] == [KeyboardInterrupt], failed
        handle.remove()
        model(*token_batch(0, 0, 0))
        train_step(engine, 1, 0)
        assert engine.global_steps == step + 1
    engine.close()


def test_readers_of_gathered_weights_take_turns_too() -> None:
    engine, stop = engine_of(make_model(), settings(3), SilentComm(0, 2)), Stop()
    model = engine.module
    model.blocks[1].register_forward_pre_hook(stop)
    with torch.no_grad(), wherry.gathered_for_generation(engine):
        thread, errors = in_a_thread(lambda: model(*token_batch(0, 0, 0)))
        assert stop.here.wait(50)
        for call in (model, engine):
            with pytest.raises(WherryError, match="while thread first is inside"):
                call(*token_batch(0, 0, 0))
        stop.goes_on.set()
        thread.join()
        assert not errors
        assert model(*token_batch(0, 0, 0)).isfinite()
    engine.close()


def test_an_engine_may_be_called_from_within_a_call_of_it_in_its_own_thread() -> None:
    engine = engine_of(make_model(), settings(3), SilentComm(0, 2))
    inside: list[float] = []

    def again(module: nn.Module, args: Any) -> None:
        handle.remove()
        with torch.no_grad():
            inside.append(float(engine(*token_batch(0, 0, 0))))

    handle = engine.module.register_forward_pre_hook(again)
    loss = engine(*token_batch(0, 0, 0))
    assert inside == [float(loss.detach())]
    engine.backward(loss)
    engine.step()
    assert engine.global_steps == 1
    engine.close()
