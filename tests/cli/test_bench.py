"""`wherry bench`: what this machine gives, and the settings that suit it."""

from __future__ import annotations

import json

import pytest

from wherry import native
from wherry.cli import bench, main


@pytest.mark.skipif(native.library() is None, reason="the native library is not here")
def test_every_family_of_host_optimizers_is_measured_beside_its_limit(tmp_path, capsys):
    file = tmp_path / "found.json"
    assert main(["bench", "adam", "--sizes", "5000", "--threads", "1", "--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["family"] for row in rows if row["name"] == bench.LIMIT] == list(bench.FAMILIES)
    assert all(len(row["seconds"]) == 3 and min(row["seconds"]) > 0 for row in rows)
    for isa in bench.instruction_sets(None):
        assert sum(row["name"].endswith(isa) for row in rows) == len(bench.FAMILIES)
    shown = capsys.readouterr().out
    assert "ns/param" in shown and "torch AdamW fused" in shown


def test_a_disk_is_measured_and_its_best_settings_are_those_of_a_config(tmp_path, capsys):
    import wherry.config

    assert main(["bench", "disk", "--path", str(tmp_path), "--quick", "--size", "16e6"]) == 0
    shown = capsys.readouterr().out
    aio = json.loads("{" + shown[shown.index('"aio"') :] + "}")
    assert wherry.config.load({"train_batch_size": 1, **aio})
    assert not list(tmp_path.iterdir())


def test_the_smallest_settings_that_are_as_good_as_the_best_win():
    def rows(speeds):
        return [
            {"work": work, "block_size": block, "queue_depth": depth, "speed": speed}
            for (block, depth), speed in speeds.items()
            for work in bench.WORK
        ]

    close = rows({(1 << 20, 8): 990, (1 << 20, 32): 1000, (4 << 20, 32): 1001})
    assert bench.best_settings(close) == {"block_size": 1 << 20, "queue_depth": 8}
    assert bench.best_settings(rows({(1 << 20, 8): 900, (4 << 20, 32): 1000}))["queue_depth"] == 32


# Arguments, and the message.
MISTAKES = [
    (["adam", "--sizes", "0.5"], "--sizes: expected a whole number above 0, got '0.5'"),
    (["adam", "--threads", "1,x"], "--threads: expected a whole number above 0, got 'x'"),
    (["adam", "--json", "."], "--json . is a folder"),
    (["adam", "--families", "fp64"], "fp64"),
    (["adam", "--isa", "torch"], "expected some of"),
    (["disk", "--path", "/nowhere/at/all"], "not a folder"),
    (["disk", "--path", ".", "--size", "1"], "expected 8388608 or more"),
    (["disk", "--path", ".", "--peers"], "usage: wherry bench disk"),
    (["adm"], 'did you mean "adam"?'),
    (["steps"], "no measure 'steps'; expected adam or disk"),
    (["steps"], "python benchmarks/steps.py"),
]


def test_a_mistake_is_one_line_and_no_traceback(capsys):
    for words, said in MISTAKES:
        try:
            assert main(["bench", *words]) == 2
        except SystemExit as error:
            assert error.code == 2
        shown = capsys.readouterr().err
        assert said in shown and "Traceback" not in shown
    assert main(["bench"]) == 0
    listed = capsys.readouterr().out
    assert "adam" in listed and "disk" in listed and max(map(len, listed.splitlines())) <= 80
