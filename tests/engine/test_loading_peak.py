"""Loading a model takes its shards and one piece, on the host and on the disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="the extra `transformers` is not installed")
pytest.importorskip("transformers", reason="the extra `transformers` is not installed")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_8_gb_are_read_within_the_shards_and_one_piece(tmp_path: Path) -> None:
    """A Llama of Transformers' with adapters of PEFT's, by the first rank of eight; its files are of holes."""
    command = [sys.executable, "-m", "tests.engine.loading_peak", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout.splitlines()[-1])
    assert seen["total"] > 7.9e9 and seen["on disk"] < 1 << 20
    assert seen["host"]["parameters host"] < 1.01 * seen["total"] / 8
    assert seen["host"]["took"] < 1.05 * (seen["host"]["parameters host"] + seen["piece"]), seen
    assert seen["disk"]["parameters disk"] < 1.01 * seen["total"] / 8
    assert seen["disk"]["took"] < 1.15 * (seen["disk"]["parameters read host"] + seen["piece"]), seen


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_a_model_is_never_whole_where_it_is_quantised_while_it_is_read(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    command = [sys.executable, "-m", "tests.engine.loading_peak", str(tmp_path), "4"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout.splitlines()[-1])
    assert seen["total"] > 8e8 and seen["on disk"] < 1 << 20
    assert seen["host"]["parameters host"] < 0.07 * seen["total"]  # a fourth of an eighth, the embeddings, the scales
    assert seen["host"]["took"] < 0.4 * seen["total"], seen
