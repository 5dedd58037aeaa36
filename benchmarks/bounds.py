"""The rates that a machine reaches, measured, and the shortest time in which a step can be done within them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import systems
from benchmarks.systems import Recipe

# Bytes of host memory that one parameter's update moves: the split master with a bf16 gradient, and fp32 in place.
UPDATE_BYTES = {"bf16": 26, "fp32": 28}
# Bytes of one parameter's state on disk, weights aside: low halves and moments, or moments beside an fp32 weight.
STATE_BYTES = {"bf16": 10, "fp32": 8}
WEIGHT_BYTES = {"bf16": 2, "fp32": 4}
ROUNDS = 7


def work_of(system: str, recipe: Recipe, gpu: bool) -> dict[str, float]:
    """A step's least work, by the rate that it needs: gradients down once, weights up once for each use."""
    place = systems.place_of(system)
    weight, update = (table[recipe.dtype] * recipe.parameters for table in (WEIGHT_BYTES, UPDATE_BYTES))
    off, far = place.optimizer != "none", place.parameters != "none"
    disk = STATE_BYTES[recipe.dtype] * recipe.parameters * (place.optimizer == "nvme")
    on_disk = weight * (place.parameters == "nvme")
    found = {"matrix": recipe.flops, "disk_read": disk + 2 * on_disk, "disk_write": disk + on_disk}
    found["host_update" if off or not gpu else "device_memory"] = update
    if gpu and off:
        found |= {"up": 2 * weight if far else weight, "down": weight}
    return {name: float(amount) for name, amount in found.items() if amount}


def bound(work: Mapping[str, float], rates: Mapping[str, float]) -> tuple[float, str]:
    """Seconds of the longest term, and its name: all of them overlap, but what shares a processor adds up.

    >>> bound({"matrix": 2e12, "host_update": 26e9}, {"matrix": 1e12, "host_update": 52e9})
    (2.5, 'matrix')
    """
    terms = {name: amount / rates[name] for name, amount in work.items() if name in rates}
    together = ("matrix", "device_memory") if "up" in rates else ("matrix", "host_update")
    shared = sum(terms.get(name, 0.0) for name in together)
    return max(shared, *terms.values()), max(terms, key=terms.__getitem__)


# Measuring the rates. Each function returns the repeats.


def measure(device: str, dtype: str, folder: str | None, quick: bool) -> dict[str, list[float]]:
    """Operations a second, and bytes a second by way."""
    scale = 64 if quick else 1
    gpu = device == "cuda"
    found = {"matrix": matrix(device, dtype, (8192 if gpu else 2048) // (8 if quick else 1))}
    found["host_update"] = host_update((1 << 27 if gpu else 1 << 25) // scale)
    if gpu:
        found |= copies((1 << 30) // scale)
        found["device_memory"] = device_memory((1 << 29) // scale)
    if folder is not None:
        found |= disk(folder, (1 << 29) // scale)
    return found


def medians(rates: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in rates.items()}


def _repeats(work: Callable[[], object], gpu: bool = False) -> list[float]:
    """Seconds of single calls; the first, which is not counted, warms up."""
    import torch

    found = []
    for turn in range(ROUNDS + 1):
        if gpu:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        if gpu:
            torch.cuda.synchronize()
        if turn:
            found.append(time.perf_counter() - begun)
    return found


def matrix(device: str, dtype: str, size: int) -> list[float]:
    """Operations a second of square products."""
    import torch

    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    # Values as weights have them: zeros draw less power, and run faster.
    a, b = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=kind)
    many = 8 if device == "cuda" else 1

    def products() -> None:
        for _ in range(many):
            torch.mm(a, b, out=out)

    return [many * 2 * size**3 / seconds for seconds in _repeats(products, device == "cuda")]


def host_update(numel: int) -> list[float]:
    """Bytes a second of STREAM's triad in host memory, on all of torch's threads."""
    import torch

    a, b, c = (torch.ones(numel) for _ in range(3))
    return [12 * numel / value for value in _repeats(lambda: torch.add(a, b, alpha=3.0, out=c))]


def copies(size: int) -> dict[str, list[float]]:
    """Bytes a second between pinned host memory and the GPU, up and down."""
    import torch

    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    return {
        "up": [size / value for value in _repeats(lambda: there.copy_(host, non_blocking=True), gpu=True)],
        "down": [size / value for value in _repeats(lambda: host.copy_(there, non_blocking=True), gpu=True)],
    }


def device_memory(numel: int) -> list[float]:
    """Bytes a second of an in-place pass over the GPU's own memory."""
    import torch

    x = torch.ones(numel, device="cuda")
    return [8 * numel / seconds for seconds in _repeats(lambda: x.mul_(1.0), gpu=True)]


def disk(folder: str, size: int) -> dict[str, list[float]]:
    """Bytes a second that the disk tier reads and writes in large pieces."""
    from wherry.tiers.buffers import HostPool
    from wherry.tiers.disk import DiskStore

    piece = min(size, 64 << 20)
    with HostPool() as pool, DiskStore(folder, name="bound", block_size=1 << 20, queue_depth=32) as store:
        store.attach(pool)
        record = store.reserve("bound", size)
        buffer = pool.take(piece)
        buffer.random_(0, 256)

        def transfer(go: Callable[..., Any]) -> None:
            tickets = [go(record, buffer, offset, piece) for offset in range(0, size, piece)]
            for ticket in tickets:
                ticket.wait()

        found = {
            "disk_write": [size / value for value in _repeats(lambda: transfer(store.write))],
            "disk_read": [size / value for value in _repeats(lambda: transfer(store.read))],
        }
        pool.give(buffer)
    return found
