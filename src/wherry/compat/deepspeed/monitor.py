"""`deepspeed.monitor.monitor`: write `(name, value, step)` events where the blocks of a config say."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wherry.compat.deepspeed.comm import get_rank
from wherry.observe.metrics import SERVICES

Event = tuple[str, float, int]


class _Monitor:
    """A monitor of one block of a `monitor_config`; rank 0 writes."""

    key = ""

    def __init__(self, monitor_config: Any) -> None:
        block = getattr(monitor_config, self.key)
        self._writes = bool(block.enabled) and get_rank() == 0
        if self._writes:
            self._open(block.model_dump())

    def _open(self, block: dict[str, Any]) -> None:
        self._service = SERVICES[self.key](block)
        self._service.open(Path(), {})

    def write_events(self, event_list: Sequence[Event]) -> None:
        for event in event_list if self._writes else ():
            self._write(*event)

    def _write(self, name: str, value: float, step: int) -> None:
        self._service.log(step, {name: value})


class TensorBoardMonitor(_Monitor):
    """Event files in `output_path/job_name`."""

    key = "tensorboard"

    def _open(self, block: dict[str, Any]) -> None:
        super()._open({**block, "output_path": block["output_path"] or "."})

    def _write(self, name: str, value: float, step: int) -> None:
        super()._write(name, value, step)
        self._service.run.flush()


class WandbMonitor(_Monitor):
    """A run of Weights & Biases."""

    key = "wandb"


class csvMonitor(_Monitor):
    """A file for each name of an event, in `output_path/job_name`."""

    key = "csv_monitor"

    def _open(self, block: dict[str, Any]) -> None:
        self._folder, self._started = Path(block["output_path"], block["job_name"]), set[str]()
        self._folder.mkdir(parents=True, exist_ok=True)

    def _write(self, name: str, value: float, step: int) -> None:
        file_name = name.replace("/", "_").replace(" ", "_") + ".csv"
        with open(self._folder / file_name, "a", encoding="utf-8", newline="") as file:
            if file_name not in self._started:
                csv.writer(file).writerow(["step", name.rpartition("/")[2]])
                self._started.add(file_name)
            csv.writer(file).writerow([step, value])


class _CometMonitor(_Monitor):
    """An experiment of Comet's, to which each name is logged once in `samples_log_interval` samples."""

    key = "comet"

    def _open(self, block: dict[str, Any]) -> None:
        super()._open(block)
        self._interval, self._due = block["samples_log_interval"], dict[str, int]()

    def _write(self, name: str, value: float, step: int) -> None:
        if step >= self._due.get(name, step):
            self._due[name] = step + self._interval
            super()._write(name, value, step)


class MonitorMaster:
    """All monitors that a config enables."""

    def __init__(self, monitor_config: Any) -> None:
        kinds = (TensorBoardMonitor, WandbMonitor, csvMonitor, _CometMonitor)
        self._monitors = [kind(monitor_config) for kind in kinds]

    def write_events(self, event_list: Sequence[Event]) -> None:
        for monitor in self._monitors:
            monitor.write_events(event_list)
