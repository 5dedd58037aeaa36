"""Jobs: the update of one batch as steps between waits, and what runs many of them at once."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from queue import Empty, SimpleQueue

import torch

from wherry.errors import WherryError
from wherry.fake import faking
from wherry.tiers.tickets import Ticket

# What a job is waiting for, and which of them is worth waiting for first: the update keeps the cores busy, a read
# feeds the next update, a write only gives its memory back.
UPDATE, READ, WRITE = range(3)
# Seconds after which a write is looked at again, while another job may come.
PAUSE = 0.001
# Not a wait: the new weights are where they are used, and what is left is to write.
READY = -1
Steps = Generator[tuple[int, Ticket], None, None]


class Job(Ticket):
    """One update under way. `wait()` is until its weights may be used, `finish()` until nothing is left to do.

    Both raise what went wrong in it, with the unit's name.
    """

    __slots__ = ("_ended", "_error", "_event", "_steps", "_under_way", "name", "stage")

    def __init__(self, name: str, steps: Steps) -> None:
        self.name = name
        self.stage = READ
        self._steps = steps
        self._under_way: Ticket | None = None
        self._error: BaseException | None = None
        # That its weights may be used; and its end, where that is another moment.
        self._event = threading.Event()
        self._ended: threading.Event | None = None

    @property
    def begun(self) -> bool:
        return self._under_way is not None or self.done()

    def begin(self) -> None:
        self._advance()

    def ready(self) -> bool:
        """Whether it can go on without a wait."""
        if self._under_way is None:
            return False
        try:
            return self._under_way.done()
        except BaseException:
            return True  # its wait will meet the error, where it is kept

    def go_on(self) -> None:
        """Wait for what it waits for, and take the next step."""
        assert self._under_way is not None
        try:
            self._under_way.wait()
        except BaseException as error:
            self._fail(error)
        else:
            self._advance()

    def _advance(self) -> None:
        try:
            stage, ticket = next(self._steps)
            if stage == READY:
                self._ended = threading.Event()
                self._event.set()
                stage, ticket = next(self._steps)
            self.stage, self._under_way = stage, ticket
        except StopIteration:
            self._under_way = None
            self._end()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._under_way = None
        try:
            self._steps.close()
        except BaseException as another:
            error.add_note(f"while it was given up: {another}")
        finally:
            self._end()

    def _end(self) -> None:
        if self._ended is not None:
            self._ended.set()
        self._event.set()

    @property
    def ready_for_use(self) -> bool:
        return self._event.is_set()

    def done(self) -> bool:
        return self._event.is_set() and (self._ended is None or self._ended.is_set())

    def come_to_an_end(self) -> None:
        """Wait until nothing is left to do, and leave an error to `finish()`."""
        self._event.wait()
        if self._ended is not None:
            self._ended.wait()

    def finish(self) -> None:
        self.come_to_an_end()
        self.wait()

    def wait(self) -> None:
        self._event.wait()
        if self._error is not None:
            if not isinstance(self._error, Exception):
                raise self._error  # Ctrl-C ends the program, whatever of this was left unfinished
            raise WherryError(
                f"the update of {self.name} failed: {self._error}; weights and optimizer state are not those of one "
                "step any more: end the run, mend the cause, and go on from a checkpoint"
            ) from self._error


def drive(take: Callable[[float | None], Job | None], depth: int) -> None:
    """Run jobs, at most `depth` at a time, until none comes any more.

    `take(seconds)` gives the next one, None where there is none any more; where none comes in time it raises `Empty`.
    """
    flying: deque[Job] = deque()
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
        job.begin()
        flying.append(job)
        return True

    while not ended or flying:
        while not ended and len(flying) < depth and begin_next(0 if flying else None):
            pass
        moved = False
        for job in list(flying):
            while job.ready():
                job.go_on()
                moved = True
            if job.done():
                flying.remove(job)
                moved = True
        if moved or not flying:
            continue
        first = min(flying, key=lambda job: job.stage)
        if first.ready_for_use and not ended and len(flying) < depth:
            begin_next(PAUSE)  # somebody may wait for what comes, and nobody does for this write
        else:
            first.go_on()


def drive_one(job: Job) -> None:
    """Run a job to its end."""
    if not job.begun:
        job.begin()
    while not job.done():
        job.go_on()


def drive_all(jobs: Collection[Job], depth: int) -> None:
    """Run these jobs in the calling thread, at most `depth` at a time, to their ends."""
    if len(jobs) > depth:
        waiting = iter(jobs)
        drive(lambda seconds: next(waiting, None), depth)
    else:
        for job in jobs:
            job.begin()
    for job in jobs:
        drive_one(job)


class Line:
    """Jobs that have not begun, in the order in which they will."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._lock = threading.Lock()

    def add(self, job: Job) -> None:
        with self._lock:
            self._jobs.append(job)

    def first(self) -> Job:
        with self._lock:
            return self._jobs.popleft()

    def arrange(self, order: Sequence[Job]) -> None:
        """Those of `order` that are here come first, in that order."""
        with self._lock:
            here = set(self._jobs)
            first = [job for job in order if job in here]
            self._jobs = deque(dict.fromkeys([*first, *self._jobs]))


class Crew:
    """A thread that runs jobs beside the forward and backward, in the order in which they come or are arranged.

    It ends with `close()`, with the crew's last reference, or before the interpreter does.
    """

    def __init__(self, depth: int, device: torch.device) -> None:
        self.depth = depth
        self.device = device
        self._line = Line()
        # For each job in the line its bell; None ends the thread. A finalizer may ring it wherever it runs.
        self._bell: SimpleQueue[bool | None] = SimpleQueue()
        self._finalizer: weakref.finalize | None = None

    def add(self, job: Job) -> None:
        if faking():  # fake tensors know one thread
            drive_one(job)
            return
        if self._finalizer is None:
            # The thread knows the line and not the crew, which may so be let go of.
            work = (self._line, self._bell, self.depth, self.device)
            thread = threading.Thread(target=_work, args=work, name="wherry-update", daemon=True)
            thread.start()
            self._finalizer = weakref.finalize(self, _end, self._bell, thread)
        self._line.add(job)
        self._bell.put(True)

    def arrange(self, order: Sequence[Job]) -> None:
        """Of jobs that have not begun, these come first, in this order."""
        self._line.arrange(order)

    def close(self) -> None:
        """Finish what was begun and end the thread."""
        finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None:
            finalizer()


def _end(bell: SimpleQueue[bool | None], thread: threading.Thread) -> None:
    bell.put(None)
    if thread is not threading.current_thread():
        thread.join()


def _work(line: Line, bell: SimpleQueue[bool | None], depth: int, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with torch.no_grad():
        drive(lambda seconds: line.first() if bell.get(timeout=seconds) else None, depth)
