"""The rates of this machine, measured: matrix products, memory, the bus, the disk."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from wherry.observe.log import logger
from wherry.observe.memory import driver_memory, host_memory
from wherry.plan.machines import GB, HOST_NETWORK, Machine, known
from wherry.tickets import Ticket
from wherry.tiers.buffers import HostPool
from wherry.tiers.disk import DiskStore
from wherry.tiers.disk_errors import DiskSpaceError
from wherry.tiers.streams import accelerator, link_to

# What a disk that cannot be measured is taken to do: bytes a second read, and written.
UNKNOWN_DISK = 1.0 * GB, 0.5 * GB
# Bytes of a copy to, from or between GPUs, and seconds after which copies between two have not worked.
PIECE, LINK_SECONDS = 1 << 28, 120.0


def gpus_here() -> list[torch.device]:
    """Torch's GPUs, of whatever kind they are."""
    kind = accelerator()
    return [] if kind is None else [torch.device(kind.type, at) for at in range(torch.accelerator.device_count())]


def this_device() -> torch.device:
    """The GPU that this process computes on: memory that it takes on another, to use it at all, stays taken."""
    there = gpus_here()
    return there[torch.accelerator.current_device_index()] if there else torch.device("cpu")


def device_name(device: torch.device) -> str:
    return getattr(torch.get_device_module(device), "get_device_name", str)(device)


def measure(folder: Path) -> Machine:
    """What of the machine is asked for takes some seconds. The caller's random numbers stay as they were."""
    device, gpus = this_device(), len(gpus_here())
    with torch.random.fork_rng(devices=[device.index] if gpus else [], device_type=device.type):
        machine = _measure(folder, device, gpus)
    if gpus:
        torch.accelerator.empty_cache()  # gigabytes that nobody uses any more, and that would not count as free
    return machine


def _measure(folder: Path, device: torch.device, gpus: int) -> Machine:
    memory = host_memory()
    stream = _stream(torch.device("cpu"))
    read, write = _disk(folder)
    half = _half(device)
    pcie = _pcie(device) if gpus else stream / 2
    return Machine(
        name=_name(device, gpus),
        gpus=gpus,
        gpu_memory=driver_memory(device)[1] if gpus else 0,
        host_memory=memory.total,
        disk=shutil.disk_usage(folder).free,
        matrix=_matrix(device, half),
        matrix_fp32=_matrix(device, torch.float32),
        device_stream=_stream(device) if gpus else stream,
        stream=stream,
        pcie=pcie,
        disk_read=read,
        disk_write=write,
        # Ranks on a host send by a copy in and a copy out, for each of two.
        link=_link(pcie) if gpus > 1 else stream / 4,
        network=25 * GB if gpus else HOST_NETWORK,
        overhead=_overhead(device),
        measured=True,
        half="fp16" if half is torch.float16 else "bf16",
    )


def products() -> Machine:
    """How fast this machine multiplies matrices, measured in a moment; its other rates are another's."""
    device, gpus = this_device(), len(gpus_here())
    with torch.random.fork_rng(devices=[device.index] if gpus else [], device_type=device.type):
        rate = _matrix(device, _half(device) if gpus else torch.float32)
    return replace(known("a100"), name=_name(device, gpus), gpus=gpus, matrix=rate, matrix_fp32=rate)


def _half(device: torch.device) -> torch.dtype:
    """bf16; fp16 where the device has no bf16 of its own."""
    supports = getattr(torch.get_device_module(device), "is_bf16_supported", lambda **_: True)
    try:
        return torch.bfloat16 if supports(including_emulation=False) else torch.float16
    except TypeError:  # a device that emulates nothing
        return torch.bfloat16 if supports() else torch.float16


