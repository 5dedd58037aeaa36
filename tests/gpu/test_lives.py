"""Lives on a GPU whose copies begin late have the bits of calm ones."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.covering import Case, name_of
from tests.gpu.warm import DEVICE
from tests.life import Device, cases, check

from wherry.parallel.comm import Comm
from wherry.parallel.topology import Topology, default_device
from wherry.tickets import Ticket
from wherry.tiers.streams import DeviceLink

pytestmark = pytest.mark.gpu
# tests/accelerator/test_lives.py has those of the emulated device.
CASES = cases(device=("apart",)) if DEVICE is not None and DEVICE.type != "emulated" else ()
# Cycles that a late copy waits at most: about a millisecond, longer than a tiny model's whole forward.
LATE = 2_000_000


class LateLink(DeviceLink):
    """Copies begin late, by a random time, so that a stream which did not wait for one reads what was there before."""

    def __init__(self, seed: int, pin: bool) -> None:
        super().__init__(default_device(), pin=pin)
        self._random = random.Random(seed)

    def _copy(self, stream: torch.Stream, *arguments: Any, **options: Any) -> Ticket:
        with stream:
            torch.get_device_module(self.device)._sleep(self._random.randrange(LATE))
        return super()._copy(stream, *arguments, **options)


class Accelerator(Device):
    tolerance = 2e-4

    def rounds_alone(self, case: Case) -> bool:
        return True

    def mesh(self, comm: Comm, case: Case, seed: int | None) -> Any:
        if seed is None:
            return comm
        place = Topology(comm, default_device(), comm.rank, comm.rank, comm.size)
        return replace(place, link=lambda pin: LateLink(1000 * seed + comm.rank, pin))


MACHINE = Accelerator()


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_life_has_the_bits_of_a_calm_one(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path, MACHINE)
