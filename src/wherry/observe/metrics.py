"""Where the numbers of a run go: JSON lines and CSV in its folder, and the services that a config asks for."""

from __future__ import annotations

import csv
import importlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from wherry.errors import WherryError
from wherry.observe.log import logger

Values = Mapping[str, float | int | str]
COLUMNS = ("samples", "loss", "lr", "gradient_norm", "loss_scale")
"""What an engine tells of an update."""


class Sink(Protocol):
    """Takes a run's metrics. `log` is called once a step, on rank 0, with a flat mapping of numbers."""

    def open(self, folder: Path, config: Mapping[str, Any]) -> None: ...

    def log(self, step: int, values: Values) -> None: ...

    def close(self) -> None: ...


class _Growing:
    """A file in the run's folder, or in a folder of its own, that can be read while it grows."""

    def __init__(self, name: str, own_folder: Path | None = None) -> None:
        self.name = name
        self._own_folder = own_folder
        self._file: TextIO | None = None

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        path = (self._own_folder or folder) / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "w", encoding="utf-8", newline="", buffering=1)  # noqa: SIM115

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class JSONLines(_Growing):
    """`metrics.jsonl`: one object a line. A number that is not finite is written as null."""

    def __init__(self, name: str = "metrics.jsonl") -> None:
        super().__init__(name)

    def log(self, step: int, values: Values) -> None:
        assert self._file is not None, "log() before open()"
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        self._file.write(json.dumps({"step": step, **clean}, allow_nan=False) + "\n")


class CSV(_Growing):
    """`metrics.csv`: one row a step under the given columns.

    A value that a step lacks is an empty cell; what has no column is left to the other sinks.
    """

    def __init__(self, columns: Sequence[str], name: str = "metrics.csv", *, folder: Path | None = None) -> None:
        super().__init__(name, folder)
        self.columns = ["step", *columns]
        self._writer: csv.DictWriter[str] | None = None

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        super().open(folder, config)
        assert self._file is not None
        self._writer = csv.DictWriter(self._file, self.columns, restval="", extrasaction="ignore")
        self._writer.writeheader()

    def log(self, step: int, values: Values) -> None:
        assert self._writer is not None, "log() before open()"
        if not values.keys().isdisjoint(self.columns):
            self._writer.writerow({"step": step, **values})


