"""First facts of a machine, in probes that stand alone: memory, native kernels, pinning, rates, disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks import bounds
from benchmarks.systems import device_type, disk_folder
from wherry.observe.memory import host_memory

# Bytes touched at once, bytes that the largest model needs on the host, and bytes that are pinned.
BLOCK, NEEDED, PINNED = 1 << 30, 110 << 30, 4 << 30
# Seconds of touching memory, and blocks after which memory that has not grown is taken not to.
TOUCH_S, STILL = 25.0, 2

Measure = dict[str, Any]


def measure(name: str, unit: str, values: list[float], **facts: Any) -> Measure:
    return {"name": name, "unit": unit, "values": values, **facts}


def memory(toy: bool) -> list[Measure]:
    """Touch host memory until the largest model fits, as that of some virtual machines grows only when it is used."""
    import torch

    block = 1 << 24 if toy else BLOCK
    needed = 2 * block if toy else NEEDED
    blocks: list[torch.Tensor] = []
    begun, series = time.monotonic(), [vars(host_memory())]
    while len(blocks) * block + series[-1]["available"] < needed and time.monotonic() - begun < TOUCH_S:
        still = len(series) > STILL and series[-1]["total"] == series[-1 - STILL]["total"]
        if still and series[-1]["available"] < STILL * block:
            break
        blocks.append(torch.ones(block, dtype=torch.uint8))
        series.append(vars(host_memory()))
    usable = max(index * block + memory["available"] for index, memory in enumerate(series))
    facts = {"touched": len(blocks) * block, "seconds": time.monotonic() - begun, "series": series}
    return [measure("host memory", "B", [float(usable)], **facts)]


def kernels(toy: bool) -> list[Measure]:
    """Load the native library, and count the threads that update on the host."""
    from wherry import native

    if reason := native.why_not():
        raise RuntimeError(reason)
    pool = native.default_pool()
    return [measure("update threads", "threads", [float(pool.threads)], isa=native.isa(), cores=len(pool.cores))]


def pin(toy: bool) -> list[Measure]:
    """Pin host memory as the engine does."""
    import torch

    from wherry.tiers.streams import link_to

    size = 1 << 24 if toy else PINNED
    link = link_to(torch.device(device_type()))
    begun = time.perf_counter()
    buffer = link.host.take(size)
    seconds = time.perf_counter() - begun
    pinned = buffer.is_pinned()
    link.host.give(buffer)
    link.close()
    return [measure("pinning", "B/s", [size / seconds], pinned=pinned)]


def rates(toy: bool) -> list[Measure]:
    """Measure products, memory and copies, in bytes or operations a second."""
    measured = bounds.measure(device_type(), "bf16", None, quick=toy)
    return [measure(name, "flop/s" if name == "matrix" else "B/s", values) for name, values in measured.items()]


def share(toy: bool) -> list[Measure]:
    """Measure the share of the updates that `"update_on": "auto"` gives to the device."""
    import torch

    from wherry.tiers.streams import link_to
    from wherry.update.streamed import measured_share

    link = link_to(torch.device(device_type()))
    shares = [measured_share(link) for _ in range(3)]
    link.close()
    return [measure("share of updates on the device", "of all", shares)]


def disk(toy: bool) -> list[Measure]:
    """Measure the disk through the disk tier."""
    measured = bounds.disk(disk_folder(), (1 << 28) // (64 if toy else 1))
    return [measure(name, "B/s", values) for name, values in measured.items()]


PROBES: dict[str, Callable[[bool], list[Measure]]] = {
    "memory": memory,
    "kernels": kernels,
    "pin": pin,
    "rates": rates,
    "share": share,
    "disk": disk,
}
