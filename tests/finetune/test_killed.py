"""A fine-tuning that is killed and resumed ends in the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.finetune.tiny import make_folder, write_rows
from tests.integrations import HUGGING_FACE

FINETUNE = ("wherry.finetune.following", "wherry.finetune.place", "wherry.finetune.report", "wherry.cli.finetune")


@pytest.mark.nightly
def test_resumed_runs_end_in_the_same_bits(forks: Any, tmp_path: Path, plain: Any) -> None:
    make_folder(tmp_path / "llama", "llama", plain)
    write_rows(tmp_path)
    program = Path(__file__).with_name("killed.py")
    done = forks.of(*HUGGING_FACE, *FINETUNE).run(program, tmp_path, 3, folder=tmp_path, launched=False, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["kills"] == 3 and told["same"], told
    assert told["steps"][1] > 0  # there was a checkpoint to resume from
