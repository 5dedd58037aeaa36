"""`wherry plan MODEL` as a person and a program meet it."""

from __future__ import annotations

import html
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import wherry
from wherry import config as configs
from wherry.errors import WherryError
from wherry.plan import choose
from wherry.plan.machines import Machine, described, known
from wherry.sources import SHAPES
from wherry.train.presets import Shape

pytestmark = pytest.mark.usefixtures("dry_runs_once")
SMALL = ("gpt2-10m", "--machine", "4090")
SMALLER = ("tests.plan.measured:one_block", "--sequence", "24")
BF16 = ("--set", "bf16.enabled=true")
ZERO_3 = ("--set", "zero_optimization.stage=3", *BF16)
OFFLOAD = "zero_optimization.offload_optimizer"
NEAREST_CHANGE = choose.nearest_change


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the preset few and wide layers, as a dry run's time goes by its operations; search for no nearest change."""
    monkeypatch.setitem(SHAPES, "gpt2-10m", Shape(layers=2, hidden=660, heads=6, sequence=128))
    monkeypatch.setattr(choose, "nearest_change", lambda *_, **__: None)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search for the nearest change, which takes longer than the answer."""
    monkeypatch.setattr(choose, "nearest_change", NEAREST_CHANGE)


def assert_page_says(out: str, file: Path) -> None:
    """Compare a page, which stands by itself, with what the terminal says."""
    text = file.read_text()
    assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")
    assert "http" not in text and "src=" not in text
    shown = "".join(html.unescape(re.sub(r"<[^>]*>", "", text)).split())
    for line in out.splitlines():
        assert "".join(re.sub("[■█▒░]", "", line).split()) in shown, line


def test_it_says_whether_it_fits_what_limits_it_and_how_long_a_step_takes(plan, tmp_path):
    out = plan(*SMALLER, "--machine", "4090", *BF16, "--html", str(tmp_path / "plan.html"))
    for expected in ("data parallel, bf16, adamw", "1 x 24 GB GPU", "fits,", "A step takes", "limited by"):
        assert expected in out
    assert_page_says(out, tmp_path / "plan.html")
    slow = plan(*SMALLER, "--machine", "4090", "--gpus", "0", "--stream", "1MB")
    rate = re.search(r"A step takes about ([\d.]+) s: ([\d.]+) tokens a second", slow)
    assert rate is not None and float(rate[2]) == pytest.approx(24 / float(rate[1]), rel=0.01)


@pytest.mark.long
def test_what_does_not_fit_has_a_change_that_does_what_is_said(plan, tmp_path, search):
    small = (*SMALL, "--gpu-memory", "190MB", *BF16)
    told = plan.json(*small, status=1)
    use = told["uses"][0]
    assert not told["fits"] and use["needed"] > use["usable"] == int(190e6 * 0.92)
    assert told["change"]["fits"]
    out = plan(*small, "--html", str(tmp_path / "plan.html"), status=1)
    assert "too much" in out and "It would fit with optimizer state in host memory, and take about" in out
    assert "A step takes" not in out and f"\n  --set {OFFLOAD}.device=cpu\n" in out
    assert_page_says(out, tmp_path / "plan.html")
    more = [f for key, value in told["change"]["values"].items() for f in ("--set", f"{key}={json.dumps(value)}")]
    after = plan.json(*small, *more)
    assert after["fits"] and after["step"]["seconds"] == pytest.approx(told["change"]["seconds"])


def test_ranks_and_nodes(plan):
    words = (*SMALLER, "--machine", "h100", *ZERO_3)
    eight, many = plan.json(*words), plan.json(*words, "--nodes", "4")
    assert (eight["ranks"], many["ranks"]) == (8, 32)
    shares = [next(row["bytes"] for row in told["rows"] if row["category"] == "optimizer") for told in (eight, many)]
    assert shares[0] == pytest.approx(4 * shares[1], rel=0.2)  # padding aside
    assert many["step"]["terms"]["collectives"] > eight["step"]["terms"]["collectives"]
    # More ranks than GPUs are on more nodes.
    assert plan.json(*words, "--ranks", "20")["machine"]["nodes"] == 3


def test_without_a_gpu_there_is_one_memory_and_it_has_one_name(plan):
    offload = ("--set", f"{OFFLOAD}.device=cpu", *BF16)
    for extra in ((), ("--dry-run",)):
        out = plan(*SMALLER, "--machine", "4090", "--gpus", "0", *offload, *extra)
        assert "host" in out and "device" not in out


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path | None, bool]]:
    """Folders whose disk was measured, and whether it was again: on a machine that is busy."""
    calls = []

    def this_machine(folder: Path | None = None, *, again: bool = False, every_gpu: bool = False) -> Machine:
        calls.append((folder, again))
        return replace(known("4090"), busy=True)

    monkeypatch.setattr("wherry.plan.probe.gpu_names", lambda: [])
    monkeypatch.setattr("wherry.plan.probe.this_machine", this_machine)
    monkeypatch.setattr("wherry.forecast.this_machine", this_machine)
    return calls


def test_a_machine_of_which_all_is_said_is_not_measured(plan, asked, monkeypatch):
    sizes = ("--gpu-memory", "24GB", "--host-memory", "64GB", "--disk", "1TB", "--pcie", "20GB", "--stream", "50GB")
    told = plan.json(*SMALLER, "--gpus", "2", "--nodes", "3", *sizes, "--disk-bandwidth", "3GB")
    expected = {"gpus": 2, "nodes": 3, "gpu_memory": 24 * 10**9, "host_memory": 64 * 10**9, "disk": 10**12}
    expected |= {"pcie": 20 * 10**9, "stream": 50 * 10**9, "disk_read": 3 * 10**9, "disk_write": 3 * 10**9}
    assert told["ranks"] == 6 and expected.items() <= told["machine"].items() and not asked
    monkeypatch.setattr("wherry.plan.probe.this_machine", lambda *_, **__: described(known("4090"), gpus=0))
    assert "add --gpu-memory, like 24GB" in plan.error(*SMALLER, "--gpus", "2")
    assert "--gpu-memory: this machine has no GPU; add --gpus 1" in plan.error(*SMALLER, "--gpu-memory", "12GB")


def test_a_busy_machine_tells_of_nothing_faster_and_its_disk_is_the_one_that_is_named(plan, tmp_path, asked, search):
    out = plan(*SMALLER)
    assert "What would be faster is not told" in out and "Faster by" not in out
    plan(*SMALLER, "--again")
    folder = str(tmp_path / "not" / "made")
    plan(*SMALLER, "--set", f"{OFFLOAD}.device=nvme", "--set", f"{OFFLOAD}.nvme_path={folder}")
    wherry.estimate(10**6, {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": [folder]}}})
    assert asked == [(None, False), (None, True), (tmp_path, False), (tmp_path, False)]


def test_a_model_of_ones_own_is_planned_by_its_weights_where_it_has_no_inputs(plan):
    auto = ("--set", "zero_optimization.stage=auto", "--set", "gradient_clipping=auto")
    told = plan.json(*SMALLER, "--machine", "v100", "--recompute", *BF16, *auto)
    assert told["recompute"] and told["sequence"] == 24 and told["step"]["seconds"] > 0
    assert any("compute bf16 slowly" in note for note in told["notes"])
    left = '"auto" is counted at its default here, and --auto chooses it: zero_optimization.stage'
    assert left in told["notes"]
    told = plan.json("tests.plan.measured:Model", "--machine", "4090")
    assert told["step"] is None
    assert any("activations and time are not counted" in note for note in told["notes"])
    assert next(row["bytes"] for row in told["rows"] if row["category"] == "parameters") > 0


def test_a_hugging_face_config_of_a_folder_or_of_the_hub(plan, tmp_path, monkeypatch):
    """A name of the hub is looked for in its cache; with --online its config, that file alone, is fetched."""
    hub = pytest.importorskip("huggingface_hub", reason="names of the hub need huggingface_hub")
    transformers = pytest.importorskip("transformers", reason="models of Hugging Face need transformers")
    from huggingface_hub.errors import GatedRepoError

    cached, asked, kept = tmp_path / "models--owner--tiny" / "snapshots" / "0123", list[tuple[str, ...]](), list[str]()
    cached.mkdir(parents=True)
    shape = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 64, "n_head": 2}
    (cached / "config.json").write_text(json.dumps(shape | {"vocab_size": 100, "n_positions": 32}))

    def download(name: str, allow_patterns: list[str], local_files_only: bool) -> str:
        if local_files_only:
            if not kept:
                raise OSError("not here")
            return kept[0]
        asked.append((name, *allow_patterns))
        if name == "owner/closed":
            raise GatedRepoError("no", response=SimpleNamespace(headers={}, request=None))  # type: ignore[arg-type]
        return str(cached)

    monkeypatch.setattr(hub, "snapshot_download", download)
    words = ("--machine", "4090")
    assert "`hf download owner/tiny config.json --local-dir tiny`" in plan.error("owner/tiny", *words)
    assert not asked
    told = plan.json("https://huggingface.co/owner/tiny", *words, "--online")
    assert asked == [("owner/tiny", "config.json")]
    assert (told["model"], told["sequence"]) == ("owner/tiny (gpt2)", 32) and told["step"]["seconds"] > 0
    assert told["parameters"] == 2 * (12 * 64**2 + 13 * 64) + (100 + 32 + 2) * 64
    assert "`hf auth login`" in plan.error("owner/closed", *words, "--online")
    kept.append(str(cached))
    assert wherry.estimate("owner/tiny", machine="4090").parameters == told["parameters"]
    for wrong, message in (
        ("{}", 'no "model_type"'),
        ('{"model_type": "gptx"}', "config.json: Unrecognized model identifier: gptx\n"),
        ('{"model_type": "gpt2", "n_embd": "wide"}', "config.json: Validation error for field 'n_embd'"),
        ('{"model_type": "gpt2", "n_embd": 65, "n_head": 4}', "fails: ValueError: `embed_dim` must be divisible"),
    ):
        (tmp_path / "config.json").write_text(wrong)
        assert message in plan.error(str(tmp_path), *words)
    kernels = ModuleNotFoundError("No module named 'kernels'")
    monkeypatch.setattr(transformers.AutoConfig, "for_model", mock.Mock(side_effect=kernels))
    assert "config.json needs: No module named 'kernels'\n" in plan.error(str(tmp_path), *words)


def test_auto_writes_a_config_that_loads_fits_keeps_what_was_given_and_says_why(plan, tmp_path):
    given, file, page = tmp_path / "given.json", tmp_path / "chosen.json", tmp_path / "plan.html"
    zero = {"stage": "auto", "offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}
    fixed = {"bf16": {"enabled": True}, "train_batch_size": 64, "activation_checkpointing": {"policy": "none"}}
    given.write_text(json.dumps(fixed | {"zero_optimization": zero}))
    words = (*SMALLER, "--machine", "4090", "--config")
    out = plan(*words, str(given), "--auto", "-o", str(file), "--html", str(page))
    assert_page_says(out, page)
    text = file.read_text()
    assert "// Chosen by" in text and text.count("//") >= 5
    chosen = configs.load(file)
    assert chosen.bf16.enabled
    sizes = chosen.batch(1)
    assert sizes.train == 64 == sizes.micro * sizes.accumulation
    assert plan.json(*words, str(file))["fits"]


@pytest.mark.long
def test_auto_never_picks_what_does_not_fit(plan, tmp_path, search):
    told = plan.json(*SMALL, "--gpu-memory", "150MB", *BF16, "--auto")
    assert told["estimate"]["fits"] and told["fitting"] < told["tried"]
    small, file = (*SMALL, "--gpu-memory", "5MB", "--host-memory", "600MB", "--auto"), tmp_path / "chosen.json"
    out = plan(*small, "-o", str(file), status=1)
    assert "Nothing fits. The smallest is" in out and "too much" in out and not file.exists()
    assert re.search(r"the host: 0\.\d\d GB of 0\.07 GB usable, 0\.\d\d GB too much", out)  # of one unit
    told = plan.json(*small, status=1)
    assert told["values"] is None and told["fitting"] == 0 < told["tried"] and not told["estimate"]["fits"]


@pytest.mark.long
def test_activations_that_are_left_to_auto_are_told_of_and_chosen(plan):
    key, fixed = "activation_checkpointing.policy", (*SMALL, "--set", "train_micro_batch_size_per_gpu=32", *BF16)
    for device in ("offload_optimizer", "offload_param"):
        fixed = (*fixed, "--set", f"zero_optimization.{device}.device=none")
    needed = dict[str, int]()
    for policy in ("none", "recompute", "auto"):
        told = plan.json(*fixed, "--set", f"{key}={policy}")
        needed[policy] = told["uses"][0]["needed"]
        assert any("counted as if every unit were recomputed" in note for note in told["notes"]) == (policy == "auto")
    assert needed["auto"] == needed["recompute"] < needed["none"]
    between = (needed["none"] + needed["recompute"]) / 2 / 0.92
    for memory, policy in (("24GB", "none"), (f"{between:.0f}", "recompute")):
        told = plan.json(*fixed, "--set", f"{key}=auto", "--gpu-memory", memory, "--auto")
        assert told["values"][key] == policy and told["estimate"]["fits"]
        assert ("again" in told["reasons"][key]) == (policy == "recompute")


@pytest.mark.long
def test_auto_leaves_a_share_of_the_state_on_the_device_where_that_is_faster(plan, tmp_path, search):
    """The host's update takes longest here, and a share of it fits on the device: not all, as there is no room."""
    slow = ("--gpu-memory", "200MB", "--stream", "2GB", "--set", f"{OFFLOAD}.device=cpu", *BF16)
    clipped = (*SMALL, *slow, "--set", "gradient_clipping=1.0", "--auto")
    key, file = f"{OFFLOAD}.ratio", tmp_path / "chosen.json"
    told, whole = plan.json(*clipped, "-o", str(file)), plan.json(*clipped, "--set", f"{key}=1.0")
    assert key not in whole["values"] and 0 < told["values"][key] < 1
    rates = [each["estimate"]["step"]["tokens_per_second"] for each in (told, whole)]
    assert told["estimate"]["fits"] and rates[0] > 1.02 * rates[1]
    assert configs.load(file).zero_optimization.offload_optimizer.ratio == told["values"][key]
    assert "is updated on the device, at the same time" in file.read_text()


