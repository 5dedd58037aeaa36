"""Measurements on a GPU: their bounds, and parts that run here at toy size, end in time and leave their rows."""

from __future__ import annotations

import doctest
import json
from dataclasses import replace

import pytest

from benchmarks import bounds, gpu, harness
from benchmarks.processes import TOO_LATE, Failed
from benchmarks.steps import LARGE, MODELS
from benchmarks.trace import overlap

pytestmark = pytest.mark.usefixtures("no_programs")
# Bytes a second.
RATES = {"host_memory": 100e9, "device_memory": 1000e9, "up": 20e9, "down": 10e9, "disk_read": 4e9, "disk_write": 2e9}


def test_the_examples_hold():
    for module in (bounds, gpu):
        assert doctest.testmod(module).failed == 0


def test_what_a_step_moves_is_counted_a_parameter():
    def bytes_of(system, **more):
        recipe = replace(MODELS["tiny"], dtype="bf16", **more)
        return {name: amount / recipe.parameters for name, amount in bounds.work_of(system, recipe, gpu=True).items()}

    assert bytes_of("wherry-2-cpu") == {"update": 26, "down": 2, "up": 2}
    # Weights that rest on the host go up for the forward and for the backward.
    assert bytes_of("wherry-3-cpu") == {"update": 26, "down": 2, "up": 2, "up_again": 2}
    assert bytes_of("wherry-3-nvme") == bytes_of("wherry-3-cpu") | {"disk_read": 14, "disk_write": 12}
    assert bytes_of("wherry-2") == {"update": 26}
    assert "up" not in bounds.work_of("wherry-3-nvme", MODELS["tiny"], gpu=False)


# A billion parameters of bf16. On the bus 2 GB down take 0.2 s, 2 GB up 0.1 s.
OPTIMIZER = {"update": 26e9, "down": 2e9, "up": 2e9}
ALL = OPTIMIZER | {"up_again": 2e9}


@pytest.mark.parametrize(
    ("work", "forward", "backward", "waits", "seconds", "by"),
    [
        # 26 and the 2 that go up, behind the backward: 0.28 s, of which the forward hides 0.1.
        (OPTIMIZER, 0.1, 0.3, True, 0.3 + 0.28, "update"),
        # 30 beside everything.
        (OPTIMIZER, 0.05, 0.1, False, 0.30, "update"),
        # Of weights that go up twice, the second time is beside the backward.
        (ALL, 0.1, 0.3, True, 0.3 + 0.28, "update"),
        # 20 GB down take 2 s, while 50 GB go up in 2.5 s: the longer one counts, and not both.
        ({"update": 1e9, "down": 20e9, "up": 30e9, "up_again": 20e9}, 0.1, 0.1, False, 2.5, "up"),
        # On disk 10 bytes are read in 2.5 s and written in 5 s.
        (OPTIMIZER | {"disk_read": 10e9, "disk_write": 10e9}, 0.1, 0.3, True, 5.0, "disk_write"),
        # Where the model computes, the update is in the way: 26 GB of the GPU's own memory.
        ({"update": 26e9}, 0.1, 0.3, True, 0.426, "compute"),
    ],
)
def test_a_bound_is_what_no_step_can_be_sooner_than(work, forward, backward, waits, seconds, by):
    found, longest = bounds.bound(work, RATES, forward, backward, waits=waits)
    assert (found, longest) == (pytest.approx(seconds), by)


def test_without_a_measured_forward_products_stand_for_it():
    for recompute, products, seconds in ((False, 6, (2.0, 4.0)), (True, 8, (2.0, 6.0))):
        recipe = replace(MODELS["tiny"], recompute=recompute)
        assert bounds.computing(recipe, recipe.flops / products) == pytest.approx(seconds)


def test_parts_run_on_the_cpu(tmp_path, script):
    parts = ["facts", "large", "largest"]
    chosen = "compute,wherry-2-cpu,wherry-2-cpu:before_use"
    script("gpu.py", "--toy", "--steps", 1, "--json", tmp_path, *parts, "--systems", chosen)
    files = {part: harness.read(tmp_path / f"{part}.json") for part in parts}
    assert all(file["complete"] for file in files.values())
    rates = [[row for row in file["rows"] if "rate" in row["case"]] for file in files.values()]
    # What one part has measured, the next has not measured again.
    assert {row["from"] for row in rates[1]} == {"facts"} and len(rates[1]) == len(rates[0]) == 4
    assert files["facts"]["facts"]["memory"]["in use"]["available"] > 0
    checks = [row for row in files["facts"]["rows"] if "check" in row["case"]]
    assert len(checks) == 29 and all(row["good"] for row in checks if row["case"]["check"] != "tests/gpu")
    sizes = [row for row in files["large"]["rows"] if row["case"].get("tokens") == 16]
    compute, _, ours, peak = sizes
    assert ours["trace"] and (tmp_path / "trace-tiny-wherry-2-cpu-before_use.json.gz").exists()
    least = max(compute["forward_s"] + compute["backward_s"], ours["matrix_s"])
    assert ours["compute_from"] == "measured" and ours["bound_s"] > least
    assert peak["host_bytes_per_parameter"] > 0
    assert files["largest"]["rows"][-1]["model"] == "tiny"
    text = "".join(path.read_text() for path in tmp_path.glob("*.json"))
    assert str(tmp_path) not in text


