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

import pytest
from tests.plan.measured import make

import wherry
from wherry import config as configs
from wherry.cli import main
from wherry.errors import WherryError
from wherry.plan.machines import Machine, described, known
from wherry.sources import SHAPES, find
from wherry.train.presets import Shape

pytestmark = pytest.mark.usefixtures("dry_runs_once")
SMALL = ("gpt2-10m", "--machine", "4090")
SMALLER = ("tests.plan.measured:make", "--sequence", "24")


@pytest.fixture(autouse=True)
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """About as many parameters as the presets have, in fewer layers: a dry run's time goes by its operations."""
    monkeypatch.setitem(SHAPES, "gpt2-10m", Shape(layers=2, hidden=660, heads=6, sequence=128))
    monkeypatch.setitem(SHAPES, "gpt2-124m", Shape(layers=2, hidden=2048, heads=16, sequence=1024, vocabulary=50257))


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is nearest is not looked for: it takes longer than the answer."""
    monkeypatch.setattr("wherry.plan.choose.nearest_change", lambda *_, **__: None)


def run(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(["plan", *arguments]) == status
    return capsys.readouterr().out


def found(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    return json.loads(run(capsys, *arguments, "--json", status=status))


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    out = capsys.readouterr()
    assert "Traceback" not in out.err and not out.out
    return out.err


@pytest.mark.long
@pytest.mark.usefixtures("no_search")
def test_it_says_whether_it_fits_what_limits_it_and_how_long_a_step_takes(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, *SMALL, "--set", "bf16.enabled=true", "--set", "train_micro_batch_size_per_gpu=4")
    assert max(map(len, out.splitlines())) <= 80
    for expected in ("10,726,320 parameters", "data parallel, bf16, adamw", "1 x 24 GB GPU", "fits,", "A step takes"):
        assert expected in out
    assert "limited by" in out


@pytest.mark.long
def test_what_does_not_fit_has_a_change_that_does_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    told = found(capsys, *SMALL, "--gpu-memory", "190MB", "--set", "bf16.enabled=true", status=1)
    assert not told["fits"]
    use = told["uses"][0]
    assert use["needed"] > use["usable"] == int(190e6 * 0.92)
    assert told["change"]["fits"]
    out = run(capsys, *SMALL, "--gpu-memory", "190MB", "--set", "bf16.enabled=true", status=1)
    assert "too much" in out and "It would fit with optimizer state in host memory, and take about" in out
    assert "A step takes" not in out
    assert "\n  --set zero_optimization.offload_optimizer.device=cpu\n" in out
    more = [f for key, value in told["change"]["values"].items() for f in ("--set", f"{key}={json.dumps(value)}")]
    after = found(capsys, *SMALL, "--gpu-memory", "190MB", "--set", "bf16.enabled=true", *more)
    assert after["fits"]
    assert after["step"]["seconds"] == pytest.approx(told["change"]["seconds"])


@pytest.mark.long
@pytest.mark.usefixtures("no_search")
def test_ranks_and_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    zero = ("--set", "zero_optimization.stage=3", "--set", "bf16.enabled=true")
    eight = found(capsys, "gpt2-10m", "--machine", "h100", *zero)
    many = found(capsys, "gpt2-10m", "--machine", "h100", "--nodes", "4", *zero)
    assert (eight["ranks"], many["ranks"]) == (8, 32)
    shares = [next(row["bytes"] for row in told["rows"] if row["category"] == "optimizer") for told in (eight, many)]
    assert shares[0] == pytest.approx(4 * shares[1], rel=0.01)
    assert many["step"]["terms"]["collectives"] > eight["step"]["terms"]["collectives"]


@pytest.mark.usefixtures("no_search")
def test_more_ranks_than_gpus_are_on_more_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    zero = ("--set", "zero_optimization.stage=3", "--set", "bf16.enabled=true")
    asked = found(capsys, *SMALLER, "--machine", "h100", "--ranks", "20", *zero)
    assert asked["machine"]["nodes"] == 3
    given = found(capsys, *SMALLER, "--machine", "h100", "--ranks", "20", "--nodes", "3", *zero)
    assert asked["step"] == given["step"] and asked["uses"] == given["uses"]


@pytest.mark.long
@pytest.mark.usefixtures("no_search")
def test_a_machine_whose_gpus_are_left_out_computes_on_its_host(capsys: pytest.CaptureFixture[str]) -> None:
    with_gpu, without = (found(capsys, *SMALL, "--gpus", count) for count in ("1", "0"))
    assert [use["place"] for use in without["uses"]] == ["host"] and without["machine"]["gpu_memory"] == 0
    assert without["step"]["seconds"] > 2 * with_gpu["step"]["seconds"]


@pytest.mark.long
@pytest.mark.usefixtures("no_search")
def test_without_a_gpu_there_is_one_memory_and_it_has_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--set", "zero_optimization.offload_optimizer.device=cpu", "--set", "bf16.enabled=true")
    for extra in ((), ("--dry-run",)):
        out = run(capsys, *SMALL, "--gpus", "0", *flags, *extra)
        assert "host" in out and "device" not in out
        with_gpu = run(capsys, *SMALL, *flags, *extra)
        assert "host" in with_gpu and "device" in with_gpu


@pytest.mark.usefixtures("no_search")
def test_gpus_of_no_known_size_are_asked_about(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = described(known("4090"), gpus=0)
    monkeypatch.setattr("wherry.plan.probe.this_machine", lambda *_, **__: here)
    assert "add --gpu-memory, like 24GB" in error(capsys, *SMALLER, "--gpus", "2")
    assert found(capsys, *SMALLER, "--gpus", "2", "--gpu-memory", "24GB")["ranks"] == 2


@pytest.mark.usefixtures("no_search")
def test_a_machine_that_was_busy_is_measured_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def this_machine(_: Path | None, *, again: bool, every_gpu: bool) -> Machine:
        assert every_gpu
        asked.append(again)
        return known("4090")

    monkeypatch.setattr("wherry.plan.probe.this_machine", this_machine)
    for flags in ((), ("--again",)):
        run(capsys, "gpt2-10m", *flags)
    assert asked == [False, True]


@pytest.mark.long
def test_rates_of_a_busy_machine_tell_of_nothing_faster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(known("4090"), busy=True)
    monkeypatch.setattr("wherry.plan.probe.this_machine", lambda *_, **__: here)
    out = run(capsys, "gpt2-10m")
    assert "What would be faster is not told" in out and "Faster by" not in out
    assert "It would fit with" in run(capsys, "gpt2-10m", "--gpu-memory", "200MB", status=1)


@pytest.mark.usefixtures("no_search")
def test_a_machine_of_which_all_is_said_is_not_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def this_machine(*_: Any, **__: Any) -> Machine:
        raise WherryError("measured")

    monkeypatch.setattr("wherry.plan.probe.gpu_names", lambda: [])
    monkeypatch.setattr("wherry.plan.probe.this_machine", this_machine)
    sizes = ("--gpu-memory", "24GB", "--host-memory", "64GB", "--disk", "1TB", "--pcie", "20GB", "--stream", "50GB")
    flags = ("--gpus", "2", "--nodes", "3", *sizes, "--disk-bandwidth", "3GB")
    told = found(capsys, *SMALLER, *flags)
    asked = {"gpus": 2, "nodes": 3, "gpu_memory": 24 * 10**9, "host_memory": 64 * 10**9, "disk": 10**12}
    asked |= {"pcie": 20 * 10**9, "stream": 50 * 10**9, "disk_read": 3 * 10**9, "disk_write": 3 * 10**9}
    assert told["ranks"] == 6 and asked.items() <= told["machine"].items()
    assert error(capsys, *SMALLER, *flags[:-2]) == "wherry: measured\n"


@pytest.mark.nightly
def test_gpus_that_compute_bf16_slowly_are_told_of_fp16(capsys: pytest.CaptureFixture[str]) -> None:
    told = found(capsys, "gpt2-124m", "--machine", "v100", "--set", "zero_optimization.stage=1")
    assert told["change"]["values"] == {"fp16.enabled": True} and not told["notes"]
    (note,) = found(capsys, "gpt2-10m", "--machine", "v100", "--set", "bf16.enabled=true")["notes"]
    assert "compute bf16 slowly" in note


@pytest.mark.usefixtures("no_search")
def test_a_model_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    told = found(capsys, "tests.plan.measured:make", "--machine", "4090", "--sequence", "24", "--recompute")
    assert told["recompute"] and told["sequence"] == 24
    assert told["step"]["seconds"] > 0


@pytest.mark.usefixtures("no_search")
def test_a_model_without_inputs_is_planned_by_its_weights(capsys: pytest.CaptureFixture[str]) -> None:
    told = found(capsys, "tests.plan.measured:Model", "--machine", "4090")
    assert told["step"] is None
    assert any("activations and time are not counted" in note for note in told["notes"])
    assert next(row["bytes"] for row in told["rows"] if row["category"] == "parameters") > 0


@pytest.mark.usefixtures("no_search")
def test_a_hugging_face_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="models of Hugging Face need transformers")
    shape = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 64, "n_head": 2}
    cached = tmp_path / "models--owner--tiny" / "snapshots" / "0123"
    cached.mkdir(parents=True)
    for folder in (tmp_path, cached):
        (folder / "config.json").write_text(json.dumps(shape | {"vocab_size": 100, "n_positions": 32}))
    told = found(capsys, str(cached), "--machine", "4090")
    assert told["model"] == "owner/tiny (gpt2)"
    assert told["sequence"] == 32 and told["step"]["seconds"] > 0
    assert told["parameters"] == 2 * (12 * 64**2 + 13 * 64) + (100 + 32 + 2) * 64
    for path in (tmp_path, tmp_path / "config.json"):
        model, _ = find(str(path)).make(1, 32)
        assert sum(p.numel() for p in model.parameters()) == told["parameters"]
    for wrong, message in (
        ("{}", 'no "model_type"'),
        ('{"model_type": "gptx"}', "config.json: Unrecognized model identifier: gptx\n"),
        ('{"model_type": "gpt2", "n_embd": "wide"}', "config.json: Validation error for field 'n_embd'"),
        ('{"model_type": "gpt2", "n_embd": 65, "n_head": 4}', "fails: ValueError: `embed_dim` must be divisible"),
    ):
        (tmp_path / "config.json").write_text(wrong)
        assert message in error(capsys, str(tmp_path), "--machine", "4090")


@pytest.mark.usefixtures("no_search")
def test_a_name_of_the_hub(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config is looked for in the hub's cache, and fetched with --online: that file alone."""
    hub = pytest.importorskip("huggingface_hub", reason="names of the hub need huggingface_hub")
    pytest.importorskip("transformers", reason="models of Hugging Face need transformers")
    from huggingface_hub.errors import GatedRepoError

    file, asked, kept = tmp_path / "config.json", list[tuple[str, ...]](), list[str]()
    shape = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 64, "n_head": 2}
    file.write_text(json.dumps(shape | {"vocab_size": 100, "n_positions": 32}))

    def download(name: str, allow_patterns: list[str], local_files_only: bool) -> str:
        if local_files_only:
            if not kept:
                raise OSError("not here")
            return kept[0]
        asked.append((name, *allow_patterns))
        if name == "owner/closed":
            raise GatedRepoError("no", response=SimpleNamespace(headers={}, request=None))  # type: ignore[arg-type]
        if name == "owner/lost":
            raise OSError("there is no network\nat all")
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    plan = ("--machine", "4090")
    assert "`hf download owner/tiny config.json --local-dir tiny`" in error(capsys, "owner/tiny", *plan)
    assert not asked
    assert found(capsys, "https://huggingface.co/owner/tiny", *plan, "--online")["sequence"] == 32
    assert asked == [("owner/tiny", "config.json")]
    assert "`hf auth login`" in error(capsys, "owner/closed", *plan, "--online")
    assert "cannot be fetched from the hub: there is no network at all" in error(
        capsys, "owner/lost", *plan, "--online"
    )
    kept.append(str(tmp_path))
    assert wherry.estimate("owner/tiny", machine="4090").sequence == 32


