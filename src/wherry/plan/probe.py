"""This machine, measured once (`rates`) and kept in a file until it changes."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from wherry.config import Config
from wherry.observe.log import logger
from wherry.observe.memory import driver_memory
from wherry.plan import rates
from wherry.plan.machines import Machine
from wherry.plan.rates import cores, processor
from wherry.tiers.host import free_host_memory

VERSION = 9
# Cores that others may keep busy while rates are measured that are to be kept, of eight; of fewer, as many.
BUSY = 0.5
# What a user has said of threads.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def this_machine(
    folder: str | os.PathLike[str] | None = None, *, again: bool = False, every_gpu: bool = False
) -> Machine:
    """This machine, measured now if it has not been before; what is free is looked at each time.

    `folder` is on the disk that would hold states. Measuring takes some seconds. The GPU that this process computes on
    is asked what it has free: another one, asked, would have half a GB less until this process ends. `every_gpu`: it
    soon does, so all are asked, and the least counts.
    """
    where, gpus = Path(folder or os.getcwd()), gpu_names()
    file = cache_folder() / f"machine-{_fingerprint(where, gpus)}.json"
    if not again:
        try:
            return _now(Machine(**json.loads(file.read_text())), where, gpus, every_gpu)
        except (OSError, ValueError, TypeError, KeyError):
            pass  # not measured yet, or by another version: it is now
    began, worked = time.perf_counter(), _others_worked()
    machine = rates.measure(where)
    others = (_others_worked() - worked) / max(time.perf_counter() - began, 1e-9)
    if others > BUSY * max(1.0, (os.cpu_count() or 1) / 8):
        logger.warning(
            "this machine was measured while others kept %.1f cores busy, so its rates are too low: they are not "
            "kept, and are measured again the next time",
            others,
        )
        return _now(replace(machine, busy=True), where, gpus, every_gpu)
    unfinished = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(asdict(machine), indent=2))
        unfinished.replace(file)
    except OSError as error:
        logger.warning("what was measured of this machine is not kept, and is measured again the next time: %s", error)
    return _now(machine, where, gpus, every_gpu)


def this_machine_roughly() -> Machine:
    """What this machine has free, and how fast it multiplies matrices: measured each time, in a moment."""
    return _now(rates.products(), Path.cwd(), gpu_names(), every_gpu=False)


def disk_folder(config: Config, path: str | None = None) -> Path | None:
    """Where something is to rest on disk: at `path`, or at the first folder that a config names. None if nowhere.

    One that is not made yet is on the disk of the folder that it would be made in.
    """
    if path is None:
        folders = [*state_folders(config), *_listed(config.activation_checkpointing.nvme_path)]
        path = next(iter(folders), None)
    if path is None:
        return None
    folder = Path(path).absolute()
    return next(each for each in (folder, *folder.parents) if each.is_dir())


def state_folders(config: Config) -> list[str]:
    """The folders where the config lets states rest on disk."""
    zero = config.zero_optimization
    return [*_listed(zero.offload_optimizer.nvme_path), *_listed(zero.offload_param.nvme_path)]


def _listed(folders: str | list[str] | None) -> list[str]:
    return [folders] if isinstance(folders, str) else folders or []


def cache_folder() -> Path:
    """Where Wherry keeps what it has found out about this machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wherry"


def _others_worked() -> float:
    """Seconds that cores have worked for other processes, and for other machines that share them."""
    import psutil

    times = psutil.cpu_times()._asdict()
    return sum(times.get(name, 0.0) for name in ("user", "nice", "system", "steal")) - time.process_time()


def _fingerprint(folder: Path, gpus: list[str]) -> str:
    threads = [os.environ.get(name) for name in _THREADS]
    parts = (
        *(VERSION, platform.node(), platform.machine(), processor(), torch.__version__, threads),
        *(cores(), gpus, os.stat(folder).st_dev),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def gpu_names() -> list[str]:
    """The names of torch's GPUs."""
    return [rates.device_name(gpu) for gpu in rates.gpus_here()]


def _now(machine: Machine, folder: Path, gpus: list[str], every_gpu: bool) -> Machine:
    """With what is free at this moment."""
    changes: dict[str, int] = {"disk": shutil.disk_usage(folder).free, "host_memory": free_host_memory()}
    if gpus:
        asked = rates.gpus_here() if every_gpu else [rates.this_device()]
        changes["gpu_memory"] = min(driver_memory(gpu)[0] for gpu in asked)
    return replace(machine, **changes)  # type: ignore[arg-type]
