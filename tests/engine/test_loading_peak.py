"""The peak of loading a model is its shards and one piece, on the host and on the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.forks import Forks

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")


def load(forks: Forks, folder: Path, *bits: str) -> Any:
    """Load a Llama of Transformers with adapters of PEFT, as the first rank of eight."""
    for name in ("transformers", "peft"):
        pytest.importorskip(name, reason="the extra `transformers` is not installed")
    program = "from tests.engine.loading_peak import main; main()"
    modules = forks.of("transformers", "peft", "wherry.integrations.bits")
    done = modules.run("-c", program, folder, *bits, folder=folder, launched=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["on disk"] < 1 << 20
    return seen


def test_8_gb_are_read_within_the_shards_and_one_piece(tmp_path: Path, forks: Forks) -> None:
    seen = load(forks, tmp_path)
    assert seen["total"] > 7.9e9
    assert seen["host"]["parameters host"] < 1.01 * seen["total"] / 8
    assert seen["host"]["took"] < 1.05 * (seen["host"]["parameters host"] + seen["piece"]), seen
    assert seen["disk"]["parameters disk"] < 1.01 * seen["total"] / 8
    assert seen["disk"]["took"] < 1.15 * (seen["disk"]["parameters read host"] + seen["piece"]), seen


@pytest.mark.nightly
def test_a_model_quantized_while_it_is_read_is_never_whole(tmp_path: Path, forks: Forks) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    seen = load(forks, tmp_path, "4")
    assert seen["total"] > 8e8
    assert seen["host"]["parameters host"] < 0.07 * seen["total"]  # a fourth of an eighth, the embeddings, the scales
    assert seen["host"]["took"] < 0.4 * seen["total"], seen
