"""Tiny models of transformers: layer-major training equals plain PyTorch, and their files load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    adamw,
    assert_close,
    assert_same,
    make_model,
    settings,
    train,
    train_engine,
    train_plain,
)
from torch import nn

import wherry
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks

# Imports of transformers take seconds.
pytestmark = pytest.mark.long
VOCABULARY = 48


def llama() -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip


def gpt2() -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    return transformers.GPT2LMHeadModel, transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


def mixtral() -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    return transformers.MixtralForCausalLM, transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
    )  # fmt: skip


def t5() -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    return transformers.T5ForConditionalGeneration, transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip


FAMILIES = [llama, gpt2, mixtral, t5]


def build(family: Any, seed: int = 0) -> nn.Module:
    model_class, config = family()
    config.use_cache = False
    return make_model(lambda: model_class(config), seed).train()


def batch(step: int, micro: int, rank: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [(llama, "reentrant"), (gpt2, "on"), (mixtral, "off"), (mixtral, "reentrant"), (t5, "on"), (t5, "off")],
)
def test_layer_major_training_equals_plain(family: Any, checkpointing: str) -> None:
    model: Any = build(family)
    if checkpointing != "off":
        arguments = {"use_reentrant": checkpointing == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)

    def counts(engine: Any, step: int) -> tuple[int, ...]:
        calls = engine.comm.traffic.calls
        return calls["all_gather"], calls["reduce_scatter"], len(engine.units)

    common: dict[str, Any] = {"ranks": 2, "accumulation": 3, "steps": 3, "batch": batch}
    own = {"wherry": {"accumulation": "layer_major"}}
    run = train_engine(model, stage=3, by_window=True, config=own, each_step=counts, **common)
    assert_close(run, train_plain(model, **common), 5e-5)
    gathers, reductions, units = run.extra[-1]
    assert reductions <= units and gathers < 3 * units, run.extra  # once for all micro-batches


@pytest.mark.parametrize(
    ("family", "files", "meta"),
    [(llama, "one", True), (gpt2, "several", True), (mixtral, "several", False), (t5, "one", True)],
)
def test_files_of_transformers_are_loaded(family: Any, files: str, meta: bool, tmp_path: Path) -> None:
    other: Any = build(family, seed=1)
    other.save_pretrained(tmp_path, max_shard_size="20KB" if files == "several" else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (files == "several")
    models = [build(family) for _ in range(2)]

    def body(comm: Comm) -> float:
        model_class, config = family()
        with wherry.Init(meta=True):
            model = model_class(config) if meta else models[comm.rank]
        result = wherry.load_pretrained(model, tmp_path) if meta else None
        engine, *_ = wherry.initialize(model=model, config=settings(3), mesh=comm)
        result = result or wherry.load_pretrained(engine, tmp_path)
        assert not result.missing and not result.unexpected
        assert_same(engine.module.state_dict(), other.state_dict())
        return float(engine(**batch(0, 0, 0)).loss.detach())

    expected = float(other(**batch(0, 0, 0)).loss.detach())
    assert run_ranks(2, body) == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_built_with_init_and_on_the_meta_device(family: Any) -> None:
    plain = build(family)
    with wherry.Init(settings(3)):
        model = build(family)
    engine, *_ = wherry.initialize(model=model, config=settings(3))
    assert_same(engine.module.state_dict(), plain.state_dict())
    engine.close()
    model_class, config = family()
    with torch.device("meta"):
        meta = model_class(config)
    engine, *_ = wherry.initialize(model=meta, config=settings(3))
    buffers = dict(engine.module.named_buffers())
    for name, value in plain.named_buffers():
        assert torch.equal(buffers[name], value), name
    for name, value in engine.module.state_dict().items():
        expected = plain.state_dict()[name]
        assert float(value.std()) == pytest.approx(float(expected.std()), rel=0.5, abs=1e-6), name


def test_a_base_models_file_in_a_model_with_a_head(tmp_path: Path) -> None:
    other = build(llama, seed=1)
    other.model.save_pretrained(tmp_path)
    engine, *_ = wherry.initialize(model=build(llama), config=settings(3))
    result = wherry.load_pretrained(engine, tmp_path, strict=False)
    assert result.missing == ["lm_head.weight"] and not result.unexpected
    assert torch.equal(engine.module.state_dict()["model.norm.weight"], other.model.norm.weight)


def test_adapters_around_loaded_weights_begin_without_effect(tmp_path: Path) -> None:
    """Load before PEFT renames parameters, and draws one of its two matrices as zeros."""
    peft = pytest.importorskip("peft", reason="the extra `peft` is not installed")
    other = build(llama, seed=1)
    other.save_pretrained(tmp_path)
    expected = float(other(**batch(0, 0, 0)).loss.detach())

    def body(comm: Comm) -> float:
        model_class, config = llama()
        with wherry.Init(meta=True):
            model = model_class(config)
        wherry.load_pretrained(model, tmp_path)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
        engine, *_ = wherry.initialize(model=model, config=settings(3), mesh=comm)
        state = engine.module.state_dict()
        assert all(value.any() for name, value in state.items() if "lora_A" in name)
        return float(engine(**batch(0, 0, 0)).loss.detach())

    assert run_ranks(2, body) == pytest.approx([expected] * 2, rel=1e-5)


def _build_and_train(rank: int) -> tuple[dict[str, torch.Tensor], float]:
    for _ in range(4):  # memory that a backend holds after a collective varies
        with wherry.Init(settings(3)):
            model = build(llama, seed=rank)
    engine, *_ = wherry.initialize(model=model, optimizer=adamw, config=settings(3))
    state = engine.module.state_dict()
    losses = train(engine, 1, batch=lambda *_: batch(0, 0, 0))
    engine.close()
    return state, losses[0]


def test_built_with_init_in_two_processes(warm: Any) -> None:
    plain = build(llama)
    expected = float(plain(**batch(0, 0, 0)).loss.detach())
    for state, loss in warm(2).run(_build_and_train):
        assert_same(state, plain.state_dict())
        assert loss == pytest.approx(expected, rel=1e-5)
