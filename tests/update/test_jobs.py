"""Updates that run beside each other in a crew's thread."""

import threading

import torch

from wherry.tiers.tickets import DONE, Ticket
from wherry.update.jobs import READY, WRITE, Crew, Job, Steps


class SlowWrite(Ticket):
    def __init__(self) -> None:
        self.ends = threading.Event()
        # Whoever runs the job has come to its write, and has nothing else to do.
        self.met = threading.Event()

    def wait(self) -> None:
        self.met.set()
        assert self.ends.wait(30), "the write is waited for before another job begins"

    def done(self) -> bool:
        self.met.set()
        return self.ends.is_set()


def test_a_job_that_comes_while_another_one_writes_begins_at_once() -> None:
    crew, write = Crew(depth=2, device=torch.device("cpu")), SlowWrite()

    def writes(ticket: Ticket) -> Steps:
        yield READY, DONE
        yield WRITE, ticket

    first, second = Job("first", writes(write)), Job("second", writes(DONE))
    crew.add(first)
    assert write.met.wait(30)
    crew.add(second)
    second.finish()
    assert first.ready_for_use and not first.done()
    write.ends.set()
    crew.close()
    assert first.done()
