"""`wherry train --resume`: a run goes on exactly, and on other ranks with the same batches."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.export import find
from wherry.checkpoint.reader import CheckpointReader
from wherry.errors import WherryError
from wherry.train import job
from wherry.train.data import Share
from wherry.train.options import parse
from wherry.train.resume import Start, keep_batch

MORE = "--eval-iters 1 --stage 0"
SMALL = f"--num-layers 1 --hidden-size 16 --num-attention-heads 1 --seq-length 8 --batch-size 2 {MORE} --data text.txt"
RUN = Path("run")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_bytes(bytes(range(32, 126)) * 40)


def train(flags: str) -> None:
    assert job.main(flags.split()) == 0


def check(flags: str) -> bool:
    return job.check(parse(flags.split()))


def refused(flags: str) -> str:
    with pytest.raises(WherryError) as caught:
        check(flags)
    return str(caught.value)


def metrics(run: Path, name: str = "loss") -> list[float]:
    return [json.loads(line)[name] for line in (run / "metrics.jsonl").read_text().splitlines()]


def states(folder: Path) -> dict[str, torch.Tensor]:
    with CheckpointReader(find(folder)) as source:
        entries = source.manifest.entries.items()
        return {f"{name}:{state}": source.tensor(name, state) for name, entry in entries for state in entry.states}


def test_auto_goes_on_exactly() -> None:
    saving = f"{SMALL} --run-dir whole --steps 6 --save-interval 3"
    train(saving)
    saved = sorted(path.name for path in Path("whole/checkpoints").iterdir())
    assert saved == ["global_step3", "global_step6", "latest"]
    expected, last = metrics(Path("whole")), states(Path("whole"))
    flags = f"{SMALL} --run-dir run --save-interval 2 --keep-last 1 --async-save --resume auto"
    # Nothing to resume from: it begins.
    train(f"{flags} --steps 4 --lr-warmup-iters 1 --set scheduler.params.total_num_steps=6")
    train(f"{flags} --steps 6")
    assert metrics(RUN) == expected[4:]
    summary = json.loads((RUN / "summary.json").read_text())
    assert summary["tokens"] == 3 * summary["tokens_here"] > 0
    again = states(RUN)
    for name, value in last.items():
        assert torch.equal(value, again[name]), name
    assert (RUN / "metrics.1.jsonl").exists(), "the lines of the first part are kept"
    # A damaged checkpoint is passed over.
    file = Path("whole/checkpoints/global_step6/rank-00000.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    train(f"{saving} --resume auto")
    assert metrics(Path("whole")) == expected[3:]


def test_flags_act_on_a_resumed_run_and_the_rest_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{SMALL} --lr-warmup-iters 2 --lr 0.02"
    train(f"{flags} --run-dir run --steps 6 --clip-grad 0.5")
    on = f"{SMALL} --run-dir run --steps 12 --resume run/checkpoints/global_step6"
    train(f"{on} --weight-decay 0.3")
    shown = capsys.readouterr().out
    assert "changed optimizer.params.weight_decay 0.1 -> 0.3" in shown
    assert "changed scheduler.params.total_num_steps 6 -> 12" in shown
    config = json.loads((RUN / "config.json").read_text())
    assert config["gradient_clipping"] == 0.5 and config["optimizer"]["params"]["lr"] == 0.02
    assert config["scheduler"]["params"]["warmup_num_steps"] == 2
    # The rates that a run of 12 steps would have had from its seventh on.
    train(f"{flags} --run-dir whole --steps 12")
    rates = metrics(Path("whole"), "lr")[6:]
    assert metrics(RUN, "lr") == rates
    train(f"{on} --lr 0.01")
    assert metrics(RUN, "lr") == pytest.approx([rate / 2 for rate in rates], rel=1e-12)
    with CheckpointReader(find(RUN)) as source:
        (group,) = source.manifest.engine["optimizer"]["groups"]
        assert source.value(group["options"])["weight_decay"] == 0.1


def test_another_batch_size_goes_on_behind_the_samples_that_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[Share, list[int]] = defaultdict(list)  # by training and by evaluation
    numbers = Share.numbers

    def noted(share: Share, step: int, micro_step: int) -> Any:
        found = numbers(share, step, micro_step)
        read[share].extend(found.tolist())
        return found

    monkeypatch.setattr(Share, "numbers", noted)
    train(f"{SMALL} --run-dir run --steps 3")
    train(f"{SMALL} --run-dir run --steps 5 --resume auto --batch-size 4")
    assert list(range(3 * 2, 3 * 2 + 2 * 4)) in read.values()


def test_a_run_goes_on_without_the_flags_that_describe_it() -> None:
    """Take shape, text and their order from the checkpoint."""
    flags = f"{SMALL} --seed 5 --set scheduler.params.total_num_steps=6 --lr-warmup-iters 1"
    flags += " --untie-embeddings-and-output-weights"
    train(f"{flags} --steps 6 --run-dir whole")
    train(f"{flags} --steps 4 --run-dir run")
    train(f"--resume run --steps 6 --run-dir on {MORE}")
    about = json.loads(Path("on/run.json").read_text())
    assert about["shape"]["layers"] == 1 and about["shape"]["hidden"] == 16 and about["shape"]["sequence"] == 8
    found = [about["options"][name] for name in ("untied", "seed", "data")]
    assert found == [True, 5, str(Path("text.txt").absolute())]
    assert metrics(Path("on")) == metrics(Path("whole"))[4:]


def test_a_run_goes_on_in_place_and_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    run = Path("runs/a")
    train(f"{SMALL} --run-dir {run} --steps 6 --save-interval 3")
    shutil.rmtree(run / "checkpoints" / "global_step6")
    (run / "checkpoints" / "latest").write_text("global_step3")
    first = metrics(run)
    train(f"--resume {run} {MORE}")
    assert len(metrics(run)) == 3 and find(run).name == "global_step6"
    # What came behind an earlier checkpoint stays.
    train(f"--resume {run}/checkpoints/global_step3 --steps 4 {MORE}")
    assert "folder  a new one, as the checkpoint is not the newest of its own" in capsys.readouterr().out
    (branch,) = (path for path in Path("runs").iterdir() if path.name != "a")
    assert find(branch).name == "global_step4" and find(run).name == "global_step6" and len(metrics(run)) == 3
    # A folder of checkpoints that is not in a run's folder.
    (branch / "checkpoints").rename("apart")
    train(f"--resume apart --steps 5 {MORE}")
    assert find(Path("apart")).name == "global_step5"
    # Ended before its first step.
    (run / "metrics.jsonl").write_text("")
    shutil.rmtree(run / "checkpoints")
    train(f"{SMALL} --run-dir {run} --steps 6")
    assert metrics(run) == first


def test_another_optimizer_begins_without_states(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    train(f"{SMALL} --run-dir run --steps 6")
    more = f"--resume run {MORE}"
    train(f"{more} --steps 8 --optimizer Adam")
    assert "another optimizer" not in caplog.text
    train(f"{more} --steps 9 --optimizer Lion")
    assert "another optimizer begins without the states of the one before it" in caplog.text
    shown = capsys.readouterr().out
    assert "changed optimizer.type AdamW -> Lion" in shown and "optimizer.params" not in shown
    # Its own parameters are those that flags are checked against.
    assert check(f"{more} --steps 10 --set optimizer.params.betas=[0.5,0.6] --lr 0.1")
    assert "optimizer.params.eps: Lion has no such parameter" in refused(
        f"{more} --steps 10 --set optimizer.params.eps=1"
    )
    assert {name.rpartition(":")[2] for name in states(RUN)} == {"weight", "exp_avg"}


def test_auto_has_a_folder_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{SMALL} --max-restarts 3"
    train(f"{flags} --steps 4")
    (run,) = Path("runs").iterdir()
    assert run.name == "gpt2-7.5k-1x16"
    assert f"folder {run}: the same command goes on there" in " ".join(capsys.readouterr().out.split())
    train(f"{flags} --steps 6")
    assert len(metrics(run)) == 2
    capsys.readouterr()
    train(f"{flags} --steps 6")
    assert not check(f"{flags} --steps 6")
    said = "at step 6 of 6 already; give more with --steps to go on, or another --run-dir to begin anew"
    assert capsys.readouterr().out.count(said) == 2 and metrics(run) and states(run)
    assert [path.name for path in Path("runs").iterdir()] == [run.name]


def test_what_cannot_be_resumed_is_told_before_any_rank_starts() -> None:
    train(f"{SMALL} --run-dir run --steps 6")
    on = "--data text.txt --resume run --steps 12"
    for flags, message in (
        ("--resume run", "at step 6 of 6 already; give more with --steps to go on. `w"),
        (f"{SMALL} --run-dir run", "another folder, or --resume run to go on with it"),
        ("--resume run/checkpoints/global_step5", 'no such folder, did you mean "run/checkpoints/global_step6"?'),
        ("--resume nothing", "nothing: there is no such folder"),
        ("--resume .", "is no checkpoint and holds none"),
        (f"{on} --profile 12-13", "step 13 is to be recorded, and this run trains steps 7 to 12"),
        (f"{on} --num-layers 8 --hidden-size 16 --vocab-size 300",
         "shape: --num-layers 8: the checkpoint has 1; --vocab-size 300: the checkpoint has 256; leave"),
        (f"{on} --preset gpt2-124m --num-layers 1",
         "shape: --preset gpt2-124m means --hidden-size 768: the checkpoint has 16; --num-attention-heads 12: "),
    ):  # fmt: skip
        assert message in refused(flags)
    assert check(f"{on} --num-layers 1") and check("--resume auto --run-dir run --steps 12 --profile 2")
    # As an earlier version wrote it.
    manifest = read_manifest(path := find(RUN))
    for name in ("heads", "seed", "data"):
        del manifest.engine["client_state"][name]
    (path / "manifest.json").write_text(manifest.to_text())
    assert refused(f"{on} --num-layers 1").endswith("give --hidden-size 16 --seq-length 8")
    check(f"{SMALL} --resume run --steps 12")


@pytest.mark.parametrize(("ranks", "micro", "accumulation"), [(1, 8, 3), (2, 6, 2), (12, 2, 1)])
def test_the_batch_stays_on_other_ranks(ranks: int, micro: int, accumulation: int) -> None:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
    keep_batch(config, Start(Path("x"), 5, 120, 24), ranks, given=False)
    assert config["train_micro_batch_size_per_gpu"] == micro
    assert config["gradient_accumulation_steps"] == accumulation
    assert ranks * micro * accumulation == 24 == config["train_batch_size"]
    # The step after the fifth reads the samples that follow, whoever reads them.
    shares = [Share(rank, ranks, micro, accumulation, 120 - 5 * 24) for rank in range(ranks)]
    numbers = [number for step in range(accumulation) for share in shares for number in share.numbers(5, step)]
    assert numbers == list(range(120, 144))


def test_a_pipelines_batch_has_a_micro_batch_a_stage_and_one_that_does_not_divide_is_told(caplog: Any) -> None:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
    keep_batch(config, Start(Path("x"), 5, 40, 8), 1, given=False, stages=3)
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (2, 4)
    config = {"train_micro_batch_size_per_gpu": 8}
    keep_batch(config, Start(Path("x"), 5, 120, 24), 5, given=False)
    assert config == {"train_micro_batch_size_per_gpu": 8} and "do not divide by 5 ranks" in caplog.text
