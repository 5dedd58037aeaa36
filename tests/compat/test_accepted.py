"""Configs through the alias: what DeepSpeed accepts is accepted, with a line; what it raises is raised."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import Field, ValidationError
from torch import nn

from wherry.compat.deepspeed import config as configs
from wherry.compat.deepspeed import constants
from wherry.compat.deepspeed import engine as engines
from wherry.compat.deepspeed.config import (
    DeepSpeedConfig,
    DeepSpeedConfigError,
    DeepSpeedConfigModel,
    DeepSpeedFP16Config,
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    batch_sizes,
    get_bfloat16_config,
    load,
)
from wherry.compat.deepspeed.engine import initialize
from wherry.errors import ConfigError


@pytest.fixture(autouse=True)
def no_group_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks here are threads, or one; what starts torch.distributed is tested elsewhere."""
    monkeypatch.setattr(engines, "init_distributed", lambda **_: None)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    for name in ("say", "warn"):
        monkeypatch.setattr(configs, name, lambda text, *values: said.append(text % values))
    return said


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "zero_optimization.offload_param"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "zero_optimization.offload_param"),
        ({"zero_optimization": {"stage": 1, "cpu_offload_param": True}}, "zero_optimization.cpu_offload_param"),
        ({"flops_profiler": {"enabled": True, "step": 3}}, "flops_profiler.step"),
        ({"optimizer": {"type": "Adam", "torch_adam": True}}, "optimizer.torch_adam"),
        ({"activation_checkpointing": {"use_reentrant": True}}, "activation_checkpointing.use_reentrant"),
        ({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}, "optimizer.params.adam_w_mode"),
        ({"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 0}}, "fp16.loss_scale_window"),
        ({"fp16": {"enabled": False, "min_loss_scale": 0}}, "fp16.min_loss_scale"),
        ({"zero_stage": 2}, "zero_stage"),
        ({"disable_allgather": True}, "disable_allgather"),
        ({"vocabulary_size": 50_257}, "vocabulary_size"),
    ],
)
def test_what_deepspeed_does_not_read_is_left_aside_with_a_line(
    given: dict[str, Any], path: str, lines: list[str]
) -> None:
    before = json.dumps(given)
    load(given)
    assert [line for line in lines if line.startswith(f"config: {path} is left aside: ")] == lines and len(lines) == 1
    assert json.dumps(given) == before
    with pytest.raises(ConfigError):
        configs.configs.load(given)


@pytest.mark.parametrize(
    "given",
    [
        {"fp16": {"enabeld": True}},
        {"zero_optimization": {"stage": 3, "offload_params": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        {"optimizer": {"type": "Adam", "params": {"learning_rate": 1}}},
        {"progressive_layer_drop": {"enabled": True}},
        {"curriculum_learning": {"enabled": True}},
        {"data_efficiency": {"enabled": True}},
        {"compression_training": {"weight_quantization": {}}},
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
    ],
)
def test_what_changes_results_and_is_not_there_stays_refused(given: dict[str, Any]) -> None:
    for kind in (DeepSpeedConfigError, AssertionError, ValueError):
        with pytest.raises(kind):
            initialize(model=nn.Linear(2, 1), config={"train_batch_size": 1, **given})


def test_a_file_keeps_the_lines_of_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{\n "train_batch_size": 1,\n "other": 1,\n "fp16": {"enabled": 7}\n}')
    with pytest.raises(DeepSpeedConfigError, match=r"config\.json:4: fp16\.enabled"):
        load(file)


def engine_of(**given: Any) -> Any:
    return initialize(model=nn.Linear(2, 1), **given)[0]


SMALL = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}


@pytest.mark.parametrize("flag", ["deepscale_config", "deepspeed_config"])
def test_the_config_of_a_flag_under_either_spelling(flag: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL))
    args = argparse.Namespace(**{flag: str(file)})
    engine = engine_of(args=args)
    assert engine.train_batch_size() == 2 and args.deepspeed_config == str(file)
    engine.destroy()


def test_the_local_rank_of_arguments_is_that_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    args = argparse.Namespace(local_rank=-1)
    engine_of(args=args, config=SMALL).destroy()
    assert args.local_rank == 3


def test_a_config_that_is_given_twice_or_not_at_all(lines: list[str]) -> None:
    both = argparse.Namespace(deepspeed_config="a.json", deepscale_config="b.json")
    for given in ({"args": both}, {"args": argparse.Namespace(deepspeed_config="a.json"), "config": SMALL}, {}):
        with pytest.raises(AssertionError, match=r"give it once|requires a config"):
            engine_of(**given)
    with pytest.raises(AssertionError, match="requires a model"):
        initialize(nn.Linear(2, 1), config=SMALL)
    engine = engine_of(config=SMALL, config_params={"train_batch_size": 5})
    assert engine.train_batch_size() == 2 and "config_params is left aside" in lines[-1]
    engine.destroy()


@pytest.mark.parametrize(
    ("given", "ranks", "found"),
    [
        ((32, 16, 1), 2, (32, 16, 1)),
        ((32, 8, None), 2, (32, 8, 2)),
        ((32, None, 2), 2, (32, 8, 2)),
        ((None, 8, 2), 2, (32, 8, 2)),
        ((32, None, None), 2, (32, 16, 1)),
        ((None, 16, None), 2, (32, 16, 1)),
        ((33, 17, 2), 2, None),
        ((33, None, 2), 2, None),
        ((32, 18, None), 2, None),
        ((1, None, None), 2, None),
        ((None, None, 4), 1, None),
        ((0, None, None), 1, None),
    ],
)
def test_batch_sizes_follow_from_each_other_or_contradict(given: Any, ranks: int, found: Any) -> None:
    if found is not None:
        assert batch_sizes(*given, ranks) == found
        return
    with pytest.raises(AssertionError):
        batch_sizes(*given, ranks)
    if ranks == 1:
        keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        sizes = {key: size for key, size in zip(keys, given, strict=True) if size is not None}
        for build in (DeepSpeedConfig, lambda config: engine_of(config=config)):
            with pytest.raises(AssertionError):
                build(sizes)


