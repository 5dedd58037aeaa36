"""Folders of tiny models with random weights, and rows to train them on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

_SHAPE = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)


def config_of(kind: str, vocabulary: int) -> Any:
    import transformers

    shape: dict[str, Any] = {**_SHAPE, "vocab_size": vocabulary}
    if kind == "llama":
        return transformers.LlamaConfig(**shape)
    if kind == "qwen":
        return transformers.Qwen3Config(**shape, head_dim=8, tie_word_embeddings=True)
    if kind == "gemma":  # its logits are capped
        return transformers.Gemma2Config(**shape, head_dim=8, sliding_window=16, query_pre_attn_scalar=8)
    return transformers.MixtralConfig(**shape, num_local_experts=4, num_experts_per_tok=2)


def make_folder(folder: Path, kind: str, tokenizer: Any, dtype: torch.dtype = torch.float32) -> Path:
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, len(tokenizer)))
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(folder: Path, count: int = 48) -> None:
    """Write prompts with completions, the same as chats, and preference pairs."""
    words = ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op"]
    rows, chats, pairs = [], [], []
    for number in range(count):
        word, other = words[number % 8], words[(3 * number + 1) % 8]
        prompt, completion = f"{word} {number % 5} is", f" {other} {other}" + " and" * (number % 3)
        rows.append({"prompt": prompt, "completion": completion})
        turns = (("user", prompt), ("assistant", completion))
        chats.append({"messages": [{"role": role, "content": content} for role, content in turns]})
        pairs.append({"prompt": prompt, "chosen": completion, "rejected": " not " + completion})
    for name, lines in {"rows": rows, "chats": chats, "pairs": pairs}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
