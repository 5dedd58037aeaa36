"""Parts of the measurements on a GPU, each alone and at toy size on the emulated device."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.benchmarks.conftest import Script, no_programs, own_environment, script

from benchmarks import gpu, harness

__all__ = ["no_programs", "own_environment", "script"]
NOT_HERE = {
    "deepspeed is not installed (pip install '.[bench]')",
    "none ran: 3 were skipped, and pytest ended with status 0",  # those for CUDA
}
RATES = {"matrix", "host_memory", "up", "down", "both ways", "device_memory"}


def rows_of(folder: Path, part: str, script: Script) -> list[harness.Row]:
    """Run a part and return its rows that have figures; others must say that something is not installed."""
    script("gpu.py", "--toy", "--steps", 1, "--json", folder, part)
    file = harness.read(folder / f"{part}.json")
    assert file["complete"] and str(folder) not in (folder / f"{part}.json").read_text()
    assert {row["reason"] for row in file["rows"]} <= {None, *NOT_HERE}
    return [row for row in file["rows"] if row["reason"] is None]


def test_smoke_measures_every_rate(tmp_path: Path, script: Script) -> None:
    rates = {row["case"]["rate"]: row for row in rows_of(tmp_path, "smoke", script)}
    others = {"host memory", "update threads", "pinning", "share of updates on the device", "disk_read", "disk_write"}
    assert set(rates) == RATES | others and all(row["value"] > 0 for row in rates.values())
    assert rates["pinning"]["pinned"] is True and rates["update threads"]["isa"]


def test_bits_are_those_of_at_step(tmp_path: Path, script: Script) -> None:
    rows = rows_of(tmp_path, "bits", script)
    checks = {row["case"]["check"]: row for row in rows}
    assert len(rows) == 33 and all(row["good"] for row in rows[:-1])
    assert checks["tests"]["value"] >= 5 and checks["tests"]["failed"] == []


@pytest.mark.parametrize("part", gpu.TIMED)
def test_steps_stand_beside_their_bounds(part: str, tmp_path: Path, script: Script) -> None:
    rows = rows_of(tmp_path, part, script)
    steps = [row for row in rows if row["case"].get("measure") == "step"]
    ours = [row for row in steps if row["system"].startswith("wherry")]
    assert {row["system"] for row in steps} >= {
        label for series in gpu.TIMED[part] for label in series.systems if not label.startswith("deepspeed")
    }
    for row in ours:
        assert row["bound_s"] >= row["overlapped_s"] > 0 and row["mfu"] > 0
        assert row["of_bound"] == pytest.approx(row["bound_s"] / row["value"])
    traced = {row["system"] for row in ours if row.get("trace")}
    assert traced == {label for series in gpu.TIMED[part] for label in series.traced}
    computed = {(row["case"]["model"], row["case"]["tokens"]) for row in steps if row["system"] == gpu.COMPUTE}
    for row in ours:
        assert (row["compute_from"] == "measured") is ((row["case"]["model"], row["case"]["tokens"]) in computed)
