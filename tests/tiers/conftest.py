from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def every_flat_alone(small_sizes: Any) -> None:
    """Small flats are updated together; with this each by itself, as large ones are."""
    small_sizes(bucket=1)
