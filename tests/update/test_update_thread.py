"""Updates that overlap in a thread of their own."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wherry.errors import WherryError
from wherry.parallel.comm import Merging, SoloComm
from wherry.tickets import DONE, CallbackTicket, Ticket
from wherry.tiers.streams import link_to
from wherry.update.pipeline import Phase
from wherry.update.update_thread import READY, STORE, Steps, UpdateJob, UpdateThread, drive_all
from wherry.update.updater import UpdatePolicy, Updater


class SlowWrite(Ticket):
    def __init__(self) -> None:
        self.ends = threading.Event()
        # The thread has come to the write of its job, and has nothing else to do.
        self.met = threading.Event()

    def wait(self) -> None:
        self.met.set()
        assert self.ends.wait(30), "the write is waited for before another job begins"

    def done(self) -> bool:
        self.met.set()
        return self.ends.is_set()


def test_a_job_that_comes_while_another_one_writes_begins_at_once() -> None:
    thread, write = UpdateThread(depth=2, device=torch.device("cpu")), SlowWrite()

    def writes(ticket: Ticket) -> Steps:
        yield READY, DONE
        yield STORE, ticket

    first, second = UpdateJob("first", writes(write)), UpdateJob("second", writes(DONE))
    thread.add(first)
    assert write.met.wait(30)
    thread.add(second)
    second.finish()
    assert first.ready_for_use and not first.done()
    write.ends.set()
    thread.close()
    assert first.done()


def test_jobs_that_have_not_begun_are_arranged_anew() -> None:
    thread, write = UpdateThread(depth=1, device=torch.device("cpu")), SlowWrite()
    seen: list[str] = []

    def noted(name: str, ticket: Ticket = DONE) -> UpdateJob:
        def steps() -> Steps:
            seen.append(name)
            yield STORE, ticket

        return UpdateJob(name, steps())

    jobs = {name: noted(name, write if name == "under way" else DONE) for name in ("under way", "a", "b", "c", "d")}
    for job in jobs.values():
        thread.add(job)
    assert write.met.wait(30)
    thread.arrange([jobs[name] for name in ("under way", "d", "b")])
    write.ends.set()
    thread.close()
    assert seen == ["under way", "d", "b", "a", "c"]


def test_ctrl_c_in_an_update_is_raised_once_and_told_of_from_then_on() -> None:
    def interrupted() -> Steps:
        raise KeyboardInterrupt
        yield READY, DONE

    job = UpdateJob("first", interrupted())
    drive_all([job], depth=2)
    with pytest.raises(KeyboardInterrupt):
        job.wait()
    for wait in (job.wait, job.finish):
        with pytest.raises(WherryError, match="first failed: it ended with KeyboardInterrupt"):
            wait()


def test_ctrl_c_in_a_wait_leaves_what_is_waited_for_as_it_is() -> None:
    errors = [KeyboardInterrupt()]

    def wait() -> None:
        if errors:
            raise errors.pop()

    ticket = CallbackTicket(wait, lambda: False)
    with pytest.raises(KeyboardInterrupt):
        ticket.wait()
    assert not ticket.done()
    ticket.wait()
    assert ticket.done()


@pytest.mark.parametrize("done", [False, True])
def test_ctrl_c_breaks_an_engine_where_an_update_is_left_unfinished(done: bool) -> None:
    """Finish an update that goes on in the thread."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    link = link_to(torch.device("cpu"))
    storages: Any = SimpleNamespace(link=link)
    updater: Any = Updater([], SoloComm(), storages, UpdatePolicy(), Merging(0), alone=True)
    job = CallbackTicket(interrupt, lambda: done)
    updater.pipelines = [SimpleNamespace(phase=Phase.PENDING, job=job, gathers=[], flats=[])]
    with pytest.raises(KeyboardInterrupt):
        updater.settle()
    assert (updater.broken is not None) == done
    updater.pipelines = []
    updater.close()
    link.close()
