"""Counted: what crosses between device and host in a step, what the disk moves, and where bytes rest."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import TinyLM, adamw, make_model, settings, token_batch
from tests.engine.test_counts import padded
from tests.tiers.chaos import Chaos, ChaosLink, topology
from tests.tiers.rows import ROWS
from tests.tiers.test_placements import offload

import wherry
from wherry.errors import PeerError, WherryError
from wherry.native.plan import Plan
from wherry.parallel.comm import Comm, SoloComm
from wherry.parallel.threads import run_ranks
from wherry.parallel.topology import Topology
from wherry.tiers.buffers import PAGE
from wherry.tiers.streams import Link, _Copy
from wherry.tiers.tickets import Ticket

SECTIONS = ("offload_param", "offload_optimizer")


def measure(row: str, folder: Path, policy: str, *, ranks: int = 1, k: int = 1, free: int | None = None) -> Any:
    """Bytes up and down in one step of the steady state, reads and writes of the disk, and memory, by rank."""
    model = make_model()

    def body(comm: Comm) -> dict[str, Any]:
        mine = copy.deepcopy(model)
        link = ChaosLink(Chaos(comm.rank), free=free)
        engine, *_ = wherry.initialize(
            model=mine,
            optimizer=adamw(mine.parameters()),
            config=settings(ROWS[row][0], k, more=offload(row, folder, policy, "bf16")),
            mesh=topology(comm, link.chaos, link=link),
        )
        stores = engine._tiering.stores
        for step in range(3):
            engine.settle()
            before = (link.bytes_up, link.bytes_down, *_disk(stores))
            pool = link.host.counters
            for micro in range(k):
                engine.backward(engine(*token_batch(step, micro, comm.rank)))
                engine.step()
            engine.settle()
        after = (link.bytes_up, link.bytes_down, *_disk(stores))
        moved = [b - a for a, b in zip(before, after, strict=True)]
        seen: dict[str, Any] = dict(zip(("up", "down", "read", "written"), moved, strict=True))
        seen["allocated in the last step"] = link.host.counters.misses - pool.misses
        seen["memory"] = {(r.state, r.tier): r for r in engine.memory()}
        engine.close()
        assert link.host.counters.in_use == 0
        return seen

    return run_ranks(ranks, body)


def _disk(stores: Any) -> tuple[int, int]:
    return sum(s.stats.bytes_read for s in stores), sum(s.stats.bytes_written for s in stores)


class Gated(Ticket):
    """A write that does not end before the gate opens."""

    def __init__(self, gate: threading.Event, ticket: Ticket) -> None:
        self.gate = gate
        self.ticket = ticket

    def wait(self) -> None:
        assert self.gate.wait(50), "nobody opens the gate"
        self.ticket.wait()

    def done(self) -> bool:
        return self.gate.is_set() and self.ticket.done()


@pytest.mark.parametrize("policy", ["before_use", "in_backward"])
@pytest.mark.parametrize("row", ["disk-2", "disk-3", "infinity"])
def test_weights_are_used_while_their_state_is_written(row: str, policy: str, tmp_path: Path) -> None:
    """A whole forward and its backward; the next update of a part waits for the write of the one before."""
    model = make_model()
    config = offload(row, tmp_path, policy, "bf16", optimizer={"buffer_count": 20})
    engine, *_ = wherry.initialize(
        model=model, optimizer=adamw(model.parameters()), config=settings(ROWS[row][0], more=config)
    )
    (store,) = engine._tiering.stores
    gate, write = threading.Event(), store.write
    store.write = lambda *args, **more: Gated(gate, write(*args, **more))
    engine.backward(engine(*token_batch(0, 0, 0)))
    engine.step()
    loss = engine(*token_batch(1, 0, 0))
    assert engine._updater._storing and not engine._updater._pending
    if policy == "before_use":
        engine.backward(loss)
    gate.set()
    if policy == "in_backward":
        engine.backward(loss)
    engine.step()
    engine.settle()
    assert not engine._updater._storing
    engine.close()


def psi(ranks: int) -> tuple[int, int]:
    """Elements, padded, and of those the ones that are updated."""
    units = padded(make_model(), ranks)
    return sum(units.values()), sum(p.numel() for p in make_model().parameters())


@pytest.mark.parametrize("policy", ["at_step", "before_use", "in_backward"])
@pytest.mark.parametrize("row", ["offload-0/1", "offload-1/2", "offload-2/1", "offload-2/2"])
def test_zero_offload_moves_two_psi_each_way(row: str, policy: str, tmp_path: Path) -> None:
    """Gradients down once and weights up once, in the working dtype: 2 psi bytes each way, over all ranks."""
    row, ranks = row.split("/")[0], int(row.split("/")[1])
    whole, updated = psi(ranks)
    seen = measure(row, tmp_path, policy, ranks=ranks)
    for rank in seen:
        assert rank["down"] == 2 * whole // ranks
        assert rank["allocated in the last step"] == 0
    # Padding at the end of a shard is not updated, and stays where it is.
    assert 2 * updated <= sum(rank["up"] for rank in seen) <= 2 * whole


@pytest.mark.parametrize(("free", "times"), [(None, 1), (0, 4)], ids=["sums on the device", "sums on the host"])
def test_gradients_leave_the_device_once_if_their_sums_fit_there(free: int | None, times: int, tmp_path: Path) -> None:
    whole, _ = psi(1)
    assert measure("offload-2", tmp_path, "at_step", k=4, free=free)[0]["down"] == 2 * whole * times


def test_parameters_on_the_host_come_up_for_forward_and_backward(tmp_path: Path) -> None:
    units = padded(make_model(), 1)
    whole = sum(units.values())
    seen = measure("offload-3-parameters", tmp_path, "before_use")[0]
    # The root unit stays for the backward. Updated weights are where they rest already.
    assert seen["up"] == 2 * (2 * whole - units["root"])
    assert seen["down"] == 2 * whole
    assert seen["allocated in the last step"] == 0


@pytest.mark.parametrize("policy", ["at_step", "before_use", "in_backward"])
def test_the_disk_moves_each_record_once(policy: str, tmp_path: Path) -> None:
    """One read and one write of the packed record of a unit in a step, and nothing else."""
    seen = measure("disk-2", tmp_path, policy)[0]
    records = seen["memory"]["optimizer", "disk"].bytes_actual
    assert seen["read"] == seen["written"]
    sector = 4096
    units = len(padded(make_model(), 1))
    assert records <= seen["read"] <= records + sector * units
    assert seen["allocated in the last step"] == 0


def test_states_take_twelve_bytes_a_parameter_of_host_memory(tmp_path: Path) -> None:
    """Working weight and low half 2 each, moments 4 each; and 2 for the gradient on its way."""
    whole, updated = psi(1)
    memory = measure("offload-2", tmp_path, "before_use")[0]["memory"]
    # Padding between parameters is updated with them, that at the end of a flat has no state.
    assert 12 * updated <= memory["optimizer", "host"].bytes_actual <= 12 * whole
    assert memory["gradients", "host"].bytes_actual == 2 * whole
    assert memory["gradients", "device"].bytes_actual == 0
    assert memory["parameters", "device"].bytes_actual == 2 * whole


def test_gradients_updated_in_the_backward_have_no_memory_of_their_own(tmp_path: Path) -> None:
    memory = measure("infinity", tmp_path, "in_backward")[0]["memory"]
    assert memory["gradients", "device"].bytes_actual == 0
    assert ("gradients", "host") not in memory
    whole, updated = psi(1)
    assert memory["parameters", "disk"].bytes_actual == 2 * whole
    assert 10 * updated <= memory["optimizer", "disk"].bytes_actual <= 10 * whole


def test_an_update_reads_and_writes_twenty_six_bytes_an_element(tmp_path: Path) -> None:
    """Reads of upper and lower half, moments and gradient: 14; writes of all but the gradient: 12."""
    plans: list[Plan] = []
    model = make_model()
    engine, *_ = wherry.initialize(
        model=model,
        optimizer=adamw(model.parameters()),
        config=settings(2, more=offload("offload-2", tmp_path, "at_step", "bf16")),
    )
    engine.backward(engine(*token_batch(0, 0, 0)))
    engine.step()
    plans = [batch.rule._plan for batch in engine._updater.batches]
    (gradient,) = {gradient.dtype.itemsize for gradient in engine._gradients.all}
    for segment in (segment for plan in plans for segment in plan.segments):
        assert segment.master is None
        assert gradient + 2 * sum(t.element_size() for t in (segment.working, segment.low, *segment.state)) == 26
    engine.close()


@pytest.mark.usefixtures("every_flat_alone")
def test_new_weights_go_up_before_anything_asks_for_them(tmp_path: Path) -> None:
    """As soon as each part is updated: with the last one, all have."""
    model = make_model()
    link = ChaosLink(Chaos(3))
    engine, *_ = wherry.initialize(
        model=model,
        optimizer=adamw(model.parameters()),
        config=settings(2, more=offload("offload-2", tmp_path, "before_use", "bf16")),
        mesh=topology(SoloComm(), link.chaos, link=link),
    )
    engine.backward(engine(*token_batch(0, 0, 0)))
    before = link.bytes_up
    engine.step()
    jobs = list(engine._updater._pending.values())
    assert len(jobs) == 4
    for job in jobs:
        job.come_to_an_end()
    whole, updated = psi(1)
    assert 2 * updated <= link.bytes_up - before <= 2 * whole
    engine.close()


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize("policy", ["before_use", "in_backward"])
@pytest.mark.parametrize("row", ["offload-1", "disk-2"])
def test_a_step_waits_for_no_update_and_each_unit_for_its_own(row: str, policy: str, tmp_path: Path) -> None:
    """On two ranks, whose updates wait for a gate; of which one then looks at its model alone, and asks for nothing."""
    model = make_model()
    names = ["root", "blocks.0", "blocks.1", "blocks.2"]

    def behind(gate: threading.Event, update: Any) -> Any:
        def wait(*args: Any) -> Ticket:
            assert gate.wait(50), "nobody opens the gate"
            ticket: Ticket = update(*args)
            return ticket

        return wait

    def body(comm: Comm) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        kept = list(mine.parameters())
        engine, *_ = wherry.initialize(
            model=mine,
            optimizer=adamw(kept),
            config=settings(ROWS[row][0], more=offload(row, tmp_path, policy)),
            mesh=comm,
        )
        gate = threading.Event()
        for batch in engine._updater.batches:
            batch.rule.update = behind(gate, batch.rule.update)

        def pending() -> list[str]:
            return [unit.name for unit in engine.units if unit.pending]

        def step(number: int) -> None:
            engine.backward(engine(*token_batch(number, 0, comm.rank)))
            comm.traffic.clear()
            engine.step()
            assert pending() == names

        step(0)
        assert comm.traffic.calls["all_gather"] == 0
        # Whoever has kept them reads nothing that is only half an update.
        assert all(parameter.isnan().all() for parameter in kept)
        gate.set()
        reached: list[list[str]] = []
        handles = [block.register_forward_pre_hook(lambda *_: reached.append(pending())) for block in mine.blocks]
        loss = engine(*token_batch(1, 0, comm.rank))
        assert reached == [names[2:], names[3:], []]
        assert comm.traffic.calls["all_gather"] == len(names)
        assert not any(parameter.isnan().any() for parameter in kept)
        engine.backward(loss)
        for handle in handles:
            handle.remove()
        engine.step()
        step(2)
        if comm.rank == 1:
            with torch.no_grad():
                engine(*token_batch(3, 0, 0))
            engine.module.state_dict()
            assert pending() == []
            assert comm.traffic.calls["all_gather"] == len(names)
        comm.barrier()
        weights = {name: weight.clone() for name, weight in engine.module.state_dict().items()}
        step(4)
        engine.close()  # the last update is made, and shown
        assert not any(parameter.isnan().any() for parameter in kept)
        return weights

    first, second = run_ranks(2, body)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


@pytest.mark.usefixtures("every_flat_alone")
def test_without_a_group_beside_gathers_begin_in_the_step(tmp_path: Path) -> None:
    """As on a GPU: each unit waits for its own, and a rank that looks at its model alone asks for nothing."""
    model = make_model()

    def body(comm: Comm) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        comm.beside = lambda device: None  # type: ignore[method-assign]
        engine, *_ = wherry.initialize(
            model=mine,
            optimizer=adamw(mine.parameters()),
            config=settings(2, more=offload("offload-2", tmp_path, "before_use")),
            mesh=comm,
        )
        for step in range(2):
            engine.backward(engine(*token_batch(step, 0, comm.rank)))
            comm.traffic.clear()
            engine.step()
            assert comm.traffic.calls["all_gather"] == 4
            assert all(unit.pending for unit in engine.units)
        if comm.rank == 1:
            with torch.no_grad():
                engine(*token_batch(3, 0, 0))
            assert comm.traffic.calls["all_gather"] == 4
        comm.barrier()
        weights = {name: weight.clone() for name, weight in engine.module.state_dict().items()}
        engine.close()
        return weights

    first, second = run_ranks(2, body)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


def test_engines_that_share_a_group_send_their_weights_in_one_order(tmp_path: Path) -> None:
    """Two engines of each of two ranks, whose updates take turns."""
    models = [make_model(seed=seed) for seed in (0, 1)]

    def body(comm: Comm, policy: str) -> list[dict[str, torch.Tensor]]:
        engines = []
        for model in models:
            mine = copy.deepcopy(model)
            config = settings(2, more=offload("offload-2", tmp_path, policy))
            engines.append(
                wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=config, mesh=comm)[0]
            )
        for step in range(3):
            for engine in engines:
                engine.backward(engine(*token_batch(step, 0, comm.rank)))
            for engine in engines:
                engine.step()
        found = [engine.module.state_dict() for engine in engines]
        for engine in engines:
            engine.close()
        return found

    plain, _ = run_ranks(2, partial(body, policy="at_step"))
    for found in run_ranks(2, partial(body, policy="before_use")):
        for weights, expected in zip(found, plain, strict=True):
            assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_an_engine_that_shares_a_group_stops_with_the_one_that_failed(tmp_path: Path) -> None:
    """The other ranks' gathers for the one would meet those of the other, which are as large."""
    models = [make_model(seed=seed) for seed in (0, 1)]

    def body(comm: Comm) -> None:
        failing = threading.Event()

        def fail(*_: Any) -> Ticket:
            assert failing.wait(50), "nobody lets it fail"
            raise OSError("nothing is left of the disk")

        engines = []
        for model in models:
            mine = copy.deepcopy(model)
            config = settings(2, more=offload("offload-2", tmp_path, "before_use"))
            engines.append(
                wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=config, mesh=comm)[0]
            )
        first, second = engines
        if comm.rank == 1:
            for batch in first._updater.batches:
                batch.rule.update = fail
        for engine in engines:
            engine.backward(engine(*token_batch(0, 0, comm.rank)))
            engine.step()
        failing.set()
        for engine in (second, first):
            with pytest.raises((WherryError, PeerError), match="nothing is left of the disk"):
                engine.module.state_dict()
        for engine in engines:
            engine.close()

    run_ranks(2, body)


