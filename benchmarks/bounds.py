"""The limits that a machine sets, measured, and the shortest time in which a step can be done within them."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import systems
from wherry.observe import bench

# Bytes of host memory that one parameter's update moves: the split master with a bf16 gradient, and fp32 in place.
UPDATE_BYTES = {"bf16": 26, "fp32": 28}
# Bytes of one parameter's state on disk, weights aside: low halves and moments, or moments beside an fp32 weight.
STATE_BYTES = {"bf16": 10, "fp32": 8}
WEIGHT_BYTES = {"bf16": 2, "fp32": 4}
# Bytes of a parameter: working weight, gradient, and what the optimizer keeps beside the working weight.
STATES = {"fp32": (4, 4, 8), "bf16": (2, 2, 12)}
# The native library's name for STREAM's triad among the streams that it can move without arithmetic.
_TRIAD = 2
# Measured for themselves: no step is bound by them.
_ASIDE = ("both", "host_stream")


@dataclass(frozen=True)
class Rates:
    """What the machine reaches: operations a second, and bytes a second by way. None: there is no such way."""

    matrix: float
    host_update: float
    device_memory: float | None = None
    up: float | None = None
    down: float | None = None
    disk_read: float | None = None
    disk_write: float | None = None


@dataclass(frozen=True)
class Work:
    """What a step must do at least."""

    flops: float
    host_update: float = 0.0
    device_memory: float = 0.0
    up: float = 0.0
    down: float = 0.0
    disk_read: float = 0.0
    disk_write: float = 0.0

    def seconds(self, rates: Rates) -> dict[str, float]:
        """Each term by itself, where there is any of it."""
        found = {"compute": self.flops / rates.matrix}
        for name in ("host_update", "device_memory", "up", "down", "disk_read", "disk_write"):
            amount, rate = getattr(self, name), getattr(rates, name)
            if amount and rate:
                found[name] = amount / rate
        return found


def bound(work: Work, rates: Rates) -> tuple[float, str]:
    """Seconds of the longest term, and its name: all of them overlap, but what shares a processor adds up.

    >>> bound(Work(flops=2e12, host_update=26e9), Rates(matrix=1e12, host_update=52e9))
    (2.5, 'compute')
    """
    terms = work.seconds(rates)
    longest = max(terms, key=terms.__getitem__)
    together = ("compute", "device_memory") if rates.up else ("compute", "host_update")
    shared = sum(terms.get(name, 0.0) for name in together)
    return max(shared, *terms.values()), longest


def work_of(
    parameters: int,
    flops: float,
    dtype: str,
    *,
    offload_optimizer: str = "none",
    offload_param: str = "none",
    gpu: bool = False,
) -> Work:
    """A step's least work under a placement: gradients down once, weights up once for each use."""
    weight, update = WEIGHT_BYTES[dtype] * parameters, UPDATE_BYTES[dtype] * parameters
    off, far = offload_optimizer != "none", offload_param != "none"
    disk = STATE_BYTES[dtype] * parameters if offload_optimizer == "nvme" else 0.0
    written = disk + (weight if offload_param == "nvme" else 0.0)
    # Forward and backward read weights that rest on disk; the update has those of the backward still.
    read = disk + (2 * weight if offload_param == "nvme" else 0.0)
    return Work(
        flops,
        host_update=update if off or not gpu else 0.0,
        device_memory=0.0 if off or not gpu else update,
        up=gpu * (2 * weight if far else weight if off else 0.0),
        down=gpu * (weight if off else 0.0),
        disk_read=read,
        disk_write=written,
    )


def states_bytes(system: str, parameters: int, ranks: int, dtype: str) -> float:
    """Bytes in memory of all ranks' states together, by the published formulas. What rests on disk is not in memory."""
    place = systems.place_of(system)
    copies = [ranks if place.stage < level else 1 for level in (3, 2, 1)]
    weight, gradient, optimizer = _kept(system, dtype)
    kept = [weight * (place.parameters != "nvme"), gradient, optimizer * (place.optimizer != "nvme")]
    return float(parameters * sum(count * nbytes for count, nbytes in zip(copies, kept, strict=True)))


def states_by_tier(system: str, parameters: int, dtype: str) -> dict[str, float]:
    """Bytes of one rank's states where they rest, by the published formulas: device, host and disk."""
    weight, gradient, optimizer = _kept(system, dtype)
    place = systems.place_of(system)
    tiers = {"none": "device", "cpu": "host", "nvme": "disk"}
    found = dict.fromkeys(tiers.values(), 0.0)
    found[tiers[place.parameters]] += float(weight * parameters)
    # Gradients rest where they are used.
    found["device" if place.optimizer == "none" else "host"] += float(gradient * parameters)
    found[tiers[place.optimizer]] += float(optimizer * parameters)
    return found


def _kept(system: str, dtype: str) -> tuple[int, int, int]:
    """Bytes of a parameter: working weight, gradient, and what the optimizer keeps beside them."""
    if system == systems.COMPUTE:
        return *STATES[dtype][:2], 0
    if system in ("plain", "ddp") or system.startswith("fsdp2"):
        return STATES["fp32"]  # in bf16 they compute by autocast, and keep fp32
    return STATES[dtype]


def free_host_memory() -> int:
    from wherry.tiers import budget

    return budget.free_host_memory()


# Measuring the rates. Each function returns the repeats.


def repeats(work: Callable[[], object], rounds: int, synchronize: Callable[[], object] = lambda: None) -> list[float]:
    """Seconds of single calls; the first, which is not counted, warms up."""
    found = []
    for turn in range(rounds + 1):
        synchronize()
        begun = time.perf_counter()
        work()
        synchronize()
        if turn:
            found.append(time.perf_counter() - begun)
    return found


