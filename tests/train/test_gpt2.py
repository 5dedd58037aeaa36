"""`wherry train` saves a GPT-2 that transformers has of its own, and a tokenizer that takes bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.train.exported import compared, saved

from wherry.checkpoint.export import find
from wherry.cli import main
from wherry.train.gpt2 import byte_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="the extra `transformers` is not installed")


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_computes_the_same(tmp_path: Path, tied: bool) -> None:
    run = tmp_path / "run"
    theirs, ours, logits = compared(saved(run / "checkpoints", tied=tied, heads=3), tmp_path / "out")
    torch.testing.assert_close(logits, ours, rtol=1e-5, atol=1e-5)
    assert find(run) == find(run / "checkpoints") == run / "checkpoints" / "global_step0"
    assert type(theirs).__name__ == "GPT2LMHeadModel" and theirs.dtype is torch.float32
    assert (theirs.lm_head.weight is theirs.transformer.wte.weight) == tied
    assert theirs.config.bos_token_id is None and theirs.config.eos_token_id == 0


def test_the_dtype_is_that_of_the_training_or_of_the_flag(tmp_path: Path) -> None:
    folder = saved(tmp_path / "in", heads=3, config={"bf16": {"enabled": True}})
    theirs, ours, logits = compared(folder, tmp_path / "out", "--max-shard-size", "50KB")
    assert theirs.dtype is torch.bfloat16
    torch.testing.assert_close(logits.float(), ours, rtol=0.1, atol=0.1)
    assert compared(folder, tmp_path / "fp32", "--dtype", "fp32")[0].dtype is torch.float32


def test_a_checkpoint_that_does_not_tell_its_heads_is_exported_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(saved(tmp_path / "in")), str(tmp_path / "out")]) == 0
    assert "there is no config.json" in capsys.readouterr().out
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    # Nor is what says that it is of a shape which its tensors have not.
    assert main(["export", str(saved(tmp_path / "b", heads=5)), str(tmp_path / "c")]) == 0
    assert not (tmp_path / "c" / "config.json").exists()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, text in byte_tokenizer(24).items():
        (folder / name).write_text(text, encoding="utf-8")
    return transformers.AutoTokenizer.from_pretrained(folder)


# The strategy of all texts would first build a table of all characters, for seconds.
@given(text=st.binary().map(lambda data: data.decode(errors="replace")))
def test_ids_are_bytes(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text


def test_the_tokenizer_knows_every_byte_and_no_other_token(tokenizer: Any) -> None:
    assert sorted(tokenizer.get_vocab().values()) == list(range(256))
    assert tokenizer.bos_token is tokenizer.eos_token is tokenizer.unk_token is None
    assert tokenizer.model_max_length == 24 and not tokenizer.all_special_tokens
