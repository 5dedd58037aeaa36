"""A process fails, stalls, goes another way or dies: the others say who, and what it said, and do not hang."""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from tests.cli.programs import environment, free_port
from tests.forks import ENGINE, Child, Forks

from wherry.errors import PeerError
from wherry.parallel import peers as peers_room
from wherry.parallel.peers import Peers

SCRIPT = """
import os, sys, threading, time
import torch, wherry
import torch.distributed as dist
from wherry.errors import PeerError, DivergenceError
from wherry.parallel import topology

torch.set_num_threads(1)
mode = sys.argv[1]
comm = topology.find(timeout=60.0).data
warm = torch.ones(2)
comm.all_reduce(warm).wait()
values = comm.gather_objects({"rank": comm.rank, "more": "x" * 100 * comm.rank})
assert [v["rank"] for v in values] == list(range(comm.size)), values
comm.barrier()
inside, across = (comm.within(2), comm.across(2)) if mode == "groups" else (None, None)
begun = time.monotonic()
wait = lambda label="blocks.5": comm.all_reduce(torch.ones(4), label=label).wait()

def tell():
    open(f"{mode}.{comm.rank}", "w").close()

def others_have_told():
    dead = {1} if "dies" in mode else set()
    names = [f"{mode}.{rank}" for rank in {*range(comm.size)} - dead - {comm.rank}]
    while not all(map(os.path.exists, names)):
        if time.monotonic() - begun > 40:
            return False
        time.sleep(0.02)
    return True

try:
    if mode == "fails":
        if comm.rank == 1:
            comm.tell(OSError("no space left"))
            print("they know:", others_have_told(), flush=True)
        else:
            wait()
    elif mode == "fails in a reduce-scatter":
        if comm.rank == 1:
            comm.tell(OSError("no space left"))
            print("they know:", others_have_told(), flush=True)
        else:
            comm.reduce_scatter(torch.ones(4), torch.ones(8), label="blocks.5").wait()
    elif mode == "alike":
        for _ in range(3):
            comm.fail("a bad batch")
            if comm.rank == 0:
                time.sleep(1.2)
            wait()
    elif mode == "uncaught":
        if comm.rank == 0:
            raise KeyError("a loader's mistake")
        wait()
    elif mode == "dies":
        if comm.rank == 1:
            os._exit(3)
        wait()
    elif mode == "dies in the middle":
        if comm.rank == 1:
            time.sleep(0.5)
            os._exit(3)
        comm.reduce_scatter(torch.ones(4), torch.ones(8), label="blocks.5").wait()
    elif mode == "no memory":
        whole, shard = torch.zeros(1 << 24), torch.zeros(1 << 23)
        if comm.rank == 1:
            import resource
            held = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) << 10
            resource.setrlimit(resource.RLIMIT_DATA, (held + (1 << 23), resource.RLIM_INFINITY))
        comm.reduce_scatter(shard, whole, label="blocks.4").wait()
        comm.all_gather(whole, shard, label="blocks.4").wait()
        try:
            comm.reduce_scatter(shard[: 1 << 21], whole[: 1 << 22], label="blocks.5").wait()
        except MemoryError as error:
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            print("MemoryError", error, flush=True)
            print("they know:", others_have_told(), flush=True)
    elif mode == "late":
        comm.peers.timeout = 3.0  # from here on: processes do not begin all at once
        if comm.rank != 1:
            wait()
        else:
            others_have_told()
    elif mode == "other":
        if comm.rank == 1:
            comm.all_reduce(torch.ones(4), label="blocks.6").wait()
        else:
            comm.all_gather(torch.ones(4), torch.ones(2), label="blocks.5").wait()
    elif mode == "groups":
        for group in (inside, across):
            tensor = torch.tensor([float(comm.rank)])
            group.all_reduce(tensor).wait()
            print("sum", float(tensor), flush=True)
            group.close()
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            def made(rank):
                generator = torch.Generator().manual_seed(rank)  # of whole numbers, whose sums have one value
                return torch.randint(-8, 8, (4 * 999,), generator=generator).to(dtype)
            whole, total = made(comm.rank), made(0)
            for rank in range(1, 4):
                total += made(rank)
            shard = whole[comm.rank * 999 : (comm.rank + 1) * 999]
            comm.reduce_scatter(shard, whole).wait()
            print("same", torch.equal(shard, total[comm.rank * 999 : (comm.rank + 1) * 999]), flush=True)
            comm.all_gather(whole, shard).wait()
            print("same", torch.equal(whole, total), flush=True)
            again = torch.zeros_like(whole)
            comm.all_gather(again, shard.clone()).wait()
            print("same", torch.equal(again, total), flush=True)
    elif mode == "alone":
        comm.meet("state_dict()") if comm.rank == 0 else wait()
    elif mode in ("closes", "ends"):
        if comm.rank == 0:
            comm.meet("state_dict()")
    elif mode in ("closes early", "ends early"):
        if comm.rank == 0:
            wait()
        elif mode == "closes early":
            comm.peers.close()
            others_have_told()
    elif mode == "meets":
        for turn in range(4):
            if turn % 2 == comm.rank:
                time.sleep(0.02)
            comm.meet("save_checkpoint()")
            if turn == 2:
                wait()
        print("met", flush=True)
        comm.meet("state_dict()" if comm.rank else "save_checkpoint()")
    print("ended well", flush=True)
except (PeerError, DivergenceError) as error:
    print(type(error).__name__, error, flush=True)
    print("after", time.monotonic() - begun, flush=True)
    tell()
    if comm.rank == 0:
        others_have_told()  # its process holds the store
    os._exit(0)
tell()
if mode not in ("ends", "ends early"):
    comm.close()
"""


