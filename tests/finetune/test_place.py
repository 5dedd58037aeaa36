"""Where a fine-tuning rests, by the plan: what is chosen, told and proposed."""

from __future__ import annotations

import functools
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from wherry import config as configs
from wherry import fake
from wherry.config import Config
from wherry.errors import WherryError
from wherry.finetune.config import build_config
from wherry.finetune.options import parse
from wherry.finetune.place import as_table, order_of, place, source_for
from wherry.nn import cross_entropy, sequence_tiles
from wherry.plan.dry_run import count
from wherry.plan.forecaster import Forecaster
from wherry.plan.grid import ALONE
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


LORA = source_for(SOURCE, with_adapters, 1)


def config_of(*flags: str) -> Config:
    return build_config(parse(["MODEL", "--data", "DATA", *flags]), "sft", None, bf16=True, ranks=1)


def gpu_of(megabytes: float, host: float = 64e3) -> Machine:
    return replace(known("4090"), gpu_memory=int(megabytes * 1e6 / 0.92), host_memory=int(host * 1e6))


@pytest.mark.nightly
def test_small_memory_is_met_by_tiles_only_where_nothing_else_fits() -> None:
    found = place(config_of("--batch-size=1"), SOURCE, gpu_of(2000), 1, SEQUENCE, None)
    assert not any("tiles" in key or "cpu_checkpointing" in key for key in found.values)
    # Between what is needed with tiles and without, at the place that takes the least.
    long, least = 64 * SEQUENCE, ("--stage=3", "--offload-optimizer=cpu", "--offload-param=cpu", "--batch-size=1")
    given, forecaster = config_of(*least, "--global-batch-size=1"), Forecaster(SOURCE, gpu_of(4000), 1, long)
    needs = [
        forecaster.exact(
            configs.load(given, overrides={"activation_checkpointing.policy": "recompute", "wherry.sequence_tiles": n})
        ).uses[0].needed
        for n in ("auto", None)
    ]  # fmt: skip
    assert needs[0] < 0.9 * needs[1]
    found = place(given, SOURCE, gpu_of((needs[0] + needs[1]) / 2e6), 1, long, None)
    assert found.values["wherry.sequence_tiles"] == "auto" and found.estimate.fits
    told = io.StringIO()
    Console(file=told, width=160).print(as_table(found))
    assert "recomputed, in tiles" in told.getvalue() and "updated before their next use" in order_of(found)


@pytest.mark.long
def test_a_refusal_names_adapters_with_what_they_need() -> None:
    with pytest.raises(WherryError) as refused:
        place(
            config_of("--batch-size=1", "--global-batch-size=2"),
            SOURCE,
            gpu_of(26, host=26),
            1,
            SEQUENCE,
            None,
            {"--lora": LORA},
        )
    assert "nothing fits" in str(refused.value)
    assert "It would fit with --lora, which needs" in str(refused.value)


@pytest.mark.nightly
def test_adapters_are_counted_as_what_is_trained() -> None:
    config = configs.load(config_of(), overrides={
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 16,
    })  # fmt: skip
    forecaster = Forecaster(LORA, gpu_of(4000), 1, SEQUENCE)
    quick, exact = forecaster.quick(config).uses[1].needed, forecaster.exact(config).uses[1].needed
    assert quick == pytest.approx(exact, rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize("policy", [pytest.param("none", marks=pytest.mark.nightly), "recompute"])
def test_frozen_weights_are_let_go_of_where_mlps_run_in_tiles(policy: str) -> None:
    config = configs.load(config_of(), overrides={
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
            "stage3_max_live_parameters": 2_500_000, "stage3_prefetch_bucket_size": 1000,
            "stage3_param_persistence_threshold": 0,
        },
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 16,
        "activation_checkpointing.policy": policy, "wherry.sequence_tiles": 4,
    })  # fmt: skip
    counts = count(LORA, configs.load(config, overrides={"train_batch_size": 1, "gradient_accumulation_steps": 1}),
                   ranks=1, sequence=SEQUENCE, gpu=True)  # fmt: skip
    assert max(peak["gathered"] for peak in counts.peaks.values()) < 3 * 2 * WEIGHTS


@pytest.mark.long
def test_a_dry_run_of_few_tiles_counts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configs.load(config_of(), overrides={
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 16, "wherry.sequence_tiles": 16,
    })  # fmt: skip

    def passes() -> Any:
        return Forecaster(SOURCE, gpu_of(4000), 1, 8 * SEQUENCE)._passes_of(config, 1, ALONE)

    few = passes()
    for module in (cross_entropy, sequence_tiles):
        monkeypatch.setattr(module, "alike", lambda parts: iter(parts))
    every = passes()
    assert few.counts.top() == pytest.approx(every.counts.top(), rel=1e-3)
    flops = [sum(each.flops * n for each, n in found.counts.operations.items()) for found in (few, every)]
    assert flops[0] == pytest.approx(flops[1], rel=1e-3)
    assert fake.standing_for.get() == 1


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


@pytest.mark.long
def test_what_is_chosen_is_in_the_run_and_repeats_it(tmp_path: Path) -> None:
    found = place(config_of(), SOURCE, gpu_of(600), 1, SEQUENCE, None)
    again = configs.load(config_of(), overrides=found.values)
    assert again.placement() == found.config.placement()
    assert again.wherry.accumulation == found.config.wherry.accumulation


def test_a_dry_run_that_fails_leaves_no_count_behind() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), pytest.raises(ZeroDivisionError):
        for number, _ in enumerate(fake.alike(range(9))):
            if number == 1:
                assert fake.standing_for.get() == 7
                raise ZeroDivisionError
    assert fake.standing_for.get() == 1


@pytest.mark.parametrize("own", [{"context_parallel": 0}, {"context_parallel": "two"}, "x"])
def test_what_is_no_number_of_ranks_is_an_error_of_the_config(own: Any) -> None:
    with pytest.raises(WherryError, match="wherry"):
        build_config(parse(["MODEL", "--data", "DATA"]), "sft", {"wherry": own}, bf16=True, ranks=2)


@pytest.mark.parametrize("half", [False, pytest.param(True, marks=pytest.mark.long)])
def test_products_of_experts_are_counted_in_every_type(half: bool) -> None:
    """torch has a kernel for them that takes bf16 alone where there are no values."""
    import transformers

    def experts(micro_batch: int, sequence: int) -> tuple[Any, Inputs]:
        config = transformers.MixtralConfig(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
        )  # fmt: skip
        ids = torch.zeros(micro_batch, sequence, dtype=torch.int64)
        return transformers.MixtralForCausalLM(config), Inputs((), {"input_ids": ids, "labels": ids})

    config = configs.load({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": half}})
    counts = count(ModelSource("mixtral", experts, sequence=SEQUENCE), config, ranks=1, sequence=SEQUENCE)
    flops = sum(each.flops * times for each, times in counts.operations.items() if not each.attention)
    layer = 4 * 64 * 64 + 64 * 4 + 2 * (64 * 256 + 128 * 64)  # attention's, the router, two of the experts
    assert flops == pytest.approx(3 * 2 * SEQUENCE * (layer + 64 * 64), rel=0.02)
