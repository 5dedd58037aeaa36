"""Failures of a rank: the other ranks raise an error that names it and its message, and none of them hangs."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.warm import Failure, Pool

from wherry.errors import DivergenceError, PeerError
from wherry.parallel import peers as peers_room
from wherry.parallel import topology
from wherry.parallel.comm import Comm
from wherry.parallel.peers import Peers
from wherry.tiers.host import has_exited, this_process

Pools = Callable[[int], Pool]


def joined() -> Comm:
    """Find the group of all ranks and run the first collectives on it."""
    comm = topology.find(timeout=600.0).data
    comm.all_reduce(torch.ones(2)).wait()
    values = comm.gather_objects({"rank": comm.rank, "more": "x" * 100 * comm.rank})
    assert [value["rank"] for value in values] == list(range(comm.size)), values
    return comm


def end_on_one(rank: int, fails: bool) -> None:
    """Fail or die on rank 1, while the others wait for it."""
    comm = joined()
    if rank != 1:
        comm.reduce_scatter(torch.ones(4), torch.ones(4 * comm.size), label="blocks.5").wait()
    elif fails:
        comm.tell(OSError("no space left"))  # the process lives on, and so do its connections
    else:
        os._exit(3)


WAITS = r"reduce_scatter of blocks\.5"


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        pytest.param(True, rf"rank 1 has failed.* {WAITS} .*OSError: no space left", marks=pytest.mark.smoke),
        (False, rf"{WAITS}.*rank 1 is gone|rank 1 has failed.*it is gone"),
    ],
)
def test_ranks_name_one_that_ends(warm: Pools, fails: bool, message: str) -> None:
    first, second, third = warm(3).outcomes(end_on_one, fails)
    for outcome in (first, third):
        assert isinstance(outcome, Failure) and outcome.error == "PeerError", outcome
        assert re.search(message, outcome.message), str(outcome)
    assert second is None if fails else (second.error, second.message) == ("Exit", "3")


def exit_before_meeting(rank: int) -> None:
    """Exit on rank 1 without an error, before a call that every rank has to make."""
    comm = joined()
    if rank == 1:
        os._exit(0)
    comm.meet("save_checkpoint()")


def test_ranks_in_a_meeting_name_one_whose_process_is_gone(warm: Pools) -> None:
    first, second, third = warm(3).outcomes(exit_before_meeting)
    for outcome in (first, third):
        assert isinstance(outcome, Failure) and outcome.error == "PeerError", outcome
        assert "save_checkpoint()" in outcome.message, outcome
        assert re.search(r"rank 1 has .*ended: its process", outcome.message), outcome
    assert (second.error, second.message) == ("Exit", "0")


class Clock:
    """A clock that only sleeping moves."""

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


class Store:
    """A store of this process, until its process is gone."""

    is_gone = False

    def __init__(self) -> None:
        self._store = dist.HashStore()

    def __getattr__(self, name: str) -> Any:
        if self.is_gone:
            raise dist.DistError("Broken pipe")
        return getattr(self._store, name)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(peers_room, "_store", lambda group: store)
    return store


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(peers_room, "time", clock)
    return clock


@pytest.fixture
def ranks(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
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


def test_a_process_that_is_gone_is_an_error_at_the_second_look(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first look, what the process has sent may still be on its way. Of another machine's nothing is known."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    waiting, (space, _), no_process = Rank(0, clock, monkeypatch), this_process(), 1 << 22
    monkeypatch.setattr(peers_room, "this_process", lambda: ("another machine", no_process))
    gone = Rank(1, clock, monkeypatch)
    waiting.wait()
    clock.pauses.clear()
    monkeypatch.setattr(peers_room, "has_exited", lambda process: has_exited((space, process[1])))
    with pytest.raises(PeerError, match=r"rank 0 waits for all_reduce .* rank 1 has ended: its process is") as raised:
        waiting.wait()
    assert (raised.value.ended_rank, clock.pauses) == (1, [0.25, 0.5])
    for rank in (waiting, gone):
        rank.peers.close()


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


def test_failures_before_a_group_was_made_are_past(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_meetings_leave_no_keys_behind(store: Store, ranks: list[Rank], clock: Clock) -> None:
    keys = []
    for _ in range(4):
        late = ranks[1:]
        clock.while_asleep = lambda late=late: late.pop(0).meet("state_dict()") if late else None
        ranks[0].meet("state_dict()")
        keys.append(store.num_keys())
        for rank in ranks:
            rank.recent.append((len(rank.recent), "all_reduce", 16, ""))
    assert keys[1:] == keys[:1] * 3


class EndsLate:
    """A collective that ends right after a wait for it has run out, perhaps with an error of its own."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def wait(self, timeout: object = None) -> None:
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return True


def test_a_collective_may_end_while_its_wait_runs_out(ranks: list[Rank]) -> None:
    asked = (1, "all_gather", 8, "block")
    ranks[0].peers.waiting(EndsLate(None), asked)()
    with pytest.raises(PeerError, match="Connection closed by peer"):
        ranks[0].peers.waiting(EndsLate(RuntimeError("Connection closed by peer")), asked)()


def test_a_rank_without_memory_for_a_collective_says_so_to_all(ranks: list[Rank]) -> None:
    ranks[1].recent.append(asked := (0, "all_reduce", 16, "blocks.5"))
    with pytest.raises(MemoryError, match=r"^rank 1: no memory was left for all_reduce of blocks\.5"):
        ranks[1].peers.waiting(EndsLate(MemoryError()), asked)()
    with pytest.raises(PeerError, match=r"rank 1 has failed.*no memory was left for all_reduce of blocks\.5"):
        ranks[0].wait()


def test_a_store_that_is_gone_is_named_by_the_rank_that_waits(store: Store, ranks: list[Rank]) -> None:
    store.is_gone = True
    for doing, use in (
        (r"is in state_dict\(\)", lambda: ranks[0].meet("state_dict()")),
        (r"waits for all_reduce of blocks\.5", ranks[0].wait),
    ):
        with pytest.raises(PeerError, match=f"rank 0 {doing}.*the process that holds the group's store is gone"):
            use()
