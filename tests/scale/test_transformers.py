"""Tiny models of transformers: layer-major training equals plain PyTorch, and partitioned builds plain ones."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    adamw,
    assert_close,
    assert_same,
    engine_of,
    make_model,
    settings,
    train,
    train_engine,
    train_plain,
)

import wherry
from wherry.errors import WherryError

# Imports of transformers take seconds.
pytestmark = pytest.mark.long
VOCABULARY = 48
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "max_position_embeddings": 32}
# By family: the model's class, the config's, and its values beside the vocabulary.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"hidden_size": 32, "intermediate_size": 48, **HEADS}),
    "mixtral": (
        *("MixtralForCausalLM", "MixtralConfig"),
        {"hidden_size": 32, "intermediate_size": 40, "num_local_experts": 4, **HEADS},
    ),
    "t5": (
        *("T5ForConditionalGeneration", "T5Config"),
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        | {"decoder_start_token_id": 0},
    ),
}


def build(family: str, seed: int = 0, *, use_cache: bool = False) -> Any:
    transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    model_class, config_class, values = FAMILIES[family]
    config = getattr(transformers, config_class)(vocab_size=VOCABULARY, use_cache=use_cache, **values)
    return make_model(lambda: getattr(transformers, model_class)(config), seed).train()


def batch(step: int, micro: int, rank: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(("family", "reentrant"), [("llama", True), ("mixtral", None), ("t5", False)])
def test_layer_major_training_equals_plain(family: str, reentrant: bool | None) -> None:
    model = build(family)
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})

    def counts(engine: Any, step: int) -> tuple[int, ...]:
        calls = engine.comm.traffic.calls
        return calls["all_gather"], calls["reduce_scatter"], len(engine.units)

    common: dict[str, Any] = {"ranks": 2, "accumulation": 3, "steps": 3, "batch": batch}
    own = {"wherry": {"accumulation": "layer_major"}}
    run = train_engine(model, stage=3, by_window=True, config=own, each_step=counts, **common)
    assert_close(run, train_plain(model, **common), 5e-5)
    gathers, reductions, units = run.extra[-1]
    assert reductions <= units and gathers < 3 * units, run.extra  # once for all micro-batches


def padded(step: int, micro: int, rank: int) -> dict[str, torch.Tensor]:
    made = batch(step, micro, rank)
    mask = torch.ones_like(made["input_ids"])
    mask[1, -3:] = 0
    return {**made, "attention_mask": mask}


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_recomputation_goes_without_a_kv_cache(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """The user's `use_cache` stays for forwards without gradients, for generate() and for the model after close()."""
    model, recompute = build(family, use_cache=True), {"activation_checkpointing": {"policy": "recompute"}}
    common: dict[str, Any] = {"ranks": 2, "steps": 2, "batch": padded}
    assert_close(train_engine(model, stage=3, config=recompute, **common), train_plain(model, **common), 5e-5)
    with caplog.at_level(logging.INFO, "wherry"):
        engine = engine_of(copy.deepcopy(model), settings(3, more=recompute))
    assert sum("config.use_cache is false" in line for line in caplog.messages) == 1
    config = (engine.module.get_decoder() if family == "t5" else engine.module).config
    for _ in range(2):
        engine.backward(engine(**padded(0, 0, 0)).loss)
        engine.step()
        assert config.use_cache is True
        with torch.no_grad():
            cache = engine(**padded(0, 0, 0)).past_key_values
        assert config.use_cache is True and cache.get_seq_length() == 8
    with wherry.gathered_for_generation(engine):
        assert engine.module.generate(padded(0, 0, 0)["input_ids"], max_new_tokens=2).shape[0] == 2
    with pytest.raises(WherryError, match="was called with a KV cache"):
        engine(**padded(0, 0, 0), use_cache=True)
    engine(**padded(0, 0, 0))
    engine.close()
    assert config.use_cache is True


def _build_and_train(rank: int) -> tuple[dict[str, torch.Tensor], float]:
    for _ in range(4):  # memory that a backend holds after a collective varies
        with wherry.Init(settings(3)):
            model = build("llama", seed=rank)
    engine, *_ = wherry.initialize(model=model, optimizer=adamw, config=settings(3))
    state = engine.module.state_dict()
    losses = train(engine, 1, batch=lambda *_: batch(0, 0, 0))
    engine.close()
    return state, losses[0]


def test_built_with_init_in_two_processes(warm: Any) -> None:
    plain = build("llama")
    expected = float(plain(**batch(0, 0, 0)).loss.detach())
    for state, loss in warm(2).run(_build_and_train):
        assert_same(state, plain.state_dict())
        assert loss == pytest.approx(expected, rel=1e-5)
