"""Every script runs from end to end in its smallest setting, and its file has the promised columns."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.forks import Forks

from benchmarks import (
    activations,
    alone,
    bounds,
    checkpoint,
    construction,
    forecast,
    fragments,
    imports,
    memory,
    offload_step,
    overhead,
    scaling,
    steps,
    systems,
    tiling,
)
from benchmarks.rooms import Room, RoomFailed
from wherry.cli import main as wherry
from wherry.errors import WherryError
from wherry.observe import bench, machine


def _rows(path, **case):
    """The rows of a file by system, those of a part of the cases."""
    rows = json.loads(path.read_text())["rows"]
    return {row["system"]: row for row in rows if case.items() <= row["case"].items()}


def _narrow(shown):
    """Whether a terminal of 80 columns shows it as it is, but for the name of the file."""
    return all(len(line) <= bench.WIDTH for line in shown.splitlines() if not line.startswith("written:"))


pytestmark = pytest.mark.usefixtures("forked_rooms")


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
    assert {"over_default_us", "cpu_us"} <= set(over["wherry-0"]) and over["wherry-0"]["cpu_spread"] >= 0
    assert set(over["wherry-0"]["ratio"]) == {"ddp", "wherry-3"}
    assert set(rows["wherry-0"]["ratio"]) == {"plain", "plain-default", "ddp", "wherry-3"}
    for name in ("ddp", "wherry-0", "wherry-3"):  # of the steps of plain PyTorch beside it, not those of its own turn
        beside = [step - added for step, added in zip(rows[name]["values"], over[name]["values"], strict=True)]
        assert rows[name]["of_limit"] == pytest.approx(bench.paired_ratio(beside, rows[name]["values"]))
    assert rows["plain"]["of_limit"] is None
    shown = capsys.readouterr().out
    assert "Wherry 3" in shown and "DeepSpeed 2: deepspeed is not installed" in shown
    assert _narrow(shown)


def test_a_room_that_fails_while_it_is_measured_costs_its_own_rows_alone(tmp_path, monkeypatch, capsys):
    ask, close, closed = overhead.Room.ask, overhead.Room.close, []

    def fails(room, **request):
        if request["do"] == "time" and request["system"] == "ddp":
            raise RoomFailed("RuntimeError: it has had enough")
        return ask(room, **request)

    monkeypatch.setattr(overhead.Room, "ask", fails)
    monkeypatch.setattr(overhead.Room, "close", lambda room: (closed.append(room), close(room)))
    bases = overhead.BASES
    monkeypatch.setattr(overhead, "ROOMS", ((*bases, "ddp", "wherry-0"), (*bases, "wherry-3")))
    path = tmp_path / "overhead.json"
    chosen = ["--systems", "ddp,wherry-0,wherry-3", "--ranks", "1,2"]
    assert overhead.main(["--quick", "--rounds", "1", "--steps", "1", "--json", str(path), *chosen]) == 0
    for ranks in (1, 2):
        rows, over = (_rows(path, measure=measure, ranks=ranks) for measure in ("step", "over plain"))
        assert list(rows) == ["plain", "plain-default", "wherry-3", "ddp", "wherry-0"]
        assert all(rows[name]["value"] > 0 for name in ("plain", "wherry-3"))
        assert rows["ddp"]["reason"] == over["ddp"]["reason"] == "RuntimeError: it has had enough"
        assert rows["wherry-0"]["reason"] == "its room ended while DDP was measured: RuntimeError: it has had enough"
        assert set(over["wherry-3"]["ratio"]) == set()
    assert "DDP: RuntimeError: it has had enough" in capsys.readouterr().out
    assert all(not room._processes and not os.path.exists(room._disk) for room in closed)


def test_rooms_that_are_interrupted_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(systems.DISK_FOLDER, str(tmp_path))
    built = overhead.Room.ask

    def interrupted(room, **request):
        assert list(tmp_path.iterdir()) == [Path(room._disk)]
        if request["system"] == "wherry-0":
            raise KeyboardInterrupt
        return built(room, **request)

    monkeypatch.setattr(overhead.Room, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        overhead.main(["--quick", "--systems", "wherry-0"])
    assert list(tmp_path.iterdir()) == []

    def no_process(room, rank, port):
        raise KeyboardInterrupt

    monkeypatch.setattr(Room, "_start", no_process)
    with pytest.raises(KeyboardInterrupt):
        Room(1)
    assert list(tmp_path.iterdir()) == []


def test_an_engine_stands_between_halves_of_plain_steps(monkeypatch):
    rooms, asked = overhead.Rooms.__new__(overhead.Rooms), []
    found = {"plain": iter([(10.0, 8.0), (14.0, 9.0)]), "wherry-0": iter([(13.0, 8.0)])}

    def step_us(self, place, steps):
        asked.append((place, steps))
        return next(found[place[1]], None)

    monkeypatch.setattr(overhead.Rooms, "step_us", step_us)
    turn = rooms.beside_plain_us((1, "wherry-0"), 50)
    assert asked == [((1, "plain"), 25), ((1, "wherry-0"), 50), ((1, "plain"), 25)]
    assert turn == ((13.0, 8.0), (12.0, 8.5))
    row = overhead._over([turn, turn], [11.0, 15.0], "wherry-0", 1, {})
    assert row["values"] == [1.0, 1.0] and row["cpu_us"] == -0.5 and row["over_default_us"] == 0.0
    assert rooms.beside_plain_us((1, "wherry-0"), 50) is None  # a room that has failed


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
    assert plain["of_limit"] is None and ours["of_limit"] == pytest.approx(plain["value"] / ours["value"])
    due = memory[1]["empty_bytes"] + bounds.states_bytes("wherry-3", steps.MODELS["tiny"].parameters, 2, "fp32")
    assert memory[1]["of_limit"] == pytest.approx(due / memory[1]["value"])
    shown = capsys.readouterr().out
    assert "on 2 ranks" in shown and "same" in shown
    assert _narrow(shown)


def test_a_wrong_result_is_not_called_the_same():
    assert systems.loss_words(3e-6) == "same"
    assert systems.loss_words(0.01) == "1e-02 off"
    assert [systems.loss_words(0.002, dtype) for dtype in ("fp32", "bf16")] == ["2e-03 off", "same"]
    assert systems.loss_words(0.011, "bf16") == "1e-02 off"


@pytest.fixture
def torch_alone():
    with Forks("torch") as forks:
        yield forks


def test_what_is_imported_is_compiled_whatever_the_environment_says(tmp_path, monkeypatch):
    (tmp_path / "sources.py").write_text("")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    imports._python(["-c", "import sources"])
    assert list(tmp_path.glob("__pycache__/sources.*.pyc"))


def test_imports(tmp_path, capsys, monkeypatch, torch_alone):
    python = imports._python

    def run(arguments):
        """What imports torch, in a fork of a process that has."""
        if "import torch" not in arguments[-1]:
            return python(arguments)
        done = torch_alone.run(*arguments, folder=tmp_path, launched=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    monkeypatch.setattr(imports, "_python", run)
    monkeypatch.setattr(imports, "IMPORTS", {name: imports.IMPORTS[name] for name in ("wherry", "wherry, engine")})
    monkeypatch.setattr(imports, "COMMANDS", {name: imports.COMMANDS[name] for name in ("python", "wherry")})
    missing = imports.missing
    monkeypatch.setattr(imports, "missing", lambda name: "absent" if name == "deepspeed" else missing(name))
    path = tmp_path / "imports.json"
    assert imports.main(["--quick", "--rounds", "1", "--json", str(path)]) == 0
    found = {(row["case"]["measure"], row["system"]): row for row in json.loads(path.read_text())["rows"]}
    assert found["import", "wherry"]["modules"] < found["import", "wherry, engine"]["modules"]
    assert all(row["value"] > 0 for row in found.values() if row["reason"] is None)
    assert found["size", "deepspeed"]["reason"] == found["size, compiled", "deepspeed"]["reason"] == "absent"
    assert found["size, compiled", "wherry"]["value"] == found["size", "wherry"]["value"]
    assert found["command", "wherry"]["of_limit"] == found["command", "wherry"]["ratio"]["python"]
    size = found["size", "wherry"]
    assert size["value"] == size["own"] + sum(size["beside_torch"].values())
    assert {"numpy", "pydantic"} <= set(size["beside_torch"]) and "torch" not in size["beside_torch"]
    shown = capsys.readouterr().out
    assert "torch itself" in shown and _narrow(shown)


def test_a_peer_that_is_broken_has_a_row_with_the_reason(tmp_path, capsys, monkeypatch):
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("import sys\nsys.nothing\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(imports, "_installed", lambda name, of=imports._installed: name != "deepspeed" and of(name))
    broken = ("deepspeed", "import deepspeed")
    monkeypatch.setattr(imports, "IMPORTS", {"deepspeed": broken, "wherry, engine": ("sys", "import json")})
    commands = {"deepspeed": ("deepspeed", ["-m", "deepspeed"]), "python": ("sys", ["-V"])}
    monkeypatch.setattr(imports, "COMMANDS", commands)
    path = tmp_path / "imports.json"
    assert imports.main(["--quick", "--rounds", "1", "--json", str(path)]) == 0
    said = "it is installed, and ended with status 1: AttributeError: module 'sys' has no attribute 'nothing'"
    for what, reason in (("import", said), ("command", said), ("size", "deepspeed was not installed by pip: ")):
        assert _rows(path, measure=what)["deepspeed"]["reason"].startswith(reason)
    assert _rows(path, measure="import")["wherry, engine"]["value"] > 0
    assert f"deepspeed: {said[:40]}" in capsys.readouterr().out


def test_a_peer_that_does_not_end_has_a_row_with_the_reason(monkeypatch):
    monkeypatch.setattr(imports, "TIMEOUT", 0.2)
    asked = {"slow": ("sys", ["-c", "import time; time.sleep(60)"])}
    (row,) = imports._rows("command", asked, imports.command_once, 1)
    assert row["reason"] == "it is installed, and had not ended after 0.2 s"


def test_offloaded_steps_beside_their_bound(tmp_path, no_deepspeed, monkeypatch, capsys):
    monkeypatch.setattr(offload_step, "POLICIES", ("at_step", "delayed"))
    monkeypatch.setattr(offload_step, "CLIPS", {"at_step": 1.0, "delayed": 1.0})
    monkeypatch.setattr(systems, "device_type", lambda: "cuda")  # its ranks do not see a GPU, nor may its bound
    path = tmp_path / "offload.json"
    smallest = ["--quick", "--models", "tiny", "--dtypes", "fp32", "--rounds", "1", "--steps", "2", "--json", str(path)]
    chosen = ["--places", "2-cpu", "--peers", "deepspeed-2-cpu", "--ranks", "2", "--path", str(tmp_path)]
    assert offload_step.main([*smallest, *chosen]) == 0
    assert list(_rows(path, measure="step", ranks=1)) == ["plain"]
    rows = _rows(path, measure="step", ranks=2)
    ours = rows["wherry-2-cpu at_step"]
    assert ours["of_limit"] == pytest.approx(ours["bound_s"] / ours["value"])
    assert ours["bound_by"] in ("compute", "host_update")  # whichever rate was the lower when both were measured
    late = rows["wherry-2-cpu delayed"]
    assert ours["loss_difference"] <= systems.SAME_LOSS < late["loss_difference"]
    assert late["of_limit"] == pytest.approx(late["bound_s"] / late["value"])
    assert rows["deepspeed-2-cpu"]["reason"].startswith("deepspeed is not installed")
    assert {"matrix", "host_update", "disk_read", "disk_write"} <= {
        row["case"].get("rate") for row in json.loads(path.read_text())["rows"]
    }
    assert str(tmp_path) not in path.read_text() and _narrow(capsys.readouterr().out)


def test_a_package_without_metadata_has_a_reason_too(tmp_path, monkeypatch):
    folder = tmp_path / "deepspeed" / "runtime" / "zero"
    folder.mkdir(parents=True)
    (tmp_path / "deepspeed" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)

    def missing(name):
        raise systems.metadata.PackageNotFoundError(name)

    reason = "the deepspeed on the path, which pip has not installed, has no super_offload"
    monkeypatch.setattr(systems.metadata, "version", missing)
    assert systems.cannot_run("deepspeed-3-super") == reason
    (folder / "offload_config.py").write_text("    super_offload: bool = False\n")
    assert systems.cannot_run("deepspeed-3-super") is None
    assert systems.cannot_run("deepspeed-3-reflow").endswith("has no reflow")


def test_peers_are_those_in_the_places_of_ours():
    assert offload_step.peers_in(offload_step.PLACES) == list(offload_step.PEERS)
    there = ["fsdp2-cpu", "fsdp2-nvme", "deepspeed-3-cpu", "deepspeed-3-nvme", "deepspeed-3-nvme-groups"]
    assert offload_step.peers_in(["3-cpu", "3-nvme"]) == there
    assert offload_step.peers_in(["2-cpu"]) == ["deepspeed-2-cpu"]
    assert systems.cannot_run("fsdp2-nvme") == "FSDP2 keeps states on the device or on the host"
    assert systems.cannot_run("fsdp2-cpu") is None and systems.TITLES["fsdp2-nvme"] == "FSDP2 disk"


def test_what_is_asked_for_makes_the_entries_and_the_name_of_the_file():
    def named(clip, ranks):
        policies = ("at_step", "in_backward")
        found = offload_step.entries_of("tiny", "fp32", clip, ("3-cpu",), ("deepspeed-3-cpu",), 1, policies, ranks)
        return [(entry.ranks, entry.label, entry.recipe.clip) for entry in found]

    # An update in the backward has no clipping, and peers beside it none either.
    clipped = ["wherry-3-cpu at_step", "deepspeed-3-cpu"]
    assert named(1.0, [1, 2]) == [(1, "plain", 1.0), *((n, label, 1.0) for n in (1, 2) for label in clipped)]
    unclipped = ["plain", "wherry-3-cpu at_step", "wherry-3-cpu in_backward", "deepspeed-3-cpu"]
    assert named(0.0, [1]) == [(1, label, 0.0) for label in unclipped]
    assert offload_step._part(["10m"], None) == "" and offload_step._part(["125m"], [2]) == "125m-2-rank"


def test_memory_beside_the_formula(tmp_path, capsys):
    path = tmp_path / "memory.json"
    smallest = ["--quick", "--models", "tiny", "--dtypes", "fp32", "--rounds", "1", "--ranks", "2", "--json", str(path)]
    assert memory.main([*smallest, "--systems", "wherry-2"]) == 0
    row = _rows(path)["wherry-2"]
    parameters = steps.MODELS["tiny"].parameters
    # Stage 2 of two ranks: weights twice, gradients and optimizer once.
    assert row["formula_bytes"] == parameters * (2 * 4 + 4 + 8)
    assert row["value"] > 0 and row["of_limit"] == pytest.approx(row["formula_bytes"] / row["value"])
    assert list(_rows(path)) == ["wherry-2"] and row["loss_difference"] <= systems.SAME_LOSS
    assert _narrow(capsys.readouterr().out)


def test_formulas_by_placement():
    of = bounds.states_bytes
    assert of("wherry-0", 10, 4, "fp32") == 10 * 4 * 16
    assert of("wherry-3", 10, 4, "fp32") == of("fsdp2", 10, 4, "fp32") == 10 * 16
    assert of("wherry-1", 10, 4, "bf16") == 10 * (4 * 2 + 4 * 2 + 12)
    assert of("wherry-3-nvme", 10, 1, "bf16") == 10 * 2
    assert of("ddp", 10, 2, "bf16") == 10 * 2 * 16


def test_building_and_loading(tmp_path, no_deepspeed):
    path = tmp_path / "construction.json"
    chosen = "plain,wherry-init,fsdp2-meta,deepspeed-init,plain-load,wherry-load,fsdp2-load,deepspeed,deepspeed-load"
    smallest = ["--quick", "--models", "tiny", "--rounds", "1", "--json", str(path)]
    assert construction.main([*smallest, "--systems", chosen]) == 0
    build, load = _rows(path, work="build", measure="time"), _rows(path, work="load", measure="memory")
    assert build["wherry-init"]["value"] > 0 and set(build["wherry-init"]["ratio"]) == {"plain", "fsdp2-meta"}
    assert build["deepspeed"]["reason"].startswith("deepspeed is not installed")
    assert load["plain-load"]["value"] > 0
    assert set(load["wherry-load"]["ratio"]) == {"plain-load", "fsdp2-load"}
    assert load["deepspeed-load"]["reason"].startswith("deepspeed is not installed")
    # All of them have the weights of the file.
    loaded = _rows(path, work="load and step", measure="time")
    losses = {name: row["loss"] for name, row in loaded.items() if row["reason"] is None}
    assert len(losses) == 3
    assert losses == pytest.approx(dict.fromkeys(losses, losses["plain-load"]), rel=1e-5)
    assert build["wherry-init"]["of_limit"] == pytest.approx(build["plain"]["value"] / build["wherry-init"]["value"])
    for measure in ("time", "memory"):
        within = _rows(path, work="build within Init", ranks=construction.RANKS, measure=measure)
        assert list(within) == ["wherry-init", "fsdp2-meta", "deepspeed-init"]
        assert within["wherry-init"]["value"] > 0 and set(within["wherry-init"]["ratio"]) == {"fsdp2-meta"}
        assert within["deepspeed-init"]["reason"].startswith("deepspeed is not installed")
    # Both owe the same: half of the model, and its largest module.
    owed = {row["owed_bytes"] for row in within.values() if row["reason"] is None}
    assert len(owed) == 1 and min(owed) > 4 * steps.MODELS["tiny"].parameters / construction.RANKS


@pytest.mark.parametrize("way", ["plain", "wherry-load", "fsdp2-load"])
def test_what_is_loaded_at_first_use_is_no_part_of_a_build(tmp_path, torch_alone, way):
    # A build in a process that has torch alone; DeepSpeed's own imports take too long here.
    program = (
        "import json, os, sys; from benchmarks import build_worker; from benchmarks.steps import MODELS\n"
        "class Seen(build_worker.BuildWorker):\n"
        "    def _rehearse(self, *arguments):\n"
        "        before, built = set(sys.modules), super()._rehearse(*arguments)\n"
        "        self.there = set(sys.modules)\n"
        "        assert 'torch._dynamo' not in before and ('wherry' in way or 'torch._dynamo' in self.there)\n"
        "        return built\n"
        "way, file = sys.argv[1:]\n"
        "worker, recipe = Seen(), vars(MODELS['tiny'])\n"
        "worker.save(recipe, file)\n"
        "found = worker.build(way, recipe, file)['stepped']\n"
        "assert found['first_use_s'] > 0 and found['peak_bytes'] >= found['empty_bytes'], found\n"
        "late = sorted(set(sys.modules) - worker.there)\n"
        "assert not late, late"
    )
    done = torch_alone.run("-c", program, way, tmp_path / "weights.safetensors", folder=bench.ROOT, launched=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("system", ["wherry-3", "fsdp2"])
def test_what_is_imported_is_no_part_of_what_a_system_takes(torch_alone, system):
    program = (
        "import sys; from benchmarks import worker; from benchmarks.steps import MODELS; import wherry.train.model\n"
        "resident, seen = worker.resident_bytes, []\n"
        "worker.resident_bytes = lambda: seen.append(set(sys.modules)) or resident()\n"
        "worker.Worker().build(sys.argv[1], vars(MODELS['tiny']), 1)\n"
        "assert 'torch._dynamo' in seen[0]\n"
        "late = sorted(set(sys.modules) - seen[0])\n"
        "assert len(late) < 5, late"  # torch's profiler looks for its devices
    )
    done = torch_alone.run("-c", program, system, folder=bench.ROOT, launched=False)
    assert done.returncode == 0, done.stderr


def test_scaling_with_sizes_and_ranks(tmp_path, capsys):
    path = tmp_path / "scaling.json"
    smallest = ["--quick", "--rounds", "1", "--steps", "1", "--json", str(path)]
    chosen = ["--sizes", "1m", "--systems", "wherry-3", "--ranks", "2,64", "--dry-model", "gpt2-10m"]
    assert scaling.main([*smallest, *chosen]) == 0
    rows = [row for row in json.loads(path.read_text())["rows"] if row["case"].get("stage") == 3]
    assert _narrow(capsys.readouterr().out)
    peaks = {row["case"]["ranks"]: row["value"] for row in rows if row["case"]["measure"] == "peak of a rank"}
    assert peaks[64] < peaks[2]
    (few, many) = (row for row in rows if row["case"]["measure"] == "collectives of a step")
    assert few["calls"] == many["calls"]  # a rank's collectives do not grow with their number
    # What the stage must exchange, and no more.
    assert [few["of_limit"], many["of_limit"]] == pytest.approx([1.0, 1.0], rel=0.01)
    assert scaling.SIZES["1b"].parameters == pytest.approx(1e9, rel=0.05)
    # What stays whole at stage 3 is each system's own default.
    for size in scaling.SIZES.values():
        assert systems.config_of(systems.PLACES["3"], size, 1)["zero_optimization"] == {"stage": 3}


def test_a_model_that_is_unknown_is_refused_before_sizes_are_measured(monkeypatch):
    monkeypatch.setattr(scaling, "by_size", lambda *_: pytest.fail("a size was measured"))
    with pytest.raises(WherryError, match=r"expected a preset .* got 'nosuch'"):
        scaling.main(["--quick", "--dry-model", "nosuch"])


def test_a_size_that_memory_has_no_room_for_is_not_tried(monkeypatch):
    monkeypatch.setattr(bounds, "free_host_memory", lambda: 2**30)
    step, memory = scaling.by_size("1b", ["wherry-3"], 1, 1)
    assert step["reason"] == memory["reason"] == "needs 16 GiB of memory, 1 GiB are free"


SCRIPTS = [
    *("overhead", "steps", "imports", "gpu", "gpu_offload", "offload_step", "memory", "construction", "scaling"),
    *("accumulation", "checkpoint", "activations", "tiling", "forecast"),
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_stand_alone_and_are_found_by_the_command(name, capsys, tmp_path):
    script = bench.ROOT / "benchmarks" / f"{name}.py"
    alone = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert alone.returncode == 0 and "--quick" in alone.stdout, alone.stderr
    with pytest.raises(SystemExit) as ended:
        wherry(["bench", name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == alone.stdout and _narrow(alone.stdout)


@pytest.mark.parametrize("script", ["report", "peers"])
def test_what_measures_nothing_ends_as_the_command_does_too(script):
    text = (bench.ROOT / "benchmarks" / f"{script}.py").read_text()
    assert text.endswith('if __name__ == "__main__":\n    alone(main)\n')


def test_a_mistake_of_a_user_is_a_line_for_a_script_by_itself(capsys):
    def mistaken():
        raise WherryError("there is no such thing")

    with pytest.raises(SystemExit) as ended:
        alone(mistaken)
    assert ended.value.code == 2 and capsys.readouterr().err.endswith(": there is no such thing\n")
    command = [sys.executable, bench.ROOT / "benchmarks" / "cpu_adam.py", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "WHERRY_ISA": "abacus"})
    assert done.returncode == 2 and "Traceback" not in done.stderr
    # Before it there may be a line that says that the machine is busy.
    assert done.stderr.splitlines()[-1].startswith("wherry: WHERRY_ISA='abacus': expected one of ")


def test_activations(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fragments, "lengths_of", lambda longest, steps: [longest // 2, longest])
    path = tmp_path / "activations.json"
    assert activations.main(["--quick", "--rounds", "1", "--json", str(path)]) == 0
    rows, unused = _rows(path, batch=2), _rows(path, measure="fragments")
    peaks = {name: row["peak_bytes"] for name, row in rows.items()}
    assert peaks["recompute"] < peaks["recompute every second"] < peaks["keep"]
    assert peaks["recompute, host"] <= peaks["recompute"] and peaks["offload to host"] < peaks["keep"]
    assert peaks["partition, 2 ranks"] < peaks["recompute, 2 ranks"] < peaks["keep, 2 ranks"]
    assert list(unused) == list(fragments.SYSTEMS) and all(row["excess_bytes"] > 0 for row in unused.values())
    shown = capsys.readouterr().out
    assert "recompute, contiguous" in shown and "never used" in shown and "auto, in the memory of half" in shown
    assert _narrow(shown)


def test_a_layer_beyond_the_budget(tmp_path, capsys):
    path = tmp_path / "tiling.json"
    assert tiling.main(["--quick", "--steps", "2", "--path", str(tmp_path), "--json", str(path)]) == 0
    width, budget = tiling.QUICK
    rows = _rows(path, measure="live", layer_bytes=4 * width * width)
    live = rows["wherry-3-nvme"]
    assert 0 < live["value"] <= budget and live["of_limit"] == pytest.approx(live["value"] / budget)
    assert live["tiles"] > width * width * 4 / budget and live["losses"][1] < live["losses"][0]
    assert [child.name for child in tmp_path.iterdir()] == ["tiling.json"]
    shown = capsys.readouterr().out
    assert "live parameters" in shown and _narrow(shown)


def test_saving_beside_the_same_bytes_in_one_file(tmp_path, capsys):
    path = tmp_path / "checkpoint.json"
    chosen = f"{checkpoint.LIMIT},wherry"
    smallest = ["--quick", "--models", "tiny", "--ranks", "2", "--path", str(tmp_path), "--json", str(path)]
    assert checkpoint.main([*smallest, "--systems", chosen]) == 0
    for measure in checkpoint.MEASURES:
        bare, ours = _rows(path, measure=measure).values()
        assert ours["of_limit"] == pytest.approx(bare["value"] / ours["value"]) and bare["of_limit"] is None
    # Three times the weights, and no more than that, of both ranks together.
    assert bare["written_bytes"] == bare["states_bytes"] == 3 * 4 * steps.MODELS["tiny"].parameters
    shown = capsys.readouterr().out
    assert "save MB/s" in shown and _narrow(shown)


def test_forecast(tmp_path, capsys, monkeypatch):
    from wherry.plan.machine import described, known

    host = described(known("h100"), gpus=0, matrix=1e11, stream=20 * 10**9)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    seen = []
    monkeypatch.setattr(
        forecast.probe, "this_machine", lambda *_, **__: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]) or host
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "forecast.json"
    smallest = ["--quick", "--models", "tiny", "--dtypes", "fp32", "--ranks", "2", "--places", "2,3", "--steps", "2"]
    assert forecast.main([*smallest, "--path", str(tmp_path), "--json", str(path)]) == 0
    assert seen == [""]  # a GPU's forecast is none of steps on the CPU
    rows = _rows(path, measure="step")
    plain = rows.pop("plain")
    assert plain["case"]["ranks"] == 1 and plain["of_limit"] is None and "predicted_s" not in plain
    assert list(rows) == ["wherry-2", "wherry-3"]
    for row in rows.values():
        assert row["of_limit"] == pytest.approx(plain["value"] / row["value"])
        assert row["off"] == pytest.approx(row["predicted_s"] / row["value"] - 1) and row["terms"]["compute"] > 0
    shown = capsys.readouterr().out
    assert "predicted ms" in shown and _narrow(shown)
