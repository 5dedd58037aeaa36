"""The benchmark of accumulation runs, and counts what it says it counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import accumulation


@pytest.mark.usefixtures("forked_rooms")
def test_both_orders_train_the_same_model(tmp_path: Path, capsys) -> None:
    path = tmp_path / "accumulation.json"
    arguments = ["--quick", "--models", "tiny", "--windows", "3", "--few-windows", "2", "--peers", "none"]
    arguments += ["--steps", "1", "--path", str(tmp_path)]
    assert accumulation.main([*arguments, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    seen = {(row["system"], row["case"]["measure"]): row for row in rows}
    assert all(row["reason"] is None for row in rows)
    kinds = ("", *(f" {order}{tight}" for order in accumulation.ORDERS for tight in ("", accumulation.TIGHT)))
    checked = 0
    for window, tokens in (("k=3", 64), ("k=2, 16 tokens", 16)):
        plain = seen[f"plain {window}", "step"]
        for kind in kinds:
            step, read = (seen[f"wherry-3-nvme{kind} {window}", measure] for measure in ("step", "read"))
            assert step["case"]["tokens"] == read["case"]["tokens"] == tokens
            assert step["of_limit"] == pytest.approx(plain["value"] / step["value"])
            # How often, and by which order, is for tests of counts: a step that is timed reads ahead for the next.
            assert (read["of_limit"] is not None) == kind.endswith(accumulation.TIGHT)
            assert read["value"] > 0
            assert plain["losses"] == pytest.approx(step["losses"], rel=1e-4)
            checked += 2
    assert len(seen) == checked + 2
    assert "layer_major k=3" in capsys.readouterr().out
