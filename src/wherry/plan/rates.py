"""The rates of this machine, measured: matrix products, memory, the bus, the disk."""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from wherry.observe.log import logger
from wherry.observe.memory import host_memory
from wherry.plan.machines import GB, HOST_NETWORK, Machine
from wherry.plan.operations import Recorder
from wherry.plan.probe import cores, processor
from wherry.plan.roofline import computing
from wherry.tiers.buffers import CudaPin, HostPool

# What a disk that cannot be measured is taken to do: bytes a second read, written, and both.
UNKNOWN_DISK = 1.0 * GB, 0.5 * GB, 0.5 * GB
# Bytes of a copy to, from or between GPUs, and seconds after which copies between two have not worked.
PIECE, LINK_SECONDS = 1 << 28, 120.0


def measure(folder: Path) -> Machine:
    """What of the machine is asked for takes some seconds. The caller's random numbers stay as they were."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if gpus else []):
        machine = _measure(folder, gpus)
    if gpus:
        torch.cuda.empty_cache()  # gigabytes that nobody uses any more, and that would not count as free
    return machine


def _measure(folder: Path, gpus: int) -> Machine:
    # The GPU that this process computes on: memory that it takes on another, to use it at all, stays taken.
    device = torch.device("cuda", torch.cuda.current_device()) if gpus else torch.device("cpu")
    memory = host_memory()
    stream = _stream(torch.device("cpu"))
    read, write, both = _disk(folder)
    name = f"{gpus} x {torch.cuda.get_device_name(device)}" if gpus else f"{processor() or 'CPU'}, {cores()} cores"
    half = torch.float16 if gpus and torch.cuda.get_device_capability(device) < (8, 0) else torch.bfloat16
    matrix, matrix_fp32 = _matrix(device, half), _matrix(device, torch.float32)
    pcie = _pcie(device) if gpus else stream / 2
    machine = Machine(
        name=name,
        gpus=gpus,
        gpu_memory=torch.cuda.get_device_properties(device).total_memory if gpus else 0,
        host_memory=memory.total,
        disk=shutil.disk_usage(folder).free,
        matrix=matrix,
        matrix_fp32=matrix_fp32,
        device_stream=_stream(device) if gpus else stream,
        slow=_slow(device),
        stream=stream,
        pcie=pcie,
        disk_read=read,
        disk_write=write,
        disk_both=both,
        # Ranks on a host send by a copy in and a copy out, for each of two.
        link=_link(pcie) if gpus > 1 else stream / 4,
        network=25 * GB if gpus else HOST_NETWORK,
        overhead=_overhead(device),
        attention=_attention(device, half, matrix),
        attention_fp32=_attention(device, torch.float32, matrix_fp32),
        measured=True,
        half="fp16" if half is torch.float16 else "bf16",
    )
    if gpus:
        return machine
    return replace(machine, block=_block(machine, half), block_fp32=_block(machine, torch.float32))


def _typical(work: Callable[[], object], device: torch.device, seconds: float = 0.3) -> float:
    """The median time of one call, of as many as fit in `seconds`, three at least: a step has no lucky moments only."""
    times: list[float] = []
    work()
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _matrix(device: torch.device, dtype: torch.dtype) -> float:
    """Products as a transformer has them: many rows, a width of 1024 (of 4096 on a GPU); forward and both backwards."""
    rows, width = (8192, 4096) if device.type == "cuda" else (1024, 1024)
    x, grad = torch.randn(2, rows, width, device=device, dtype=dtype)
    weight = torch.randn(width, width, device=device, dtype=dtype)
    forms = (lambda: torch.mm(x, weight.t()), lambda: torch.mm(grad, weight), lambda: torch.mm(grad.t(), x))
    return len(forms) * 2 * rows * width * width / sum(_typical(form, device, 0.1) for form in forms)


def _stream(device: torch.device) -> float:
    """Bytes read and written by a sum of two arrays, larger than caches."""
    numel = 1 << 28 if device.type == "cuda" else 1 << 25
    a, b, out = (torch.ones(numel, device=device) for _ in range(3))
    return 12 * numel / _typical(lambda: torch.add(a, b, out=out), device)


def _slow(device: torch.device) -> float:
    """Elements a second through GELU and through its derivative."""
    x, y = torch.randn(2, 1 << 20, device=device)
    there = _typical(lambda: F.gelu(x), device, 0.1)
    back = _typical(lambda: torch.ops.aten.gelu_backward(y, x), device, 0.1)
    return 2 * x.numel() / (there + back)


def _attention(device: torch.device, dtype: torch.dtype, matrix: float) -> tuple[float, float]:
    """The parts of the rate of matrix products that attention reaches in its forward, and in its backward."""
    heads, length, width = 8, 1024, 64
    shape = (16 if device.type == "cuda" else 1), heads, length, width
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    out = forward()
    back = torch.randn_like(out)
    there = _typical(forward, device, 0.1)
    again = _typical(lambda: torch.autograd.grad(out, (query, key, value), back, retain_graph=True), device, 0.1)
    # As a dry run counts them: scores and sums, and in the backward the scores once more.
    flops = 4.0 * shape[0] * heads * length * length * width
    return flops / there / matrix, 2.5 * flops / again / matrix


class _Block(nn.Module):
    """A transformer's block: what it keeps for its backward is in no cache when that comes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.norm(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def _block(machine: Machine, dtype: torch.dtype) -> float:
    """Forward and backward of a few blocks, against what is forecast of their operations one by one."""
    width, heads, tokens, batch = 512, 8, 256, 2

    with FakeTensorMode(), Recorder() as recorder:
        blocks, x = _blocks(width, heads), torch.zeros(batch, tokens, width, dtype=dtype)
        for parameter in blocks.parameters():
            parameter.data = parameter.data.to(dtype)
        recorder.operations.clear()
        blocks(x).sum().backward()
    forecast = sum(computing(recorder.operations, machine, fp32=dtype is torch.float32))
    model, x = _blocks(width, heads).to(dtype), torch.zeros(batch, tokens, width, dtype=dtype)

    def work() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return _typical(work, torch.device("cpu"), 0.5) / forecast