# Groups one after another, of which the first rank, whose process holds the store, is the last to leave each.
AGAIN = """
import time
import torch, torch.distributed as dist
from wherry.parallel.topology import find

for turn in range(3):
    comm = find(timeout=60.0).data
    total = torch.ones(1)
    comm.all_reduce(total).wait()
    assert total.item() == comm.size
    if comm.rank == 0:
        time.sleep(0.2)
    comm.close()
    assert not dist.is_initialized()
print("ended well", flush=True)
"""

# And how many ranks take part in it.
MODES = {
    "fails": 3, "alike": 2, "uncaught": 2, "dies": 3, "dies in the middle": 2, "late": 3, "other": 2, "groups": 4,
    "no memory": 2, "alone": 2, "closes": 2, "ends": 2, "meets": 2,
    "fails in a reduce-scatter": 2, "closes early": 2, "ends early": 2,
}  # fmt: skip
Outputs = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outputs]:
    """What each rank has printed, by mode. Most of them wait most of the time, so all of them run at once."""
    folder = tmp_path_factory.mktemp("peers")
    script = folder / "ranks.py"
    script.write_text(SCRIPT)
    children: dict[str, list[Child]] = {}
    with Forks("wherry.parallel.topology", *ENGINE) as forks:
        for mode, size in MODES.items():
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
            children[mode] = []
            for rank in range(size):
                place = {**environment(), **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                with open(folder / f"{mode}-{rank}.txt", "wb") as file:
                    command = [str(script), mode]
                    child = forks.start(command, stdout=file, stderr=file, env=place, folder=folder)
                children[mode].append(child)

        def printed(mode: str) -> list[str]:
            for child in children[mode]:
                child.wait(90)
            return [(folder / f"{mode}-{rank}.txt").read_text() for rank in range(MODES[mode])]

        try:
            yield printed
        finally:
            for child in itertools.chain(*children.values()):
                child.kill()


def test_a_rank_may_begin_the_next_group_before_another_has_left_the_last(tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    script.write_text(AGAIN)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    with Forks("wherry.parallel.topology", *ENGINE) as forks:
        logs = [tmp_path / f"{rank}.log" for rank in range(2)]
        children = []
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                place = environment(**shared, RANK=str(rank), LOCAL_RANK=str(rank))
                children.append(forks.start([str(script)], stdout=file, stderr=file, env=place, folder=tmp_path))
        for child in children:
            child.wait(timeout=60)
    assert all("ended well" in log.read_text() for log in logs), [log.read_text() for log in logs]


def seconds(output: str) -> float:
    return float(output.split("after ")[1].split()[0])


def test_processes_learn_of_a_failure(outputs: Outputs) -> None:
    printed = outputs("fails")
    for rank in (0, 2):
        assert "PeerError rank 1 has failed" in printed[rank], printed[rank]
        assert "all_reduce of blocks.5" in printed[rank]
        assert "OSError: no space left" in printed[rank]
    assert "they know: True" in printed[1]  # before the failed rank's process has ended


def test_a_rank_in_a_reduce_scatter_learns_of_a_failure(outputs: Outputs) -> None:
    """Though the rank that has failed lives on, and its connection with it."""
    printed = outputs("fails in a reduce-scatter")
    assert re.search("PeerError rank 1 has failed.* reduce_scatter of blocks.5 .*no space left", printed[0]), printed
    assert "they know: True" in printed[1]


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory, and what is held, are as Linux has them")
def test_processes_learn_that_one_has_no_memory_left_in_a_collective(outputs: Outputs) -> None:
    """A reduce-scatter of little receives what the others have; all else has all it needs. The rank lives on."""
    printed = outputs("no memory")
    assert "MemoryError rank 1: no memory was left for reduce_scatter of blocks.5" in printed[1], printed[1]
    assert "they know: True" in printed[1]
    assert "PeerError rank 1 has failed" in printed[0], printed[0]
    assert "no memory was left for reduce_scatter of blocks.5" in printed[0]
    assert seconds(printed[0]) < 50


def test_processes_that_fail_alike_go_on(outputs: Outputs) -> None:
    assert all("ended well" in output for output in outputs("alike"))


def test_processes_learn_of_an_error_that_nobody_caught(outputs: Outputs) -> None:
    printed = outputs("uncaught")
    assert "KeyError" in printed[0]
    assert "rank 0 has failed" in printed[1], printed[1]
    assert "a loader's mistake" in printed[1]


def test_processes_name_the_rank_that_died(outputs: Outputs) -> None:
    printed = outputs("dies")
    for rank in (0, 2):
        assert "PeerError" in printed[rank], printed[rank]
        assert re.search("rank 1 (is gone|has failed.*it is gone)", printed[rank]), printed[rank]


def test_a_reduce_scatter_whose_rank_died(outputs: Outputs) -> None:
    """gloo says at once that its connection is gone."""
    output = outputs("dies in the middle")[0]
    assert "reduce_scatter of blocks.5" in output and "rank 1 is gone" in output, output
    assert seconds(output) < 50


def test_processes_name_the_rank_that_did_not_arrive(outputs: Outputs) -> None:
    printed = outputs("late")
    for rank in (0, 2):
        assert "all_reduce of blocks.5" in printed[rank], printed[rank]
        assert "rank 1 did not arrive" in printed[rank], printed[rank]
        assert "timeout_s" in printed[rank]


def test_processes_that_want_different_collectives(outputs: Outputs) -> None:
    printed = outputs("other")
    assert "DivergenceError" in printed[1], printed[1]
    assert "all_gather of blocks.5" in printed[1]
    assert "all_reduce of blocks.6" in printed[1]


def test_groups_of_processes(outputs: Outputs) -> None:
    printed = outputs("groups")
    sums = [[float(line.split()[1]) for line in output.splitlines() if line.startswith("sum")] for output in printed]
    assert sums == [[1, 2], [1, 4], [5, 2], [5, 4]], printed


def test_sums_and_gathers_of_processes_are_those_of_threads(outputs: Outputs) -> None:
    """A shard may be a part of the whole."""
    for output in outputs("groups"):
        assert output.count("same True") == 9 and "same False" not in output, output


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("alone", r"rank 1 has gone on, and waits for all_reduce of blocks\.5 \(16 bytes, collective \d+\)"),
        ("closes", "rank 1 has ended, or has closed its engine"),
        ("ends", "rank 1 has ended, or has closed its engine"),
    ],
)
def test_a_rank_that_makes_a_call_alone_is_told(outputs: Outputs, mode: str, why: str) -> None:
    """Before any collective, so that it takes part in none of the others by mistake."""
    printed = outputs(mode)
    assert re.search(rf"DivergenceError rank 0 is in state_dict\(\), and {why}\. Every rank must", printed[0]), printed
    assert seconds(printed[0]) < 50
    if mode == "alone":
        assert re.search(r"PeerError rank 0 has failed, while rank 1 waited for .*state_dict\(\)", printed[1]), printed
    else:
        assert printed[1] == "ended well\n"