def _name(device: torch.device, gpus: int) -> str:
    return f"{gpus} x {device_name(device)}" if gpus else f"{processor() or 'CPU'}, {cores()} cores"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _typical(work: Callable[[], object], device: torch.device, seconds: float = 0.3) -> float:
    """The median time of one call, of as many as fit in `seconds`, three at least: a step has no lucky moments only."""
    times: list[float] = []
    work()
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _matrix(device: torch.device, dtype: torch.dtype) -> float:
    """Products as a transformer has them: many rows, a width of 1024 (of 4096 on a GPU); forward and both backwards."""
    rows, width = (1024, 1024) if device.type == "cpu" else (8192, 4096)
    x, grad = torch.randn(2, rows, width, device=device, dtype=dtype)
    weight = torch.randn(width, width, device=device, dtype=dtype)
    forms = (lambda: torch.mm(x, weight.t()), lambda: torch.mm(grad, weight), lambda: torch.mm(grad.t(), x))
    return len(forms) * 2 * rows * width * width / sum(_typical(form, device, 0.1) for form in forms)


def _stream(device: torch.device) -> float:
    """Bytes read and written by a sum of two arrays, larger than caches."""
    numel = 1 << 25 if device.type == "cpu" else 1 << 28
    a, b, out = (torch.ones(numel, device=device) for _ in range(3))
    return 12 * numel / _typical(lambda: torch.add(a, b, out=out), device)


def _pcie(device: torch.device) -> float:
    """Bytes a second to or from host memory that is pinned as the engine's is, and not kept as torch keeps its own."""
    with closing(link_to(device)) as link:
        host = link.host.take(PIECE)
        there = torch.empty_like(host, device=device)
        up = _typical(lambda: there.copy_(host, non_blocking=True), device)
        down = _typical(lambda: host.copy_(there, non_blocking=True), device)
        link.host.give(host)
    return PIECE / max(up, down)


def _link(pcie: float) -> float:
    """Bytes a second from one GPU to another, by a process of its own: what one takes on each GPU it uses, half a GB,
    is missing until it ends for the rank that has that GPU."""
    path = os.pathsep.join(filter(None, sys.path))
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LINK],
            capture_output=True,
            text=True,
            timeout=LINK_SECONDS,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        reason = f"they did not end within {LINK_SECONDS:.0f} s"
    else:
        if done.returncode == 0:
            return float(done.stdout)
        reason = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
    logger.warning("copies between two GPUs of this machine cannot be measured (%s): their rate is the bus's", reason)
    return pcie


_LINK = "from wherry.plan.rates import between_gpus; print(between_gpus())"


def between_gpus() -> float:
    here, there = gpus_here()[:2]
    source = torch.empty(PIECE, dtype=torch.uint8, device=here)
    target = torch.empty_like(source, device=there)
    return PIECE / _typical(lambda: target.copy_(source, non_blocking=True), here)


def _overhead(device: torch.device) -> float:
    """Seconds that an operation of a forward and backward costs when it has next to nothing to do."""
    x = torch.ones(8, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(50):
            y = y * 1.5
        y.sum().backward()

    return _typical(chain, device, 0.1) / 150


def _disk(folder: Path) -> tuple[float, float]:
    """Bytes a second by the disk tier's own store: read, and written. A quarter of a GB."""
    size = 64 << 20
    try:
        if shutil.disk_usage(folder).free < 16 * size:
            raise OSError("it has no room")
        return _disk_rates(folder, size)
    except (OSError, DiskSpaceError) as error:
        logger.warning(
            "the disk of %s is not measured (%s): it is taken to read 1 GB a second and to write half of that",
            folder,
            error,
        )
        return UNKNOWN_DISK


def _disk_rates(folder: Path, size: int) -> tuple[float, float]:
    count = 4
    with tempfile.TemporaryDirectory(dir=folder) as inside, HostPool() as pool, DiskStore(inside) as store:
        buffers = [pool.take(size) for _ in range(count)]
        records = [store.reserve(f"probe {i}", size) for i in range(count)]

        def transfer(way: Callable[..., Ticket]) -> None:
            for ticket in [way(record, buffer) for record, buffer in zip(records, buffers, strict=True)]:
                ticket.wait()

        cpu = torch.device("cpu")
        write = _typical(lambda: transfer(store.write), cpu, 0.5)
        read = _typical(lambda: transfer(store.read), cpu, 0.5)
        for buffer in buffers:
            pool.give(buffer)
    moved = count * size
    return moved / read, moved / write
