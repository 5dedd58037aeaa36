"""From a fresh clone to a model that other libraries load: each command as a new user types it, or as one prints it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import psutil
import pytest
from tests.cli.programs import WHERRY, launched, start_fork, wait_for

from wherry.cli import main

ROOT = Path(__file__).parents[2]
TINY = "--num-layers 1 --hidden-size 32 --seq-length 32 --batch-size 2 --eval-iters 1"
pytestmark = pytest.mark.usefixtures("launched")


@pytest.mark.smoke
def test_train_generate_export_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "first"
    trained = launched("train", *f"{TINY} --steps 4 --run-dir {run}".split(), cwd=ROOT)
    assert trained.returncode == 0, trained.stderr
    # Commands that the end of the run suggests.
    generate, go_on = [shlex.split(line) for line in trained.stdout.splitlines() if line.startswith("    wherry ")]
    assert generate[:3] == ["wherry", "generate", str(run)] and go_on[:4] == ["wherry", "train", "--resume", str(run)]
    assert main([*generate[1:], "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out.startswith(generate[3])
    assert main(["inspect", str(run)]) == 0 and main(["export", str(run), "out"]) == 0
    capsys.readouterr()
    assert main(["export", str(run), str(run)]) == 2
    assert f"{run} holds config.json already; give a folder of its own" in capsys.readouterr().err
    model = transformers.AutoModelForCausalLM.from_pretrained("out")
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    written = model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=8)
    assert tokenizer.decode(written[0]).startswith("def ") and written.shape == (1, 12)
    assert main(["generate", "out", "def ", "--max-new-tokens", "8"]) == 0
    further = launched(*go_on[1:], "--eval-iters", 1, cwd=tmp_path)
    assert further.returncode == 0 and "GPT-2 of 22.0K parameters" in further.stdout, further.stderr
    shown = " ".join(further.stdout.split())
    assert "step 8/8" in shown and f"resumed {run}/checkpoints/global_step4, step 4" in shown
    assert [path.name for path in Path("runs").iterdir()] == ["first"]


def test_a_run_on_one_rank_goes_on_by_itself_when_it_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = f"{TINY} --steps 200 --save-interval 20 --keep-last 1 --max-restarts 1 --run-dir {run} --nproc 1"
    launcher = start_fork(*WHERRY, "train", *flags.split())
    wait_for(lambda: (run / "checkpoints" / "latest").exists())
    (rank,) = psutil.Process(launcher.pid).children()
    rank.kill()
    shown, _ = launcher.communicate(timeout=90)
    assert launcher.returncode == 0 and "resumed" in shown, shown
    assert json.loads((run / "summary.json").read_text())["ending"] == "finished"
    assert len(list(run.glob("metrics.*jsonl"))) == 2, "the metrics of the killed attempt are kept"
