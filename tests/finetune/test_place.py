"""Where a fine-tuning rests, by the plan: what is chosen, told and proposed."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from wherry import config as configs
from wherry import fake
from wherry.config import Config
from wherry.errors import WherryError
from wherry.finetune.config import build_config
from wherry.finetune.options import parse
from wherry.finetune.place import place, source_for
from wherry.nn import cross_entropy, sequence_tiles
from wherry.plan.dry_run import count
from wherry.plan.forecaster import Forecaster
from wherry.plan.machines import Machine, known
from wherry.plan.model_source import Inputs, ModelSource

BLOCKS, SEQUENCE = 2, 64
WEIGHTS = 1_050_000  # of a block


def make(micro_batch: int, sequence: int, vocabulary: int = 2048) -> tuple[Any, Inputs]:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=1024, num_hidden_layers=BLOCKS, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    ids = torch.zeros(micro_batch, sequence, dtype=torch.int64)
    return transformers.LlamaForCausalLM(config), Inputs((), {"input_ids": ids, "labels": ids})


SOURCE = ModelSource("llama", make, sequence=SEQUENCE)


def with_adapters(model: Any) -> Any:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))


def config_of(*flags: str) -> Config:
    return build_config(parse(["MODEL", "--data", "DATA", *flags]), "sft", None, bf16=True, ranks=1)


def gpu_of(megabytes: float, host: float = 64e3) -> Machine:
    return replace(known("4090"), gpu_memory=int(megabytes * 1e6 / 0.92), host_memory=int(host * 1e6))


@pytest.mark.long
def test_a_refusal_names_adapters_with_what_they_need() -> None:
    lora = source_for(SOURCE, with_adapters, 1)
    config = config_of("--batch-size=1", "--global-batch-size=2")
    with pytest.raises(WherryError, match=r"(?s)nothing fits.*It would fit with --lora, which needs"):
        place(config, SOURCE, gpu_of(26, host=26), 1, SEQUENCE, None, {"--lora": lora})


@pytest.mark.long
def test_dry_runs_in_tiles_let_go_of_frozen_weights_and_count_every_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = {"device": "cpu"}
    zero = {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu, "stage3_max_live_parameters": 2_500_000}
    config = configs.load({
        "zero_optimization": {**zero, "stage3_prefetch_bucket_size": 1000, "stage3_param_persistence_threshold": 0},
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
        "activation_checkpointing.policy": "recompute",
        "wherry": {"sequence_tiles": 16, "chunked_loss": True},
    })  # fmt: skip
    lora = source_for(SOURCE, with_adapters, 1)
    counts = count(lora, config, ranks=1, sequence=8 * SEQUENCE, gpu=True)
    assert max(peak["gathered"] for peak in counts.peaks.values()) < 3 * 2 * WEIGHTS
    for module in (cross_entropy, sequence_tiles):
        monkeypatch.setattr(module, "alike", lambda parts: iter(parts))
    every = count(lora, config, ranks=1, sequence=8 * SEQUENCE, gpu=True)
    assert counts.top() == pytest.approx(every.top(), rel=1e-3)
    flops = [sum(each.flops * n for each, n in found.operations.items()) for found in (counts, every)]
    assert flops[0] == pytest.approx(flops[1], rel=1e-3)


def test_ranks_that_share_rows_hold_a_part_of_the_activations() -> None:
    narrow = ModelSource("llama", functools.partial(make, vocabulary=64), sequence=SEQUENCE)
    given = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 16, "zero_optimization.stage": 2}
    alone, shared = (
        Forecaster(narrow, gpu_of(4000), 2, 8 * SEQUENCE).quick(
            configs.load(config_of(), overrides={**given, "train_batch_size": 32 // n, "wherry.context_parallel": n})
        )
        for n in (1, 2)
    )

    def activations(found: Any) -> int:
        return sum(row.bytes for row in found.rows if row.category == "activations")

    assert activations(shared) == pytest.approx(activations(alone) / 2, rel=0.1)
    assert shared.samples == alone.samples / 2


def test_a_dry_run_that_fails_leaves_no_count_behind() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), pytest.raises(ZeroDivisionError):
        for number, _ in enumerate(fake.alike(range(9))):
            if number == 1:
                assert fake.standing_for.get() == 7
                raise ZeroDivisionError
    assert fake.standing_for.get() == 1


def test_what_is_no_number_of_ranks_is_an_error_of_the_config() -> None:
    for own in ({"context_parallel": 0}, {"context_parallel": "two"}, "x"):
        with pytest.raises(WherryError, match="wherry"):
            build_config(parse(["MODEL", "--data", "DATA"]), "sft", {"wherry": own}, bf16=True, ranks=2)


def test_products_of_experts_are_counted_in_fp32() -> None:
    """torch has a kernel for them that takes bf16 alone where there are no values."""
    import transformers

    def experts(micro_batch: int, sequence: int) -> tuple[Any, Inputs]:
        config = transformers.MixtralConfig(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
        )  # fmt: skip
        ids = torch.zeros(micro_batch, sequence, dtype=torch.int64)
        return transformers.MixtralForCausalLM(config), Inputs((), {"input_ids": ids, "labels": ids})

    config = configs.load({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": False}})
    counts = count(ModelSource("mixtral", experts, sequence=SEQUENCE), config, ranks=1, sequence=SEQUENCE)
    flops = sum(each.flops * times for each, times in counts.operations.items() if not each.attention)
    layer = 4 * 64 * 64 + 64 * 4 + 2 * (64 * 256 + 128 * 64)  # attention's, the router, two of the experts
    assert flops == pytest.approx(3 * 2 * SEQUENCE * (layer + 64 * 64), rel=0.02)
