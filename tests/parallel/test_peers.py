"""Failures of a rank: the other ranks raise an error that names it and its message, and none of them hangs."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.forks import Forks
from tests.warm import Failure, Pool

from wherry.errors import DivergenceError, PeerError
from wherry.parallel import peers as peers_room
from wherry.parallel import topology
from wherry.parallel.comm import Comm
from wherry.parallel.peers import Peers
from wherry.tickets import Ticket

Pools = Callable[[int], Pool]

# Ranks that are processes over gloo.


def joined() -> Comm:
    """Find the group of all ranks and run the first collectives on it."""
    comm = topology.find(timeout=600.0).data
    comm.all_reduce(torch.ones(2)).wait()
    values = comm.gather_objects({"rank": comm.rank, "more": "x" * 100 * comm.rank})
    assert [value["rank"] for value in values] == list(range(comm.size)), values
    return comm


def begin(comm: Comm, operation: str = "all_reduce") -> Ticket:
    if operation == "all_reduce":
        return comm.all_reduce(torch.ones(4), label="blocks.5")
    return comm.reduce_scatter(torch.ones(4), torch.ones(4 * comm.size), label="blocks.5")


def check(outcome: Any, error: str, message: str) -> None:
    assert isinstance(outcome, Failure), outcome
    assert re.fullmatch(error, outcome.error) and re.search(message, outcome.message), str(outcome)


def fail_on_one(rank: int, operation: str) -> None:
    comm = joined()
    if rank == 1:
        comm.tell(OSError("no space left"))  # the process lives on, and so do its connections
    else:
        begin(comm, operation).wait()


@pytest.mark.parametrize("operation", ["all_reduce", pytest.param("reduce_scatter", marks=pytest.mark.smoke)])
def test_ranks_raise_the_message_of_one_that_failed(warm: Pools, operation: str) -> None:
    outcomes = warm(3).outcomes(fail_on_one, operation)
    for rank in (0, 2):
        check(outcomes[rank], "PeerError", rf"rank 1 has failed.* {operation} of blocks\.5 .*OSError: no space left")
    assert outcomes[1] is None


def die_on_one(rank: int, operation: str) -> None:
    comm = joined()
    if rank == 1:
        os._exit(3)
    begin(comm, operation).wait()


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
def test_ranks_name_one_that_died(warm: Pools, operation: str) -> None:
    outcomes = warm(3).outcomes(die_on_one, operation)
    for rank in (0, 2):
        check(outcomes[rank], "PeerError", rf"{operation} of blocks\.5.*rank 1 is gone|rank 1 has failed.*it is gone")
    check(outcomes[1], "Exit", "^3$")


def run_out_of_memory_on_one(rank: int) -> None:
    import resource

    comm = joined()
    whole, shard = torch.zeros(1 << 24), torch.zeros(1 << 23)
    if rank == 1:
        held = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (held + (1 << 23), resource.RLIM_INFINITY))
    try:
        comm.reduce_scatter(shard, whole, label="blocks.4").wait()
        comm.all_gather(whole, shard, label="blocks.4").wait()
        comm.reduce_scatter(shard[: 1 << 21], whole[: 1 << 22], label="blocks.5").wait()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory and /proc/self/status are those of Linux")
def test_ranks_raise_that_one_had_no_memory_for_a_collective(warm: Pools) -> None:
    """A small reduce-scatter allocates what it receives; large collectives work in place."""
    outcomes = warm(2).outcomes(run_out_of_memory_on_one)
    check(outcomes[1], "MemoryError", r"^rank 1: no memory was left for reduce_scatter of blocks\.5")
    check(outcomes[0], "PeerError", r"rank 1 has failed.*no memory was left for reduce_scatter of blocks\.5")


def leave_on_one(rank: int, exits: bool, meets: bool) -> None:
    comm = joined()
    if rank == 0:
        comm.meet("state_dict()") if meets else begin(comm).wait()
    elif exits:
        sys.exit(0)
    else:
        comm.close()


@pytest.mark.parametrize("exits", [False, True], ids=["closes", "exits"])
def test_a_rank_that_runs_fewer_steps_is_named(warm: Pools, exits: bool) -> None:
    left, _ = warm(2).outcomes(leave_on_one, exits, False)
    # The connection of a process that ends may close before the store has its last key.
    fate = "has ended, or has closed its engine" + ("|is gone" if exits else "")
    check(left, "PeerError", rf"rank 0 .* all_reduce of blocks\.5.*rank 1 ({fate})")


def test_a_rank_that_exits_is_named_by_a_call_that_it_does_not_make(warm: Pools) -> None:
    left, _ = warm(2).outcomes(leave_on_one, True, True)
    check(left, "DivergenceError", r"rank 0 is in state_dict\(\), and rank 1 has ended, or has closed its engine\. ")


def meet_on_one(rank: int) -> None:
    comm = joined()
    comm.meet("state_dict()") if rank == 0 else begin(comm).wait()


def test_a_call_that_one_rank_makes_alone_fails_on_all(warm: Pools) -> None:
    first, second = warm(2).outcomes(meet_on_one)
    alone = r"rank 0 is in state_dict\(\), and rank 1 has gone on, and waits for all_reduce of blocks\.5 \(16 bytes, "
    check(first, "DivergenceError", alone + r"collective \d+\)\. Every rank must")
    check(second, "PeerError", r"rank 0 has failed, while rank 1 waited for .*state_dict\(\)")


def meet_often(rank: int) -> None:
    comm = joined()
    for turn in range(4):
        comm.meet("save_checkpoint()")
        if turn == 2:
            begin(comm).wait()


def meet_for_different_calls(rank: int) -> None:
    joined().meet("state_dict()" if rank else "save_checkpoint()")


def test_ranks_meet_for_the_same_call_only(warm: Pools) -> None:
    warm(2).run(meet_often)
    outcomes = warm(2).outcomes(meet_for_different_calls)
    calls = [r"save_checkpoint\(\)", r"state_dict\(\)"]
    for rank, outcome in enumerate(outcomes):
        alone = rf"^rank {rank} is in {calls[rank]}, and rank {1 - rank} is in {calls[1 - rank]}"
        check(outcome, "DivergenceError|PeerError", rf"{alone}|^rank {1 - rank} has failed")
    assert "DivergenceError" in [outcome.error for outcome in outcomes]


def sum_in_groups(rank: int) -> tuple[list[float], list[bool]]:
    """Sum along both axes of two by two ranks; compare collectives of all ranks with sums made here."""
    comm = joined()
    sums, same = [], []
    for group in (comm.within(2), comm.across(2)):
        tensor = torch.tensor([float(rank)])
        group.all_reduce(tensor).wait()
        sums.append(float(tensor))
        group.close()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        # Sums of small whole numbers are exact, in any order.
        drawn = [
            torch.randint(-8, 8, (4 * 999,), generator=torch.Generator().manual_seed(other)).to(dtype)
            for other in range(4)
        ]
        whole, total, mine = drawn[rank], sum(drawn), slice(rank * 999, (rank + 1) * 999)
        shard = whole[mine]  # a shard may be a part of the whole
        comm.reduce_scatter(shard, whole).wait()
        same.append(torch.equal(shard, total[mine]))
        again = torch.zeros_like(whole)
        comm.all_gather(again, shard.clone()).wait()
        comm.all_gather(whole, shard).wait()
        same += [torch.equal(whole, total), torch.equal(again, total)]
    return sums, same


def test_groups_of_ranks_and_collectives_of_all(warm: Pools) -> None:
    sums, same = zip(*warm(4).run(sum_in_groups), strict=True)
    assert sums == ([1, 2], [1, 4], [5, 2], [5, 4])
    assert all(map(all, same)), same


UNCAUGHT = """
import torch
from wherry.parallel import topology
comm = topology.find(timeout=600.0).data
comm.barrier()
if comm.rank == 0:
    raise KeyError("a loader's mistake")
