"""Every benchmark runs, with rows that say what was measured, and the page is that of the files."""

from __future__ import annotations

import importlib
import json
import os
import statistics
from pathlib import Path

import pytest

from benchmarks import harness, machine, report, systems
from benchmarks.steps import MODELS, recipe_of, systems_of
from wherry.errors import WherryError

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "steps": "resident --models tiny --ranks 2 --places 3 --peers plain,fsdp2 --steps 2",
    "steps offload": "offload --models tiny --places 3-nvme --peers plain --steps 2 --path {tmp}",
    "memory": "--models tiny --ranks 1 --systems wherry-3 --path {tmp}",
    "construction": "--models tiny --systems wherry-init,wherry-load,fsdp2-load",
    "checkpoint": "--models tiny --systems dcp,wherry-async --path {tmp}",
    "disk": "--path {tmp} --blocks 1048576 --depths 8",
}
NIGHTLY = {
    "overhead": "--systems ddp,wherry-3 --ranks 2 --rounds 1 --steps 2",
    "cpu_adam": "--sizes 1000 --threads 1",
    "import_time": "",
}


@pytest.mark.parametrize("name", [*SCRIPTS, *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)])
def test_a_benchmark_measures_what_it_is_asked_for(name, tmp_path, script):
    file = tmp_path / "found.json"
    words = (SCRIPTS | NIGHTLY)[name].format(tmp=tmp_path).split()
    script(f"{name.partition(' ')[0]}.py", *words, "--quick", "--json", file)
    found = harness.read(file)
    assert found["complete"] and found["quick"]
    assert not list(tmp_path.glob("*.part")) and not list(tmp_path.glob("benchmark-*"))
    measured = [row for row in found["rows"] if row["reason"] is None]
    assert any("herry" in row["system"] for row in measured)
    for row in measured:
        assert row["value"] == pytest.approx(statistics.median(row["values"]))
        off = row.get("loss_difference")
        if off is not None and not row["system"].endswith("delayed"):
            assert systems.same_losses(off, row["case"].get("dtype", "fp32"))
    for row in found["rows"]:
        # What is not there says so; everything else ran.
        assert row["reason"] is None or "not installed" in row["reason"] or "never both" in row["reason"], row
    text = file.read_text()
    assert str(tmp_path) not in text and os.path.expanduser("~/") not in text


def test_the_page_is_that_of_the_files():
    assert report.main(["--check"]) == 0


def test_a_page_compares_a_peer_with_wherry_in_the_same_place():
    case = {"model": "m", "dtype": "fp32", "ranks": 1, "clip": 1.0, "measure": "step"}
    rows = [
        harness.row(case, "wherry-3-cpu:before_use", "s", [2.0]),
        harness.row(case, "wherry-3-cpu:delayed", "s", [1.0]),
        harness.row(case, "wherry-0", "s", [1.0]),
        harness.row(case, "deepspeed-3-cpu", "s", [3.0]),
        harness.row(case, "fsdp2-cpu", "s", [9.0], loss_difference=0.5),
        harness.row(case, "ddp", "s", reason="it is not there"),
    ]
    harness.compare(rows)
    claim = report.Claim("", ("steps",), "")
    # What trained something else, and what did not run, count nowhere.
    assert list(report.ratios({"rows": rows}, claim)) == [(("step", "deepspeed-3-cpu"), 1.5)]


def test_figures_of_a_gpu_stand_beside_published_ones():
    case = {"model": "qwen3-4b", "dtype": "bf16", "ranks": 1, "clip": 1.0, "tokens": 4096, "measure": "step"}
    facts = {"mfu": 0.4, "of_overlapped": 0.5, "of_bound": 0.9, "tokens_per_s": 1234.0}
    rows = [
        harness.row(case, "compute", "s", [1.0], **facts),
        harness.row(case, "wherry-2-cpu:before_use", "s", [1.5], **facts),
        harness.row(case | {"tokens": 8192}, "wherry-2:at_step", "s", reason="OutOfMemoryError"),
    ]
    file = {"benchmark": "gpu", "date": "2026-2", "settings": {"toy": False}, "machine": {"gpu": "H100"}, "rows": rows}
    # Neither an older file, nor one of another GPU, nor a failure takes a figure's place.
    others = [harness.row(case, "compute", "s", [9.0], **facts)], [harness.row(case, "compute", "s", reason="hung")]
    old, failed = ({**file, "rows": rows, "date": f"2026-{month}"} for rows, month in zip(others, (1, 3), strict=True))
    text = report.on_a_gpu([file, old | {"machine": {"gpu": "H200"}}, old, failed])
    assert (
        "| H100 | qwen3-4b | 4,096 | wherry-2-cpu:before_use, clipped | 1.50 s | 1,234 | 0.40 | 0.50 | 0.90 |" in text
    )
    assert "| 4.06 s (prime-rl, issue 3210) | 0.8 s at most | 0.50 s (H100) |" in text and "OutOfMemoryError" in text
    assert text.count("not measured") == 2
    assert "Nothing has been measured" in report.on_a_gpu([file | {"settings": {"toy": True}}])


def test_ratios_are_of_rounds_and_say_how_many_times_as_good():
    rows = [
        harness.row({}, "a", "s", [1.0, 10.0, 1.0]),
        harness.row({}, "b", "s", [2.0, 20.0, 2.0]),
        harness.row({}, "c", "s", [4.0]),
        harness.row({"other": 1}, "a", "B/s", [6.0], more_is_better=True),
        harness.row({"other": 1}, "b", "B/s", [2.0], more_is_better=True),
    ]
    harness.compare(rows)
    assert rows[0]["ratio"] == {"b": 2.0, "c": 4.0} and rows[1]["ratio"] == {"a": 0.5, "c": 2.0}
    assert rows[3]["ratio"] == {"b": 3.0}
    assert harness.spread([1.0, 2.0, 3.0, 4.0]) == pytest.approx(0.6)


def test_a_file_that_is_none_of_a_benchmark_is_named(tmp_path):
    for text in ("{", "[]", json.dumps({"benchmark": "steps"})):
        path = tmp_path / "x.json"
        path.write_text(text)
        with pytest.raises(WherryError, match="not the file of a benchmark"):
            harness.read(path)


@pytest.mark.usefixtures("no_programs")
def test_what_is_published_names_no_folder_and_tells_machines_apart():
    assert harness.without_folders("No such file: '/home/somebody/x/swap.bin'") == "No such file: 'swap.bin'"
    described = machine.describe()
    assert described["cores"] and described["memory_bytes"] > 0
    assert machine.slug(described | {"cpu": "A (TM) CPU", "cpu_model": "6-1", "gpu": None}).startswith("a-6-1-")


def test_an_update_in_the_backward_stands_where_nothing_is_clipped():
    policies = ["before_use", "in_backward"]
    both = ["plain", *(f"wherry-3-cpu:{policy}" for policy in policies)]
    assert systems_of("offload", ["3-cpu"], ["plain"], 1.0, policies) == both[:2]
    assert systems_of("offload", ["3-cpu"], ["plain"], 0.0, policies) == both
    recipe = recipe_of("tiny", "wherry-3-cpu:layer_major", "bf16", 0.0, 4, None)
    assert (recipe.order, recipe.accumulation, recipe.batch) == ("layer_major", 4, 4 * MODELS["tiny"].batch)


def test_a_mistake_on_the_command_line_is_refused(capsys):
    for script in ("steps", "overhead", "memory", "gpu"):
        with pytest.raises(SystemExit):
            importlib.import_module(f"benchmarks.{script}").main(["--json"])
        assert "error:" in capsys.readouterr().err