def matrix(device: str, dtype: str, size: int, rounds: int) -> list[float]:
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

    return [many * 2 * size**3 / seconds for seconds in repeats(products, rounds, synchronizer(device))]


def host_update(dtype: str, numel: int, rounds: int) -> list[float]:
    """Bytes a second of the native update's streams without its arithmetic, on all the library's threads."""
    import torch

    from wherry import native

    kind = {"bf16": 4, "fp32": 3}[dtype]
    shapes = {"bf16": (4, 4, 2, 2, 2), "fp32": (4, 4, 4, 4)}[dtype]
    tensors = [torch.ones(width * numel, dtype=torch.uint8) for width in shapes]
    library, pool = native.library(), native.default_pool()
    if library is None:
        whole = torch.ones(2 * numel)
        seconds = repeats(lambda: whole.mul_(1.0), rounds)
        return [8 * whole.numel() / value for value in seconds]
    from wherry.native.loading import engine

    chosen = engine(None)
    streams = (ctypes.c_void_p * 8)(*[tensor.data_ptr() for tensor in tensors])
    handle = pool.handle(library)
    seconds = repeats(lambda: library.wherry_limit(chosen.code, handle, kind, streams, numel), rounds)
    return [UPDATE_BYTES[dtype] * numel / value for value in seconds]


def host_stream(numel: int, rounds: int) -> list[float]:
    """Bytes a second of STREAM's triad in host memory, on all the library's threads."""
    import torch

    from wherry import native

    a, b, c = (torch.ones(numel) for _ in range(3))
    library, pool = native.library(), native.default_pool()
    if library is None:
        return [12 * numel / value for value in repeats(lambda: torch.add(a, b, alpha=3.0, out=c), rounds)]
    from wherry.native.loading import engine

    chosen, handle = engine(None), pool.handle(library)
    streams = (ctypes.c_void_p * 8)(a.data_ptr(), b.data_ptr(), c.data_ptr())
    seconds = repeats(lambda: library.wherry_limit(chosen.code, handle, _TRIAD, streams, numel), rounds)
    return [12 * numel / value for value in seconds]


def copies(size: int, rounds: int) -> dict[str, list[float]]:
    """Bytes a second between pinned host memory and the GPU: up, down, and both at once in all."""
    import torch

    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def move(up: bool, down: bool) -> Callable[[], None]:
        def run() -> None:
            for stream, wanted, target, source in (
                (streams[0], up, there[0], host[0]),
                (streams[1], down, host[1], there[1]),
            ):
                if wanted:
                    with torch.cuda.stream(stream):
                        target.copy_(source, non_blocking=True)

        return run

    wanted = {"up": (True, False), "down": (False, True), "both": (True, True)}
    return {
        name: [sum(ways) * size / seconds for seconds in repeats(move(*ways), rounds, torch.cuda.synchronize)]
        for name, ways in wanted.items()
    }


def device_memory(numel: int, rounds: int) -> list[float]:
    """Bytes a second of an in-place pass over the GPU's own memory."""
    import torch

    x = torch.ones(numel, device="cuda")
    return [8 * numel / seconds for seconds in repeats(lambda: x.mul_(1.0), rounds, torch.cuda.synchronize)]


def disk(folder: str, size: int, rounds: int) -> dict[str, list[float]]:
    """Bytes a second that the disk tier reads and writes in large pieces."""
    from wherry.tiers.buffers import HostPool
    from wherry.tiers.disk import DiskStore

    piece = min(size, 64 << 20)
    with HostPool() as pool, DiskStore(folder, name="bound", block_size=1 << 20, queue_depth=32) as store:
        store.attach(pool)
        record = store.reserve("bound", size)
        buffer = pool.take(piece)
        buffer.random_(0, 256)

        def transfer(go: Callable[..., Any]) -> Callable[[], None]:
            def run() -> None:
                offsets = range(0, size, piece)
                tickets = [go(record, buffer, offset, min(piece, size - offset)) for offset in offsets]
                for ticket in tickets:
                    ticket.wait()

            return run

        found = {
            "disk_write": [size / seconds for seconds in repeats(transfer(store.write), rounds)],
            "disk_read": [size / seconds for seconds in repeats(transfer(store.read), rounds)],
        }
        pool.give(buffer)
    return found


def synchronizer(device: str) -> Callable[[], object]:
    import torch

    return torch.cuda.synchronize if device == "cuda" else lambda: None


def measure(
    device: str, dtype: str, *, toy: bool = False, folder: str | None = None, rounds: int = 7
) -> tuple[Rates, list[bench.Row]]:
    """All rates of this machine, and the rows that say so."""
    scale = 64 if toy else 1
    gpu = device == "cuda"
    found = {"matrix": matrix(device, dtype, (8192 if gpu else 2048) // (8 if toy else 1), rounds)}
    numel = (1 << 27 if gpu else 1 << 25) // scale
    found |= {"host_update": host_update(dtype, numel, rounds), "host_stream": host_stream(numel, rounds)}
    if gpu:
        found |= copies((1 << 30) // scale, rounds) | {"device_memory": device_memory((1 << 29) // scale, rounds)}
    if folder is not None:
        found |= disk(folder, (1 << 29) // scale, rounds)
    rows = [
        bench.row(
            {"rate": name, "dtype": dtype if name in ("matrix", "host_update") else ""},
            "this machine",
            "flop/s" if name == "matrix" else "B/s",
            values,
            more_is_better=True,
        )
        for name, values in found.items()
    ]
    medians = {name: statistics.median(values) for name, values in found.items() if name not in _ASIDE}
    return Rates(**medians), rows
