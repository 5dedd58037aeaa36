"""Updates under way: each one a generator of steps between waits, many of them driven at once, by a thread beside."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from queue import Empty, SimpleQueue

import torch

from wherry.errors import WherryError
from wherry.fake import faking
from wherry.tickets import Ticket
from wherry.tiers.streams import use_device

# What an update is waiting for, and which of them is worth waiting for first: the update itself keeps the cores busy,
# a read feeds the next one, a write only gives its memory back.
UPDATE, FETCH, STORE = range(3)
# Not a wait: the new weights are where they are used, and what is left is to write.
READY = -1
# Seconds after which a write is looked at again, while another update may come.
PAUSE = 0.001
# Seconds after which who waits for an update looks whether it has missed its end.
LOOKS_AGAIN = 0.1
Steps = Generator[tuple[int, Ticket], None, None]


class Latch:
    """Set once, and waited for. Ctrl-C inside of it leaves nothing locked for others, as in threading.Event it can."""

    __slots__ = ("_lock", "_set")

    def __init__(self) -> None:
        self._set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        if not self._set:
            self._set = True
            self._lock.release()

    def is_set(self) -> bool:
        return self._set

    def wait(self) -> None:
        while not self._set:
            if self._lock.acquire(timeout=LOOKS_AGAIN):
                self._lock.release()


class UpdateJob(Ticket):
    """One update under way. `wait()` is until its weights may be used, `finish()` until nothing is left to do.

    Both raise what went wrong in it, with the unit's name.
    """

    __slots__ = ("_ended", "_error", "_steps", "_usable", "_waits_for", "name", "stage")

    def __init__(self, name: str, steps: Steps) -> None:
        self.name = name
        # What it waits for; nothing before its first step and after its last.
        self.stage = FETCH
        self._waits_for: Ticket | None = None
        self._steps = steps
        self._error: BaseException | None = None
        self._usable = Latch()
        self._ended = Latch()

    def ready(self) -> bool:
        """Whether it can go on without a wait."""
        if self._waits_for is None:
            return False
        try:
            return self._waits_for.done()
        except BaseException:
            return True  # its wait will meet the error, where it is kept

    def go_on(self) -> None:
        """Wait for what it waits for, and take the next step."""
        try:
            if self._waits_for is not None:
                self._waits_for.wait()
            stage, ticket = next(self._steps)
            if stage == READY:
                self._usable.set()
                stage, ticket = next(self._steps)
            self.stage, self._waits_for = stage, ticket
        except StopIteration:
            self._end()
        except BaseException as error:
            self._fail(error)

    def launch(self) -> None:
        """All steps up to the first that waits for what the device does."""
        while not (self.done() or self.stage == STORE):
            self.go_on()

    def run(self) -> None:
        """All steps that are left."""
        while not self.done():
            self.go_on()

    def give_up(self, error: BaseException) -> None:
        """Who runs it has left it, for this: it ends where it is, unless it has ended. It may not be running."""
        if not self.done():  # who was interrupted knows; who waits for this later is told, and not interrupted again
            self._fail(error if isinstance(error, Exception) else RuntimeError(f"it ended with {type(error).__name__}"))

    @property
    def ended_well(self) -> bool:
        """Whether nothing is left to do, and nothing went wrong."""
        return self._ended.is_set() and self._error is None

    def _fail(self, error: BaseException) -> None:
        self._error = error
        try:
            self._steps.close()
        except BaseException as another:
            error.add_note(f"while it was given up: {another}")
        finally:
            self._end()

    def _end(self) -> None:
        self._waits_for = None
        self._ended.set()
        self._usable.set()

    @property
    def ready_for_use(self) -> bool:
        return self._usable.is_set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait_for_end(self) -> None:
        """Wait until nothing is left to do, and leave an error to `wait()` and `finish()`."""
        self._ended.wait()

    def finish(self) -> None:
        self.wait_for_end()
        self.wait()

    def wait(self) -> None:
        self._usable.wait()
        if self._error is not None:
            if not isinstance(self._error, Exception):
                # Ctrl-C ends the program, whatever of this was left unfinished. Who asks again is told of that.
                interrupt, self._error = self._error, RuntimeError(f"it ended with {type(self._error).__name__}")
                raise interrupt
            raise WherryError(
                f"the update of {self.name} failed: {self._error}; weights and optimizer state are not those of one "
                "step any more: end the run, mend the cause, and go on from a checkpoint"
            ) from self._error


def drive(take: Callable[[float | None], UpdateJob | None], depth: int) -> None:
    """Run updates, at most `depth` at a time, until none comes any more.

    `take(seconds)` gives the next one, None where there is none any more; where none comes in time it raises `Empty`.
    """
    under_way: deque[UpdateJob] = deque()
    ended = False

    def begin_next(seconds: float | None) -> bool:
        nonlocal ended
        try:
            job = take(seconds)
        except Empty:
            return False
        if job is None:
            ended = True
            return False
        job.go_on()
        under_way.append(job)
        return True

    while not ended or under_way:
        while not ended and len(under_way) < depth and begin_next(0 if under_way else None):
            pass
        moved = False
        for job in list(under_way):
            while job.ready():
                job.go_on()
                moved = True
            if job.done():
                under_way.remove(job)
                moved = True
        if moved or not under_way:
            continue
        first = min(under_way, key=lambda job: job.stage)
        if first.ready_for_use and not ended and len(under_way) < depth:
            begin_next(PAUSE)  # somebody may wait for what comes, and nobody does for this write
        else:
            first.go_on()


def drive_all(jobs: Collection[UpdateJob], depth: int) -> None:
    """Run these in the calling thread, at most `depth` at a time, to their ends, also if one has failed."""
    if len(jobs) > depth:
        waiting = iter(jobs)
        drive(lambda seconds: next(waiting, None), depth)
    else:
        for job in jobs:
            job.go_on()
    for job in jobs:
        job.run()


class _Queue:
    """Updates that have not begun, in the order in which they will."""

    def __init__(self) -> None:
        self._jobs: deque[UpdateJob] = deque()
        self._lock = threading.Lock()
        # True for each of them; None ends the thread. A finalizer may put it, wherever it runs.
        self.bell: SimpleQueue[bool | None] = SimpleQueue()

    def add(self, job: UpdateJob) -> None:
        with self._lock:
            self._jobs.append(job)
        self.bell.put(True)

    def take(self, seconds: float | None) -> UpdateJob | None:
        if not self.bell.get(timeout=seconds):
            return None
        with self._lock:
            return self._jobs.popleft()

    def put_first(self, order: Sequence[UpdateJob]) -> None:
        with self._lock:
            here = set(self._jobs)
            first = [job for job in order if job in here]
            self._jobs = deque(dict.fromkeys([*first, *self._jobs]))


class UpdateThread:
    """Runs updates beside the forward and backward, in the order in which they come or are arranged.

    The thread begins with the first of them. It ends with `close()`, with the last reference to this object, or before
    the interpreter does.
    """

    def __init__(self, depth: int, device: torch.device) -> None:
        self.depth = depth
        self.device = device
        self._queue = _Queue()
        self._finalizer: weakref.finalize | None = None

    def add(self, job: UpdateJob) -> None:
        if faking():  # fake tensors know one thread
            job.run()
            return
        if self._finalizer is None:
            # The thread knows the queue and not this object, which may so be let go of.
            work = (self._queue, self.depth, self.device)
            thread = threading.Thread(target=_work, args=work, name="wherry-update", daemon=True)
            thread.start()
            self._finalizer = weakref.finalize(self, _end, self._queue, thread)
        self._queue.add(job)

    def arrange(self, order: Sequence[UpdateJob]) -> None:
        """Of updates that have not begun, these come first, in this order."""
        self._queue.put_first(order)

    def close(self) -> None:
        """Finish what was begun and end the thread."""
        finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None:
            finalizer()


def _end(queue: _Queue, thread: threading.Thread) -> None:
    queue.bell.put(None)
    if thread is not threading.current_thread():
        thread.join()


def _work(queue: _Queue, depth: int, device: torch.device) -> None:
    use_device(device)
    with torch.no_grad():
        drive(queue.take, depth)
