"""Order of the work that the host queues, on a device where nothing begins before a wait, or before a test lets it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator import emulated
from tests.accelerator.emulated import Trace
from tests.covering import Case
from tests.engine.harness import adamw, make_model
from tests.life import BASE, Subject, at, batch, config_of, one_step, sized

import wherry

BLOCKS = 8
NBYTES = 4 * 1376  # of one block, in fp32
PIECE = 4 * 512  # of a large flat, where each is updated by itself
ALONE = (0, 1)


@contextmanager
def training(case: Case, folder: Path, **own: Any) -> Iterator[Any]:
    """Build an engine, train two steps, and mark the backwards of blocks; each flat is updated by itself."""
    case = BASE | {"flats": "alone"} | case
    config = config_of(case, folder)
    config["wherry"] |= own
    model = make_model(partial(Subject, blocks=BLOCKS))
    with sized(case):
        engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
        for index, block in enumerate(model.blocks):
            block.register_forward_pre_hook(partial(_mark, index))
        for step in range(2):
            one_step(engine, step, ALONE)
        engine.settle()
        yield engine
        engine.close()


def _mark(index: int, module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
    if args[0].requires_grad:
        args[0].register_hook(lambda grad: emulated.mark(f"over {index}"))


@contextmanager
def traced_late() -> Iterator[Trace]:
    """Trace what is queued, on a device where items that nothing waits for do not begin."""
    torch.accelerator.synchronize()
    emulated.lateness(1)
    with emulated.trace() as traced:
        yield traced


def marked(traced: Trace, name: str) -> float:
    return traced.of("mark", name)[0].begun


@pytest.mark.parametrize("row", ["offload-2", "offload-3-parameters"])
def test_gradients_go_down_in_the_backward_and_weights_up_in_pieces(row: str, tmp_path: Path) -> None:
    with training(at(row), tmp_path) as engine:
        with traced_late() as traced:
            one_step(engine, 2, ALONE)
            engine.settle()
        downs = [down for down in traced.of("down") if down.nbytes >= NBYTES]
        assert len(downs) == BLOCKS and all(down.stream != 0 for down in downs)
        for down, later in zip(downs, range(BLOCKS - 3, -1, -1), strict=False):
            assert down.queued < marked(traced, f"over {later}"), later
        pieces = [up.nbytes for up in traced.of("up") if up.stream != 0 and up.queued > downs[-1].queued]
        if row == "offload-2":
            assert sum(pieces) > BLOCKS * NBYTES and max(pieces) <= PIECE


def test_a_forward_is_queued_while_delayed_weights_go_up(tmp_path: Path) -> None:
    with training(at("offload-2") | {"policy": "delayed"}, tmp_path) as engine:
        one_step(engine, 2, ALONE)  # the next step publishes what this one has begun
        inputs = batch(3, 0)
        with traced_late() as traced, emulated.held("up"):
            engine.backward(engine(*inputs))
            engine.step()
            emulated.mark("forward")
            loss = engine(*inputs)
        ups = [up for up in traced.of("up") if up.stream != 0 and up.queued < marked(traced, "forward")]
        assert sum(up.nbytes for up in ups) > BLOCKS * NBYTES, "the step has published"
        engine.backward(loss)
        engine.step()


def test_activations_are_called_back_before_they_have_gone(tmp_path: Path) -> None:
    """Streams, and not the host, wait for a copy down before its copy up."""
    with training(at("device-2") | {"activations": "host"}, tmp_path) as engine:
        inputs = batch(2, 0)
        with traced_late() as traced, emulated.held("down"):
            engine.backward(engine(*inputs))
        assert len(traced.of("down")) > 10 and len(traced.of("up")) > 10
        engine.step()


def test_updates_on_the_device_wait_for_no_copies_down(tmp_path: Path) -> None:
    with training(at("parameters-only") | {"policy": "at_step"}, tmp_path) as engine:
        inputs = batch(2, 0)
        with traced_late() as traced:
            engine.backward(engine(*inputs))
            emulated.mark("step")
            engine.step()
        downs = [down for down in traced.of("down") if down.stream != 0 and down.queued > marked(traced, "step")]
        assert len(downs) > BLOCKS
        assert not any(0 < down.begun < downs[-1].queued for down in downs)


def test_the_host_adds_micro_batches_in_a_thread_of_its_own(tmp_path: Path) -> None:
    """The thread that launches the backward's kernels waits for no gradient on its way down."""
    with training(at("offload-2") | {"window": "three", "sums": "host"}, tmp_path) as engine:
        inputs = batch(2, 0)
        with traced_late() as traced, emulated.held("down"):
            engine.backward(engine(*inputs))
        assert len([down for down in traced.of("down") if down.nbytes >= NBYTES]) == BLOCKS
        engine.zero_grad()


@pytest.mark.parametrize("row", ["device-0", "device-3"])
def test_a_step_on_the_device_waits_for_it_once(row: str, tmp_path: Path) -> None:
    """Wait for the norm: all that has run then was queued before, and the update is queued after it."""
    with training(at(row) | {"policy": "at_step"}, tmp_path) as engine:
        inputs = batch(2, 0)
        with traced_late() as traced:
            engine.backward(engine(*inputs))
            emulated.mark("step")
            engine.step()
        [read] = traced.of("down")
        ran = [item for item in traced.items if item.kind != "mark" and item.begun]
        assert marked(traced, "step") < read.queued <= min(item.begun for item in ran)
        assert read.queued == max(item.queued for item in ran) < max(item.queued for item in traced.of("kernel"))
