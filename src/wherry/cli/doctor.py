"""`wherry doctor`: what this machine offers, and what to do about what is amiss."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from wherry.config.problems import Parser
from wherry.errors import WherryError
from wherry.observe.memory import format_bytes

OK, NOTE, PROBLEM = "ok", "note", "problem"
_GIB = 2**30
_SHARED_MEMORY = Path("/dev/shm")
_NODES = Path("/sys/devices/system/node")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True)
class Finding:
    """One thing looked at. A note is worth knowing and needs nothing done; a problem stands in the way."""

    name: str
    found: str
    verdict: str = OK
    advice: str = ""


def main(argv: list[str]) -> int:
    """Print all findings; the exit status is 1 if any of them is a problem."""
    parser = Parser(prog="wherry doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    arguments = parser.parse_args(argv)
    findings = list(examine())
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    return int(any(finding.verdict == PROBLEM for finding in findings))


def examine() -> Iterator[Finding]:
    """Every finding, one after the other. What a check meets instead of an answer is its finding."""
    for name, check in CHECKS.items():
        try:
            yield check(name)
        except WherryError as error:
            yield Finding(name, "failed", PROBLEM, str(error))
        except (ImportError, OSError) as error:
            yield Finding(name, "not known", NOTE, str(error))
    yield from _integrations()


def _python(name: str) -> Finding:
    return Finding(name, f"{platform.python_version()} at {sys.executable}")


def _torch(name: str) -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding(name, "cannot be imported", PROBLEM, f"{error}; run `pip install torch`")
    if (2, 9) <= _release(torch.__version__) <= (2, 14):
        return Finding(name, torch.__version__)
    return Finding(name, torch.__version__, NOTE, "Wherry is written for torch 2.9 to 2.14, and tested with 2.13")


def _gpu(name: str) -> Finding:
    """The GPUs, the toolkit that torch is built for, and what the GPUs can compute with."""
    import torch

    from wherry.observe.memory import driver_memory
    from wherry.plan.rates import device_name, gpus_here

    others = [gpu for gpu in gpus_here() if gpu.type != "cuda"]
    if others:
        sizes = {gpu: driver_memory(gpu)[1] for gpu in others}
        told = (device_name(gpu) + (f" with {format_bytes(size)}" if size else "") for gpu, size in sizes.items())
        return Finding(name, f"{', '.join(told)}; torch for {others[0].type}")
    built = torch.version.cuda or torch.version.hip
    if built is None and not torch.cuda.is_available():
        return Finding(name, "none; this torch is built for the CPU", NOTE, "training runs on the CPU")
    if not torch.cuda.is_available():
        advice = (
            "training runs on the CPU; see `nvidia-smi`: the driver is missing, too old for this torch, or its devices "
            "are hidden (CUDA_VISIBLE_DEVICES)"
        )
        return Finding(name, f"none in sight (torch is built for {built})", NOTE, advice)
    indices = range(torch.cuda.device_count())
    devices = [torch.cuda.get_device_properties(index) for index in indices]
    names = ", ".join(f"{device.name} with {format_bytes(device.total_memory)}" for device in devices)
    found = f"{names}; torch for {built}"
    old = ", ".join(str(index) for index in indices if torch.cuda.get_device_capability(index) < (8, 0))
    if old:
        return Finding(name, found, NOTE, f"GPU {old} computes bf16 slowly: use fp16, or fp32")
    return Finding(name, found)


def _collectives(name: str) -> Finding:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return Finding(name, "torch.distributed is missing", PROBLEM, "install a torch that has it")
    here = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "xccl": dist.is_xccl_available()}
    found = ", ".join(backend for backend, there in here.items() if there)
    if torch.cuda.is_available() and not here["nccl"]:
        return Finding(name, found, PROBLEM, "several GPUs need nccl; install a torch that has it")
    return Finding(name, found)


def _memory(name: str) -> Finding:
    from wherry.observe.memory import host_memory

    memory = host_memory()
    amount = f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}"
    if memory.available < 2 * _GIB:
        return Finding(
            name,
            amount,
            PROBLEM,
            "free some: torch alone takes half a GiB for each rank; wherry.host_memory gives the amount where memory "
            "grows as it is used",
        )
    return Finding(name, amount)


def _shared_memory(name: str) -> Finding:
    if not _SHARED_MEMORY.is_dir():
        return Finding(name, f"none at {_SHARED_MEMORY}", NOTE, "NCCL and loaders with workers may need it")
    advice = "NCCL and loaders with workers may need more; in a container: --shm-size=8g, or --ipc=host"
    return _room(name, _SHARED_MEMORY, advice)


def _disk_space(name: str) -> Finding:
    return _room(name, Path.cwd(), "checkpoints and the disk tier need room: 12 bytes a parameter")


def _room(name: str, folder: Path, advice: str) -> Finding:
    free = shutil.disk_usage(folder).free
    found = f"{format_bytes(free)} free"
    return Finding(name, found, NOTE, advice) if free < _GIB else Finding(name, found)


def _native(name: str) -> Finding:
    """What updates states on the host: the library's kernels for this processor, or their substitute in torch."""
    from wherry import native

    isa, best = native.isa(), native.available_isas()[0]
    if native.library() is None:
        advice = f"{native.why_not()}; meanwhile updates on the host run in plain torch: the same results, slower"
        return Finding(name, "not in use: torch fallback", NOTE, advice)
    found = f"{isa} kernels, {native.default_pool().threads} threads of its own"
    if isa != best:
        advice = f"WHERRY_ISA={isa} asks for them; unset it for {best}, which this processor has: the same results"
        return Finding(name, found, NOTE, advice)
    if isa == "portable":
        advice = "this processor has none of AVX-512, AVX2 and NEON: the same results, slower"
        return Finding(name, found, NOTE, advice)
    return Finding(name, found)