def test_a_dry_run(plan):
    out = plan(*SMALLER, "--dry-run", "--ranks", "64", "--rank", "7", *ZERO_3)
    assert "rank 7 of 64" in out and "reduce_scatter" in out and "peak" in out
    told = plan.json(*SMALLER, "--dry-run", "--machine", "h100", "--nodes", "8", *ZERO_3)
    assert told["ranks"] == 64 and told["calls"]["reduce_scatter"] > 0
    assert {line["category"] for line in told["memory"]} >= {"parameters", "gathered", "activations"}


# --- mistakes ---

# Flags, and a part of the message. Nothing is measured or run before.
MISTAKES = [
    (("gpt2-1.5c",), 'did you mean "gpt2-1.5b"?'),
    (("",), "a name on the hub with its owner, like openai-community/gpt2, or module:callable, got ''"),
    (("tests/plam",), 'there is no such folder: tests/plam, did you mean "tests/plan"?'),
    (("no/config.json",), "MODEL: there is no such file: no/config.json\n"),
    (("7.5e9",), "a number of parameters has its own table: wherry plan --params 7.5e9"),
    (("7,5", "--machine", "4090"), "wherry plan --params 7.5B"),
    (("tests.plan.measured:WIDTH", "--machine", "4090"), "expected a callable"),
    (("gpt2-10m", "--machine", "h1000"), "did you mean h100?"),
    (("gpt2-10m", "--machine", ""), "--machine: none is known as ''"),
    (("gpt2-10m", "--machine", "RTX 5060 Ti 8GB"), "5060ti has 16 GB here, not 8; give --machine 5060ti --gpu-mem"),
    (("gpt2-10m", "--gpu-memory", "24"), "got '24'; that is 24 bytes: write 24GB"),
    (("gpt2-10m", "--gpu-memory", "7,5GB"), "got '7,5GB'; write 7.5GB"),
    (("gpt2-10m", "--disk", "1,000GB"), "got '1,000GB'; write 1000GB, or 1.000GB if that is meant"),
    (("gpt2-10m", "--ranks", "7,5"), "--ranks: expected a whole number of 1 or more, like 7.5e9, 7.5B or 1T"),
    (("gpt2-10m", "--gpus", "0", "--gpu-memory", "24GB"), "--gpu-memory: with --gpus 0 there is no GPU"),
    (("--params", "1e9", "--machine", "4090"), "--machine: goes with MODEL"),
    (("gpt2-10m", "--machine", "4090", "-o", "x"), "-o: goes with --auto"),
    (("gpt2-10m", "--machine", "4090", "--again"), "--again: measures this machine"),
    (("gpt2-10m", "--machine", "4090", "--html", "no/such/page.html"), "--html: there is no folder no/such"),
    (("gpt2-10m", "--machine", "4090", "--html", "."), "--html: . is a folder"),
    (("gpt2-10m", "--machine", "4090", "--ranks", "3", "--nodes", "2"), "2 x 1 GPUs are 2"),
    (("gpt2-10m", "--rank", "1"), "--rank: goes with --dry-run"),
    (("gpt2-10m", "--machine", "4090", "--set", "zero_optimization.stag=3"), "stage"),
    (("gpt2-10m", "--machine", "4090", "--config", "no.json"), "no.json"),
    (("gpt2-10m", "--dry-run", "--ranks", "2", "--rank", "2"), "rank: expected 0 to 1"),
    (("gpt2-10m", "--dry-run", "--stage", "1"), "stage: expected 0 to 0, got 1"),
    (("gpt2-10m", "--tensor-parallel", "3", "--machine", "h100"), "8 ranks do not divide by 3"),
    (("gpt2-10m", "--tensor-parallel", "4", "--machine", "h100"), "does not divide the 6 attention heads"),
    (("gpt2-10m", "--tensor-parallel", "0"), "--tensor-parallel: expected 1 or more"),
    (("gpt2-10m", "--dry-run", "--gpu-memory", "24GB"), "--gpu-memory: a dry run asks nobody for room"),
]


