"""Every script runs from end to end in its smallest setting, and its file has the promised columns."""

import json
import subprocess
import sys

import pytest

from benchmarks import activations, imports, overhead, steps, systems
from wherry.cli import main as wherry
from wherry.observe import bench, machine


def _rows(path, **case):
    """The rows of a file by system, those of a part of the cases."""
    rows = json.loads(path.read_text())["rows"]
    return {row["system"]: row for row in rows if case.items() <= row["case"].items()}


@pytest.fixture(autouse=True)
def no_watch(monkeypatch):
    monkeypatch.setattr(machine.Load, "__init__", lambda self, sample_s=0.0, of=machine.Load.__init__: of(self, 0.0))


@pytest.fixture
def no_deepspeed(monkeypatch):
    find = systems.importlib.util.find_spec
    monkeypatch.setattr(systems.importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find(name))


def test_overhead(tmp_path, capsys, no_deepspeed):
    path = tmp_path / "overhead.json"
    smallest = ["--quick", "--rounds", "2", "--steps", "2", "--json", str(path)]
    assert overhead.main([*smallest, "--systems", "ddp,wherry-0,wherry-3,deepspeed-2"]) == 0
    rows, over = _rows(path, measure="step"), _rows(path, measure="over plain")
    assert list(rows) == ["plain", "plain-default", "ddp", "wherry-0", "wherry-3", "deepspeed-2"]
    assert list(over) == ["ddp", "wherry-0", "wherry-3", "deepspeed-2"]
    absent = rows["deepspeed-2"]
    assert absent["reason"] == "deepspeed is not installed (pip install '.[bench]')"
    assert absent["value"] is None and absent["ratio"] == {}
    for name in ("plain", "plain-default", "ddp", "wherry-0", "wherry-3"):
        row = rows[name]
        assert row["reason"] is None and row["value"] > 0 and row["loss_difference"] <= systems.SAME_LOSS
        assert row["rounds"] == 2 == len(row["values"]) and row["spread"] >= 0
    assert rows["plain"]["python_calls_over_plain"] == 0
    assert over["wherry-0"]["python_calls_over_plain"] > 0
    assert {"over_default_us", "cpu_us"} <= set(over["wherry-0"])
    assert set(over["wherry-0"]["ratio"]) == {"ddp", "wherry-3"}
    assert set(rows["wherry-0"]["ratio"]) == {"plain", "plain-default", "ddp", "wherry-3"}
    shown = capsys.readouterr().out
    assert "Wherry 3" in shown and "DeepSpeed 2: deepspeed is not installed" in shown
    assert max(map(len, shown.splitlines()[:-1])) <= bench.WIDTH


def test_profile_names_the_functions_of_the_engine(capsys):
    assert overhead.main(["--profile", "wherry-2"]) == 0
    shown = capsys.readouterr().out
    assert "wherry/sharding/hooks.py" in shown
    assert "embedding" not in shown  # a call that plain PyTorch makes as often


def test_steps(tmp_path, capsys, no_deepspeed):
    path = tmp_path / "steps.json"
    smallest = ["--quick", "--models", "tiny", "--ranks", "2", "--rounds", "1", "--steps", "2", "--json", str(path)]
    assert steps.main([*smallest, "--systems", "wherry-3,deepspeed-3"]) == 0
    found = json.loads(path.read_text())["rows"]
    found, memory = ([r for r in found if r["case"]["measure"] == of] for of in ("step", "peak memory"))
    assert [(r["case"]["ranks"], r["system"]) for r in found] == [(1, "plain"), (2, "wherry-3"), (2, "deepspeed-3")]
    plain, ours, theirs = found
    assert theirs["reason"].startswith("deepspeed is not installed") and theirs["value"] is None
    assert plain["loss_difference"] == 0 and 0 < ours["loss_difference"] <= systems.SAME_LOSS
    assert ours["last_loss"] < ours["first_loss"]
    assert memory[1]["value"] > memory[1]["empty_bytes"] > 0
    assert ours["tokens_per_s"] == pytest.approx(4 * 16 / ours["value"])
    assert {"spread", "rounds", "built_s"} <= set(ours)
    shown = capsys.readouterr().out
    assert "on 2 ranks" in shown and "same" in shown
    assert max(map(len, shown.splitlines()[:-1])) <= bench.WIDTH


def test_a_wrong_result_is_not_called_the_same():
    assert steps.loss_words(3e-6) == "same"
    assert steps.loss_words(0.01) == "1e-02 off"


def test_imports(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(imports, "IMPORTS", {name: imports.IMPORTS[name] for name in ("wherry", "wherry, engine")})
    monkeypatch.setattr(imports, "COMMANDS", {name: imports.COMMANDS[name] for name in ("python", "wherry")})
    missing = imports.missing
    monkeypatch.setattr(imports, "missing", lambda name: "absent" if name == "deepspeed" else missing(name))
    path = tmp_path / "imports.json"
    assert imports.main(["--quick", "--rounds", "1", "--json", str(path)]) == 0
    found = {(row["case"]["measure"], row["system"]): row for row in json.loads(path.read_text())["rows"]}
    assert found["import", "wherry"]["modules"] < found["import", "wherry, engine"]["modules"]
    assert all(row["value"] > 0 for row in found.values() if row["reason"] is None)
    assert found["size", "deepspeed"]["reason"] == "absent"
    size = found["size", "wherry"]
    assert size["value"] == size["own"] + sum(size["beside_torch"].values())
    assert {"numpy", "pydantic"} <= set(size["beside_torch"]) and "torch" not in size["beside_torch"]
    shown = capsys.readouterr().out
    assert "torch itself" in shown and max(map(len, shown.splitlines()[:-1])) <= bench.WIDTH


@pytest.mark.parametrize("name", ["overhead", "steps", "imports", "gpu", "gpu_offload"])
def test_scripts_stand_alone_and_are_found_by_the_command(name, capsys, tmp_path):
    script = bench.ROOT / "benchmarks" / f"{name}.py"
    alone = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert alone.returncode == 0 and "--quick" in alone.stdout, alone.stderr
    with pytest.raises(SystemExit) as ended:
        wherry(["bench", name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == alone.stdout


def test_activations(tmp_path, capsys):
    path = tmp_path / "activations.json"
    assert activations.main(["--quick", "--rounds", "1", "--json", str(path)]) == 0
    rows = {row["system"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["recompute"]["peak_bytes"] < rows["recompute every second"]["peak_bytes"] < rows["keep"]["peak_bytes"]
    assert rows["partition"]["reason"]
    assert "recompute, contiguous" in capsys.readouterr().out
