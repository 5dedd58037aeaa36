"""Updates overlap forwards and backwards: each use waits for its own update, reads, writes and gathers alone."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engine.harness import adamw, engine_of, make_model, settings, token_batch, train_step
from tests.tiers.rows import ROWS, offload, with_stores
from tests.tiers.test_traffic import psi

import wherry
from wherry.errors import WherryError
from wherry.parallel.comm import Comm, SoloComm
from wherry.testing import run_ranks
from wherry.testing.late import Chaos, ChaosLink, topology
from wherry.tickets import CallbackTicket, Ticket
from wherry.tiers.disk import DiskStore
from wherry.tiers.streams import Link, _Copy
from wherry.update.optimizer_states import UpdateBucket


class GatedStore(DiskStore):
    """Its writes do not end before the gate opens."""

    gate: threading.Event
    begun = 0

    def write(self, *args: Any, **more: Any) -> Ticket:
        ticket = super().write(*args, **more)
        self.begun += 1

        def wait() -> None:
            assert self.gate.wait(50), "nobody opens the gate"
            ticket.wait()

        return CallbackTicket(wait, lambda: self.gate.is_set() and ticket.done())


@pytest.mark.parametrize(
    ("row", "policy"), [("disk-2", "in_backward"), ("disk-3", "before_use"), ("infinity", "in_backward")]
)
def test_weights_are_used_while_their_state_is_written(row: str, policy: str, tmp_path: Path) -> None:
    """A whole forward and its backward; the next update of a part waits for the write of the one before."""
    model = make_model()
    config = settings(ROWS[row][0], more=offload(row, tmp_path, policy, "bf16", optimizer={"buffer_count": 20}))
    place, stores = with_stores(replace(topology(SoloComm()), open_store=GatedStore))
    GatedStore.gate = gate = threading.Event()
    gate.set()
    engine = engine_of(model, config, place)
    (store,) = stores
    engine.settle()
    gate.clear()
    begun = store.begun
    train_step(engine, 0, 0)
    loss = engine(*token_batch(1, 0, 0))  # while the gate is shut
    assert store.begun > begun
    if policy == "before_use":
        engine.backward(loss)
    gate.set()
    if policy == "in_backward":
        engine.backward(loss)
    engine.step()
    engine.close()


@pytest.mark.usefixtures("every_flat_alone")
def test_new_weights_go_up_before_anything_asks_for_them(tmp_path: Path) -> None:
    """As soon as each part is updated: with the last one, all have."""
    model = make_model()
    link = ChaosLink(Chaos(3))
    engine = engine_of(
        model,
        settings(2, more=offload("offload-2", tmp_path, "before_use", "bf16")),
        topology(SoloComm(), link.chaos, link=link),
    )
    engine.backward(engine(*token_batch(0, 0, 0)))
    before = link.bytes_up
    engine.step()
    whole, updated = psi(1)
    deadline = time.monotonic() + 50
    while link.bytes_up - before < 2 * updated and time.monotonic() < deadline:
        time.sleep(0.001)
    assert 2 * updated <= link.bytes_up - before <= 2 * whole
    engine.close()


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize(("row", "policy"), [("offload-1", "before_use"), ("disk-2", "in_backward")])
def test_a_step_waits_for_no_update_and_each_unit_for_its_own(
    row: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates wait for a gate. Where ranks hold weights whole, which is not here, their gathers begin in the step."""
    model = make_model()
    names = ["root", "blocks.0", "blocks.1", "blocks.2"]
    kept = list(model.parameters())
    engine, *_ = wherry.initialize(
        model=model, optimizer=adamw(kept), config=settings(ROWS[row][0], more=offload(row, tmp_path, policy))
    )
    gate, update = threading.Event(), UpdateBucket.update

    def behind(bucket: UpdateBucket, *args: Any) -> Ticket:
        assert gate.wait(50), "nobody opens the gate"
        return update(bucket, *args)

    monkeypatch.setattr(UpdateBucket, "update", behind)

    def pending() -> list[str]:
        return [unit.name for unit in engine.units if unit.pending]

    def step(number: int) -> None:
        train_step(engine, number, 0)
        assert pending() == names

    step(0)
    # Whoever has kept them reads nothing that is only half an update.
    assert all(parameter.isnan().all() for parameter in kept)
    gate.set()
    reached: list[list[str]] = []
    handles = [block.register_forward_pre_hook(lambda *_: reached.append(pending())) for block in model.blocks]
    loss = engine(*token_batch(1, 0, 0))
    assert reached == [names[2:], names[3:], []]
    assert not any(parameter.isnan().any() for parameter in kept)
    engine.backward(loss)
    for handle in handles:
        handle.remove()
    engine.step()
    step(2)
    engine.close()  # the last update is made, and shown
    assert not any(parameter.isnan().any() for parameter in kept)


@pytest.mark.usefixtures("every_flat_alone")
def test_gathers_begin_in_the_step(tmp_path: Path) -> None:
    """Each unit waits for its own, and a rank that looks at its model alone asks for nothing.

    Whoever has kept parameters reads nothing that is only half gathered.
    """
    model = make_model()

    def body(comm: Comm) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        kept = list(mine.parameters())
        engine, *_ = wherry.initialize(
            model=mine,
            optimizer=adamw(kept),
            config=settings(2, more=offload("offload-2", tmp_path, "before_use")),
            mesh=comm,
        )
        for step in range(2):
            engine.backward(engine(*token_batch(step, 0, comm.rank)))
            comm.traffic.clear()
            engine.step()
            assert comm.traffic.calls["all_gather"] == 4
            assert all(unit.pending for unit in engine.units)
            assert all(parameter.isnan().all() for parameter in kept)
        if comm.rank == 1:
            with torch.no_grad():
                engine(*token_batch(3, 0, 0))
            assert comm.traffic.calls["all_gather"] == 4
            assert not any(parameter.isnan().any() for parameter in kept)
        comm.barrier()
        weights = {name: weight.clone() for name, weight in engine.module.state_dict().items()}
        engine.close()
        return weights

    first, second = run_ranks(2, body)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize(("policy", "first"), [("before_use", ["root", "blocks.0"]), ("in_backward", ["root"])])