def test_mistakes_are_told_before_anything_is_measured_or_run(plan, monkeypatch):
    def begun(*_: Any, **__: Any) -> Any:
        raise AssertionError("something took long")

    monkeypatch.setattr("wherry.plan.probe.this_machine", begun)
    monkeypatch.setattr("wherry.plan.dry_run.outline", begun)
    for arguments, message in MISTAKES:
        assert message in plan.error(*arguments), arguments


MINE = """
import torch
from torch import nn

class Wide(nn.Linear):
    def forward(self, x):
        return super().forward(x)  # line 7

def wrong_inputs(micro_batch=1):
    return Wide(3, 4), torch.zeros(micro_batch, 5)

def breaks():
    raise KeyError("vocabulary")  # line 13

def asks(path, sequence):
    return Wide(3, 4)
"""


CODE_OF_ONES_OWN = [
    ("mine:wrong_inputs", "mine:wrong_inputs: a step of it fails: RuntimeError: "),
    ("mine:wrong_inputs", "mine.py:7)"),
    ("mine:breaks", "MODEL: mine:breaks fails: KeyError: 'vocabulary' ("),
    ("mine:breaks", "mine.py:13)"),
    ("mine:asks", "MODEL: mine:asks needs path, and a plan gives micro_batch and sequence only"),
    ("broken:make", "broken:make cannot be imported: NameError: name 'undefined' is not defined ("),
    (":make", "cannot be imported"),
]


def test_what_ones_own_code_raises_is_told_with_its_line(plan, tmp_path, monkeypatch):
    for name, text in (("mine", MINE), ("broken", "undefined")):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    for model, message in CODE_OF_ONES_OWN:
        assert message in plan.error(model, "--machine", "4090")
    assert "no tensor can be as large" in plan.error(*SMALL, "--sequence", "100000000000000000")


def test_mistakes_of_programs():
    for model, more, message in (
        (float("nan"), {}, "parameters: expected 1 or more, got nan"),
        (1e9, {"ranks": -2}, "ranks: expected 1 or more, got -2"),
        ("gpt2-10m", {"sequence": 0}, "sequence: expected 1 or more, got 0"),
        (1e9, {"machine": "4091"}, "did you mean 4090?"),
    ):
        with pytest.raises(WherryError, match=re.escape(message)):
            wherry.estimate(model, **{"machine": "4090", **more})