def _disk_backend(name: str) -> Finding:
    from wherry.tiers.disk_probe import probe

    found = probe(os.getcwd())
    engine = f"{found.backend} ({'native' if found.native else 'Python'})"
    return Finding(name, engine, NOTE if found.reasons else OK, "; ".join(found.reasons))


def _numa(name: str) -> Finding:
    nodes = [node for node in _NODES.glob("node[0-9]*") if (node / "cpulist").read_text().strip()]
    if len(nodes) < 2:
        return Finding(name, "one node")
    advice = "bind each rank to the node of its GPU: `wherry run --numa-binding node ...`"
    return Finding(name, f"{len(nodes)} nodes with cores", NOTE, advice)


def _locked_memory(name: str) -> Finding:
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or limit >= _GIB:
        return Finding(name, "no limit" if limit == resource.RLIM_INFINITY else f"limit {format_bytes(limit)}")
    advice = "buffers of the disk tier may stay unlocked, which is slower; raise it with `ulimit -l unlimited`"
    return Finding(name, f"limit {format_bytes(limit)}", NOTE, advice)


def _pinned_memory(name: str) -> Finding:
    from wherry.tiers.streams import accelerator, link_to

    device = accelerator()
    if device is None:
        return Finding(name, "not needed: there is no accelerator")
    with closing(link_to(device)) as link:
        link.host.give(link.host.take(_GIB >> 4))
        kind = link.host.kind
    if kind == "pageable":
        return Finding(
            name, kind, NOTE, "states in host memory are copied more slowly; raise the limits on pinned memory"
        )
    return Finding(name, f"pinned by {kind}")


def _huge_pages(name: str) -> Finding:
    mode = _HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    advice = "host buffers on huge pages are faster: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return Finding(name, mode, NOTE, advice) if mode == "never" else Finding(name, mode)


CHECKS: dict[str, Callable[[str], Finding]] = {
    "Python": _python,
    "torch": _torch,
    "GPU": _gpu,
    "collectives": _collectives,
    "host memory": _memory,
    "shared memory": _shared_memory,
    "NUMA": _numa,
    "locked memory": _locked_memory,
    "pinned memory": _pinned_memory,
    "huge pages": _huge_pages,
    "native core": _native,
    "disk I/O here": _disk_backend,
    "disk space here": _disk_space,
}


# Of programs that Wherry works with.
_EXTRAS = ("transformers", "lightning", "tensorboard", "wandb", "comet", "mlflow", "ray")


def _integrations() -> Iterator[Finding]:
    """What is installed of the programs that the extras name, and whether it is as new as they ask; none is needed."""
    absent = []
    try:
        requirements = metadata.requires("wherry") or ()
    except metadata.PackageNotFoundError:
        yield Finding("Wherry", "run from its sources", NOTE, "its extras are not looked at: `pip install wherry`")
        return
    for requirement in requirements:
        asked = re.match(rf"([\w-]+)>=(\S+?); extra == ['\"]({'|'.join(_EXTRAS)})", requirement)
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
