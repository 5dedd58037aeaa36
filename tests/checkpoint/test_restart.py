"""Training resumes on fewer ranks after one was killed, with the losses of an undisturbed run."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from wherry.checkpoint.checks import read_manifest
from wherry.train.job import main

BATCH, SEQUENCE = 8, 8


def flags(folder: Path, ranks: int, steps: int) -> list[str]:
    return [
        *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "1", "--seq-length", str(SEQUENCE)),
        *("--eval-iters", "1", "--stage", "3", "--lr", "1e-3", "--lr-warmup-iters", "1", "--steps", str(steps)),
        *("--set", "scheduler.params.total_num_steps=4000", "--data", str(folder / "text.txt")),
        *("--batch-size", str(BATCH // ranks)),
    ]


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def rank_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("RANK")
    except psutil.Error:
        return None


def kill_rank(launcher: Any, rank: int) -> list[int]:
    """Kill one rank; returns the process ids of all."""
    ranks = {rank_of(child): child for child in psutil.Process(launcher.pid).children(recursive=True)}
    ranks[str(rank)].send_signal(signal.SIGKILL)
    return [child.pid for child in ranks.values()]


@pytest.mark.timeout(240)
def test_on_one_rank_after_one_of_two_was_killed(tmp_path: Path, launched: Any) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 126)) * 40)
    run = tmp_path / "run"
    saving = ["--run-dir", str(run), "--save-interval", "2", "--keep-last", "2"]
    launcher = launched.start("train", *flags(tmp_path, 2, 4000), "--nproc", "2", *saving, OMP_NUM_THREADS="1")
    latest = run / "checkpoints" / "latest"
    launched.wait_for(lambda: latest.exists() or launcher.poll() is not None, 120)
    assert launcher.poll() is None, launcher.communicate()[0]
    pids = kill_rank(launcher, 1)
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 128 + signal.SIGKILL, output
    assert "rank 1 was ended by SIGKILL" in output and launched.gone(pids)
    step = read_manifest(run / "checkpoints" / latest.read_text()).step
    done = losses(run)
    # Without a flag for the batch, a step keeps its number of samples.
    again = flags(tmp_path, 1, step + 6)
    again = again[: again.index("--batch-size")]
    assert main([*again, *saving, "--resume", "auto"]) == 0
    after = losses(run)
    assert len(after) == 6
    undisturbed = tmp_path / "undisturbed"
    assert main([*flags(tmp_path, 1, step + 6), "--run-dir", str(undisturbed)]) == 0
    expected = losses(undisturbed)
    assert len(expected) == step + 6
    for ours, theirs in zip([*done[:step], *after], expected, strict=True):
        assert math.isclose(ours, theirs, rel_tol=1e-4), (ours, theirs)
