"""The whole job with the real engine: in this process on one rank, and through a forked launcher on two."""

import csv
import errno
import json
import os
import signal
import subprocess
from dataclasses import replace

import psutil
import pytest
from tests.cli.programs import WHERRY, forked, gone, launched, start_fork, wait_for

from wherry.engine import Engine
from wherry.errors import WherryError
from wherry.observe import metrics
from wherry.plan import probe
from wherry.plan.machines import known
from wherry.train import job, presets, report
from wherry.train.options import parse

door = pytest.mark.usefixtures("launched")
TINY = ("--num-layers", 2, "--hidden-size", 32, "--seq-length", 16, "--eval-iters", 2, "--lr", 0.01)
TUTORIAL = """{
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {
            "device": "cpu",
        }
        "contiguous_gradients": true,
        "overlap_comm": true
    }
}
"""


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return ("--data", path)


def _here(*flags):
    return job.train(parse([str(flag) for flag in flags]))


def _losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_rank_writes_all_it_promises(tmp_path, text, capsys):
    folder = tmp_path / "run"
    assert _here(*TINY, *text, "--steps", 12, "--run-dir", folder) == 0
    shown = capsys.readouterr().out
    assert shown.index("Placement: ZeRO-3") < shown.index("step 1/12") < shown.index("Finished.")
    losses = _losses(folder)
    assert len(losses) == 12 and losses[0] == pytest.approx(5.5, abs=0.3) and losses[-1] < 0.8 * losses[0]
    with open(folder / "metrics.csv", newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == [str(step) for step in range(1, 13)]
    assert json.loads((folder / "config.json").read_text())["zero_optimization"]["stage"] == 3
    about = json.loads((folder / "run.json").read_text())
    assert about["shape"]["hidden"] == 32
    # Switches and numbers that were not given stand there with their defaults.
    assert about["options"]["async_save"] is False and about["options"]["log_interval"] == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["ending"], summary["steps"]) == ("finished", 12)


