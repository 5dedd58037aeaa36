"""References that outlive an engine, and calls out of turn, never crash the process."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.keeping import CASES
from tests.forks import Forks

ROWS = ["stage 3", "offload-2", "infinity"]
MORE = ["stage 0", "stage 1", "stage 2", "offload-0", "offload-3-parameters", "disk-3-parameters"]


@pytest.mark.parametrize("row", [*ROWS, *(pytest.param(row, marks=pytest.mark.nightly) for row in MORE)])
def test_no_reference_or_call_crashes_the_process(row: str, tmp_path: Path, forks: Forks) -> None:
    program = "from tests.engine.keeping import main; main()"
    done = forks.run("-c", program, row, tmp_path, folder=tmp_path, launched=False)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-4000:]
    assert done.stdout.split() == [case.__name__ for case in CASES]
