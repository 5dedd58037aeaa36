"""The measures that all benchmarks share."""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest
from tests.cli.programs import wait_for

from benchmarks import (
    accumulation,
    checkpoint,
    forecast,
    gpu,
    gpu_offload,
    memory,
    offload_step,
    steps,
    systems,
    tiling,
)
from benchmarks.rooms import Room, RoomFailed, reason_in
from wherry.cli import main as wherry
from wherry.errors import WherryError
from wherry.observe import bench, machine
from wherry.tiers import disk_bench


def test_turns_are_interleaved_and_no_subject_is_always_first():
    calls: list[str] = []
    subjects = {name: lambda name=name: calls.append(name) or name.upper() for name in "abc"}
    found = bench.interleave(subjects, 3, "letters")
    assert calls == list("abcbcacab")
    assert found == {"a": ["A"] * 3, "b": ["B"] * 3, "c": ["C"] * 3}


def test_medians_spread_and_ratios():
    summary = bench.Summary.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (summary.median, summary.count) == (3.0, 5)
    assert summary.spread == pytest.approx((4 - 2) / 3)
    assert bench.Summary.of([7.0]) == bench.Summary(7.0, 0.0, 1)
    # The second round is slow for both: what counts is the ratio within a round.
    assert bench.paired_ratio([2.0, 20.0, 2.2], [1.0, 10.0, 1.0]) == 2.0


def test_ratios_say_how_many_times_as_good_a_row_is():
    case = {"numel": 10}
    rows = [
        bench.row(case, "limit", "s", [1.0, 1.0, 1.0]),
        bench.row(case, "ours", "s", [2.0, 20.0, 2.0]),
        bench.row(case, "theirs", "s", [4.0, 40.0, 4.0]),
        bench.row(case, "absent", "s", reason="not here"),
        bench.row({"numel": 11}, "ours", "s", [9.0]),
    ]
    bench.compare(rows, "limit")
    limit, ours, theirs, absent, other = rows
    assert ours["ratio"] == {"theirs": 2.0} and theirs["ratio"] == {"ours": 0.5}
    assert ours["of_limit"] == 0.5 and limit["of_limit"] is None and limit["ratio"] == {}
    assert absent["ratio"] == {} and absent["value"] is None and absent["reason"] == "not here"
    assert other["ratio"] == {}
    speeds = [bench.row(case, name, "B/s", [value], more_is_better=True) for name, value in (("a", 3.0), ("b", 2.0))]
    bench.compare(speeds)
    assert speeds[0]["ratio"] == {"b": 1.5}


def test_a_difference_below_zero_has_no_ratio():
    case = {"measure": "over plain"}
    rows = [bench.row(case, name, "us", [value]) for name, value in (("a", -3.0), ("b", 2.0))]
    bench.compare(rows)
    assert rows[0]["ratio"] == {"b": None} and rows[1]["ratio"] == {"a": None}


def test_a_machine_is_named_by_what_it_is():
    found = {"cpu": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "cores": 2, "gpu": None}
    assert machine.slug(found) == "intel-xeon-platinum-8481c-2-70ghz-2c"
    assert machine.slug(found | {"gpu": "NVIDIA H200"}) == "intel-xeon-platinum-8481c-2-70ghz-2c-nvidia-h200"