@pytest.mark.parametrize("mode", ["closes early", "ends early"])
def test_a_rank_that_ran_fewer_steps_is_told_of(outputs: Outputs, mode: str) -> None:
    printed = outputs(mode)
    # Where the process ends too, its connection may be seen to close before its word is read.
    fate = "has ended, or has closed its" + ("|is gone" if mode == "ends early" else "")
    assert re.search(rf"PeerError rank 0 .* all_reduce of blocks\.5.*rank 1 ({fate})", printed[0]), printed
    assert seconds(printed[0]) < 50
    assert printed[1] == "ended well\n"


def test_ranks_meet_as_often_as_they_like_and_for_the_same_call(outputs: Outputs) -> None:
    printed = outputs("meets")
    for rank, (mine, other) in enumerate([("save_checkpoint", "state_dict"), ("state_dict", "save_checkpoint")]):
        assert printed[rank].startswith("met\n"), printed[rank]
        told = printed[rank].removeprefix("met\n")
        alone = f"DivergenceError rank {rank} is in {mine}(), and rank {1 - rank} is in {other}()"
        assert told.startswith((alone, f"PeerError rank {1 - rank} has failed")), told
    assert any("DivergenceError" in output for output in printed)


def test_what_was_past_when_a_group_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is past if its rank had it before it made the group itself, whichever rank made it first."""
    store = dist.HashStore()
    monkeypatch.setattr(peers_room, "_store", lambda group: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    everybody: list[Peers] = []

    def made_by(rank: int) -> Peers:
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        everybody.append(Peers(None, [], 60.0))
        return everybody[-1]

    asked = (0, "all_reduce", 8, "")
    before, _ = made_by(1), made_by(0)
    before.fail(0, "in the group before")
    waiting = made_by(0)
    assert waiting._news(asked) is None  # rank 1 is expected here
    made_by(1)
    assert waiting._news(asked) is None
    made_by(1)
    before.fail(0, "after it has made the next")
    late = made_by(0)
    for peers in (late, waiting):
        news = peers._news(asked)
        assert news is not None and news.message == "after it has made the next"
    before.fail(0, "while another waits for the third")
    third = made_by(0)
    before.fail(0, "and once more")
    news = third._news(asked)
    assert news is not None and news.message == "and once more"
    made_by(1)
    assert third._news(asked) is None
    for peers in everybody:
        peers.close()


def test_ctrl_c_in_a_meeting_leaves_nobody_counted_who_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the same rank would be two when it comes again, and go on alone."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(peers_room, "_store", lambda group: store)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(peers_room, "time", SimpleNamespace(sleep=interrupt, monotonic=time.monotonic))
    peers = Peers(None, deque(), timeout=1.0)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            peers.meet(0, "state_dict()")
    peers.close()


def test_meetings_leave_nothing_behind_and_seldom_ask_about_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now, pauses, looks = dist.HashStore(), [0.0], [], []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(peers_room, "_store", lambda group: store)
    peers = Peers(None, deque(), timeout=60.0)

    def sleep(seconds: float) -> None:
        now[0] += seconds
        pauses.append(seconds)
        if now[0] > 5.0:
            store.add(f"{peers._name}/met/0/0/state_dict()", 1)

    def late(here: tuple[int, int, str]) -> list[tuple[int, str | None]]:
        looks.append(now[0])
        return [(1, None)]

    monkeypatch.setattr(peers_room, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))
    monkeypatch.setattr(peers, "_late", late)
    peers.meet(0, "state_dict()")
    assert max(pauses) <= 0.025, "the last rank that comes waits for the others' pauses"
    assert len(looks) <= 7, "each look asks about every rank"
    keys = store.num_keys()
    for asked in range(1, 4):
        store.add(f"{peers._name}/met/{asked}/0/state_dict()", 1)
        peers.meet(asked, "state_dict()")
    assert store.num_keys() == keys
    peers.close()


class _EndsLate:
    """A collective that ends right after a wait for it has run out, with an error of its own or without."""

    def __init__(self, error: str | None) -> None:
        self.error = error

    def wait(self, timeout: object = None) -> None:
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return True


def test_a_forked_child_that_ends_is_not_its_rank() -> None:
    store = dist.HashStore()
    for owner in (os.getpid() + 1, os.getpid()):
        peers_room._last_words(owner, store, "world/1", 0, 2, deque())
        assert store.check([peers_room._left("world/1", 0)]) == (owner == os.getpid())


@pytest.mark.parametrize("error", [None, "Connection closed by peer"])
def test_a_collective_may_end_while_its_wait_runs_out(error: str | None) -> None:
    peers = object.__new__(Peers)
    peers.rank, peers.ranks, peers._store = 0, [0, 1], None
    asked = 1, "all_gather", 8, "block"
    if error is None:
        assert peers._completes(_EndsLate(None), 0.01, asked)
        return
    with pytest.raises(PeerError, match=error):
        peers._completes(_EndsLate(error), 0.01, asked)


class _Gone:
    """A store whose process has ended."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        def fails(*_: object) -> None:
            raise dist.DistError("Broken pipe")

        return fails


def test_a_store_that_is_gone_is_told_of_by_who_waits() -> None:
    peers = object.__new__(Peers)
    peers.rank, peers.ranks, peers._name, peers._met = 0, [0, 1], "world/1", (-1, 0)
    peers._recent, peers._store = deque(), _Gone()
    asked = 1, "all_gather", 8, "block"
    for doing, look in (
        (r"is in state_dict\(\)", lambda: peers.meet(1, "state_dict()")),
        ("waits for all_gather of block", lambda: peers._look(asked, 1.0, tell=True)),
    ):
        with pytest.raises(PeerError, match=f"rank 0 {doing}.*the process that holds the group's store is gone"):
            look()
