"""Configs through the alias: what DeepSpeed accepts is accepted, with a line; what it raises is raised.

A config of Wherry's can be written in DeepSpeed's keys.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from tests.compat.harness import ADAM
from torch import nn

from wherry.cli import main
from wherry.compat.deepspeed.config import (
    DeepSpeedConfig,
    DeepSpeedConfigError,
    add_config_arguments,
    load,
)
from wherry.compat.deepspeed.engine import initialize
from wherry.config import load as load_own
from wherry.errors import ConfigError

TRAIN, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
SMALL = {TRAIN: 2, "optimizer": ADAM}


def engine_of(**given: Any) -> Any:
    return initialize(model=nn.Linear(2, 1), **given)[0]


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("steps_per_prnit", {"steps_per_prnit": 10}),
        ("activation_checkpointing.use_reentrant", {"activation_checkpointing": {"use_reentrant": True}}),
        ("optimizer.fusion", {"optimizer": {**ADAM, "fusion": True}}),
        ("zero_optimization.offload_param", {"zero_optimization": {"stage": 2, "offload_param": {"device": "nvme"}}}),
        ("optimizer.params.adam_w_mode", {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}),
    ],
)
def test_what_deepspeed_does_not_read_is_left_aside_with_a_line(
    path: str, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    before = json.dumps(given)
    with caplog.at_level("INFO", "wherry"):
        load(given)
    assert f"{path} is left aside: " in caplog.text and json.dumps(given) == before
    with pytest.raises(ConfigError):
        load_own(given)


def test_other_spellings_of_keys_of_stage_3() -> None:
    zero = {"stage": 3, "max_live_parameters": 0, "gather_16bit_weights_on_model_save": True}
    read = load({"zero_optimization": {**zero, "leaf_module": {"names": "experts"}}}).zero_optimization
    assert (read.stage3_max_live_parameters, read.stage3_gather_16bit_weights_on_model_save) == (0, True)


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
        {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}},
    ],
)
def test_what_changes_results_and_is_not_there_stays_refused(given: dict[str, Any]) -> None:
    assert issubclass(DeepSpeedConfigError, AssertionError) and issubclass(DeepSpeedConfigError, ValueError)
    with pytest.raises(DeepSpeedConfigError):
        engine_of(config={TRAIN: 1, **given})


def test_the_config_is_given_once_by_a_flag_or_an_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL))
    args = add_config_arguments(argparse.ArgumentParser()).parse_args(["--deepspeed", "--deepspeed_config", str(file)])
    assert args.deepspeed and not args.deepscale
    args.local_rank = -1
    engine = engine_of(args=args)
    assert engine.train_batch_size() == 2 and args.local_rank == 3
    engine.destroy()
    caplog.set_level("INFO", "wherry")
    for given in ({"args": args, "config": SMALL}, {}):
        with pytest.raises(AssertionError, match=r"give it once|requires a config"):
            engine_of(**given)
    with pytest.raises(AssertionError, match="requires a model"):
        initialize(nn.Linear(2, 1), config=SMALL)
    engine = engine_of(config=SMALL, config_params={TRAIN: 5})
    assert engine.train_batch_size() == 2 and "config_params is left aside" in caplog.text
    engine.destroy()


def test_what_scripts_read_of_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    file = tmp_path / "config.json"
    given = {TRAIN: 32, MICRO: 8, "fp16": {"enabled": True}, "csv_monitor": {"enabled": True}, "sparse_attention": {}}
    file.write_text(json.dumps(given))
    read = DeepSpeedConfig(str(file))
    sizes = (read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps)
    assert sizes == (32, 8, 2) and read.fp16_enabled
    monitors = read.monitor_config
    assert (monitors.csv_monitor.enabled, monitors.csv_monitor.job_name) == (True, "DeepSpeedJobName")
    assert (monitors.wandb.enabled, monitors.wandb.project) == (False, "deepspeed")
    assert not hasattr(read, "sparse_attention")
    for wrong in ({TRAIN: 33, MICRO: 17}, {TRAIN: 32, MICRO: 18}, {TRAIN: 1}, {TRAIN: 0}, {MICRO: "auto"}, {}):
        with pytest.raises(DeepSpeedConfigError):
            DeepSpeedConfig(wrong)


def test_a_config_of_wherrys_in_the_keys_that_deepspeed_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    kept = {TRAIN: 8, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    given = {
        **kept,
        "$schema": "wherry.json",
        "zero_optimization": {"grad_hooks": True, "offload_optimizer": {"device": "cpu", "buffer_size": 100000}},
        "aio": {"thread_count": 2},
        "activation_checkpointing": {"policy": "recompute", "cpu_checkpointing": True},
        "wherry": {"update_policy": "before_use"},
    }
    file.write_text(json.dumps(given))
    assert main(["config", "deepspeed", str(file), "--set", "zero_optimization.stage=2"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        **kept,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "aio": {"intra_op_parallelism": 2},
        "activation_checkpointing": {"cpu_checkpointing": True},
        "gradient_clipping": 0.0,
    }
    zero = ["zero_optimization.grad_hooks", "zero_optimization.offload_optimizer.buffer_size"]
    notes = [*zero, "activation_checkpointing.policy", "wherry", "gradient_clipping", "optimizer.params.lr"]
    assert [line.split(": ")[1] for line in printed.err.splitlines()] == notes
    assert "wherry: left out" in printed.err and "gradient_clipping: written out" in printed.err