def test_what_the_next_forward_waits_for_first_is_read_in_the_backward(
    policy: str, first: list[str], tmp_path: Path
) -> None:
    """By the thread of the backward; each record once for a step; a window that is dropped gives all back."""
    model = make_model()
    config = offload("disk-2", tmp_path, policy, optimizer={"buffer_count": 3})
    here, ahead, others = threading.current_thread(), list[str](), list[str]()

    class Noting(DiskStore):
        def read(self, record: Any, *args: Any, **more: Any) -> Ticket:
            (ahead if threading.current_thread() is here else others).append(record.name)
            return super().read(record, *args, **more)

    link = Link(torch.device("cpu"))
    engine = engine_of(
        model, settings(2, 2, more=config), replace(topology(SoloComm()), link=lambda pin: link, open_store=Noting)
    )
    for step in range(2):
        for micro in range(2):
            engine.backward(engine(*token_batch(step, micro, 0)))
            assert ahead == (first if micro else [])
            engine.step()
        engine.settle()
        assert sorted(ahead + others) == ["blocks.0", "blocks.1", "blocks.2", "root"]
        ahead.clear()
        others.clear()
    for micro in range(2):
        engine.backward(engine(*token_batch(2, micro, 0)))
    pool = link.host
    assert pool.counters.in_use > 0 or policy == "in_backward"
    dropped = pytest.raises(WherryError, match=r"updated 4 parts .* already") if first == ["root"] else nullcontext()
    with dropped:
        engine.zero_grad()
    assert pool.counters.in_use == 0
    engine.close()


@pytest.mark.usefixtures("every_flat_alone")
def test_after_a_backward_its_updates_are_made_in_the_order_of_the_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Update the first unit early, as the next forward waits for it first."""
    model = make_model()
    config = offload("disk-2", tmp_path, "in_backward", optimizer={"buffer_count": 2})
    engine = engine_of(model, settings(2, more=config))
    gate, met, order = threading.Event(), threading.Event(), list[str]()

    update = UpdateBucket.update

    def behind(bucket: UpdateBucket, *args: Any) -> Ticket:
        order.append(bucket.name)
        met.set()
        assert gate.wait(50), "nobody opens the gate"
        return update(bucket, *args)

    monkeypatch.setattr(UpdateBucket, "update", behind)
    engine.backward(engine(*token_batch(0, 0, 0)))
    assert met.wait(50)
    engine.step()
    gate.set()
    engine.settle()
    assert order == ["blocks.2", "root", "blocks.0", "blocks.1"]
    engine.close()


def test_a_copy_orders_the_stream_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: ("the stream of", device))
    second, event = torch.device("xpu", 1), SimpleNamespace(wait=asked.append)
    _Copy(second, event, on_host=False).order()  # type: ignore[arg-type]
    assert asked == [("the stream of", second)]


class Event:
    """Of a stream that a test has no need of."""

    def wait(self, stream: object) -> None:
        """The stream comes after it."""

    def synchronize(self) -> None:
        """Return at once: the recorded work is over."""


@pytest.mark.parametrize(("up", "how"), [(True, "wait"), (True, "finish"), (False, "wait"), (False, "release")])
def test_a_copy_lets_go_of_the_devices_memory_as_soon_as_its_stream_waits(
    up: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free device memory with its last user: a ticket that lives longer does not keep it."""
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    target, source = torch.empty(4), torch.empty(4)
    copy = _Copy(torch.device("xpu", 0), Event(), not up, target, source)  # type: ignore[arg-type]
    there, here = weakref.ref(target), weakref.ref(source)
    del target, source
    assert there() is not None and here() is not None
    for _ in range(2):
        getattr(copy, how)()
        assert (there() is None) is (up or how == "wait")
        assert (here() is None) is (not up or how == "finish")


@pytest.mark.usefixtures("every_flat_alone")
def test_that_weights_have_changed_already_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By the error where gradients are dropped on purpose, and else beside the error that ended the backward."""

    def stumble(*_: Any) -> None:
        raise OSError("the disk is gone")

    def fails(module: Any, args: Any) -> None:
        args[0].register_hook(stumble)

    model = make_model()
    config = settings(2, more=offload("offload-2", tmp_path, "in_backward"))
    engine = engine_of(model, config)
    engine.backward(engine(*token_batch(0, 0, 0)))
    with pytest.raises(WherryError, match=r"zero_grad: .* updated 4 parts .* already"):
        engine.zero_grad()
    engine.accept_partial_update()
    engine.zero_grad()
    assert not caplog.records
    model.blocks[0].register_forward_pre_hook(fails)
    with pytest.raises(OSError, match="the disk is gone"):
        engine.backward(engine(*token_batch(1, 0, 0)))
    engine.accept_partial_update()
    engine.zero_grad()
    (told,) = caplog.records
    assert "of 4 parts of the model from them already" in told.getMessage()
    engine.close()
