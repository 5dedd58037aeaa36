import itertools
import math
import os
import signal

import numpy as np
import pytest
import torch

import wherry
from wherry.parallel.comm import SoloComm
from wherry.testing import run_ranks
from wherry.train.data import Samples, Share
from wherry.train.loop import Ending, Loop, Plan, Stop
from wherry.train.model import GPT, GPTConfig

TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 60, dtype=np.uint8)


class Notes:
    def __init__(self):
        self.records = []
        self.alarms = []

    def step(self, record):
        self.records.append(record)

    def non_finite(self, step, loss, *, ended):
        self.alarms.append((step, ended))


def _engine(comm=None):
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=1, hidden=32, heads=2, sequence=16))
    return wherry.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), mesh=comm)[0]


def _loop(engine, plan, *, comm=None, stop=None, notes=None, **clock):
    comm = comm or SoloComm()
    share = Share(comm.rank, comm.size, micro=4, accumulation=1)
    samples, validation = Samples(TEXT, 16, seed=1), Samples(TEXT, 16, seed=0)
    return Loop(engine, comm, plan, samples, validation, share, stop or Stop(), notes, **clock)


def test_the_loss_falls_and_the_outcome_tells_so():
    notes, plan = Notes(), Plan(steps=40, tokens_per_step=64, log_interval=4)
    outcome = _loop(_engine(), plan, notes=notes, clock=map(float, itertools.count()).__next__).run()
    assert outcome.ending is Ending.FINISHED
    assert outcome.first_loss == pytest.approx(5.5, abs=0.3)
    assert outcome.last_loss < 0.6 * outcome.first_loss
    assert math.isfinite(outcome.validation_loss)
    assert (outcome.steps, outcome.tokens) == (40, 40 * 64)
    assert [record.step for record in notes.records] == [1, *range(4, 41, 4)]
    # This clock moves by one second a step.
    assert {record.tokens_per_second for record in notes.records} == {64.0}
    assert notes.records[-1].validation_loss == outcome.validation_loss
    assert notes.records[-2].validation_loss is None


def test_validation_is_held_in_eval_mode_without_gradients():
    engine, held = _engine(), []
    engine.module.register_forward_pre_hook(
        lambda module, args: held.append((module.training, torch.is_grad_enabled(), args[0]))
    )
    plan = Plan(steps=4, tokens_per_step=64, eval_interval=2, eval_batches=3, eval_samples=4)
    _loop(engine, plan).run()
    training, validation = [(True, True)] * 2, [(False, False)] * 3
    assert [each[:2] for each in held] == [*training, *validation] * 2
    first, second = held[2:5], held[-3:]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(first, second, strict=True))


def test_a_lost_loss_is_told_and_ends_the_run_and_so_does_an_error():
    engine, notes = _engine(), Notes()
    losses = iter([5.0, math.nan, 4.0, math.nan, math.inf, math.nan])
    engine.train_batch = lambda data: torch.tensor(next(losses))
    outcome = _loop(engine, Plan(steps=50, tokens_per_step=64), notes=notes).run()
    assert outcome.ending is Ending.DIVERGED
    assert notes.alarms == [(2, False), (4, False), (5, False), (6, True)]
    assert (outcome.steps, outcome.first_loss, outcome.last_loss) == (6, 5.0, 4.0)
    loop = _loop(engine, Plan(steps=3, tokens_per_step=64))
    engine.train_batch = lambda data: 1 / 0
    with pytest.raises(ZeroDivisionError):
        loop.run()
    assert loop.outcome.ending is Ending.FAILED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_after_the_step_under_way(number):
    engine, notes = _engine(), Notes()
    step = engine.train_batch

    def interrupted(data):
        if len(notes.records) == 2:
            os.kill(os.getpid(), number)
        return step(data)

    engine.train_batch = interrupted
    before = signal.getsignal(number)
    with Stop() as stop:
        outcome = _loop(engine, Plan(steps=50, tokens_per_step=64), stop=stop, notes=notes).run()
    assert outcome.ending is Ending.INTERRUPTED
    assert stop.status == 128 + number
    assert outcome.steps == 3
    assert signal.getsignal(number) is before


def test_what_a_rank_meets_that_was_told_to_end_is_not_why_it_ends(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "kill", lambda *told: ended.append(told))
    for number in (signal.SIGTERM, signal.SIGINT):
        with pytest.raises(RuntimeError), Stop() as stop:
            stop.ask(number)
            raise RuntimeError("a peer is gone")
    assert ended == [(os.getpid(), signal.SIGTERM)]


def test_a_second_ctrl_c_ends_at_once_but_an_echo_of_the_first_does_not():
    now = iter([10.0, 10.2, 12.0])
    stop = Stop(clock=lambda: next(now))
    stop.ask()
    stop.ask()
    assert stop.asked
    with pytest.raises(KeyboardInterrupt):
        stop.ask()


def test_ranks_stop_at_the_same_step_and_share_the_loss():
    def body(comm):
        engine, stop, notes = _engine(comm), Stop(), Notes()
        if comm.rank == 1:
            step, calls = engine.train_batch, itertools.count(1)

            def train_batch(data):
                if next(calls) == 3:
                    stop.ask()
                return step(data)

            engine.train_batch = train_batch
        outcome = _loop(engine, Plan(steps=50, tokens_per_step=128), comm=comm, stop=stop, notes=notes).run()
        return outcome.ending, outcome.steps, [record.loss for record in notes.records]

    first, second = run_ranks(2, body)
    assert first == second
    assert first[:2] == (Ending.INTERRUPTED, 3)