comm.all_reduce(torch.ones(4), label="blocks.5").wait()
"""


def test_ranks_raise_the_error_that_ended_another_process(forks: Forks, tmp_path: Path) -> None:
    done = forks.run("-c", UNCAUGHT, ranks=2, folder=tmp_path, launched=False)
    assert re.search("PeerError: rank 0 has failed.*KeyError: .*a loader's mistake", done.stderr), done.stderr


# Groups one after another. The first rank, whose process holds the store, is the last to leave each.
AGAIN = """
import os, time
import torch, torch.distributed as dist
from wherry.parallel.topology import find

for turn in range(3):
    comm = find(timeout=600.0).data
    total = torch.ones(1)
    comm.all_reduce(total).wait()
    assert total.item() == comm.size
    while comm.rank == 0 and not os.path.exists(f"left.{turn}"):
        time.sleep(0.01)
    comm.close()
    assert not dist.is_initialized()
    if comm.rank == 1:
        open(f"left.{turn}", "w").close()
"""


def test_a_rank_begins_the_next_group_before_another_leaves_the_last(forks: Forks, tmp_path: Path) -> None:
    done = forks.run("-c", AGAIN, ranks=2, folder=tmp_path, launched=False)
    assert done.returncode == 0, done.stderr


# Peers of one process, over a store of their own and a clock that only sleeping moves.


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self.while_asleep: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)
        self.while_asleep()


class Rank:
    """The peers of one rank, and the collectives that it has asked for."""

    def __init__(self, number: int, clock: Clock, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(dist, "get_rank", lambda: number)
        self.recent: deque[Any] = deque()
        self.peers = Peers(None, self.recent, timeout=60.0)
        self._clock = clock

    def wait(self, operation: str = "all_reduce", label: str = "blocks.5", seconds: float = 5.0) -> None:
        """Ask for a collective, and wait for it until it completes after so many seconds."""
        asked = len(self.recent), operation, 16, label
        self.recent.append(asked)
        end = self._clock.now + seconds

        def pause(length: float) -> bool:
            self._clock.sleep(length)
            return self._clock.now > end

        self.peers.watch(lambda: False, asked, pause)

    def meet(self, call: str) -> None:
        self.peers.meet(len(self.recent), call)


class CountingStore:
    """A store of this process that counts what it is asked, until its process is gone."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.is_gone = False
        self._store = dist.HashStore()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        if self.is_gone:
            raise dist.DistError("Broken pipe")
        return getattr(self._store, name)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> CountingStore:
    store = CountingStore()
    monkeypatch.setattr(peers_room, "_store", lambda group: store)
    return store


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(peers_room, "time", clock)
    return clock