class Service(ABC):
    """A package that numbers are sent to, as its block of the config asks."""

    name = ""
    key = ""
    needs = ""

    def __init__(self, block: Mapping[str, Any]) -> None:
        self.block = block
        self.module = package(self.needs, self.key)  # it is missed now, and not after the first step
        # What the package gave for this run, and is told of its numbers.
        self.run: Any = None

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        try:
            self.begin(folder, config)
        except WherryError:
            raise
        except Exception as error:  # of the package's own kinds
            raise WherryError(
                f"{self.key}.enabled: {self.name} cannot be written to ({error}); set {self.key}.enabled to false to "
                "train without"
            ) from error

    @abstractmethod
    def begin(self, folder: Path, config: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def log(self, step: int, values: Values) -> None: ...

    def close(self) -> None:
        self.run.close()


class TensorBoardSink(Service):
    """Event files for TensorBoard."""

    name, key, needs = "TensorBoard", "tensorboard", "torch.utils.tensorboard"

    def begin(self, folder: Path, config: Mapping[str, Any]) -> None:
        output_path = self.block["output_path"]
        target = Path(output_path) / self.block["job_name"] if output_path else folder / "tensorboard"
        self.run = self.module.SummaryWriter(str(target))

    def log(self, step: int, values: Values) -> None:
        for key, value in _numbers(values).items():
            self.run.add_scalar(key, value, step)


class WandB(Service):
    """A Weights & Biases run."""

    name, key, needs = "WandB", "wandb", "wandb"

    def begin(self, folder: Path, config: Mapping[str, Any]) -> None:
        place = {"project": self.block["project"], "entity": self.block["team"], "group": self.block["group"]}
        self.run = self.module.init(**place, dir=str(folder), config=dict(config))

    def log(self, step: int, values: Values) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class CometSink(Service):
    """An experiment of Comet's."""

    name, key, needs = "Comet", "comet", "comet_ml"
    due = 0

    def begin(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.run = comet_experiment(self.block)
        self.run.log_parameters(dict(config))

    def log(self, step: int, values: Values) -> None:
        samples = int(values.get("samples", self.due))
        if samples >= self.due:
            self.due = samples + self.block["samples_log_interval"]
            self.run.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self.run.end()


class MLflow(Service):
    """A run of MLflow's. In a run that the script has begun, it is that one."""

    name, key, needs = "MLflow", "mlflow", "mlflow"
    own = False

    def begin(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.run = mlflow = self.module
        self.own = mlflow.active_run() is None
        if self.own:
            if self.block["tracking_uri"] is not None:
                mlflow.set_tracking_uri(self.block["tracking_uri"])
            if self.block["experiment_name"] is not None:
                mlflow.set_experiment(self.block["experiment_name"])
            mlflow.start_run(run_name=self.block["run_name"])
        mlflow.log_dict(dict(config), "config.json")

    def log(self, step: int, values: Values) -> None:
        self.run.log_metrics(_numbers(values), step=step)

    def close(self) -> None:
        if self.own:
            self.run.end_run()


SERVICES: dict[str, type[Service]] = {kind.key: kind for kind in (TensorBoardSink, WandB, CometSink, MLflow)}
"""By block of the config: what sends a run's numbers there."""


def comet_experiment(block: Mapping[str, Any]) -> Any:
    """The experiment that a block of the config asks Comet for."""
    names = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
    experiment = package("comet_ml", "comet").start(**{name: block[name] for name in names})
    if block["experiment_name"] is not None:
        experiment.set_name(block["experiment_name"])
    return experiment


def _numbers(values: Values) -> dict[str, float | int]:
    return {key: value for key, value in values.items() if not isinstance(value, str)}


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved config as it may be written down, or sent."""
    return {**config, "comet": {**config["comet"], "api_key": None}}


def package(name: str, block: str) -> Any:
    """The module of a package that a block of the config needs."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        wanted = block if name.startswith("torch.") else name
        raise WherryError(
            f"{block}.enabled: the config asks for {block}, and its package cannot be imported ({error}); "
            f"run `pip install {wanted}`, or set {block}.enabled to false"
        ) from error


class Monitor:
    """The sinks that a resolved config asks for, and those of the user's code, as one; on rank 0 only.

    engine.monitor.add(wherry.observe.metrics.JSONLines())
    engine.monitor.log(engine.global_steps, {"validation_loss": 2.3})

    With a folder (or else `wherry.run_dir`) there are JSON lines and CSV in it. Sinks are opened by the first thing
    that is logged unless `open` came before. One that can be written no more, as on a full disk, is told of and left
    out: training is worth more than numbers.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        rank: int = 0,
        *,
        columns: Sequence[str] = COLUMNS,
        folder: Path | None = None,
    ) -> None:
        run_dir = folder or config["wherry"]["run_dir"]
        self._rank = rank
        self._config = without_secrets(config)
        self._folder = Path(run_dir or "")
        self._open: list[Sink] = []
        self._new: list[Sink] = []
        if run_dir:
            self.add(JSONLines())
            self.add(CSV(columns))
        for name, service in SERVICES.items():
            if config[name]["enabled"] and rank == 0:
                self.add(service(config[name]))
        block = config["csv_monitor"]
        if block["enabled"]:
            self.add(CSV(columns, folder=Path(block["output_path"] or "csv_monitor") / block["job_name"]))

    @property
    def enabled(self) -> bool:
        """Whether anything is written by this rank."""
        return bool(self._open or self._new)

    def add(self, sink: Sink) -> None:
        """Write to this sink too."""
        if self._rank == 0:
            self._new.append(sink)

    def open(self) -> None:
        while self._new:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._new[0].open(self._folder, self._config)
            self._open.append(self._new.pop(0))

    def log(self, step: int, values: Values) -> None:
        """Write some numbers under a step."""
        self.open()
        for sink in list(self._open):
            try:
                sink.log(step, values)
            except _failures(sink) as error:
                self._open.remove(sink)
                _tell_of_loss(sink, f"from step {step} on", error)

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        """The same, as `(name, value, step)`."""
        for name, value, step in events:
            self.log(int(step), {name: float(value)})

    def close(self) -> None:
        self._new.clear()
        while self._open:
            sink = self._open.pop()
            try:
                sink.close()
            except _failures(sink) as error:
                _tell_of_loss(sink, "at their end", error)


def _failures(sink: Sink) -> type[Exception]:
    """What training goes on after. A service's package has kinds of its own for a server that is gone."""
    return Exception if isinstance(sink, Service) else OSError


def _tell_of_loss(sink: Sink, when: str, error: Exception) -> None:
    name = getattr(sink, "name", type(sink).__name__)
    logger.warning("the metrics of %s are lost %s: %s", name, when, getattr(error, "strerror", None) or error)
