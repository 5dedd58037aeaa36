"""The pool of update threads: concurrent submissions, tickets, forks and the end of the process."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch
from tests.cli.programs import wait_for

from wherry import native
from wherry.errors import WherryError
from wherry.native import pool as pools

from .cases import needs_library


def ones_plan(numel=200_001):
    weight = torch.zeros(numel)
    return weight, native.PackedSegments([native.Segment(torch.ones(numel), weight)])


def threads() -> set[int]:
    """The threads of this process; tests compare them, as those of other tests may end at any time."""
    return {int(task) for task in os.listdir("/proc/self/task")}


@needs_library
def test_closing_finishes_what_was_submitted_and_dropped():
    pool = native.Pool(threads=2)
    weights, tickets = [], []
    for numel in range(50_000, 90_000, 1000):
        weight, plan = ones_plan(numel)
        weights.append(weight)
        tickets.append(plan.submit(native.SGD(1.0), 2.0, pool, [torch.full((numel,), 3.0)]))
    for ticket in tickets[20:0:-1]:
        ticket.wait()
        ticket.wait()
        assert ticket.done()
    del plan, ticket, tickets
    pool.close()
    pool.close()
    for weight in weights:
        assert torch.equal(weight, torch.full_like(weight, -6.0))
    with pytest.raises(WherryError, match="it is closed"):
        ones_plan()[1].submit(native.SGD(1.0), 1.0, pool)


@needs_library
def test_nothing_is_kept_after_waiting():
    with native.Pool(threads=1) as pool:
        _, plan = ones_plan()
        gone = weakref.ref(plan)
        ticket = plan.submit(native.SGD(1.0), 1.0, pool)
        ticket.wait()
        del plan
        assert gone() is None


@needs_library
def test_threads_end_with_the_pool_and_are_bound_to_its_cores():
    _, plan = ones_plan()
    gc.collect()
    core = pools.allowed_cpus()[-1]
    for options, count in (({"threads": 3}, 3), ({"cores": [core]}, 1)):
        before = threads()
        pool = native.Pool(**options)
        assert threads() <= before  # a pool starts none before it has work
        plan.submit(native.SGD(1.0), 1.0, pool).wait()
        own = threads() - before
        assert len(own) == pool.threads == count
        if "cores" in options:
            assert os.sched_getaffinity(own.pop()) == {core}
            del pool  # which closes it
            gc.collect()
        else:
            pool.close()
        wait_for(lambda before=before: threads() <= before)  # the system lists a thread a moment longer than it lives


@needs_library
def test_a_forked_child_gets_threads_of_its_own(launched):
    out = launched.interpret(
        """
        import os, torch
        torch.set_num_threads(1)  # torch's own pool does not live through a fork
        from wherry import native
        weight = torch.zeros(100_000)
        plan = native.PackedSegments([native.Segment(torch.ones(100_000), weight)])
        own = native.Pool(threads=2)
        plan.run(native.SGD(1.0)); plan.run(native.SGD(1.0), pool=own)
        under_way = native.PackedSegments([native.Segment(*torch.zeros(2, 9_000_000))]).submit(native.SGD(1.0))
        child = os.fork()
        plan.run(native.SGD(1.0)); plan.run(native.SGD(1.0), pool=own)
        assert torch.equal(weight, torch.full_like(weight, -4.0))
        if not child:
            try:
                under_way.wait()
            except ValueError as error:
                assert "is its fork" in str(error), error
            else:
                raise AssertionError("waited for another process's update")
            print("child", flush=True)
            raise SystemExit(0)
        under_way.wait()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        print("parent")
        """
    )
    assert sorted(out.split()) == ["child", "parent"]


def test_the_process_ends_with_updates_under_way(launched):
    out = launched.interpret(
        """
        import torch
        from wherry import native
        plans = [native.PackedSegments([native.Segment(*torch.zeros(2, 3_000_000))]) for _ in range(8)]
        tickets = [plan.submit(native.SGD(1.0)) for plan in plans]
        print("ends")
        """
    )
    assert out == "ends\n"


def test_ranks_share_the_cores(monkeypatch):
    own = pools.physical_cores(pools.allowed_cpus())
    assert own and set(own) <= set(pools.allowed_cpus())
    monkeypatch.setattr(pools, "allowed_cpus", lambda: list(range(16)))
    monkeypatch.setattr(pools, "physical_cores", lambda cpus: list(cpus)[:8])
    monkeypatch.setattr(pools, "cpu_quota", lambda: None)
    shares = [native.Pool(local_ranks=3, local_rank=rank).cores for rank in range(3)]
    assert sum(shares, ()) == tuple(range(8))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert native.Pool(local_ranks=3).cores == shares[1]
    # More ranks than cores: one thread each, bound nowhere.
    assert [native.Pool(local_ranks=20, local_rank=r).threads for r in range(20)] == [1] * 20
    assert native.Pool(share=0.5).threads == 4 and native.Pool(share=0.01).threads == 1
    # Two CPUs' worth of time: two threads, which the scheduler places.
    monkeypatch.setattr(pools, "cpu_quota", lambda: 2.5)
    limited = native.Pool()
    assert (limited.threads, limited.cores) == (2, ())


def test_impossible_pools_are_refused():
    for options, error in (
        ({"cores": [99999]}, r"cores \[99999\] are not among the CPUs"),
        ({"threads": 0}, "threads=0, expected at least 1"),
        ({"share": 0}, "share=0, expected more than 0"),
        ({"local_ranks": 0}, "local_ranks=0, expected the number of ranks"),
    ):
        with pytest.raises(WherryError, match=error):
            native.Pool(**options)