def test_what_scripts_read_of_a_config() -> None:
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "gradient_allreduce_op": "SUM",
        "bfloat16": {"enabled": True},
        "zero_optimization": {"stage": 2, "cpu_offload": True},
        "communication_data_type": "fp32",
        "data_types": {"buffer_dtype": "bf16"},
        "log_level": "ERROR",
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}},
    }
    read = DeepSpeedConfig(given)
    assert (read.train_batch_size, read.gradient_accumulation_steps, read.world_size) == (2, 1, 1)
    assert (read.optimizer_name, read.optimizer_params, read.scheduler_name) == ("adamw", {"lr": 0.1}, "WarmupLR")
    assert read.gradient_allreduce_op == "sum" and read.managed_gradient_accumulation
    assert read.bfloat16_config.enabled and read.bfloat16_enabled and not read.float16_config.enabled
    assert read.zero_config.offload_optimizer is not None and read.zero_config.offload_optimizer.device == "cpu"
    assert read.zero_config.offload_param is None and read.zero_enabled
    assert read.communication_data_type is torch.float32 and (read.param_dtype, read.buffer_dtype) == (None, "bf16")
    assert read.log_level == "ERROR" and read.eigenvalue_enabled is False and read._param_dict is given


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gradient_allreduce_op": "max"}, "Invalid gradient_allreduce_op"),
        ({"zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"}, "not supported with ZeRO stage 3"),
        ({"zero_optimization": {"stage": 2, "zenflow": {}}, "gradient_allreduce_op": "sum"}, "with ZenFlow"),
        ({"compile": {"deepcompile": True}, "gradient_allreduce_op": "sum"}, "with DeepCompile"),
    ],
)
def test_sums_that_deepspeed_refuses(given: dict[str, Any], said: str) -> None:
    for build in (DeepSpeedConfig, lambda config: engine_of(config=config)):
        with pytest.raises(ValueError, match=said):
            build({"train_batch_size": 1, **given})


def test_the_block_of_zero_under_every_spelling() -> None:
    zero = DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=5, max_reuse_distance=7)
    assert (zero.prefetch_bucket_size, zero.stage3_prefetch_bucket_size, zero.stage3_max_reuse_distance) == (5, 5, 7)
    assert zero.overlap_comm is True and DeepSpeedZeroConfig(stage=2).overlap_comm is False
    assert DeepSpeedZeroConfig(stage=3, overlap_comm=False).overlap_comm is False
    assert zero.offload_param is None and zero.pipeline_loading_checkpoint is False
    assert DeepSpeedZeroConfig(offload_param={}).offload_param == DeepSpeedZeroOffloadParamConfig()
    assert isinstance(DeepSpeedZeroConfig(cpu_offload=True).offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)
    old = DeepSpeedZeroConfig(stage3_gather_fp16_weights_on_model_save=True)
    assert old.gather_16bit_weights_on_model_save is True
    assert DeepSpeedZeroOffloadOptimizerConfig(pipeline_write=True).pipeline is True


def test_the_blocks_of_precision() -> None:
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    assert DeepSpeedFP16Config(loss_scale="3").loss_scale == 3
    assert DeepSpeedFP16Config(enabled=True, loss_scale=8, min_loss_scale=0).min_loss_scale == 0
    for bad in ({"loss_scale": True}, {"loss_scale": -1}, {"loss_scale": []}, {"enabled": True, "min_loss_scale": 0}):
        with pytest.raises(ValidationError):
            DeepSpeedFP16Config(**bad)


def test_blocks_that_scripts_declare() -> None:
    class Block(DeepSpeedConfigModel):
        old: str | None = Field(
            None, json_schema_extra={"deprecated": True, "new_param": "new", "new_param_fn": lambda value: [value]}
        )
        new: list[str] | None = None
        size: int = Field(0, alias="length")

    assert Block(old="a").new == ["a"] and Block(size=2).size == Block(length=2).size == 2
    assert Block(size="auto").size == 0
    with pytest.raises(AssertionError, match="older spelling of new"):
        Block(old="a", new=["b"])
    with pytest.raises(ValidationError):
        Block(other=1)


class Mine(torch.optim.Optimizer):
    """Plain descent, as a script has its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad)


def test_an_optimizer_of_the_scripts_own_needs_a_word() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 2}, "gradient_clipping": 0}
    with pytest.raises(ValueError, match="zero_allow_untested_optimizer"):
        initialize(model=model, optimizer=Mine(model.parameters()), config=config)
    config["zero_allow_untested_optimizer"] = True
    engine, *_ = initialize(model=model, optimizer=Mine(model.parameters()), config=config)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert model.weight.tolist() == [[pytest.approx(-0.1)] * 2]
    engine.destroy()


def test_variables_that_scripts_import() -> None:
    assert (constants.GRADIENT_CLIPPING, constants.TRAIN_BATCH_SIZE) == ("gradient_clipping", "train_batch_size")
    assert (configs.ADAM_OPTIMIZER, configs.ADAMW_OPTIMIZER) == ("adam", "adamw")
    assert configs.get_log_level({}) is None
