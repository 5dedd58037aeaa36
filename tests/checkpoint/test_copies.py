"""States in memory under `async_save`: those of a device are copied beside training, which waits before it writes."""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import MODEL, Shape, assert_same, load_into, on, state_of, train
from tests.engine.harness import adamw, settings, token_batch
from tests.tiers.chaos import Chaos, ChaosLink, Late, poison, topology

import wherry
from wherry.checkpoint import copies, manifest, save
from wherry.checkpoint.collect import Piece
from wherry.checkpoint.held import Held
from wherry.checkpoint.rank_files import RankFiles
from wherry.checkpoint.slices import Run
from wherry.checkpoint.source import Source
from wherry.parallel.comm import Comm
from wherry.parallel.threads import run_ranks
from wherry.tiers.budget import Room
from wherry.tiers.buffers import host_copy
from wherry.tiers.homes import KeptMemory
from wherry.tiers.streams import Link
from wherry.tiers.tickets import Ticket

BEHIND = {"checkpoint": {"async_save": True}}
HOST = {"offload_optimizer": {"device": "cpu"}}
DISK = {"offload_optimizer": {"device": "nvme"}}
WEIGHTS = {"offload_param": {"device": "cpu"}}
BF16 = {"bf16": {"enabled": True}}
DELAYED = {"update_policy": "delayed", "delayed_update_warmup": 1}
# Stage, and more: states that rest on the device, in its dtypes, by its optimizers; and those that share it out.
DEVICES: dict[str, tuple[int, dict[str, Any]]] = {
    "0": (0, {}),
    "1, bf16": (1, BF16),
    "2, in backward": (2, {"wherry": {"update_policy": "in_backward"}}),
    "3, bf16": (3, BF16),
    "3, weights on the host": (3, {"zero_optimization": {"stage": 3, **WEIGHTS}}),
}
# Those that go down from no device: an update waits for the thread that copies them.
HOSTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2, states on the host": (2, {"zero_optimization": {"stage": 2, **HOST}}),
    "3, all on the host": (3, {"zero_optimization": {"stage": 3, **HOST, **WEIGHTS}, **BF16}),
    "3, in backward": (
        3,
        {"zero_optimization": {"stage": 3, **HOST, **WEIGHTS}, **BF16, "wherry": {"update_policy": "in_backward"}},
    ),
    "3, states on disk": (3, {"zero_optimization": {"stage": 3, **DISK, **WEIGHTS}, **BF16}),
    "3, delayed": (3, {"zero_optimization": {"stage": 3, **HOST}, "wherry": DELAYED}),
    "1, no device": (1, {}),
    "3, no device": (3, {}),
    "3, no device, delayed": (3, {"wherry": DELAYED}),
}


