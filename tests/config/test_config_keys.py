"""Every key that existing configs have: accepted with its type and default, renamed, or refused with the reason."""

import json
import sys

import pytest

from wherry.config import ConfigError, load
from wherry.config.reference import catalog
from wherry.config.without_effect import idle_keys

ZERO = "zero_optimization"

# key: (default, another good value, what that value becomes)
KEYS = {
    "train_batch_size": (None, 8, 8),
    "train_micro_batch_size_per_gpu": (None, 8.0, 8),
    "gradient_accumulation_steps": (None, 2, 2),
    "managed_gradient_accumulation": (True, True, True),
    "gradient_clipping": (0.0, 1, 1.0),
    "zero_allow_untested_optimizer": (False, True, True),
    "communication_data_type": (None, "bf16", "bf16"),
    "gradient_allreduce_op": ("mean", "mean", "mean"),
    "data_types.grad_accum_dtype": (None, "fp32", "fp32"),
    "data_types.param_dtype": (None, "bfloat16", "bf16"),
    "data_types.buffer_dtype": (None, "torch.float32", "fp32"),
    "dataloader_drop_last": (False, True, True),
    "steps_per_print": (None, 10, 10),
    "wall_clock_breakdown": (False, True, True),
    "log_level": (None, "INFO", "info"),
    "fp16.enabled": (False, True, True),
    "fp16.auto_cast": (False, True, True),
    "fp16.loss_scale": (0.0, 128, 128.0),
    "fp16.initial_scale_power": (16, 8, 8),
    "fp16.loss_scale_window": (1000, 100, 100),
    "fp16.hysteresis": (2, 1, 1),
    "fp16.consecutive_hysteresis": (False, True, True),
    "fp16.min_loss_scale": (1.0, 0.5, 0.5),
    "fp16.fp16_master_weights_and_grads": (False, True, True),
    "bf16.enabled": (False, True, True),
    "bf16.check_grad_overflow": (True, False, False),
    "bf16.bf16_master_weights_and_grads": (False, True, True),
    "bf16.bf16_optimizer_states": (False, True, True),
    "torch_autocast.enabled": (False, True, True),
    "torch_autocast.dtype": ("bf16", "float16", "fp16"),
    f"{ZERO}.stage": (0, 3, 3),
    f"{ZERO}.reduce_bucket_size": (500_000_000, 5e7, 50_000_000),
    f"{ZERO}.allgather_bucket_size": (500_000_000, 2e8, 200_000_000),
    f"{ZERO}.zero_hpz_partition_size": (1, 8, 8),
    f"{ZERO}.mics_shard_size": (-1, 8, 8),
    f"{ZERO}.offload_param.device": ("none", "none", "none"),
    f"{ZERO}.offload_param.nvme_path": (None, ["/a", "/b"], ["/a", "/b"]),
    f"{ZERO}.offload_param.buffer_count": (5, 6, 6),
    f"{ZERO}.offload_param.max_in_cpu": (1_000_000_000, 1e8, 100_000_000),
    f"{ZERO}.offload_param.pin_memory": (True, False, False),
    f"{ZERO}.offload_optimizer.device": ("none", "CPU", "cpu"),
    f"{ZERO}.offload_optimizer.nvme_path": (None, "/a", "/a"),
    f"{ZERO}.offload_optimizer.buffer_count": (4, 5, 5),
    f"{ZERO}.offload_optimizer.pin_memory": (True, False, False),
    f"{ZERO}.offload_optimizer.ratio": (1.0, 0.3, 0.3),
    f"{ZERO}.offload_optimizer.cpuadam_cores_perc": (0.8, 0.5, 0.5),
    f"{ZERO}.stage3_max_live_parameters": (1_000_000_000, 1e8, 100_000_000),
    f"{ZERO}.stage3_prefetch_bucket_size": (50_000_000, 943718.4, 943718),
    f"{ZERO}.stage3_param_persistence_threshold": (100_000, 1e6, 1_000_000),
    f"{ZERO}.stage3_model_persistence_threshold": (sys.maxsize, float("inf"), sys.maxsize),
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save": (False, True, True),
    "aio.block_size": (1_048_576, 262144, 262144),
    "aio.queue_depth": (16, 32, 32),
    "aio.intra_op_parallelism": (1, 2, 2),
    "aio.use_gds": (False, False, False),
    "aio.checksum": (False, True, True),
    "activation_checkpointing.policy": (None, "Recompute", "recompute"),
    "activation_checkpointing.every": (1, 2, 2),
    "activation_checkpointing.save_operations": ([], ["matmul"], ["matmul"]),
    "activation_checkpointing.nvme_path": (None, "/a", "/a"),
    "activation_checkpointing.offload_min_bytes": (1 << 20, "2MiB", 2 << 20),
    "activation_checkpointing.memory": (None, "3GB", 3_000_000_000),
    "activation_checkpointing.partition_activations": (False, True, True),
    "activation_checkpointing.cpu_checkpointing": (False, True, True),
    "activation_checkpointing.contiguous_memory_optimization": (False, True, True),
    "activation_checkpointing.synchronize_checkpoint_boundary": (False, True, True),
    "activation_checkpointing.profile": (False, True, True),
    "checkpoint.tag_validation": ("WARN", "Fail", "FAIL"),
    "checkpoint.use_node_local_storage": (False, 0, False),
    "comms_logger.enabled": (False, True, True),
    "comms_logger.prof_all": (True, False, False),
    "comms_logger.prof_ops": ([], ["all_reduce"], ["all_reduce"]),
    "flops_profiler.enabled": (False, True, True),
    "flops_profiler.profile_step": (1, 5, 5),
    "flops_profiler.module_depth": (-1, 2, 2),
    "flops_profiler.top_modules": (1, 3, 3),
    "flops_profiler.detailed": (True, False, False),
    "flops_profiler.output_file": (None, "f", "f"),
    "tensorboard.enabled": (False, True, True),
    "tensorboard.output_path": ("", "t", "t"),
    "tensorboard.job_name": ("DeepSpeedJobName", "j", "j"),
    "csv_monitor.enabled": (False, True, True),
    "csv_monitor.output_path": ("", "t", "t"),
    "csv_monitor.job_name": ("DeepSpeedJobName", "j", "j"),
    "wandb.enabled": (False, True, True),
    "wandb.group": (None, "g", "g"),
    "wandb.team": (None, "t", "t"),
    "wandb.project": ("deepspeed", "p", "p"),
    "wherry.unit_classes": ([], ["Block"], ["Block"]),
    "wherry.update_policy": ("auto", "before_use", "before_use"),
    "wherry.nonfinite": ("auto", "RAISE", "raise"),
    "wherry.delayed_update_warmup": (40, 10, 10),
    "wherry.accumulation": ("auto", "layer_major", "layer_major"),
    "wherry.tile_linear": (False, True, True),
    "wherry.master": ("auto", "whole", "whole"),
    "wherry.state_dtype": ("fp32", "int8", "int8"),
    "wherry.timeout_s": (600.0, 30, 30.0),
    "wherry.host_memory": (None, "3GB", 3_000_000_000),
    "wherry.checkpoint.keep_last": (None, 3, 3),
    "wherry.checkpoint.async_save": (False, True, True),
    "wherry.run_dir": (None, "runs/a", "runs/a"),
}


