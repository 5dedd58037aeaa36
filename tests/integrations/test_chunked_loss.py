"""Models of Transformers whose loss is computed in pieces, and whose MLPs run over pieces of the sequence, against the
same without."""

from __future__ import annotations

import copy
import importlib.util
import logging
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from tests.engine.harness import Run, assert_close, train_engine, train_plain
from torch import nn

import wherry
from wherry.nn.lazy_logits import LazyLogits

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers comes with `pip install '.[transformers]'`", allow_module_level=True)

VOCABULARY, LENGTH = 97, 12
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
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


def batch(step: int, micro: int, rank: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(10 * step + rank))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(LENGTH) < 3, -100)}


COMMON: dict[str, Any] = {"steps": 3, "batch": batch, "optimizer": partial(torch.optim.SGD, lr=0.1)}


def train(model: nn.Module, own: dict[str, Any], *, stage: int = 3, ranks: int = 1, **more: Any) -> Run:
    """Train; the run's `extra` tells whether logits are lazy, the calls of a step, and an evaluation's loss."""

    def finish(engine: Any) -> Any:
        engine.comm.traffic.clear()
        output = engine(**batch(3, 0, engine.comm.rank))
        engine.backward(output.loss)
        engine.step()
        calls = dict(engine.comm.traffic.calls)
        with torch.no_grad(), wherry.gathered_for_generation(engine):
            loss = float(engine(**batch(9, 0, engine.comm.rank)).loss)
        return isinstance(output.logits, LazyLogits), calls, loss

    return train_engine(model, stage=stage, ranks=ranks, config={"wherry": own, **more}, finish=finish, **COMMON)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_with_whole_logits_and_has_none(name: str) -> None:
    model = make(name)
    run = train(model, {"chunked_loss": True}, ranks=2)
    assert_close(run, train_plain(model, ranks=2, **COMMON))
    assert run.extra[0]


PLACEMENTS: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2, "ranks": 2},
    "recompute": {"ranks": 2, "activation_checkpointing": {"policy": "recompute"}},
    "offloaded": {"zero_optimization": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_wherever_the_head_rests(name: str, small_sizes: Any) -> None:
    """Keep the head in a unit of its own, and offloaded in the root."""
    if name != "offloaded":
        small_sizes(large_layer=1000)
    model = make("Llama")
    plain, mine = (train(model, {"chunked_loss": on}, **PLACEMENTS[name]) for on in (False, True))
    assert_close(mine, plain, 2e-2 if name == "autocast" else 1e-5)
    assert (mine.extra[0], plain.extra[0]) == (True, False)
    assert mine.extra[1] == plain.extra[1], "the head is gathered as often"
    assert mine.extra[2] == pytest.approx(plain.extra[2], rel=2e-2 if name == "autocast" else 1e-5)


def engine_of(model: nn.Module, **own: Any) -> Any:
    config = {
        "optimizer": {"type": "SGD"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "wherry": own,
    }
    return wherry.initialize(model=model, config=config)[0]


def test_logits_that_somebody_looks_at_are_there(caplog: Any, small_sizes: Any) -> None:
    small_sizes(large_layer=1000)
    model = make("Gemma2")
    inputs = batch(0, 0, 0)
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
    assert not any({"forward", "_call_impl"} & module.__dict__.keys() for module in model.modules())


def test_whole_logits_where_a_head_is_no_plain_layer(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "wherry"):
        engine_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), chunked_loss=True).close()
    assert "chunked_loss: the loss is computed from whole logits, as it has no module with" in caplog.text
    model = make("Llama")
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape))  # type: ignore[union-attr,operator]
    with engine_of(model, chunked_loss=True) as engine:
        engine(**batch(0, 0, 0))
    assert seen == [(2, LENGTH, VOCABULARY)]


def test_lora_around_a_head(small_sizes: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft comes with `pip install '.[transformers]'`")
    small_sizes(large_layer=1000)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(make("Llama"), lora)
    run = train(model, {"chunked_loss": True, "sequence_tiles": 3}, ranks=2)
    assert_close(run, train_plain(model, ranks=2, **COMMON))
    assert run.extra[0]
