"""`async_save`: what is saved is of the moment of the call, and training goes on while it is written."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import MODEL, Shape, assert_same, load_into, on, save_from, state_of, train
from tests.engine.harness import adamw, settings, token_batch

import wherry
from wherry.checkpoint import files, staging
from wherry.checkpoint import folder as folders
from wherry.checkpoint.format import RankFiles
from wherry.checkpoint.staging import Staging
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.testing.late import Chaos, ChaosLink, Late, poison, topology
from wherry.tickets import Ticket
from wherry.tiers.host import Room

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
# Those that go down from no device.
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
    "3, no device, delayed": (3, {"wherry": DELAYED}),
}


class Gate:
    """A thread that writes once training lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        pieces = Staging.pieces

        def late(found: Any) -> Any:
            assert self.open.wait(60)
            yield from pieces(found)

        monkeypatch.setattr(Staging, "pieces", late)


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
    comm: Comm, stage: int, more: dict[str, Any], apart: bool = True, optimizer: Any = adamw
) -> tuple[Any, LatestLink]:
    """On a device that is not the host, from and to which everything is copied late."""
    chaos = Chaos(7 * stage + comm.rank)
    link = LatestLink(chaos)
    model = copy.deepcopy(MODEL)
    config = settings(stage, more=copy.deepcopy(more))
    config["wherry"] = {**more.get("wherry", {}), **BEHIND}
    mesh = topology(comm, chaos, link=link) if apart else topology(comm)
    engine, *_ = wherry.initialize(model=model, optimizer=optimizer(model.parameters()), config=config, mesh=mesh)
    return engine, link


@pytest.mark.parametrize("name", [*DEVICES, *HOSTS])
def test_what_is_saved_is_of_the_moment_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """States on disk are written before the call returns, and that is said; all others behind training."""
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
        assert (tmp_path / "saved" / "latest").exists() is ("disk" in name)
        copied = link.bytes_down - before
        losses = train(engine, comm, 3, first=2)
        moment.wait(60)  # an open gate lets the other rank's thread stir what is late
        gate.open.set()
        engine.wait_for_checkpoint()
        lent = link.aside_pool.counters.in_use
        engine.save_checkpoint(tmp_path / "saved")
        engine.wait_for_checkpoint()
        assert link.aside_pool.counters.in_use == lent == 0, "buffers are given back"
        after = state_of(engine)
        engine.close()
        return states, losses, after, copied

    def undisturbed(comm: Comm) -> Any:
        engine, _ = engine_apart(comm, stage, more, apart=apart)
        train(engine, comm, 2)
        state_of(engine)  # which ends delayed updates
        losses = train(engine, comm, 3, first=2)
        found = losses, state_of(engine)
        engine.close()
        return found

    states, losses, after, copied = run_ranks(2, saving)[0]
    expected = run_ranks(2, undisturbed)[0]
    assert losses == expected[0]
    assert_same(after, expected[1])
    assert (copied > 0) is (name in DEVICES)
    told = [text for text in caplog.messages if "as states on disk are read as they are written" in text]
    assert len(told) == (2 if "disk" in name else 0)
    for tag, wanted in (("global_step2", states), ("global_step5", after)):
        loaded = load_into(Shape(1, 0, more=plain), tmp_path / "saved", tag=tag)
        for key, value in wanted.items():  # a working weight may be rounded otherwise
            assert (plain and key.endswith(":working")) or torch.equal(loaded[key], value), (tag, key)


def test_what_is_waited_for_at_once_is_copied_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are made in order: training that needs its weights does not wait for the moments."""
    gate = Gate(monkeypatch)

    def body(comm: Comm) -> None:
        engine, link = engine_apart(comm, 0, {})
        train(engine, comm, 1)
        engine.save_checkpoint(tmp_path)
        weights = sum(4 * p.numel() for p in engine.module.parameters())
        assert link.bytes_aside == weights and len(link.queue) > 0
        engine(*token_batch(1, 0, comm.rank))
        assert link.bytes_aside == weights, "a forward waits for no moments"
        gate.open.set()
        engine.close()

    run_ranks(1, body)


@pytest.mark.parametrize("apart", [True, False])
def test_weights_that_others_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool) -> None:
    """Through the model's own parameters, right after the call."""
    gate = Gate(monkeypatch)

    def body(comm: Comm) -> None:
        engine, _ = engine_apart(comm, 0, {}, apart=apart)
        train(engine, comm, 1)
        states = state_of(engine)
        engine.save_checkpoint(tmp_path)
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.zero_()
        train(engine, comm, 1, first=5)
        gate.open.set()
        engine.load_checkpoint(tmp_path)  # it waits for the save
        assert_same(state_of(engine), states)
        engine.close()

    run_ranks(1, body)


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


