"""Weights that several data-parallel ranks hold are the same on all of them: compared by sums of their bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from wherry.errors import DivergenceError
from wherry.parallel.topology import Topology, world_of
from wherry.sharding.unit import Flat, Unit

# Words of 8 bytes that are summed at once: what a sum takes beside the weights.
CHUNK = 1 << 17
# Odd, so that no change of a single word is lost in a product.
_PRIME = 0x9E3779B1


def compare_replicas(units: Sequence[Unit], topology: Topology, call: str) -> None:
    """Raise on every rank where one holds other weights than another that should have the same.

    No update may be under way. Buffers are left out: statistics of their own data may differ.
    """
    if topology.data.size == 1:
        return
    sums = [found for unit in units for flat in unit.flats for found in _sums(flat, topology)]
    world = world_of(topology)
    parts = topology.pipe.rank, topology.tensor.rank
    # Of each that holds some of a flat: who, and the sum. Ranks with other parts of the model hold nothing in common.
    held: dict[tuple[tuple[int, int], str, str], list[tuple[int, int]]] = defaultdict(list)
    for place, rank, theirs in world.gather_objects((parts, topology.global_rank, sums)):
        for name, what, total in theirs:
            held[place, name, what].append((rank, total))
    apart = {key: found for key, found in held.items() if len({total for _, total in found}) > 1}
    if not apart:
        return
    (_, name, what), found = next(iter(apart.items()))
    first, total = found[0]
    others = [str(rank) for rank, theirs in found if theirs != total]
    more = f" (and of {len(apart) - 1} other parts)" if len(apart) > 1 else ""
    raise DivergenceError(
        f"{call}: the ranks hold different weights: {what} of {name}{more} on rank{'s' * (len(others) > 1)} "
        f"{', '.join(others)} is not what it is on rank {first}. They have been updated differently, edited on one "
        "rank alone, or damaged in memory. Go back to a checkpoint with load_checkpoint(); or make them rank 0's, by "
        "entering wherry.gathered(engine.module, modifier_rank=0) on every rank"
    )


@torch.no_grad()
def _sums(flat: Flat, topology: Topology) -> Iterator[tuple[str, str, int]]:
    """What of a flat others hold as well: its name, what it is of it, and the sum."""
    spans = [(slot.start, slot.stop) for slot in flat.layout.slots]
    if flat.resident:
        yield flat.name, "the whole", checksum(flat.whole, spans)
        return
    if flat.layout.ranks < topology.data.size:
        with flat.opened() as shard:
            mine = [(span.start, span.stop) for span in flat.layout.segments(flat.rank)]
            yield flat.name, f"part {flat.rank} of {flat.layout.ranks}", checksum(shard, mine)
    if flat.secondary is not None and flat.secondary_fresh and topology.node.size < topology.data.size:
        size, rank = flat.secondary.numel(), topology.node.rank
        low, high = rank * size, (rank + 1) * size
        mine = [(max(a, low) - low, min(b, high) - low) for a, b in spans if a < high and b > low]
        yield flat.name, f"a node's part {rank} of {topology.node.size}", checksum(flat.secondary, mine)


def checksum(flat: torch.Tensor, spans: Sequence[tuple[int, int]]) -> int:
    """A number of all bits in these spans and their places; it is made where the tensor is, a piece at a time.

    Spans begin where words of 8 bytes do; what is behind the last whole word is summed by bytes.
    """
    flat = flat.detach()
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    odd = torch.arange(1, 2 * CHUNK, 2, device=flat.device)
    for start, stop in spans:
        octets = flat[start:stop].view(torch.uint8)
        whole = octets.numel() // 8 * 8
        words = octets[:whole].view(torch.int64)
        for piece in (*words.split(CHUNK), octets[whole:]):
            total = total * _PRIME + (piece * odd[: piece.numel()]).sum()
    return int(total)
