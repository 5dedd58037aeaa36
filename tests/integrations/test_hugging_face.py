"""transformers, accelerate, peft and trl on Wherry, through the alias and first class, against the same without it."""

import importlib.util
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.integrations import HUGGING_FACE

PACKAGES = ("transformers", "accelerate", "peft", "trl")
# Found, and not imported: an import takes seconds, and every worker collects this file.
if absent := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
    pytest.skip(f"{absent[0]} comes with `pip install '.[transformers]'`", allow_module_level=True)

PROGRAM = Path(__file__).with_name("hugging_face.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_lora.py"


def run(forks, folder, mode, ranks):
    done = forks.run(PROGRAM, mode, folder, ranks=ranks, folder=folder, timeout=280)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads((folder / f"{mode}.json").read_text())


def close(expected):
    return pytest.approx(expected, rel=2e-5)


def same_log(ours, theirs):
    assert len(ours) == len(theirs) > 2
    for mine, its in zip(ours, theirs, strict=True):
        assert mine == close(its)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["own", pytest.param("alias", marks=pytest.mark.nightly)])
def test_trainers_give_what_they_give_without_wherry(forks, tmp_path, mode):
    """Run Wherry's own classes, and an unchanged script through the alias."""
    plain = run(forks.of(*HUGGING_FACE), tmp_path, "plain", 1)
    ours = run(forks.of(*HUGGING_FACE, as_deepspeed=mode == "alias"), tmp_path, mode, 2)
    mine, theirs = ours["trainer"], plain["trainer"]
    if mode == "own":
        assert mine["before"] == close(theirs["before"])
        same_log(mine["log"], theirs["log"])
    else:
        # With an optimizer in the config the engine moves the schedule, so the rate that the Trainer logs after its
        # backward is already the next one.
        assert [row[2] for row in mine["log"]][:-1] == [row[2] for row in theirs["log"]][1:]
        same_log(*([row[:2] for row in found["log"]] for found in (mine, theirs)))
    for key in ("evaluation", "smoothed"):
        assert mine[key] == close(theirs[key])
    assert mine["generated"] == theirs["generated"]
    assert ours["resumed"] == {key: value for key, value in mine.items() if key != "before"}
    saved, expected = (load_file(tmp_path / name / "final" / "model.safetensors") for name in (mode, "plain"))
    assert saved.keys() == expected.keys()
    for name, weight in expected.items():
        assert (saved[name] - weight).abs().max() < 2e-5, name
    # from_pretrained, also under a config of stage 3.
    assert ours["pretrained"] == close(plain["pretrained"])
    assert plain["pretrained"] == close(theirs["evaluation"])
    # A reference model, and an optimizer of whole parameters over compiled blocks.
    for name in ("dpo", "adafactor"):
        same_log(ours[name]["log"], plain[name]["log"])
    if mode == "alias":
        mine, theirs = ours["accelerate"], plain["accelerate"]
        assert mine["losses"] == close(theirs["losses"]) and mine["rate"] == theirs["rate"]
        assert mine["weights"] == pytest.approx(theirs["weights"], rel=1e-4, abs=1e-4)


def test_the_example_of_lora(forks, tmp_path):
    done = forks.of(*HUGGING_FACE).run(EXAMPLE, "--steps", 10, ranks=2, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    first, last = (float(done.stdout.split("loss ")[1].split()[i].rstrip(";")) for i in (0, 2))
    assert last < first
    assert (tmp_path / "runs" / "lora" / "adapter_model.safetensors").exists()


def test_the_trainer_on_one_rank_gives_what_it_gives_without_wherry(tmp_path):
    from tests.integrations.test_context_parallel import batch_of, model_of
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_pt_utils import LabelSmoother

    from wherry.integrations.transformers import WherryTrainer

    rows = [{name: value[0] for name, value in batch_of(step).items()} for step in range(8)]
    logs = []
    for cls in (Trainer, WherryTrainer):
        args = TrainingArguments(
            tmp_path, max_steps=3, logging_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            learning_rate=1e-2, max_grad_norm=0.5, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        trainer = cls(model=model_of("llama"), args=args, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        log = [[row["loss"], row["grad_norm"], row["learning_rate"]] for row in trainer.state.log_history[:3]]
        evaluated = trainer.evaluate()["eval_loss"]
        trainer.label_smoother = LabelSmoother(epsilon=0.1)  # its loss depends on the class of the model inside
        logs.append([*log, [evaluated], [trainer.evaluate()["eval_loss"]]])
    same_log(logs[1], logs[0])


def test_arguments_that_do_not_go_together_are_refused(tmp_path):
    import torch
    from transformers import TrainingArguments

    from wherry.config import load
    from wherry.errors import WherryError
    from wherry.integrations.transformers import WherryTrainer, resolve

    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    args = TrainingArguments(tmp_path, use_cpu=True, report_to=[], save_only_model=True, **best)
    with pytest.raises(WherryError, match="save_only_model leaves them out"):
        WherryTrainer(torch.nn.Linear(2, 2), args, train_dataset=[], eval_dataset=[])
    # Zero and false are said too, and not left to the arguments.
    args = TrainingArguments(tmp_path, use_cpu=True, report_to=[], bf16=True)
    said = {"gradient_clipping": 0.0, "bf16": {"enabled": False}}
    with pytest.raises(WherryError) as refusal:
        resolve(load(said), args, 1)
    assert "gradient_clipping: the config has 0.0" in str(refusal.value)
    assert "bf16.enabled: the config has False" in str(refusal.value)
    # Adafactor's eps is not Adam's, which the arguments have.
    config = {"optimizer": {"type": "Adafactor", "params": dict.fromkeys(("lr", "weight_decay", "eps"), "auto")}}
    args = TrainingArguments(tmp_path, learning_rate=0.5, weight_decay=0.25, report_to=[], use_cpu=True)
    name, options = resolve(load(config), args, 1).optimizer.build_args()
    assert (name, options["lr"], options["weight_decay"], options["eps"]) == ("Adafactor", 0.5, 0.25, (None, 1e-3))
