"""Counted: what crosses between device and host in a step, what the disk moves, and where bytes rest."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import PeakGathered, TinyLM, engine_of, make_model, settings, token_batch, train_step
from tests.engine.test_counts import padded
from tests.tiers.rows import ROWS, offload, with_stores

from wherry.parallel.comm import Comm, SoloComm
from wherry.parallel.topology import Topology
from wherry.testing import run_ranks
from wherry.testing.late import Chaos, ChaosLink, topology
from wherry.tiers.buffers import PAGE, HostPool, Pinning
from wherry.tiers.storage import DiskCache
from wherry.tiers.streams import Link

SECTIONS = ("offload_param", "offload_optimizer")


def measure(row: str, folder: Path, policy: str, *, ranks: int = 1, k: int = 1, free: int | None = None) -> Any:
    """Bytes up and down in one step of the steady state, reads and writes of the disk, and memory, by rank."""
    model = make_model()

    def body(comm: Comm) -> dict[str, Any]:
        mine = copy.deepcopy(model)
        link = ChaosLink(Chaos(comm.rank), free=free)
        place, stores = with_stores(topology(comm, link.chaos, link=link))
        engine = engine_of(mine, settings(ROWS[row][0], k, more=offload(row, folder, policy, "bf16")), place)
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


def psi(ranks: int) -> tuple[int, int]:
    """Elements, padded, and of those the ones that are updated."""
    units = padded(make_model(), ranks)
    return sum(units.values()), sum(p.numel() for p in make_model().parameters())


@pytest.mark.parametrize(
    ("row", "ranks", "policy"),
    [
        ("offload-0", 1, "before_use"),
        ("offload-1", 2, "in_backward"),
        ("offload-2", 2, "at_step"),
        ("offload-2", 1, "in_backward"),
    ],
)
def test_zero_offload_moves_two_psi_each_way(row: str, ranks: int, policy: str, tmp_path: Path) -> None:
    """Gradients down once and weights up once, in the working dtype: 2 psi bytes each way, over all ranks."""
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


@pytest.mark.parametrize("policy", ["at_step", "in_backward"])
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
    assert memory["gradients", "host"].bytes_actual == 0 < memory["gradients", "host"].bytes_expected
    whole, updated = psi(1)
    assert memory["parameters", "disk"].bytes_actual == 2 * whole
    assert 10 * updated <= memory["optimizer", "disk"].bytes_actual <= 10 * whole


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
    place, stores = with_stores(topology(SoloComm()))
    engine = engine_of(model, settings(3, more=config), place)
    for step in range(2):
        train_step(engine, step, 0)
    engine.settle()
    memory = {(row.state, row.tier): row.bytes_actual for row in engine.memory()}
    assert memory["optimizer read", "host"] == 0
    assert memory["parameters read", "host"] == memory["parameters", "disk"]
    (store,) = stores
    assert (store.block_size, store.queue_depth) == (16384, 8)
    assert all(store.reserved)
    assert [*map(lambda path: Path(path).parent.parent, store.paths)] == drives
    engine.close()


def held_by(memory: Any, tier: str) -> int:
    return sum(row.bytes_actual for row in memory if row.tier == tier)


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize(
    ("row", "apart"),
    [
        ("offload-1", True),
        ("offload-3-parameters", False),
        ("parameters-only", True),
        ("disk-0", False),
        ("disk-3-parameters", True),
        ("infinity", True),
        ("disk-parameters", False),
    ],
)
def test_the_table_of_memory_is_what_there_is(row: str, apart: bool, tmp_path: Path) -> None:
    """Compare the table's expected and held bytes with those that pools have lent and the disk has reserved."""
    model = make_model()

    def body(comm: Comm) -> None:
        mine = copy.deepcopy(model)
        chaos = Chaos(comm.rank) if apart else None
        link = ChaosLink(chaos) if chaos else Link(torch.device("cpu"))
        place, stores = with_stores(replace(topology(comm, chaos), link=lambda pin: link))
        engine = engine_of(mine, settings(ROWS[row][0], more=offload(row, tmp_path, "before_use", "bf16")), place)
        live = PeakGathered(engine)
        for step in range(3):
            engine.backward(engine(*token_batch(step, 0, comm.rank)))
            now = engine.memory()  # with what is read ahead, and before a search may look less far ahead
            assert next((row.bytes_expected for row in now if row.state == "gathered"), 0) >= live.take()
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
        # Each flat has a weight, a state and a gradient at most, and each is a whole number of pages.
        pieces = 3 * sum(len(unit.flats) for unit in engine.units)
        # Without a device of its own, what is asked to rest on the host is told of there, and is the device's.
        asked = () if apart else ("parameters", "gradients", "optimizer")
        lent = held_by([row for row in memory if row.state not in asked], "host")
        on_host = {state for state, _, tier in engine.placement.rows() if tier == "host"}
        assert on_host <= {row.state for row in memory if row.tier == "host"}
        assert lent <= link.host.counters.in_use <= lent + 2 * PAGE * pieces
        stored = held_by(memory, "disk")
        reserved = sum(sum(store.reserved) for store in stores)
        assert stored <= reserved <= stored + 2 * PAGE * pieces
        engine.close()

    run_ranks(2, body)


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize(("count", "policy"), [(1, "in_backward"), (1, "at_step"), (2, "before_use")])
def test_no_more_records_are_in_memory_than_there_may_be(count: int, policy: str, tmp_path: Path) -> None:
    model = make_model()
    config = offload("disk-2", tmp_path, policy, optimizer={"buffer_count": count})
    link = Link(torch.device("cpu"))
    place = replace(topology(SoloComm()), link=lambda pin: link)
    engine = engine_of(model, settings(2, more=config), place)
    for step in range(3):
        train_step(engine, step, 0)
    engine.settle()
    (row,) = [row for row in engine.memory() if row.state == "optimizer read"]
    assert row.bytes_expected % count == row.bytes_actual == 0
    pages = count * -(-row.bytes_expected // count // PAGE) * PAGE
    assert 0 < link.host.counters.peak_in_use <= pages
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
    engine = engine_of(model, settings(3, more=config))
    take, most = DiskCache.take, dict[DiskCache, int]()

    def noted(cache: DiskCache, nbytes: int) -> torch.Tensor:
        buffer = take(cache, nbytes)
        if cache.keep:  # of weights: records of the optimizer's are not kept
            most[cache] = max(most.get(cache, 0), cache.held)
        return buffer

    monkeypatch.setattr(DiskCache, "take", noted)
    for step in range(3):
        train_step(engine, step, 0)
    ((cache, highest),) = most.items()
    assert 2 * cache.largest < highest <= 3 * cache.largest
    engine.close()
    assert cache.held == 0


class Pins(Pinning):
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

    def _make_pool(self, pin: bool) -> HostPool:
        return HostPool(pinning=self.pins if pin else None)


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
    engine = engine_of(model, settings(3, more=config), place)
    train_step(engine, 0, 0)
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
