"""Fine-tuning is TRL's: the same losses as without Wherry, wherever the states rest."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.finetune.tiny import make_folder, write_rows

MODELS = ("llama", "qwen", "gemma", "mixtral")
PLACES = [(stage, tier) for stage in ("2", "3") for tier in ("none", "cpu", "nvme")]
TRAININGS = list(itertools.product(MODELS, ("full", "lora"), ("sft", "dpo")))


def placed(number: int) -> tuple[str, str]:
    return PLACES[number % len(PLACES)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, plain: Any) -> Path:
    folder = tmp_path_factory.mktemp("finetune")
    for kind in MODELS:
        make_folder(folder / kind, kind, plain)
    write_rows(folder)
    return folder


def run(folder: Path, cases: list[str], ranks: int, name: str) -> dict[str, list[list[float]]]:
    (folder / f"{name}.json").write_text(json.dumps(cases))
    program = [str(Path(__file__).with_name("against_trl.py")), str(folder), str(folder / f"{name}.json")]
    out = folder / f"{name}-found.json"
    start = [sys.executable] if ranks == 1 else [sys.executable, "-m", "wherry", "run", "--nproc", str(ranks)]
    done = subprocess.run([*start, *program, str(out)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def without(folder: Path) -> dict[str, list[list[float]]]:
    cases = [f"{' '.join(training)} plain {oracle(training[0], ranks)}" for training in TRAININGS for ranks in (1, 2)]
    return run(folder, list(dict.fromkeys(cases)), 1, "plain")


def oracle(model: str, ranks: int, how: str = "full") -> int:
    """Micro-batches: the loss by which experts share tokens out is of each rank's, and of all of a step for others; so
    are scales of what goes into layers of 8 bits."""
    return ranks if model == "mixtral" or how == "lora8" else 1


# Of each rank count every training, and every place with half of them; the other half on the other rank count.
@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_are_those_of_trl(folder: Path, without: dict[str, list[list[float]]], ranks: int) -> None:
    cases = [" ".join((*training, *placed(number + 3 * ranks))) for number, training in enumerate(TRAININGS)]
    found = run(folder, cases, ranks, f"on-{ranks}")
    check(found, without, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_losses_are_those_of_trl_at_every_place(
    folder: Path, without: dict[str, list[list[float]]], place: tuple[str, str], ranks: int
) -> None:
    cases = [" ".join((*training, *place)) for training in TRAININGS]
    check(run(folder, cases, ranks, f"{'-'.join(place)}-on-{ranks}"), without, ranks)


@pytest.mark.parametrize(("ranks", "together"), [(2, 2), (4, 2)])
def test_rows_that_ranks_share_have_the_losses_of_trl(
    folder: Path, without: dict[str, list[list[float]]], ranks: int, together: int
) -> None:
    """But for experts, whose own loss would be of each part."""
    trainings = [f"{model} {how} sft" for model in MODELS[:3] for how in ("full", "lora")][:: ranks // 2]
    cases = [f"{training} {' '.join(placed(number + ranks))} {together}" for number, training in enumerate(trainings)]
    check(run(folder, cases, ranks, f"shared-{ranks}"), without, 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_micro_batches_that_run_together_have_the_losses_of_trl(
    folder: Path, without: dict[str, list[list[float]]], ranks: int
) -> None:
    trainings = [f"{model} {how} {method}" for model, how, method in TRAININGS[4 * ranks - 4 : 4 * ranks]]
    cases = [f"{training} {' '.join(placed(number + ranks))} 1 2" for number, training in enumerate(trainings)]
    # Ranks and two micro-batches: on one rank experts would have two losses.
    check(run(folder, cases, ranks, f"together-{ranks}"), without, 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_that_are_packed_have_the_losses_of_trl(folder: Path, ranks: int) -> None:
    """Two in one, which do not see each other."""
    trainings = [f"{model} {how} packed" for model in MODELS for how in ("full", "lora")][ranks - 1 :: 2]
    cases = [f"{training} {' '.join(placed(number + 3 * ranks))}" for number, training in enumerate(trainings)]
    plain = [f"{training} plain {oracle(training.split()[0], ranks)}" for training in trainings]
    check(run(folder, cases, ranks, f"packed-{ranks}"), run(folder, plain, 1, f"packed-plain-{ranks}"), ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_beside_weights_in_few_bits_have_the_losses_of_trl(folder: Path, ranks: int) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    trainings = [f"{model} lora{bits} {method}" for model in MODELS[:3] for bits in (4, 8) for method in ("sft", "dpo")]
    trainings = [one for at, one in enumerate(trainings) if (at // 2 + at // 4 + ranks) % 2]
    plain = [f"{one} plain {oracle(*one.split()[:1], ranks, one.split()[1])}" for one in trainings]
    cases = [f"{one} {' '.join(placed(number + 3 * ranks))}" for number, one in enumerate(trainings)]
    check(run(folder, cases, ranks, f"bits-{ranks}"), run(folder, plain, 1, f"bits-plain-{ranks}"), ranks)


def check(found: dict[str, list[list[float]]], without: dict[str, list[list[float]]], ranks: int) -> None:
    for case, losses in found.items():
        model, how, method = case.split()[:3]
        expected = without[f"{model} {how} {method} plain {oracle(model, ranks, how)}"]
        assert len(losses) == len(expected) == 3
        for (loss, norm), (true_loss, true_norm) in zip(losses, expected, strict=True):
            assert loss == pytest.approx(true_loss, rel=2e-5), case
            assert norm == pytest.approx(true_norm, rel=2e-4), case
