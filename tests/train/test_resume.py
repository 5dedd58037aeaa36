"""`wherry train --resume`: a run goes on exactly, and on other ranks with the same batches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.export import find
from wherry.checkpoint.reader import CheckpointReader
from wherry.errors import WherryError
from wherry.train.data import Share
from wherry.train.job import check, main
from wherry.train.options import parse
from wherry.train.resume import Start, keep_batch

SMALL = [
    *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "1", "--seq-length", "8"),
    *("--eval-iters", "1", "--batch-size", "2", "--steps", "6", "--stage", "0"),
]


@pytest.fixture(autouse=True)
def text(tmp_path: Path) -> list[str]:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(32, 126)) * 40)
    return ["--data", str(path)]


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def states(folder: Path) -> dict[str, torch.Tensor]:
    with CheckpointReader(find(folder)) as source:
        entries = source.manifest.entries.items()
        return {f"{name}:{state}": source.tensor(name, state) for name, entry in entries for state in entry.states}


def test_auto_goes_on_exactly(tmp_path: Path, text: list[str]) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main([*SMALL, *text, "--run-dir", str(whole), "--save-interval", "3"]) == 0
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["global_step3", "global_step6", "latest"]
    flags = [*SMALL, *text, "--run-dir", str(run), "--save-interval", "2", "--keep-last", "1", "--async-save"]
    # Nothing to resume from: it begins.
    interrupted = [*flags, "--resume", "auto", "--lr-warmup-iters", "1", "--set", "scheduler.params.total_num_steps=6"]
    interrupted[interrupted.index("--steps") + 1] = "4"
    assert main(interrupted) == 0
    assert main([*flags, "--resume", "auto"]) == 0
    assert losses(run) == losses(whole)[4:]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["tokens"] == 3 * summary["tokens_here"] > 0
    again = states(run / "checkpoints")
    for name, value in states(whole / "checkpoints").items():
        assert torch.equal(value, again[name]), name
    assert (run / "metrics.1.jsonl").exists(), "the lines of the first part are kept"


def rates(run: Path) -> list[float]:
    return [json.loads(line)["lr"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_flags_act_on_a_resumed_run_and_the_rest_is_kept(
    tmp_path: Path, text: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    flags = [*SMALL, *text, "--run-dir", str(run), "--save-interval", "3", "--lr-warmup-iters", "2", "--nproc", "1"]
    assert main([*flags, "--lr", "0.02", "--clip-grad", "0.5"]) == 0
    kept = ["--resume", str(run / "checkpoints"), "--steps", "12"]
    told = [*flags[: flags.index("--lr-warmup-iters")], *kept]
    assert main([*told, "--weight-decay", "0.3"]) == 0
    shown = capsys.readouterr().out
    assert "changed optimizer.params.weight_decay 0.1 -> 0.3" in shown
    assert "changed scheduler.params.total_num_steps 6 -> 12" in shown
    config = json.loads((run / "config.json").read_text())
    assert config["gradient_clipping"] == 0.5 and config["optimizer"]["params"]["lr"] == 0.02
    assert config["scheduler"]["params"]["warmup_num_steps"] == 2
    # The rates that a run of 12 steps would have had from its seventh on.
    assert main([*flags, "--lr", "0.02", "--steps", "12", "--run-dir", str(tmp_path / "whole")]) == 0
    assert rates(run) == rates(tmp_path / "whole")[6:]
    shutil.rmtree(run / "checkpoints" / "global_step12")
    (run / "checkpoints" / "latest").write_text("global_step6")
    assert main([*told, "--lr", "0.01"]) == 0
    assert rates(run) == pytest.approx([rate / 2 for rate in rates(tmp_path / "whole")[6:]], rel=1e-12)
    with CheckpointReader(find(run / "checkpoints")) as source:
        (group,) = source.manifest.engine["optimizer"]["groups"]
        assert source.value(group["options"])["weight_decay"] == 0.1


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, text: list[str]) -> None:
    run = tmp_path / "run"
    assert main([*SMALL, *text, "--run-dir", str(run), "--save-interval", "3"]) == 0
    file = run / "checkpoints" / "global_step6" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    flags = [*SMALL, *text, "--run-dir", str(run), "--resume", "auto", "--save-interval", "3"]
    before = losses(run)
    assert main(flags) == 0
    assert losses(run) == before[3:]


def test_a_run_goes_on_without_the_flags_that_describe_it(tmp_path: Path, text: list[str]) -> None:
    """Its folder is enough: shape, text and their order come from the checkpoint."""
    whole, run, on = tmp_path / "whole", tmp_path / "run", tmp_path / "on"
    flags = [*SMALL, *text, "--seed", "5", "--set", "scheduler.params.total_num_steps=6", "--lr-warmup-iters", "1"]
    assert main([*flags, "--run-dir", str(whole)]) == 0
    assert main([*flags, "--run-dir", str(run), "--untie-embeddings-and-output-weights", "--steps", "4"]) == 0
    assert main(["--resume", str(run), "--steps", "6", "--run-dir", str(on), "--eval-iters", "1", "--stage", "0"]) == 0
    about = json.loads((on / "run.json").read_text())
    assert about["shape"]["layers"] == 1 and about["shape"]["hidden"] == 16 and about["shape"]["sequence"] == 8
    assert (about["options"]["untied"], about["options"]["seed"], about["options"]["data"]) == (True, 5, text[1])
    shutil.rmtree(run)
    assert main([*flags, "--run-dir", str(run), "--steps", "4"]) == 0
    shutil.rmtree(on)
    assert main(["--resume", str(run), "--steps", "6", "--run-dir", str(on), "--eval-iters", "1", "--stage", "0"]) == 0
    assert losses(on) == losses(whole)[4:]


def test_a_run_goes_on_in_place_and_to_its_end(
    tmp_path: Path, text: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run, more = Path("runs/a"), ["--eval-iters", "1", "--stage", "0"]
    assert main([*SMALL, *text, "--run-dir", str(run), "--save-interval", "3"]) == 0
    shutil.rmtree(run / "checkpoints" / "global_step6")
    (run / "checkpoints" / "latest").write_text("global_step3")
    first = losses(run)
    assert main(["--resume", str(run), *more]) == 0
    assert len(losses(run)) == 3 and find(run).name == "global_step6"
    # What came behind an earlier checkpoint stays.
    capsys.readouterr()
    assert main(["--resume", str(run / "checkpoints" / "global_step3"), "--steps", "4", *more]) == 0
    assert "folder  a new one, as the checkpoint is not the newest of its own" in capsys.readouterr().out
    (branch,) = (path for path in Path("runs").iterdir() if path.name != "a")
    assert find(branch).name == "global_step4" and find(run).name == "global_step6" and len(losses(run)) == 3
    # A folder of checkpoints that is not in a run's folder.
    (branch / "checkpoints").rename("apart")
    assert main(["--resume", "apart", "--steps", "5", *more]) == 0
    assert find(Path("apart")).name == "global_step5"
    # Ended before its first step.
    (run / "metrics.jsonl").write_text("")
    shutil.rmtree(run / "checkpoints")
    assert check(parse([*SMALL, *text, "--run-dir", str(run)]))
    assert main([*SMALL, *text, "--run-dir", str(run)]) == 0 and losses(run) == first


def test_another_optimizer_begins_without_states(
    tmp_path: Path, text: list[str], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main([*SMALL, *text, "--run-dir", str(run)]) == 0
    more = ["--resume", str(run), "--eval-iters", "1", "--stage", "0"]
    assert main([*more, "--steps", "8", "--optimizer", "Adam"]) == 0 and "another optimizer" not in caplog.text
    assert main([*more, "--steps", "9", "--optimizer", "Lion"]) == 0
    assert "another optimizer begins without the states of the one before it" in caplog.text
    shown = capsys.readouterr().out
    assert "changed optimizer.type AdamW -> Lion" in shown and "optimizer.params" not in shown
    # Its own parameters are those that flags are checked against.
    assert check(parse([*more, "--steps", "10", "--set", "optimizer.params.betas=[0.5, 0.6]", "--lr", "0.1"]))
    with pytest.raises(WherryError, match=r"optimizer\.params\.eps: Lion has no such parameter"):
        check(parse([*more, "--steps", "10", "--set", "optimizer.params.eps=1"]))
    assert {name.rpartition(":")[2] for name in states(run)} == {"weight", "exp_avg"}


def without_heads(folder: Path) -> None:
    """As an earlier version wrote it."""
    manifest = read_manifest(path := find(folder))
    for name in ("heads", "seed", "data"):
        del manifest.engine["client_state"][name]
    (path / "manifest.json").write_text(manifest.to_text())


def test_flags_that_contradict_a_checkpoint_are_named_before_any_rank_starts(tmp_path: Path, text: list[str]) -> None:
    run = tmp_path / "run"
    assert main([*SMALL, *text, "--run-dir", str(run)]) == 0

    def told(*flags: str) -> str:
        with pytest.raises(WherryError) as refused:
            check(parse([*text, "--resume", str(run), "--steps", "12", *flags]))
        return str(refused.value)

    both = told("--num-layers", "8", "--hidden-size", "16", "--vocab-size", "300")
    assert "--num-layers 8: the checkpoint has 1; --vocab-size 300: the checkpoint has 256; leave" in both
    assert "hidden" not in both
    preset = told("--preset", "gpt2-124m", "--num-layers", "1")
    assert "--preset gpt2-124m means --hidden-size 768: the checkpoint has 16; --num-attention-heads 12: " in preset
    assert "--num-layers" not in preset
    check(parse([*text, "--resume", str(run), "--steps", "12", "--num-layers", "1"]))
    without_heads(run)
    assert told("--num-layers", "1").endswith("give --hidden-size 16 --seq-length 8")
    check(parse([*SMALL, *text, "--resume", str(run), "--steps", "12"]))


def test_auto_has_a_folder_of_its_own(
    tmp_path: Path, text: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [*SMALL, *text, "--max-restarts", "3"]
    assert main([*flags, "--steps", "4"]) == 0
    run = Path("runs/gpt2-7.5k-1x16")
    shown = " ".join(capsys.readouterr().out.split())
    assert f"folder {run}: the same command goes on there" in shown
    assert main(flags) == 0
    assert len(losses(run)) == 2
    before = states(run / "checkpoints")
    capsys.readouterr()
    assert main(flags) == 0 and not check(parse(flags))
    said = "at step 6 of 6 already; give more with --steps to go on, or another --run-dir to begin anew"
    assert capsys.readouterr().out.count(said) == 2 and losses(run) and before.keys() == states(run).keys()
    assert [path.name for path in Path("runs").iterdir()] == [run.name]


def test_a_run_without_checkpoints_is_asked_for(tmp_path: Path, text: list[str]) -> None:
    assert main([*SMALL, *text, "--run-dir", str(tmp_path / "run"), "--no-save"]) == 0
    assert not (tmp_path / "run" / "checkpoints").exists()
    with pytest.raises(WherryError, match="--no-save: --save-interval asks for checkpoints"):
        parse(["--no-save", "--save-interval", "3"])


def test_what_cannot_be_resumed_is_told(tmp_path: Path, text: list[str]) -> None:
    run = tmp_path / "run"
    assert main([*SMALL, *text, "--run-dir", str(run), "--save-interval", "6"]) == 0
    with pytest.raises(WherryError, match=r"at step 6 of 6 already; give more with --steps to go on\. `w"):
        main([*text, "--run-dir", str(run), "--resume", str(run)])
    with pytest.raises(WherryError, match=f"another folder, or --resume {run} to go on with it"):
        main([*SMALL, *text, "--run-dir", str(run)])
    with pytest.raises(WherryError, match=r'no such folder, did you mean ".*/global_step6"\?$'):
        check(parse(["--resume", str(run / "checkpoints" / "global_step5")]))
    assert check(parse(["--resume", "auto", "--run-dir", str(run), "--steps", "12", "--profile", "2"]))
    with pytest.raises(WherryError, match="step 13 is to be recorded, and this run trains steps 7 to 12"):
        check(parse(["--resume", str(run), "--steps", "12", "--profile", "12-13"]))
    for folder, told in (("nothing", "nothing: there is no such folder"), (".", "is no checkpoint and holds none")):
        with pytest.raises(WherryError, match=told):
            main([*SMALL, *text, "--run-dir", str(run), "--resume", str(tmp_path / folder)])


@pytest.mark.parametrize(("ranks", "micro", "accumulation"), [(1, 8, 3), (2, 6, 2), (3, 8, 1), (4, 6, 1), (12, 2, 1)])
def test_the_batch_stays_on_other_ranks(ranks: int, micro: int, accumulation: int) -> None:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
    keep_batch(config, Start(Path("x"), 5, 120, 24), ranks, given=False)
    assert config["train_micro_batch_size_per_gpu"] == micro
    assert config["gradient_accumulation_steps"] == accumulation
    assert ranks * micro * accumulation == 24 == config["train_batch_size"]
    # The step after the fifth reads the samples that follow, whoever reads them.
    numbers = [
        number
        for micro_step in range(accumulation)
        for rank in range(ranks)
        for number in Share(rank, ranks, micro, accumulation, 120 - 5 * 24).numbers(5, micro_step)
    ]
    assert numbers == list(range(120, 144))


def test_stages_of_a_pipeline_have_a_micro_batch_each() -> None:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
    keep_batch(config, Start(Path("x"), 5, 40, 8), 1, given=False, stages=3)
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (2, 4)


def test_a_batch_that_does_not_divide_is_told(caplog: pytest.LogCaptureFixture) -> None:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 8}
    keep_batch(config, Start(Path("x"), 5, 120, 24), 5, given=False)
    assert config == {"train_micro_batch_size_per_gpu": 8} and "do not divide by 5 ranks" in caplog.text
