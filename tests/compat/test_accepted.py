"""Configs through the alias: what DeepSpeed accepts is accepted, with a line; what it raises is raised.

A config of Wherry's can be written in DeepSpeed's keys.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.compat.harness import ADAM
from torch import nn

from wherry.cli import main
from wherry.compat.deepspeed.config import (
    DeepSpeedConfig,
    DeepSpeedConfigError,
    DeepSpeedFP16Config,
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    batch_sizes,
    for_deepspeed,
    get_bfloat16_config,
    load,
)
from wherry.compat.deepspeed.engine import initialize
from wherry.config import load as load_own
from wherry.errors import ConfigError

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
SMALL = {TRAIN: 2, "optimizer": ADAM}


def engine_of(**given: Any) -> Any:
    return initialize(model=nn.Linear(2, 1), **given)[0]


def test_what_deepspeed_does_not_read_is_left_aside_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    for path, block in (
        ("activation_checkpointing.use_reentrant", {"use_reentrant": True}),
        ("fp16.loss_scale_window", {"enabled": True, "loss_scale": 128, "loss_scale_window": 0}),
    ):
        given = {path.partition(".")[0]: block}
        before = json.dumps(given)
        with caplog.at_level("INFO", "wherry"):
            load(given)
        assert f"{path} is left aside: " in caplog.text and json.dumps(given) == before
        with pytest.raises(ConfigError):
            load_own(given)


@pytest.mark.parametrize(
    "given",
    [
        {"fp16": {"enabeld": True}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        {"optimizer": {"type": "Adam", "params": {"learning_rate": 1}}},
        {"progressive_layer_drop": {"enabled": True}},
        {"compression_training": {"weight_quantization": {}}},
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
        {"gradient_allreduce_op": "max"},
        {"compile": {"deepcompile": True}, "gradient_allreduce_op": "sum"},
    ],
)
def test_what_changes_results_and_is_not_there_stays_refused(given: dict[str, Any]) -> None:
    assert issubclass(DeepSpeedConfigError, AssertionError) and issubclass(DeepSpeedConfigError, ValueError)
    with pytest.raises(DeepSpeedConfigError):
        engine_of(config={TRAIN: 1, **given})


@pytest.mark.parametrize("flag", ["deepscale_config", "deepspeed_config"])
def test_the_config_of_a_flag_and_the_local_rank(flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL))
    args = argparse.Namespace(**{flag: str(file)}, local_rank=-1)
    engine = engine_of(args=args)
    assert engine.train_batch_size() == 2
    assert (args.deepspeed_config, args.local_rank) == (str(file), 3)
    engine.destroy()


def test_a_config_that_is_given_twice_or_not_at_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "wherry")
    both = argparse.Namespace(deepspeed_config="a.json", deepscale_config="b.json")
    for given in ({"args": both}, {"args": argparse.Namespace(deepspeed_config="a.json"), "config": SMALL}, {}):
        with pytest.raises(AssertionError, match=r"give it once|requires a config"):
            engine_of(**given)
    with pytest.raises(AssertionError, match="requires a model"):
        initialize(nn.Linear(2, 1), config=SMALL)
    engine = engine_of(config=SMALL, config_params={TRAIN: 5})
    assert engine.train_batch_size() == 2 and "config_params is left aside" in caplog.text
    engine.destroy()


@pytest.mark.parametrize(
    ("given", "ranks", "found"),
    [
        ((32, 16, 1), 2, (32, 16, 1)), ((32, 8, None), 2, (32, 8, 2)), ((32, None, 2), 2, (32, 8, 2)),
        ((None, 8, 2), 2, (32, 8, 2)), ((32, None, None), 2, (32, 16, 1)), ((None, 16, None), 2, (32, 16, 1)),
        ((33, 17, 2), 2, None), ((32, 18, None), 2, None), ((1, None, None), 2, None),
        ((None, None, 4), 1, None), ((0, None, None), 1, None),
    ],
)  # fmt: skip
def test_batch_sizes_follow_from_each_other_or_contradict(given: Any, ranks: int, found: Any) -> None:
    if found is not None:
        assert batch_sizes(*given, ranks) == found
        return
    with pytest.raises(AssertionError):
        batch_sizes(*given, ranks)
    if ranks == 1:
        sizes = {key: size for key, size in zip((TRAIN, MICRO, STEPS), given, strict=True) if size is not None}
        for build in (DeepSpeedConfig, lambda config: engine_of(config=config)):
            with pytest.raises(AssertionError):
                build(sizes)


def test_what_scripts_read_of_a_config() -> None:
    given = {
        MICRO: 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "gradient_allreduce_op": "SUM",
        "bfloat16": {"enabled": True},
        "zero_optimization": {"stage": 2, "cpu_offload": True},
        "communication_data_type": "fp32",
        "data_types": {"buffer_dtype": "bf16"},
        "log_level": "ERROR",
    }
    read = DeepSpeedConfig(given)
    assert (read.train_batch_size, read.gradient_accumulation_steps, read.world_size) == (2, 1, 1)
    assert (read.optimizer_name, read.optimizer_params, read.scheduler_name) == ("adamw", {"lr": 0.1}, "WarmupLR")
    assert read.gradient_allreduce_op == "sum" and read.managed_gradient_accumulation
    assert read.bfloat16_config.enabled and read.bfloat16_enabled and not read.float16_config.enabled
    assert read.zero_config.offload_optimizer is not None and read.zero_config.offload_optimizer.device == "cpu"
    assert read.zero_config.offload_param is None and read.zero_enabled
    assert read.communication_data_type is torch.float32 and (read.param_dtype, read.buffer_dtype) == (None, "bf16")
    assert read.log_level == "ERROR" and read.eigenvalue_enabled is False


def test_the_blocks_of_zero_and_precision_under_every_spelling() -> None:
    zero = DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=5, max_reuse_distance=7)
    assert (zero.prefetch_bucket_size, zero.stage3_prefetch_bucket_size, zero.stage3_max_reuse_distance) == (5, 5, 7)
    assert load({"zero_optimization": {"stage": 3, "prefetch_bucket_size": 11}}).zero_optimization == (
        load({"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 11}}).zero_optimization
    )
    assert zero.overlap_comm is True and DeepSpeedZeroConfig(stage=2).overlap_comm is False
    assert zero.offload_param is None and zero.contiguous_gradients is True
    assert isinstance(DeepSpeedZeroConfig(cpu_offload=True).offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)
    assert DeepSpeedZeroConfig(stage3_gather_fp16_weights_on_model_save=True).gather_16bit_weights_on_model_save is True
    written = {"stage": 3, "overlap_comm": False, "offload_optimizer": {"device": "cpu", "pipeline_write": True}}
    zero = DeepSpeedConfig({TRAIN: 2, "zero_optimization": written}).zero_config
    assert (zero.stage, zero.overlap_comm, zero.offload_optimizer.pipeline_write) == (3, False, True)
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    assert DeepSpeedFP16Config(loss_scale="3").loss_scale == 3
    for block, bad in (
        (DeepSpeedZeroConfig, {"overlapcomm": True}),
        (DeepSpeedZeroConfig, {"overlap_comm": "x"}),
        (DeepSpeedFP16Config, {"loss_scale": True}),
        (DeepSpeedFP16Config, {"loss_scale": -1}),
        (DeepSpeedFP16Config, {"enabled": True, "min_loss_scale": 0}),
    ):
        with pytest.raises(ValidationError):
            block(**bad)


def test_a_config_of_wherrys_in_the_keys_that_deepspeed_reads():
    kept = {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    offload = {"device": "cpu", "buffer_size": 100000}
    given = {
        **kept,
        "$schema": "wherry.json",
        "zero_optimization": {"stage": 2, "grad_hooks": True, "offload_optimizer": offload},
        "aio": {"thread_count": 2},
        "activation_checkpointing": {"policy": "recompute", "cpu_checkpointing": True},
        "wherry": {"update_policy": "before_use"},
    }
    tree, notes = for_deepspeed(load_own(given))
    assert tree == {
        **kept,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "aio": {"intra_op_parallelism": 2},
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    zero = ["zero_optimization.grad_hooks", "zero_optimization.offload_optimizer.buffer_size"]
    left = [*zero, "activation_checkpointing.policy", "wherry", "optimizer.params.lr"]
    assert [note.partition(":")[0] for note in notes] == left


def test_a_config_in_its_keys_by_the_command(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"train_batch_size": 8, "wherry": {"master": "whole"}}))
    assert main(["config", "deepspeed", str(file), "--set", "zero_optimization.stage=1"]) == 0
    out = capsys.readouterr()
    written = {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}
    assert json.loads(out.out) == written
    assert "gradient_clipping: written out" in out.err and "wherry: left out" in out.err
