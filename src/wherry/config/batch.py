"""The three batch sizes: any two of them, and the number of ranks, give the third."""

from __future__ import annotations

from typing import NamedTuple

from wherry.config.problems import Problem
from wherry.config.text import Lines

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


class BatchSizes(NamedTuple):
    """train == micro * accumulation * data-parallel ranks."""

    train: int
    micro: int
    accumulation: int


Resolved = tuple[BatchSizes | None, str | None, Problem | None]


def resolve_batch(
    train: int | None, micro: int | None, accumulation: int | None, world: int, lines: Lines, counted: str = ""
) -> Resolved:
    """The sizes, a note on what was chosen without being asked, or the problem. `counted`: who says how many ranks."""
    if world < 1:
        raise ValueError(f"dp_world_size: expected 1 or more, got {world}")
    if train is None:
        note = None if micro is not None else f"{MICRO}: not given, so the micro-batch is 1"
        micro, accumulation = micro or 1, accumulation or 1
        return BatchSizes(micro * accumulation * world, micro, accumulation), note, None
    chosen_micro, chosen_accumulation = _fill(train, micro, accumulation, world)
    if chosen_micro * chosen_accumulation * world == train:
        return BatchSizes(train, chosen_micro, chosen_accumulation), None, None
    return None, None, Problem(TRAIN, lines.of((TRAIN,)), _contradiction(train, micro, accumulation, world, counted))


def _fill(train: int, micro: int | None, accumulation: int | None, world: int) -> tuple[int, int]:
    if micro is not None:
        return micro, accumulation if accumulation is not None else max(1, train // (micro * world))
    accumulation = accumulation or 1
    return max(1, train // (accumulation * world)), accumulation


def _contradiction(train: int, micro: int | None, accumulation: int | None, world: int, counted: str) -> str:
    ranks = f"{world} data-parallel rank{'s' if world != 1 else ''}{', ' * bool(counted)}{counted}"
    numbers = f"{TRAIN} {train}, {MICRO} {_or_unset(micro)}, {ACCUMULATION} {_or_unset(accumulation)} on {ranks}"
    rule = "must be micro-batch x accumulation x ranks"
    if micro is not None and accumulation is not None:
        product = micro * accumulation * world
        equation = f"{micro} x {accumulation} x {world} = {product}"
        change = f"set {TRAIN} to {product}, or leave one of the three out"
        return f"{train} {rule}, but {equation} ({numbers}); {change}"
    factor = (micro or accumulation or 1) * world
    near = [size for size in (train // factor * factor, (train // factor + 1) * factor) if size]
    change = f"set {TRAIN} to {' or '.join(map(str, near))}, or change the other size or the number of ranks"
    return f"{train} {rule}, but it is not divisible by {factor} ({numbers}); {change}"


def _or_unset(size: int | None) -> str:
    return "unset" if size is None else str(size)
