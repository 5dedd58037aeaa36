"""Parameters without a gradient, as plain PyTorch leaves them; `python -m tests.engine.absent` tries many more."""

from __future__ import annotations

import pytest
from tests.engine.absent import check


@pytest.mark.parametrize("number", [*range(40), 5004])
def test_experts_and_branches_at_random(number: int) -> None:
    check(number)
