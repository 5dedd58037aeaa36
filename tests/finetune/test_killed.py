"""A fine-tuning that is killed goes on to the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.finetune.tiny import make_folder, write_rows


def test_resumed_runs_end_in_the_same_bits(tmp_path: Path, plain: Any) -> None:
    make_folder(tmp_path / "llama", "llama", plain)
    write_rows(tmp_path)
    program = [sys.executable, str(Path(__file__).with_name("killed.py")), str(tmp_path), "3"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["kills"] == 3 and told["same"], told
    assert told["steps"][1] > 0  # there was something to go on from
