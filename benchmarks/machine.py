"""What measured figures depend on: the machine, the versions, and how busy others keep it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("wherry", "torch", "deepspeed", "numpy")
# Cores that others may use before figures are worth little.
QUIET = 0.1
_SAMPLE_S = 0.4


def describe() -> dict[str, Any]:
    """The machine by what it is made of. Its name and its owner are nobody's business."""
    gpu, gpu_bytes = _gpu()
    cpu, model = _processor(Path("/proc/cpuinfo"))
    return {
        "cpu": cpu,
        "cpu_model": model,
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "threads": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": gpu,
        "gpu_memory_bytes": gpu_bytes,
        "system": f"{platform.system()} {platform.release()}",
    }


def _gpu() -> tuple[str | None, int | None]:
    """Ask the driver's own tool for the first GPU's name and bytes: CUDA in this process would take some of them."""
    lines = _said("nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits")
    name, comma, size = (lines or [""])[0].rpartition(", ")
    return (name, int(size) << 20) if comma and size.isdecimal() else (None, None)


def _processor(cpuinfo: Path) -> tuple[str, str | None]:
    """Its name, and what tells processors of one name apart: a cloud calls many generations "Intel(R) Xeon(R)"."""
    if not cpuinfo.exists():
        return platform.processor() or platform.machine(), None
    lines = [line.partition(":") for line in cpuinfo.read_text().split("\n\n")[0].splitlines()]
    found = {key.strip(): value.strip() for key, _, value in lines}
    numbers = [found.get(key, "?") for key in ("cpu family", "model", "stepping")]
    amx = " amx" if "amx_bf16" in found.get("flags", "").split() else ""
    return found.get("model name", platform.machine()), "-".join(numbers) + amx


def slug(machine: Mapping[str, Any]) -> str:
    """The machine in a file's name: its processor with its model, its cores, its GPU.

    >>> slug({"cpu": "Intel(R) Xeon(R) Processor", "cpu_model": "6-143-8 amx", "cores": 2, "gpu": None})
    'intel-xeon-6-143-8-amx-2c'
    """
    words = f"{machine['cpu']} {machine['cpu_model'] or ''} {machine['cores']}c {machine['gpu'] or ''}"
    words = re.sub(r"\((?:R|TM)\)|\b(?:CPU|Processor)\b", " ", words, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def versions(root: Path) -> dict[str, str]:
    """Of Python and the packages that matter, and the commit of the sources at `root`, with a + if they had changes."""
    found = {"python": platform.python_version(), "commit": commit(root)}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit(root: Path) -> str:
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=9", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    except FileNotFoundError:
        return "unknown"


def facts() -> dict[str, list[str]]:
    """Describe processor, memory, disks and GPUs by the output of the system's commands."""
    commands = ("lscpu -e", "lscpu", "cat /proc/meminfo", "df -hT", "nvidia-smi", "nvidia-smi topo -m")
    return {command: _said(command) for command in commands}


def _said(command: str) -> list[str]:
    try:
        done = subprocess.run(command.split(), capture_output=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return [type(error).__name__]
    return (done.stdout or done.stderr).splitlines()


class Load:
    """Watches whether others are at work while something is measured: before it, during it and after it.

    `others_*` are cores kept busy by other processes. A virtual machine that is denied its processor counts as busy.
    """

    def __init__(self) -> None:
        self.before = self._sample()
        self._begun = _busy()

    def _sample(self) -> float:
        begun = _busy()
        time.sleep(_SAMPLE_S)
        return _others(begun, _busy())

    def end(self) -> dict[str, Any]:
        """The watch so far; call it when what was measured is over, so that the last sample sees the others alone."""
        during, after = _others(self._begun, _busy()), self._sample()
        idle = max(self.before, during, after) <= QUIET
        return {"others_before": self.before, "others_during": during, "others_after": after, "idle": idle}


def _busy() -> tuple[float, float, float]:
    """Now, the machine's busy processor time so far, and of it that of this process and its children."""
    times, own = psutil.cpu_times(), os.times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    mine = own.user + own.system + own.children_user + own.children_system
    for child in psutil.Process().children(recursive=True):
        try:
            of_child = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        mine += of_child.user + of_child.system
    return time.monotonic(), sum(times[:8]) - idle, mine


def _others(begun: tuple[float, float, float], ended: tuple[float, float, float]) -> float:
    seconds, busy, own = (b - a for a, b in zip(begun, ended, strict=True))
    return round(max(0.0, busy - own) / seconds, 3)
