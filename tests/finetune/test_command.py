"""`wherry finetune`: flags, files, messages, and the files of a run's folder."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.finetune.tiny import make_folder, write_rows

from wherry.cli.finetune import main
from wherry.errors import WherryError
from wherry.finetune.model import lora_config
from wherry.finetune.options import parse

pytestmark = pytest.mark.usefixtures("rows_cache", "measured")
RUN = ["--steps=4", "--lr=0.01", "--precision=fp32", "--batch-size=4", "--global-batch-size=8", "--eval-split=4"]
# Leaves nothing for the planner to search.
PLACED = ["--stage=2", "--offload-optimizer=none"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, chat: Any, plain: Any) -> Path:
    folder = tmp_path_factory.mktemp("command")
    make_folder(folder / "plain", "llama", plain, torch.bfloat16)
    make_folder(folder / "chat", "qwen", chat)
    write_rows(folder)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    with open(folder / "chat.jsonl", "w") as file:
        for row in rows:
            said = [("user", row["prompt"]), ("assistant", row["completion"])]
            file.write(json.dumps({"messages": [{"role": who, "content": what} for who, what in said]}) + "\n")
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


@pytest.mark.long
def test_the_end_of_a_text_is_a_token_where_the_model_alone_says_which(folder: Path, tmp_path: Path) -> None:
    """As of a model that `wherry train` has made: its tokenizer of bytes has no token of that name."""
    import transformers

    model = tmp_path / "model"
    shutil.copytree(folder / "plain", model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.backend_tokenizer.no_padding()
    told = json.loads((model / "tokenizer.json").read_text())
    told["added_tokens"] = []
    (model / "tokenizer.json").write_text(json.dumps(told))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    bare = transformers.AutoTokenizer.from_pretrained(model)
    assert bare.eos_token is None and len(bare("<|endoftext|>").input_ids) > 1
    words = [
        str(model),
        f"--data={folder / 'rows.jsonl'}",
        *RUN[1:],
        *PLACED,
        "--steps=1",
        f"--run-dir={tmp_path / 'run'}",
    ]
    assert main(words) == 0
    tuned = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert tuned("<|endoftext|>").input_ids == [0] == [tuned.eos_token_id]
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert not any("<|endoftext|>" in sample["expected"] for sample in samples)


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


@pytest.mark.nightly
def test_what_fits_nowhere_is_refused_before_it_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    from wherry.plan import probe
    from wherry.plan.machines import known

    small = dataclasses.replace(known("4090"), gpu_memory=1 << 20, host_memory=1 << 20)
    monkeypatch.setattr(probe, "this_machine", lambda *_, **__: small)
    told = refused(str(folder / "plain"), f"--data={folder / 'rows.jsonl'}", f"--run-dir={tmp_path / 'run'}")
    assert "nothing fits" in told and "The smallest is" in told


# A run.


@pytest.mark.long
def test_all_weights(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import transformers

    run = tmp_path / "run"
    assert main([str(folder / "plain"), f"--data={folder / 'rows.jsonl'}", f"--run-dir={run}", *RUN]) == 0
    told = capfd.readouterr().out
    assert "rows.jsonl: 48 rows, 44 to train on, 4 to evaluate on; prompt and completion" in told
    assert re.search(r"masked +\w+ \d is\ntrained", told)  # what is trained on, apart
    assert "weights" in told and "a step" in told and "step 4/4" in told and "at step 0 it says" in told
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in found]
    assert losses[-1] < losses[0] and sum("validation_loss" in row for row in found) == 4
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in samples} == {0, 1, 2, 3, 4} and all(row["expected"] for row in samples)
    assert "Samples" in (run / "report.html").read_text()
    # The finished model: of the dtype that it came in, and as any other is loaded.
    model, report = transformers.AutoModelForCausalLM.from_pretrained(run / "model", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16 and model.config.use_cache
    assert transformers.AutoTokenizer.from_pretrained(run / "model").eos_token
    card = (run / "model" / "README.md").read_text()
    assert "library_name: transformers" in card and "| steps | 4 of 8 rows" in card and str(tmp_path) not in card
    # The file that repeats it.
    again = yaml.safe_load((run / "finetune.yaml").read_text())
    assert again["steps"] == 4 and again["set"]["zero_optimization.stage"] == 0
    assert main([str(run / "finetune.yaml"), f"--run-dir={tmp_path / 'again'}"]) == 0
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (run, tmp_path / "again")]
    assert weights[0] == weights[1]
    # It goes on in its own folder, and nothing is planned anew.
    capfd.readouterr()
    assert main(["--resume", str(run), "--steps=13", "--eval-interval=4"]) == 0
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found if "validation_loss" in row] == [8, 12, 13]  # also shortly before the end
    assert json.loads((run / "summary.json").read_text())["steps"] == 13
    assert "a step" not in capfd.readouterr().out


@pytest.mark.long
def test_a_model_that_could_not_be_written_is_where_the_run_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After its last step, with no step more. Published models say how to draw, and not that it is to be drawn."""
    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(folder / "plain", base)
    (base / "generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.6, "eos_token_id": 0}')
    words = [str(base), f"--data={folder / 'rows.jsonl'}", *RUN, *PLACED, "--steps=1", "--eval-split=0"]

    def full(*_: Any) -> None:
        raise WherryError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("wherry.finetune.model.write", full)
        assert refused(*words, f"--run-dir={run}") == "the disk is full"
    assert json.loads((run / "summary.json").read_text())["ending"] == "failed" and not (run / "model").exists()
    told = capfd.readouterr().out
    assert "Stopped by an error." in told and f"wherry finetune --resume {run}" in told
    assert "--lr 3.0: the run that goes on has 0.01, by its checkpoint" in refused(f"--resume={run}", "--lr=3")
    assert main([f"--resume={run}", "--eval-interval=3"]) == 0
    assert json.loads((run / "summary.json").read_text())["steps"] == 1
    assert "--eval-interval: there are no rows to evaluate on" in capfd.readouterr().out
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["checkpoint-1"]
    assert main([*words, f"--run-dir={tmp_path / 'other'}"]) == 0
    of_run, of_other, before = (
        (each / "model.safetensors").read_bytes() for each in (run / "model", tmp_path / "other" / "model", base)
    )
    assert of_run == of_other != before  # one step learns, too
    assert json.loads((run / "model" / "generation_config.json").read_text())["do_sample"] is True


@pytest.mark.long
def test_an_adapter_of_chats_answers(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from wherry.cli.generate import main as generate

    run = tmp_path / "run"
    words = [str(folder / "chat"), f"--data={folder / 'chat.jsonl'}", f"--run-dir={run}", *RUN]
    words += ["--steps=16", "--lr=0.05", "--lr-warmup-iters=1", "--samples=1"]
    assert main([*words, "--lora=r=4", "--stage=3", "--offload-param=cpu", "--offload-optimizer=cpu"]) == 0
    assert sorted(path.name for path in (run / "model").glob("adapter*")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert "library_name: peft" in (run / "model" / "README.md").read_text()
    told = capfd.readouterr().out
    command = re.search(r"wherry generate (\S+) '(.+)'", told)
    assert command is not None and "<|im_start|>" not in command[2]  # as a user asks it
    written = []
    for prompt, *flags in (
        [command[2]],
        [f"<|im_start|>user\n{command[2]}<|im_end|>\n<|im_start|>assistant\n", "--raw"],
    ):
        assert generate([command[1], prompt, "--temperature=0", "--max-new-tokens=4", *flags]) == 0
        written.append(capfd.readouterr().out.removeprefix(prompt).strip())
    assert written[0] == written[1] != ""