def test_optimizer_state_on_disk_does_not_stay_in_the_room_for_weights(tmp_path: Path) -> None:
    """On the same folder: a record is read once and written once, and what is kept in memory is weights."""
    model = make_model()
    config = offload("infinity", tmp_path, "before_use", aio={"block_size": 16384, "queue_depth": 4, "thread_count": 2})
    drives = [tmp_path / "one", tmp_path / "two"]
    for drive in drives:
        drive.mkdir()
    for section in SECTIONS:
        config["zero_optimization"][section]["nvme_path"] = [*map(str, drives)]
    config["zero_optimization"]["offload_param"]["buffer_count"] = 6
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=settings(3, more=config))
    for step in range(2):
        engine.backward(engine(*token_batch(step, 0, 0)))
        engine.step()
    engine.settle()
    memory = {(row.state, row.tier): row.bytes_actual for row in engine.memory()}
    assert memory["optimizer read", "host"] == 0
    assert memory["parameters read", "host"] == memory["parameters", "disk"]
    (store,) = engine._tiering.stores
    assert (store.block_size, store.queue_depth) == (16384, 8)
    assert all(reserved for _, reserved, _ in store.usage().paths)
    assert [*map(lambda path: Path(path).parent.parent, store.paths)] == drives
    engine.close()


