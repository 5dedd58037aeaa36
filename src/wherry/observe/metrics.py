"""Where the numbers of a run go: JSON lines and CSV in its folder, and the services that a config asks for."""

from __future__ import annotations

import csv
import importlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from wherry.errors import WherryError
from wherry.observe.log import logger

Values = Mapping[str, float | int | str]


class Sink(Protocol):
    """Takes a run's metrics. `log` is called once a step, on rank 0, with a flat mapping of numbers."""

    def open(self, folder: Path, config: Mapping[str, Any]) -> None: ...

    def log(self, step: int, values: Values) -> None: ...

    def close(self) -> None: ...


class JSONLines:
    """`metrics.jsonl`: one object a line, readable while it grows. A number that is not finite is written as null."""

    def __init__(self, name: str = "metrics.jsonl") -> None:
        self.name = name
        self._file: TextIO | None = None

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._file = open(folder / self.name, "w", encoding="utf-8", buffering=1)  # noqa: SIM115

    def log(self, step: int, values: Values) -> None:
        assert self._file is not None, "log() before open()"
        clean = {key: _json_value(value) for key, value in values.items()}
        self._file.write(json.dumps({"step": step, **clean}, allow_nan=False) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class CSV:
    """`metrics.csv`: one row a step under the given columns; a value that a step lacks is an empty cell.

    A value without a column is an error, or with `leave_out` left to the other sinks.
    """

    def __init__(self, columns: Sequence[str], name: str = "metrics.csv", *, leave_out: bool = False) -> None:
        self.columns = ["step", *columns]
        self.name = name
        self.leave_out = leave_out
        self._file: TextIO | None = None
        self._writer: csv.DictWriter[str] | None = None

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._file = open(folder / self.name, "w", encoding="utf-8", newline="", buffering=1)  # noqa: SIM115
        self._writer = csv.DictWriter(self._file, self.columns, restval="")
        self._writer.writeheader()

    def log(self, step: int, values: Values) -> None:
        assert self._writer is not None, "log() before open()"
        if self.leave_out:
            values = {key: value for key, value in values.items() if key in self.columns}
            if not values:
                return
        self._writer.writerow({"step": step, **values})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = self._writer = None


class TensorBoard:
    """Event files for TensorBoard, as the `tensorboard` block asks."""

    def __init__(self, output_path: str = "", job_name: str = "wherry") -> None:
        self.output_path = output_path
        self.job_name = job_name
        self._writer: Any = None

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        module = _module("torch.utils.tensorboard", "tensorboard", "tensorboard")
        target = Path(self.output_path) / self.job_name if self.output_path else folder / "tensorboard"
        self._writer = module.SummaryWriter(str(target))

    def log(self, step: int, values: Values) -> None:
        for key, value in values.items():
            if not isinstance(value, str):
                self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB:
    """A Weights & Biases run, as the `wandb` block asks."""

    def __init__(self, project: str = "wherry", team: str | None = None, group: str | None = None) -> None:
        self.project = project
        self.team = team
        self.group = group
        self._run: Any = None

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        module = _module("wandb", "wandb", "wandb")
        self._run = module.init(
            project=self.project, entity=self.team, group=self.group, dir=str(folder), config=dict(config)
        )

    def log(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


class Sinks:
    """Several sinks as one. If one cannot open, those already open are closed again.

    One that can be written no more, as on a full disk, is told of and left out: training is worth more than numbers.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self.sinks = list(sinks)
        self._lost: list[Sink] = []

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for count, sink in enumerate(self.sinks):
            try:
                sink.open(folder, config)
            except BaseException:
                for opened in self.sinks[:count]:
                    opened.close()
                raise

    def log(self, step: int, values: Values) -> None:
        for sink in self.sinks:
            if sink not in self._lost:
                try:
                    sink.log(step, values)
                except OSError as error:
                    self._lose(sink, f"from step {step} on", error)

    def close(self) -> None:
        for sink in self.sinks:
            try:
                sink.close()
            except OSError as error:
                if sink not in self._lost:
                    self._lose(sink, "at their end", error)

    def _lose(self, sink: Sink, when: str, error: OSError) -> None:
        self._lost.append(sink)
        name = getattr(sink, "name", type(sink).__name__)
        logger.warning("the metrics of %s are lost %s: %s", name, when, error.strerror or error)


def sinks_of(config: Mapping[str, Any], columns: Sequence[str]) -> Sinks:
    """JSON lines and CSV in the run's folder, then the sinks that a resolved config asks for in its blocks."""
    return Sinks([JSONLines(), CSV(columns), *_of_blocks(config, columns)])


def configured_sinks(config: Mapping[str, Any], columns: Sequence[str]) -> Sinks:
    """What a resolved config asks for: its blocks, and where `wherry.run_dir` is given, JSON lines and CSV in it."""
    own: list[Sink] = [JSONLines(), CSV(columns, leave_out=True)] if (config.get("wherry") or {}).get("run_dir") else []
    return Sinks([*own, *_of_blocks(config, columns, leave_out=True)])


def _of_blocks(config: Mapping[str, Any], columns: Sequence[str], leave_out: bool = False) -> list[Sink]:
    sinks: list[Sink] = []
    block = _enabled(config, "tensorboard")
    if block is not None:
        sinks.append(TensorBoard(block.get("output_path") or "", block.get("job_name") or "wherry"))
    block = _enabled(config, "wandb")
    if block is not None:
        sinks.append(WandB(block.get("project") or "wherry", block.get("team"), block.get("group")))
    block = _enabled(config, "csv_monitor")
    if block is not None:
        folder = Path(block.get("output_path") or "csv_monitor") / (block.get("job_name") or "wherry")
        sinks.append(_Elsewhere(CSV(columns, leave_out=leave_out), folder))
    return sinks


class _Elsewhere:
    """A sink that writes in a folder of its own rather than the run's."""

    def __init__(self, sink: Sink, folder: Path) -> None:
        self.name = f"{folder}/{getattr(sink, 'name', type(sink).__name__)}"
        self._sink = sink
        self._folder = folder

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sink.open(self._folder, config)

    def log(self, step: int, values: Values) -> None:
        self._sink.log(step, values)

    def close(self) -> None:
        self._sink.close()


def _enabled(config: Mapping[str, Any], block: str) -> Mapping[str, Any] | None:
    found = config.get(block)
    return found if isinstance(found, Mapping) and found.get("enabled") else None


def _json_value(value: float | int | str) -> float | int | str | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _module(name: str, block: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise WherryError(
            f"{block}.enabled: the config asks for {block}, and its package cannot be imported ({error}); "
            f"run `pip install {package}`, or set {block}.enabled to false"
        ) from error