@pytest.mark.long
@pytest.mark.usefixtures("no_search")
def test_auto_writes_a_config_that_loads_fits_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, file = tmp_path / "given.json", tmp_path / "chosen.json"
    given.write_text('{"bf16": {"enabled": true}, "train_batch_size": 64, "zero_optimization": {"stage": "auto"}}')
    run(capsys, "gpt2-10m", "--machine", "h100", "--config", str(given), "--auto", "-o", str(file))
    text = file.read_text()
    assert "// Chosen by" in text and text.count("//") >= 5
    chosen = configs.load(file)
    assert chosen.bf16.enabled and chosen.train_batch_size == 64
    sizes = chosen.batch(8)
    assert sizes.train == 64 == sizes.micro * sizes.accumulation * 8
    again = found(capsys, "gpt2-10m", "--machine", "h100", "--config", str(file))
    assert again["fits"]


@pytest.mark.long
@pytest.mark.usefixtures("no_search")
def test_what_is_printed_fits_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    offload = ("--set", "zero_optimization.offload_optimizer.device=cpu", "--stream", "2GB", "--gpu-memory", "200MB")
    grid = ("gpt2-10m", "--machine", "h100", "--nodes", "16", "--tensor-parallel", "2", "--pipeline-parallel", "2")
    for arguments in (
        (*SMALL, "--auto"),
        (*SMALL, *offload, "--set", "gradient_clipping=1.0", "--set", "bf16.enabled=true", "--auto"),
        (*grid, "--ranks", "64", "--set", "zero_optimization.stage=2"),
        (*SMALL, "--gpus", "0", "--set", "zero_optimization.stage=auto"),
    ):
        out = run(capsys, *arguments)
        assert max(map(len, out.splitlines())) <= 80 and "\N{HORIZONTAL ELLIPSIS}" not in out


