"""The disk benchmark measures what it says, on files that it removes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from wherry.config import load
from wherry.observe import bench
from wherry.tiers import disk_bench
from wherry.tiers.disk import probe


def test_rows_and_the_table(tmp_path):
    lines: list[str] = []
    rows = disk_bench.run_bench(str(tmp_path), quick=True, size=16 << 20, peers=(), say=lines.append)
    best = probe(str(tmp_path)).backend
    swept = [(row["case"]["queue_depth"], row["case"]["work"]) for row in rows if row["backend"] == best]
    assert swept == [(depth, work) for depth in (8, 32) for work in disk_bench.WORK]
    assert all(row["value"] > 0 and row["system"].startswith("wherry") for row in rows)
    assert {row["backend"] for row in rows} >= {best, "buffered"}
    assert len(lines) >= 1 + len(rows)
    assert list(tmp_path.iterdir()) == []


def test_the_other_ways_are_beside_fio_in_the_same_case():
    def row(system, value, depth=16):
        return bench.row({"work": "read", "queue_depth": depth}, system, "B/s", [value], more_is_better=True)

    rows = [row("wherry", 3.0), row("fio", 2.0), row("fio", 8.0, depth=8)]
    bench.compare(rows)
    assert [disk_bench._of_fio(one, rows) for one in rows] == [1.5, None, None]
    assert disk_bench._of_fio(row("wherry threads", 1.0), rows) == 0.5
    assert disk_bench._of_fio(row("wherry threads", 1.0, depth=4), rows) is None


def test_the_depths_are_the_defaults_of_both_among_others():
    depths = disk_bench.Plan.of(quick=False).depths
    assert {8, load({}).aio.queue_depth} < set(depths) and depths == tuple(sorted(depths))


def test_the_smallest_settings_that_are_as_good_win():
    def rows(speeds):
        return [
            bench.row({"work": w, "block_size": b, "queue_depth": d}, "wherry", "B/s", [s], more_is_better=True)
            for (b, d), s in speeds.items()
            for w in disk_bench.WORK
        ]

    assert disk_bench.best_settings(rows({(1 << 20, 8): 990, (1 << 20, 32): 1000, (4 << 20, 32): 1001})) == {
        "block_size": 1 << 20,
        "queue_depth": 8,
    }
    assert disk_bench.best_settings(rows({(1 << 20, 8): 900, (4 << 20, 32): 1000}))["queue_depth"] == 32


def test_peers_that_cannot_run_are_named_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_bench, "_cannot_run", lambda peer: f"no {peer} here")
    lines: list[str] = []
    rows = disk_bench.run_bench(str(tmp_path), quick=True, size=16 << 20, say=lines.append)
    absent = [(row["system"], row["case"]["work"], row["reason"]) for row in rows if row["reason"]]
    assert absent == [(peer, work, f"no {peer} here") for peer in disk_bench.PEERS for work in disk_bench.WORK]
    assert lines[-2:] == [f"{peer}: no {peer} here" for peer in disk_bench.PEERS]
    assert max(map(len, lines)) <= 80


def test_a_peer_that_is_broken_has_rows_with_the_reason(tmp_path, monkeypatch):
    def fails(*_):
        raise AttributeError("module 'deepspeed' has no attribute 'ops'")

    monkeypatch.setattr(disk_bench, "_cannot_run", lambda peer: None)
    monkeypatch.setattr(disk_bench, "_deepspeed_aio", contextmanager(fails))
    lines: list[str] = []
    rows = disk_bench.run_bench(str(tmp_path), quick=True, size=8 << 20, peers=["deepspeed"], say=lines.append)
    absent = {(row["system"], row["reason"]) for row in rows if row["reason"]}
    why = "installed, but its aio does not run here: module 'deepspeed' has no attribute 'ops'"
    assert absent == {("deepspeed aio", why)}
    of_it = [(row["case"]["queue_depth"], row["case"]["work"]) for row in rows if row["reason"]]
    assert of_it == [(depth, work) for depth in (8, 32) for work in disk_bench.WORK]
    assert " ".join(lines).count("does not run here") == 1


def test_a_system_that_does_not_tell_of_huge_pages_has_none_that_is_known(monkeypatch):
    monkeypatch.setattr(disk_bench.Path, "exists", lambda path: str(path) != "/proc/meminfo")
    assert not disk_bench._huge_pages_free(-(1 << 30))


@pytest.mark.parametrize(
    ("fio", "why"),
    [
        ("echo 'fio: pid=1' >&2; echo 'fio: no io_uring' >&2; exit 1", "fio: no io_uring"),
        ("exit 3", "it ended with status 3"),
        ("exec sleep 60", "no answer within 0.2 s"),
    ],
)
def test_a_peer_that_fails_while_it_is_measured_has_rows_with_the_reason(tmp_path, monkeypatch, fio, why):
    program, asked = tmp_path / "bin" / "fio", tmp_path / "asked"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho >> {asked}\n{fio}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setattr(disk_bench, "_TIMEOUT", 0.2)
    lines: list[str] = []
    rows = disk_bench.run_bench(str(tmp_path), quick=True, size=8 << 20, peers=["fio"], say=lines.append)
    absent = [(row["case"]["queue_depth"], row["case"]["work"]) for row in rows if row["system"] == "fio"]
    assert absent == [(depth, work) for depth in (8, 32) for work in disk_bench.WORK]
    assert {row["reason"] for row in rows if row["system"] == "fio"} == {f"installed, but it does not run here: {why}"}
    assert all(row["value"] > 0 and "fio" not in row["ratio"] for row in rows if row["system"] == "wherry")
    assert asked.read_text().count("\n") == 1  # and is not tried again
    assert sum("does not run here" in line for line in lines) == 1


def test_a_way_to_the_disk_that_is_refused_is_a_row_with_the_reason(tmp_path, monkeypatch):
    refused = "buffered" if probe(str(tmp_path)).backend == "threads" else "threads"
    store = disk_bench.DiskStore

    def opened(path, *, backend, **options):
        if backend == refused:
            raise disk_bench.DiskUseError(f"disk path {path!r}: no {backend}")
        return store(path, backend=backend, **options)

    monkeypatch.setattr(disk_bench, "DiskStore", opened)
    lines: list[str] = []
    rows = disk_bench.run_bench(str(tmp_path), quick=True, size=8 << 20, peers=(), say=lines.append)
    absent = [(row["system"], row["case"]["work"], row["reason"]) for row in rows if row["reason"]]
    why = f"disk path 'the folder': no {refused}"
    assert absent == [(f"wherry {refused}", work, why) for work in disk_bench.WORK]
    assert lines[-1] == f"wherry {refused}: {why}" and lines.count(lines[-1]) == 1


def test_the_command(tmp_path, capsys):
    result = tmp_path / "result.json"
    arguments = ["--path", str(tmp_path), "--quick", "--size", str(8 << 20), "--json", str(result)]
    arguments += ["--peers", "none"]
    assert disk_bench.main(arguments) == 0
    out = capsys.readouterr().out
    (pasted,) = (line for line in out.splitlines() if line.startswith('"aio": '))
    best = load(json.loads("{" + pasted + "}")).aio
    assert (best.block_size, best.queue_depth) in {(1 << 20, 8), (1 << 20, 32)}
    found = json.loads(result.read_text())
    assert found["settings"]["file_system"] and found["rows"] and found["complete"]
    assert str(tmp_path) not in result.read_text()
    with pytest.raises(SystemExit):
        disk_bench.main(["--path", str(tmp_path / "missing"), "--quick"])
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_does_the_same_work(tmp_path):
    rows = disk_bench.run_bench(str(tmp_path), quick=True, size=16 << 20, peers=["fio"], say=lambda line: None)
    ours = [row for row in rows if row["system"] == "wherry"]
    fios = [row for row in rows if row["system"] == "fio"]
    assert len(ours) == len(fios) == 6
    assert all(row["of_limit"] == row["ratio"]["fio"] > 0 for row in ours)
    assert list(tmp_path.iterdir()) == []


def test_deepspeeds_aio_that_moves_nothing_has_no_rate(tmp_path, monkeypatch):
    class Handle:
        def __init__(self, *_):
            pass

        def new_cpu_locked_tensor(self, size, like):
            return torch.empty(size, dtype=like.dtype)

        def free_cpu_locked_tensor(self, buffer):
            pass

        def sync_pread(self, *_):
            return -1

        sync_pwrite = sync_pread

    builder = SimpleNamespace(load=lambda verbose: SimpleNamespace(aio_handle=Handle))
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder", SimpleNamespace(AsyncIOBuilder=lambda: builder))
    for parent in ("deepspeed", "deepspeed.ops"):
        monkeypatch.setitem(sys.modules, parent, SimpleNamespace())
    monkeypatch.setattr(disk_bench, "_cannot_run", lambda peer: None)
    rows = disk_bench.run_bench(str(tmp_path), quick=True, size=8 << 20, peers=["deepspeed"], say=lambda line: None)
    theirs = {row["reason"] for row in rows if row["system"] == "deepspeed aio"}
    assert theirs == {"installed, but it does not run here: it could not move the file, and has printed why"}


@pytest.mark.skipif(
    disk_bench._cannot_run("deepspeed") is not None, reason=f"DeepSpeed's aio: {disk_bench._cannot_run('deepspeed')}"
)
def test_deepspeeds_aio_reads_and_writes_as_much(tmp_path, monkeypatch):
    from torch.utils import cpp_extension

    build = cpp_extension._run_ninja_build

    def only_what_is_built(directory, *arguments, **more):
        planned = subprocess.run(["ninja", "-n"], cwd=directory, capture_output=True, text=True)
        if "no work to do" not in planned.stdout:
            pytest.skip("DeepSpeed would compile its async_io again, with other flags, which takes minutes")
        build(directory, *arguments, **more)

    monkeypatch.setattr(cpp_extension, "_run_ninja_build", only_what_is_built)
    rows = disk_bench.run_bench(str(tmp_path), quick=True, size=16 << 20, peers=["deepspeed"], say=lambda line: None)
    theirs = {row["case"]["work"]: row for row in rows if row["system"] == "deepspeed aio"}
    assert theirs["read"]["value"] > 0 and theirs["write"]["value"] > 0
    assert theirs["both"]["reason"] == "it reads or writes, never both at once"
    assert list(tmp_path.iterdir()) == []
