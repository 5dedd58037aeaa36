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

    One is shared by all engines that use a group. Its thread ends with the last of them.
    """

    def __init__(self) -> None:
        # Why nothing is begun any more: the other ranks' collectives would meet those of another batch, or engine.
        self.stopped: BaseException | None = None
        # One entry for each that has not been run to its end.
        self._unfinished: deque[None] = deque()
        self._users = 0
        self._thread: tuple[SimpleQueue[Begin | None], threading.Thread] | None = None
        # A user may be let go of by a collection that begins anywhere.
        self._lock = threading.RLock()

    @property
    def busy(self) -> bool:
        return bool(self._unfinished)

    def serve(self, user: object) -> Callable[[], object]:
        """There is a thread for what `user` adds, until that is gone, or has called what is returned."""
        with self._lock:
            self._users += 1
        return weakref.finalize(user, self._leave)

    def add(self, begin: Begin) -> None:
        """`begin` keeps its errors to itself."""
        with self._lock:
            if self._thread is None:
                # The thread knows the queue and not the starter, which may so be let go of.
                queue: SimpleQueue[Begin | None] = SimpleQueue()
                work = (queue, self._unfinished)
                self._thread = queue, threading.Thread(target=_work, args=work, name="wherry-starter", daemon=True)
                self._thread[1].start()
            self._unfinished.append(None)
            self._thread[0].put(begin)

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users or self._thread is None:
                return
            (queue, thread), self._thread = self._thread, None
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