def nested(path, value):
    *blocks, name = path.split(".")
    tree = {name: value}
    for outer in reversed(blocks):
        tree = {outer: tree}
    return tree


def at(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


def load_key(path, value):
    tree = nested(path, value)
    if path.startswith(ZERO) and path.endswith("nvme_path"):  # which asks for a device
        offload = tree[ZERO][path.split(".")[1]]
        offload["device"] = "nvme"
        tree[ZERO]["stage"] = 3
    return load(json.loads(json.dumps(tree)))


@pytest.mark.parametrize("path", KEYS)
def test_a_key_has_its_default_and_takes_its_values(path):
    default, value, becomes = KEYS[path]
    assert at(load(), path) == default
    assert at(load_key(path, value), path) == becomes
    assert at(load(nested(path, None)), path) == default


@pytest.mark.parametrize("path", KEYS)
def test_auto_is_a_value_of_every_key(path):
    config = load(nested(path, "auto"))
    if path == "activation_checkpointing.policy":  # which has it as a choice of its own
        assert at(config, path) == "auto"
        return
    assert at(config, path) == KEYS[path][0]
    is_own_word = KEYS[path][0] == "auto"
    assert config.auto == (() if is_own_word else (path,))
    assert is_own_word or any(path in note for note in config.notes)


def test_the_table_above_is_the_schema():
    listed_apart = {"$schema", "optimizer.type", "optimizer.params", "scheduler.type", "scheduler.params"}
    acting = {info.path for info in catalog() if info.effect == "acts" and not info.is_block and not info.of}
    assert acting - listed_apart == set(KEYS)


def test_the_address_of_the_schema_is_no_setting():
    assert "$schema" not in load({"$schema": "wherry.json"}).to_dict()


GOOD = {
    "flag": (True, "true", 1),
    "integer": (2, 2.0),
    "size": (1e12, 3),
    "bucket": (1e9, 5),
    "number": (2, 0.5),
    "text": ("x",),
    "texts": (["Moe"],),
    "bytes": (7, "3GB"),
    "dtype": ("bfloat16", "torch.float32"),
    "block": ({},),
}


@pytest.mark.parametrize("path", [path for path, row in idle_keys().items() if row.effect == "none"])
def test_a_key_without_effect_is_checked_and_noted(path):
    row = idle_keys()[path]
    plain = load(with_optimizer(path, None)).to_dict()
    # Of this one a value is refused.
    for value in (False,) if path == "checkpoint.writer.decoupled" else GOOD[row.type.split()[0]]:
        config = load(with_optimizer(path, value))
        assert config.to_dict() == plain
        (note,) = [note for note in config.notes if "no effect here" in note]
        assert path.startswith(note.partition(": ")[0]) and note.endswith(f": no effect here: {row.why}")
    assert load(with_optimizer(path, "auto")).auto == (path,)
    for wrong in ({"a": 1}, float("-inf")):
        with pytest.raises(ConfigError) as caught:
            load(with_optimizer(path, wrong))
        assert all(problem.path.startswith(path) for problem in caught.value.problems)


def test_auto_and_null_blocks():
    config = load({ZERO: "auto", "optimizer": None, "scheduler": "auto", "fp16": {"enabled": "auto"}})
    assert config.zero_optimization.stage == 0
    assert config.optimizer is None and config.scheduler is None
    assert set(config.auto) == {ZERO, "scheduler", "fp16.enabled"}


ODD = (0, -1, 1.5, float("inf"), float("nan"), 10**30, "x", [], [1], [None], {}, {"a": 1}, True, object(), b"x")


@pytest.mark.parametrize("start", sorted({path.split(".")[0] for path in KEYS} | {"optimizer", "scheduler"}))
def test_no_value_ends_in_another_error(start):
    """Whatever stands at a key, the config loads and can be loaded again, or the mistake is told."""
    blocks = {"optimizer": {"type": "Adam"}, "scheduler": {"type": "OneCycle"}}
    for path in {info.path for info in catalog() if info.path.split(".")[0] == start}:
        for value in ODD:
            tree = nested(path, value)
            if isinstance(tree[start], dict):
                tree[start] = {**blocks.get(start, {}), **tree[start]}
            try:
                resolved = load(tree).to_dict()
            except ConfigError as error:
                assert error.problems
            else:
                assert load(resolved).to_dict() == resolved


def test_flags_and_stages_in_other_spellings():
    for written, stage in ((True, 1), (False, 0), (2.0, 2)):
        assert load({ZERO: {"stage": written}}).zero_optimization.stage == stage
    assert load({ZERO: True}).zero_optimization.stage == 1
    assert load("{bf16: {enabled: True\n}}").bf16.enabled is True
    assert load({"bf16": {"enabled": 1}}).bf16.enabled is True


def test_never_printing():
    for never in (float("inf"), "inf", None):
        assert load({"steps_per_print": never}).steps_per_print is None


@pytest.mark.parametrize(
    ("text", "count"),
    [("3GB", 3 * 10**9), ("512MiB", 512 * 2**20), ("1.5 KB", 1500), ("7B", 7), (2e5, 200_000), ("2g", 2 * 10**9)],
)
def test_bytes(text, count):
    assert load({"wherry": {"host_memory": text}}).wherry.host_memory == count


def test_the_line_of_keys_without_effect_names_those_that_ask_for_other_than_what_happens():
    assert load({
        ZERO: {"contiguous_gradients": True, "overlap_comm": True, "round_robin_gradients": True, "sub_group_size": 1e9,
               "leaf_module": {"classes": None}, "offload_optimizer": {"device": "cpu", "pipeline_read": True},
               "reduce_scatter": "auto"},
        "timers": {"throughput": {"enabled": True}}, "zero_force_ds_cpu_optimizer": False, "memory_breakdown": False,
        "fp16": {"enabled": False, "fp16_master_weights_and_grads": True}, "checkpoint": {"writer": {"type": "FAST"}},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "fused": None}},
    }).idle == []  # fmt: skip
    assert load({
        ZERO: {"overlap_comm": False, "leaf_module": {"classes": ["Moe"]}, "stage3_max_reuse_distance": 0,
               "offload_optimizer": {"device": "cpu", "nvme_path": "/a"}},
        "timers": {"throughput": {"enabled": False}}, "memory_breakdown": True,
        "torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]},
        "optimizer": {"type": "AdamW", "params": {"fused": True}},
    }).idle == [
        f"{ZERO}.overlap_comm", f"{ZERO}.leaf_module", f"{ZERO}.stage3_max_reuse_distance", "timers",
        "memory_breakdown", "torch_autocast.lower_precision_safe_modules", "optimizer.params.fused",
        f"{ZERO}.offload_optimizer.nvme_path (as the device is cpu)",
    ]  # fmt: skip


