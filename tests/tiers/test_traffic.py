"""Counted: what crosses between device and host in a step, what the disk moves, and where bytes rest."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import PeakGathered, TinyLM, engine_of, make_model, settings, token_batch, train, train_step
from tests.engine.test_counts import padded
from tests.life import ApartLink
from tests.tiers.rows import ROWS, offload, with_stores

from wherry.parallel.comm import Comm, SoloComm
from wherry.testing import run_ranks
from wherry.testing.late import Chaos, ChaosLink, topology
from wherry.tiers.buffers import PAGE
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
    [("offload-0", 1, "before_use"), ("offload-1", 2, "in_backward"), ("offload-2", 2, "at_step")],
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
    whole, updated = psi(1)
    [seen] = measure("offload-2", tmp_path, "at_step", k=4, free=free)
    assert seen["down"] == 2 * whole * times
    memory = seen["memory"]
    # Working weight and low half 2 each, moments 4 each; and 2 for the gradient on its way, or for its sum.
    # Padding between parameters is updated with them, that at the end of a flat has no state.
    assert 12 * updated <= memory["optimizer", "host"].bytes_actual <= 12 * whole
    assert memory["gradients", "host"].bytes_actual >= 2 * whole
    assert memory["gradients", "device"].bytes_actual == (2 * whole if free is None else 0)
    assert memory["parameters", "device"].bytes_actual == 2 * whole


def test_parameters_on_the_host_come_up_for_forward_and_backward(tmp_path: Path) -> None:
    units = padded(make_model(), 1)
    whole = sum(units.values())
    [seen] = measure("offload-3-parameters", tmp_path, "before_use")
    # The root unit stays for the backward. Updated weights are where they rest already.
    assert seen["up"] == 2 * (2 * whole - units["root"])
    assert seen["down"] == 2 * whole
    assert seen["allocated in the last step"] == 0


def test_the_disk_moves_each_record_once(tmp_path: Path) -> None:
    """One read and one write of the packed record of a unit in a step; its gradients have no memory of their own."""
    whole, updated = psi(1)
    [seen] = measure("disk-2", tmp_path, "in_backward")
    memory = seen["memory"]
    records = memory["optimizer", "disk"].bytes_actual
    assert 12 * updated <= records <= 12 * whole
    assert records <= seen["read"] == seen["written"] <= records + PAGE * len(padded(make_model(), 1))
    assert seen["allocated in the last step"] == 0
    assert memory["gradients", "device"].bytes_actual == memory["gradients", "host"].bytes_actual == 0
    assert memory["gradients", "host"].bytes_expected > 0


def test_optimizer_state_on_disk_does_not_stay_in_the_room_for_weights(tmp_path: Path) -> None:
    """On the same folders: a record is read once and written once, and what is kept in memory is weights."""
    config = offload("infinity", tmp_path, "before_use", aio={"block_size": 16384, "queue_depth": 4, "thread_count": 2})
    drives = [tmp_path / "one", tmp_path / "two"]
    for drive in drives:
        drive.mkdir()
    for section in SECTIONS:
        config["zero_optimization"][section]["nvme_path"] = [*map(str, drives)]
    config["zero_optimization"]["offload_param"]["buffer_count"] = 6
    place, stores = with_stores(topology(SoloComm()))
    engine = engine_of(make_model(), settings(3, more=config), place)
    train(engine, 2)
    engine.settle()
    memory = {(row.state, row.tier): row.bytes_actual for row in engine.memory()}
    assert memory["optimizer read", "host"] == 0
    assert memory["parameters read", "host"] == memory["parameters", "disk"]
    (store,) = stores
    assert (store.block_size, store.queue_depth) == (16384, 8) and all(store.reserved)
    assert [Path(path).parent.parent for path in store.paths] == drives
    engine.close()


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize(
    ("row", "apart"),
    [
        ("offload-3-parameters", False),
        ("parameters-only", True),
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
        lent = sum(row.bytes_actual for row in memory if row.tier == "host" and row.state not in asked)
        on_host = {state for state, _, tier in engine.placement.rows() if tier == "host"}
        assert on_host <= {row.state for row in memory if row.tier == "host"}
        assert lent <= link.host.counters.in_use <= lent + 2 * PAGE * pieces
        stored = sum(row.bytes_actual for row in memory if row.tier == "disk")
        reserved = sum(sum(store.reserved) for store in stores)
        assert stored <= reserved <= stored + 2 * PAGE * pieces
        engine.close()

    run_ranks(2, body)


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize(
    ("row", "count", "policy"),
    [("disk-2", 1, "in_backward"), ("disk-2", 2, "before_use"), ("disk-parameters", 3, "at_step")],
)
def test_no_more_records_are_in_memory_than_there_may_be(row: str, count: int, policy: str, tmp_path: Path) -> None:
    """Read ahead, in use, being updated, or kept: at most `buffer_count` at a time."""
    section = "offload_optimizer" if row == "disk-2" else "offload_param"
    config = offload(row, tmp_path, policy)
    config["zero_optimization"][section]["buffer_count"] = count
    link = Link(torch.device("cpu"))
    engine = engine_of(
        make_model(partial(TinyLM, blocks=6)),
        settings(ROWS[row][0], more=config),
        replace(topology(SoloComm()), link=lambda pin: link),
    )
    train(engine, 3)
    engine.settle()
    (read,) = [row for row in engine.memory() if row.state in ("optimizer read", "parameters read")]
    assert read.bytes_expected % count == 0 and (read.bytes_actual == 0 or row != "disk-2")
    pages = count * -(-read.bytes_expected // count // PAGE) * PAGE
    assert 0 < link.host.counters.peak_in_use <= pages
    if policy == "before_use":
        engine.backward(engine(*token_batch(3, 0, 0)))
        assert link.host.counters.in_use > 0, "the next forward waits for its first units: they are read ahead"
        engine.zero_grad()
        assert link.host.counters.in_use == 0
    engine.close()


@pytest.mark.parametrize("pageable", [(), SECTIONS[:1], SECTIONS[1:]])
def test_each_section_says_whether_its_memory_is_pinned(pageable: tuple[str, ...], tmp_path: Path) -> None:
    config = offload("offload-3-parameters", tmp_path, "at_step")
    for section in pageable:
        config["zero_optimization"][section]["pin_memory"] = False
    links: list[Link] = []

    def link_to(pin: bool) -> Link:
        links.append(ApartLink(torch.device("cpu"), pin=pin))
        return links[-1]

    engine = engine_of(make_model(), settings(3, more=config), replace(topology(SoloComm()), link=link_to))
    train_step(engine, 0, 0)
    engine.settle()
    (link,) = links
    weights, states = (link.pool(section not in pageable) for section in SECTIONS)
    assert states is link.host and (weights is states) == (not pageable)
    rows = {row.state: row.bytes_actual for row in engine.memory() if row.tier == "host"}
    in_weights = rows["parameters"] if pageable else sum(rows.values())
    assert in_weights <= weights.counters.in_use <= in_weights + 40 * PAGE < states.counters.in_use + 40 * PAGE
    engine.close()
