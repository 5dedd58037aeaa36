"""Fetch a model and rows from a hub, and use the hub's cache afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.finetune.hub import hub_of
from tests.finetune.tiny import make_folder, write_rows

# The hub's address is read when its package is imported: these processes cannot be forks.
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.usefixtures("launched"),
    pytest.mark.skipif(find_spec("trl") is None, reason="the extra `transformers` is not installed"),
]
PROGRAM = """
import json, sys
from wherry.cli import main
codes = [main(words) for words in json.loads(sys.argv[1])]
print(codes)
"""


def run(hub: str, home: Path, *commands: str) -> tuple[list[int], str, str]:
    """Exit codes of commands, one after the other in one process, and what they print."""
    env = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    program = [sys.executable, "-c", PROGRAM, json.dumps([command.split() for command in commands])]
    done = subprocess.run(program, env=env, cwd=home, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    shown, _, codes = done.stdout.rstrip().rpartition("\n")
    return json.loads(codes), shown, done.stderr


def test_a_model_and_rows_of_the_hub(tmp_path: Path, plain: Any) -> None:
    model, rows = tmp_path / "models/me/tiny", tmp_path / "datasets/me/rows"
    make_folder(model, "llama", plain)
    rows.mkdir(parents=True)
    write_rows(tmp_path)
    (tmp_path / "rows.jsonl").rename(rows / "train.jsonl")
    for name in ("evil.py", "pytorch_model.bin"):
        (model / name).touch()
    flags = "--precision=fp32 --lora --steps=1 --eval-split=0 --no-save"
    with hub_of(tmp_path) as (hub, asked):
        codes, _, err = run(
            hub,
            tmp_path,
            f"finetune https://huggingface.co/me/tiny --data=me/rows --run-dir=run {flags}",
            f"finetune me/tinny --data=me/rows {flags}",
            f"finetune me/tiny --data=me/rowws {flags}",
        )
    assert codes == [0, 2, 2], err
    files = {path.rpartition("/")[2] for path in asked if path.startswith("/me/tiny/resolve")}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= files
    assert not any(name.endswith((".py", ".bin")) for name in files)
    why = "there is none of this name, or it is private: `hf auth login`"
    assert f"finetune: there is no such folder here, and me/tinny cannot be fetched from the hub: {why}" in err
    assert f"finetune: --data me/rowws: {why}" in err
    adapter = json.loads((tmp_path / "run/model/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "me/tiny"
    # Without a network.
    words = "ab --max-new-tokens=3"
    generated = (f"generate run {words}", f"generate me/tiny {words}", f"generate me/tinny {words}")
    codes, shown, err = run("http://127.0.0.1:9", tmp_path, *generated)
    assert codes == [0, 0, 2] and shown.startswith("ab") and "\nab" in shown, err
    assert "me/tinny: there is no such folder; a model of the hub is fetched by `hf download me/tinny`" in err
