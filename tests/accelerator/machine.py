"""The emulated device as a machine for lives."""

from __future__ import annotations

from tests.accelerator import emulated
from tests.life import Device


class Emulated(Device):
    def calm(self) -> None:
        emulated.lateness(0.0)

    def late(self, seed: int) -> None:
        emulated.seed(seed)
        emulated.lateness(0.9)


MACHINE = Emulated()
