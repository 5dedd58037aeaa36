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

from wherry.observe.memory import format_bytes, host_memory
from wherry.placement import Placement, Tier, place_name
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


class Display:
    """Shows a run on a console. It redraws a panel on a terminal, and prints a line for each record elsewhere."""

    def __init__(
        self,
        console: Console,
        steps: int,
        memory: Callable[[], Sequence[MemoryRow]],
        *,
        gpu: bool = True,
        line_every: int = 1,
    ) -> None:
        self.console = console
        self.steps = steps
        self.gpu = gpu
        self.line_every = line_every
        self._memory = memory
        self._live: Live | None = None
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
            table.add_row(state, how, place_name(tier, gpu=self.gpu), format_bytes(expected))
        where = place_name(Tier.DEVICE, gpu=self.gpu)
        table.add_row("activations", "per micro-batch", where, f"about {format_bytes(activations)}")
        self.console.print(table)
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4)
            self._live.start()

    def step(self, record: Record) -> None:
        pace = record.step_seconds
        # The first step warms everything up and would spoil the forecast.
        self._pace = 0.9 * self._pace + 0.1 * pace if self._records > 1 else pace
        self._losses.append(record.loss)
        self._records += 1
        validated = record.validation_loss is not None
        if self._live is not None:
            self._live.update(self._panel(record))
        elif self._records == 1 or self._records % self.line_every == 0 or record.step == self.steps or validated:
            self.console.print(self.line(record), highlight=False, soft_wrap=True)

    def non_finite(self, step: int, loss: float, *, ended: bool) -> None:
        text = f"THE LOSS IS {str(loss).upper()} at step {step}."
        if ended:
            text += (
                " It stays so: the run ends. Lower --lr, raise --lr-warmup-iters, or train in bf16 or fp32; "
                "gradient_clipping bounds a single bad batch."
            )
        self.console.print(Text(text, style="bold white on red"), soft_wrap=True)

    def line(self, record: Record) -> str:
        """One record as one plain line."""
        rows = self._memory()
        parts = [
            f"step {record.step}/{self.steps}",
            f"loss {record.loss:.4f}",
            f"lr {record.lr:.2e}",
            f"norm {record.gradient_norm:.2f}",
            f"{record.tokens_per_second:,.0f} tokens/s",
            " ".join(f"{s}@{place_name(t, gpu=self.gpu)} {format_bytes(now)}" for s, t, _, now in rows if now),
            f"{self._left(record)} left",
        ]
        if record.skipped_steps:
            parts.insert(4, f"{record.skipped_steps} skipped")
        if record.validation_loss is not None:
            parts.insert(2, f"validation {record.validation_loss:.4f}")
        return "  ".join(part for part in parts if part)

    def _left(self, record: Record) -> timedelta:
        return timedelta(seconds=round((self.steps - record.step) * self._pace))

    def _panel(self, record: Record) -> Panel:
        numbers = Table.grid(padding=(0, 3))
        numbers.add_row(
            Text(f"loss {record.loss:.4f}", style="bold" if math.isfinite(record.loss) else "bold red"),
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
        return Panel(Group(bar, numbers, course, self._memory_table()), title=title, title_align="left")

    def _memory_table(self) -> Table:
        table = Table.grid(padding=(0, 3))
        for state, tier, expected, now in self._memory():
            where, of = place_name(tier, gpu=self.gpu), Text(f"of {format_bytes(expected)}", "dim")
            table.add_row(Text(str(state), style="dim"), where, format_bytes(now), of)
        table.add_row(Text("process", style="dim"), "host", format_bytes(host_memory().resident), "")
        return table

    def end(self, outcome: Outcome, run_dir: Path) -> None:
        """The summary. It may be called however the run ended."""
        self.close()
        how = {
            Ending.FINISHED: "Finished",
            Ending.DIVERGED: "The loss is lost: stopped",
            Ending.INTERRUPTED: "Interrupted",
            Ending.FAILED: "Stopped by an error",
        }[outcome.ending]
        table = Table.grid(padding=(0, 2))
        rate = outcome.tokens_here / outcome.seconds if outcome.seconds else 0.0
        rows = [
            ("steps", f"{outcome.steps} of {self.steps} in {timedelta(seconds=round(outcome.seconds))}"),
            ("loss", f"{outcome.first_loss:.4f} at first, {outcome.last_loss:.4f} at last"),
            ("tokens", f"{outcome.tokens:,} at {rate:,.0f} tokens/s"),
            ("peak memory", f"{format_bytes(host_memory().peak)} in this rank's process"),
            ("written to", str(run_dir)),
        ]
        if math.isfinite(outcome.validation_loss):
            rows.insert(2, ("validation", f"{outcome.validation_loss:.4f}"))
        for name, value in rows:
            table.add_row(Text(name, style="dim"), Text(value))
        self.console.print(Text(f"{how}.", style="bold"))
        self.console.print(table)

    def close(self) -> None:
        """Give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None