@pytest.mark.long
def test_auto_never_picks_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    told = found(capsys, *SMALL, "--gpu-memory", "150MB", "--set", "bf16.enabled=true", "--auto")
    assert told["estimate"]["fits"]
    assert told["fitting"] < told["tried"]


@pytest.mark.long
def test_the_status_is_1_where_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, file = (*SMALL, "--gpu-memory", "5MB", "--host-memory", "600MB", "--auto"), tmp_path / "chosen.json"
    out = run(capsys, *small, "-o", str(file), status=1)
    assert "Nothing fits. The smallest is" in out and "too much" in out and not file.exists()
    assert re.search(r"the host: 0\.\d\d GB of 0\.07 GB usable, 0\.\d\d GB too much", out)  # of one unit
    told = found(capsys, *small, status=1)
    assert told["values"] is None and told["fitting"] == 0 < told["tried"] and not told["estimate"]["fits"]


@pytest.mark.usefixtures("no_search")
def test_what_is_left_open_without_auto_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    told = found(capsys, *SMALL, "--set", "zero_optimization.stage=auto", "--set", "bf16.enabled=auto")
    (note,) = told["notes"]
    assert note == '"auto" is counted at its default here, and --auto chooses it: zero_optimization.stage'


@pytest.mark.long
@pytest.mark.usefixtures("no_search")
def test_activations_that_are_left_to_auto_are_told_of_and_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    key, micro = "activation_checkpointing.policy", ("--set", "train_micro_batch_size_per_gpu=32")
    fixed: tuple[str, ...] = (*SMALL, "--sequence", "128", *micro, "--set", "bf16.enabled=true")
    for device in ("offload_optimizer", "offload_param"):
        fixed = (*fixed, "--set", f"zero_optimization.{device}.device=none")
    auto, needed = ("--set", f"{key}=auto"), dict[str, int]()
    for policy in ("none", "recompute", "auto"):
        told = found(capsys, *fixed, "--set", f"{key}={policy}")
        needed[policy] = told["uses"][0]["needed"]
        assert any("counted as if every unit were recomputed" in note for note in told["notes"]) == (policy == "auto")
    assert needed["auto"] == needed["recompute"] < needed["none"]
    between = (needed["none"] + needed["recompute"]) / 2 / 0.92
    for memory, policy in (("24GB", "none"), (f"{between:.0f}", "recompute")):
        told = found(capsys, *fixed, *auto, "--gpu-memory", memory, "--auto")
        assert told["values"][key] == policy and told["estimate"]["fits"]
        assert ("again" in told["reasons"][key]) == (policy == "recompute")


