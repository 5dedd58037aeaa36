"""Every key that existing configs have: accepted with its type and default, renamed, or refused with the reason."""

import json
import sys
from pathlib import Path

import pytest

from wherry.config import ConfigError, load
from wherry.config.reference import catalog
from wherry.config.without_effect import idle_keys

ZERO = "zero_optimization"
# Defaults as docs/config.md publishes them; those of DeepSpeed's keys are DeepSpeed's own.
DEFAULTS = json.loads((Path(__file__).parent / "defaults.json").read_text())
# Parameters of schedules that have no default.
REQUIRED = {
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
    "WarmupDecayLR": {"total_num_steps": 5000},
    "WarmupCosineLR": {"total_num_steps": 5000},
}
ACTING = {info.path: info for info in catalog() if info.effect == "acts" and not info.is_block and not info.of}
# Keys whose values are tested apart.
APART = {"$schema", "optimizer.type", "optimizer.params", "scheduler.type", "scheduler.params", "wherry.profile.steps"}

# Other spellings of a value, and the value.
SPELLINGS = [
    ("train_micro_batch_size_per_gpu", 8.0, 8),
    ("gradient_clipping", 1, 1.0),
    ("data_types.param_dtype", "bfloat16", "bf16"),
    ("data_types.buffer_dtype", "torch.float32", "fp32"),
    ("torch_autocast.dtype", "float16", "fp16"),
    ("log_level", "INFO", "info"),
    (f"{ZERO}.reduce_bucket_size", 5e7, 50_000_000),
    (f"{ZERO}.stage3_prefetch_bucket_size", 943718.4, 943718),
    (f"{ZERO}.stage3_model_persistence_threshold", float("inf"), sys.maxsize),
    (f"{ZERO}.offload_optimizer.device", "CPU", "cpu"),
    (f"{ZERO}.offload_param.nvme_path", ["/a", "/b"], ["/a", "/b"]),
    ("activation_checkpointing.policy", "Recompute", "recompute"),
    ("activation_checkpointing.offload_min_bytes", "2MiB", 2 << 20),
    ("activation_checkpointing.memory", "3GB", 3_000_000_000),
    ("checkpoint.tag_validation", "Fail", "FAIL"),
    ("wherry.nonfinite", "RAISE", "raise"),
    ("wherry.timeout_s", 30, 30.0),
    ("wherry.profile.steps", 5, "5"),
    ("wherry.profile.steps", "5-7", "5-7"),
]


def default_of(path):
    value = DEFAULTS["config"]
    for name in path.split("."):
        value = value[name]
    return value


def values_of(schema):
    """Values that a JSON schema takes."""
    kinds = {"boolean": [False, True], "string": ["3GB"], "array": [["a"]], "null": [None]}
    if "anyOf" in schema:
        return [value for option in schema["anyOf"] for value in values_of(option)]
    return schema.get("enum") or kinds.get(schema["type"]) or [min(10**6, schema.get("maximum", 10**6))]


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


def test_defaults_are_those_that_are_published():
    assert load().to_dict() == DEFAULTS["config"]
    for name, params in DEFAULTS["optimizers"].items():
        assert load({"optimizer": {"type": name}}).to_dict()["optimizer"]["params"] == params, name
    for name, params in DEFAULTS["schedules"].items():
        given = REQUIRED.get(name, {})
        assert load({"scheduler": {"type": name, "params": given}}).to_dict()["scheduler"]["params"] == params | given


def test_the_reference_shows_these_defaults():
    for info in catalog():
        if info.effect != "acts" or info.is_block or info.path in APART:
            continue
        *blocks, name = info.path.split(".")
        if info.of:
            of = DEFAULTS["optimizers" if blocks[0] == "optimizer" else "schedules"]
            known = [of[each][name] for each in info.of.split(", ") if name in of[each]]
        else:
            known = [default_of(info.path)]
        for value in known:
            assert info.default == ("unset" if value is None else json.dumps(value)), info.path


