"""`deepspeed.utils.comms_logging`: how often, how much and how fast a script's own collectives were."""

from __future__ import annotations

import math
import sys
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist

from wherry.compat.deepspeed.accelerator import get_accelerator
from wherry.compat.deepspeed.comm import get_rank, get_world_size
from wherry.compat.deepspeed.timer import trim_mean
from wherry.compat.deepspeed.utils import log_dist

# How many times its size a collective of n ranks sends, by its algorithm and on the wire.
_GATHERED = ("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor")
_REDUCED = ("all_reduce", "all_reduce_coalesced", "inference_all_reduce")


def get_caller_func(frame: int = 3) -> str:
    return sys._getframe(frame).f_code.co_name


def convert_size(size_bytes: float) -> str:
    if not size_bytes:
        return "0B"
    power = int(math.log(size_bytes, 1024))
    return f"{round(size_bytes / 1024**power, 2)} {('B', 'KB', 'MB', 'GB', 'TB', 'PB')[power]}"


def calc_bw_log(comm_op: str, size: float, duration: float) -> tuple[float, float]:
    """Gbit/s of a collective of so many bytes in so many milliseconds: what it moves, and what a wire carries."""
    ranks = get_world_size()
    per_ms = size / max(duration, 1e-6) * 8 / 1e6
    others = (ranks - 1) / ranks
    if comm_op in _GATHERED:
        return per_ms * ranks, per_ms * ranks * others
    if comm_op in _REDUCED:
        return per_ms * 2, per_ms * 2 * others
    return (per_ms, per_ms * others) if comm_op == "all_to_all_single" else (per_ms, per_ms)


Records = dict[str, dict[int, list[Any]]]


class CommsLogger:
    """Of each operation and size: how many there were, and of each its milliseconds and Gbit/s."""

    def __init__(self) -> None:
        self.comms_dict: Records = {}
        self.enabled = self.verbose = self.debug = False
        self.prof_all = True
        self.prof_ops: list[str] = []

    def configure(self, comms_config: Any) -> None:
        self.enabled = comms_config.comms_logger_enabled
        if self.enabled:
            for name in ("verbose", "debug", "prof_ops", "prof_all"):
                setattr(self, name, getattr(comms_config.comms_logger, name))

    def start_profiling_comms(self) -> None:
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        self.prof_all = False

    def wants(self, operation: str) -> bool:
        return self.enabled and (self.prof_all or operation in self.prof_ops)

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        moved, carried = calc_bw_log(raw_name, msg_size, latency)
        row = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        row[0] += 1
        for values, value in zip(row[1:], (latency, moved, carried), strict=True):
            values.append(value)
        if self.verbose:
            log_dist(f"{record_name}: {convert_size(msg_size)} in {latency:.2f} ms, {carried:.2f} Gbit/s", [0])

    def get_raw_data(self) -> Records:
        return self.comms_dict.copy()

    def has_data(self) -> bool:
        return bool(self.comms_dict)

    def reset_data(self) -> None:
        self.comms_dict.clear()

    def get_operation_names(self) -> list[str]:
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        return sum(row[0] for sizes in self.comms_dict.values() for row in sizes.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        sizes = self.comms_dict.get(operation_name)
        return None if sizes is None else {size: _summary(size, row) for size, row in sorted(sizes.items())}

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print the table of this rank, and what each collective took longer here than on the fastest rank."""
        told = {name: self.get_operation_summary(name) or {} for name in list(self.comms_dict)}
        waited = None
        if show_straggler:
            waited = {
                name: {size: _straggling(size, row) for size, row in sorted(sizes.items())}
                for name, sizes in self.comms_dict.items()
            }
        if print_log:
            _print(told)
            _print(waited or {})
        if not return_dict:
            return None
        ranks = {"world_size": get_world_size(), "rank": get_rank(), "timestamp": datetime.now().isoformat()}
        return {"summary": told, "straggler_analysis": waited, "metadata": ranks}


def _row(size: int, row: list[Any], **values: float) -> dict[str, Any]:
    return {"count": row[0], **values, "msg_size_bytes": size, "msg_size_str": convert_size(size)}


def _summary(size: int, row: list[Any]) -> dict[str, Any]:
    latency, moved, carried = (trim_mean(values, 0.1) for values in row[1:])
    return _row(
        size, row, total_latency_ms=sum(row[1]), avg_latency_ms=latency, tput_avg_gbps=moved, busbw_avg_gbps=carried
    )


def _straggling(size: int, row: list[Any]) -> dict[str, Any]:
    own = torch.tensor(row[1], device=get_accelerator().current_device_name())
    fastest = own.clone()
    dist.all_reduce(fastest, op=dist.ReduceOp.MIN)
    values: dict[str, float] = {}
    for name, times in (("comm_lat", fastest.tolist()), ("straggler", (own - fastest).tolist())):
        values |= {f"total_{name}_ms": sum(times), f"avg_{name}_ms": trim_mean(times, 0.1)}
    return _row(size, row, **values)


def _print(told: dict[str, dict[int, dict[str, Any]]]) -> None:
    for name, sizes in told.items():
        print(name)
        for row in sizes.values():
            shown = {key: value for key, value in row.items() if isinstance(value, float)}
            values = ", ".join(f"{key} {value:.2f}" for key, value in shown.items())
            print(f"  {row['msg_size_str']:>12} x {row['count']}: {values}")
