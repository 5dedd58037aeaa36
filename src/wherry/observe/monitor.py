"""An engine's metrics on their way to the sinks: on rank 0, once an update, and nothing at all without a sink."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wherry.observe.metrics import Sink, Sinks, Values, configured_sinks

COLUMNS = ("samples", "loss", "lr", "gradient_norm", "loss_scale")


class Monitor:
    """The sinks of one engine. Those of the config are opened by the first thing that is logged.

    engine.monitor.add(wherry.observe.metrics.JSONLines())
    engine.monitor.log(engine.global_steps, {"validation_loss": 2.3})
    """

    def __init__(self, config: Mapping[str, Any], rank: int) -> None:
        self._config = config
        folder = (config.get("wherry") or {}).get("run_dir")
        self._folder = Path(folder) if folder else Path()
        self._sinks = configured_sinks(config, COLUMNS) if rank == 0 else Sinks([])
        self._rank = rank
        self._opened = 0

    @property
    def enabled(self) -> bool:
        """Whether anything is written by this rank."""
        return bool(self._sinks.sinks)

    def add(self, sink: Sink) -> None:
        """Write to this sink too. On other ranks than 0 it is left aside."""
        if self._rank == 0:
            self._sinks.sinks.append(sink)

    def log(self, step: int, values: Values) -> None:
        """Write some numbers under a step."""
        if not self.enabled:
            return
        if self._opened < len(self._sinks.sinks):
            added, self._opened = Sinks(self._sinks.sinks[self._opened :]), len(self._sinks.sinks)
            added.open(self._folder, self._config)
        self._sinks.log(step, values)

    def write_events(self, events: list[tuple[str, float, int]]) -> None:
        """The same, as `(name, value, step)`."""
        for name, value, step in events:
            self.log(int(step), {name: float(value)})

    def close(self) -> None:
        for sink in self._sinks.sinks[: self._opened]:
            sink.close()
        self._sinks.sinks.clear()
        self._opened = 0
