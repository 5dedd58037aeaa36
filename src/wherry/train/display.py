"""What a person sees of a run: a live panel on a terminal, plain lines elsewhere, and a table before and after."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from wherry.errors import one_line
from wherry.observe.memory import format_bytes, host_memory
from wherry.placement import Placement, Tier
from wherry.train.loop import Ending, Outcome, Record

MemoryRow = Sequence[Any]
"""(state, tier, bytes expected, bytes now)."""

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Iterable[float]) -> str:
    """The course of some numbers in one line of blocks; what is not finite is left out."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in finite)


def number(value: float) -> str:
    """A loss or a norm, in few characters also when it is lost."""
    return f"{value:.4f}" if abs(value) < 10_000 else f"{value:.3g}"


class Display:
    """Shows a run on a console. It redraws a panel on a terminal, and prints a line for each record elsewhere.

    `ending` says whether the run has been asked to end.
    """

    def __init__(
        self,
        console: Console,
        steps: int,
        memory: Callable[[], Sequence[MemoryRow]],
        *,
        line_every: int = 1,
        ending: Callable[[], bool] = bool,
    ) -> None:
        self.console = console
        self.steps = steps
        self.line_every = line_every
        # A step that takes longer than others, for the report.
        self.recorded_step: int | None = None
        self._memory = memory
        self._ending = ending
        self._live: Live | None = None
        self._shown: Panel | None = None
        self._losses: deque[float] = deque(maxlen=48)
        self._pace = 0.0
        self._records = 0

    def begin(self, title: str, facts: Sequence[tuple[str, str]], placement: Placement, activations: int) -> None:
        """The model, the placement table and the expected memory; then the live panel."""
        self.console.print(Text(title, style="bold"))
        for name, value in facts:
            self.console.print(Text.assemble((f"{name:8}", "dim"), value), soft_wrap=True)
        table = Table(title=f"Placement: {placement.name}", title_justify="left", title_style="bold")
        for name in ("state", "how", "tier"):
            table.add_column(name)
        table.add_column("expected here", justify="right")
        memory = self._memory()
        for state, how, tier in placement.rows():
            expected = sum(row[2] for row in memory if row[0] == state)
            table.add_row(state, how, tier, format_bytes(expected))
        table.add_row("activations", "per micro-batch", str(Tier.DEVICE), f"about {format_bytes(activations)}")
        self.console.print(table)
        if self.console.is_terminal:
            # What is written below by others must not come between the lines that are redrawn: it goes away at the end.
            self._live = Live(console=self.console, refresh_per_second=4, transient=True, get_renderable=self._now)
            self._live.start()

    def step(self, record: Record) -> None:
        pace = record.step_seconds
        # The first step warms everything up and would spoil the forecast.
        self._pace = 0.9 * self._pace + 0.1 * pace if self._records > 1 else pace
        self._losses.append(record.loss)
        self._records += 1
        validated = record.validation_loss is not None
        if self._live is not None:
            self._shown = self._panel(record)
            self._live.refresh()
        elif self._records == 1 or self._records % self.line_every == 0 or record.step == self.steps or validated:
            self._print(self.line(record))
            if self._records == 1:
                self._print(self.memory_line())

    def non_finite(self, step: int, loss: float, *, ended: bool) -> None:
        text = f"THE LOSS IS {str(loss).upper()} at step {step}."
        if ended:
            text += (
                " It stays so: the run ends. Lower --lr, raise --lr-warmup-iters, or train in bf16 or fp32; "
                "gradient_clipping bounds a single bad batch."
            )
        self._print(Text(text, style="bold white on red"))

    def said(self, step: int, answers: Sequence[tuple[str, str]]) -> None:
        """What the model answers to some prompts by now."""
        self.console.print(Text(f"at step {step} it says", style="dim"))
        for prompt, answer in answers:
            self.console.print(Text.assemble(("  > ", "dim"), one_line(prompt, 160)))
            self.console.print(Text.assemble(("    ", ""), (one_line(answer, 400), "cyan")))

    def _print(self, text: str | Text) -> None:
        """A line that is a line in a file, too; on a terminal it ends with a word."""
        self.console.print(text, highlight=False, soft_wrap=not self.console.is_terminal)

    def line(self, record: Record) -> str:
        """One record as one plain line."""
        parts = [
            f"step {record.step}/{self.steps}",
            f"loss {number(record.loss)}",
            f"lr {record.lr:.2e}",
            f"norm {record.gradient_norm:.2f}",
            f"{record.tokens_per_second:,.0f} tokens/s",
            f"{self._left(record)} left",
        ]
        if record.skipped_steps:
            parts.insert(4, f"{record.skipped_steps} skipped")
        if record.validation_loss is not None:
            parts.insert(2, f"validation {number(record.validation_loss)}")
        if record.step == self.recorded_step:
            parts.append("(slower: its memory is recorded)")
        return "  ".join(parts)

    def memory_line(self) -> str:
        """What each state takes on rank 0, by tier."""
        tiers: dict[str, list[str]] = {}
        for state, tier, _, now in self._memory():
            if now:
                tiers.setdefault(tier, []).append(f"{state} {format_bytes(now)}")
        return "memory of rank 0: " + "; ".join(f"{tier}: {', '.join(states)}" for tier, states in tiers.items())

    def _left(self, record: Record) -> timedelta:
        return timedelta(seconds=round((self.steps - record.step) * self._pace))

    def _now(self) -> Panel | str:
        """What is drawn four times a second."""
        if self._shown is None:
            return "the first step ..."
        if self._ending():
            self._shown.subtitle = "ends after this step; Ctrl-C again ends at once"
        return self._shown

    def _panel(self, record: Record) -> Panel:
        numbers = Table.grid(padding=(0, 3))
        numbers.add_row(
            Text(f"loss {number(record.loss)}", style="bold" if math.isfinite(record.loss) else "bold red"),
            f"{record.tokens_per_second:,.0f} tokens/s",
            f"lr {record.lr:.2e}",
            f"norm {record.gradient_norm:.2f}",
            f"{self._left(record)} left",
        )
        # A bar alone ends no line, and would swallow what follows; a row of a table does.
        bar = Table.grid(expand=True)
        bar.add_row(ProgressBar(total=self.steps, completed=record.step))
        course = Text(sparkline(self._losses), style="cyan")
        title = f"step {record.step} of {self.steps}"
        if record.skipped_steps:
            title += f", {record.skipped_steps} skipped"
        inside = Group(bar, numbers, course, self._memory_table())
        return Panel(inside, title=title, title_align="left", subtitle_align="left")

    def _memory_table(self) -> Table:
        table = Table.grid(padding=(0, 3))
        for state, tier, expected, now in self._memory():
            table.add_row(Text(str(state), "dim"), tier, format_bytes(now), Text(f"of {format_bytes(expected)}", "dim"))
        table.add_row(Text("process", style="dim"), "host", format_bytes(host_memory().resident), "")
        return table

    def end(self, outcome: Outcome, run_dir: Path, then: Sequence[tuple[str, str]] = ()) -> None:
        """The summary, and what can be done `then`, with its commands. It may be called however the run ended."""
        self.close()
        how = {
            Ending.FINISHED: "Finished",
            Ending.DIVERGED: "The loss is lost: stopped",
            Ending.INTERRUPTED: "Interrupted",
            Ending.FAILED: "Stopped by an error",
        }[outcome.ending]
        table = Table.grid(padding=(0, 2))
        rate = outcome.tokens_here / outcome.seconds if outcome.seconds else 0.0
        mean = f" (mean of the last {outcome.averaged} logged)" if outcome.averaged > 1 else ""
        rows = [
            ("steps", f"{outcome.steps} of {self.steps} in {timedelta(seconds=round(outcome.seconds))}"),
            ("loss", f"{number(outcome.first_loss)} at first, {number(outcome.last_loss)} at last{mean}"),
            ("tokens", f"{outcome.tokens:,} at {rate:,.0f} tokens/s"),
            ("peak memory", f"{format_bytes(host_memory().peak)} in this rank's process"),
            ("written to", str(run_dir)),
        ]
        if math.isfinite(outcome.validation_loss):
            rows.insert(2, ("validation", number(outcome.validation_loss)))
        course = sparkline(self._losses)
        rows += [("course", course)] if self.console.is_terminal and len(course) > 1 else []
        for name, value in rows:
            table.add_row(Text(name, style="dim"), Text(value))
        self.console.print(Text(f"{how}.", style="bold"))
        self.console.print(table)
        if then:
            self.console.print(Text("Next", style="bold"))
        for what, command in then:
            # A command is copied as it stands, so it has a line of its own.
            self.console.print(Text(f"  {what}", style="dim"))
            self.console.print(Text(f"    {command}"), soft_wrap=True)

    def close(self) -> None:
        """Give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None
