"""What the ranks of a process group tell each other outside of collectives: who has failed, and who waits for what.

A collective in which one rank does not take part hangs, or ends in a backend's own words. Here a rank that waits longer
than a moment looks into the group's key-value store, where failed ranks leave their message and waiting ranks what
they wait for. As long as nobody waits long, the store is not touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from wherry.errors import DivergenceError, PeerError
from wherry.observe.log import logger
from wherry.observe.memory import out_of_memory
from wherry.tiers.host import has_exited, this_process

# A collective, as a rank has asked for it: its number, operation, bytes, and what it was for.
Asked = tuple[int, str, int, str]

# Seconds of an ordinary wait, of the pauses after it, and until a failure that was not taken back is believed.
PATIENCE = 0.25
PAUSES = (0.25, 1.0)
BELIEVED = 0.5
# The longest pause of a rank that waits for the others to make the same call.
MEETS = 0.025
# Seconds in which ranks that lost their connections can say that they are still there, and a failed rank waits for the
# others to read its message.
ROLL_CALL = 1.5
# Seconds after which a rank that waits for the others to make the same call says so, and its shortest pause.
SAYS_SO = 10.0
BRIEF = 0.0005
# What is said of a rank that will not come, though nothing has failed.
ENDED = "has ended, or has closed its engine: every rank must run as many steps, and so needs as many batches"
EXITED = "has ended: its process is gone, as after os._exit or a signal"
# Where a rank is that has given up a meeting.
NOWHERE = (-1, 0, "")
# More often than any rank fails and goes on.
MANY = 1 << 30
# What torch says when a wait has ended before the work.
_TIMED_OUT = "Operation timed out"


def describe(asked: Asked) -> str:
    """
    >>> describe((7, "all_gather", 2048, "blocks.1"))
    'all_gather of blocks.1 (2,048 bytes, collective 7)'
    """
    place, operation, nbytes, label = asked
    return f"{operation}{' of ' + label if label else ''} ({nbytes:,} bytes, collective {place})"


class PeerFailure(NamedTuple):
    """Of a rank, by its number among all processes."""

    rank: int
    # How often it has failed so far, and how many collectives it had asked for in which group.
    times: int
    asked: int
    comm: str
    message: str


class Peers:
    """One rank's view of the others in a group, and what it tells them. Ranks go by their number in the world."""

    def __init__(self, group: dist.ProcessGroup | None, recent: deque[Asked], timeout: float) -> None:
        self.rank = dist.get_rank()
        self.ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
        self.timeout = timeout
        self.failed = False
        self._recent = recent
        self._failures: list[PeerFailure] = []
        # How often this rank had failed when it last did.
        self._times = 0
        self._store = _store(group)
        # Who makes a group has gone on from what failed before, and so will the others: they make it together.
        self._past = self._store.add("failures", 0) if self._store is not None else 0
        # Several engines may share a group: the ranks make them in one order, so that their numbers agree.
        self._name = ""
        if self._store is not None:
            name = "world" if group is None else group.group_name
            self._name = f"{name}/{self._store.add(f'{name}/made/{self.rank}', 1)}"
            # What this rank fails with from here on is news to the others, whenever they come to make it.
            self._store.set(self._since(self.rank), str(self._store.add(f"times/{self.rank}", 0)))
            # Peers that wait look up this process, as one that ends by os._exit leaves no message.
            self._store.set(self._process(self.rank), json.dumps(this_process()))
        # The ranks whose processes had ended at the last look.
        self._exited: list[int] = []
        # The last meeting: how many collectives had been asked for, and how often ranks had met there before.
        self._met = -1, 0
        # And the key under which the ranks counted each other there.
        self._counted: str | None = None
        self._at_exit = weakref.finalize(
            self, _last_words, os.getpid(), self._store, self._name, self.rank, len(self.ranks), recent
        )

    # What this rank says.

    def fail(self, asked: int, message: str) -> None:
        """This rank cannot go on."""
        self.failed = True
        if self._store is not None:
            try:
                self._times = self._store.add(f"times/{self.rank}", 1)
                _publish(self._store, PeerFailure(self.rank, self._times, asked, self._name, message))
            except RuntimeError as error:  # the store's process is gone, and with it whoever could read
                logger.debug("the other ranks could not be told of the failure: %s", error)

    def _process(self, rank: int) -> str:
        """Return the key of a rank's process."""
        return f"{self._name}/process/{rank}"

    def _since(self, rank: int) -> str:
        """The key under which a rank that has made this group says how often it had failed before."""
        return f"{self._name}/since/{rank}"

    def take_back(self) -> None:
        """This rank goes on nevertheless."""
        self.failed = False
        if self._store is not None:
            # Of all groups of this rank: another may have told of a later one.
            self._store.set(f"back/{self.rank}", str(self._store.add(f"times/{self.rank}", 0)))

    def close(self) -> None:
        if self._at_exit.detach() is not None and self._store is not None:
            _leave(self._store, self._name, self.rank, self._recent)
        self._store = None

    @contextlib.contextmanager
    def _store_is_there(self, doing: str) -> Iterator[None]:
        """The other ranks' words cannot be read once the process that holds them has ended: that is a peer's error."""
        try:
            yield
        except PeerError:
            raise
        except (dist.DistError, RuntimeError) as error:
            raise PeerError(
                f"rank {self.rank} {doing}, and the process that holds the group's store is gone"
            ) from error

    # Meeting.

    def meet(self, asked: int, what: str) -> None:
        """Return once every rank is here for `what`, having asked for as many collectives; raise if one will not be."""
        if self._store is None:
            return
        turn = self._met[1] + 1 if self._met[0] == asked else 0
        with self._store_is_there(f"is in {what}"):
            self._wait_for_all(self._store, (asked, turn, what))
        self._met = asked, turn

    def _wait_for_all(self, store: dist.Store, here: tuple[int, int, str]) -> None:
        store.set(self._place(self.rank), json.dumps(here))
        count = f"{self._name}/met/{'/'.join(map(str, here))}"
        store.add(count, 1)
        begun, pause, said = time.monotonic(), BRIEF, False
        look, between = PATIENCE, PAUSES[0]
        try:
            while store.add(count, 0) < len(self.ranks):
                time.sleep(pause)
                pause = min(1.5 * pause, MEETS)
                waited = time.monotonic() - begun
                if waited < look:
                    continue
                look, between = waited + between, min(2 * between, PAUSES[1])
                self._raise_if_failed((here[0], here[2], 0, ""))
                late = self._late(here)
                if not late or store.add(count, 0) == len(self.ranks):
                    continue  # who has been here and gone on is not late
                gone = [reason for _, reason in late if reason is not None]
                if gone:
                    left = next((rank for rank, _ in late if store.check([_left(self._name, rank)])), None)
                    raise DivergenceError(_alone(self.rank, here[2], "; ".join(gone[:8]))).with_ended_rank(left)
                for rank in self._have_exited([rank for rank, _ in late]):
                    raise self._exit_of(rank, f"is in {here[2]}")
                names = f"{'ranks' if len(late) > 1 else 'rank'} {', '.join(str(rank) for rank, _ in late[:8])}"
                told = _alone(self.rank, here[2], f"{names} did not come to it in {waited:.0f} s")
                if waited > self.timeout:
                    raise DivergenceError(f'{told}. If it is only slow, raise "wherry": {{"timeout_s": ...}}')
                if waited > SAYS_SO and not said:
                    said = True
                    logger.warning("%s", told)
        except BaseException:  # also of Ctrl-C: whoever counts as here lets the others go on
            with contextlib.suppress(RuntimeError):  # the store's process is gone, and with it whoever could read
                store.set(self._place(self.rank), json.dumps(NOWHERE))
                store.add(count, -1)
            raise
        # Everybody is here, and so nobody reads the count of the meeting before this one any more.
        before, self._counted = self._counted, count
        if before is not None and self.rank == self.ranks[0]:
            store.delete_key(before)

    def _place(self, rank: int) -> str:
        return f"{self._name}/at/{rank}"

    def _late(self, here: tuple[int, int, str]) -> list[tuple[int, str | None]]:
        """The ranks that are not here, and what says that they will not come; None where nothing does."""
        assert self._store is not None
        waiting = self._others()
        late: list[tuple[int, str | None]] = []
        for rank in self.ranks:
            at = None
            if self._store.check([self._place(rank)]):
                at = tuple(json.loads(self._store.get(self._place(rank))))
            if at == here:
                continue
            reason = None
            if at is not None and at[:2] == here[:2]:
                reason = f"rank {rank} is in {at[2]}"
            elif rank in waiting and waiting[rank][0][0] >= here[0]:
                reason = f"rank {rank} has gone on, and waits for {describe(waiting[rank][0])}"
            elif self._store.check([_left(self._name, rank)]):
                reason = f"rank {rank} has ended, or has closed its engine"
            late.append((rank, reason))
        return late

    # Waiting.

    def waiting(self, work: Any, asked: Asked) -> Callable[[], None]:
        """The wait for `work`, an operation on the host."""

        def wait() -> None:
            if not self._completes(work, PATIENCE, asked):
                self.watch(work.is_completed, asked, lambda pause: self._completes(work, pause, asked))

        return wait

    def _completes(self, work: Any, seconds: float, asked: Asked) -> bool:
        try:
            try:
                work.wait(timedelta(seconds=seconds))
            except RuntimeError as error:
                # By its words: a work whose connection is gone has another error, and may not call itself completed.
                if _TIMED_OUT not in str(error):
                    raise
                if not work.is_completed():
                    return False
                work.wait()  # it has ended since: well, or with an error of its own
        except (RuntimeError, MemoryError) as error:
            raise self.explain(error, asked) from error
        return True

    def watch(self, completed: Callable[[], bool], asked: Asked, pause: Callable[[float], bool] | None = None) -> None:
        """Wait until `completed`, by `pause` if it is given; raise when a peer has failed or is not coming."""
        begun = time.monotonic()
        if pause is None and _spin(completed, PATIENCE):
            return
        wait, said = PAUSES[0], False
        while not (pause(wait) if pause is not None else _spin(completed, wait)):
            self._look(asked, PATIENCE + time.monotonic() - begun, tell=not said)
            said, wait = True, min(2 * wait, PAUSES[1])

    def _look(self, asked: Asked, waited: float, *, tell: bool) -> None:
        if self._store is None:
            if waited > self.timeout:
                raise PeerError(f"rank {self.rank} has waited {waited:.0f} s for {describe(asked)}")
            return
        with self._store_is_there(f"waits for {describe(asked)}"):
            if tell:
                self._tell(asked)
            self._raise_if_failed(asked)
            others = self._others()
            ended = [rank for rank in self.ranks if rank != self.rank and self._has_ended(rank, asked)]
            if ended:
                text = f"rank {self.rank} waits for {describe(asked)}, and rank {ended[0]} {ENDED}"
                raise PeerError(text).with_ended_rank(ended[0])
            # A process may have sent data just before it ended: the second look comes after its arrival.
            before, self._exited = self._exited, self._have_exited(self.ranks)
            for rank in before:
                raise self._exit_of(rank, f"waits for {describe(asked)}")
        for rank, (_, recent) in others.items():
            theirs = next((other for other in recent if other[0] == asked[0]), asked)
            if tuple(theirs) != asked:
                raise DivergenceError(
                    f"the ranks disagree about their next collective: rank {self.rank} wants {describe(asked)} and "
                    f"rank {rank} {describe(theirs)}; every rank must run the same units and steps"
                )
        if waited > self.timeout:
            raise PeerError(self._absent(asked, others, waited))

    def _tell(self, asked: Asked) -> None:
        assert self._store is not None
        self._store.set(f"{self._name}/waits/{self.rank}", json.dumps([asked, list(self._recent)]))

    def _others(self) -> dict[int, tuple[Asked, list[Asked]]]:
        """What each rank that waits, or has waited, said: what it waited for, and what it had asked for."""
        assert self._store is not None
        others = {}
        for rank in self.ranks:
            key = f"{self._name}/waits/{rank}"
            if rank != self.rank and self._store.check([key]):
                waits, recent = json.loads(self._store.get(key))
                others[rank] = (tuple(waits), recent)
        return others

    def _has_ended(self, rank: int, asked: Asked) -> bool:
        """Whether a rank has ended in order, and without having asked for a collective."""
        assert self._store is not None
        key = _left(self._name, rank)
        return self._store.check([key]) and int(self._store.get(key)) <= asked[0]

    def _have_exited(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks whose processes have ended, of those on this machine."""
        assert self._store is not None
        keys = [(rank, self._process(rank)) for rank in ranks if rank != self.rank]
        known = [(rank, json.loads(self._store.get(key))) for rank, key in keys if self._store.check([key])]
        return [rank for rank, process in known if has_exited(process)]

    def _exit_of(self, rank: int, doing: str) -> PeerError:
        """Tell ranks on other machines that a process has ended, and return this rank's error."""
        assert self._store is not None
        _publish(self._store, PeerFailure(rank, MANY, 0, self._name, f"it {EXITED}"))
        return PeerError(f"rank {self.rank} {doing}, and rank {rank} {EXITED}").with_ended_rank(rank)

    def _absent(self, asked: Asked, others: dict[int, tuple[Asked, list[Asked]]], waited: float) -> str:
        late = []
        for rank in self.ranks:
            if rank == self.rank:
                continue
            waits = others[rank][0] if rank in others else None
            if waits is None or waits[0] < asked[0]:
                late.append(f"rank {rank} did not arrive, and waits for no collective")
            elif waits[0] > asked[0]:
                late.append(f"rank {rank} waits for {describe(waits)}")
        who = "; ".join(late[:8]) or "every rank has arrived, and the backend does not complete it"
        return (
            f"rank {self.rank} has waited {waited:.0f} s for {describe(asked)}: {who}. If it is only slow, raise "
            '"wherry": {"timeout_s": ...}'
        )

    # What other ranks said.

    def _raise_if_failed(self, asked: Asked | None) -> None:
        failure = self._news(asked)
        if failure is None:
            return
        time.sleep(BELIEVED)
        if self._gone_on(failure):
            return
        assert self._store is not None
        self._store.add(f"read/{failure.rank}", 1)
        waits = f", while rank {self.rank} waited for {describe(asked)}" if asked is not None else ""
        error = PeerError(f"rank {failure.rank} has failed{waits}: {failure.message}")
        raise error.with_ended_rank(failure.rank) if failure.times == MANY else error

    def _news(self, asked: Asked | None) -> PeerFailure | None:
        """The first failure that concerns a collective of this rank."""
        assert self._store is not None
        known = self._store.add("failures", 0)
        for number in range(len(self._failures) + 1, known + 1):
            if not self._store.check([f"failure/{number}"]):
                break  # its number is taken, and its text on the way
            self._failures.append(PeerFailure(*json.loads(self._store.get(f"failure/{number}"))))
        times = self._store.add(f"times/{self.rank}", 0)
        for number, failure in enumerate(self._failures, 1):
            past = number <= self._past and failure.times < MANY and failure.comm != self._name
            if past and not self._store.check([self._since(failure.rank)]):
                continue  # the rank has yet to make the group
            # What this rank has met as well, every rank has met; and what the failed rank had asked for will complete.
            met = failure.times <= times
            takes_part = asked is not None and failure.comm == self._name and failure.asked > asked[0]
            if failure.rank != self.rank and not met and not takes_part and not self._gone_on(failure):
                return failure
        return None

    def _gone_on(self, failure: PeerFailure) -> bool:
        """Whether the rank has taken part in a collective since, or has made this group."""
        store = self._store
        assert store is not None
        keys = f"back/{failure.rank}", self._since(failure.rank)
        return any(store.check([key]) and int(store.get(key)) >= failure.times for key in keys)

    def explain(self, error: RuntimeError | MemoryError, asked: Asked) -> Exception:
        """What a backend's error comes from: too little memory here, a rank that failed, or one that is gone."""
        text = re.sub(r"^\[[^]]*\] |  ?This (is|may).*", "", str(error).strip().split("\n")[0])
        if out_of_memory(error):
            text = f"no memory was left for {describe(asked)}: {text or type(error).__name__}"
            self._give_up(asked, text)
            return MemoryError(f"rank {self.rank}: {text}")
        begun, ended = time.monotonic(), None
        try:
            if self._store is not None:
                self._tell(asked)
                while time.monotonic() - begun < ROLL_CALL:
                    self._raise_if_failed(asked)
                    time.sleep(0.1)
                here = {rank for rank, (waits, _) in self._others().items() if waits[0] >= asked[0]} | {self.rank}
                gone = [rank for rank in self.ranks if rank not in here]
                if len(gone) == 1:
                    fate = ENDED if self._has_ended(gone[0], asked) else f"is gone ({text})"
                    # The ranks that do not speak with it directly wait still.
                    _publish(self._store, PeerFailure(gone[0], MANY, 0, self._name, f"it {fate}"))
                    text, ended = f"rank {gone[0]} {fate}", gone[0]
                elif gone:
                    text = f"one of the ranks {', '.join(map(str, gone[:8]))} is gone ({text})"
                if len(gone) != 1:
                    # The others may have met nothing: their connections are as they were.
                    self._give_up(asked, f"it could not complete {describe(asked)}: {text}")
        except PeerError as failure:
            return failure
        except (dist.DistError, RuntimeError):
            text += "; the process that holds the group's store is gone as well"
        text = f"rank {self.rank} could not complete {describe(asked)}: {text}"
        return PeerError(text).with_ended_rank(ended)

    def _give_up(self, asked: Asked, message: str) -> None:
        """A collective has failed on this rank, after others may have begun it: there is no going on from here."""
        if self._store is None:
            return
        try:
            _publish(self._store, PeerFailure(self.rank, MANY, asked[0], self._name, message))
        except RuntimeError as error:
            logger.debug("the other ranks could not be told of the failure: %s", error)


def _spin(completed: Callable[[], bool], seconds: float) -> bool:
    """Ask often at first, and then less, for so long."""
    begun = time.monotonic()
    while not completed():
        passed = time.monotonic() - begun
        if passed > seconds:
            return False
        if passed > 0.001:
            time.sleep(0.0001)
    return True


def _store(group: dist.ProcessGroup | None) -> dist.Store | None:
    """A corner of the store that the processes met in."""
    if "fake" in dist.get_backend(group):
        return None  # ranks that are imagined say nothing
    return dist.PrefixStore("wherry", dist.distributed_c10d._get_default_store())


def _publish(store: dist.Store, failure: PeerFailure) -> None:
    number = store.add("failures", 1)
    store.set(f"failure/{number}", json.dumps(failure))


def _alone(rank: int, what: str, others: str) -> str:
    return (
        f"rank {rank} is in {what}, and {others}. Every rank must make this call, as each has its part in it: take it "
        'out of the "if rank == 0:", which may stay around what is done with the result'
    )


def _left(name: str, rank: int) -> str:
    return f"{name}/left/{rank}"


def _leave(store: dist.Store, name: str, rank: int, recent: deque[Asked]) -> None:
    """The others may learn that this rank takes part in nothing any more, and in how many collectives it has."""
    with contextlib.suppress(RuntimeError):  # the store's process is gone, and with it whoever could read
        store.set(_left(name, rank), str(recent[-1][0] + 1 if recent else 0))


def _last_words(owner: int, store: dist.Store | None, name: str, rank: int, size: int, recent: deque[Asked]) -> None:
    """When the process ends for an error that nobody caught, the others learn which; the store's holder lets them."""
    error = getattr(sys, "last_value", None)
    # A child that was forked is not the rank.
    if store is None or os.getpid() != owner or isinstance(error, PeerError):
        return
    if error is None or isinstance(error, SystemExit):
        _leave(store, name, rank, recent)
        return
    try:
        _publish(store, PeerFailure(rank, MANY, 0, "", f"{type(error).__name__}: {error}".removesuffix(": ")))
        holds_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        begun = time.monotonic()
        while holds_store and time.monotonic() - begun < ROLL_CALL:
            if store.add(f"read/{rank}", 0) >= size - 1:
                return
            time.sleep(0.05)
    except RuntimeError as failed:
        logger.debug("the other ranks could not be told of the failure: %s", failed)
