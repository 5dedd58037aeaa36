"""What is kept of an engine past its time, or done to it out of turn, never ends the process."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.keeping import CASES, NAMES
from tests.forks import ENGINE, Forks


@pytest.mark.parametrize("row", NAMES)
def test_nothing_that_is_kept_ends_the_process(row: str, tmp_path: Path) -> None:
    program = "from tests.engine.keeping import main; main()"
    with Forks(*ENGINE) as forks:
        done = forks.run("-c", program, row, tmp_path, folder=tmp_path, launched=False)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-4000:]
    assert done.stdout.split() == [case.__name__ for case in CASES]