@pytest.mark.long
def test_auto_leaves_what_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ("--set", "zero_optimization.stage=2", "--set", "train_micro_batch_size_per_gpu=2")
    told = found(capsys, *SMALLER, "--machine", "h100", *fixed, "--auto")
    assert "zero_optimization.stage" not in told["values"]
    assert told["estimate"]["placement"] in ("ZeRO-2", "ZeRO-Offload")
    assert told["estimate"]["micro_batch"] == 2


@pytest.mark.long
def test_auto_leaves_a_share_of_the_state_on_the_device_where_that_is_faster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The host's update takes longest here, and a share of it fits on the device: not all, as there is no room."""
    slow = ("--stream", "2GB", "--set", "zero_optimization.offload_optimizer.device=cpu", "--set", "bf16.enabled=true")
    clipped = (*SMALL, "--gpu-memory", "200MB", *slow, "--set", "gradient_clipping=1.0", "--auto")
    key, file = "zero_optimization.offload_optimizer.ratio", tmp_path / "chosen.json"
    told = found(capsys, *clipped, "-o", str(file))
    whole = found(capsys, *clipped, "--set", f"{key}=1.0")
    assert key not in whole["values"] and 0 < told["values"][key] < 1
    assert told["estimate"]["fits"]
    rates = [each["estimate"]["step"]["tokens_per_second"] for each in (told, whole)]
    assert rates[0] > 1.02 * rates[1]
    assert configs.load(file).zero_optimization.offload_optimizer.ratio == told["values"][key]
    assert "is updated on the device, at the same time" in file.read_text()


