"""`wherry doctor`: what this machine offers, and what to do about what is amiss."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from wherry.errors import WherryError
from wherry.observe.memory import format_bytes

OK, NOTE, PROBLEM = "ok", "note", "problem"
_GIB = 2**30
# What integrates, and the oldest version that is known to work: that of the extras. The alias stands where deepspeed
# would.
_INTEGRATIONS = {
    "transformers": (5, 0),
    "accelerate": (1, 10),
    "trl": (1, 0),
    "peft": (0, 18),
    "lightning": (2, 5),
    "tensorboard": (2, 15),
    "wandb": (0, 19),
}
_NODES = Path("/sys/devices/system/node")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


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
    checks: tuple[Callable[[], Finding], ...] = (
        *(_python, _torch, _accelerators, _cuda, _backends, _nccl, _cores, _threads, _numa, _memory, _shared_memory),
        *(_locked_memory, _open_files, _huge_pages, _native, _disk_backend, _disk_space),
    )
    for check in checks:
        try:
            yield check()
        except WherryError as error:
            yield Finding(_name(check), "failed", PROBLEM, str(error))
        except (ImportError, OSError) as error:
            yield Finding(_name(check), "not known", NOTE, str(error))
    yield from _integrations()


def _name(check: Callable[[], Finding]) -> str:
    return check.__name__.strip("_").replace("_", " ")


def _python() -> Finding:
    return Finding("Python", f"{platform.python_version()} at {sys.executable}")


def _torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", "cannot be imported", PROBLEM, f"{error}; run `pip install torch`")
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (2, 9) <= (major, minor) <= (2, 14):
        return Finding("torch", torch.__version__)
    return Finding("torch", torch.__version__, NOTE, "Wherry is written for torch 2.9 to 2.14, and tested with 2.13")


def _accelerators() -> Finding:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        if built is None:
            return Finding("GPU", "none; this torch is built for the CPU", NOTE, "training runs on the CPU")
        return Finding(
            "GPU", f"none in sight (torch is built for {built})", NOTE, "training runs on the CPU; see `nvidia-smi`"
        )
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = ", ".join(f"{device.name} with {format_bytes(device.total_memory)}" for device in devices)
    return Finding("GPU", names)


def _cuda() -> Finding:
    """The toolkit that torch is built for, the driver, and what the GPUs can compute with."""
    import torch

    built = torch.version.cuda or torch.version.hip
    if built is None:
        return Finding("CUDA", "none; this torch is built for the CPU")
    if not torch.cuda.is_available():
        advice = "the driver is missing, too old for this torch, or its devices are hidden (CUDA_VISIBLE_DEVICES)"
        return Finding("CUDA", f"{built}, no device in sight", NOTE, advice)
    driver = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    found = f"{built}, driver for {driver // 1000}.{driver % 1000 // 10}"
    old = [i for i in range(torch.cuda.device_count()) if torch.cuda.get_device_capability(i) < (8, 0)]
    if old:
        names = ", ".join(str(index) for index in old)
        advice = f"GPU {names} computes bf16 slowly: use fp16, or fp32"
        return Finding("CUDA", found, NOTE, advice)
    return Finding("CUDA", found)


def _backends() -> Finding:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return Finding("collectives", "torch.distributed is missing", PROBLEM, "install a torch that has it")
    found = [name for name, here in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if here]
    if torch.cuda.is_available() and "nccl" not in found:
        return Finding("collectives", ", ".join(found), PROBLEM, "several GPUs need nccl; install a torch that has it")
    return Finding("collectives", ", ".join(found))


def _nccl() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("NCCL", "not needed without GPUs")
    if torch.cuda.device_count() == 1:
        return Finding("NCCL", "not needed for one GPU")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    apart = [
        (a, b)
        for a in range(torch.cuda.device_count())
        for b in range(a)
        if not torch.cuda.can_device_access_peer(a, b)
    ]
    if apart:
        advice = "some GPUs do not reach each other's memory directly: collectives go through the host, which is slower"
        return Finding("NCCL", version, NOTE, advice)
    return Finding("NCCL", version)


def _cores() -> Finding:
    from wherry.cli.run import usable_cores

    usable, logical = usable_cores(), os.cpu_count() or 1
    return Finding("cores", f"{usable} physical usable, {logical} logical in the machine")


def _threads() -> Finding:
    """How many threads torch's operators take; the update on the host has a pool of its own."""
    import torch

    from wherry.cli.run import usable_cores

    usable, threads = usable_cores(), torch.get_num_threads()
    found = f"{threads} for operators"
    if threads > 2 * usable:
        return Finding("threads", found, NOTE, f"more than the cores; set OMP_NUM_THREADS={usable}")
    if "OMP_NUM_THREADS" not in os.environ and usable > 1:
        return Finding("threads", f"{found}; `wherry run` shares the cores out over its ranks")
    return Finding("threads", found)