@pytest.mark.smoke
@door
def test_two_ranks_read_and_learn_what_one_does(tmp_path, text):
    flags = (*TINY, *text, "--steps", 8)
    assert _here(*flags, "--batch-size", 8, "--stage", 0, "--run-dir", tmp_path / "one") == 0
    windows = ("--batch-size", 2, "--gradient-accumulation-steps", 2)
    done = launched("train", *flags, *windows, "--nproc", 2, "--run-dir", tmp_path / "two", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "on 2 ranks" in done.stdout and done.stdout.count("Finished.") == 1
    assert _losses(tmp_path / "two") == pytest.approx(_losses(tmp_path / "one"), rel=1e-4)
    # Micro-batches one after another would each send weights and gradients between the ranks.
    order = {run: json.loads((tmp_path / run / "config.json").read_text())["wherry"] for run in ("one", "two")}
    assert order["two"]["accumulation"] == "layer_major" != order["one"]["accumulation"]
    assert "layer_major: all micro-batches of a step go through a block" in done.stdout


@door
def test_ctrl_c_ends_with_a_summary(tmp_path, text):
    folder = tmp_path / "run"
    launcher = start_fork(
        *WHERRY, "train", *TINY, *text, "--steps", 100_000, "--nproc", 2, "--run-dir", folder, cwd=tmp_path
    )
    metrics = folder / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert "Interrupted." in output and "Traceback" not in output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ending"] == "interrupted" and summary["steps"] >= len(_losses(folder)) > 0


def test_lines_come_as_often_as_they_are_asked_for(tmp_path, text, capsys):
    assert _here(*TINY, *text, "--steps", 104, "--log-interval", 26, "--run-dir", tmp_path / "run") == 0
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert shown == ["1/104", "26/104", "52/104", "78/104", "104/104"]


def test_a_disk_that_fills_up_ends_no_training(tmp_path, text, monkeypatch, capsys, caplog):
    write = report._write_json

    def full(path, value):
        if path.name == "summary.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, value)

    monkeypatch.setattr(report, "_write_json", full)
    monkeypatch.setattr(metrics.JSONLines.__init__, "__defaults__", ("/dev/full",))
    assert _here(*TINY, *text, "--steps", 3, "--run-dir", tmp_path / "run") == 0
    assert "Finished." in capsys.readouterr().out
    lost = "the metrics of /dev/full are lost from step 1 on: No space left on device"
    assert [record.getMessage() for record in caplog.records if "No space" in record.getMessage()] == [
        lost,
        "summary.json is not written: No space left on device",
    ]
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 4


def test_a_full_disk_is_an_error_before_training(tmp_path, text, monkeypatch):
    monkeypatch.setattr(metrics.CSV.__init__, "__defaults__", ("/dev/full",))
    with pytest.raises(WherryError, match=r"cannot be written \(No space left on device\); make room there"):
        _here(*TINY, *text, "--steps", 3, "--run-dir", tmp_path / "run")


@door
def test_output_that_nobody_reads_ends_all_ranks_without_a_message(tmp_path, text):
    folder = tmp_path / "run"
    flags = (*TINY, *text, "--steps", 100_000, "--log-interval", 1, "--nproc", 2, "--run-dir", folder)
    with open(tmp_path / "errors", "w") as errors:
        run = start_fork(*WHERRY, "train", *flags, stdout=subprocess.PIPE, stderr=errors)
        while not run.stdout.readline().startswith(b"step 2/"):
            assert run.poll() is None
        ranks = [child.pid for child in psutil.Process(run.pid).children()]
        run.stdout.close()
        assert run.wait(60) == 141
    assert len(ranks) >= 2 and gone(ranks)
    assert (tmp_path / "errors").read_text() == ""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ending"] == "interrupted" and summary["steps"] < 100_000


@door
def test_output_without_room_is_an_error_before_training(tmp_path, text):
    flags = (*TINY, *text, "--steps", 100_000, "--nproc", 2, "--run-dir", tmp_path / "run")
    with open("/dev/full", "w") as full, open(tmp_path / "errors", "w") as errors:
        assert start_fork(*WHERRY, "train", *flags, stdout=full, stderr=errors).wait() == 2
    (line,) = (tmp_path / "errors").read_text().splitlines()
    assert line.startswith("wherry: standard output cannot be written (No space left on device); make room")


FILLS_UP = """
import os, sys
from wherry.cli import main
from wherry.train.report import Report

step = Report.step

def late(report, record):
    if record.step == 2:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    step(report, record)

Report.step = late
sys.exit(main())
"""


@door
def test_output_that_fills_up_ends_no_training(tmp_path, text):
    flags = (*TINY, *text, "--steps", 4, "--nproc", 1, "--run-dir", tmp_path / "run")
    done = forked("-c", FILLS_UP, "train", *flags, cwd=tmp_path)
    assert (done.returncode, done.stdout.count("step 1/4"), done.stdout.count("step 2/4")) == (0, 1, 0)
    assert done.stderr.count("nothing more is shown: standard output cannot be written (No space left on device)") == 1
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ending"] == "finished"


def test_sigterm_saves_and_sums_up(tmp_path, text, monkeypatch):
    step = Engine.train_batch

    def told(engine, data):
        if engine.global_steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(engine, data)

    monkeypatch.setattr(Engine, "train_batch", told)
    folder = tmp_path / "run"
    assert _here(*TINY, *text, "--steps", 50, "--run-dir", folder) == 143
    assert json.loads((folder / "summary.json").read_text())["ending"] == "interrupted"
    assert (folder / "checkpoints" / "latest").read_text() == "global_step3"


def test_the_tutorials_file_trains_as_printed(tmp_path, text, capsys):
    config = tmp_path / "config.json"
    config.write_text(TUTORIAL)
    assert _here(*TINY, *text, "--steps", 3, "--config", config, "--run-dir", tmp_path / "run") == 0
    assert "Placement: ZeRO-Offload" in capsys.readouterr().out


@pytest.mark.parametrize("preset", [*presets.PRESETS, "auto"])
def test_every_preset_by_its_name(tmp_path, text, capsys, monkeypatch, preset):
    large = replace(known("4090"), name="a large machine", gpus=0, host_memory=10**12, matrix_fp32=1e18)
    monkeypatch.setattr(probe, "this_machine_roughly", lambda: large)
    small = ("--num-layers", 1, "--hidden-size", 8, "--num-attention-heads", 1, "--seq-length", 8, "--batch-size", 1)
    more = ("--steps", 1, "--eval-iters", 1, "--run-dir", tmp_path / "run")
    assert _here("--preset", preset, *small, *text, *more) == 0
    largest = presets.PRESETS["gpt2-10b"]
    chosen = presets.PRESETS.get(preset, largest)
    # Options that no flag gives are the preset's.
    shape = json.loads((tmp_path / "run" / "run.json").read_text())["shape"]
    assert (shape["layers"], shape["vocabulary"]) == (1, chosen.vocabulary)
    said = f"(auto: a large machine, 1000 GB free, 1e+06 TFLOP/s: {largest.size} parameters)"
    assert (said in capsys.readouterr().out) == (preset == "auto")


def test_auto_uses_the_micro_batch_of_the_file(tmp_path, text, monkeypatch):
    seen = []

    def choose(machine, ranks, micro_batch, *, itemsize):
        seen.append(micro_batch)
        return presets.PRESETS["gpt2-10m"], ""

    monkeypatch.setattr(presets, "choose", choose)
    monkeypatch.setattr(probe, "this_machine_roughly", lambda: None)
    config = tmp_path / "config.json"
    config.write_text('{"zero_optimization": {"stage": 1}}')
    small = (*TINY, *text, "--preset", "auto", "--steps", 1)
    assert _here(*small, "--config", config, "--run-dir", tmp_path / "one") == 0
    assert _here(*small, "--run-dir", tmp_path / "default") == 0
    assert seen == [1, 8]


def test_a_lost_loss_ends_the_run_loudly(tmp_path, text, capsys):
    wild = ("--set", "gradient_clipping=0", "--set", "optimizer.type=SGD", "--set", 'optimizer.params={"lr": 1e30}')
    flags = [str(flag) for flag in (*TINY, *text, *wild) if flag not in ("--lr", 0.01)]
    assert _here(*flags, "--steps", 50, "--run-dir", tmp_path / "run") == 1
    shown = capsys.readouterr().out
    assert "THE LOSS IS NAN" in shown and "The loss is lost" in shown
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ending"] == "diverged"


def test_steps_that_are_all_skipped_end_the_run_as_a_lost_loss_does(tmp_path, text, capsys, caplog):
    folder = tmp_path / "run"
    flags = (*TINY, *text, "--steps", 60, "--lr", 1e30, "--log-interval", 30, "--run-dir", folder)
    assert _here(*flags) == 1
    assert "The loss is lost" in capsys.readouterr().out
    assert json.loads((folder / "summary.json").read_text())["ending"] == "diverged"
    *skipped, last = [record for record in caplog.records if " skipped: " in record.getMessage()]
    assert len(skipped) == 9 and last.levelname == "ERROR" and "10 steps since" in last.getMessage()


def test_a_used_folder_is_refused_before_anything_starts(tmp_path, text):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(WherryError, match="holds the metrics of another run"):
        job.check(parse([str(flag) for flag in (*text, "--run-dir", tmp_path)]))


def test_a_path_of_another_kind_is_an_error_before_anything_starts(tmp_path, text, monkeypatch):
    file = text[1]

    def told(*flags):
        with pytest.raises(WherryError) as refused:
            job.check(parse([str(flag) for flag in (*text, *flags)]))
        return str(refused.value)

    assert "this is a file, and a folder is needed" in told("--run-dir", file)
    assert told("--save", file / "below").endswith("cannot be made (Not a directory); give another")
    assert told("--config", tmp_path).endswith("this is a folder; name the file")
    assert told("--config", tmp_path / "none.json").endswith("there is no such file")
    monkeypatch.setattr(report.os, "access", lambda _, mode: mode == os.R_OK)
    assert "nothing can be written there" in told("--save", tmp_path / "new")


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report.time, "strftime", lambda _: "20260101-000000")
    names = [report._run_dir(parse([]), presets.PRESETS["gpt2-10m"]).name for _ in range(3)]
    assert names == [f"20260101-000000-gpt2-10m{suffix}" for suffix in ("", "-2", "-3")]