class Gate:
    """A thread that writes once training lets it, and copies host memory once training waits for that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        pieces, copy = copies.Copies.pieces, Held.copy

        def late(found: Any) -> Any:
            assert self.open.wait(60)
            yield from pieces(found)

        def late_copy(found: Held) -> None:
            while not any(kept.wanted for kept in found._kept) and not self.open.wait(0.001):
                pass
            copy(found)

        monkeypatch.setattr(copies.Copies, "pieces", late)
        monkeypatch.setattr(Held, "copy", late_copy)


class LatestLink(ChaosLink):
    """What goes aside is copied when somebody waits for it, and what was begun before it first; never else."""

    def __init__(self, chaos: Chaos) -> None:
        super().__init__(chaos)
        self.queue: deque[Late] = deque()
        self.bytes_aside = 0

    def aside(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        self.bytes_down += source.nbytes
        poison(target)

        def copy() -> None:
            while self.queue[0] is not late:
                self.queue[0].happen()
            self.queue.popleft()
            self.bytes_aside += source.nbytes
            with torch.no_grad():
                target.copy_(source)

        late = Late(self.chaos, copy)
        self.queue.append(late)
        return late


def engine_apart(
    comm: Comm, stage: int, more: dict[str, Any], accumulation: int = 1, apart: bool = True
) -> tuple[Any, LatestLink]:
    """On a device that is not the host, from and to which everything is copied late."""
    chaos = Chaos(7 * stage + comm.rank)
    link = LatestLink(chaos)
    model = copy.deepcopy(MODEL)
    config = settings(stage, accumulation, more=copy.deepcopy(more))
    config["wherry"] = {**more.get("wherry", {}), **BEHIND}
    mesh = topology(comm, chaos, link=link) if apart else topology(comm)
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config, mesh=mesh)
    return engine, link


@pytest.mark.parametrize("name", [*DEVICES, *HOSTS])
def test_what_is_saved_is_of_the_moment_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    stage, more = copy.deepcopy({**DEVICES, **HOSTS}[name])
    plain = {key: value for key, value in more.items() if key == "bf16"}
    if "disk" in name:
        (tmp_path / "states").mkdir()
        more["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(tmp_path / "states")
    apart = "no device" not in name
    gate = Gate(monkeypatch)
    moment = threading.Barrier(2)

    def saving(comm: Comm) -> Any:
        engine, link = engine_apart(comm, stage, more, apart=apart)
        train(engine, comm, 2)
        states = state_of(engine)
        before = link.bytes_down
        engine.save_checkpoint(tmp_path / "saved")
        copied = link.bytes_down - before
        losses = train(engine, comm, 3, first=2)
        moment.wait(60)  # an open gate lets the other rank's thread stir what is late
        gate.open.set()
        engine.wait_for_checkpoint()
        waited = engine._checkpoints.last.waited
        lent = link.aside_pool.counters.in_use
        engine.save_checkpoint(tmp_path / "saved")
        engine.wait_for_checkpoint()
        assert link.aside_pool.counters.in_use == lent == 0, "buffers are given back"
        after = state_of(engine)
        engine.close()
        return states, losses, after, copied, waited

    def undisturbed(comm: Comm) -> Any:
        engine, _ = engine_apart(comm, stage, more, apart=apart)
        train(engine, comm, 2)
        state_of(engine)  # which ends delayed updates
        losses = train(engine, comm, 3, first=2)
        found = losses, state_of(engine)
        engine.close()
        return found

    found = run_ranks(2, saving)
    states, losses, after, copied, _ = found[0]
    expected = run_ranks(2, undisturbed)[0]
    assert losses == expected[0]
    assert_same(after, expected[1])
    assert (copied > 0) is (name in DEVICES)
    # Ranks are threads of one gate: that of one lets the other's copy too.
    assert (max(waited for *_, waited in found) > 0) is (name in HOSTS)
    for tag, wanted in (("global_step2", states), ("global_step5", after)):
        loaded = load_into(Shape(1, 0, more=plain), tmp_path / "saved", tag=tag)
        for key, value in wanted.items():  # a working weight may be rounded otherwise
            assert (plain and key.endswith(":working")) or torch.equal(loaded[key], value), (tag, key)


@pytest.mark.parametrize("policy", ["at_step", "in_backward"])
def test_what_is_waited_for_at_once_is_copied_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Copies are made in order: training that needs its weights does not wait for the moments."""
    gate = Gate(monkeypatch)
    seen: list[list[copies.Down]] = []
    look = save.what_goes_down

    def noted(*given: Any) -> list[copies.Down]:
        seen.append(look(*given))
        return seen[-1]

    monkeypatch.setattr(save, "what_goes_down", noted)

    def body(comm: Comm) -> None:
        engine, link = engine_apart(comm, 0, {"wherry": {"update_policy": policy}})
        train(engine, comm, 1)
        engine.save_checkpoint(tmp_path)
        weights = sum(4 * flat.layout.payload for flat in engine._session().flats)
        assert link.bytes_aside == weights and len(link.queue) > 0
        engine(*token_batch(1, 0, comm.rank))
        assert link.bytes_aside == weights, "a forward waits for no moments"
        order = [down.flat for down in seen[0]]
        flats = list(engine._session().flats)
        later = [flat for flat in order if flat is not None]
        assert order == [None] * (len(order) - len(later)) + later
        assert later == (flats[::-1] if policy == "in_backward" else flats)
        gate.open.set()
        engine.close()

    run_ranks(1, body)