def test_a_key_without_effect_says_why():
    config = load({ZERO: {"contiguous_gradients": True, "sub_group_size": 1e9}, "timers": {"throughput": {}}})
    no_effect = [note for note in config.notes if "no effect here:" in note]
    assert [note.split(":")[0] for note in no_effect] == [
        f"{ZERO}.contiguous_gradients", f"{ZERO}.sub_group_size", "timers",
    ]  # fmt: skip
    assert load({ZERO: {"stage": 1}, "train_micro_batch_size_per_gpu": 1}).notes == []


# --- older spellings ---


@pytest.mark.parametrize(
    ("old", "value", "new", "becomes"),
    [
        (f"{ZERO}.cpu_offload", True, f"{ZERO}.offload_optimizer.device", "cpu"),
        (f"{ZERO}.cpu_offload", False, f"{ZERO}.offload_optimizer.device", "none"),
        (f"{ZERO}.cpu_offload_use_pin_memory", False, f"{ZERO}.offload_optimizer.pin_memory", False),
        (f"{ZERO}.stage3_gather_fp16_weights_on_model_save", True,
         f"{ZERO}.stage3_gather_16bit_weights_on_model_save", True),
        (f"{ZERO}.allgather_size", 1e6, f"{ZERO}.allgather_bucket_size", 1_000_000),
        ("aio.thread_count", 4, "aio.intra_op_parallelism", 4),
        ("bf16.check_overflow", False, "bf16.check_grad_overflow", False),
        ("bfloat16.enabled", True, "bf16.enabled", True),
        ("fp32_allreduce", True, "communication_data_type", "fp32"),
        ("fp32_allreduce", False, "communication_data_type", None),
    ],
)  # fmt: skip
def test_an_older_spelling_is_read_as_the_newer(old, value, new, becomes):
    config = load(nested(old, value))
    assert at(config, new) == becomes
    if becomes is not None:
        assert any("read as" in note for note in config.notes)
    assert at(load(nested(old, "auto")), new) == at(load(), new)


