"""What every rank must have been given alike: compared by a digest, and where that differs told by the first of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from wherry.errors import DivergenceError
from wherry.parallel.topology import Topology, world_of

# Things by their names, each with its value as people read it.
Described = Iterable[tuple[str, str]]

MISSING = "missing"


def plain(value: object) -> str | None:
    """A value in words that are the same wherever it is the same; None where it has none, as an address is another."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, dict):
        return plain([item for pair in value.items() for item in pair])
    if hasattr(value, "tolist"):  # a learning rate in a tensor
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        items = [plain(item) for item in value]
        return None if None in items else f"[{', '.join(map(str, items))}]"
    return None


def agree(
    topology: Topology,
    call: str = "initialize",
    *,
    everywhere: Described = (),
    stage: Described = (),
    part: Described = (),
) -> None:
    """Raise on every rank, in the same words, where ranks of a job differ.

    `everywhere` is alike on all ranks, `stage` on those of one stage of a pipeline, and `part` on those that hold the
    same parts of a model, along the data axis.
    """
    world = world_of(topology)
    if world.size == 1:
        return
    pipe, tensor, me = topology.pipe.rank, topology.tensor.rank, topology.global_rank
    mine = {(): [*everywhere], (pipe,): [*stage], (pipe, tensor): [*part]}
    digests = {scope: hashlib.sha256(repr(items).encode()).hexdigest() for scope, items in mine.items()}
    told: list[dict[tuple[int, ...], str]] = world.gather_objects(digests)
    for scope in sorted({scope for each in told for scope in each}, key=lambda scope: (len(scope), scope)):
        if len({each[scope] for each in told if scope in each}) > 1:
            found = world.gather_objects((me, mine.get(scope)))
            (first, here), *others = [(rank, items) for rank, items in found if items is not None]
            other, there = next((rank, items) for rank, items in others if items != here)
            raise DivergenceError(
                f"{call}: the ranks differ: {_difference(here, first, there, other)}; give every rank the same "
                "config, model (whatever its weights: rank 0's are used), optimizer and schedule, and the same versions"
            )


def _difference(here: Described, first: int, there: Described, other: int) -> str:
    mine, theirs = dict(here), dict(there)
    for name in dict.fromkeys([*mine, *theirs]):
        one, another = mine.get(name, MISSING), theirs.get(name, MISSING)
        if one != another:
            return f"{name} is {_short(one)} on rank {first} and {_short(another)} on rank {other}"
    name, instead = next((a, b) for a, b in zip(mine, theirs, strict=True) if a != b)
    return f"{name} comes before {instead} on rank {first} and after it on rank {other}"


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."
