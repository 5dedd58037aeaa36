"""Fine-tuning has the losses of TRL without Wherry, wherever the states rest."""

from __future__ import annotations

import itertools
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.finetune.tiny import make_folder, write_rows
from tests.integrations import HUGGING_FACE

PROGRAM = Path(__file__).with_name("against_trl.py")
MODELS = ("llama", "qwen", "gemma", "mixtral")
PLACES = [f"{stage} {tier}" for stage in "23" for tier in ("none", "cpu", "nvme")]
TRAININGS = [f"{model} {how} {method}" for model in MODELS for how in ("full", "lora") for method in ("sft", "dpo")]
# Every method and tier on two ranks; rows that two ranks share; micro-batches that run together.
CHOSEN = [
    "llama full sft 3 nvme", "qwen lora dpo 2 cpu", "gemma full dpo 3 cpu", "llama lora packed 3 none",
    "qwen lora4 sft 3 cpu 2", "gemma lora sft 2 nvme 1 2",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, plain: Any) -> Path:
    folder = tmp_path_factory.mktemp("finetune")
    for kind in MODELS:
        make_folder(folder / kind, kind, plain)
    write_rows(folder)
    return folder


def oracle(case: str, ranks: int) -> str:
    """TRL's training in as many micro-batches as there are ranks with a loss of their own.

    The load balance of experts is of each rank's rows, and so are the scales of inputs of layers in 8 bits; all other
    losses are of all rows of a step.
    """
    model, how, method = case.split()[:3]
    return f"{model} {how} {method} plain {ranks if model == 'mixtral' or how == 'lora8' else 1}"


def check(found: list[list[float]], expected: list[list[float]], case: str) -> None:
    assert len(found) == len(expected) == 3
    for (loss, norm), (true_loss, true_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(true_loss, rel=2e-5), case
        assert norm == pytest.approx(true_norm, rel=2e-4), case


@pytest.mark.parametrize("case", ["llama lora sft 3 cpu", "qwen full sft 2 none"])
def test_losses_on_one_rank_are_those_of_trl(folder: Path, case: str) -> None:
    from tests.finetune.against_trl import run

    check(run(folder, case), run(folder, oracle(case, 1)), case)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_losses_on_two_ranks_are_those_of_trl(forks: Any, folder: Path) -> None:
    compare(forks, folder, CHOSEN, 2)


def compare(forks: Any, folder: Path, cases: list[str], ranks: int) -> None:
    def trained(name: str, cases: list[str], ranks: int) -> dict[str, list[list[float]]]:
        given, out = folder / f"{name}.json", folder / f"{name}-found.json"
        given.write_text(json.dumps(cases))
        done = forks.of(*HUGGING_FACE).run(PROGRAM, folder, given, out, ranks=ranks, folder=folder, timeout=280)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(out.read_text())

    # Ranks that share a row have a loss between them, and so have micro-batches that run together.
    sharing = {case: 1 if len(case.split()) > 5 else ranks for case in cases}
    plain = trained("plain", sorted({oracle(case, count) for case, count in sharing.items()}), 1)
    for case, found in trained("ours", cases, ranks).items():
        check(found, plain[oracle(case, sharing[case])], case)


PACKED = [f"{model} {how} packed" for model in MODELS for how in ("full", "lora")]
FEW_BITS = [f"{model} lora{bits} {method}" for model in MODELS[:3] for bits in "48" for method in ("sft", "dpo")]
# The loss of experts is of each part of a row, where ranks share rows.
SHARED = [training for training in TRAININGS[:12] if training.endswith("sft")]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "trainings", "more"),
    [(2, TRAININGS, ""), (4, SHARED, " 2"), (1, TRAININGS[:12], " 1 2"), (1, PACKED, ""), (2, FEW_BITS, "")],
    ids=["two-ranks", "shared", "together", "packed", "few-bits"],
)
def test_every_training(forks: Any, folder: Path, ranks: int, trainings: list[str], more: str) -> None:
    places = zip(trainings, itertools.cycle(PLACES), strict=False)
    compare(forks, folder, [f"{training} {place}{more}" for training, place in places], ranks)
