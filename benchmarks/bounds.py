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
# Bytes of one parameter that cross the bus for an update in bf16 that is streamed through the device.
STREAMED_UP, STREAMED_DOWN = 12, 10
ROUNDS = 7


def work_of(system: str, recipe: Recipe, gpu: bool) -> dict[str, float]:
    """Bytes that a step moves at the least: gradients down once, weights up once for each use."""
    place = systems.place_of(system)
    weight, update = (table[recipe.dtype] * recipe.parameters for table in (WEIGHT_BYTES, UPDATE_BYTES))
    disk = STATE_BYTES[recipe.dtype] * recipe.parameters * (place.optimizer == "nvme")
    on_disk = weight * (place.parameters == "nvme")
    if recipe.update_on == "device":
        # Low halves, moments and gradients go up, and all but the gradients come down again.
        return {"streamed": float((STREAMED_UP + STREAMED_DOWN) * recipe.parameters), "down": float(weight)}
    found = {"update": update, "disk_read": disk + 2 * on_disk, "disk_write": disk + on_disk}
    if gpu and place.optimizer != "none":
        # Behind the update weights go up for the forward; those that rest on the host go up for the backward again.
        found |= {"down": weight, "up": weight, "up_again": weight * (place.parameters != "none")}
    return {name: float(amount) for name, amount in found.items() if amount}


def bound(
    work: Mapping[str, float], rates: Mapping[str, float], forward: float, backward: float, *, waits: bool
) -> tuple[float, str]:
    """Seconds of the shortest step, and what it is that takes them, of a model whose forward and backward take as long.

    Updates and copies run beside computing, and the bus goes both ways at once. What bus and disk move is read from
    host memory or written there, beside the update's own bytes. An update that `waits` for all gradients, as it must
    under exact clipping, begins when the backward has ended: by then gradients are down, and the next forward alone can
    hide it, with the weights that go up for that. One where the model computes needs no bus, and hides behind nothing.

    >>> work = {"update": 26e9, "down": 2e9, "up": 2e9}
    >>> rates = {"host_memory": 10e9, "down": 5e9, "up": 4e9}
    >>> bound(work, rates, forward=1.0, backward=2.0, waits=True)
    (4.8, 'update')
    >>> bound(work, rates, forward=1.0, backward=2.5, waits=False)
    (3.5, 'compute')
    >>> bound({"streamed": 20e9, "down": 2e9}, {"both ways": 10e9, "down": 5e9}, 1.0, 2.5, waits=True)
    (4.5, 'streamed')
    """
    terms = {name: work[name] / rates[name] for name in ("disk_read", "disk_write") if name in work}
    compute = forward + backward
    if "streamed" in work:
        terms = {"streamed": work["streamed"] / rates["both ways"], "down": work["down"] / rates["down"]}
        terms |= {"streamed": terms["streamed"] + backward * waits, "compute": compute}
        longest = max(terms, key=terms.__getitem__)
        return terms[longest], longest
    update, up = work["update"], work.get("up", 0.0)
    if not up:
        compute += update / rates["device_memory" if "device_memory" in rates else "host_memory"]
    else:
        terms["update"] = sum(work.values()) / rates["host_memory"]
        if waits:
            terms["update"] = max(terms["update"], backward + (update + up) / rates["host_memory"])
        terms |= {"down": work["down"] / rates["down"], "up": (up + work.get("up_again", 0.0)) / rates["up"]}
    terms["compute"] = compute
    longest = max(terms, key=terms.__getitem__)
    return terms[longest], longest


def computing(recipe: Recipe, matrix: float) -> tuple[float, float]:
    """Estimate the seconds of a forward and a backward that were not measured, at a rate of products.

    A backward takes two forwards' work, and that of the blocks again where activations are recomputed.
    """
    forward = recipe.batch * recipe.length * recipe.flops_per_token / 3 / matrix
    return forward, recipe.flops / matrix - forward


# Measuring the rates. Each function returns the repeats.


def measure(device: str, dtype: str, folder: str | None, quick: bool) -> dict[str, list[float]]:
    """Operations a second, and bytes a second by way."""
    scale = 64 if quick else 1
    gpu = device != "cpu"
    rates = {"matrix": matrix(device, dtype, (8192 if gpu else 2048) // (64 if quick else 1))}
    rates["host_memory"] = memory("cpu", (1 << 27 if gpu else 1 << 25) // scale)
    if gpu:
        rates |= copies(device, (1 << 30) // scale)
        rates["device_memory"] = memory(device, (1 << 27) // scale)
    if folder is not None:
        rates |= disk(folder, (1 << 29) // scale)
    return rates


def medians(rates: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in rates.items()}


def _repeats(work: Callable[[], object], gpu: bool = False) -> list[float]:
    """Seconds of single calls; the first, which is not counted, warms up."""
    import torch

    found = []
    for turn in range(ROUNDS + 1):
        if gpu:
            torch.accelerator.synchronize()
        begun = time.perf_counter()
        work()
        if gpu:
            torch.accelerator.synchronize()
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
    many = 1 if device == "cpu" else 8

    def products() -> None:
        for _ in range(many):
            torch.mm(a, b, out=out)

    return [many * 2 * size**3 / seconds for seconds in _repeats(products, device != "cpu")]


def memory(device: str, numel: int) -> list[float]:
    """Bytes a second of a sum into one of its operands, as an update writes where it reads: no other byte is moved."""
    import torch

    a, b = (torch.ones(numel, device=device) for _ in range(2))
    return [12 * numel / value for value in _repeats(lambda: a.add_(b, alpha=0.5), device != "cpu")]


def copies(device: str, size: int) -> dict[str, list[float]]:
    """Measure bytes a second between the engine's host memory and the GPU: up, down, and both ways at once."""
    import torch

    from wherry.tiers.streams import link_to

    link = link_to(torch.device(device))
    hosts = [link.host.take(size) for _ in range(2)]
    there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]

    def go(up: bool, down: bool) -> None:
        tickets = []
        if up:
            tickets.append(link.up(there[0], hosts[0]))
        if down:
            tickets.append(link.down(hosts[1], there[1]))
        for ticket in tickets:
            ticket.finish()

    rates = {}
    for name, ways in (("up", (True, False)), ("down", (False, True)), ("both ways", (True, True))):
        rates[name] = [sum(ways) * size / value for value in _repeats(lambda ways=ways: go(*ways), gpu=True)]
    for host in hosts:
        link.host.give(host)
    link.close()
    return rates


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