def _numa() -> Finding:
    nodes = numa_nodes(_NODES)
    if len(nodes) < 2:
        return Finding("NUMA", "one node")
    found = f"{len(nodes)} nodes: " + "; ".join(f"{name} has cores {cores}" for name, cores in nodes.items())
    return Finding("NUMA", found, NOTE, "bind each rank to the node of its GPU: `wherry run --numa-binding node ...`")


def numa_nodes(folder: Path) -> dict[str, str]:
    """The machine's NUMA nodes that have cores, and these as the kernel lists them."""
    nodes = {}
    for node in sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        cores = (node / "cpulist").read_text().strip()
        if cores:
            nodes[node.name] = cores
    return nodes


def _memory() -> Finding:
    from wherry.observe.memory import host_memory

    memory = host_memory()
    found = f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}"
    if memory.available < 2 * _GIB:
        return Finding("host memory", found, PROBLEM, "free some: torch alone takes half a GiB for each rank")
    return Finding("host memory", found)


def _shared_memory() -> Finding:
    import shutil

    if not os.path.isdir("/dev/shm"):
        return Finding("shared memory", "none at /dev/shm", NOTE, "NCCL and loaders with workers may need it")
    free = shutil.disk_usage("/dev/shm").free
    if free < _GIB:
        advice = "NCCL and loaders with workers may need more; in a container: --shm-size=8g, or --ipc=host"
        return Finding("shared memory", f"{format_bytes(free)} free", NOTE, advice)
    return Finding("shared memory", f"{format_bytes(free)} free")


def _locked_memory() -> Finding:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", "no limit")
    if soft >= _GIB:
        return Finding("locked memory", f"limit {format_bytes(soft)}")
    advice = "buffers of the disk tier may stay unlocked, which is slower; raise it with `ulimit -l unlimited`"
    return Finding("locked memory", f"limit {format_bytes(soft)}", NOTE, advice)


def _open_files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= 1024:
        return Finding("open files", f"limit {soft}")
    return Finding("open files", f"limit {soft}", NOTE, f"raise it with `ulimit -n {hard}`")


def _huge_pages() -> Finding:
    try:
        text = _HUGE_PAGES.read_text()
    except OSError:
        return Finding("huge pages", "not offered by this system")
    mode = text.partition("[")[2].partition("]")[0]
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
    engine = "native" if found.native else "Python"
    if found.reasons:
        return Finding("disk I/O here", f"{found.backend} ({engine})", NOTE, "; ".join(found.reasons))
    return Finding("disk I/O here", f"{found.backend} ({engine})")


def _disk_space() -> Finding:
    import shutil

    usage = shutil.disk_usage(os.getcwd())
    found = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)}"
    if usage.free < _GIB:
        return Finding("disk space here", found, NOTE, "checkpoints and the disk tier need room: 12 bytes a parameter")
    return Finding("disk space here", found)


def _integrations() -> Iterator[Finding]:
    """What is installed of the programs that Wherry works with; none of them is needed."""
    absent = []
    for name, oldest in _INTEGRATIONS.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            absent.append(name)
            continue
        least = ".".join(map(str, oldest))
        if _release(version) < oldest:
            yield Finding(name, version, NOTE, f"{least} or newer is known to work: pip install -U {name}")
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