@pytest.mark.usefixtures("no_search")
def test_the_page_stands_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.html"
    run(capsys, *SMALL, "--html", str(file))
    text = file.read_text()
    assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")
    assert "http" not in text and "src=" not in text
    assert 'name="viewport"' in text


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((*SMALL, "--gpu-memory", "150MB"), marks=pytest.mark.long, id="a change"),
        pytest.param((*SMALLER, "--machine", "4090", "--auto"), id="a choice"),
    ],
)
def test_the_page_says_what_the_terminal_says(
    more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wherry.cli.plan_model.WIDTH", 200)
    monkeypatch.setenv("COLUMNS", "200")
    out = run(capsys, *more, "--html", str(tmp_path / "plan.html"), status=int("--gpu-memory" in more))
    text = (tmp_path / "plan.html").read_text()
    shown = "".join(html.unescape(re.sub(r"<[^>]*>", "", text)).split())
    for line in out.splitlines():
        words = re.sub("[■█▒░]", "", line)
        assert "".join(words.split()) in shown, line
    # Each colour of the bars is told of.
    colours = set(re.findall(r"background: (var\S+)\"></div>", text))
    assert colours and colours <= set(re.findall(r'class="swatch" style="background: (var\S+)"', text))


@pytest.mark.long
def test_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    zero = ("--set", "zero_optimization.stage=3", "--set", "bf16.enabled=true")
    out = run(capsys, *SMALLER, "--dry-run", "--ranks", "64", "--rank", "7", *zero)
    assert max(map(len, out.splitlines())) <= 80
    assert "rank 7 of 64" in out and "reduce_scatter" in out and "peak" in out
    told = found(capsys, "gpt2-10m", "--dry-run", "--machine", "h100", "--nodes", "8", *zero)
    assert told["ranks"] == 64
    assert told["calls"]["reduce_scatter"] == 3
    assert {line["category"] for line in told["memory"]} >= {"parameters", "gathered", "activations"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt2-10m", "--gpu-memory", "12GB"), "--gpu-memory: this machine has no GPU; add --gpus 1, or name a"),
        (("gpt2-1.5c",), 'did you mean "gpt2-1.5b"?'),
        (("",), "a name on the hub with its owner, like openai-community/gpt2, or module:callable, got ''"),
        (("./Llama-3.1-8B",), "MODEL: there is no such folder: ./Llama-3.1-8B\n"),
        (("tests/plam",), 'there is no such folder: tests/plam, did you mean "tests/plan"?'),
        (("no/config.json",), "MODEL: there is no such file: no/config.json\n"),
        (("7.5e9",), "a number of parameters has its own table: wherry plan --params 7.5e9"),
        (("7,5", "--machine", "4090"), "wherry plan --params 7.5B"),
        (("no_such_module:f", "--machine", "4090"), "cannot be imported"),
        (("tests.plan.measured:WIDTH", "--machine", "4090"), "expected a callable"),
        (("gpt2-10m", "--machine", "h1000"), "did you mean h100?"),
        (("gpt2-10m", "--machine", ""), "--machine: none is known as ''"),
        (("gpt2-10m", "--machine", "RTX 5060 Ti 8GB"), "5060ti has 16 GB here, not 8; give --machine 5060ti --gpu-mem"),
        (("gpt2-10m", "--machine", "4090", "--gpu-memory", "much"), "--gpu-memory: expected bytes"),
        (("gpt2-10m", "--machine", "4090", "--gpu-memory", "24"), "got '24'; that is 24 bytes: write 24GB"),
        (("gpt2-10m", "--machine", "4090", "--ranks", ""), "--ranks: expected a whole number"),
        (("gpt2-10m", "--gpus", "0", "--gpu-memory", "24GB"), "--gpu-memory: with --gpus 0 there is no GPU"),
        (("gpt2-10m", "--machine", "4090", "--nodes", "0"), "--nodes: expected 1 or more"),
        (("gpt2-10m", "--params", "1e9"), "--params"),
        (("gpt2-10m", "--layers", "3"), "--layers"),
        (("--params", "1e9", "--machine", "4090"), "--machine: goes with MODEL"),
        (("gpt2-10m", "--machine", "4090", "-o", "x"), "-o: goes with --auto"),
        (("gpt2-10m", "--machine", "4090", "--again"), "--again: measures this machine"),
        (("gpt2-10m", "--machine", "4090", "--html", "no/such/page.html"), "--html: there is no folder no/such"),
        (("gpt2-10m", "--machine", "4090", "--auto", "-o", "no/such/c.json"), "-o: there is no folder no/such"),
        (("gpt2-10m", "--machine", "4090", "--html", "."), "--html: . is a folder"),
        (("gpt2-10m", "--machine", "4090", "--ranks", "3", "--nodes", "2"), "2 x 1 GPUs are 2"),
        (("gpt2-10m", "--rank", "1"), "--rank: goes with --dry-run"),
        (("gpt2-10m", "--machine", "4090", "--set", "zero_optimization.stag=3"), "stage"),
        (("gpt2-10m", "--machine", "4090", "--config", "no.json"), "no.json"),
        (("gpt2-10m", "--dry-run", "--ranks", "2", "--rank", "2"), "rank: expected 0 to 1"),
        (("gpt2-10m", "--dry-run", "--gpu-memory", "24GB"), "--gpu-memory: a dry run asks nobody for room"),
        ((*SMALL, "--sequence", "100000000000000000"), "no tensor can be as large"),
        (("gpt2-10m", "--dry-run", "--nodes", "0"), "--nodes: expected 1 or more"),
    ],
)
def test_mistakes_are_told_without_a_traceback(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wherry.plan.probe.this_machine", lambda *_, **__: described(known("4090"), gpus=0))
    assert message in error(capsys, *arguments)


@pytest.mark.parametrize(
    ("flag", "text", "message"),
    [
        ("--gpu-memory", "much", "--gpu-memory: expected bytes, like 32GB"),
        ("--gpu-memory", "0", "--gpu-memory: expected bytes, like 32GB"),
        ("--gpu-memory", "5B", "--gpu-memory: expected from 1 MB to 10 TB, got '5B'"),
        ("--gpu-memory", "3PB", "--gpu-memory: expected from 1 MB to 10 TB, got '3PB'"),
        ("--gpu-memory", "7,5GB", "got '7,5GB'; write 7.5GB"),
        ("--host-memory", "7,5", "got '7,5'; write 7.5GB"),
        ("--disk", "1,000GB", "got '1,000GB'; write 1000GB, or 1.000GB if that is meant"),
        ("--pcie", "0GB", "--pcie: expected bytes"),
        ("--stream", "1KB", "--stream: expected from 1 MB"),
        ("--disk-bandwidth", "fast", "--disk-bandwidth: expected bytes"),
        (
            "--ranks",
            "7,5",
            "--ranks: expected a whole number of 1 or more, like 7.5e9, 7.5B or 1T, got '7,5'; give one",
        ),
        ("--machine", "4090s", "did you mean 4090?"),
    ],
)
def test_nonsense_is_refused_before_anything_is_measured_or_run(
    flag: str, text: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(*_: Any, **__: Any) -> Any:
        raise AssertionError("something took long")

    monkeypatch.setattr("wherry.plan.probe.this_machine", begun)
    monkeypatch.setattr("wherry.plan.dry_run.outline", begun)
    assert message in error(capsys, "gpt2-10m", flag, text)


def test_a_slow_step_has_a_rate(capsys: pytest.CaptureFixture[str], no_search: None) -> None:
    out = run(capsys, *SMALL, "--sequence", "1", "--gpus", "0", "--stream", "1MB")
    rate = re.search(r"A step takes about ([\d.]+) s: ([\d.]+) samples a second", out)
    assert rate is not None and float(rate[1]) > 100
    assert float(rate[2]) == pytest.approx(1 / float(rate[1]), rel=0.01)


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


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("mine:wrong_inputs", "mine:wrong_inputs: a step of it fails: RuntimeError: "),
        ("mine:wrong_inputs", "mine.py:7)"),
        ("mine:breaks", "MODEL: mine:breaks fails: KeyError: 'vocabulary' ("),
        ("mine:breaks", "mine.py:13)"),
        ("mine:asks", "MODEL: mine:asks needs path, and a plan gives micro_batch and sequence only"),
        ("mine:nothing", "has no attribute 'nothing'"),
        ("broken:make", "broken:make cannot be imported: NameError: name 'undefined' is not defined ("),
        ("unread:make", "unread:make cannot be imported: "),
        (":make", "cannot be imported"),
    ],
)
def test_what_ones_own_code_raises_is_told_with_its_line(
    model: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("mine", MINE), ("broken", "undefined"), ("unread", "def make(:")):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert message in error(capsys, model, "--machine", "4090")


