"""transformers, accelerate, peft and trl on Wherry, through the alias and first class, against the same without it."""

import importlib.util
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.forks import ENGINE, Forks

PACKAGES = ("transformers", "accelerate", "peft", "trl")
# They are looked for, and not imported: that takes long, and every test worker reads this file.
if absent := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
    pytest.skip(f"{absent[0]} comes with `pip install '.[transformers]'`", allow_module_level=True)

PROGRAM = Path(__file__).with_name("hugging_face.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_lora.py"
IMPORTS = (
    *(*ENGINE, "accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama", "peft", "datasets"),
    *("trl.trainer.sft_trainer", "trl.trainer.dpo_trainer"),
    *("torch._inductor.compiler_bisector", "torch._functorch.partitioners"),  # what torch.compile imports at once
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hugging_face")


@pytest.fixture(scope="module")
def forks():
    with Forks(*IMPORTS) as forks:
        yield forks


def run(forks, folder, mode, ranks):
    done = forks.run(PROGRAM, mode, folder, ranks=ranks, folder=folder, timeout=280)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads((folder / f"{mode}.json").read_text())


@pytest.fixture(scope="module")
def plain(forks, folder):
    return run(forks, folder, "plain", 1)


@pytest.fixture(scope="module")
def alias(folder, plain):
    with Forks(*IMPORTS, as_deepspeed=True) as forks:
        return run(forks, folder, "alias", 2)


@pytest.fixture(scope="module")
def own(forks, folder, plain):
    return run(forks, folder, "own", 2)


def close(expected, tolerance=2e-5):
    return pytest.approx(expected, rel=tolerance)


def same_log(ours, theirs):
    assert len(ours) == len(theirs) > 2
    for mine, its in zip(ours, theirs, strict=True):
        assert mine == close(its)


@pytest.mark.timeout(600)
def test_the_trainer_unchanged_gives_what_it_gives_without_wherry(plain, alias):
    # Loss and norm. With an optimizer in the config the engine moves the schedule, so the rate that the Trainer logs
    # after its backward is already the next one.
    logs = [[row[:2] for row in found["trainer"]["log"]] for found in (alias, plain)]
    same_log(*logs)
    rates = [[row[2] for row in found["trainer"]["log"]] for found in (alias, plain)]
    assert rates[0][:-1] == rates[1][1:]
    assert alias["trainer"]["evaluation"] == close(plain["trainer"]["evaluation"])
    assert alias["trainer"]["smoothed"] == close(plain["trainer"]["smoothed"])
    assert alias["trainer"]["generated"] == plain["trainer"]["generated"]


def test_what_it_saves_is_what_it_would_have_saved(plain, alias, own, folder):
    theirs = load_file(folder / "plain" / "final" / "model.safetensors")
    for mode in ("alias", "own"):
        ours = load_file(folder / mode / "final" / "model.safetensors")
        assert ours.keys() == theirs.keys()
        for name, weight in theirs.items():
            assert (ours[name] - weight).abs().max() < 2e-5, name


def test_a_resumed_trainer_goes_on_exactly(alias, own):
    for found in (alias, own):
        assert found["resumed"] == {key: value for key, value in found["trainer"].items() if key != "before"}
        assert found["sft_resumed"] == found["sft"]


def test_from_pretrained_under_a_config_of_stage_3(plain, alias):
    assert alias["pretrained"] == close(plain["pretrained"])
    assert plain["pretrained"] == close(plain["trainer"]["evaluation"])


def test_accelerate_with_its_plugin(plain, alias):
    assert alias["accelerate"]["losses"] == close(plain["accelerate"]["losses"])
    assert alias["accelerate"]["rate"] == plain["accelerate"]["rate"]
    assert alias["accelerate"]["weights"] == pytest.approx(plain["accelerate"]["weights"], rel=1e-4, abs=1e-4)


def test_lora_through_trl(plain, alias, own):
    for found in (alias, own):
        same_log(found["sft"]["log"], plain["sft"]["log"])
        assert found["sft"]["adapter"] == close(plain["sft"]["adapter"], 1e-4)
        assert len(found["sft"]["adapter"]) == 8 + 5  # LoRA, and the norms, which are trained whole


def test_preferences_against_a_reference_model(plain, alias, own):
    for found in (alias, own):
        same_log(found["dpo"]["log"], plain["dpo"]["log"])


def test_a_trainer_that_compiles_compiles_each_block(plain, alias, own):
    for found in (alias, own):
        same_log(found["compiled"]["log"], plain["compiled"]["log"])


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_optimizers_that_look_at_whole_parameters(plain, alias, own, name):
    for found in (alias, own):
        losses, theirs = ([row[0] for row in each[name]["log"]] for each in (found, plain))
        assert len(set(theirs)) == 4
        assert losses == close(theirs, 1e-3 if name == "muon" else 2e-5)  # Muon's products are in bf16


def test_the_trainer_of_wherry(plain, own):
    same_log(own["trainer"]["log"], plain["trainer"]["log"])
    assert own["trainer"]["before"] == close(plain["trainer"]["before"])
    assert own["trainer"]["smoothed"] == close(plain["trainer"]["smoothed"])
    assert own["trainer"]["evaluation"] == close(plain["trainer"]["evaluation"])
    assert own["trainer"]["generated"] == plain["trainer"]["generated"]


def test_the_example_of_lora(forks, tmp_path):
    done = forks.run(EXAMPLE, "--steps", 10, ranks=2, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    first, last = (float(done.stdout.split("loss ")[1].split()[i].rstrip(";")) for i in (0, 2))
    assert last < first
    assert (tmp_path / "runs" / "lora" / "adapter_model.safetensors").exists()
