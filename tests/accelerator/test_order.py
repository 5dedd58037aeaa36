"""What overlaps what: the order of events, on a device, a bus and a host whose rates the test sets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator import emulated
from tests.accelerator.emulated import Trace, Traced
from tests.accelerator.test_engine import BASE, DEVICE_ROWS, Case, batch, config_of, one_step
from tests.engine.harness import Run, TinyLM, adamw, assert_equal, make_model
from torch.utils._python_dispatch import TorchDispatchMode

import wherry
from wherry import native
from wherry.sharding.flat_gradient import FlatGradient
from wherry.tiers.streams import DeviceLink, _Copy
from wherry.update.optimizer_states import PIECE_NUMEL, UpdateBucket

BLOCKS = 8
# Of one block, in fp32: at RATE bytes a second a copy of it takes about 6 ms.
NUMEL, NBYTES, RATE = 1376, 4 * 1376, 1e6
KERNEL = 2e-3  # seconds
Patch = pytest.MonkeyPatch


@contextmanager
def training(case: Case, folder: Path, blocks: int = BLOCKS, **more: Any) -> Iterator[Any]:
    """An engine that has made two steps; forwards and backwards of its blocks are marked."""
    config = config_of(BASE | case, folder)
    for block, values in more.items():
        config[block] = config.get(block, {}) | values
    model = make_model(partial(TinyLM, blocks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wherry.update.optimizer_states.BUCKET_NUMEL", 1)  # each flat is updated by itself
        engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
        for index, block in enumerate(model.blocks):
            block.register_forward_pre_hook(partial(_mark, index))
        for step in range(2):
            one_step(engine, step, 0)
        engine.settle()
        yield engine
        engine.close()


def _mark(index: int, module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
    emulated.mark(f"forward {index}")
    if args[0].requires_grad:
        args[0].register_hook(lambda grad: emulated.mark(f"over {index}"))


@contextmanager
def traced_at(kernel: float = 0, rate: float = RATE) -> Iterator[Trace]:
    with emulated.timed(copy_rate=rate, kernel_seconds=kernel), emulated.trace() as traced:
        yield traced
        torch.accelerator.synchronize()


def update_at(patch: Patch, rate: float) -> None:
    """The host updates so many elements a second; each piece of a bucket is marked."""
    update = UpdateBucket.update

    def timed(self: UpdateBucket, piece: Any, *terms: Any) -> Any:
        emulated.mark(f"update {self.name}")
        time.sleep(sum(segment.numel for segment in piece.segments) / rate)
        ticket = update(self, piece, *terms)
        emulated.mark(f"updated {self.name}")
        return ticket

    patch.setattr(UpdateBucket, "update", timed)


def marked(traced: Trace, name: str, place: int = 0) -> float:
    return traced.of("mark", name)[place].begun


def kernels(traced: Trace) -> list[Traced]:
    """Of the computing stream."""
    return [item for item in traced.of("kernel") if item.stream == 0]


def kernel_after(traced: Trace, mark: str, place: int = 0) -> Traced:
    """The first that was queued after a mark."""
    return next(item for item in kernels(traced) if item.queued >= marked(traced, mark, place))


def kernel_before(traced: Trace, mark: str, place: int = 0) -> Traced:
    return [item for item in kernels(traced) if item.queued <= marked(traced, mark, place)][-1]


@pytest.mark.parametrize("row", ["offload-2", "offload-3-parameters"])
def test_gradients_set_out_while_the_backward_goes_on(row: str, tmp_path: Path) -> None:
    with training({"row": row}, tmp_path) as engine:
        with traced_at(KERNEL) as traced:
            one_step(engine, 2, 0)
            engine.settle()
        downs = [down for down in traced.of("down") if down.nbytes >= NBYTES]
        assert len(downs) == BLOCKS
        for down, later in zip(downs, range(BLOCKS - 3, -1, -1), strict=False):
            assert down.begun < kernel_before(traced, f"over {later}").ended, later


@pytest.mark.parametrize("row", ["offload-2", "offload-3-parameters"])
def test_a_fast_host_ends_its_updates_with_the_backward(row: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """What is left when the last block's backward ends is that block's update, and the root's."""
    update_at(monkeypatch, NUMEL / 0.003)
    with training({"row": row, "policy": "in_backward"}, tmp_path) as engine:
        with traced_at(KERNEL) as traced:
            one_step(engine, 2, 0)
            engine.settle()
        end = kernel_before(traced, "over 0").ended
        assert [f"blocks.{i}" for i in range(1, BLOCKS) if marked(traced, f"updated blocks.{i}") > end] == []


