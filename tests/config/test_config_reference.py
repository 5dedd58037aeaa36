"""The schema on itself: the JSON schema, `explain`, the page in docs/, and the command."""

import io
import json
import sys
from pathlib import Path

from jsonschema import Draft202012Validator
from tests.config.page import TUTORIAL, markdown

from wherry.cli import main
from wherry.config import load
from wherry.config.reference import catalog, explain, json_schema, suggestion
from wherry.config.source import parse

DOCS = Path(__file__).parents[2] / "docs" / "config.md"


GOOD = [
    parse(TUTORIAL)[0],
    {"$schema": "s.json", "train_batch_size": "auto", "fp16": "auto", "zero_optimization": {"stage": "auto"}},
    {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": [1, 2], "warmup_type": "log"}}},
    {"steps_per_print": None, "gradient_clipping": 1, "elasticity": {"enabled": False}},
    {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": ["/a"]}, "cpu_offload": True}},
    {"optimizer": {"type": "Adafactor", "params": {"eps": [None, 1e-3]}}, "wherry": {"update_on": "auto"}},
    load({"optimizer": {"type": "Muon"}, "wherry": {"update_on": 0.25}}).to_dict(),
]
BAD = [
    {"train_batchsize": 8},
    {"train_batch_size": 0},
    {"zero_optimization": {"stage": 4}},
    {"fp16": {"enabled": 3}},
    {"optimizer": {"params": {}}},
    {"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}},
    {"wherry": {"unit_classes": "Block"}},
]


def test_the_json_schema_takes_good_configs_and_finds_mistakes():
    Draft202012Validator.check_schema(json_schema())
    validator = Draft202012Validator(json_schema())
    for tree in GOOD:
        validator.validate(tree)
        load(tree)
    assert not [tree for tree in BAD if validator.is_valid(tree)]
    zero = json_schema()["properties"]["zero_optimization"]["anyOf"][0]["properties"]
    assert "No effect here" in zero["contiguous_gradients"]["description"]
    assert zero["cpu_offload"]["deprecated"] is True
    assert "Not part of Wherry" in zero["zenflow"]["description"]


EXPLAINED = [
    ("stage", ["zero_optimization.stage", "type:", "0, 1, 2, 3", "default:", "effect here: acts"]),
    ("zero_optimization.contiguous_gradients", ["effect here: none: gradients always land"]),
    ("cpu_offload", ["read as zero_optimization.offload_optimizer.device"]),
    ("fp16", ["keys:", "loss_scale_window"]),
    ("optimizer.params.lr", ["(Adam, AdamW, Lion, SGD, Lamb)", "(Adagrad)", "0.01"]),
    ("device", ["offload_optimizer.device", "offload_param.device", '"none", "cpu", "nvme"']),
]
SUGGESTED = [
    ("gradient_clip", "gradient_clipping"),
    ("fp16.stage", "zero_optimization.stage"),
    ("offload_optimizr", "zero_optimization.offload_optimizer"),
]


def test_explain():
    for info in catalog():
        assert info.path in explain(info.path)
        assert info.text.endswith(".") and (info.why or info.effect == "acts"), info.path
    for key, words in EXPLAINED:
        assert [word for word in words if word not in explain(key)] == [], key
    for key, hint in SUGGESTED:
        assert explain(key) is None
        assert suggestion(key) == f', did you mean "{hint}"?'
    assert suggestion("qqqqqq") == ""


def test_the_page_is_current():
    assert DOCS.read_text() == markdown(), "write it anew: python -m tests.config.page > docs/config.md"


# --- the command ---


def run(capsys, *arguments):
    status = main(["config", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out, err


def test_check_a_good_file(tmp_path, capsys, monkeypatch):
    path = tmp_path / "c.json"
    path.write_text(TUTORIAL)
    status, out, err = run(capsys, "check", path, "--ranks", 2, "--set", "zero_optimization.stage=3")
    assert (status, err) == (0, "")
    assert out.startswith(f"{path}: good\n")
    assert "parameters  partitioned, device" in out
    assert "batch       2 = micro-batch 1 x accumulation 1 x 2 ranks" in out
    assert "note: zero_optimization.contiguous_gradients: no effect here" in out
    _, out, _ = run(capsys, "check", path, "--set", "zero_optimization.stage=auto")
    assert out.startswith(f"{path}: good\n  placement   chosen for the model and the machine when training begins\n")
    status, out, _ = run(capsys, "check", path, "--json")
    assert status == 0
    assert json.loads(out) == load(path).to_dict()
    monkeypatch.setattr(sys, "stdin", io.StringIO("{train_batch_size: 3}"))
    assert run(capsys, "check", "-", "--ranks", 3)[0] == 0


def test_check_a_bad_file(tmp_path, capsys):
    path = tmp_path / "c.json"
    for text, *flags in (['{\n"trainbatch": 1,\n"zero_optimization": {"stage": 9}\n}'], ["{{{"], ["{}", "--ranks", 0]):
        path.write_text(text)
        status, out, err = run(capsys, "check", path, *flags)
        assert (status, out) == (2, "")
        assert flags or err.count(str(path)) == len(err.splitlines())
    path.write_text('{\n"train_batch_size": 7}')
    status, _, err = run(capsys, "check", path, "--ranks", 2)
    assert status == 2 and err.startswith(f"{path}:2: train_batch_size: 7 must be")
    for missing in (tmp_path / "none.json", "{}"):
        status, _, err = run(capsys, "check", missing)
        assert status == 2 and "cannot be read" in err


def test_explain_and_schema_commands(capsys):
    status, out, _ = run(capsys, "explain", "zero_optimization.stage")
    assert status == 0 and out.startswith("zero_optimization.stage\n")
    assert run(capsys, "explain", "zero_optimization.stge") == (
        2, "", 'there is no key "zero_optimization.stge", did you mean "zero_optimization.stage"?\n',
    )  # fmt: skip
    status, out, _ = run(capsys, "schema")
    assert status == 0 and json.loads(out) == json_schema()
