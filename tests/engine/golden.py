"""Losses that were stored once. They tell of what an oracle hides by changing alike: the model, the data, torch.

    python -m tests.engine.golden --update

writes what this tree does to golden.json. Do it when the numbers are meant to change, and say in the commit why.
Those in fp32 are of plain PyTorch, those of the half precisions of the engine at stage 0.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.engine.harness import make_model, train_engine, train_plain

STORED = Path(__file__).with_name("golden.json")
# How far another processor, or another torch, may be off: its sums have another order, and half precision rounds more.
TOLERANCE = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 2e-2}
RANKS, ACCUMULATIONS, CLIPS = (1, 2, 4), (1, 3), (0.0, 0.5)
HALF = ("fp16", "bf16")
# Steps and ranks of the runs in half precision.
HALF_STEPS, HALF_RANKS = 8, 2


def case(precision: str, ranks: int, accumulation: int, clip: float) -> str:
    return f"{precision}, ranks {ranks}, accumulation {accumulation}, clipping {clip:g}"


@cache
def stored() -> dict[str, list[float]]:
    return json.loads(STORED.read_text())["losses"]


def assert_golden(losses: Sequence[float], precision: str, ranks: int, accumulation: int, clip: float) -> None:
    name = case(precision, ranks, accumulation, clip)
    hint = f"{name}: if that is meant, python -m tests.engine.golden --update"
    assert list(losses) == pytest.approx(stored()[name], rel=TOLERANCE[precision]), hint


def losses_now() -> dict[str, list[float]]:
    found = {}
    for ranks in RANKS:
        for accumulation in ACCUMULATIONS:
            for clip in CLIPS:
                run = train_plain(make_model(), ranks=ranks, accumulation=accumulation, clip=clip)
                found[case("fp32", ranks, accumulation, clip)] = run.losses
    for precision in HALF:
        for clip in CLIPS:
            config = {precision: {"enabled": True}}
            run = train_engine(make_model(), stage=0, ranks=HALF_RANKS, steps=HALF_STEPS, clip=clip, config=config)
            found[case(precision, HALF_RANKS, 1, clip)] = run.losses
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.golden", description=__doc__)
    parser.add_argument("--update", action="store_true", help="write golden.json anew")
    found = {name: [float(f"{loss:.7g}") for loss in losses] for name, losses in losses_now().items()}
    if parser.parse_args().update:
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(losses)}" for name, losses in found.items())
        STORED.write_text(f'{{"torch": {json.dumps(torch.__version__)}, "losses": {{\n{rows}\n}}}}\n')
    for name, losses in found.items():
        known = stored()[name]
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, known, strict=True))
        print(f"{name}: off by {worst:.1e} at most")


if __name__ == "__main__":
    main()
