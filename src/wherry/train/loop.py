"""The training loop: batches in, steps of the engine, numbers out."""

from __future__ import annotations

import enum
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from wherry.parallel.comm import Comm
from wherry.train.data import Samples, Share, batches

NON_FINITE_STEPS = 3
"""After so many non-finite losses in a row a run has diverged: fp16's loss scale would have recovered by then."""


@dataclass(frozen=True)
class Plan:
    """How long to train, and how often to tell."""

    steps: int
    tokens_per_step: int
    # Steps that are done already.
    first: int = 0
    log_interval: int = 1
    eval_interval: int = 0
    eval_batches: int = 8
    # Samples of a validation batch on each rank.
    eval_samples: int = 8
    save_interval: int = 0


@dataclass(frozen=True)
class Record:
    """What is known at a logged step. The step counts from 1; times are of the steps since the record before."""

    step: int
    loss: float
    lr: float
    gradient_norm: float
    tokens: int
    tokens_per_second: float
    step_seconds: float
    skipped_steps: int
    validation_loss: float | None = None


class Ending(enum.Enum):
    FINISHED = "finished"
    DIVERGED = "diverged"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass
class Outcome:
    """How a run went; until it has ended in order it counts as failed."""

    ending: Ending = Ending.FAILED
    # Of the whole training; `seconds` and `tokens_here` are of this run, which may have resumed it.
    steps: int = 0
    tokens: int = 0
    tokens_here: int = 0
    seconds: float = 0.0
    first_loss: float = math.nan
    validation_loss: float = math.nan
    last_losses: deque[float] = field(default_factory=lambda: deque(maxlen=10))

    @property
    def averaged(self) -> int:
        """Of how many logged losses the last one is the mean: ten, or the later half of fewer."""
        logged = len(self.last_losses)
        return logged if logged == self.last_losses.maxlen else (logged + 1) // 2

    @property
    def last_loss(self) -> float:
        """The mean of the last logged losses: a single batch says little."""
        return sum(list(self.last_losses)[-self.averaged :]) / self.averaged if self.last_losses else math.nan


class Stop:
    """Ctrl-C or SIGTERM asks for the end of the run after the step under way; a second one, a second later, ends it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked_at: float | None = None
        self._before: dict[int, Any] = {}
        self._number = int(signal.SIGINT)

    @property
    def asked(self) -> bool:
        return self._asked_at is not None

    @property
    def status(self) -> int:
        """The exit status of a run that was asked to end."""
        return 128 + self._number

    def ask(self, number: int = signal.SIGINT, _frame: FrameType | None = None) -> None:
        # A terminal and a launcher may both deliver the same Ctrl-C.
        if self._asked_at is None:
            self._asked_at, self._number = self._clock(), int(number)
        elif self._clock() - self._asked_at > 1.0:
            raise KeyboardInterrupt

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self.ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if kind is not None and self.asked and self._number == signal.SIGTERM:
            # A launcher ends the ranks that one has left alone so. What these meet meanwhile is not why the run ends.
            os.kill(os.getpid(), signal.SIGTERM)


@dataclass
class Loop:
    """Trains for a plan's steps, or until it is stopped or the loss is lost. All ranks leave it at the same step."""

    # What has `train_batch`, `train`, `get_global_grad_norm`, `get_lr`, and gives the loss of (ids, labels).
    engine: Any
    comm: Comm
    plan: Plan
    training: Samples
    validation: Samples
    share: Share
    stop: Stop
    # Told of records and of losses that are not finite, on rank 0.
    reporter: Any = None
    save: Callable[[int], None] | None = None
    clock: Callable[[], float] = time.perf_counter
    outcome: Outcome = field(default_factory=Outcome)
    non_finite: int = 0

    def run(self) -> Outcome:
        """Train. The outcome is complete, whatever ended the run."""
        plan, outcome = self.plan, self.outcome
        begin = logged = self.clock()
        logged_step = plan.first
        data = batches(self.training, self.share, plan.steps, plan.first)
        for step in range(plan.first + 1, plan.steps + 1):
            # Train.
            loss = self.engine.train_batch(data)

            # Agree: whether any rank was asked to stop, and, where it is told, on the mean loss.
            telling = step % plan.log_interval == 0 or step in (plan.first + 1, plan.steps)
            told = torch.tensor([float(self.stop.asked), float(loss) if telling else 0.0], dtype=torch.float64)
            self.comm.all_reduce(told).wait()
            stopped, mean = bool(told[0] > 0), float(told[1]) / self.comm.size

            # Validate.
            validated = self._validate() if self._falls_on(step, plan.eval_interval) and not stopped else None

            # Tell.
            now = self.clock()
            outcome.steps, outcome.tokens = step, step * plan.tokens_per_step
            outcome.tokens_here = (step - plan.first) * plan.tokens_per_step
            outcome.seconds = now - begin
            if telling:
                self._tell(step, mean, validated, (now - logged) / (step - logged_step))
                logged, logged_step = now, step

            # Save, unless the loss is lost.
            due = self._falls_on(step, plan.save_interval) and self.non_finite == 0
            if self.save is not None and (stopped or due):
                self.save(step)

            if stopped or self.non_finite >= NON_FINITE_STEPS:
                outcome.ending = Ending.INTERRUPTED if stopped else Ending.DIVERGED
                return outcome
        outcome.ending = Ending.FINISHED
        return outcome

    def _falls_on(self, step: int, every: int) -> bool:
        """Whether what is done at every interval, and at the end, is done after this step."""
        return step == self.plan.steps or (every > 0 and step % every == 0)

    def _validate(self) -> float:
        """The mean loss over the same validation batches each time, on all ranks."""
        share = Share(self.share.rank, self.share.ranks, self.plan.eval_samples, accumulation=1)
        total = torch.zeros(1, dtype=torch.float64)
        self.engine.train(False)
        try:
            with torch.no_grad():
                for ids, labels in batches(self.validation, share, self.plan.eval_batches):
                    total += float(self.engine(ids.to(self.engine.device), labels.to(self.engine.device)))
        finally:
            self.engine.train(True)
        self.comm.all_reduce(total).wait()
        self.outcome.validation_loss = float(total) / self.plan.eval_batches / self.comm.size
        return self.outcome.validation_loss

    def _tell(self, step: int, loss: float, validated: float | None, seconds: float) -> None:
        if math.isfinite(loss):
            self.non_finite = 0
            self.outcome.last_losses.append(loss)
            if math.isnan(self.outcome.first_loss):
                self.outcome.first_loss = loss
        else:
            self.non_finite += 1
        if self.reporter is None:
            return
        norm = self.engine.get_global_grad_norm()
        self.reporter.step(
            Record(
                step=step,
                loss=loss,
                lr=self.engine.get_lr()[0],
                gradient_norm=math.nan if norm is None else float(norm),
                tokens=self.outcome.tokens,
                tokens_per_second=self.plan.tokens_per_step / max(seconds, 1e-9),
                step_seconds=seconds,
                skipped_steps=self.engine.skipped_steps,
                validation_loss=validated,
            )
        )
        if self.non_finite:
            self.reporter.non_finite(step, loss, ended=self.non_finite >= NON_FINITE_STEPS)
