"""The profiles of presets that come with Wherry.

    python -m tests.plan.shipped --update

makes them anew. Do it when what a profile tells, a preset or torch has changed, and that was meant.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from wherry import config as configs
from wherry.forecast import Forecaster
from wherry.plan.kept import SHIPPED, KeptProfiles, ship
from wherry.plan.machine import known
from wherry.plan.profile import Profile
from wherry.sources import SHAPES, find

PRECISIONS: tuple[dict[str, Any], ...] = ({}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}})
RECOMPUTED: tuple[dict[str, Any], ...] = ({}, {"activation_checkpointing": {"policy": "recompute"}})
# Tokens of the largest micro-batch. More than that is profiled when it is asked for.
TOKENS = 1 << 17


class _Collected(KeptProfiles):
    """Profiles that are made, by name: none of them is read."""

    def __init__(self, model: str | None) -> None:
        super().__init__(model)
        self.profiles: dict[str, Profile] = {}

    def read(self, *key: object) -> Profile | None:
        return None

    def write(self, profile: Profile, *key: object) -> None:
        self.profiles[self.name(*key)] = profile


class _Names(_Collected):
    """The names alone, without a profile being made."""

    def read(self, *key: object) -> Profile | None:
        found = Profile.of_sizes((), 1)
        self.write(found, *key)
        return found


def settings(preset: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Configs and micro-batches: what a first plan of a preset asks for, and those that people try."""
    for precision in PRECISIONS:
        for recomputed in RECOMPUTED:
            micro = 1
            while micro * SHAPES[preset].sequence <= TOKENS:
                yield {**precision, **recomputed}, micro
                micro *= 2


def profiles(preset: str, wanted: Iterator[tuple[dict[str, Any], int]], *, named: bool = False) -> dict[str, Profile]:
    """By name, made now; or, if `named`, nothing but the names."""
    source = find(preset)
    forecaster = Forecaster(source, known("h100"), 1)
    forecaster._kept = collected = (_Names if named else _Collected)(source.key)
    for config, micro in wanted:
        forecaster.profile(configs.load(config), micro)
    return collected.profiles


def main() -> None:
    parser = argparse.ArgumentParser(description="The presets' profiles that come with Wherry.")
    parser.add_argument("--update", action="store_true", required=True, help=f"make them, and write {SHIPPED.name}")
    parser.parse_args()
    made: dict[str, dict[str, Profile]] = {}
    for preset, shape in SHAPES.items():
        made[repr(shape)] = found = profiles(preset, settings(preset))
        print(f"{preset}: {len(found)} profiles", flush=True)
    ship(made)
    print(f"{SHIPPED.name}: {SHIPPED.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
