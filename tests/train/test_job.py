"""The whole job with the real engine: in this process on one rank, and through a forked launcher on two."""

import csv
import errno
import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest import mock

import psutil
import pytest
from tests.cli.programs import WHERRY, gone, launched, start_fork, wait_for

from wherry.engine import Engine
from wherry.errors import WherryError
from wherry.observe import metrics, stdout
from wherry.plan import probe
from wherry.plan.machines import known
from wherry.train import job, presets, report
from wherry.train.display import Display
from wherry.train.options import parse

door = pytest.mark.usefixtures("launched")
TINY = "--num-layers 2 --hidden-size 32 --seq-length 16 --eval-iters 2 --lr 0.01 --data text.txt"
ENDLESS = [*WHERRY, "train", *f"{TINY} --steps 100000 --nproc 2 --run-dir run --log-interval 1".split()]
RUN = Path("run")
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


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)


def _here(flags):
    return job.train(parse(f"{TINY} --run-dir run {flags}".split()))


def _read(name):
    return json.loads((RUN / name).read_text())


def _losses(run=RUN):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_one_rank_writes_all_it_promises(capsys):
    """Read the config as a tutorial prints it, with a comma missing."""
    Path("config.json").write_text(TUTORIAL)
    assert _here("--steps 12 --log-interval 5 --config config.json") == 0
    shown = capsys.readouterr().out
    assert shown.index("Placement: ZeRO-Offload") < shown.index("step 1/12") < shown.index("Finished.")
    steps = ["1", "5", "10", "12"]
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("step ")] == [f"{n}/12" for n in steps]
    losses = _losses()
    assert len(losses) == 4 and losses[0] == pytest.approx(5.5, abs=0.3) and losses[-1] < 0.8 * losses[0]
    with open(RUN / "metrics.csv", newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == steps
    assert _read("config.json")["zero_optimization"]["stage"] == 2
    # Switches and numbers that were not given stand there with their defaults.
    options = _read("run.json")["options"]
    assert (options["hidden_size"], options["async_save"], options["eval_interval"]) == (32, False, 0)
    assert (_read("summary.json")["ending"], _read("summary.json")["steps"]) == ("finished", 12)


@pytest.mark.smoke
@door
def test_two_ranks_read_and_learn_what_one_does():
    assert _here("--steps 8 --batch-size 8 --stage 0") == 0
    flags = f"{TINY} --steps 8 --batch-size 2 --gradient-accumulation-steps 2 --nproc 2 --run-dir two"
    done = launched("train", *flags.split())
    assert done.returncode == 0, done.stderr
    assert "on 2 ranks" in done.stdout and done.stdout.count("Finished.") == 1
    assert _losses(Path("two")) == pytest.approx(_losses(), rel=1e-4)
    # Micro-batches one after another would each send weights and gradients between the ranks.
    assert json.loads(Path("two/config.json").read_text())["wherry"]["accumulation"] == "layer_major"
    assert _read("config.json")["wherry"]["accumulation"] != "layer_major"
    assert "layer_major: all micro-batches of a step go through a block" in done.stdout


@door
def test_ctrl_c_ends_with_a_summary():
    launcher = start_fork(*ENDLESS)
    metrics = RUN / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert "Interrupted." in output and "Traceback" not in output
    summary = _read("summary.json")
    assert summary["ending"] == "interrupted" and summary["steps"] >= len(_losses()) > 0


@door
def test_output_that_nobody_reads_ends_all_ranks_without_a_message():
    with open("errors", "w") as errors:
        run = start_fork(*ENDLESS, stdout=subprocess.PIPE, stderr=errors)
        while not run.stdout.readline().startswith(b"step 2/"):
            assert run.poll() is None
        ranks = [child.pid for child in psutil.Process(run.pid).children()]
        run.stdout.close()
        assert run.wait(60) == 141
    assert len(ranks) >= 2 and gone(ranks)
    assert Path("errors").read_text() == ""
    assert _read("summary.json")["ending"] == "interrupted"


@door
def test_output_without_room_is_an_error_before_training():
    with open("/dev/full", "w") as full, open("errors", "w") as errors:
        assert start_fork(*ENDLESS, stdout=full, stderr=errors).wait() == 2
    (line,) = Path("errors").read_text().splitlines()
    assert line.startswith("wherry: standard output cannot be written (No space left on device); make room")


def test_files_and_output_that_fill_up_end_no_training(monkeypatch, caplog):
    (RUN / "summary.json").mkdir(parents=True)
    monkeypatch.setattr(metrics.JSONLines.__init__, "__defaults__", ("/dev/full",))
    full, give_up = OSError(errno.ENOSPC, "No space left on device"), mock.Mock()
    monkeypatch.setattr(Display, "step", mock.Mock(side_effect=[full, None, None]))
    monkeypatch.setattr(stdout, "give_up", give_up)
    assert _here("--steps 3") == 0
    warned = [record.getMessage() for record in caplog.records]
    assert warned.count("the metrics of /dev/full are lost from step 1 on: No space left on device") == 1
    assert warned.count("summary.json is not written: Is a directory") == 1
    shown = "nothing more is shown: standard output cannot be written (No space left on device)"
    assert warned.count(shown) == give_up.call_count == 1
    assert len((RUN / "metrics.csv").read_text().splitlines()) == 4


def test_sigterm_saves_and_sums_up(monkeypatch):
    step = Engine.train_batch

    def told(engine, data):
        if engine.global_steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(engine, data)

    monkeypatch.setattr(Engine, "train_batch", told)
    assert _here("--steps 50") == 143
    assert _read("summary.json")["ending"] == "interrupted"
    assert (RUN / "checkpoints" / "latest").read_text() == "global_step3"


@pytest.mark.parametrize("preset", ["gpt2-124m", "auto"])
def test_a_preset_by_its_name(capsys, monkeypatch, preset):
    large = replace(known("4090"), name="a large machine", gpus=0, host_memory=10**12, matrix_fp32=1e18)
    monkeypatch.setattr(probe, "this_machine_roughly", lambda: large)
    small = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --batch-size 1 --steps 1"
    choose = mock.Mock(wraps=presets.choose)
    monkeypatch.setattr(presets, "choose", choose)
    assert _here(f"--preset {preset} {small}") == 0
    assert preset != "auto" or choose.call_args.args[2] == 1, "the micro-batch of the config"
    largest = presets.PRESETS["gpt2-10b"]
    # Options that no flag gives are the preset's.
    shape = _read("run.json")["shape"]
    assert (shape["layers"], shape["vocabulary"]) == (1, presets.PRESETS.get(preset, largest).vocabulary)
    said = f"(auto: a large machine, 1000 GB free, 1e+06 TFLOP/s: {largest.size} parameters)"
    assert (said in capsys.readouterr().out) == (preset == "auto")


def test_steps_that_are_all_skipped_end_the_run_as_a_lost_loss_does(capsys, caplog):
    assert _here("--steps 60 --lr 1e30 --log-interval 30") == 1
    assert "The loss is lost" in capsys.readouterr().out
    assert _read("summary.json")["ending"] == "diverged"
    *skipped, last = [record for record in caplog.records if " skipped: " in record.getMessage()]
    assert len(skipped) == 9 and last.levelname == "ERROR" and "10 steps since" in last.getMessage()


def test_paths_that_cannot_be_are_errors_before_anything_starts(monkeypatch):
    Path("used").mkdir()
    Path("used/metrics.jsonl").write_text("{}\n")
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK or "new" not in str(path))
    for flags, message in (
        ("--run-dir used", "holds the metrics of another run"),
        ("--run-dir text.txt", "this is a file, and a folder is needed"),
        ("--save text.txt/below", r"cannot be made \(Not a directory\); give another"),
        ("--save new", "nothing can be written there"),
        ("--config .", "this is a folder; name the file"),
        ("--config none.json", "there is no such file"),
    ):
        with pytest.raises(WherryError, match=message):
            job.check(parse(f"{TINY} {flags}".split()))
    monkeypatch.setattr(metrics.CSV.__init__, "__defaults__", ("/dev/full",))
    with pytest.raises(WherryError, match=r"cannot be written \(No space left on device\); make room there"):
        _here("--steps 3")


def test_runs_of_the_same_second_get_folders_of_their_own(monkeypatch):
    monkeypatch.setattr(report.time, "strftime", lambda _: "20260101-000000")
    names = [report.make_run_dir(None, "tiny", resumes=False).name for _ in range(3)]
    assert names == [f"20260101-000000-tiny{suffix}" for suffix in ("", "-2", "-3")]
