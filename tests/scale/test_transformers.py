"""Models of transformers, tiny and random: layer-major training equals plain PyTorch, and their files load."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

from tests.engine.harness import Run, adamw, assert_close, settings  # noqa: E402
from tests.engine.test_processes import Pool  # noqa: E402
from torch import nn  # noqa: E402

import wherry  # noqa: E402
from wherry.parallel.comm import Comm  # noqa: E402
from wherry.testing import run_ranks  # noqa: E402

VOCABULARY = 48


def llama() -> tuple[Any, Any]:
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip


def gpt2() -> tuple[Any, Any]:
    return transformers.GPT2LMHeadModel, transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


def mixtral() -> tuple[Any, Any]:
    return transformers.MixtralForCausalLM, transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
    )  # fmt: skip


def t5() -> tuple[Any, Any]:
    return transformers.T5ForConditionalGeneration, transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip


FAMILIES = [llama, gpt2, mixtral, t5]


def build(family: Any, seed: int = 0) -> nn.Module:
    model_class, config = family()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
    model.config.use_cache = False
    return model.train()


def batch(step: int, micro: int, rank: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))
    return {"input_ids": ids, "labels": ids}


def train_plain(model: nn.Module, ranks: int, accumulation: int, steps: int) -> Run:
    model = copy.deepcopy(model)
    optimizer, run = adamw(model.parameters()), Run()
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(accumulation):
            for rank in range(ranks):
                loss = model(**batch(step, micro, rank)).loss / (ranks * accumulation)
                loss.backward()
                total += float(loss.detach())
        grads = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
        run.norms.append(float(torch.stack(grads).sum().sqrt()))
        optimizer.step()
        run.losses.append(total)
    run.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


@pytest.mark.parametrize("checkpointing", ["off", "on", "reentrant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layer_major_training_equals_plain(family: Any, checkpointing: str) -> None:
    model, ranks, accumulation, steps = build(family), 2, 3, 3
    if checkpointing != "off":
        arguments = {"use_reentrant": checkpointing == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    plain = train_plain(model, ranks, accumulation, steps)

    def body(comm: Comm) -> Run:
        run, mine = Run(extra=[]), copy.deepcopy(model)
        config = settings(3, accumulation, more={"wherry": {"accumulation": "layer_major"}})
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), mesh=comm, config=config)
        for step in range(steps):
            comm.traffic.clear()
            batches = iter([batch(step, micro, comm.rank) for micro in range(accumulation)])
            run.losses.append(sum(comm.gather_objects(float(engine.train_batch(batches)))) / comm.size)
            run.norms.append(engine.get_global_grad_norm())
            calls = comm.traffic.calls
            run.extra.append((calls["all_gather"], calls["reduce_scatter"], len(engine.units)))
        with wherry.gathered(mine):
            run.weights = {name: p.detach().clone() for name, p in mine.named_parameters()}
        engine.close()
        return run

    run = run_ranks(ranks, body)[0]
    assert_close(run, plain, 5e-5)
    gathers, reductions, units = run.extra[-1]
    assert reductions <= units and gathers < accumulation * units, run.extra  # once for all micro-batches


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("files", ["one", "several"])
def test_what_transformers_saves_loads(family: Any, files: str, tmp_path: Path) -> None:
    other = build(family, seed=1)
    other.save_pretrained(tmp_path, max_shard_size="20KB" if files == "several" else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (files == "several")
    models = [build(family) for _ in range(2)]

    def body(comm: Comm) -> None:
        engine, *_ = wherry.initialize(model=models[comm.rank], config=settings(3), mesh=comm)
        result = wherry.load_pretrained(engine, tmp_path)
        assert not result.missing and not result.unexpected
        state = engine.module.state_dict()
        for name, value in other.state_dict().items():
            assert torch.equal(state[name], value), name

    run_ranks(2, body)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_loads_into_a_model_on_the_meta_device(family: Any, tmp_path: Path) -> None:
    other = build(family, seed=1)
    other.save_pretrained(tmp_path)

    def body(comm: Comm) -> float:
        model_class, config = family()
        with wherry.Init(meta=True):
            model = model_class(config)
        result = wherry.load_pretrained(model, tmp_path)
        assert not result.missing and not result.unexpected
        engine, *_ = wherry.initialize(model=model, config=settings(3), mesh=comm)
        state = engine.module.state_dict()
        for name, value in other.state_dict().items():
            assert torch.equal(state[name], value), name
        return float(engine(**batch(0, 0, 0)).loss.detach())

    expected = float(other(**batch(0, 0, 0)).loss.detach())
    assert run_ranks(2, body) == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_built_with_init_and_on_the_meta_device(family: Any) -> None:
    plain = build(family)
    with wherry.Init(settings(3)):
        model = build(family)
    engine, *_ = wherry.initialize(model=model, config=settings(3))
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
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


def test_adapters_around_what_files_have_begin_without_effect(tmp_path: Path) -> None:
    """PEFT names the parameters anew, and draws one of its two matrices as zeros."""
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


def _built_and_trained(rank: int) -> tuple[dict[str, torch.Tensor], float]:
    for _ in range(4):  # what a backend still holds after a collective differs from time to time
        with wherry.Init(settings(3)):
            model = build(llama, seed=rank)
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=settings(3))
    state = engine.module.state_dict()
    loss = engine(**batch(0, 0, 0)).loss
    engine.backward(loss)
    engine.step()
    engine.close()
    return state, float(loss.detach())


def test_built_with_init_in_two_processes() -> None:
    plain = build(llama)
    expected = float(plain(**batch(0, 0, 0)).loss.detach())
    pool = Pool(2)
    try:
        answers = pool.run(_built_and_trained)
    finally:
        pool.close()
    for state, loss in answers:
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value), name
        assert loss == pytest.approx(expected, rel=1e-5)
