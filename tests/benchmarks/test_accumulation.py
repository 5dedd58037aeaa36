"""The benchmark of accumulation runs, and counts what it says it counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import accumulation


@pytest.mark.usefixtures("forked_rooms")
def test_both_orders_train_the_same_model(tmp_path: Path, capsys) -> None:
    path = tmp_path / "accumulation.json"
    arguments = ["--quick", "--models", "tiny", "--windows", "3", "--peers", "none", "--place", "3", "--steps", "1"]
    assert accumulation.main([*arguments, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    seen = {(row["system"], row["case"]["measure"]): row for row in rows}
    labels = ["wherry-3 k=3", *(f"wherry-3 {order} k=3" for order in accumulation.ORDERS)]
    ours = {(label, measure) for label in labels for measure in ("step", "read")}
    assert set(seen) == {*ours, ("plain k=3", "step")}
    assert all(row["reason"] is None for row in rows)
    plain = seen["plain k=3", "step"]
    for key in ours:
        expected = pytest.approx(plain["value"] / seen[key]["value"]) if key[1] == "step" else None
        assert seen[key]["of_limit"] == expected
    assert plain["losses"] == pytest.approx(seen["wherry-3 layer_major k=3", "step"]["losses"], rel=1e-4)
    assert "layer_major k=3" in capsys.readouterr().out
