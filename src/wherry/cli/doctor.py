"""`wherry doctor`: what this machine offers, and what to do about what is amiss."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from wherry.errors import WherryError
from wherry.observe.memory import format_bytes

OK, NOTE, PROBLEM = "ok", "note", "problem"
_GIB = 2**30
_NODES = Path("/sys/devices/system/node")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Finding:
    """One thing looked at. A note is worth knowing and needs nothing done; a problem stands in the way."""

    name: str
    found: str
    verdict: str = OK
    advice: str = ""


def main(*, as_json: bool = False) -> int:
    """Print all findings; the exit status is 1 if any of them is a problem."""
    findings = list(examine())
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    return int(any(finding.verdict == PROBLEM for finding in findings))


def examine() -> Iterator[Finding]:
    """Every finding, one after the other. What a check meets instead of an answer is its finding."""
    checks: dict[str, Callable[[], Finding]] = {
        "Python": lambda: Finding("Python", f"{platform.python_version()} at {sys.executable}"),
        **{"torch": _torch, "GPU": _gpu, "collectives": _collectives, "threads": _threads, "NUMA": _numa},
        **{"host memory": _memory, "shared memory": _shared_memory, "locked memory": _locked_memory},
        **{"open files": _open_files, "huge pages": _huge_pages, "native core": _native},
        **{"disk I/O here": _disk_backend, "disk space here": _disk_space},
    }
    for name, check in checks.items():
        try:
            yield check()
        except WherryError as error:
            yield Finding(name, "failed", PROBLEM, str(error))
        except (ImportError, OSError) as error:
            yield Finding(name, "not known", NOTE, str(error))
    yield from _integrations()


def _torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", "cannot be imported", PROBLEM, f"{error}; run `pip install torch`")
    if (2, 9) <= _release(torch.__version__) <= (2, 14):
        return Finding("torch", torch.__version__)
    return Finding("torch", torch.__version__, NOTE, "Wherry is written for torch 2.9 to 2.14, and tested with 2.13")


def _gpu() -> Finding:
    """The GPUs, the toolkit that torch is built for, the driver, and what the GPUs can compute with."""
    import torch

    built = torch.version.cuda or torch.version.hip
    if built is None and not torch.cuda.is_available():
        return Finding("GPU", "none; this torch is built for the CPU", NOTE, "training runs on the CPU")
    if not torch.cuda.is_available():
        advice = (
            "training runs on the CPU; see `nvidia-smi`: the driver is missing, too old for this torch, or its devices "
            "are hidden (CUDA_VISIBLE_DEVICES)"
        )
        return Finding("GPU", f"none in sight (torch is built for {built})", NOTE, advice)
    indices = range(torch.cuda.device_count())
    devices = [torch.cuda.get_device_properties(index) for index in indices]
    names = ", ".join(f"{device.name} with {format_bytes(device.total_memory)}" for device in devices)
    driver = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    found = f"{names}; torch for {built}, driver for {driver // 1000}.{driver % 1000 // 10}"
    old = ", ".join(str(index) for index in indices if torch.cuda.get_device_capability(index) < (8, 0))
    if old:
        return Finding("GPU", found, NOTE, f"GPU {old} computes bf16 slowly: use fp16, or fp32")
    return Finding("GPU", found)


def _collectives() -> Finding:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return Finding("collectives", "torch.distributed is missing", PROBLEM, "install a torch that has it")
    here = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    found = ", ".join(name for name, there in here.items() if there)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count and not here["nccl"]:
        return Finding("collectives", found, PROBLEM, "several GPUs need nccl; install a torch that has it")
    if count > 1:
        found += f" {'.'.join(map(str, torch.cuda.nccl.version()))}"
        if not all(torch.cuda.can_device_access_peer(a, b) for a in range(count) for b in range(a)):
            advice = "some GPUs do not reach each other's memory: collectives go through the host, which is slower"
            return Finding("collectives", found, NOTE, advice)
    return Finding("collectives", found)


def _threads() -> Finding:
    """How many threads torch's operators take; the update on the host has a pool of its own."""
    import torch

    from wherry.cli.run import usable_cores

    usable, threads = usable_cores(), torch.get_num_threads()
    found = f"{threads} for operators; {usable} physical cores usable, {os.cpu_count() or 1} logical in the machine"
    if threads > 2 * usable:
        return Finding("threads", found, NOTE, f"more than the cores; set OMP_NUM_THREADS={usable}")
    return Finding("threads", found)


