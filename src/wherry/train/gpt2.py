"""A checkpoint of `wherry train` as what it is: a GPT-2 of some shape, and transformers' own model of that."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wherry.checkpoint.export import Translation, exported_dtype
from wherry.checkpoint.format import Manifest
from wherry.nn.gelu import APPROXIMATE
from wherry.train.model import GPT, GPTConfig
from wherry.train.presets import Shape

# Our names, and those of transformers.
_OUTSIDE = {"tokens": "wte", "positions": "wpe", "norm": "ln_f"}
_IN_BLOCK = {
    **{"norm1": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj"},
    **{"norm2": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")
_GELU = {"tanh": "gelu_pytorch_tanh", "none": "gelu"}


def shape_in(manifest: Manifest) -> dict[str, int]:
    """What a checkpoint tells of its shape, by the names of `Shape`: all of it but the heads, where an earlier version
    has written it. Nothing of a model that is none of `wherry train`."""
    tokens, positions = (manifest.entries.get(f"{name}.weight") for name in ("tokens", "positions"))
    told = manifest.engine.get("client_state")
    if tokens is None or positions is None or len(tokens.shape) != 2 or not isinstance(told, dict):
        return {}
    layers = sum(re.fullmatch(r"blocks\.\d+\.norm1\.weight", name) is not None for name in manifest.entries)
    found = {"layers": layers, "hidden": tokens.shape[1], "sequence": positions.shape[0], "vocabulary": tokens.shape[0]}
    heads = told.get("heads")
    if isinstance(heads, int) and heads > 0 and found["hidden"] % heads == 0:
        found["heads"] = heads
    return found


def is_tied(manifest: Manifest) -> bool:
    return "head.weight" not in manifest.entries


def translation_of(manifest: Manifest, dtype: torch.dtype | None) -> Translation | None:
    """How a checkpoint becomes a folder that transformers loads; None if it is none of `wherry train`, or of an earlier
    version, which does not tell the heads."""
    shape = shape_in(manifest)
    if "heads" not in shape:
        return None
    with torch.device("meta"):
        model = GPT(GPTConfig.of(Shape(**shape), tied=is_tied(manifest)))
    entries = manifest.entries
    if {name: entry.shape for name, entry in entries.items()} != {
        n: tuple(p.shape) for n, p in model.named_parameters()
    }:
        return None
    names, turn = {"head.weight": "lm_head.weight"}, dict[str, Callable[[Tensor], Tensor]]()
    for name in entries.keys() - {"head.weight"}:
        if block := _BLOCK.fullmatch(name):
            number, module, kind = block.groups()
            names[name] = f"transformer.h.{number}.{_IN_BLOCK[module]}.{kind}"
            if module == "attention.qkv":
                turn[name] = partial(_apart, heads=shape["heads"])
            elif not module.startswith("norm") and kind == "weight":
                turn[name] = Tensor.t
        else:
            module, kind = name.rsplit(".", 1)
            names[name] = f"transformer.{_OUTSIDE[module]}.{kind}"
    saved = str(exported_dtype(entries["tokens.weight"], dtype)).removeprefix("torch.")
    return Translation(names, turn, {"config.json": _config(model.config, saved), **byte_tokenizer(shape["sequence"])})


def _apart(qkv: Tensor, heads: int) -> Tensor:
    """Query, key and value of each head after each other become all queries, all keys and all values. Transformers'
    matrices are the other way round."""
    width = qkv.shape[0] // (3 * heads)
    return qkv.view(heads, 3, width, -1).transpose(0, 1).reshape(qkv.shape).t()


def _config(config: GPTConfig, dtype: str) -> str:
    values = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": config.layers,
        "n_embd": config.hidden,
        "n_head": config.heads,
        "n_positions": config.sequence,
        "vocab_size": config.vocabulary,
        "activation_function": _GELU[APPROXIMATE],
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": config.tied,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        "bos_token_id": None,
        "eos_token_id": 0,  # the byte that no text has
        "dtype": dtype,
    }
    return json.dumps(values, indent=2) + "\n"


def byte_tokenizer(longest: int) -> dict[str, str]:
    """The files of a tokenizer that takes text as its bytes in UTF-8: the id of each is its value."""
    # The characters that stand for bytes in GPT-2's vocabulary: those that can be seen for themselves, and others for
    # the rest in their order.
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in seen]
    vocabulary = {chr(byte if byte in seen else 256 + rest.index(byte)): byte for byte in range(256)}
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": [],
        "pre_tokenizer": as_bytes,
        "decoder": as_bytes,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token")),
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }
