"""What an engine tells of its updates: to the sinks after each of them, to the log every so many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wherry.observe.flops import FlopCount
from wherry.observe.log import RankLogger
from wherry.observe.memory import format_bytes
from wherry.observe.metrics import Monitor
from wherry.observe.spans import Spans

if TYPE_CHECKING:
    from wherry.config import Config
    from wherry.observe.profile import Profile
    from wherry.parallel.comm import Traffic

# How often summaries of time and communication are logged where `steps_per_print` does not say.
STEPS_BETWEEN_SUMMARIES = 10


@dataclass(frozen=True)
class Update:
    """An update that was made, or skipped."""

    step: int
    samples: int
    rates: list[float]
    norm: float | None
    # Only where the loss scale moves.
    loss_scale: float | None


class Reporter:
    """An engine's account of itself on one rank. With nothing asked for it costs a few comparisons a step."""

    def __init__(
        self,
        config: Config,
        traffic: Callable[[], Iterable[tuple[str, Traffic]]],
        log: RankLogger,
        synchronize: Callable[[], object] | None,
    ) -> None:
        self.monitor = Monitor(config.to_dict(), log.rank)
        if self.monitor.enabled and config.train_batch_size is config.train_micro_batch_size_per_gpu is None:
            log.warning("train_micro_batch_size_per_gpu: not given, so `samples` counts each micro-batch as one")
        self.spans = Spans(wall_clock=config.wall_clock_breakdown, synchronize=synchronize)
        # Operations of the step that `flops_profiler` names; None before it.
        self.flops: int | None = None
        self._config = config
        self._traffic = traffic
        self._log = log
        self._profiled = config.flops_profiler.profile_step if config.flops_profiler.enabled else None
        self._count: FlopCount | None = None
        # Steps to come whose time and memory are recorded.
        self.profile: Profile | None = None
        # Of the window's last micro-batch so far, where the engine has been given it.
        self.last_loss: torch.Tensor | None = None
        self._losses: list[torch.Tensor] = []
        self._sent: dict[str, tuple[int, int]] = {}

    def phase(self, phase: str, step: int, *, recorded: bool = False) -> AbstractContextManager[Any]:
        """Around a part of a step: its span, and the count of its operations if this is the step to be counted."""
        if self.profile is not None and not recorded and step in self.profile:
            return self._recorded(self.profile, phase, step)
        span = self.spans(f"wherry::{phase}")
        return span if step != self._profiled or phase == "step" else self._counted(span, phase)

    @contextmanager
    def _recorded(self, profile: Profile, phase: str, step: int) -> Iterator[None]:
        with profile.phase(phase, step), self.phase(phase, step, recorded=True):
            yield
        if profile.complete:
            self.profile = None

    @contextmanager
    def _counted(self, span: AbstractContextManager[Any], phase: str) -> Iterator[None]:
        if self._count is None:
            self._count = FlopCount()
        with span, self._count.phase(phase):
            yield

    def loss(self, loss: torch.Tensor) -> None:
        """A micro-batch's loss; nothing is read from the device before the update."""
        self.last_loss = loss.detach()
        if self.monitor.enabled:
            self._losses.append(self.last_loss)

    def end_window(self) -> None:
        """The next loss is another window's."""
        self.last_loss = None
        if self.profile is not None:
            self.profile.end_window()

    def tells_of(self, step: int) -> bool:
        """Whether an update of this number is told to anybody."""
        every = self._every
        return self.monitor.enabled or step == self._profiled or bool(every and step % every == 0)

    @property
    def _every(self) -> float:
        """After how many updates something is logged; 0 for never."""
        if self._config.steps_per_print:
            return self._config.steps_per_print
        return STEPS_BETWEEN_SUMMARIES if self.spans.wall_clock or self._config.comms_logger.enabled else 0

    def updated(self, update: Update) -> None:
        if self.monitor.enabled:
            self.monitor.log(update.step, self._metrics(update))
        if self._count is not None and update.step == self._profiled:
            self._report_operations(self._count, update.step)
        every = self._every
        if not every or update.step % every:
            return
        if self._config.steps_per_print:
            self._report_update(update)
        if self.spans.wall_clock:
            self._log.info("time of %d steps: %s", every, self.spans.breakdown())
        if self._config.comms_logger.enabled:
            self._log.info("communication of %d steps: %s", every, self._communication())

    def close(self) -> None:
        if self.profile is not None:
            self.profile.close()
        self.monitor.close()

    def _metrics(self, update: Update) -> dict[str, float | int]:
        """The loss is this rank's mean over the window."""
        values: dict[str, float | int] = {"samples": update.samples}
        if self._losses:
            values["loss"] = float(torch.stack(self._losses).float().mean())
            self._losses.clear()
        if update.rates:
            values["lr"] = update.rates[0]
        if update.norm is not None:
            values["gradient_norm"] = update.norm
        if update.loss_scale is not None:
            values["loss_scale"] = update.loss_scale
        return values

    def _report_update(self, update: Update) -> None:
        rates = ", ".join(f"{rate:.3g}" for rate in update.rates)
        scale = "" if update.loss_scale is None else f", loss scale {update.loss_scale:g}"
        norm = "none" if update.norm is None else f"{update.norm:.4g}"
        self._log.info("step %d: lr %s, gradient norm %s%s", update.step, rates, norm, scale)

    def _communication(self) -> str:
        """What this rank has sent since the last summary, by operation."""
        block, rows = self._config.comms_logger, []
        for among, traffic in self._traffic():
            for operation, calls in sorted(traffic.calls.items()):
                name = operation + among
                calls_before, bytes_before = self._sent.get(name, (0, 0))
                sent = traffic.bytes[operation]
                self._sent[name] = (calls, sent)
                if block.prof_all or operation in block.prof_ops:
                    rows.append(f"{name} {calls - calls_before}x {format_bytes(sent - bytes_before)}")
        return ", ".join(rows) or "none"

    def _report_operations(self, count: FlopCount, step: int) -> None:
        block = self._config.flops_profiler
        self.flops, self._count = count.total, None
        speed = count.total / count.seconds / 1e12 if count.seconds else 0.0
        text = (
            f"operations of step {step} on rank {self._log.rank}: {count.total / 1e9:.6g} GFLOP in "
            f"{count.seconds * 1e3:.1f} ms under the counter, {speed:.3g} TFLOPS\n"
            + count.table(block.module_depth, 0 if block.detailed else block.top_modules)
        )
        if not block.output_file:
            self._log.info("%s", text)
        elif self._log.rank == 0:
            Path(block.output_file).write_text(text + "\n", encoding="utf-8")