def test_what_transformers_cannot_import_is_no_mistake_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def for_model(kind: str) -> None:
        raise ModuleNotFoundError("No module named 'kernels'")

    fake = SimpleNamespace(AutoConfig=SimpleNamespace(for_model=for_model))
    monkeypatch.setitem(sys.modules, "transformers", fake)  # type: ignore[arg-type]
    monkeypatch.setattr("wherry.sources.metadata.version", lambda name: "5.0")
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')
    with pytest.raises(WherryError, match=r"transformers 5\.0 cannot import what .*: No module named 'kernels'"):
        wherry.estimate(str(tmp_path), machine="4090")


def test_an_error_of_wherry_itself_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wherry.plan.dry_run.longest_run", None)
    with pytest.raises(TypeError, match="not callable"):
        wherry.estimate(make, machine="4090")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((float("nan"),), "parameters: expected 1 or more, got nan"),
        ((0,), "parameters: expected 1 or more, got 0"),
        ((1e9, {"ranks": 0}), "ranks: expected 1 or more, got 0"),
        ((1e9, {"ranks": -2}), "ranks: expected 1 or more, got -2"),
        (("gpt2-10m", {"sequence": 0}), "sequence: expected 1 or more, got 0"),
        ((1e9, {"tensor_parallel": 0}), "tensor-parallel: expected 1 or more, got 0"),
        ((1e9, {"machine": "4091"}), "did you mean 4090?"),
        (("gpt2-10b5", {}), 'did you mean "gpt2-10b"?'),
    ],
)
def test_mistakes_of_programs(given: tuple[Any, ...], message: str) -> None:
    model, more = given if len(given) == 2 else (given[0], {})
    with pytest.raises(WherryError, match=re.escape(message)):
        wherry.estimate(model, **{"machine": "4090", **more})


@pytest.mark.long
@pytest.mark.usefixtures("no_search")
def test_the_disk_that_is_measured_is_the_one_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def this_machine(folder: Path | None = None, **_: Any) -> Machine:
        asked.append(folder)
        return known("4090")

    monkeypatch.setattr("wherry.plan.probe.this_machine", this_machine)
    monkeypatch.setattr("wherry.forecast.this_machine", this_machine)
    zero = "zero_optimization.offload_optimizer"
    path = tmp_path / "not" / "made"
    flags = ("--set", f"{zero}.device=nvme", "--set", f"{zero}.nvme_path={path}")
    run(capsys, "gpt2-10m", *flags)
    run(capsys, "gpt2-10m", "--auto", "--disk-path", str(tmp_path))
    run(capsys, "gpt2-10m")
    offload = {"device": "nvme", "nvme_path": [str(path)]}
    wherry.estimate("gpt2-10m", {"zero_optimization": {"offload_optimizer": offload}})
    assert asked == [tmp_path, tmp_path, None, tmp_path]
