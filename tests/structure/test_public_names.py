"""Tests ask an engine by its public names, so that what is behind them is free to change."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
# The underscored name is one that scripts use.
PRIVATE = re.compile(r"engine[.]_(?!_|zero3_consolidated_16bit_state_dict)\w+")


def test_no_test_reaches_into_an_engine():
    found = {path.relative_to(TESTS): PRIVATE.findall(path.read_text()) for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}
