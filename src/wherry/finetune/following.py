"""A run as it goes: what a trainer tells, as records for the report, samples, and an end where one is asked for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import TrainerCallback

from wherry.finetune.samples import SampleAnswers
from wherry.train.loop import NON_FINITE_STEPS, Ending, Outcome, Record, Stop
from wherry.train.report import Report


class Following(TrainerCallback):
    """Follows a trainer. Every rank has one; rank 0's makes a `report`, of so many steps, when the engine is there."""

    def __init__(
        self,
        trainer: Any,
        stop: Stop,
        samples: SampleAnswers,
        report: Callable[[int], Report] | None,
        *,
        saves: bool,
        evaluates_often: bool,
    ) -> None:
        self.trainer, self.stop, self.samples, self.saves = trainer, stop, samples, saves
        # As asked for; else an evaluation shortly before the last one is left out.
        self.evaluates_often = evaluates_often
        self.report: Report | None = None
        self.outcome = Outcome()
        self._make_report = report
        self._pending: Record | None = None
        self._began = self._logged = 0.0
        self._first = self._logged_step = 0
        self._tokens = self._tokens_before = 0
        self._non_finite = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._first = self._logged_step = self.outcome.steps = state.global_step
        for name in ("eval_steps", "save_steps", "logging_steps"):  # a resumed trainer has its checkpoint's
            setattr(state, name, getattr(args, name))
        if self._make_report is not None:
            self.report = self._make_report(state.max_steps)
        if state.global_step == 0:
            self._sample(0)
        self._began = self._logged = time.perf_counter()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._tell()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """All ranks end at the same step, with a checkpoint."""
        asked = torch.tensor([float(self.stop.asked)], dtype=torch.float64)
        engine = self.trainer.engine
        engine.comm.all_reduce(asked).wait()
        self.outcome.steps = state.global_step
        if asked.item():
            self.outcome.ending = Ending.INTERRUPTED
            control.should_training_stop, control.should_evaluate = True, False
            control.should_save = self.saves
        elif state.global_step == state.max_steps:
            control.should_save = self.saves  # and evaluated, whatever the intervals are
            control.should_evaluate = self.trainer.eval_dataset is not None
        elif not self.evaluates_often and state.max_steps - state.global_step < args.eval_steps // 2:
            control.should_evaluate = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs is None or "loss" not in logs:
            return
        self._tell()
        now, step = time.perf_counter(), state.global_step
        took = (now - self._logged) / max(1, step - self._logged_step)
        # TRL counts those of ranks with the same rows once for each.
        self._tokens = int(logs.get("num_tokens", 0) or 0) // self.trainer.get_cp_size()
        loss, norm = float(logs["loss"]), logs.get("grad_norm")
        steps = max(1, step - self._logged_step)
        if self._logged_step == self._first and self._first:  # a resumed trainer may count from where it was
            self._tokens_before = self._tokens
        rate = (self._tokens - self._tokens_before) / max(1e-9, took * steps)
        self.outcome.tokens_here += self._tokens - self._tokens_before
        self.outcome.tokens, self._tokens_before = self._tokens, self._tokens
        self._logged, self._logged_step = now, step
        if math.isfinite(loss):
            self._non_finite = 0
            self.outcome.last_losses.append(loss)
            if math.isnan(self.outcome.first_loss):
                self.outcome.first_loss = loss
        else:
            self._non_finite += 1
            if self._non_finite >= NON_FINITE_STEPS:
                self.outcome.ending = Ending.DIVERGED
                control.should_training_stop, control.should_save = True, False
        self._pending = Record(
            step=step,
            loss=loss,
            lr=float(logs.get("learning_rate", math.nan)),
            gradient_norm=math.nan if norm is None else float(norm),
            tokens=self._tokens,
            tokens_per_second=rate,
            step_seconds=took,
            skipped_steps=self.trainer.engine.skipped_steps,
        )

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any] | None = None, **_: Any) -> None:
        validated = (metrics or {}).get("eval_loss")
        if validated is not None:
            self.outcome.validation_loss = float(validated)
            if self._pending is not None:
                self._pending = replace(self._pending, validation_loss=float(validated))
        self._tell()
        self._sample(state.global_step)
        self._logged, self._logged_step = time.perf_counter(), state.global_step

    def on_save(self, *_: Any, **__: Any) -> None:
        self._tell()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._tell()
        self.outcome.steps = state.global_step
        self.outcome.seconds = time.perf_counter() - self._began
        if self.outcome.ending is Ending.FAILED and state.global_step >= state.max_steps:
            self.outcome.ending = Ending.FINISHED

    def _tell(self) -> None:
        """What was logged, once it is known whether an evaluation came with it."""
        record, self._pending = self._pending, None
        if record is None or self.report is None:
            return
        self.report.step(record)
        if self._non_finite:
            self.report.non_finite(record.step, record.loss, ended=self._non_finite >= NON_FINITE_STEPS)

    def _sample(self, step: int) -> None:
        found = self.samples.take(self.trainer.engine, step)
        if self.report is not None and found:
            self.report.said(step, found)