ENDING = """
import sys, time
from pathlib import Path
from tests.checkpoint.harness import Shape, on, train
from wherry.checkpoint import files
from wherry.checkpoint.staging import Staging

files.BLOCK = 4096  # so that there is work for threads
pieces = Staging.pieces

def late(found):
    time.sleep(0.5)  # the interpreter waits for its threads by then
    yield from pieces(found)

Staging.pieces = late
import wherry
from tests.engine.harness import adamw, make_model, settings

model = make_model()
config = settings(0, more={"wherry": {"checkpoint": {"async_save": True}}})
engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
engine.save_checkpoint(Path(sys.argv[1]))
print(Path(sys.argv[1], "latest").exists())
"""


def test_a_program_that_ends_waits_for_its_last_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors take no more tasks by then."""
    monkeypatch.setattr(files, "BLOCK", 4096)
    done = subprocess.run([sys.executable, "-c", ENDING, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert folders.newest_whole(tmp_path) == "global_step0"


def test_a_checkpoint_that_goes_while_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process keeps the last ones only."""
    for tag in ("first", "second"):
        save_from(Shape(), tmp_path, tag=tag)
    listed = folders.newest_first(tmp_path)
    (tmp_path / "second" / "manifest.json").unlink()
    monkeypatch.setattr(folders, "newest_first", lambda folder: listed)
    assert folders.newest_whole(tmp_path) == "first"
    assert "second is passed over" in caplog.text


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_without_the_memory_for_copies_training_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int
) -> None:
    """All ranks do the same, say why once, and the checkpoint is what it would be."""
    monkeypatch.setattr(staging, "rooms", lambda: [Room("a machine", "on a machine", free)])
    gate = Gate(monkeypatch)

    def body(engine: Any, comm: Comm) -> Any:
        train(engine, comm, 1)
        states = state_of(engine)
        engine.save_checkpoint(tmp_path)
        comm.barrier()
        assert (tmp_path / "latest").exists() is (free == 0)
        gate.open.set()
        engine.wait_for_checkpoint()
        return states

    states = on(Shape(2, 3, more={"wherry": BEHIND}), body)[0]
    told = [text for text in caplog.messages if "training stands still meanwhile" in text]
    assert len(told) == (free == 0)
    if told:
        assert "copies of the states take" in told[0] and "and 0 B are free there" in told[0]
    assert_same(load_into(Shape(1, 0), tmp_path), states)


def test_memory_is_shared_by_who_is_on_a_machine_and_in_a_container() -> None:
    """Names say nothing: two containers of one name share a machine, or are on two."""

    def short(wanted: int, rooms: list[list[Room]]) -> str | None:
        return staging._shortage([(wanted, each) for each in rooms])

    here = [[Room("a", "on host", 100), Room(f"a {group}", "in the container host", 90)] for group in range(2)]
    there = [[Room("b", "on host", 100), Room("b 0", "in the container host", 90)]]
    assert short(40, here) is None
    assert "take 120 B of host memory on host, and 100 B are free there" in str(short(60, here))
    assert short(60, here[:1] + there) is None
    assert "take 85 B of host memory in the container host, and 90 B" in str(short(85, here[:1] + there))


def test_memory_that_was_pinned_counts_as_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier save has pinned is there for the next one, and for nobody else."""
    needed: list[int] = []

    def noted(found: list[Any]) -> None:
        needed.extend(nbytes for nbytes, _ in found)

    monkeypatch.setattr(staging, "_shortage", noted)

    def body(comm: Comm) -> None:
        engine, link = engine_apart(comm, 1, {})
        for _ in range(2):
            train(engine, comm, 1)
            engine.save_checkpoint(tmp_path)
            engine.wait_for_checkpoint()
        assert needed[0] > 0 >= needed[1] == needed[0] - link.aside_pool.counters.allocated
        engine.close()

    run_ranks(1, body)
