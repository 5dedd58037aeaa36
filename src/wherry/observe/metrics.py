"""Where the numbers of a run go: JSON lines and CSV in its folder, and the services that a config asks for."""

from __future__ import annotations

import csv
import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
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


class TensorBoardSink:
    """Event files for TensorBoard, as the `tensorboard` block asks."""

    name = "TensorBoard"

    def __init__(self, output_path: str = "", job_name: str = "wherry") -> None:
        self.output_path = output_path
        self.job_name = job_name
        self._writer: Any = None

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        module = _module("torch.utils.tensorboard", "tensorboard")
        target = Path(self.output_path) / self.job_name if self.output_path else folder / "tensorboard"
        self._writer = module.SummaryWriter(str(target))

    def log(self, step: int, values: Values) -> None:
        for key, value in values.items():
            if not isinstance(value, str):
                self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A Weights & Biases run, as the `wandb` block asks."""

    name = "WandB"

    def __init__(self, project: str = "wherry", team: str | None = None, group: str | None = None) -> None:
        self.project = project
        self.team = team
        self.group = group
        self._run: Any = None

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._run = _module("wandb", "wandb").init(
            project=self.project, entity=self.team, group=self.group, dir=str(folder), config=dict(config)
        )

    def log(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class CometSink:
    """An experiment of Comet's, as the `comet` block asks."""

    name = "Comet"

    def __init__(self, block: Mapping[str, Any]) -> None:
        names = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
        self._start = {name: block.get(name) for name in names}
        self._name = block.get("experiment_name")
        self._every = block.get("samples_log_interval", 0)
        self._due = 0
        self._experiment: Any = None

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._experiment = _module("comet_ml", "comet").start(**self._start)
        if self._name is not None:
            self._experiment.set_name(self._name)
        self._experiment.log_parameters(dict(config))

    def log(self, step: int, values: Values) -> None:
        samples = int(values.get("samples", self._due))
        if samples >= self._due:
            self._due = samples + self._every
            self._experiment.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._experiment.end()


class MLflow:
    """A run of MLflow's, as the `mlflow` block asks. In a run that the script has begun, it is that one."""

    name = "MLflow"

    def __init__(
        self, tracking_uri: str | None = None, experiment_name: str | None = None, run_name: str | None = None
    ) -> None:
        self.tracking_uri = tracking_uri
        self.experiment_name = experiment_name
        self.run_name = run_name
        self._module: Any = None
        self._own = False

    def open(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._module = module = _module("mlflow", "mlflow")
        self._own = module.active_run() is None
        if self._own:
            if self.tracking_uri is not None:
                module.set_tracking_uri(self.tracking_uri)
            if self.experiment_name is not None:
                module.set_experiment(self.experiment_name)
            module.start_run(run_name=self.run_name)
        module.log_dict(dict(config), "config.json")

    def log(self, step: int, values: Values) -> None:
        numbers = {key: value for key, value in values.items() if not isinstance(value, str)}
        self._module.log_metrics(numbers, step=step)

    def close(self) -> None:
        if self._own:
            self._module.end_run()


SERVICES: dict[str, Callable[[Mapping[str, Any]], Sink]] = {
    "tensorboard": lambda block: TensorBoardSink(block["output_path"], block["job_name"]),
    "wandb": lambda block: WandB(block["project"], block["team"], block["group"]),
    "comet": CometSink,
    "mlflow": lambda block: MLflow(block["tracking_uri"], block["experiment_name"], block["run_name"]),
}
"""By block of the config: what sends a run's numbers there."""


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved config as it may be written down, or sent."""
    return {**config, "comet": {**config["comet"], "api_key": None}}


def _module(name: str, block: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = block if name.startswith("torch.") else name
        raise WherryError(
            f"{block}.enabled: the config asks for {block}, and its package cannot be imported ({error}); "
            f"run `pip install {package}`, or set {block}.enabled to false"
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
            if config[name]["enabled"]:
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
            except OSError as error:
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
            except OSError as error:
                _tell_of_loss(sink, "at their end", error)


def _tell_of_loss(sink: Sink, when: str, error: OSError) -> None:
    name = getattr(sink, "name", type(sink).__name__)
    logger.warning("the metrics of %s are lost %s: %s", name, when, error.strerror or error)
