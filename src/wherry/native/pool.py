"""The library's own threads: bound to physical cores, apart from torch's, shared by all that is submitted to them."""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from wherry.errors import WherryError
from wherry.tickets import Ticket

# Cores of a rank on which no update runs beside an accelerator, if it has eight or more.
SPARE = 2


def allowed_cpus() -> list[int]:
    """The CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def physical_cores(cpus: Iterable[int]) -> list[int]:
    """One CPU of each physical core among `cpus`."""
    chosen: dict[str, int] = {}
    for cpu in cpus:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            core = siblings.read_text().strip()
        except OSError:  # no such topology here (not Linux, or hidden by the container): each CPU is a core
            core = str(cpu)
        chosen.setdefault(core, cpu)
    return sorted(chosen.values())


def cpu_quota() -> float | None:
    """The CPUs' worth of time that the control group of this process gets, where one is set."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):  # no control groups of version 2 here
        return None
    return None if quota == "max" else int(quota) / int(period)


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


def _destroy(native: ctypes.CDLL, handle: int, pid: int) -> None:
    # The threads of a pool exist only in the process that made it.
    if os.getpid() == pid:
        native.wherry_pool_destroy(handle)


class Pool:
    """Threads for updates and passes.

    `threads` defaults to the physical cores this process may use, over `local_ranks`; `cores` binds the threads to
    these CPUs instead of the process's part of them, of which it takes a `share`. Threads start at first use, and again
    in a forked child.

    >>> with Pool(threads=1) as pool:
    ...     pool.threads
    1
    """

    def __init__(
        self,
        threads: int | None = None,
        local_ranks: int = 1,
        cores: list[int] | None = None,
        *,
        local_rank: int | None = None,
        share: float = 1.0,
    ) -> None:
        if local_ranks < 1:
            raise WherryError(f"Pool: local_ranks={local_ranks}, expected the number of ranks on this machine, >= 1")
        rank = _from_environment("LOCAL_RANK", 0) if local_rank is None else local_rank
        chosen, binding = self._part(local_ranks, rank % local_ranks) if cores is None else (list(cores), True)
        allowed = allowed_cpus()
        if strange := sorted(set(chosen) - set(allowed)):
            raise WherryError(f"Pool: cores {strange} are not among the CPUs this process may use, {allowed}")
        if threads is not None and threads < 1:
            raise WherryError(f"Pool: threads={threads}, expected at least 1")
        if not 0 < share <= 1:
            raise WherryError(f"Pool: share={share!r}, expected more than 0 and at most 1")
        self.threads = threads or max(1, round(share * len(chosen)))
        # More threads than cores would queue up behind each other if bound.
        self.cores = tuple(chosen) if binding and 0 < self.threads <= len(chosen) else ()
        self._closed = False
        self._made: tuple[int, int, weakref.finalize] | None = None  # pid, handle, its end

    @staticmethod
    def _part(local_ranks: int, rank: int) -> tuple[list[int], bool]:
        """This rank's cores, and whether to bind to them: under a time quota the scheduler chooses better."""
        import torch

        cores = physical_cores(allowed_cpus())
        mine = cores[len(cores) * rank // local_ranks : len(cores) * (rank + 1) // local_ranks]
        if torch.accelerator.is_available() and not torch.backends.mps.is_available():
            # For the threads that launch kernels: a GPU waits where they do. The first cores serve interrupts as well.
            mine = mine[min(SPARE, len(mine) // 4) :]
        quota = cpu_quota()
        limit = max(1, int(quota / local_ranks)) if quota else len(mine)
        return (mine, True) if limit >= len(mine) else (mine[:limit], False)

    def handle(self, native: ctypes.CDLL) -> int:
        """The library's pool, made for this process if need be."""
        pid = os.getpid()
        if self._made is not None and self._made[0] == pid:
            return self._made[1]
        if self._closed:
            raise WherryError("Pool: it is closed; make another one")
        cores = (ctypes.c_int * max(1, len(self.cores)))(*self.cores)
        reason = ctypes.create_string_buffer(256)
        handle = native.wherry_pool_create(self.threads, cores, len(self.cores), reason, len(reason))
        if not handle:
            raise WherryError(
                f"Pool: the system refused {self.threads} threads ({reason.value.decode(errors='replace')}); raise the "
                "limit (`ulimit -u`, or the container's limit on pids), or ask for fewer threads"
            )
        self._made = (pid, handle, weakref.finalize(self, _destroy, native, handle, pid))
        return handle

    def close(self) -> None:
        """Finish what was submitted and end the threads."""
        self._closed = True
        if self._made is not None:
            self._made[2]()
            self._made = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class JobTicket(Ticket):
    """The ticket of an update under way on a pool's threads. Its tensors live as long: who drops it waits for it."""

    __slots__ = ("_job", "_keeps", "_native", "_pid")

    def __init__(self, native: ctypes.CDLL, job: int, keeps: tuple[Any, ...]) -> None:
        self._native, self._job, self._keeps, self._pid = native, job, keeps, os.getpid()

    def _check_process(self) -> None:
        if self._keeps and os.getpid() != self._pid:
            raise WherryError(
                f"this ticket is of an update submitted in process {self._pid}, and this is its fork {os.getpid()}, "
                "where that update does not run; wait before forking"
            )

    def wait(self) -> None:
        self._check_process()
        self._native.wherry_job_wait(self._job)
        self._keeps = ()

    def done(self) -> bool:
        if self._keeps:
            self._check_process()
            if not self._native.wherry_job_done(self._job):
                return False
            self._keeps = ()
        return True

    def __del__(self) -> None:
        if self._keeps and os.getpid() == self._pid:
            self._native.wherry_job_wait(self._job)
        self._native.wherry_job_free(self._job)


@functools.cache
def nodes() -> list[int]:
    """The NUMA nodes on whose cores this process updates."""
    cpus = default_pool().cores or allowed_cpus()
    links = (Path("/sys/devices/system/cpu", f"cpu{cpu}").glob("node[0-9]*") for cpu in cpus)
    return sorted({int(link.name.removeprefix("node")) for found in links for link in found})


@functools.cache
def default_pool() -> Pool:
    """The pool used where none is named: one for the process, made at first use."""
    return Pool(local_ranks=max(1, _from_environment("LOCAL_WORLD_SIZE", 1)))
