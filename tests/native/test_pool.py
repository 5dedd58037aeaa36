"""The pool of update threads: concurrent submissions, tickets, forks and the end of the process."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import torch
from tests.cli.programs import wait_for

from wherry import native
from wherry.errors import WherryError
from wherry.native import pool as pools

needs_library = pytest.mark.skipif(native.library() is None, reason=f"no native library: {native.why_not()}")

LARGE = 200_001


def ones_plan(numel=LARGE):
    weight = torch.zeros(numel)
    return weight, native.PackedSegments([native.Segment(torch.ones(numel), weight)])


def threads() -> set[int]:
    """The threads of this process; tests compare them, as those of other tests may end at any time."""
    return {int(task) for task in os.listdir("/proc/self/task")}


def in_a_process(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_without_python(tmp_path, launched):
    """Run several jobs at a gate in C++, and wait for none of them."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    sources = Path(pools.__file__).with_name("src")
    program = tmp_path / "pool_test"
    flags = ["-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", f"-I{sources}"]
    files = [Path(__file__).with_name("pool_test.cpp"), sources / "pool.cpp"]
    subprocess.run([compiler, *flags, *files, "-o", program, "-lpthread"], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def test_many_submissions_at_once():
    with native.Pool(threads=3) as pool:
        plans = [ones_plan(50_000 + 1000 * i) for i in range(40)]
        tickets = [plan.submit(native.SGD(1.0), 2.0, pool) for _, plan in plans]
        for ticket in reversed(tickets):
            ticket.wait()
            ticket.wait()
            assert ticket.done()
        for weight, _ in plans:
            assert torch.equal(weight, torch.full_like(weight, -2.0))


def test_a_dropped_ticket_keeps_its_tensors_until_the_update_is_done():
    with native.Pool(threads=1) as pool:
        weight, plan = ones_plan(2_000_000)
        grads = [torch.full((2_000_000,), 3.0)]
        plan.submit(native.SGD(1.0), 1.0, pool, grads)
        del plan, grads
        gc.collect()
    assert torch.equal(weight, torch.full_like(weight, -3.0))


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
def test_closing_finishes_what_was_submitted():
    pool = native.Pool(threads=2)
    weights = []
    for _ in range(10):
        weight, plan = ones_plan()
        plan.submit(native.SGD(1.0), 1.0, pool)
        weights.append(weight)
    pool.close()
    pool.close()
    for weight in weights:
        assert torch.equal(weight, torch.full_like(weight, -1.0))
    with pytest.raises(WherryError, match="it is closed"):
        ones_plan()[1].submit(native.SGD(1.0), 1.0, pool)


@needs_library
def test_threads_end_with_the_pool():
    _, plan = ones_plan()
    gc.collect()
    before = threads()
    pool = native.Pool(threads=3)
    assert threads() <= before  # a pool starts none before it has work
    plan.submit(native.SGD(1.0), 1.0, pool).wait()
    assert len(threads() - before) == 3
    pool.close()
    wait_for(lambda: threads() <= before)  # the system lists a thread a moment longer than it lives
    dropped = native.Pool(threads=2)
    plan.submit(native.SGD(1.0), 1.0, dropped).wait()
    assert len(threads() - before) == 2
    del dropped
    gc.collect()
    wait_for(lambda: threads() <= before)


@needs_library
def test_a_forked_child_gets_threads_of_its_own(launched):
    out = in_a_process(
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
    assert sorted(out) == ["child", "parent"]


def test_the_process_ends_with_updates_under_way(launched):
    out = in_a_process(
        """
        import torch
        from wherry import native
        plans = [native.PackedSegments([native.Segment(*torch.zeros(2, 3_000_000))]) for _ in range(8)]
        tickets = [plan.submit(native.SGD(1.0)) for plan in plans]
        print("ends")
        """
    )
    assert out == ["ends"]


@needs_library
def test_threads_are_bound_to_the_given_cores():
    core = pools.allowed_cpus()[-1]
    _, plan = ones_plan()
    others = threads()
    with native.Pool(cores=[core]) as pool:
        assert pool.threads == 1
        plan.submit(native.SGD(1.0), 1.0, pool).wait()
        (own,) = threads() - others
        assert os.sched_getaffinity(own) == {core}


def test_ranks_share_the_cores(monkeypatch):
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


def test_physical_cores_of_this_machine():
    cores = pools.physical_cores(pools.allowed_cpus())
    assert cores
    assert set(cores) <= set(pools.allowed_cpus())


def test_impossible_pools_are_refused():
    with pytest.raises(WherryError, match=r"cores \[99999\] are not among the CPUs"):
        native.Pool(cores=[99999])
    with pytest.raises(WherryError, match="threads=0, expected at least 1"):
        native.Pool(threads=0)
    with pytest.raises(WherryError, match="share=0, expected more than 0"):
        native.Pool(share=0)
    with pytest.raises(WherryError, match="local_ranks=0"):
        native.Pool(local_ranks=0)
