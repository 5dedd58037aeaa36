"""The examples run, at the size of a toy."""

from pathlib import Path

import pytest
from tests.cli.programs import wherry

EXAMPLES = Path(__file__).parents[2] / "examples"
QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run(folder, name, *arguments, flags=()):
    done = wherry("run", *flags, "--nproc", 2, EXAMPLES / name, *arguments, cwd=folder, timeout=250, **QUIET)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def test_the_plain_loop(tmp_path):
    losses = [float(line.split()[4]) for line in run(tmp_path, "train_with_wherry.py").splitlines()]
    assert len(losses) == 5 and losses[-1] < losses[0]


def test_the_tutorial_of_another_engine(tmp_path):
    out = run(tmp_path, "deepspeed_tutorial.py", flags=["--as-deepspeed"])
    first, last = (float(out.split("loss ")[1].split()[i].rstrip(",")) for i in (0, 2))
    assert out.startswith("40 updates") and last < 0.7 * first


def test_ten_billion_parameters_in_small(tmp_path):
    small = {"layers": 2, "hidden": 64, "heads": 2, "sequence": 32, "vocabulary": 96, "batch": 2, "steps": 3}
    flags = [word for name, value in small.items() for word in (f"--{name}", value)]
    out = run(tmp_path, "ten_billion_on_one_gpu.py", *flags)
    assert "ZeRO-Offload" in out
    assert out.count("tokens/s") == 6  # on each of two ranks


@pytest.mark.timeout(300)
def test_lora_with_transformers(tmp_path):
    pytest.importorskip("peft", reason="it comes with `pip install wherry[transformers]`")
    out = run(tmp_path, "finetune_lora.py", "--steps", 10)
    first, last = (float(out.split("loss ")[1].split()[i].rstrip(";")) for i in (0, 2))
    assert last < first
    assert (tmp_path / "runs" / "lora" / "adapter_model.safetensors").exists()


@pytest.mark.timeout(300)
def test_lightning(tmp_path):
    pytest.importorskip("lightning", reason="it comes with `pip install wherry[lightning]`")
    out = run(tmp_path, "lightning_module.py", "--epochs", 3)
    assert "validation " in out
    assert (tmp_path / "runs" / "lightning" / "last.ckpt" / "latest").exists()