def held_by(memory: Any, tier: str) -> int:
    return sum(row.bytes_actual for row in memory if row.tier == tier)


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize("apart", [False, True], ids=["the host", "a device"])
@pytest.mark.parametrize("row", ROWS)
def test_the_table_of_memory_is_what_there_is(row: str, apart: bool, tmp_path: Path) -> None:
    """What is expected and what is held, and that beside what pools have lent and the disk has reserved."""
    model = make_model()

    def body(comm: Comm) -> None:
        mine = copy.deepcopy(model)
        chaos = Chaos(comm.rank) if apart else None
        engine, *_ = wherry.initialize(
            model=mine,
            optimizer=adamw(mine.parameters()),
            config=settings(ROWS[row][0], more=offload(row, tmp_path, "before_use", "bf16")),
            mesh=topology(comm, chaos),
        )
        for step in range(3):
            engine.backward(engine(*token_batch(step, 0, comm.rank)))
            now = engine.memory()  # with what is read ahead
            engine.step()
            engine.settle()
            for memory in (now, engine.memory()):
                assert len({(row.state, row.tier) for row in memory}) == len(memory)
                for state, tier, expected, actual in memory:
                    if state in ("parameters", "gradients"):
                        assert actual == expected, (state, tier)
                    elif state == "optimizer":  # but for the padding at the ends of flats
                        assert actual <= expected <= 1.3 * actual
                    else:
                        assert actual <= expected, (state, tier)
        pool, records = engine._tiering.link.host, [r for s in engine._tiering.stores for r in s._records]
        lent = held_by(memory, "host")
        assert lent <= pool.counters.in_use <= lent + 2 * PAGE * len(pool._lent)
        stored = held_by(memory, "disk")
        reserved = sum(store.usage().reserved for store in engine._tiering.stores)
        assert stored <= reserved <= stored + 2 * PAGE * len(records)
        width = 2 * engine._gatherer.peak_live
        assert next(row.bytes_expected for row in memory if row.state == "gathered") >= width
        engine.close()

    run_ranks(2, body)


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize("policy", ["at_step", "before_use", "in_backward"])
@pytest.mark.parametrize("count", [1, 2])
def test_no_more_records_are_in_memory_than_there_may_be(count: int, policy: str, tmp_path: Path) -> None:
    model = make_model()
    config = offload("disk-2", tmp_path, policy, optimizer={"buffer_count": count})
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=settings(2, more=config))
    for step in range(3):
        engine.backward(engine(*token_batch(step, 0, 0)))
        engine.step()
    engine.settle()
    largest = max(batch.record_nbytes for batch in engine._updater.batches)
    (row,) = [row for row in engine.memory() if row.state == "optimizer read"]
    assert (row.bytes_expected, row.bytes_actual) == (count * largest, 0)
    pages = count * -(-largest // PAGE) * PAGE
    assert engine._tiering.link.host.counters.peak_in_use <= pages
    engine.close()


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize(("policy", "first"), [("before_use", ["root", "blocks.0"]), ("in_backward", ["root"])])
def test_what_the_next_forward_waits_for_first_is_read_in_the_backward(
    policy: str, first: list[str], tmp_path: Path
) -> None:
    """By the thread of the backward; each record once for a step; a window that is dropped gives all back."""
    model = make_model()
    config = offload("disk-2", tmp_path, policy, optimizer={"buffer_count": 3})
    engine, *_ = wherry.initialize(
        model=model, optimizer=adamw(model.parameters()), config=settings(2, 2, more=config)
    )
    (store,) = engine._tiering.stores
    here, read, ahead, others = threading.current_thread(), store.read, list[str](), list[str]()

    def noted(record: Any, *args: Any) -> Ticket:
        (ahead if threading.current_thread() is here else others).append(record.name)
        return read(record, *args)

    store.read = noted  # type: ignore[method-assign]
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
    pool = engine._tiering.link.host
    assert pool.counters.in_use > 0 or policy == "in_backward"
    dropped = pytest.raises(WherryError, match=r"updated 4 parts .* already") if first == ["root"] else nullcontext()
    with dropped:
        engine.zero_grad()
    assert pool.counters.in_use == 0
    engine.close()


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize("row", ["disk-parameters", "infinity"])
def test_weights_on_disk_are_in_no_more_buffers_than_there_may_be(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read ahead, in use, being updated, or kept: three of ten."""
    model = make_model(lambda: TinyLM(blocks=9))
    config = offload(row, tmp_path, "at_step")
    config["zero_optimization"]["offload_param"]["buffer_count"] = 3
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=settings(3, more=config))
    shelf = engine._tiering._weights_shelf
    take, most = shelf.take, list[int]()

    def noted(nbytes: int) -> torch.Tensor:
        buffer = take(nbytes)
        most.append(shelf.held)
        return buffer

    monkeypatch.setattr(shelf, "take", noted)
    for step in range(3):
        engine.backward(engine(*token_batch(step, 0, 0)))
        engine.step()
    assert 2 * shelf.largest < max(most) <= 3 * shelf.largest
    engine.close()
    assert shelf.held == 0


class Pins:
    """Counts what it is told to pin."""

    def __init__(self) -> None:
        self.nbytes = 0

    def pin(self, address: int, nbytes: int) -> None:
        self.nbytes += nbytes

    def unpin(self, address: int, nbytes: int) -> None:
        self.nbytes -= nbytes


class PinningLink(Link):
    """To a device apart, with memory that is pinned for it."""

    shared = False

    def __init__(self, pin: bool) -> None:
        self.pins = Pins()
        super().__init__(torch.device("cpu"), pin=pin)

    def _pinning(self, pin: bool) -> Any:
        return self.pins if pin else None


@pytest.mark.parametrize("pageable", [(), SECTIONS[:1], SECTIONS[1:], SECTIONS])
def test_each_section_says_whether_its_memory_is_pinned(pageable: tuple[str, ...], tmp_path: Path) -> None:
    model = make_model()
    config = offload("offload-3-parameters", tmp_path, "at_step")
    for section in pageable:
        config["zero_optimization"][section]["pin_memory"] = False
    links: list[PinningLink] = []

    def link_to(pin: bool) -> Link:
        links.append(PinningLink(pin))
        return links[0]

    place = Topology(SoloComm(), torch.device("cpu"), 0, 0, 1, link=link_to)
    engine, *_ = wherry.initialize(
        model=model, optimizer=adamw(model.parameters()), config=settings(3, more=config), mesh=place
    )
    engine.backward(engine(*token_batch(0, 0, 0)))
    engine.step()
    link = links[0]
    weights, states = (link.pool(section not in pageable) for section in SECTIONS)
    assert states is link.host
    assert (weights is states) == (len(pageable) != 1)
    assert weights.counters.in_use > 0
    assert states.counters.in_use > 0
    pinned = {pool for pool, section in zip((weights, states), SECTIONS, strict=True) if section not in pageable}
    assert link.pins.nbytes == sum(pool.counters.allocated for pool in pinned)
    engine.close()
    assert link.pins.nbytes == 0


def test_a_copy_orders_the_stream_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def wait_event(self, event: Any) -> None:
            asked.append(event)

    def current(device: Any = None) -> Stream:
        asked.append(device)
        return Stream()

    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    second, event = torch.device("cuda", 1), object()
    _Copy(second, event, (), on_host=False).order()  # type: ignore[arg-type]
    assert asked == [second, event]
