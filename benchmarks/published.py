"""Published models of Transformers, which benchmarks build from their configs with random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

# The configs of published models, and of one that only shows that they can be built; all tie their head.
PUBLISHED: dict[str, dict[str, int]] = {
    "qwen3-4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "qwen3-tiny": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 256,
    },
}


# Logits of a published model that exist at a time, 1 GiB in fp32: all of 16k tokens would be the half of a GPU.
LOGITS = 1 << 28


def build_published(name: str, dtype: str, recompute: bool) -> nn.Module:
    """Build a model of Transformers' in the working dtype, which returns the mean loss of its labels."""
    import torch
    from torch import nn
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from wherry.nn import chunked_cross_entropy

    class Losses(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
            return chunked_cross_entropy(hidden, self.model.lm_head.weight, labels, chunk=LOGITS)

    config = Qwen3Config(**PUBLISHED[name], tie_word_embeddings=True)
    model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Losses(model.train())


def published_parameters(name: str) -> int:
    """Count the parameters of a published model; the tied head counts once."""
    config = PUBLISHED[name]
    hidden, width = config["hidden_size"], config["head_dim"]
    attention = 2 * (config["num_attention_heads"] + config["num_key_value_heads"]) * width * hidden + 2 * width
    layer = attention + 3 * hidden * config["intermediate_size"] + 2 * hidden
    return config["num_hidden_layers"] * layer + (config["vocab_size"] + 1) * hidden