@pytest.mark.parametrize("row", ["offload-2", "offload-3-parameters"])
def test_a_forward_waits_for_the_update_of_its_own_unit(row: str, tmp_path: Path, monkeypatch: Patch) -> None:
    update_at(monkeypatch, NUMEL / 0.04)
    alone = {"stage3_prefetch_bucket_size": 0}
    with training({"row": row}, tmp_path, zero_optimization=alone) as engine:
        with traced_at(KERNEL / 2) as traced:
            one_step(engine, 2, 0)
            one_step(engine, 3, 0)
            engine.settle()
        for block in range(3):
            forward = kernel_after(traced, f"forward {block}", 1)
            assert marked(traced, f"updated blocks.{block}") <= forward.begun, "it is of the new weights"
            assert forward.begun < marked(traced, f"update blocks.{block + 5}"), "it waits for no others"


def test_large_flats_are_updated_and_sent_in_pieces(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("wherry.update.optimizer_states.PIECE_NUMEL", 512)
    update_at(monkeypatch, 512 / 0.02)
    with training({"row": "offload-2"}, tmp_path, blocks=2) as engine:
        with traced_at() as traced:
            one_step(engine, 2, 0)
            engine.settle()
        for name in ("blocks.0", "blocks.1"):
            pieces = traced.of("mark", f"updated {name}")
            assert len(pieces) >= 3
            sent = [up for up in traced.of("up") if up.stream != 0 and up.queued >= pieces[0].begun]
            assert sent[0].begun < marked(traced, f"update {name}", -1), "the first while others are to be updated"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("state", ["fp32", "bf16", "int8"])
def test_pieces_have_the_bits_of_the_whole(state: str, precision: str, tmp_path: Path) -> None:
    """The draws of stochastic rounding and the blocks of 8-bit states too."""

    def trained(piece: int) -> Run:
        run = Run()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("wherry.update.optimizer_states.PIECE_NUMEL", piece)
            update, calls = UpdateBucket.update, []
            patch.setattr(UpdateBucket, "update", lambda *terms: (calls.append(0), update(*terms))[1])
            case = {"row": "offload-2", "precision": precision}
            with training(case, tmp_path, blocks=2, wherry={"update_policy": "before_use", "state_dtype": state}) as e:
                run.losses = [float(one_step(e, step, 0)) for step in range(2, 6)]
                run.weights = {n: p.detach().cpu().clone() for n, p in e.module.named_parameters()}
            run.extra = len(calls)
        return run

    whole, cut = trained(PIECE_NUMEL), trained(256)
    assert_equal(cut, whole)
    assert cut.extra > 2 * whole.extra


@pytest.mark.parametrize("row", ["offload-2", "offload-3-parameters"])
def test_delayed_updates_read_one_buffer_while_the_other_is_filled(
    row: str, tmp_path: Path, monkeypatch: Patch
) -> None:
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

    with training({"row": row, "policy": "delayed"}, tmp_path) as engine:
        monkeypatch.setattr(UpdateBucket, "begin_update", begun)
        monkeypatch.setattr(FlatGradient, "lend", lent)
        for step in range(2, 8):
            one_step(engine, step, 0)
        engine.settle()
    assert len(read) == BLOCKS + 1
    for name, places in read.items():
        assert places == places[:2] * 3 and places[0] != places[1], name
    assert copied == [], "what is lent is not copied"


def test_a_forward_is_queued_while_delayed_weights_go_up(tmp_path: Path) -> None:
    with training({"row": "offload-2", "policy": "delayed"}, tmp_path) as engine:
        one_step(engine, 2, 0)  # the next step publishes what this one has begun
        inputs = batch(3, 0, 0)
        with traced_at(rate=RATE / 10) as traced:
            for _ in range(2):
                engine.backward(engine(*inputs))
                engine.step()
        ups = [up for up in traced.of("up") if up.stream != 0 and up.queued < marked(traced, "forward 0", 1)]
        assert sum(up.nbytes for up in ups) > BLOCKS * NBYTES, "the first of the two steps has published"
        forward = kernel_after(traced, "forward 0", 1)
        assert forward.queued < ups[-1].ended <= forward.begun


def test_activations_are_called_back_before_they_have_gone(tmp_path: Path, monkeypatch: Patch) -> None:
    """The stream, and not the host, waits for a copy down before its copy up."""
    down, up = DeviceLink.down, DeviceLink.up

    def noted_down(self: DeviceLink, target: torch.Tensor, source: torch.Tensor) -> Any:
        emulated.mark(f"down {target.data_ptr()}")
        return down(self, target, source)

    def noted_up(self: DeviceLink, target: torch.Tensor, source: torch.Tensor, **how: Any) -> Any:
        ticket = up(self, target, source, **how)
        emulated.mark(f"up {source.data_ptr()}")
        return ticket

    with training({"row": "device-2", "activations": "host"}, tmp_path, blocks=2) as engine:
        monkeypatch.setattr(DeviceLink, "down", noted_down)
        monkeypatch.setattr(DeviceLink, "up", noted_up)
        inputs = batch(2, 0, 0)
        with traced_at(rate=RATE / 20) as traced:
            engine.backward(engine(*inputs))
        engine.step()
        gone, back = {}, {}
        for index, item in enumerate(traced.items):
            way, _, place = item.name.partition(" ")
            if item.kind == "mark" and way == "down":
                gone[place] = next(other for other in traced.items[index:] if other.kind == "down")
            elif item.kind == "mark" and way == "up":
                back[place] = next(other for other in reversed(traced.items[:index]) if other.kind == "up")
        assert len(back) > 10 and back.keys() <= gone.keys()
        pairs = [(gone[place], back[place]) for place in back]
        assert all(down.ended <= up.begun for down, up in pairs)
        assert pairs[0][1].queued < pairs[0][0].ended, "the host has not waited"


@pytest.mark.parametrize("policy", ["at_step", "before_use"])
def test_updates_on_the_device_wait_for_no_copies_down(policy: str, tmp_path: Path, monkeypatch: Patch) -> None:
    with training({"row": "parameters-only", "policy": policy}, tmp_path) as engine:
        update_at(monkeypatch, 1e9)
        with traced_at(rate=RATE / 10) as traced:
            one_step(engine, 2, 0)
            engine.settle()
        updated = [mark for mark in traced.of("mark") if mark.name.startswith("updated")]
        assert len(updated) == BLOCKS + 1
        downs = traced.of("down")
        assert updated[-1].begun < downs[len(downs) // 2].ended, "if one had waited, all but the last's had come down"


def test_the_host_adds_micro_batches_in_a_thread_of_its_own(tmp_path: Path, monkeypatch: Patch) -> None:
    """And not in the one that launches the backward's kernels."""
    monkeypatch.setattr("wherry.offload.ROOM_FOR_SUMS", 0.0)
    accumulate, threads = native.accumulate, list[str]()

    def noted(*tensors: torch.Tensor) -> None:
        threads.append(threading.current_thread().name)
        accumulate(*tensors)

    monkeypatch.setattr("wherry.native.accumulate", noted)
    with training({"row": "offload-2", "window": "three"}, tmp_path):
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


@pytest.mark.parametrize("row", DEVICE_ROWS)
def test_a_step_on_the_device_waits_for_it_once(row: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """For the norm."""
    waits: list[str] = []

    def noted(name: str, wait: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: (waits.append(name), wait(*args))[1]

    with training({"row": row, "policy": "at_step"}, tmp_path) as engine:
        inputs = batch(2, 0, 0)
        monkeypatch.setattr(_Copy, "finish", noted("copy", _Copy.finish))
        monkeypatch.setattr(torch.accelerator, "synchronize", noted("all", torch.accelerator.synchronize))
        with Watch() as watch:
            engine.backward(engine(*inputs))
            assert watch.names == waits == []
            engine.step()
        assert (watch.names, waits) == (["_local_scalar_dense"], [])
