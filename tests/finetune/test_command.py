"""`wherry finetune`: flags, files, messages, and the files of a run's folder."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from tests.finetune.tiny import make_folder, write_rows

from wherry.cli.finetune import main
from wherry.errors import WherryError
from wherry.finetune.config import set_length
from wherry.finetune.job import where
from wherry.finetune.model import lora_config
from wherry.finetune.options import parse

pytestmark = pytest.mark.usefixtures("rows_cache", "measured")
RUN = ["--steps=4", "--lr=0.01", "--precision=fp32", "--batch-size=4", "--global-batch-size=8", "--eval-split=4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, plain: Any) -> Path:
    folder = tmp_path_factory.mktemp("command")
    model = make_folder(folder / "plain", "llama", plain, torch.bfloat16)
    # The model alone says which token ends a text, as of one that `wherry train` made.
    tokenizer = json.loads((model / "tokenizer.json").read_text()) | {"added_tokens": [], "padding": None}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    # Published models have settings for sampling, and do not turn it on.
    (model / "generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.6, "eos_token_id": 0}')
    write_rows(folder)
    return folder


def refused(*words: str) -> str:
    with pytest.raises(WherryError) as caught:
        main(list(words))
    return str(caught.value)


# Flags and files.


def test_a_file_has_the_flags_and_the_command_line_comes_over_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: base\ndata: rows.jsonl\nsteps: 20\nlora: {r: 8, alpha: 4}\nstage: 2\n"
        "set: {zero_optimization: {offload_optimizer: {device: cpu}}, bf16.enabled: true}\n"
    )
    options = parse([str(file), "--epochs", "2", "--offload_optimizer=none"])
    assert (options.model, options.data, options.steps, options.epochs, options.stage) == (
        "base",
        "rows.jsonl",
        None,
        2,
        2,
    )
    assert options.lora == "r=8,alpha=4" and options.settings == ["bf16.enabled=true"]
    assert parse([str(file), "--full"]).lora is None
    config = lora_config("r=8,alpha=4,target=q_proj+v_proj", {"bias": "none"})
    assert (config.r, config.lora_alpha, config.target_modules) == (8, 4, {"q_proj", "v_proj"})


@pytest.mark.parametrize(
    ("flags", "steps", "warmup"),
    [
        (["--epochs=2"], 6, 0),
        (["--steps=1"], 1, 0),
        (["--steps=99"], 99, 2),
        (["--steps=99", "--lr-warmup-iters=0"], 99, 0),
    ],
)
def test_a_run_of_few_steps_has_no_warmup(flags: list[str], steps: int, warmup: int) -> None:
    """Count 21 rows, 2 ranks of 4 rows a step; a warmup of the only step would train at a rate of zero."""
    args = SimpleNamespace(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    set_length(args, parse(["model", "--data=rows", *flags]), rows=21, ranks=2)
    assert (args.max_steps, args.warmup_steps) == (steps, warmup)


def test_a_model_of_the_hub_is_fetched_without_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    asked: list[Any] = []

    def download(name: str, allow_patterns: list[str], local_files_only: bool) -> str:
        asked.append((name, local_files_only))
        assert not any(fnmatch(file, pattern) for file in ("a.py", "a.bin") for pattern in allow_patterns)
        if name == "me/lost":
            raise OSError("no network")
        if name == "me/tinny":
            raise RepositoryNotFoundError("no", response=SimpleNamespace(headers={}, request=None))  # type: ignore[arg-type]
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(WherryError, match="me/tiny has no safetensors files on the hub"):
        where("me/tiny")
    (tmp_path / "model.safetensors").touch()
    assert where("https://huggingface.co/me/tiny") == tmp_path
    with pytest.raises(WherryError, match="no such folder here, and me/lost cannot be fetched from the hub: no netw"):
        where("me/lost")
    with pytest.raises(WherryError, match="me/tinny cannot be fetched from the hub: there is none of this name, or it"):
        where("me/tinny")
    assert asked == [(f"me/{name}", False) for name in ("tiny", "tiny", "lost", "tinny")]


def test_mistakes_are_told(folder: Path, tmp_path: Path) -> None:
    model, rows = str(folder / "plain"), f"--data={folder / 'rows.jsonl'}"
    file = tmp_path / "run.yaml"
    file.write_text("modle: x\n")
    assert 'modle: there is no such flag, did you mean "model"?' in refused(str(file))
    assert "--data is missing" in refused(model)
    assert "no such folder" in refused(str(folder / "plian"), rows)
    assert "PEFT's LoraConfig has no rank" in refused(model, rows, "--lora=rank=3")
    assert 'SFTConfig has no such argument, did you mean "neftune_noise_alpha"?' in refused(
        model, rows, *RUN, "--set=sft.neftune_noise=3"
    )
    assert "give --lr" in refused(model, rows, *RUN, "--set=sft.learning_rate=3")
    assert "give --lr-warmup-iters" in refused(model, rows, *RUN, "--set=sft.warmup_steps=3")
    assert "the method is sft, which has nothing of DPOConfig" in refused(model, rows, *RUN, "--set=dpo.beta=0.3")
    assert "--set lora.r: all weights are trained; add --lora" in refused(model, rows, *RUN, "--set=lora.r=3")
    assert "--packing: dpo compares rows" in refused(model, rows, *RUN, "--method=dpo", "--packing")
    assert "--lora: Target modules" in refused(model, rows, *RUN, "--lora=target=nothing")
    file.write_text("model: x\ndata: [a, b]\n")
    assert "data: expected one value, got a list" in refused(str(file))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": model}))
    assert f"{tmp_path} has an adapter, and the whole model is asked for, which is {model}" in refused(
        str(tmp_path), rows
    )
    assert "--seq-length 500: the model has 128 positions" in refused(model, rows, "--seq-length=500")
    assert "--resume auto" in refused(model, rows, "--resume=auto")
    assert "which goes with sft" in refused(model, rows, "--method=dpo")


# A run.


@pytest.mark.long
def test_all_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import transformers

    run, again = tmp_path / "run", tmp_path / "again"
    assert main([str(folder / "plain"), f"--data={folder / 'rows.jsonl'}", f"--run-dir={run}", *RUN]) == 0
    told = capfd.readouterr().out
    assert "rows.jsonl: 48 rows, 44 to train on, 4 to evaluate on; prompt and completion" in told
    assert re.search(r"masked +\w+ \d is\ntrained", told)
    assert "weights" in told and "a step" in told and "step 4/4" in told and "at step 0 it says" in told
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in found]
    assert losses[-1] < losses[0] and sum("validation_loss" in row for row in found) == 4
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in samples} == {0, 1, 2, 3, 4}
    assert all(row["expected"] and "<|endoftext|>" not in row["expected"] for row in samples)
    assert "Samples" in (run / "report.html").read_text()
    # The finished model: of the dtype that it came in, and as any other is loaded.
    model, report = transformers.AutoModelForCausalLM.from_pretrained(run / "model", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16 and model.config.use_cache and model.generation_config.do_sample
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    assert tokenizer("<|endoftext|>").input_ids == [0] == [tokenizer.eos_token_id]
    card = (run / "model" / "README.md").read_text()
    assert "library_name: transformers" in card and "| steps | 4 of 8 rows" in card and str(tmp_path) not in card
    # The file that repeats it. A model that could not be written is where the run goes on, with no step more.
    repeats = yaml.safe_load((run / "finetune.yaml").read_text())
    assert repeats["steps"] == 4 and repeats["set"]["zero_optimization.stage"] == 0

    def full(*_: Any) -> None:
        raise WherryError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("wherry.finetune.model.write", full)
        assert refused(str(run / "finetune.yaml"), f"--run-dir={again}") == "the disk is full"
    assert json.loads((again / "summary.json").read_text())["ending"] == "failed" and not (again / "model").exists()
    told = capfd.readouterr().out
    assert "Stopped by an error." in told and f"wherry finetune --resume {again}" in told
    assert "--lr 3.0: the run that goes on has 0.01, by its checkpoint" in refused(f"--resume={again}", "--lr=3")
    assert main([f"--resume={again}"]) == 0
    assert json.loads((again / "summary.json").read_text())["steps"] == 4
    assert [path.name for path in (again / "checkpoints").iterdir()] == ["checkpoint-4"]
    models = (run / "model", again / "model", folder / "plain")
    first, second, before = ((each / "model.safetensors").read_bytes() for each in models)
    assert first == second != before
    # A run goes on in its own folder, and nothing is planned anew.
    capfd.readouterr()
    assert main(["--resume", str(run), "--steps=7", "--eval-interval=2"]) == 0
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found if "validation_loss" in row] == [6, 7]  # also shortly before the end
    assert json.loads((run / "summary.json").read_text())["steps"] == 7
    assert "a step" not in capfd.readouterr().out
