"""Models of Transformers whose loss is computed in pieces, and whose MLPs run over pieces of the sequence, against the
same without."""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import wherry
from wherry.nn.lazy_logits import LazyLogits
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers comes with `pip install '.[transformers]'`", allow_module_level=True)

VOCABULARY, LENGTH = 97, 12
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": False},
    "Qwen3": {"head_dim": 4, "tie_word_embeddings": True},
    "Gemma2": {"head_dim": 4, "final_logit_softcapping": 0.5},
    "Mixtral": {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1},
    "Granite": {"logits_scaling": 4.0},
    "Cohere": {"logit_scale": 0.25},
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def make(name: str) -> nn.Module:
    import transformers

    sizes = SIZES if name != "GPT2" else {"vocab_size": VOCABULARY}
    config = getattr(transformers, f"{name}Config")(**sizes | MODELS[name])
    kind = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(config)


def batch(step: int, rank: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(10 * step + rank))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(LENGTH) < 3, -100)}


def train(model: nn.Module, own: dict[str, Any], *, stage: int = 3, ranks: int = 1, **more: Any) -> dict[str, Any]:
    """Three steps, and an evaluation."""

    def body(comm: Comm) -> dict[str, Any]:
        mine = copy.deepcopy(model)
        config = {
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more.get("zero", {})},
            "wherry": {"unit_classes": [], **own},
            **{key: value for key, value in more.items() if key != "zero"},
        }
        engine, *_ = wherry.initialize(model=mine, config=config, mesh=comm)
        losses, lazy, traffic = [], [], {}
        for step in range(3):
            comm.traffic.clear()
            output = engine(**batch(step, comm.rank))
            engine.backward(output.loss)
            engine.step()
            losses.append(float(output.loss.detach()))
            lazy.append(isinstance(output.logits, LazyLogits) and output.logits._whole is None)
            traffic = dict(comm.traffic.calls)
        with torch.no_grad(), wherry.gathered_for_generation(engine):
            losses.append(float(engine(**batch(9, comm.rank)).loss))
        weights = engine.consolidated_state_dict()
        engine.close()
        assert not any({"forward", "_call_impl"} & module.__dict__.keys() for module in mine.modules()), (
            "the model is as it was"
        )
        return {"losses": losses, "weights": weights, "lazy": all(lazy), "calls": traffic}

    return run_ranks(ranks, body)[0]


def same(one: dict[str, Any], other: dict[str, Any], tolerance: float = 1e-6) -> None:
    assert one["losses"] == pytest.approx(other["losses"], rel=tolerance)
    for name, weight in other["weights"].items():
        torch.testing.assert_close(one["weights"][name], weight, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_with_whole_logits_and_has_none(name: str) -> None:
    model = make(name)
    plain, mine = (train(model, {"chunked_loss": on}, ranks=2) for on in (False, True))
    same(mine, plain)
    assert mine["lazy"] and not plain["lazy"]


PLACEMENTS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 2": {"stage": 2, "ranks": 2},
    "recompute": {"ranks": 2, "activation_checkpointing": {"policy": "recompute"}},
    "offloaded": {"zero": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}},
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
# Where the head is a unit of its own, and not part of the root.
UNITS = {"stage 2", "recompute", "autocast"}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_wherever_the_head_rests(name: str, monkeypatch: Any) -> None:
    placement = PLACEMENTS[name]
    if name in UNITS:
        monkeypatch.setattr("wherry.sharding.grouping.LARGE_LAYER", 1000)
    model = make("Llama")
    plain, mine = (train(model, {"chunked_loss": on}, **placement) for on in (False, True))
    same(mine, plain, 2e-2 if {"bf16", "torch_autocast"} & placement.keys() else 1e-6)
    assert mine["lazy"]
    assert mine["calls"] == plain["calls"], "the head is gathered as often"


def engine_of(model: nn.Module, **own: Any) -> Any:
    config = {
        "optimizer": {"type": "SGD"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "wherry": own,
    }
    return wherry.initialize(model=model, config=config)[0]


def test_logits_that_somebody_looks_at_are_there(caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("wherry.sharding.grouping.LARGE_LAYER", 1000)
    model = make("Gemma2")
    inputs = batch(0, 0)
    with torch.no_grad():
        expected = model(**inputs).logits
    with engine_of(model, chunked_loss=True) as engine, caplog.at_level(logging.INFO, "wherry"):
        output = engine(**inputs)
        assert not caplog.records
        logits = output.logits
        assert (logits.shape, logits.dtype, logits.requires_grad) == (expected.shape, torch.float32, True)
        assert torch.equal(logits[..., :-1, :].contiguous(), expected[..., :-1, :])
        assert torch.equal(copy.deepcopy(logits.detach()), expected) and logits.argmax(-1).shape == (2, LENGTH)
        assert len(caplog.records) == 1 and "so they are computed whole" in caplog.text
        # A loss of one's own through them, beside the model's.
        engine.backward(output.loss + logits.float().logsumexp(-1).mean())
        engine.step()
        late = engine(**inputs).logits
        engine.backward(engine(**inputs).loss)
        engine.step()
        with pytest.raises(wherry.WherryError, match="after the weights that make them had changed"):
            late.sum()
        assert type(engine(input_ids=inputs["input_ids"]).logits) is torch.Tensor, "without labels they are real"
        with wherry.gathered(list(model.parameters())):
            copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert type(copied(**inputs).logits) is torch.Tensor


def test_whole_logits_where_a_head_is_no_plain_layer(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "wherry"):
        engine_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), chunked_loss=True).close()
    assert "chunked_loss: the loss is computed from whole logits, as it has no module with" in caplog.text
    model = make("Llama")
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape))  # type: ignore[union-attr,operator]
    with engine_of(model, chunked_loss=True) as engine:
        engine(**batch(0, 0))
    assert seen == [(2, LENGTH, VOCABULARY)]


def test_lora_around_a_head(monkeypatch: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft comes with `pip install '.[transformers]'`")
    monkeypatch.setattr("wherry.sharding.grouping.LARGE_LAYER", 1000)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(make("Llama"), lora)
    own = {"chunked_loss": True, "sequence_tiles": 3}
    plain, mine = (train(model, keys, ranks=2) for keys in ({}, own))
    same(mine, plain)
    assert mine["lazy"]


@pytest.mark.long
def test_a_plan_follows_both_keys(tmp_path: Any) -> None:
    """And has no mask as large as the sequence squared, which the training of plain rows has not either."""
    from wherry.plan.dry_run import dry_run
    from wherry.sources import find

    length, classes, wide = 1024, 65_536, 16_384
    sizes = {**SIZES, "vocab_size": classes, "intermediate_size": wide, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"architectures": ["LlamaForCausalLM"]}))
    config = {"optimizer": {"type": "AdamW"}, "activation_checkpointing": {"policy": "recompute"}}

    def peak(**own: Any) -> int:
        found = dry_run(find(str(tmp_path)), config | {"wherry": own}, ranks=1, sequence=length)
        return max(line.at_peak for line in found.memory if line.category == "activations")

    whole, loss, both = peak(), peak(chunked_loss=True), peak(chunked_loss=True, sequence_tiles=4)
    logits, of_mlp = 4 * length * classes, 4 * length * wide
    assert whole > 3 * logits and loss < whole - logits
    assert both < loss - 2 * of_mlp