class Answering:
    """Stands for processes: answers at once, as long as `lives`; then it fails."""

    def __init__(self, lives, failure, device_bytes=None):
        self.lives, self.failure, self.device_bytes, self.sent = lives, failure, device_bytes, []

    def __call__(self, ranks, gpu):
        return self

    __enter__ = close = lambda self: self

    def __exit__(self, *error):
        pass

    def send(self, **request):
        self.sent.append(request)

    def answers(self, timeout):
        request = self.sent.pop(0)
        self.lives -= 1
        if self.lives < 0:
            raise self.failure
        memory = {"memory": [], "device_bytes": 1, "peak_bytes": 2, "empty_bytes": 1, "losses": [1.0]}
        if request["do"] == "rates":
            return [{"matrix": [1e12], "host_memory": [1e9]}]
        if request["do"] == "build" and self.device_bytes is not None:
            taken = self.device_bytes(request["system"], request["recipe"].parameters)
            if taken > (request["device_bytes"] or 80e9):
                raise Failed("OutOfMemoryError: so much is not there")
            memory["device_bytes"] = taken
        return [memory | {"seconds": 1.0 if request["do"] == "build" else [1.0], "phases": {}}]


@pytest.mark.parametrize("failure", [Failed(TOO_LATE), Failed("it broke"), KeyboardInterrupt()], ids=str)
def test_a_part_leaves_its_rows_and_names_what_is_missing(failure, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "Processes", Answering(6, failure))
    arguments = ["policies", "--toy", "--json", str(tmp_path), "--systems", "compute,wherry-2-cpu:before_use"]
    if isinstance(failure, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            gpu.main(arguments)
    else:
        assert gpu.main(arguments) == 0
    file = harness.read(tmp_path / "policies.json")
    reasons = [row["reason"] for row in file["rows"] if row["case"].get("measure") == "step"]
    expected = {TOO_LATE: gpu.NO_TIME, "it broke": "it broke", "": "not measured yet"}[str(failure)]
    assert reasons == [None, None, *[expected] * 4]
    assert file["complete"] == (str(failure) != "")
    if file["complete"]:
        assert f"wherry-2-cpu:before_use: {expected}" in capsys.readouterr().out


def test_a_part_takes_over_what_another_has_measured(tmp_path, monkeypatch):
    arguments = ["--toy", "--json", str(tmp_path), "--systems", "wherry-2-cpu:before_use,fsdp2-cpu,deepspeed-3-reflow"]
    answering = Answering(1000, None)
    monkeypatch.setattr(gpu, "Processes", answering)
    assert gpu.main(["policies", "peers", *arguments]) == 0
    rows = harness.read(tmp_path / "peers.json")["rows"]
    assert {row["system"]: row.get("from") for row in rows if row["reason"] is None} == {
        "this machine": "policies",
        "wherry-2-cpu:before_use": "policies",
        "fsdp2-cpu": None,
    }
    assert {row["reason"] for row in rows if row["system"] == "deepspeed-3-reflow"} < {
        "deepspeed is not installed (pip install '.[bench]')",
        "this release of DeepSpeed has no reflow",
    }
    # After other sources were measured all is measured.
    monkeypatch.setattr(gpu, "_sources", lambda: "others")
    assert gpu.main(["peers", *arguments]) == 0
    assert not any("from" in row for row in harness.read(tmp_path / "peers.json")["rows"])


def test_the_largest_model_is_found_in_few_tries(tmp_path, monkeypatch):
    """Two bytes of a parameter on the device and a gigabyte beside them; a host with room for nine billion."""
    taken = {gpu.OURS: lambda count: 2 * count + 1e9, gpu.ALL_OURS: lambda count: count / 10 + 1e9}
    monkeypatch.setattr(gpu, "Processes", Answering(1000, None, lambda system, count: taken[system](count)))
    monkeypatch.setattr(gpu.Run, "host_lacks", lambda self, count: "the host has less" if count > 9e9 else None)
    options = harness.parse(harness.parser(""), ["--json", str(tmp_path / "x.json")])
    options.toy, options.systems = False, None
    results = harness.Results("gpu", options, {}, "largest", tmp_path / "largest.json")
    gpu.largest(gpu.Run("largest", options, tmp_path, float("inf"), results))
    found = {(row["system"], row["case"]["device_GB"]): row for row in results.rows}
    for (system, cap), row in found.items():
        fitting = [name for name in LARGE if MODELS[name].parameters <= 9e9]
        fitting = [name for name in fitting if taken[system](MODELS[name].parameters) <= 1e9 * (cap or 80)]
        assert row["sure"] and row["model"] == fitting[-1], (system, cap)
    assert len(found) == 10 and sum(len(row["tries"]) for row in results.rows) <= 16
    assert "the host has less" in [one["reason"] for one in found[gpu.ALL_OURS, 8]["tries"]]


def test_a_trace_says_how_much_of_the_copying_kernels_hid(tmp_path):
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "ts": 0, "dur": 10}
    copy = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 5, "dur": 10}
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": [kernel, copy, {"ph": "M"}]}))
    assert overlap(tmp_path / "t.json")["hidden"] == pytest.approx(0.5)
