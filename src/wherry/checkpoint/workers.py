"""Threads for reading, writing and checksums: these leave the interpreter to others while they run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType

Task = Callable[[], None]

# Enough checksums at once for a fast disk. With files' blocks of 8 MiB, they and what waits for them are 40 MiB.
COUNT = 4


class Workers:
    """A few threads that take tasks in turn. They start with the first task, and end with `close`.

    Not an executor of `concurrent.futures`: a save behind training goes on when the interpreter already waits for its
    last threads, and executors take no more tasks then.
    """

    def __init__(self, count: int = COUNT) -> None:
        self.count = count
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._left = 0
        self._failure: Exception | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def do(self, task: Task) -> None:
        """Have a task done. Waits while each thread has one and another waits; raises the error of one before."""
        if self._failure is not None:
            self.wait()
        with self._changed:
            self._changed.wait_for(lambda: self._left <= self.count)
            self._left += 1
        self._tasks.put(task)
        if len(self._threads) < min(self.count, self._left):
            thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads: those that are there do it, or this one
                if not self._threads:
                    self._tasks.put(None)
                    self._run()
                return
            self._threads.append(thread)

    def wait(self) -> None:
        """Return when every task is done; raises the first error. Tasks after it were not done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left)
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for the tasks under way, whatever becomes of them."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left)
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                if self._failure is None:
                    task()
            except Exception as error:
                with self._changed:
                    self._failure = self._failure or error
            finally:
                del task  # with the memory that it reads
                with self._changed:
                    self._left -= 1
                    self._changed.notify_all()