def test_processors_of_one_name_are_told_apart(tmp_path, monkeypatch):
    def cpuinfo(model, *flags):
        lines = ["processor\t: 0", "cpu family\t: 6", f"model\t\t: {model}", "model name\t: Xeon", "stepping\t: 8"]
        lines += [f"flags\t\t: fpu {' '.join(flags)}", "", "processor\t: 1", ""]
        (tmp_path / "cpuinfo").write_text("\n".join(lines))
        return machine._cpu_model(tmp_path / "cpuinfo")

    old, new = cpuinfo(106), cpuinfo(143, "amx_bf16", "amx_tile")
    assert (old, new) == ("6-106-8", "6-143-8 amx")
    (tmp_path / "cpuinfo").write_text("Processor: ARM\n")
    assert machine._cpu_model(tmp_path / "cpuinfo") is machine._cpu_model(tmp_path / "none") is None
    described = {"cpu": "Intel(R) Xeon(R) Processor", "cores": 2, "memory_bytes": 2**34, "gpu": None}
    assert machine.may_be_the_same(described, described | {"cpu_model": old})  # a file of before tells nothing
    # The second machine has a file of its own, and the first keeps its name.
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")
    for model in (old, new, old, new):
        monkeypatch.setattr(machine, "describe", lambda model=model: described | {"cpu_model": model})
        results = bench.Results("steps", options(), {})
        results.add(bench.row({}, "a", "s", [1.0]))
        results.close()
    files = {file.name: bench.read(file)["machine"]["cpu_model"] for file in (tmp_path / "results").iterdir()}
    assert files == {"steps-intel-xeon-2c.json": old, "steps-intel-xeon-6-143-8-amx-2c.json": new}


def options(**more):
    given = {"quick": False, "json": None, "arguments": ["--quick"], "load": machine.Load(sample_s=0.02)}
    return argparse.Namespace(**given | more)