@pytest.fixture
def ranks(store: CountingStore, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    ranks = [Rank(number, clock, monkeypatch) for number in range(3)]
    yield ranks
    for rank in ranks:
        rank.peers.close()


def test_ranks_that_fail_alike_go_on_and_one_that_fails_again_does_not(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.peers.fail(0, "a bad batch")
    for rank in ranks:
        rank.wait()
    ranks[0].peers.fail(1, "another")
    with pytest.raises(PeerError, match=r"rank 0 has failed, while rank 1 waited for all_reduce .*: another"):
        ranks[1].wait()


def test_a_failure_that_is_taken_back_is_not_raised(ranks: list[Rank], clock: Clock) -> None:
    """Another rank reads the failure first, and sleeps before it believes it."""
    ranks[0].peers.fail(0, "a bad batch")

    def take_back() -> None:
        if clock.pauses[-1] == peers_room.BELIEVED:
            ranks[0].peers.take_back()

    clock.while_asleep = take_back
    ranks[1].wait()
    assert peers_room.BELIEVED in clock.pauses
    ranks[2].wait()


def test_a_rank_that_does_not_arrive_is_named_after_the_timeout(ranks: list[Rank], clock: Clock) -> None:
    ranks[1].wait()
    ranks[2].wait()
    ranks[2].wait()
    ranks[0].wait()
    start = clock.now
    with pytest.raises(PeerError, match=r"has waited 6. s for all_reduce of blocks\.5") as raised:
        ranks[0].wait(seconds=600.0)
    assert 60 < clock.now - start < 62
    assert "rank 1 did not arrive" in str(raised.value) and "timeout_s" in str(raised.value)
    assert "rank 2" not in str(raised.value)


def test_ranks_that_ask_for_different_collectives_diverge(ranks: list[Rank]) -> None:
    ranks[1].wait(label="blocks.6")
    wants = r"rank 0 wants all_gather of blocks\.5 .* and rank 1 all_reduce of blocks\.6"
    with pytest.raises(DivergenceError, match=wants):
        ranks[0].wait("all_gather")


def test_a_rank_that_left_is_named_by_what_it_takes_no_part_in(ranks: list[Rank]) -> None:
    ranks[1].wait()
    ranks[1].peers.close()
    for rank in (ranks[0], ranks[2]):
        rank.wait()  # which rank 1 asked for too
    with pytest.raises(DivergenceError, match=r"rank 2 is in state_dict\(\), and rank 1 has ended, or has closed its"):
        ranks[2].meet("state_dict()")
    with pytest.raises(PeerError, match=r"rank 0 waits for all_reduce .* rank 1 has ended, or has closed its engine"):
        ranks[0].wait()


def test_a_call_that_others_do_not_make_names_where_they_are(ranks: list[Rank], clock: Clock) -> None:
    ranks[1].wait()
    alone = r"rank 0 is in state_dict\(\), and rank 1 has gone on, and waits for all_reduce of blocks\.5 \(16 bytes, "
    with pytest.raises(DivergenceError, match=alone):
        ranks[0].meet("state_dict()")

    def meet() -> None:
        clock.while_asleep = lambda: None
        with pytest.raises(DivergenceError, match=r"rank 2 is in state_dict.*rank 1 is in save_checkpoint"):
            ranks[2].recent.append((0, "all_reduce", 16, ""))
            ranks[2].meet("state_dict()")

    clock.while_asleep = meet
    with pytest.raises(DivergenceError, match=r"ranks 0, 2 did not come to it in 6. s.*If it is only slow"):
        ranks[1].meet("save_checkpoint()")


def test_failures_before_a_group_was_made_are_past(
    store: CountingStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure is past if its rank had it before it made the group itself, whichever rank made it first."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    made: list[Rank] = []

    def make(number: int) -> Rank:
        made.append(Rank(number, clock, monkeypatch))
        return made[-1]

    before, _ = make(1), make(0)
    before.peers.fail(0, "in the group before")
    waiting = make(0)
    waiting.wait()  # for rank 1, which has yet to make the group
    make(1)
    waiting.wait()
    make(1)
    before.peers.fail(0, "after it has made the next")
    for rank in (make(0), waiting):
        with pytest.raises(PeerError, match="after it has made the next"):
            rank.wait()
    before.peers.fail(0, "while another waits for the third")
    third = make(0)
    before.peers.fail(0, "and once more")
    with pytest.raises(PeerError, match="and once more"):
        third.wait()
    make(1)
    third.wait()
    for rank in made:
        rank.peers.close()


def test_ctrl_c_in_a_meeting_takes_the_rank_out_of_its_count(ranks: list[Rank], clock: Clock) -> None:
    """The same rank would count twice when it comes again, and go on alone."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    clock.while_asleep = interrupt
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            ranks[0].meet("state_dict()")


def test_meetings_leave_no_keys_behind_and_seldom_ask_about_the_others(
    store: CountingStore, ranks: list[Rank], clock: Clock
) -> None:
    def meet(after: float) -> None:
        late = ranks[1:]

        def come() -> None:
            if late and clock.now >= after:
                late.pop(0).meet("state_dict()")

        clock.while_asleep = come
        ranks[0].meet("state_dict()")

    store.calls.clear()
    meet(after=5.0)
    assert max(clock.pauses) <= 0.025, "the last rank that comes waits for the others' pauses"
    assert store.calls["check"] <= 60, "each look asks about every rank"
    keys = store.num_keys()
    for _ in range(3):
        for rank in ranks:
            rank.recent.append((len(rank.recent), "all_reduce", 16, ""))
        meet(after=0.0)
    assert store.num_keys() == keys


class EndsLate:
    """A collective that ends right after a wait for it has run out, perhaps with an error of its own."""

    def __init__(self, error: str | None) -> None:
        self.error = error

    def wait(self, timeout: object = None) -> None:
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return True


@pytest.mark.parametrize("error", [None, "Connection closed by peer"])
def test_a_collective_may_end_while_its_wait_runs_out(ranks: list[Rank], error: str | None) -> None:
    wait = ranks[0].peers.waiting(EndsLate(error), (1, "all_gather", 8, "block"))
    if error is None:
        wait()
    else:
        with pytest.raises(PeerError, match=error):
            wait()


def test_a_forked_child_that_ends_is_not_its_rank() -> None:
    store = dist.HashStore()
    for owner in (os.getpid() + 1, os.getpid()):
        peers_room._last_words(owner, store, "world/1", 0, 2, deque())
        assert store.check([peers_room._left("world/1", 0)]) == (owner == os.getpid())


def test_a_store_that_is_gone_is_named_by_the_rank_that_waits(store: CountingStore, ranks: list[Rank]) -> None:
    store.is_gone = True
    for doing, use in (
        (r"is in state_dict\(\)", lambda: ranks[0].meet("state_dict()")),
        (r"waits for all_reduce of blocks\.5", ranks[0].wait),
    ):
        with pytest.raises(PeerError, match=f"rank 0 {doing}.*the process that holds the group's store is gone"):
            use()
