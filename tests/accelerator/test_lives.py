"""Lives on a device whose copies and kernels are late have the bits of calm ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.accelerator.machine import MACHINE
from tests.covering import Case, name_of
from tests.life import cases, check


@pytest.mark.parametrize("case", cases(device=("apart",)), ids=name_of)
def test_a_life_has_the_bits_of_a_calm_one(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path, MACHINE)
