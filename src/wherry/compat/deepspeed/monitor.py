"""`deepspeed.monitor`: `(name, value, step)` events, to where a config's blocks say."""

from __future__ import annotations

import csv
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from wherry.compat.deepspeed.comm import get_rank
from wherry.compat.deepspeed.constants import JOB_NAME_DEFAULT, WANDB_PROJECT_DEFAULT
from wherry.config import blocks
from wherry.config.fields import ConfigBlock
from wherry.observe.metrics import comet_experiment, package

Event = tuple[str, float, int]


class TensorBoardConfig(blocks.TensorBoard, frozen=False, validate_assignment=True):
    """`tensorboard`."""

    job_name: str = JOB_NAME_DEFAULT


class WandbConfig(blocks.Wandb, frozen=False, validate_assignment=True):
    """`wandb`."""

    project: str = WANDB_PROJECT_DEFAULT


class CSVConfig(blocks.CsvMonitor, frozen=False, validate_assignment=True):
    """`csv_monitor`."""

    job_name: str = JOB_NAME_DEFAULT


class CometConfig(blocks.Comet, frozen=False, validate_assignment=True):
    """`comet`."""


class DeepSpeedMonitorConfig(ConfigBlock, frozen=False, validate_assignment=True):
    """The blocks of all monitors."""

    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)
    comet: CometConfig = Field(default_factory=CometConfig)
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    csv_monitor: CSVConfig = Field(default_factory=CSVConfig)

    @property
    def enabled(self) -> bool:
        return any(block.enabled for block in (self.tensorboard, self.comet, self.wandb, self.csv_monitor))


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """The blocks in a config; what they do not say is as in DeepSpeed."""
    names = DeepSpeedMonitorConfig.model_fields
    return DeepSpeedMonitorConfig(**{name: param_dict[name] for name in names if name in param_dict})


class Monitor(ABC):
    """What a script's own monitor derives from."""

    @abstractmethod
    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config

    @abstractmethod
    def write_events(self, event_list: Sequence[Event]) -> None: ...


class _One(Monitor):
    """A monitor of one block: the block's keys are its attributes, and rank 0 opens it."""

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        for name in type(monitor_config).model_fields:
            setattr(self, name, getattr(monitor_config, name))
        self.writes = bool(monitor_config.enabled) and get_rank() == 0
        if self.writes:
            self._open()

    @abstractmethod
    def _open(self) -> None:
        """What the first event needs."""

    def _folder(self) -> str:
        folder = os.path.join(self.monitor_config.output_path, self.monitor_config.job_name)
        os.makedirs(folder, exist_ok=True)
        return folder


class TensorBoardMonitor(_One):
    """Event files in `output_path/job_name`."""

    summary_writer: Any = None

    def _open(self) -> None:
        module = package("torch.utils.tensorboard", "tensorboard")
        self.summary_writer = module.SummaryWriter(log_dir=self._folder())

    def get_summary_writer(self) -> Any:
        return self.summary_writer

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        if self.summary_writer is not None:
            for event in event_list:
                self.summary_writer.add_scalar(*event)
            if flush:
                self.flush()

    def flush(self) -> None:
        if self.summary_writer is not None:
            self.summary_writer.flush()


class WandbMonitor(_One):
    """A run of Weights & Biases."""

    def _open(self) -> None:
        block = self.monitor_config
        self._run = package("wandb", "wandb")
        self._run.init(project=block.project, group=block.group, entity=block.team)

    def log(self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> Any:
        return self._run.log(data, step=step, commit=commit) if self.writes else None

    def write_events(self, event_list: Sequence[Event]) -> None:
        for name, value, step in event_list:
            self.log({name: value}, step=step)


class csvMonitor(_One):
    """A file of each event's own, by its name, in `output_path/job_name`."""

    def _open(self) -> None:
        self.log_dir, self.filenames = self._folder(), set[str]()

    def write_events(self, event_list: Sequence[Event]) -> None:
        for name, value, step in event_list if self.writes else ():
            file_name = name.replace("/", "_").replace(" ", "_")
            with open(os.path.join(self.log_dir, file_name + ".csv"), "a", encoding="utf-8", newline="") as file:
                if file_name not in self.filenames:
                    csv.writer(file).writerow(["step", name.rpartition("/")[2]])
                self.filenames.add(file_name)
                csv.writer(file).writerow([step, value])


class CometMonitor(_One):
    """An experiment of Comet's, told of each event once in `samples_log_interval` samples."""

    experiment: Any = None

    def _open(self) -> None:
        self.experiment = comet_experiment(self.monitor_config.model_dump())
        self._told: dict[str, int] = {}

    def write_events(self, event_list: Sequence[Event]) -> None:
        for name, value, step in event_list if self.writes else ():
            if name not in self._told or step - self._told[name] >= self.monitor_config.samples_log_interval:
                self._told[name] = step
                self.experiment.log_metric(name, value, step=step)


class MonitorMaster(Monitor):
    """The monitors that a config asks for, as one."""

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(get_monitor_config(monitor_config) if isinstance(monitor_config, Mapping) else monitor_config)
        self.enabled = self.monitor_config.enabled

        def made(kind: Any, block: Any) -> Any:
            return kind(block) if block.enabled and get_rank() == 0 else None

        self.tb_monitor = made(TensorBoardMonitor, self.monitor_config.tensorboard)
        self.wandb_monitor = made(WandbMonitor, self.monitor_config.wandb)
        self.csv_monitor = made(csvMonitor, self.monitor_config.csv_monitor)
        self.comet_monitor = made(CometMonitor, self.monitor_config.comet)

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        for monitor in (self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor):
            if monitor is not None:
                monitor.write_events(event_list)
