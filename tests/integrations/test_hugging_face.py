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
MODES = ["own", pytest.param("alias", marks=pytest.mark.nightly)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hugging_face")


@pytest.fixture(scope="module")
def libraries(forks):
    """Forks of a process that has imported them."""
    return forks.of(*HUGGING_FACE)


def run(forks, folder, mode, ranks):
    done = forks.run(PROGRAM, mode, folder, ranks=ranks, folder=folder, timeout=280)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads((folder / f"{mode}.json").read_text())


@pytest.fixture(scope="module")
def plain(libraries, folder):
    return run(libraries, folder, "plain", 1)


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    """Wherry's own classes, or an unchanged script through the alias."""
    return request.param


@pytest.fixture(scope="module")
def ours(forks, folder, plain, mode):
    return run(forks.of(*HUGGING_FACE, as_deepspeed=mode == "alias"), folder, mode, 2)


def close(expected, tolerance=2e-5):
    return pytest.approx(expected, rel=tolerance)


def same_log(ours, theirs):
    assert len(ours) == len(theirs) > 2
    for mine, its in zip(ours, theirs, strict=True):
        assert mine == close(its)


@pytest.mark.timeout(600)
def test_the_trainer_gives_what_it_gives_without_wherry(plain, ours, mode):
    logs = [found["trainer"]["log"] for found in (ours, plain)]
    if mode == "alias":
        # With an optimizer in the config the engine moves the schedule, so the rate that the Trainer logs after its
        # backward is already the next one.
        rates = [[row[2] for row in log] for log in logs]
        assert rates[0][:-1] == rates[1][1:]
        logs = [[row[:2] for row in log] for log in logs]
    else:
        assert ours["trainer"]["before"] == close(plain["trainer"]["before"])
    same_log(*logs)
    for key in ("evaluation", "smoothed"):
        assert ours["trainer"][key] == close(plain["trainer"][key])
    assert ours["trainer"]["generated"] == plain["trainer"]["generated"]


def test_what_it_saves_is_what_it_would_have_saved(plain, ours, mode, folder):
    theirs = load_file(folder / "plain" / "final" / "model.safetensors")
    saved = load_file(folder / mode / "final" / "model.safetensors")
    assert saved.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert (saved[name] - weight).abs().max() < 2e-5, name


def test_a_resumed_trainer_goes_on_exactly(ours):
    assert ours["resumed"] == {key: value for key, value in ours["trainer"].items() if key != "before"}
    assert ours["sft_resumed"] == ours["sft"]


def test_from_pretrained_also_under_a_config_of_stage_3(plain, ours):
    assert ours["pretrained"] == close(plain["pretrained"])
    assert plain["pretrained"] == close(plain["trainer"]["evaluation"])


def test_accelerate_with_its_plugin(plain, ours, mode):
    if mode == "own":
        pytest.skip("the plugin is DeepSpeed's")
    assert ours["accelerate"]["losses"] == close(plain["accelerate"]["losses"])
    assert ours["accelerate"]["rate"] == plain["accelerate"]["rate"]
    assert ours["accelerate"]["weights"] == pytest.approx(plain["accelerate"]["weights"], rel=1e-4, abs=1e-4)


def test_lora_through_trl(plain, ours):
    same_log(ours["sft"]["log"], plain["sft"]["log"])
    assert ours["sft"]["adapter"] == close(plain["sft"]["adapter"], 1e-4)
    assert len(ours["sft"]["adapter"]) == 8 + 5  # LoRA, and the norms, which are trained whole


def test_preferences_against_a_reference_model(plain, ours):
    same_log(ours["dpo"]["log"], plain["dpo"]["log"])


def test_a_trainer_that_compiles_compiles_each_block(plain, ours):
    same_log(ours["compiled"]["log"], plain["compiled"]["log"])


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_optimizers_of_whole_parameters(plain, ours, name):
    losses, theirs = ([row[0] for row in each[name]["log"]] for each in (ours, plain))
    assert len(set(theirs)) == 4
    assert losses == close(theirs, 1e-3 if name == "muon" else 2e-5)  # Muon's products are in bf16


def test_the_example_of_lora(libraries, tmp_path):
    done = libraries.run(EXAMPLE, "--steps", 10, ranks=2, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    first, last = (float(done.stdout.split("loss ")[1].split()[i].rstrip(";")) for i in (0, 2))
    assert last < first
    assert (tmp_path / "runs" / "lora" / "adapter_model.safetensors").exists()
