"""A sequence shared out over ranks, against the whole of it in plain PyTorch on one process."""

from __future__ import annotations

import copy
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

import wherry
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks

if find_spec("transformers") is None:
    pytest.skip("transformers comes with `pip install '.[transformers]'`", allow_module_level=True)

VOCABULARY, ROWS, LENGTH, STEPS = 61, 2, 22, 3
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


def model_of(kind: str, attention: str = "sdpa") -> Any:
    import transformers

    configs = {
        "llama": lambda: transformers.LlamaConfig(**SHAPE),
        # Its scores and logits are capped, and every second layer sees a window.
        "gemma": lambda: transformers.Gemma2Config(**SHAPE, head_dim=8, sliding_window=9, query_pre_attn_scalar=8),
        "dynamic": lambda: transformers.LlamaConfig(
            **SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        ),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0,
            attn_pdrop=0,
        ),
        "falcon": lambda: transformers.FalconConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
        ),
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = configs[kind]()
        config.use_cache = False
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def batch_of(seed: int, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Rows of two lengths, padded at the end, of which the first few tokens are no answers."""
    ids = torch.randint(0, VOCABULARY, (ROWS, length), generator=torch.Generator().manual_seed(seed))
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[1, length - 5 :] = 0
    labels[:, :3] = labels[1, length - 5 :] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def plain(model: Any, readers: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(STEPS):
        found = [model(**batch_of(10 * step + reader)).loss / readers for reader in range(readers)]
        sum(found).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in found))
    return losses, model.state_dict()


def train(
    model: Any, together: int, own: dict[str, Any], zero: dict[str, Any], mesh: Any, recomputes: bool = False
) -> Any:
    engine, *_ = wherry.initialize(
        model=copy.deepcopy(model), mesh=mesh, optimizer=partial(torch.optim.SGD, lr=0.5, momentum=0.9),
        config={
            "train_micro_batch_size_per_gpu": ROWS, "zero_optimization": zero,
            "wherry": {"context_parallel": together, **own},
            "activation_checkpointing": {"policy": "recompute" if recomputes else "none"},
        },
    )  # fmt: skip
    losses = []
    for step in range(STEPS):
        loss = engine(**batch_of(10 * step + engine.topology.readers[0])).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    state = engine.consolidated_state_dict()
    exchanged = engine.topology.context.traffic.calls["all_to_all"]
    samples = engine.global_samples
    engine.close()
    return losses, state, exchanged, samples


ALL_OF_IT = {"chunked_loss": True, "sequence_tiles": 2}


@pytest.mark.parametrize(
    ("kind", "attention", "together", "ranks", "own", "zero", "recomputes"),
    [
        ("llama", "sdpa", 2, 2, {}, {"stage": 3}, True),
        # Four ranks share two heads of keys.
        ("llama", "sdpa", 4, 4, ALL_OF_IT, {"stage": 3, "offload_param": {"device": "cpu"}}, False),
        ("llama", "sdpa", 2, 4, {}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, False),
        ("gemma", "eager", 2, 2, ALL_OF_IT, {"stage": 3}, False),
        ("gpt2", "sdpa", 4, 4, {}, {"stage": 1}, False),
    ],
)
def test_losses_and_weights_are_those_of_one_process(
    kind: str, attention: str, together: int, ranks: int, own: Any, zero: Any, recomputes: bool
) -> None:
    model = model_of(kind, attention)
    losses, weights = plain(model, ranks // together)
    found = run_ranks(ranks, lambda comm: train(model, together, own, zero, comm, recomputes))
    for step, expected in enumerate(losses):
        ours = [rank[0][step] for rank in found]
        for first in range(0, ranks, together):  # those with the same samples have the loss of all of them
            assert max(ours[first : first + together]) - min(ours[first : first + together]) < 1e-6
        assert sum(ours) / ranks == pytest.approx(expected, abs=2e-6)
    for name, tensor in found[0][1].items():
        torch.testing.assert_close(tensor, weights[name], atol=2e-5, rtol=2e-5, msg=name)
    # Each of two layers exchanges queries, keys, values and the result, in forward and backward, and recomputed again.
    if together < ranks or recomputes:
        assert found[0][2] == STEPS * 2 * (12 if recomputes else 8)
    assert found[0][3] == STEPS * ROWS * (ranks // together)


def test_padding_before_rows_is_masked_and_generation_runs_whole() -> None:
    model = model_of("llama").eval()
    batch = {name: value.flip(1) for name, value in batch_of(0).items()}
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    expected = model(**batch).loss
    prompt = {name: batch[name] for name in ("input_ids", "attention_mask")}
    said = model.generate(**prompt, max_new_tokens=4, do_sample=False)

    def body(comm: Comm) -> Any:
        engine, *_ = wherry.initialize(
            model=copy.deepcopy(model), mesh=comm, config={"wherry": {"context_parallel": 2}},
            optimizer=torch.optim.SGD,
        )  # fmt: skip
        engine.eval()
        with torch.no_grad():
            loss = engine(**batch).loss
            words = engine.module.generate(**prompt, max_new_tokens=4, do_sample=False)
        module = engine.unwrap()
        return loss, words, module.config._attn_implementation, module(**batch).loss

    for loss, words, attention, after in run_ranks(2, body):
        torch.testing.assert_close(loss, expected.detach())
        assert torch.equal(words, said)
        assert attention == "sdpa"
        torch.testing.assert_close(after, expected)


def phi() -> Any:
    import transformers

    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
    config = transformers.Phi3Config(
        **SHAPE, pad_token_id=0, rope_parameters=rope, original_max_position_embeddings=32, eos_token_id=0,
        bos_token_id=0,
    )  # fmt: skip
    return transformers.Phi3ForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "ranks", "config", "change", "told"),
    [
        (partial(nn.Linear, 4, 4), 2, {}, {}, "causal language model of Transformers"),
        (partial(model_of, "falcon"), 2, {}, {}, "FalconForCausalLM computes attention in a way of its own"),
        (phi, 2, {}, {}, "longrope position embeddings"),
        (partial(model_of, "dynamic"), 2, {}, {}, "dynamic position embeddings"),
        (partial(model_of, "llama"), 3, {"wherry": {"context_parallel": 2}}, {}, "does not divide the 3"),
        (partial(model_of, "llama"), 3, {"wherry": {"context_parallel": 3}}, {}, "4 heads"),
        (partial(model_of, "llama", "flex_attention"), 2, {}, {}, "attention is flex_attention"),
        (partial(model_of, "llama"), 2, {"gradient_allreduce_op": "sum"}, {}, "mean"),
        (
            partial(model_of, "llama"), 2, {},
            {"position_ids": torch.arange(LENGTH).remainder(7).expand(ROWS, -1)}, "several packed",
        ),
        (partial(model_of, "llama"), 2, {}, {"attention_mask": torch.ones(ROWS, 1, LENGTH, LENGTH)}, "one number"),
        (partial(model_of, "llama"), 2, {}, None, "different samples"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_out_is_told(make: Any, ranks: int, config: Any, change: Any, told: str) -> None:
    model, config = make(), {"wherry": {"context_parallel": 2}, **config}

    def body(comm: Comm) -> None:
        own = copy.deepcopy(model)
        engine, *_ = wherry.initialize(model=own, mesh=comm, config=config, optimizer=torch.optim.SGD)
        engine(**{**batch_of(comm.rank if change is None else 0), **(change or {})})

    with pytest.raises(WherryError, match=told):
        run_ranks(ranks, body)


def test_a_loss_of_whole_rows_is_refused(tmp_path: Any) -> None:
    import transformers

    from wherry.integrations.transformers import WherryTrainer

    arguments = transformers.TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to=[])
    with pytest.raises(WherryError, match="label_smoothing_factor computes a loss from whole rows"):
        WherryTrainer(model_of("llama"), arguments, wherry_config={"wherry": {"context_parallel": 2}})
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    own = {"__module__": "trl.trainer", "compute_loss": WherryTrainer.compute_loss}
    with pytest.raises(WherryError, match="DPOTrainer computes a loss from whole rows"):
        type("DPOTrainer", (WherryTrainer,), own)(
            model_of("llama"), arguments, wherry_config={"wherry": {"context_parallel": 2}}
        )