def test_a_key_takes_null_auto_and_its_values():
    for path in sorted(ACTING.keys() - APART):
        default = default_of(path)
        assert load(nested(path, None)).to_dict() == DEFAULTS["config"], path
        taken = 0
        for value in values_of(ACTING[path].schema):
            try:
                assert at(load_key(path, value), path) in (value if value is not None else default, 3 * 10**9), path
                taken += 1
            except ConfigError as error:  # the value contradicts other keys, or needs what this machine lacks
                assert not any("expected" in problem.message for problem in error.problems if problem.path == path)
        assert taken, path
        config = load(nested(path, "auto"))
        if path in ("activation_checkpointing.policy", "wherry.sequence_tiles", "wherry.update_on"):
            assert at(config, path) == "auto"  # a choice of their own
        else:
            assert at(config, path) == default
            assert config.auto == (() if default == "auto" else (path,))
            assert default == "auto" or any(path in note for note in config.notes)


def test_a_value_may_be_written_in_other_ways():
    for path, value, becomes in SPELLINGS:
        assert at(load_key(path, value), path) == becomes, path


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


def test_a_key_without_effect_is_checked_and_noted():
    for path, row in idle_keys().items():
        if row.effect != "none":
            continue
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


def test_no_value_ends_in_another_error():
    """Every fourth value at every key: the config loads and can be loaded again, or the mistake is told."""
    blocks = {"optimizer": {"type": "Adam"}, "scheduler": {"type": "OneCycle"}}
    for number, path in enumerate(sorted({info.path for info in catalog()} - {"$schema"})):
        start = path.split(".")[0]
        for value in ODD[number % 4 :: 4]:
            tree = nested(path, value)
            if isinstance(tree[start], dict):
                tree[start] = {**blocks.get(start, {}), **tree[start]}
            try:
                resolved = load(tree).to_dict()
            except ConfigError as error:
                assert error.problems
            else:
                assert load(resolved).to_dict() == resolved, (path, value)


def test_flags_and_stages_in_other_spellings():
    for written, stage in ((True, 1), (False, 0), (2.0, 2)):
        assert load({ZERO: {"stage": written}}).zero_optimization.stage == stage
    assert load({ZERO: True}).zero_optimization.stage == 1
    assert load("{bf16: {enabled: True\n}}").bf16.enabled is True
    assert load({"bf16": {"enabled": 1}}).bf16.enabled is True


def test_never_printing():
    for never in (float("inf"), "inf", None):
        assert load({"steps_per_print": never}).steps_per_print is None


def test_bytes():
    for text, count in (
        ("3GB", 3 * 10**9), ("512MiB", 512 * 2**20), ("1.5 KB", 1500), ("7B", 7), (2e5, 200_000), ("2g", 2 * 10**9),
    ):  # fmt: skip
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


OLDER = [
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
]  # fmt: skip


def test_an_older_spelling_is_read_as_the_newer():
    for old, value, new, becomes in OLDER:
        config = load(nested(old, value))
        assert at(config, new) == becomes
        if becomes is not None:
            assert any("read as" in note for note in config.notes)
        assert at(load(nested(old, "auto")), new) == default_of(new)
    for name in ("cpu_offload_param", "cpu_offload_params"):
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

REFUSED = {path: row for path, row in idle_keys().items() if row.effect == "refused"}
# What asks for nothing, beside null, false and what is empty.
OFF = {"pipeline": {}, "tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 1, "sparse_attention": {}}


def with_optimizer(path, value):
    tree = nested(path, value)
    if "optimizer" in tree:
        row = idle_keys().get(path)
        tree["optimizer"]["type"] = row.of[-1] if row is not None and row.of else "AdamW"
    return tree


def test_every_refused_key_is_among_the_mistakes_that_are_told_word_for_word():
    mistakes = json.loads(Path(__file__).with_name("mistakes.json").read_text())
    told = {line.partition(": ")[0] for each in mistakes for line in each["says"] if ": not part of Wherry: " in line}
    assert set(REFUSED) <= told


def test_a_refused_key_is_no_error_where_it_asks_for_nothing():
    for path, row in REFUSED.items():
        off = OFF.get(path, {row.switch: False, "other": 3} if row.switch else False)
        config = load(with_optimizer(path, off))
        assert sum(note.startswith(f"{path}: not part of Wherry; accepted") for note in config.notes) == 1
        load(with_optimizer(path, "auto"))
