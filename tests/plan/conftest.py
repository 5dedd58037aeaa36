"""`wherry plan` on a narrow terminal, and dry runs of the models that many tests share, each made once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from wherry.cli import main

_counted: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


class Command:
    """`wherry plan`; its output fits the terminal."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str, status: int = 0) -> str:
        assert main(["plan", *arguments]) == status
        out = self._capsys.readouterr().out
        assert "--json" in arguments or (max(map(len, out.splitlines())) <= 80 and "\N{HORIZONTAL ELLIPSIS}" not in out)
        return out

    def json(self, *arguments: str, status: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", status=status))

    def error(self, *arguments: str) -> str:
        """Return the message of a mistake, which stands alone."""
        assert main(["plan", *arguments]) == 2
        out = self._capsys.readouterr()
        assert out.err.startswith("wherry: ") and "Traceback" not in out.err and not out.out
        return out.err


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


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