@pytest.mark.parametrize("name", ["cpu_offload_param", "cpu_offload_params"])
def test_older_spelling_of_parameters_on_the_host(name):
    zero = load({ZERO: {"stage": 3, name: True, "cpu_offload_use_pin_memory": False}}).zero_optimization
    assert (zero.offload_param.device, zero.offload_param.pin_memory) == ("cpu", False)


def test_a_config_of_2021_loads_as_it_is():
    config = load("""{
      "train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_print": 1,
      "zero_optimization": {
        "stage": 3, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9, "legacy_stage1": false,
        "stage3_prefetch_bucket_size": 5e8, "stage3_param_persistence_threshold": 1e6, "sub_group_size": 1e12,
        "stage3_gather_fp16_weights_on_model_save": true, "elastic_checkpoint": true, "allgather_size": 5e8,
        "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true, "buffer_count": 5,
                          "buffer_size": 1e8, "max_in_cpu": 1e9},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true, "buffer_count": 4,
                              "fast_init": false, "buffer_size": 1e8, "pipeline_read": false, "pipeline_write": false}
      },
      "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": false,
              "overlap_events": true},
      "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 15, "loss_scale_window": 1000,
               "hysteresis": 2, "min_loss_scale": 1},
      "optimizer": {"type": "Adam", "params": {"lr": 1.5e-4, "betas": [0.9, 0.95], "weight_decay": 1e-2}},
      "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3}},
      "gradient_clipping": 1.0, "wall_clock_breakdown": false, "zero_allow_untested_optimizer": false,
      "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true}
    }""")
    assert config.placement().name == "ZeRO-Infinity (disk)"


