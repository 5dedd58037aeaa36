"""`deepspeed.monitor`: the sinks of a config, written to as DeepSpeed's monitors are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wherry import config as configs
from wherry.compat.deepspeed.comm import get_rank
from wherry.observe.metrics import Monitor


def get_monitor_config(config: Any) -> Any:
    return configs.load(config)


class MonitorMaster(Monitor):
    """Writes `(name, value, step)` events to TensorBoard, Weights & Biases and CSV, as the config's blocks say."""

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(configs.load(monitor_config).to_dict(), get_rank())

    def write_events(self, event_list: Sequence[tuple[str, float, int]], flush: bool = True) -> None:
        super().write_events(list(event_list))
