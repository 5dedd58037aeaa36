"""`wherry train` over tensor- and pipeline-parallel ranks reads and learns what one rank does."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.exported import compared

from wherry.train import model as models
from wherry.train.job import main
from wherry.train.model import GPT, GPTConfig
from wherry.train.parallel import Stage

STEPS = 5
TINY = [
    *("--num-layers", "3", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8"),
    *("--eval-iters", "2", "--steps", str(STEPS), "--batch-size", "2", "--gradient-accumulation-steps", "4"),
    *("--lr", "0.01", "--save-interval", "3"),
]
FIGURES = ("step", "loss", "gradient_norm", "tokens", "lr")


def as_rank(rank: int, flags: list[str]) -> int:
    return main(flags)


def figures(run: Path) -> list[dict[str, Any]]:
    """Read of each step what does not depend on the machine."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in FIGURES} for line in lines]


def assert_alike(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert len(one) == len(other) > 0
    for mine, theirs in zip(one, other, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4), (mine, theirs)


@pytest.mark.parametrize(
    ("axis", "same"),
    [
        (["--tensor-parallel", "2", "--stage", "1", "--checkpoint-activations"], ["--stage", "1"]),
        (["--pipeline-parallel", "2", "--set", "wherry.accumulation=layer_major"],
         ["--untie-embeddings-and-output-weights"]),
    ],
    ids=["tensor", "pipeline"],
)  # fmt: skip
def test_losses_are_those_of_one_rank(warm: Any, tmp_path: Path, axis: list[str], same: list[str]) -> None:
    """With the samples of a step alike: then the seed says everything, whatever the axes."""
    two, text = warm(2), tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    one, shared, back = tmp_path / "one", tmp_path / "shared", tmp_path / "back"
    alone, flags = [*TINY, "--data", str(text), *same], [*TINY, "--data", str(text), *axis]
    assert main([*alone, "--run-dir", str(one)]) == 0
    assert two.run(as_rank, [*flags, "--run-dir", str(shared)]) == [0, 0]
    expected = figures(one)
    assert len(expected) == STEPS and expected[-1]["loss"] < 0.98 * expected[0]["loss"]
    assert_alike(figures(shared), expected)
    # Its export is the model, whoever held the parts.
    if find_spec("transformers"):
        _, ours, logits = compared(shared, tmp_path / "out")
        torch.testing.assert_close(logits, ours, rtol=1e-5, atol=1e-5)
    # A checkpoint of either goes on in the other.
    there = str(shared / "checkpoints" / "global_step3")
    assert main([*alone, "--run-dir", str(back), "--resume", there]) == 0
    assert_alike(figures(back), expected[3:])
    here, forth = str(one / "checkpoints" / "global_step3"), tmp_path / "forth"
    assert two.run(as_rank, [*flags, "--run-dir", str(forth), "--resume", here]) == [0, 0]
    assert_alike(figures(forth), expected[3:])


def test_stages_have_the_names_and_the_checkpoints_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    checkpoint = models.checkpoint

    def counted(block: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(type(block).__name__)
        return checkpoint(block, x)

    monkeypatch.setattr(models, "checkpoint", counted)
    whole = GPT(GPTConfig(layers=3, hidden=8, heads=2, sequence=4, checkpoint_activations=True, tied=False))
    names = [name for index in range(2) for name, _ in Stage(whole, index, 2).named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    ids = torch.zeros(1, 4, dtype=torch.int64)
    out = Stage(whole, 1, 2)(Stage(whole, 0, 2)(ids))
    assert len(calls) == 3
    torch.testing.assert_close(out, whole(ids))
