"""`wherry bench adam` at its smallest: every form has a row that says what it moved, and the file has them all."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wherry import native
from wherry.errors import WherryError
from wherry.native import adam_bench

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no native library: {native.why_not()}")

LIMIT = adam_bench.LIMIT
# Bytes that one element needs moved, by family: each stream that is read and each that is written.
BYTES = {
    "memory": {"read": 4, "copy": 4 + 4, "triad": 8 + 4},
    "fp32": {LIMIT: 16 + 12, "Wherry AdamW": 16 + 12, "torch AdamW fused": 28, "torch AdamW foreach": 28,
             "torch AdamW loop": 28},
    "split": {LIMIT: 14 + 12, "Wherry AdamW, bf16 with split master": 14 + 12},
    "whole": {LIMIT: 14 + 14, "Wherry AdamW, bf16 with whole master": 14 + 14},
    "bf16 state": {LIMIT: 10 + 8, "Wherry AdamW, split master, bf16 moments": 10 + 8},
    "8-bit state": {LIMIT: 8 + 6, "Wherry AdamW, split master, 8-bit moments": 8 + 6},
    "host update": {LIMIT: 26, "Wherry AdamW, bf16 with split master": 26,
                    "three passes, with Wherry's fp32 AdamW": 8 + 28 + 6},
}  # fmt: skip


def test_every_form_has_a_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(adam_bench, "_without_deepspeed", lambda: "left out by the test")
    result, isa = tmp_path / "adam.json", native.available_isas()[0]
    arguments = ["--sizes", "4096", "--threads", "1", "--isa", isa, "--repeats", "2", "--json", str(result)]
    assert adam_bench.main(arguments) == 0
    printed = capsys.readouterr().out
    found = json.loads(result.read_text())
    for row in found["rows"]:
        # Whatever this machine was kept from doing meanwhile.
        usual = {"value": 99.9, "gbps": 99.9, "spread": 0.5, "of_limit": row["of_limit"] and 0.99}
        shown = adam_bench._line(row if row["reason"] is not None else row | usual)
        assert max(map(len, shown.splitlines())) <= 80
    assert (found["benchmark"], found["complete"]) == ("cpu_adam", True)
    assert found["settings"] == {"sizes": [4096], "threads": [1], "isas": [isa], "repeats": 2}
    rows = [row for row in found["rows"] if row["reason"] is None]
    by_family: dict[str, dict[str, int]] = {}
    for row in rows:
        assert row["case"]["numel"] == 4096 and row["case"]["threads"] == 1
        assert (row["unit"], row["more_is_better"], row["rounds"]) == ("ns/param", False, 2)
        assert row["value"] > 0 and row["gbps"] == pytest.approx(row["bytes"] / row["value"], rel=1e-6)
        assert row["name"] in printed
        family = row["case"]["family"]
        by_family.setdefault(family, {})[row["name"]] = row["bytes"]
        limited = family != "memory" and row["name"] != LIMIT
        assert (row["of_limit"] is not None) == limited
        if row["name"].startswith("Wherry") and family != "memory":
            assert row["isa"] == isa and row["ratio"] is not None
    assert by_family == BYTES
    absent = [row for row in found["rows"] if row["reason"] is not None]
    assert {row["case"]["family"] for row in absent} == {"fp32", "split", "bf16 state", "host update"}
    assert all("DeepSpeedCPUAdam" in row["system"] and row["reason"] == "left out by the test" for row in absent)
    assert "one pass is" in printed and "times as fast as three passes" in " ".join(printed.split())


def test_deepspeed_is_measured_in_each_of_its_modes(monkeypatch, capsys):
    """Its bytes are those of the tensors that it is given and of the state that it then keeps."""
    moved: list[int] = []

    class Adam:
        def __init__(self, params: list[Any], lr: float, weight_decay: float, fp32_optimizer_states: bool) -> None:
            (p,) = params
            state = torch.float32 if fp32_optimizer_states else p.dtype
            moved.append(2 * p.dtype.itemsize + p.grad.dtype.itemsize + 2 * 2 * state.itemsize)

        def step(self) -> None:
            return None

    monkeypatch.setattr(adam_bench, "_without_deepspeed", lambda: "")
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", SimpleNamespace(DeepSpeedCPUAdam=Adam))
    families = ["fp32", "split", "bf16 state", "host update"]
    rows = adam_bench.run_bench([4096], [1], [native.available_isas()[0]], families, 1)
    theirs = [(row["name"], row["bytes"]) for row in rows if "DeepSpeed" in row["system"]]
    assert theirs == [
        ("DeepSpeedCPUAdam fp32", 28),
        ("DeepSpeedCPUAdam bf16, without a master", 22),
        ("DeepSpeedCPUAdam bf16, bf16 moments, without a master", 14),
        # Beside the update in one pass that family has its limit, and so what is measured beside it.
        ("DeepSpeedCPUAdam bf16, without a master", 22),
        ("three passes, with DeepSpeedCPUAdam", 8 + 28 + 6),
    ]
    assert moved == [28, 22, 14, 22, 28]
    adam_bench._print_verdicts(rows)
    assert " ".join(capsys.readouterr().out.split()).count("as fast as three passes, with") == 2


@pytest.mark.parametrize(
    ("trial", "why"),
    [
        ("raise RuntimeError('Error building\\n\\nc++: not found\\n')", "does not build here: c++: not found"),
        ("import os; os.kill(os.getpid(), 9)", "does not build here: it ended with status -9"),
        ("import time; time.sleep(60)", "had not been built after 0.5 s"),
    ],
)
def test_a_peer_that_does_not_build_says_why_in_a_line(monkeypatch, trial, why):
    monkeypatch.setattr(adam_bench.importlib.util, "find_spec", lambda name: "found")
    monkeypatch.setattr(adam_bench, "_TRIAL", trial)
    monkeypatch.setattr(adam_bench, "_PATIENCE", 0.5 if "sleep" in trial else 60.0)
    assert adam_bench._without_deepspeed.__wrapped__() == f"installed, but its optimizer {why}"


def test_what_cannot_be_measured_says_so(monkeypatch):
    with pytest.raises(WherryError, match="--isa torch is not a native instruction set"):
        adam_bench.main(["--sizes", "64", "--isa", "torch", "--quick"])
    monkeypatch.setattr(adam_bench.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    (row,) = adam_bench.run_bench([4096], [1], [native.available_isas()[0]], ["whole"], 1)
    assert row["reason"].startswith("left out: needs")
    monkeypatch.setenv("WHERRY_ISA", "torch")
    with pytest.raises(WherryError, match="which is not active: WHERRY_ISA=torch asks"):
        adam_bench.main(["--quick"])