def _numa() -> Finding:
    nodes = {}
    for node in sorted(_NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        cores = (node / "cpulist").read_text().strip()
        if cores:
            nodes[node.name] = cores
    if len(nodes) < 2:
        return Finding("NUMA", "one node")
    found = f"{len(nodes)} nodes: " + "; ".join(f"{name} has cores {cores}" for name, cores in nodes.items())
    return Finding("NUMA", found, NOTE, "bind each rank to the node of its GPU: `wherry run --numa-binding node ...`")


def _memory() -> Finding:
    from wherry.observe.memory import host_memory

    memory = host_memory()
    found = f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}"
    if memory.available < 2 * _GIB:
        return Finding("host memory", found, PROBLEM, "free some: torch alone takes half a GiB for each rank")
    return Finding("host memory", found)


def _shared_memory() -> Finding:
    if not _SHARED_MEMORY.is_dir():
        return Finding("shared memory", f"none at {_SHARED_MEMORY}", NOTE, "NCCL and loaders with workers may need it")
    advice = "NCCL and loaders with workers may need more; in a container: --shm-size=8g, or --ipc=host"
    return _at_least_a_gib("shared memory", shutil.disk_usage(_SHARED_MEMORY).free, "free", advice)


def _disk_space() -> Finding:
    advice = "checkpoints and the disk tier need room: 12 bytes a parameter"
    return _at_least_a_gib("disk space here", shutil.disk_usage(os.getcwd()).free, "free", advice)


def _locked_memory() -> Finding:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", "no limit")
    advice = "buffers of the disk tier may stay unlocked, which is slower; raise it with `ulimit -l unlimited`"
    return _at_least_a_gib("locked memory", soft, "allowed", advice)


def _at_least_a_gib(name: str, size: int, of_what: str, advice: str) -> Finding:
    found = f"{format_bytes(size)} {of_what}"
    return Finding(name, found, NOTE, advice) if size < _GIB else Finding(name, found)


def _open_files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= 1024:
        return Finding("open files", f"limit {soft}")
    return Finding("open files", f"limit {soft}", NOTE, f"raise it with `ulimit -n {hard}`")


def _huge_pages() -> Finding:
    if not _HUGE_PAGES.is_file():
        return Finding("huge pages", "not offered by this system")
    mode = _HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    if mode == "never":
        advice = "host buffers on huge pages are faster: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return Finding("huge pages", mode, NOTE, advice)
    return Finding("huge pages", mode)


def _native() -> Finding:
    """What updates states on the host: the library's kernels for this processor, or their substitute in torch."""
    from wherry import native

    name, best = native.isa(), native.available_isas()[0]
    if native.library() is None:
        advice = f"{native.why_not()}; meanwhile updates on the host run in plain torch: the same results, slower"
        return Finding("native core", "not in use: torch fallback", NOTE, advice)
    found = f"{name} kernels, {native.default_pool().threads} threads of its own"
    if name != best:
        advice = f"WHERRY_ISA={name} asks for them; unset it for {best}, which this processor has: the same results"
        return Finding("native core", found, NOTE, advice)
    if name == "portable":
        advice = "this processor has none of AVX-512, AVX2 and NEON: the same results, slower"
        return Finding("native core", found, NOTE, advice)
    return Finding("native core", found)


def _disk_backend() -> Finding:
    from wherry.tiers.disk_probe import probe

    found = probe(os.getcwd())
    engine = f"{found.backend} ({'native' if found.native else 'Python'})"
    return Finding("disk I/O here", engine, NOTE if found.reasons else OK, "; ".join(found.reasons))


def _integrations() -> Iterator[Finding]:
    """What is installed of the programs that the extras name, and whether it is as new as they ask; none is needed."""
    absent = []
    for requirement in metadata.requires("wherry") or ():
        asked = re.match(r"([\w-]+)>=(\S+?); extra == ['\"](transformers|lightning|tensorboard|wandb|ray)", requirement)
        if asked is None:
            continue
        name, least, _ = asked.groups()
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            absent.append(name)
            continue
        if _release(version) < _release(least):
            yield Finding(name, version, NOTE, f"{least} or newer is known to work: pip install -U '{name}>={least}'")
        else:
            yield Finding(name, version)
    if absent:
        yield Finding("not installed", f"{', '.join(absent)}; none is needed")


def _release(version: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    numbers = [int(match[0]) for part in version.split(".")[:2] if (match := re.match(r"\d+", part))]
    major, minor, *_ = [*numbers, 0, 0]
    return major, minor


def _show(findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    from wherry.observe.screen import Screen

    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        mark, style = {OK: ("ok", "green"), NOTE: ("note", "yellow"), PROBLEM: ("PROBLEM", "bold red")}[finding.verdict]
        table.add_row(Text(mark, style=style), Text(finding.name), Text(finding.found))
        if finding.advice:
            table.add_row("", "", Text(finding.advice, style="dim"))
    console = Screen()
    console.print(table)
    problems = sum(finding.verdict == PROBLEM for finding in findings)
    console.print(f"{problems} problem{'s' * (problems != 1)}." if problems else "All that training needs is here.")