@pytest.mark.parametrize("apart", [True, False])
def test_sums_and_weights_that_others_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool) -> None:
    """Sums of an open window, and weights through the model's own parameters: their copies come first."""
    gate = Gate(monkeypatch)

    def body(comm: Comm) -> Any:
        engine, _ = engine_apart(comm, 0, {}, accumulation=2, apart=apart)
        train(engine, comm, 1, accumulation=2)
        engine.backward(engine(*token_batch(1, 0, comm.rank)))
        engine.step()
        states, norm = state_of(engine), 0.0
        engine.save_checkpoint(tmp_path)
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.zero_()
        engine.zero_grad()
        train(engine, comm, 1, first=5, accumulation=2)
        gate.open.set()
        engine.load_checkpoint(tmp_path)  # it waits for the save
        assert_same(state_of(engine), states)
        engine.backward(engine(*token_batch(1, 1, comm.rank)))
        engine.step()
        norm = engine.get_global_grad_norm()
        after = state_of(engine)
        engine.close()
        return norm, after

    def straight(comm: Comm) -> Any:
        engine, _ = engine_apart(comm, 0, {}, accumulation=2, apart=apart)
        train(engine, comm, 2, accumulation=2)
        norm, after = engine.get_global_grad_norm(), state_of(engine)
        engine.close()
        return norm, after

    (norm, after), (expected, weights) = run_ranks(1, body)[0], run_ranks(1, straight)[0]
    assert norm == expected
    assert_same(after, weights)


@pytest.mark.parametrize("edit", [True, False])
def test_between_delayed_updates_an_edit_and_a_step_wait_for_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: bool
) -> None:
    gate = Gate(monkeypatch)

    def body(comm: Comm, behind: bool) -> None:
        model = copy.deepcopy(MODEL)
        config = settings(3, more={"wherry": {**DELAYED, "checkpoint": {"async_save": behind}}})
        engine, *_ = wherry.initialize(
            model=model, optimizer=adamw(model.parameters()), mesh=topology(comm), config=config
        )
        train(engine, comm, 3)
        engine.save_checkpoint(tmp_path, tag="behind" if behind else "straight")
        for state in engine._session().states.values() if edit else ():
            with state.opened(write=True) as segments:
                for values in segments:
                    values["exp_avg"].zero_()
        if not edit:
            train(engine, comm, 1, first=3)
        gate.open.set()
        engine.close()

    run_ranks(2, lambda comm: body(comm, True))
    run_ranks(2, lambda comm: body(comm, False))
    with Source(tmp_path / "behind") as found, Source(tmp_path / "straight") as expected:
        states = {state for entry in found.manifest.entries.values() for state in entry.states}
        assert states == {"weight", "exp_avg", "exp_avg_sq", manifest.BEHIND}
        for name, entry in expected.manifest.entries.items():
            assert entry.states.keys() == found.manifest.entries[name].states.keys()
            for state in entry.states:
                assert torch.equal(found.tensor(name, state), expected.tensor(name, state)), (name, state)


def test_a_save_that_fails_leaves_nothing_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)

    def full(files: Any, name: str, tensor: torch.Tensor) -> str:
        raise OSError(28, "No space left on device", str(files.partial))

    def body(comm: Comm) -> None:
        engine, link = engine_apart(comm, 1, {})
        train(engine, comm, 1)
        lent = link.aside_pool.counters.in_use
        monkeypatch.setattr(RankFiles, "put", full)
        engine.save_checkpoint(tmp_path)
        assert link.aside_pool.counters.in_use > lent
        gate.open.set()
        with pytest.raises(wherry.WherryError, match="No space left on device"):
            engine.wait_for_checkpoint()
        assert link.aside_pool.counters.in_use == lent
        train(engine, comm, 1, first=1)
        engine.close()

    run_ranks(1, body)


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_without_the_memory_for_copies_training_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int
) -> None:
    """All ranks do the same, say why once, and the checkpoint is what it would be."""
    monkeypatch.setattr(copies, "rooms", lambda: [Room("a machine", "on a machine", free)])
    given = Shape(2, 3, more={"wherry": BEHIND})

    def body(engine: Any, comm: Comm) -> Any:
        train(engine, comm, 1)
        states = state_of(engine)
        engine.save_checkpoint(tmp_path)
        behind = engine._checkpoints.last.behind
        engine.wait_for_checkpoint()
        return behind, states

    found = on(given, body)
    assert [behind for behind, _ in found] == [free > 0] * 2
    told = [text for text in caplog.messages if "training stands still meanwhile" in text]
    assert len(told) == (free == 0)
    if told:
        assert "copies of the states take" in told[0] and "and 0 B are free there" in told[0]
    assert_same(load_into(Shape(1, 0), tmp_path), found[0][1])


