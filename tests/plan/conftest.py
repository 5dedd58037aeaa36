"""A narrow terminal, and dry runs of the models that many tests share, each made once."""

from __future__ import annotations

from typing import Any

import pytest

_counted: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture
def dry_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a forecaster count a preset, or the model of tests.plan.measured, once for each config."""
    from tests.plan.measured import make, one_block

    from wherry.plan import forecaster
    from wherry.sources import SHAPES, find

    count, shared = forecaster.count_by_blocks, {find(each).name for each in (make, one_block)}

    def once(source: Any, config: Any, outline: Any, **where: Any) -> Any:
        if source.name not in shared | SHAPES.keys():
            return count(source, config, outline, **where)
        key = repr((source.name, SHAPES.get(source.name), config.to_dict(), where))
        if key not in _counted:
            _counted[key] = count(source, config, outline, **where)
        return _counted[key]

    monkeypatch.setattr(forecaster, "count_by_blocks", once)
