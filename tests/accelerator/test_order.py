"""Order of the work that the host queues, and its waits, on a device where nothing runs before a wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator import emulated
from tests.accelerator.emulated import Trace
from tests.covering import Case
from tests.engine.harness import Run, adamw, assert_equal, make_model
from tests.life import BASE, Subject, at, batch, config_of, one_step
from torch.utils._python_dispatch import TorchDispatchMode

import wherry
from wherry import native
from wherry.sharding.flat_gradient import FlatGradient
from wherry.tiers.streams import _Copy
from wherry.update.optimizer_states import PIECE_NUMEL, UpdateBucket

BLOCKS = 8
NBYTES = 4 * 1376  # of one block, in fp32
ALONE = (0, 1)
Patch = pytest.MonkeyPatch


@contextmanager
def training(case: Case, folder: Path, blocks: int = BLOCKS, **more: Any) -> Iterator[Any]:
    """An engine that has made two steps, whose flats are each updated by themselves; backwards of blocks are marked."""
    config = config_of(BASE | {"flats": "alone"} | case, folder)
    for block, values in more.items():
        config[block] = config.get(block, {}) | values
    model = make_model(partial(Subject, blocks=blocks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wherry.update.optimizer_states.BUCKET_NUMEL", 1)
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


def mark_updates(patch: Patch) -> None:
    """Mark where the update of each piece of a bucket begins."""
    update = UpdateBucket.update

    def marked(self: UpdateBucket, *terms: Any) -> Any:
        emulated.mark(f"update {self.name}")
        return update(self, *terms)

    patch.setattr(UpdateBucket, "update", marked)


def marked(traced: Trace, name: str, place: int = 0) -> float:
    return traced.of("mark", name)[place].begun


@pytest.mark.parametrize("row", ["offload-2", "offload-3-parameters"])
def test_gradients_set_out_while_the_backward_goes_on(row: str, tmp_path: Path) -> None:
    with training(at(row), tmp_path) as engine:
        with traced_late() as traced:
            one_step(engine, 2, ALONE)
            engine.settle()
        downs = [down for down in traced.of("down") if down.nbytes >= NBYTES]
        assert len(downs) == BLOCKS and all(down.stream != 0 for down in downs)
        for down, later in zip(downs, range(BLOCKS - 3, -1, -1), strict=False):
            assert down.queued < marked(traced, f"over {later}"), later


def test_large_flats_are_updated_and_sent_in_pieces(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("wherry.update.optimizer_states.PIECE_NUMEL", 512)
    mark_updates(monkeypatch)
    with training(at("offload-2"), tmp_path, blocks=2) as engine:
        with traced_late() as traced:
            one_step(engine, 2, ALONE)
            engine.settle()
        for name in ("blocks.0", "blocks.1"):
            pieces = traced.of("mark", f"update {name}")
            assert len(pieces) >= 3
            sent = [up for up in traced.of("up") if up.stream != 0 and up.queued >= pieces[0].begun]
            assert sent[0].queued < pieces[-1].begun, "the first while others are to be updated"


@pytest.mark.parametrize(("state", "precision"), [("bf16", "bf16"), ("int8", "fp32")])
def test_pieces_have_the_bits_of_the_whole(state: str, precision: str, tmp_path: Path) -> None:
    """The draws of stochastic rounding and the blocks of 8-bit states too."""

    def trained(piece: int) -> Run:
        run, calls, update = Run(), [], UpdateBucket.update
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("wherry.update.optimizer_states.PIECE_NUMEL", piece)
            patch.setattr(UpdateBucket, "update", lambda *terms: (calls.append(0), update(*terms))[1])
            case = at("offload-2") | {"precision": precision}
            with training(case, tmp_path, blocks=2, wherry={"update_policy": "before_use", "state_dtype": state}) as e:
                run.losses = [float(one_step(e, step, ALONE)) for step in range(2, 6)]
                run.weights = {n: p.detach().cpu().clone() for n, p in e.module.named_parameters()}
        run.extra = len(calls)
        return run

    whole, cut = trained(PIECE_NUMEL), trained(256)
    assert_equal(cut, whole)
    assert cut.extra > 2 * whole.extra


def test_delayed_updates_read_one_buffer_while_the_other_is_filled(tmp_path: Path, monkeypatch: Patch) -> None:
    read: dict[str, list[int]] = {}
    begin, lend = UpdateBucket.begin_update, FlatGradient.lend
    copied: list[str] = []

    def begun(self: UpdateBucket, gradients: Any, absent: Any = None, lent: Any = None) -> Any:
        read.setdefault(self.name, []).append(lent[0].data_ptr())
        return begin(self, gradients, absent, lent)

    def lent(self: FlatGradient) -> Any:
        with Watch() as watch:
            result = lend(self)
        copied.extend(watch.names)
        return result

    with training(at("offload-2") | {"policy": "delayed"}, tmp_path) as engine:
        monkeypatch.setattr(UpdateBucket, "begin_update", begun)
        monkeypatch.setattr(FlatGradient, "lend", lent)
        for step in range(2, 8):
            one_step(engine, step, ALONE)
        engine.settle()
    assert len(read) == BLOCKS + 1
    for name, places in read.items():
        assert places == places[:2] * 3 and places[0] != places[1], name
    assert copied == [], "what is lent is not copied"


# Emulated copies begin before the host is asked on a busy machine: to be held by the test before it is fast again.
@pytest.mark.nightly
def test_a_forward_is_queued_while_delayed_weights_go_up(tmp_path: Path) -> None:
    with training(at("offload-2") | {"policy": "delayed"}, tmp_path) as engine:
        one_step(engine, 2, ALONE)  # the next step publishes what this one has begun
        inputs = batch(3, 0)
        with traced_late() as traced:
            engine.backward(engine(*inputs))
            engine.step()
            emulated.mark("forward")
            loss = engine(*inputs)
        ups = [up for up in traced.of("up") if up.stream != 0 and up.nbytes and up.queued < marked(traced, "forward")]
        assert sum(up.nbytes for up in ups) > BLOCKS * NBYTES, "the step has published"
        assert ups[-1].begun == 0, "the host has not waited"
        engine.backward(loss)
        engine.step()


def test_activations_are_called_back_before_they_have_gone(tmp_path: Path) -> None:
    """Streams, and not the host, wait for a copy down before its copy up."""
    with training(at("device-2") | {"activations": "host"}, tmp_path, blocks=2) as engine:
        inputs = batch(2, 0)
        with traced_late() as traced:
            engine.backward(engine(*inputs))
        downs, ups = traced.of("down"), traced.of("up")
        assert len(downs) > 10 and len(ups) > 10
        assert not 0 < downs[-1].begun < ups[0].queued, "the host has not waited for what it calls back first"
        engine.step()


def test_updates_on_the_device_wait_for_no_copies_down(tmp_path: Path, monkeypatch: Patch) -> None:
    mark_updates(monkeypatch)
    with training(at("parameters-only") | {"policy": "at_step"}, tmp_path) as engine:
        inputs = batch(2, 0)
        with traced_late() as traced:
            engine.backward(engine(*inputs))
            engine.step()
        updated = [mark for mark in traced.of("mark") if mark.name.startswith("update")]
        assert len(updated) == BLOCKS + 1
        downs = [down for down in traced.of("down") if down.queued > updated[0].begun]
        assert len(downs) > BLOCKS
        assert not any(0 < down.begun < updated[-1].begun for down in downs)


def test_the_host_adds_micro_batches_in_a_thread_of_its_own(tmp_path: Path, monkeypatch: Patch) -> None:
    """And not in the one that launches the backward's kernels."""
    monkeypatch.setattr("wherry.offload.ROOM_FOR_SUMS", 0.0)
    accumulate, threads = native.accumulate, list[str]()

    def noted(*tensors: torch.Tensor) -> None:
        threads.append(threading.current_thread().name)
        accumulate(*tensors)

    monkeypatch.setattr("wherry.native.accumulate", noted)
    with training(at("offload-2") | {"window": "three"}, tmp_path):
        pass
    assert len(threads) == 2 * 2 * (BLOCKS + 1)
    assert [name for name in threads if not name.startswith("wherry-landing")] == []