def _blocks(width: int, heads: int) -> nn.Module:
    return nn.Sequential(*(_Block(width, heads) for _ in range(4)))


def _pcie(device: torch.device) -> float:
    """Bytes a second to or from host memory that is pinned as the engine's is, and not kept as torch keeps its own."""
    with HostPool(pinning=CudaPin()) as pool:
        host = pool.take(PIECE)
        there = torch.empty_like(host, device=device)
        up = _typical(lambda: there.copy_(host, non_blocking=True), device)
        down = _typical(lambda: host.copy_(there, non_blocking=True), device)
        pool.give(host)
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
    there, here = torch.device("cuda", 1), torch.device("cuda", 0)
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


def _disk(folder: Path) -> tuple[float, float, float]:
    """Bytes a second by the disk tier's own store: read, written, and both at once. A quarter of a GB."""
    from wherry.tiers.disk import DiskStore

    size = 64 << 20
    if shutil.disk_usage(folder).free < 16 * size or not os.access(folder, os.W_OK):
        logger.warning(
            "the disk of %s is not measured, as it has no room, or may not be written: it is taken to read 1 GB a "
            "second and to write half of that",
            folder,
        )
        return UNKNOWN_DISK
    count = 4
    with tempfile.TemporaryDirectory(dir=folder) as inside, HostPool() as pool, DiskStore(inside) as store:
        buffers = [pool.take(size) for _ in range(count)]
        records = [store.reserve(f"probe {i}", size) for i in range(count)]

        def transfer(*ways: Callable[..., object]) -> None:
            turns = zip(itertools.cycle(ways), records, buffers, strict=False)
            tickets = [go(record, buffer) for go, record, buffer in turns]
            for ticket in tickets:
                ticket.wait()  # type: ignore[attr-defined]

        cpu = torch.device("cpu")
        write = _typical(lambda: transfer(store.write), cpu, 0.5)
        read = _typical(lambda: transfer(store.read), cpu, 0.5)
        both = _typical(lambda: transfer(store.read, store.write), cpu, 0.5)
        for buffer in buffers:
            pool.give(buffer)
    moved = count * size
    return moved / read, moved / write, moved / both
