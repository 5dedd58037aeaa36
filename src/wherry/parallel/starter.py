"""A thread that begins collectives while the others of its process go on with something else."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

Begin = Callable[[], None]


class Starter:
    """Runs what it is given, one after the other, in the order in which it comes: ranks that ask in one order begin
    their collectives in one order.

    One is shared by all engines that use a group. It ends with its last reference, or before the interpreter does.
    """

    def __init__(self) -> None:
        # Why nothing is begun any more: the other ranks' collectives would meet those of another batch, or engine.
        self.stopped: BaseException | None = None
        self._queue: SimpleQueue[Begin | None] = SimpleQueue()
        # One entry for each that has not been run to its end.
        self._unfinished: deque[None] = deque()
        self._finalizer: weakref.finalize | None = None
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        return bool(self._unfinished)

    def add(self, begin: Begin) -> None:
        """`begin` keeps its errors to itself."""
        with self._lock:
            if self._finalizer is None:
                # The thread knows the queue and not the starter, which may so be let go of.
                work = (self._queue, self._unfinished)
                thread = threading.Thread(target=_work, args=work, name="wherry-starter", daemon=True)
                thread.start()
                self._finalizer = weakref.finalize(self, _end, self._queue, thread)
            self._unfinished.append(None)
            self._queue.put(begin)


def _end(queue: SimpleQueue[Begin | None], thread: threading.Thread) -> None:
    queue.put(None)
    if thread is not threading.current_thread():
        thread.join()


def _work(queue: SimpleQueue[Begin | None], unfinished: deque[None]) -> None:
    while (begin := queue.get()) is not None:
        try:
            begin()
        finally:
            unfinished.pop()
            del begin  # an engine is not kept by what it asked for last