def test_files_tell_machine_versions_date_and_load(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")
    quick = bench.Results("name", options(quick=True), {"rounds": 1})
    quick.add(bench.row({}, "a", "s", [1.0]))
    quick.close()
    assert not (tmp_path / "results").exists() and "written" not in capsys.readouterr().out
    results = bench.Results("name", options(), {"rounds": 1}, part="2-rank")
    results.add(bench.row({}, "a", "s", [1.0]))
    (file,) = (tmp_path / "results").iterdir()
    assert json.loads(file.read_text())["complete"] is False  # what was measured outlives a run that is ended
    results.add(bench.row({}, "b", "s", [2.0]))
    results.put(bench.row({}, "b", "s", [3.0, 3.0]))  # measured further
    assert json.loads(file.read_text())["rows"][0]["ratio"] == {"b": 3.0}  # and is compared already
    assert [(row["system"], row["rounds"]) for row in results.rows] == [("a", 1), ("b", 2)]
    results.close()
    assert file.name == f"name-2-rank-{machine.slug(machine.describe())}.json"
    found = json.loads(file.read_text())
    assert found["complete"] and found["rows"][0]["value"] == 1.0 and found["settings"] == {"rounds": 1}
    assert {"cpu", "cores", "memory_bytes", "gpu"} <= set(found["machine"])
    assert {"wherry", "torch", "python", "commit"} <= set(found["versions"])
    assert {"others_before", "others_during", "others_after", "idle"} <= set(found["load"])
    assert found["date"].endswith("+00:00")


def test_a_run_of_a_part_does_not_replace_the_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")

    def run(*measured, ended=False):
        results = bench.Results("name", options(), {})
        for clip, system in measured:
            value = {"reason": "not here"} if system == "absent" else {"values": [1.0]}
            results.add(bench.row({"model": "10m", "clip": clip}, system, "s", **value))
        if not ended:
            results.close()
        return sorted(file.name for file in (tmp_path / "results").iterdir())

    def held():
        rows = json.loads((tmp_path / "results" / file).read_text())["rows"]
        return [(row["case"]["clip"], row["system"]) for row in rows]

    whole = [(1.0, "a"), (1.0, "b"), (0.5, "a"), (0.5, "absent")]
    (file,) = run(*whole)
    beside = f"{file}.new"
    for part, lacking in (
        (whole[:2], "clip 0.5"),
        ([(1.0, "a"), (0.5, "a")], "system b"),
        ([(1.0, "a"), (1.0, "absent"), (0.5, "a")], "system b"),
    ):
        capsys.readouterr()
        assert run(*part) == [file, beside] and held() == whole
        said = capsys.readouterr().out
        assert f"{file} stays: this run has not measured {lacking}, which it has" in said and f"{beside}\n" in said
    assert run(*whole[::-1], ended=True) == [file, beside] and held() == whole
    more = [(1.0, "a"), (0.5, "b"), (1.0, "c")]
    assert run(*more) == [file] and held() == more
    assert capsys.readouterr().out.endswith(f"{file}\n")


def test_a_run_that_is_ended_leaves_the_complete_file_that_it_was_to_replace(tmp_path):
    path = tmp_path / "given.json"
    whole = bench.Results("name", options(json=path), {})
    whole.add(bench.row({}, "a", "s", [1.0]), bench.row({}, "b", "s", [2.0]))
    whole.close()
    ended = bench.Results("name", options(json=path), {})
    ended.add(bench.row({}, "a", "s", [3.0]))
    assert [row["value"] for row in bench.read(path)["rows"]] == [1.0, 2.0]
    beside = bench.read(tmp_path / "given.json.new")  # and what it has measured is kept
    assert not beside["complete"] and [row["value"] for row in beside["rows"]] == [3.0]
    ended.close()  # a part may replace what was named
    assert [row["value"] for row in bench.read(path)["rows"]] == [3.0] and list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_of_a_run_is_named_with_what_to_do(tmp_path):
    good = tmp_path / "good.json"
    results = bench.Results("name", options(json=good), {})
    results.add(bench.row({}, "a", "s", [1.0]))
    results.close()
    found = bench.read(good)
    row = found["rows"][0]
    for wrong, expected in (
        (good.read_text()[:-20], "is not a whole JSON file"),
        ([], "got list in the place of a benchmark's file; expected an object"),
        ({"benchmark": "name", "rows": [{}]}, "the keys date, quick, machine, "),
        (found | {"machine": {}}, "the keys cpu, cores, memory_bytes of machine are missing"),
        (found | {"rows": {}}, "rows of a benchmark's file is dict; expected list"),
        (found | {"date": None}, "date of a benchmark's file is NoneType; expected str"),
        (found | {"rows": [row | {"value": "1"}]}, "value of row 0 is str; expected int or float or NoneType"),
        (found | {"rows": [row | {"value": 0.9}]}, "row 0 has value 0.9; expected the median of its values, 1"),
        (found | {"rows": [row | {"values": 3}]}, "values of row 0 is 3; expected a list of numbers"),
        (found | {"rows": [row | {"values": ["1"]}]}, r"values of row 0 is \['1'\]; expected a list of numbers"),
        (found | {"rows": [row, {}]}, "the keys case, system, .* of row 1 are missing"),
        (found | {"rows": [row | {"reason": "not here"}]}, "row 0 has value 1.0 and reason 'not here'"),
    ):
        path = tmp_path / "wrong.json"
        path.write_text(wrong if isinstance(wrong, str) else json.dumps(wrong))
        with pytest.raises(WherryError, match=f"wrong.json: {expected}.*; take the file out of its folder, and "):
            bench.read(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(WherryError, match=r"wrong\.json: is not a whole JSON file"):
        bench.read(path)


def test_an_install_without_sources_says_that_nothing_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "missing" / "results")
    bench.Results("name", options(quick=True), {})
    bench.Results("name", options(json=tmp_path / "given.json"), {})
    assert capsys.readouterr().err == ""
    bench.Results("name", options(), {})
    (said,) = capsys.readouterr().err.splitlines()
    assert "installed without its sources" in said and "--json PATH" in said


def test_folders_of_this_machine_are_not_published(monkeypatch):
    monkeypatch.setattr(machine, "_SAMPLE_S", 0.0)
    parser = bench.parser("name", "")
    parser.add_argument("--path")
    found = bench.parse(parser, ["--path", "/home/somebody/disk", "--quick"])
    assert found.arguments == ["--path", "disk", "--quick"] and found.path == "/home/somebody/disk"
    for said, published in (
        ("No such file: '/home/somebody/disk/swap.bin'", "No such file: 'swap.bin'"),
        ("1 GB/s and/or a/b/c, https://a.b/c/d, ~/x/y", "1 GB/s and/or a/b/c, https://a.b/c/d, ~/x/y"),
    ):
        assert bench.row({}, "a", "s", reason=said)["reason"] == published


def test_others_at_work_are_seen():
    spin = "import time\nend = time.monotonic() + 90\nwhile time.monotonic() < end: pass"
    load = machine.Load(sample_s=0.0)
    # A child of a child that has ended is nobody's: to this process it is another.
    shell = f"{sys.executable} -c '{spin}' >/dev/null & echo $!"
    pid = int(subprocess.run(["sh", "-c", shell], stdout=subprocess.PIPE, text=True).stdout)
    seen = {}

    def at_work():
        seen.update(load.end())
        return seen["others_during"] > 0.2

    try:
        wait_for(at_work)
    finally:
        os.kill(pid, signal.SIGKILL)
    assert seen["idle"] is False


def test_programs_beside_this_python_are_found_by_what_peers_compile(monkeypatch):
    monkeypatch.setattr(machine, "_SAMPLE_S", 0.0)
    monkeypatch.setenv("PATH", "/bin")
    for _ in range(2):
        bench.parse(bench.parser("name", ""), [])
        assert os.environ["PATH"] == os.pathsep.join([os.path.dirname(sys.executable), "/bin"])


def test_choices_are_checked():
    parse = bench.listed(("ddp", "fsdp2"))
    assert parse("fsdp2, ddp") == ["fsdp2", "ddp"]
    for wrong in ("ddp,dpd", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="expected some of ddp, fsdp2"):
            parse(wrong)
    assert bench.listed(("ddp",), or_none=True)("none") == []
    with pytest.raises(argparse.ArgumentTypeError, match="got none; expected some of ddp, fsdp2"):
        parse("none")
    for wrong in ("0", "-1", "two", "1.5", "inf"):
        with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
            bench.positive(wrong)
    assert bench.positives("1e6, 3") == [1_000_000, 3]


@pytest.mark.parametrize("script", [accumulation, offload_step, gpu, disk_bench])
def test_peers_are_chosen_alike(script, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(machine, "_SAMPLE_S", 0.0)
    for wrong, got in (("dpd", "dpd"), (f"none,{script.PEERS[0]}", "none"), ("", "nothing")):
        with pytest.raises(SystemExit):
            script.main(["--quick", "--path", str(tmp_path), "--peers", wrong])
        expected = f"argument --peers: got {got}; expected some of {', '.join(script.PEERS)}, or none\n"
        assert capsys.readouterr().err.endswith(expected)
    said = []
    monkeypatch.setattr(bench, "parse", lambda parser, argv: said.append(parser.parse_args(argv)) or sys.exit())
    with pytest.raises(SystemExit):
        script.main(["--path", str(tmp_path), "--peers", "none"])
    assert said[0].peers == []


def test_no_peers_are_none_of_those_in_the_places_either(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_SAMPLE_S", 0.0)
    taken = []
    monkeypatch.setattr(offload_step.bounds, "measure", lambda *_, **__: (None, []))
    monkeypatch.setattr(offload_step, "measure", lambda entries, *_: taken.extend(entries) or [])
    chosen = ["--quick", "--models", "tiny", "--dtypes", "fp32", "--places", "3-cpu", "--path", str(tmp_path)]
    for more, peers in ((["--peers", "none"], set()), ([], {"fsdp2-cpu", "deepspeed-3-cpu"})):
        taken.clear()
        assert offload_step.main([*chosen, *more]) == 0
        assert {entry.system for entry in taken} == {"plain", "wherry-3-cpu"} | peers


def test_where_nothing_can_be_written_is_told_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "_SAMPLE_S", 0.0)
    missing = tmp_path / "missing"
    for script in (accumulation, checkpoint, forecast, gpu, gpu_offload, memory, offload_step, tiling):
        with pytest.raises(SystemExit) as refused:
            script.main(["--quick", "--path", str(missing)])
        assert refused.value.code == 2
        assert f"argument --path: '{missing}' is not a folder" in capsys.readouterr().err
    assert bench.folder(str(tmp_path)) == str(tmp_path)
    monkeypatch.setattr(bench.os, "access", lambda path, mode: False)
    with pytest.raises(argparse.ArgumentTypeError, match="nothing can be written in"):
        bench.folder(str(tmp_path))
    with pytest.raises(SystemExit):
        bench.parse(bench.parser("name", ""), ["--json", str(tmp_path)])
    assert "is a folder; expected the name of a file" in capsys.readouterr().err


def test_a_file_that_cannot_be_made_is_told_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "_SAMPLE_S", 0.0)
    (tmp_path / "file").touch()
    for inside in ("x.json", "folder/x.json"):
        with pytest.raises(SystemExit) as refused:
            bench.parse(bench.parser("name", ""), ["--json", str(tmp_path / "file" / inside)])
        assert refused.value.code == 2 and f"cannot be written: {tmp_path}/file is no folder" in capsys.readouterr().err
    new = tmp_path / "not" / "there" / "x.json"
    assert bench.parse(bench.parser("name", ""), ["--json", str(new)]).json == new  # its folders are made
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")
    (tmp_path / "results").touch()
    with pytest.raises(WherryError, match=r"bench name: .* cannot be written: .*results is no folder; make"):
        bench.Results("name", options(), {})
    (tmp_path / "results").unlink()
    monkeypatch.setattr(bench.os, "access", lambda path, mode: False)
    with pytest.raises(WherryError, match=r"bench name: '.*' cannot be written: nothing can be .*; make it writable"):
        bench.Results("name", options(), {})


@pytest.mark.parametrize("script", [steps, offload_step, forecast, checkpoint])
def test_ranks_among_which_a_model_s_batch_does_not_divide_are_refused(script, monkeypatch, capsys):
    monkeypatch.setattr(machine, "_SAMPLE_S", 0.0)
    with pytest.raises(SystemExit):
        script.main(["--quick", "--models", "125m", "--ranks", "1,4"])
    expected = "--ranks 4: the 2 sequences of a step of 125m do not divide among them"
    assert expected in capsys.readouterr().err
    steps.check_ranks(argparse.ArgumentParser(), ["10m"], [4])


def test_the_reason_is_the_last_error_of_a_log():
    log = "Traceback:\n  File x\nOSError: one\n\nTraceback:\nai.parts.BuildError: no   ninja\nbye\n"
    assert reason_in(log, 1) == "ai.parts.BuildError: no ninja"
    path = "/home/somebody/disk/" + 20 * "very-long/" + "swap.bin"
    assert reason_in(f"DiskError: {path}: no space is left", 1) == "DiskError: swap.bin: no space is left"
    assert reason_in("[rank1]: RuntimeError: gone", 1) == "RuntimeError: gone"
    assert reason_in("Killed", -9).startswith("ended by signal 9, ") and reason_in("", -11) == "ended by signal 11"
    assert reason_in("", 3) == "ended with status 3"


def test_a_room_that_fails_says_why_and_ends_all_its_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHMARK_DISK", str(tmp_path))
    with Room(ranks=2) as room:
        processes = list(room._processes)
        (folder,) = tmp_path.iterdir()
        (folder / "swap").write_bytes(b"left behind")
        shared = Path(f"/dev/shm/deepspeed_allreduce_buffer_0_127.0.0.1_{room._port}_0")
        if shared.parent.is_dir():
            shared.touch()
        with pytest.raises(RoomFailed, match="KeyError: 'nothing'"):
            room.ask(do="time", system="nothing", steps=1)
    assert all(process.poll() is not None for process in processes)
    assert not list(tmp_path.iterdir())
    assert not shared.exists()


STARTS_ANOTHER = """
import subprocess, sys
sys.stdin.readline()
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
sys.stdin.read()
"""


def test_what_a_rank_has_started_ends_with_it(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(STARTS_ANOTHER)
    with Room(1, worker=worker) as room:
        (pid,) = room.ask()
        child = psutil.Process(pid)
    deadline = time.monotonic() + 60
    while not _has_ended(child):
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.01)


def _has_ended(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # nobody may be there to take its status
    except psutil.NoSuchProcess:
        return True


def test_a_room_that_does_not_answer_is_given_up():
    with Room(ranks=1) as room, pytest.raises(RoomFailed, match="no answer in time"):
        room.ask(timeout=0.0, do="time", system="nothing", steps=1)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_bench_installs_what_the_project_says_that_benchmarks_need(tmp_path):
    (tmp_path / ".installed").touch()
    command = ["make", "--dry-run", "bench", f"VENV={tmp_path}"]
    said = subprocess.run(command, cwd=bench.ROOT, capture_output=True, text=True, check=True).stdout
    (installs,) = (line for line in said.splitlines() if "-m pip" in line)
    assert "-c constraints.txt --no-build-isolation -e '.[bench]' && " in installs
    extras = tomllib.loads((bench.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = (bench.ROOT / "constraints.txt").read_text()
    for requirement in extras["bench"]:
        assert f"\n{re.split('[<>=]', requirement)[0]}==" in pinned


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("fails", "status", "after"), [("none", 0, True), ("adam", 1, True), ("adam", 130, False)])
def test_make_bench_goes_on_after_a_measure_that_fails_and_ends_when_it_is_interrupted(tmp_path, fails, status, after):
    """In an environment that is there already, whose command writes down what it is asked for."""
    command = tmp_path / "bin" / "wherry"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\necho "$1 $2" >> {tmp_path}/asked\ntest "$2" != {fails} || exit {status}\n')
    command.chmod(0o755)
    for name in (".installed", ".peers"):
        (tmp_path / name).touch()
    done = subprocess.run(["make", "bench", f"VENV={tmp_path}"], cwd=bench.ROOT, capture_output=True, text=True)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert (done.returncode == 0) is (status == 0), done.stderr
    assert asked[0] == "bench adam" and (len(asked) > 10 and asked[-1] == "bench imports") is after


def test_what_make_bench_asks_for_is_understood(monkeypatch):
    asked = re.findall(r"^\tmeasure (.*); \\$", (bench.ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert len(asked) > 10
    monkeypatch.chdir(bench.ROOT)
    said = []
    monkeypatch.setattr(bench, "parse", lambda parser, argv: said.append(parser.parse_args(argv)) or sys.exit())
    for words in asked:
        with pytest.raises(SystemExit) as ended:
            wherry(["bench", *words.split()])
        assert ended.value.code is None, words
    assert all(options.quick for options in said) and len(said) == len(asked)


def test_a_lock_that_goes_while_it_is_looked_at_is_nobodys(tmp_path, monkeypatch):
    """DeepSpeed's processes take theirs away themselves, where they are not killed."""
    old, gone = tmp_path / "old" / "lock", tmp_path / "gone" / "lock"
    for lock in (old, gone):
        lock.parent.mkdir()
        lock.touch()
        os.utime(lock, (0, 0))
    look = Path.stat

    def stat(path, **how):
        if path == gone:
            gone.unlink()
        return look(path, **how)

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter([gone, old]))
    monkeypatch.setattr(psutil, "process_iter", lambda names: iter(()))
    monkeypatch.setattr(Path, "stat", stat)
    systems.remove_dead_locks()
    assert not os.path.exists(old) and not os.path.exists(gone)