class Watch(TorchDispatchMode):
    """Notes what is copied between buffers of the host, and where the host waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        places = {value.device.type for value in args if isinstance(value, torch.Tensor)}
        places |= {torch.device(kwargs["device"]).type} if kwargs.get("device") is not None else set()
        blocks = len(places) > 1 and not (kwargs.get("non_blocking") or True in args[2:])
        if places and (
            (name == "_local_scalar_dense" and places != {"cpu"})
            or (name in ("copy_", "_to_copy") and (blocks or places == {"cpu"}))
        ):
            self.names.append(name)
        return func(*args, **kwargs)


@pytest.mark.parametrize("row", ["device-0", "device-3"])
def test_a_step_on_the_device_waits_for_it_once(row: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """For the norm."""
    waits: list[str] = []

    def noted(name: str, wait: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: (waits.append(name), wait(*args))[1]

    with training(at(row) | {"policy": "at_step"}, tmp_path) as engine:
        inputs = batch(2, 0)
        monkeypatch.setattr(_Copy, "finish", noted("copy", _Copy.finish))
        monkeypatch.setattr(torch.accelerator, "synchronize", noted("all", torch.accelerator.synchronize))
        with Watch() as watch:
            engine.backward(engine(*inputs))
            assert watch.names == waits == []
            engine.step()
        assert (watch.names, waits) == (["_local_scalar_dense"], [])
