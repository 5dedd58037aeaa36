from __future__ import annotations

import pytest

from wherry.update import optimizer_states


@pytest.fixture
def every_flat_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small flats are updated together; with this each by itself, as large ones are."""
    monkeypatch.setattr(optimizer_states, "BUCKET_NUMEL", 1)