def test_what_accelerate_and_trl_write():
    config = load(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": 1,
            ZERO: {
                "stage": 2,
                "offload_optimizer": {"device": "none", "nvme_path": None},
                "offload_param": {"device": "none", "nvme_path": None},
                "stage3_gather_16bit_weights_on_model_save": False,
                "reduce_bucket_size": "auto",
            },
            "gradient_clipping": "auto",
            "steps_per_print": float("inf"),
            "bf16": {"enabled": True},
            "fp16": {"enabled": False, "auto_cast": True},
            "zero_allow_untested_optimizer": True,
            "zero_optimization.reduce_bucket_size": 1024 * 1024,
            "zero_optimization.stage3_param_persistence_threshold": 10240,
            "zero_optimization.stage3_prefetch_bucket_size": 943718.4,
        }
    )
    zero = config.zero_optimization
    assert (zero.reduce_bucket_size, zero.stage3_prefetch_bucket_size) == (1024 * 1024, 943718)
    assert not any("nothing is offloaded" in note for note in config.notes)


# --- what is not part of Wherry ---

REFUSED = {
    "amp": ({"enabled": True, "opt_level": "O1"}, {"enabled": False}),
    "sparse_gradients": (True, False),
    "disable_allgather": (True, False),
    "vocabulary_size": (50257, None),
    "graph_harvesting": (True, False),
    "comet": ({"enabled": True}, {"enabled": False}),
    "autotuning": ({"enabled": True, "fast": True}, {"enabled": False, "fast": True}),
    "compile": ({"deepcompile": True}, {"deepcompile": False}),
    "sparse_attention": ({"mode": "fixed"}, {}),
    "compression_training": ({"weight_quantization": {"shared_parameters": {}}}, {}),
    "quantize_training": ({"enabled": True}, {"enabled": False}),
    "weight_quantization": ({"enabled": True}, {"enabled": False}),
    "eigenvalue": ({"enabled": True}, {"enabled": False, "verbose": False}),
    "progressive_layer_drop": ({"enabled": True}, {"enabled": False, "theta": 0.5}),
    "curriculum_learning": ({"enabled": True}, {"enabled": False}),
    "data_efficiency": ({"enabled": True}, {"enabled": False}),
    "elasticity": ({"enabled": True}, {"enabled": False, "version": 0.1}),
    "hybrid_engine": ({"enabled": True}, {"enabled": False}),
    "pipeline": ({"stages": 2}, {}),
    "tensor_parallel": ({"autotp_size": 2}, {"autotp_size": 1}),
    "expert_parallel": ({"enabled": True}, {"enabled": False}),
    "use_data_before_expert_parallelism": (True, False),
    "sequence_parallel_size": (2, 1),
    "data_parallel_size": (2, None),
    "nebula": ({"enabled": True}, {"enabled": False}),
    "datastates": ({"enabled": True}, {"enabled": False}),
    "optimizer.legacy_fusion": (True, False),
    f"{ZERO}.offload_optimizer.super_offload": (True, False),
    f"{ZERO}.zero_quantized_weights": (True, False),
    f"{ZERO}.zero_quantized_nontrainable_weights": (True, False),
    f"{ZERO}.zero_quantized_gradients": (True, False),
    f"{ZERO}.zeropp_loco_param": ({"err_beta": 0.8}, None),
    f"{ZERO}.zenflow": ({"topk_ratio": 0.1}, None),
    f"{ZERO}.save_muon_momentum_buffer_in_memory": (True, False),
}


def test_the_refused_keys_are_those_tested():
    assert {path for path, row in idle_keys().items() if row.effect == "refused"} == set(REFUSED)


def with_optimizer(path, value):
    tree = nested(path, value)
    if "optimizer" in tree:
        tree["optimizer"]["type"] = "AdamW"
    return tree


@pytest.mark.parametrize("path", REFUSED)
def test_a_refused_key_is_an_error_unless_it_asks_for_nothing(path):
    on, off = REFUSED[path]
    with pytest.raises(ConfigError) as caught:
        load(with_optimizer(path, on))
    (problem,) = caught.value.problems
    assert problem.path == path
    assert problem.message.startswith("not part of Wherry: ")
    config = load(with_optimizer(path, off))
    if off is not None:
        assert sum(note.startswith(f"{path}: not part of Wherry; accepted") for note in config.notes) == 1
    load(with_optimizer(path, "auto"))
