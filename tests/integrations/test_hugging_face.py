"""transformers, accelerate, peft and trl on Wherry, through the alias and first class, against the same without it."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.cli.programs import wherry

for package in ("transformers", "accelerate", "peft", "trl"):
    pytest.importorskip(package, reason=f"{package} comes with `pip install wherry[transformers]`")

PROGRAM = Path(__file__).with_name("hugging_face.py")
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hugging_face")


def run(folder, mode, ranks, *flags):
    done = wherry("run", *flags, "--nproc", ranks, PROGRAM, mode, folder, cwd=folder, timeout=280, **QUIET)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads((folder / f"{mode}.json").read_text())


@pytest.fixture(scope="module")
def plain(folder):
    return run(folder, "plain", 1)


@pytest.fixture(scope="module")
def alias(folder, plain):
    return run(folder, "alias", 2, "--as-deepspeed")


@pytest.fixture(scope="module")
def own(folder, plain):
    return run(folder, "own", 2)


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
        assert found["resumed"] == found["trainer"]


def test_from_pretrained_under_a_config_of_stage_3(plain, alias):
    assert alias["pretrained"] == close(plain["pretrained"])
    assert plain["pretrained"] == close(plain["trainer"]["evaluation"])


def test_accelerate_with_its_plugin(plain, alias):
    assert alias["accelerate"]["losses"] == close(plain["accelerate"]["losses"])
    assert alias["accelerate"]["weights"] == pytest.approx(plain["accelerate"]["weights"], rel=1e-4, abs=1e-4)


def test_lora_through_trl(plain, alias, own):
    for found in (alias, own):
        same_log(found["sft"]["log"], plain["sft"]["log"])
        assert found["sft"]["adapter"] == close(plain["sft"]["adapter"], 1e-4)
        assert len(found["sft"]["adapter"]) == 8


def test_the_trainer_of_wherry(plain, own):
    same_log(own["trainer"]["log"], plain["trainer"]["log"])
    assert own["trainer"]["evaluation"] == close(plain["trainer"]["evaluation"])
    assert own["trainer"]["generated"] == plain["trainer"]["generated"]
