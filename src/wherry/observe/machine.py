"""What measured figures depend on: the machine, the versions, and how busy others keep it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("wherry", "torch", "deepspeed", "numpy")
# Cores that others may use before figures are worth little.
QUIET = 0.1
_SAMPLE_S = 0.4
# The system counts processor time in steps of a hundredth of a second: nothing is seen in less than a few.
_CLOCK_S = 0.05


def describe() -> dict[str, Any]:
    """The machine by what it is made of. Its name and its owner are nobody's business."""
    gpu, gpu_memory = _gpu()
    return {
        "cpu": _cpu(),
        "cpu_model": _cpu_model(Path("/proc/cpuinfo")),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "threads": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": gpu,
        "gpu_memory_bytes": gpu_memory,
        "system": f"{platform.system()} {platform.release()}",
    }


def slug(machine: Mapping[str, Any]) -> str:
    """The machine in a file's name: its processor, its cores, its GPU.

    >>> slug({"cpu": "Intel(R) Xeon(R) CPU @ 2.70GHz", "cores": 2, "gpu": None})
    'intel-xeon-2-70ghz-2c'
    """
    return _slug(f"{machine['cpu']} {machine['cores']}c {machine['gpu'] or ''}")


def full_slug(machine: Mapping[str, Any]) -> str:
    """Where another machine has that name: with the model of the processor too.

    >>> full_slug({"cpu": "Intel(R) Xeon(R) Processor", "cpu_model": "6-143-8 amx", "cores": 2, "gpu": None})
    'intel-xeon-6-143-8-amx-2c'
    """
    return _slug(f"{machine['cpu']} {machine['cpu_model'] or ''} {machine['cores']}c {machine['gpu'] or ''}")


def may_be_the_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two machines of one name may be one: files of before tell no model of the processor."""
    models = {machine.get("cpu_model") for machine in (one, other)}
    return None in models or len(models) == 1


def _slug(words: str) -> str:
    words = re.sub(r"\((?:R|TM)\)|\b(?:CPU|Processor)\b", " ", words, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def versions(root: Path | None = None) -> dict[str, str]:
    """Of Python and the packages that matter, and the commit of the sources at `root`, with a + if they had changes."""
    found = {"python": platform.python_version(), "commit": _commit(root) if root else "unknown"}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    if found["wherry"] == "not installed":
        found["wherry"] = sys.modules["wherry"].__version__
    return found


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpu_model(cpuinfo: Path) -> str | None:
    """What tells processors of one name apart: family, model, stepping, and whether they multiply matrices in tiles.

    A cloud calls many generations "Intel(R) Xeon(R) Processor".
    """
    if not cpuinfo.exists():
        return None
    lines = [line.partition(":") for line in cpuinfo.read_text().split("\n\n")[0].splitlines()]
    found = {key.strip(): value.strip() for key, _, value in lines}
    numbers = [found.get(key) for key in ("cpu family", "model", "stepping")]
    if None in numbers:
        return None
    return "-".join(map(str, numbers)) + (" amx" if "amx_bf16" in found.get("flags", "").split() else "")


def _gpu() -> tuple[str | None, int | None]:
    import torch

    if not torch.cuda.is_available():
        return None, None
    return torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory


def _commit(root: Path) -> str:
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=9", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


# Others at work.


@dataclass(frozen=True)
class _Moment:
    at: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> _Moment:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        return cls(time.monotonic(), sum(times[:8]) - idle, _own_seconds())

    def others_until(self, later: _Moment) -> float:
        """Cores that processes other than this one and its children have kept busy."""
        if later.at - self.at < _CLOCK_S:
            return 0.0
        busy = (later.busy - self.busy) - (later.own - self.own)
        return round(max(0.0, busy) / (later.at - self.at), 3)


def _own_seconds() -> float:
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    for child in psutil.Process().children(recursive=True):
        try:
            of_child = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        own += of_child.user + of_child.system
    return own


class Load:
    """Watches whether others are at work while something is measured: before it, during it and after it.

    >>> load = Load()
    >>> measure()
    >>> load.end()
    {'average_before': 0.02, 'others_before': 0.0, 'others_during': 0.01, 'others_after': 0.0, 'idle': True}

    `others_*` are cores kept busy by other processes. A virtual machine that is denied its processor counts as busy.
    """

    def __init__(self, sample_s: float = _SAMPLE_S) -> None:
        self._sample_s = sample_s
        self.average = round(os.getloadavg()[0], 2)
        self.before = self._sample()
        self._begun = _Moment.now()

    def _sample(self) -> float:
        begun = _Moment.now()
        time.sleep(self._sample_s)
        return begun.others_until(_Moment.now())

    def end(self) -> dict[str, Any]:
        """The watch so far; call it when what was measured is over, so that the last sample sees the others alone."""
        during = self._begun.others_until(_Moment.now())
        after = self._sample()
        return {
            "average_before": self.average,
            "others_before": self.before,
            "others_during": during,
            "others_after": after,
            "idle": max(self.before, during, after) <= QUIET,
        }
