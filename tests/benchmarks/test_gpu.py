"""Measurements on a GPU: their bounds, and parts that run here at toy size, end in time and leave their rows."""

from __future__ import annotations

import doctest
import json
import shlex
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import bounds, gpu, gpu_machine, harness, smoke
from benchmarks.processes import TOO_LATE, Failed
from benchmarks.steps import MODELS
from benchmarks.trace import overlap

pytestmark = pytest.mark.usefixtures("no_programs")
# Bytes a second.
RATES = {"host_memory": 100e9, "device_memory": 1000e9, "up": 20e9, "down": 10e9, "disk_read": 4e9, "disk_write": 2e9}


def test_the_examples_hold():
    assert doctest.testmod(bounds).failed == 0


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
    plain = MODELS["tiny"]
    matrix = plain.flops / 6
    assert bounds.computing(plain, matrix) == pytest.approx((2.0, 4.0))
    # The blocks of the model are computed again, and its head is not.
    head = 6 * plain.batch * plain.length * plain.vocabulary * plain.hidden / matrix
    again = pytest.approx((2.0, 4.0 + (6.0 - head) / 3))
    assert bounds.computing(replace(plain, recompute=True), matrix) == again


class Answering:
    """Stands for processes: answers at once, as long as `lives`; then it fails."""

    def __init__(self, lives, failure):
        self.lives, self.failure, self.sent = lives, failure, []

    def __call__(self, ranks, gpu):
        return self

    __enter__ = close = wait = lambda self, *_: self

    def __exit__(self, *error):
        pass

    def send(self, **request):
        self.sent.append(request)

    def answers(self, timeout):
        request = self.sent.pop(0)
        self.lives -= 1
        if self.lives < 0:
            raise self.failure
        if request["do"] == "probe":
            rates = ("matrix", "host_memory", "up", "down", "both ways", "disk_read", "disk_write")
            return [[smoke.measure(name, "B/s", [1e9]) for name in rates]]
        memory = {"memory": [], "device_bytes": 1, "peak_bytes": 2, "empty_bytes": 1, "losses": [1.0]}
        phases = {"forward_s": [0.25], "backward_s": [0.5]}
        return [memory | {"seconds": 1.0 if request["do"] == "build" else [1.0], "phases": phases}]


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Measure at toy size without processes; return the status."""
    monkeypatch.setattr(gpu, "use_emulated_device", lambda: None)

    def run(answering, *words):
        monkeypatch.setattr(gpu, "Processes", answering)
        return gpu.main(["--toy", "--json", str(tmp_path), *map(str, words)])

    return run


def steps_of(path):
    return [row for row in harness.read(path)["rows"] if row["case"].get("measure") == "step"]


@pytest.mark.parametrize("failure", [Failed(TOO_LATE), Failed("it broke"), KeyError("seconds"), KeyboardInterrupt()])
def test_a_system_that_fails_leaves_the_others_their_rows(failure, tmp_path, measure, capsys):
    """Four requests are answered: the rates, and all of the first system's but its time."""
    words = "tokens", "--systems", "compute,wherry-2-cpu:before_use"
    if isinstance(failure, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            measure(Answering(4, failure), *words)
    else:
        assert measure(Answering(4, failure), *words) == 1
    rows = steps_of(tmp_path / "tokens.json")[:8]
    words = {TOO_LATE: "not within", "it broke": "it broke", "'seconds'": "KeyError: 'seconds'", "": "not measured yet"}
    assert [row["reason"] is None for row in rows] == [True, *[False] * 7]
    assert all(words[str(failure)] in row["reason"] for row in rows[1:])
    assert isinstance(failure, KeyboardInterrupt) or "a size before this one failed: " in rows[2]["reason"]
    file = harness.read(tmp_path / "tokens.json")
    assert file["complete"] == (str(failure) != "")
    if file["complete"]:
        assert f"before_use {rows[-1]['reason']}" in capsys.readouterr().out


def test_a_part_that_raises_or_hangs_costs_itself(tmp_path, measure, monkeypatch):
    def broken(part):
        raise ValueError("this part is broken")

    monkeypatch.setitem(gpu.PARTS, "smoke", lambda part: time.sleep(60))
    monkeypatch.setitem(gpu.PARTS, "bits", broken)
    monkeypatch.setattr(gpu, "GRACE_S", -2.0)
    begun = time.monotonic()
    assert measure(Answering(1000, None), "smoke", "bits", "tokens", "--deadline", 3) == 1
    assert time.monotonic() - begun < 30
    reasons = [harness.read(tmp_path / f"{part}.json")["rows"][-1]["reason"] for part in ("smoke", "bits")]
    assert reasons == ["PartTimeout: did not end within 1 s", "ValueError: this part is broken"]
    assert all(row["reason"] is None for row in steps_of(tmp_path / "tokens.json"))


def test_what_is_wrong_is_the_status(tmp_path, measure, monkeypatch):
    rows = [harness.row({}, "a", "", [0.0], good=True), harness.row({}, "b", "", reason=gpu.NO_TIME)]
    monkeypatch.setitem(gpu.PARTS, "bits", lambda part: part.results.add(*rows))
    assert measure(Answering(0, None), "bits") == 0
    for wrong in (rows[0] | {"good": False}, harness.row({}, "y", "", reason="it broke")):
        monkeypatch.setitem(gpu.PARTS, "bits", lambda part, wrong=wrong: part.results.add(*rows, wrong))
        assert measure(Answering(0, None), "bits") == 1


def test_a_system_that_trains_something_else_is_wrong(tmp_path, measure):
    class Losing(Answering):
        def answers(self, timeout):
            request = self.sent[0]
            [answer] = super().answers(timeout)
            return (
                [answer | {"losses": [2.0]}]
                if request.get("system") == "fsdp2-cpu" and request["do"] == "time"
                else [answer]
            )

    assert measure(Losing(1000, None), "peers", "--systems", "wherry-2-cpu:before_use,fsdp2-cpu") == 1
    ours, theirs = steps_of(tmp_path / "peers.json")[:2]
    assert "loss_difference" not in ours and theirs["loss_difference"] == 1.0 and theirs["good"] is False


def test_a_step_is_a_part_of_both_bounds(tmp_path, measure):
    assert measure(Answering(1000, None), "steps") == 0
    steps = {row["system"]: row for row in steps_of(tmp_path / "steps.json")}
    at_step, in_backward = steps["wherry-2-cpu:at_step"], steps["wherry-2-cpu:in_backward"]
    # Forward and backward of the model alone are 0.75 s; an update that waits for all gradients hides in the forward.
    assert at_step["overlapped_s"] == in_backward["bound_s"] == 0.75 and at_step["bound_by"] == "compute"
    assert steps["compute"]["of_bound"] == steps["compute"]["matrix_s"] > 0


@pytest.mark.usefixtures("forks")
def test_tests_that_ignore_an_interrupt_have_a_row(tmp_path, measure, monkeypatch):
    """Kill them, and keep the results that they have printed."""
    program = "import signal, time; signal.signal(2, signal.SIG_IGN); print('a::b PASSED', flush=True); time.sleep(60)"
    start = gpu.Part.start
    monkeypatch.setattr(gpu.Part, "start", lambda part, *_, **how: start(part, "-c", program, **how))
    monkeypatch.setitem(gpu.PARTS, "bits", lambda part: gpu.Tests(part, "tests").end(2.0))
    assert measure(Answering(0, None), "bits") == 0
    [row] = harness.read(tmp_path / "bits.json")["rows"]
    assert row["value"] == 1 and row["in_time"] is False and row["status"] == -9


@pytest.mark.parametrize("nbytes", [None, 10**12])
def test_memory_that_grows_is_measured_or_set(nbytes, tmp_path, measure, monkeypatch):
    """A machine shows 1 GB of the 16 that a model needs, and 2 when they are touched."""
    monkeypatch.setattr(gpu, "host_memory", lambda: SimpleNamespace(available=10**9))
    monkeypatch.setattr(gpu.Part, "gpu", True)
    answering = Answering(1000, None)
    sent = []
    monkeypatch.setattr(answering, "send", lambda **request: (sent.append(request), answering.sent.append(request)))
    words = ["steps", "--systems", "wherry-2-cpu:before_use"]
    measure(answering, *words, *(("--host-memory", nbytes) if nbytes else ()))
    [row] = steps_of(tmp_path / "steps.json")
    if nbytes:
        assert row["reason"] is None
        assert [one["recipe"].host_memory for one in sent if one["do"] == "build"] == [nbytes]
    else:
        assert "the host has 1 GB of 17; --host-memory says" in row["reason"]
        assert [one["name"] for one in sent if one["do"] == "probe"] == ["memory"]


def test_the_commands_for_a_machine_parse():
    parts = []
    for command, seconds in gpu_machine.calls():
        assert len(command) <= 2000 and seconds <= 600
        [line] = [line for line in command.splitlines() if "benchmarks/gpu.py" in line]
        words = shlex.split(line)
        limit, words = int(words[1]), words[words.index("benchmarks/gpu.py") + 1 :]
        options = gpu.parse(["--toy", *(word.replace("$OUT", "results").replace("build", ".") for word in words)])
        assert limit >= sum(gpu.SECONDS[part] for part in options.parts) and options.json == Path("results")
        parts += options.parts
    assert parts == list(gpu.PARTS) == list(gpu.SECONDS) and sum(gpu.SECONDS.values()) == 720


@pytest.mark.usefixtures("forks")
def test_a_shell_reads_the_commands():
    for command, _ in gpu_machine.calls():
        subprocess.run(["bash", "-n", "-c", command], check=True)


def test_a_part_takes_over_what_another_has_measured(tmp_path, measure, monkeypatch):
    arguments = ["--systems", "wherry-2-cpu:before_use,fsdp2-cpu,deepspeed-3-super"]
    answering = Answering(1000, None)
    assert measure(answering, "steps", "peers", *arguments) == 0
    rows = harness.read(tmp_path / "peers.json")["rows"]
    assert {row["system"]: row.get("from") for row in rows if row["reason"] is None} == {
        "this machine": "steps",
        "wherry-2-cpu:before_use": "steps",
        "fsdp2-cpu": None,
    }
    # Where nothing is left to measure, there are no processes.
    assert measure(Answering(0, Failed("asked")), "peers", "--systems", "wherry-2-cpu:before_use") == 0
    # After other sources were measured all is measured.
    monkeypatch.setattr(gpu, "_sources", lambda: "others")
    assert measure(answering, "peers", *arguments) == 0
    assert not any("from" in row for row in harness.read(tmp_path / "peers.json")["rows"])


def test_a_trace_says_how_much_of_the_copying_kernels_hid(tmp_path):
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "ts": 0, "dur": 10}
    copy = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 5, "dur": 10}
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": [kernel, copy, {"ph": "M"}]}))
    assert overlap(tmp_path / "t.json")["hidden"] == pytest.approx(0.5)
