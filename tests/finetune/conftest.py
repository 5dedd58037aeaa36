"""Tokenizers of a few hundred tokens, a cache of rows for each test, and a machine that need not be measured."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# The commonest template. It does not mark the assistant's messages, and TRL has no copy of it.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture
def rows_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU whose rates are known: measuring takes longer than most tests."""
    from wherry.plan import machines, probe

    here = machines.described(machines.known("4090"), gpus=0)
    monkeypatch.setattr(probe, "this_machine", lambda *_, **__: here)


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[..., Any]:
    """Make tokenizers of bytes and some merges, with a chat template or none."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    inner.train_from_iterator(
        [str(textwrap.__doc__), str(textwrap.TextWrapper.__doc__)],
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )

    def make(template: str | None = None) -> Any:
        eos = "<|endoftext|>" if template is None else "<|im_end|>"
        made = PreTrainedTokenizerFast(
            tokenizer_object=inner, bos_token="<|endoftext|>", eos_token=eos, pad_token="<|endoftext|>"
        )
        made.chat_template = template
        return made

    return make


@pytest.fixture(scope="session")
def plain(tokenizer_of: Callable[..., Any]) -> Any:
    return tokenizer_of()


@pytest.fixture(scope="session")
def chat(tokenizer_of: Callable[..., Any]) -> Any:
    return tokenizer_of(CHATML)
