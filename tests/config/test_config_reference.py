"""What the schema says about itself: the JSON schema, `explain`, the page in docs/, and the command."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from tests.config.page import TUTORIAL, markdown

from wherry.cli import main
from wherry.config import load
from wherry.config.optimizer import OPTIMIZERS
from wherry.config.reference import catalog, explain, json_schema, suggestion
from wherry.config.source import parse

DOCS = Path(__file__).parents[2] / "docs" / "config.md"


def faults(tree):
    """Every place where a config does not fit the JSON schema, and what does not fit there."""

    def told(error):
        return [f"{error.json_path}: {error.message}", *(each for inner in error.context for each in told(inner))]

    return [each for error in Draft202012Validator(json_schema()).iter_errors(tree) for each in told(error)]


GOOD = [
    parse(TUTORIAL)[0],
    {},
    {"$schema": "s.json", "train_batch_size": "auto", "fp16": "auto", "zero_optimization": {"stage": "auto"}},
    {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": 943718.4}},
    {"optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": [0.9, 0.95], "adam_w_mode": False}}},
    {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": [1, 2], "warmup_type": "log"}}},
    {"steps_per_print": None, "gradient_clipping": 1, "elasticity": {"enabled": False}},
    {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": ["/a"]}, "cpu_offload": True}},
    load({"bf16": {"enabled": True}, "optimizer": {"type": "SGD"}}).to_dict(),
    {"optimizer": {"type": "Adafactor", "params": {"eps": [None, 1e-3]}}, "wherry": {"update_on": "auto"}},
    load({"optimizer": {"type": "Muon"}, "wherry": {"update_on": 0.25}}).to_dict(),
]
BAD = [
    ({"train_batchsize": 8}, "train_batchsize"),
    ({"train_batch_size": 0}, "train_batch_size"),
    ({"train_batch_size": 1.5}, "train_batch_size"),
    ({"zero_optimization": {"stage": 4}}, "stage"),
    ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, "device"),
    ({"fp16": {"enabled": 3}}, "enabled"),
    ({"optimizer": {"params": {}}}, "type"),
    ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, "betas"),
    ({"wherry": {"unit_classes": "Block"}}, "unit_classes"),
    ({"wherry": {"update_on": 2}}, "update_on"),
]


def test_the_json_schema_takes_good_configs_and_finds_mistakes():
    Draft202012Validator.check_schema(json_schema())
    for tree in GOOD:
        assert faults(tree) == []
        load(tree)
    for tree, where in BAD:
        assert any(where in fault for fault in faults(tree)), tree


def test_an_editor_shows_what_a_key_does():
    zero = json_schema()["properties"]["zero_optimization"]["anyOf"][0]["properties"]
    assert "No effect here" in zero["contiguous_gradients"]["description"]
    assert zero["cpu_offload"]["deprecated"] is True
    assert "Not part of Wherry" in zero["zenflow"]["description"]
    assert "x-" not in json.dumps(list(zero["stage"]))


# --- explain ---


EXPLAINED = [
    ("zero_optimization.stage", ["type:", "0, 1, 2, 3", "default:", "effect here: acts"]),
    ("stage", ["zero_optimization.stage"]),
    ("gradient_clipping", ["0.0", "global L2 norm"]),
    ("zero_optimization.contiguous_gradients", ["effect here: none: gradients always land"]),
    ("cpu_offload", ["read as zero_optimization.offload_optimizer.device"]),
    ("elasticity", ["not part of Wherry"]),
    ("fp16", ["keys:", "loss_scale_window"]),
    ("optimizer.params.lr", ["(Adam, AdamW, Lion, SGD, Lamb)", "(Adagrad)", "0.01"]),
    ("warmup_num_steps", ["scheduler.params.warmup_num_steps", "WarmupCosineLR"]),
    ("device", ["offload_optimizer.device", "offload_param.device", '"none", "cpu", "nvme"']),
    ("tensorboard.output_path", ["string"]),
    ("timers.throughput.enabled", ["none: throughput"]),
]  # fmt: skip


def test_explain():
    for key, words in EXPLAINED:
        text = explain(key)
        assert [word for word in words if word not in text] == [], key


def test_explain_every_key():
    for info in catalog():
        assert info.path in explain(info.path)
        assert info.text.endswith("."), info.path
        assert info.why or info.effect == "acts", info.path


SUGGESTED = [
    ("zero_optimization.stge", "zero_optimization.stage"),
    ("gradient_clip", "gradient_clipping"),
    ("stage3_prefetch_bucket", "zero_optimization.stage3_prefetch_bucket_size"),
    ("fp16.stage", "zero_optimization.stage"),
    ("offload_optimizr", "zero_optimization.offload_optimizer"),
]


def test_explain_suggests():
    for key, hint in SUGGESTED:
        assert explain(key) is None
        assert suggestion(key) == f', did you mean "{hint}"?'
    assert suggestion("qqqqqq") == ""


# --- the page ---


def test_the_page_is_current():
    assert DOCS.read_text() == markdown(), "write it anew: python -m tests.config.page > docs/config.md"


def test_the_page_has_every_key():
    page = markdown()
    for info in catalog():
        assert f"`{info.path.rpartition('.')[2]}`" in page or f"`{info.path}`" in page


def test_schedules_and_schema_agree():
    from wherry.config.scheduler import SCHEDULES
    from wherry.update import schedules

    assert set(SCHEDULES) == set(schedules.VALID_LR_SCHEDULES)
    for name, model in SCHEDULES.items():
        signature = inspect.signature(getattr(schedules, name)).parameters
        assert set(signature) == {"optimizer", *model.model_fields}
        for key, parameter in signature.items():
            if parameter.default is not inspect.Parameter.empty:
                assert model.model_fields[key].default == parameter.default, (name, key)


def test_optimizer_defaults_are_those_of_torch_but_for_weight_decay():
    import torch

    from wherry import optim

    kinds = ["AdamW", "Adam", "Adagrad", "SGD", "Adafactor"]
    for name, kind in {**{name: getattr(torch.optim, name) for name in kinds}, "Lamb": optim.Lamb}.items():
        signature = inspect.signature(kind).parameters
        for key, field in OPTIMIZERS[name].model_fields.items():
            if key in signature and key != "weight_decay" and field.default is not None:
                theirs = signature[key].default
                assert field.default == (list(theirs) if isinstance(theirs, tuple) else theirs), (name, key)


# --- the command ---


def run(capsys, *arguments):
    status = main(["config", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def test_check_a_good_file(tmp_path, capsys):
    path = tmp_path / "c.json"
    path.write_text(TUTORIAL)
    status, out, err = run(capsys, "check", path, "--ranks", 2, "--set", "zero_optimization.stage=3")
    assert (status, err) == (0, "")
    assert out.startswith(f"{path}: good\n")
    assert "parameters  partitioned, device" in out
    assert "batch       2 = micro-batch 1 x accumulation 1 x 2 ranks" in out
    assert "note: zero_optimization.contiguous_gradients: no effect here" in out
    status, out, _ = run(capsys, "check", path, "--set", "zero_optimization.stage=auto")
    assert out.startswith(f"{path}: good\n  placement   chosen for the model and the machine when training begins\n")
    assert "note: auto, so chosen when training begins: zero_optimization.stage\n" in out
    status, out, _ = run(capsys, "check", path, "--json")
    assert status == 0
    assert json.loads(out) == load(path).to_dict()


@pytest.mark.parametrize("text", ['{\n"trainbatch": 1,\n"zero_optimization": {"stage": 9}\n}', "{{{"])
def test_check_a_bad_file(tmp_path, capsys, text):
    path = tmp_path / "c.json"
    path.write_text(text)
    status, out, err = run(capsys, "check", path)
    assert (status, out) == (2, "")
    assert err.count(str(path)) == len(err.splitlines())
    assert "Traceback" not in err


def test_check_batch_sizes(tmp_path, capsys):
    path = tmp_path / "c.json"
    path.write_text('{\n"train_batch_size": 7}')
    status, _, err = run(capsys, "check", path, "--ranks", 2)
    assert status == 2
    assert err.startswith(f"{path}:2: train_batch_size: 7 must be")
    assert run(capsys, "check", path, "--ranks", 0)[0] == 2
    assert run(capsys, "check", path, "--set", "stage")[0] == 2


def test_check_what_is_no_file(tmp_path, capsys):
    status, _, err = run(capsys, "check", tmp_path / "none.json")
    assert status == 2 and "cannot be read" in err
    status, _, err = run(capsys, "check", "{}")
    assert status == 2 and "cannot be read" in err


def test_check_standard_input(capsys, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("{train_batch_size: 3}"))
    assert run(capsys, "check", "-", "--ranks", 3)[0] == 0


def test_explain_command(capsys):
    status, out, _ = run(capsys, "explain", "zero_optimization.stage")
    assert status == 0 and out.startswith("zero_optimization.stage\n")
    status, out, err = run(capsys, "explain", "zero_optimization.stge")
    assert (status, out) == (2, "")
    assert err == 'there is no key "zero_optimization.stge", did you mean "zero_optimization.stage"?\n'


def test_schema_command(capsys):
    status, out, _ = run(capsys, "schema")
    assert status == 0
    assert json.loads(out) == json_schema()


def test_the_command_is_imported_without_pydantic_and_the_commands_run_without_torch(launched):
    code = (
        "import sys; import wherry.cli.config; print('pydantic' in sys.modules);"
        "from wherry.cli import main; main(['config', 'schema']); main(['config', 'explain', 'stage']);"
        "print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert (out[0], out[-1]) == ("False", "False")