@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}, {"wherry": {"state_dtype": "int8"}}])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_copies_need_is_known_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, more: dict[str, Any]
) -> None:
    needed: list[int] = []
    made: list[int] = []
    take, copy, shortage = copies.copied, KeptMemory.copy, save.shortage

    def counted(item: Any) -> Any:
        found = take(item)
        if isinstance(found, Piece):
            made.append(found.values.nbytes + (0 if found.scales is None else found.scales.nbytes))
        return found

    def kept(memory: Any) -> None:
        made.append(0 if memory._memory is None else memory._memory.nbytes)
        copy(memory)

    def noted(session: Any, on_host: int, downs: Any) -> Any:
        needed.append(on_host)
        return shortage(session, on_host, downs)

    monkeypatch.setattr(KeptMemory, "copy", kept)
    monkeypatch.setattr(copies, "copied", counted)
    monkeypatch.setattr(save, "shortage", noted)

    def body(engine: Any, comm: Comm) -> None:
        train(engine, comm, 1)
        engine.backward(engine(*token_batch(1, 0, comm.rank)))  # a window is open
        engine.save_checkpoint(tmp_path)
        engine.wait_for_checkpoint()

    own = {"wherry": {**more.get("wherry", {}), **BEHIND}}
    on(Shape(2, stage, 2, more={**more, **own}), body)
    assert len(needed) == 2 and made
    # Slices of a block's codes may need its scale twice.
    assert 0 <= sum(made) - sum(needed) <= 0.02 * sum(made)


def test_a_copy_of_the_host_is_whole_and_its_own() -> None:
    for numel in (0, 7, 1 << 20):
        source = torch.arange(numel, dtype=torch.float32)
        found = host_copy(source)
        expected = source.clone()
        source.fill_(-1)
        assert torch.equal(found, expected) and found.dtype == source.dtype


def short(wanted: int, rooms: list[list[Room]], link: Link, downs: Sequence[copies.Down] = ()) -> str | None:
    comm = SimpleNamespace(gather_objects=lambda mine: [(mine[0], each) for each in rooms])
    copies_of: Any = SimpleNamespace(comm=comm, link=link)
    return copies.shortage(copies_of, wanted, downs)


def test_memory_is_shared_by_who_is_on_a_machine_and_in_a_container() -> None:
    """Names say nothing: two containers of one name share a machine, or are on two."""
    link = Link(torch.device("cpu"))
    here = [[Room("a", "on host", 100), Room(f"a {group}", "in the container host", 90)] for group in range(2)]
    there = [[Room("b", "on host", 100), Room("b 0", "in the container host", 90)]]
    assert short(40, here, link) is None
    assert "take 120 B of host memory on host, and 100 B are free there" in str(short(60, here, link))
    assert short(60, here[:1] + there, link) is None
    assert "take 85 B of host memory in the container host, and 90 B" in str(short(85, here[:1] + there, link))


def test_memory_that_was_pinned_counts_where_these_copies_can_use_it() -> None:
    link = Link(torch.device("cpu"))
    size = 1 << 20

    def down(nbytes: int) -> copies.Down:
        return copies.Down([Piece("w", "weight", Run.of((nbytes,)), torch.empty(nbytes, dtype=torch.uint8))])

    none = [[Room("a", "on a", 0)]]
    link.host.give(link.host.take(size))  # as gradients do, which take it again
    assert short(0, none, link, [down(size)]) is not None
    link.aside_pool.give(link.aside_pool.take(size))
    assert short(0, none, link, [down(size)]) is None
    for other in ([down(size)] * 2, [down(2 * size)], [down(size // 2)]):
        assert short(0, none, link, other) is not None
    assert short(1, none, link, [down(size)]) is not None, "what is on the host has no part in it"
    link.close()
