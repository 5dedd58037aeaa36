"""Keys of a config: those that act, with their defaults, their values and what follows from them, and all others."""

import inspect
import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wherry.optim
from wherry.config import BatchSizes, ConfigError, load
from wherry.config.optimizer import OPTIMIZERS, REFUSED, TORCH_ELEMENTWISE
from wherry.config.reference import catalog
from wherry.config.without_effect import idle_keys
from wherry.placement import Placement, Tier
from wherry.update import schedules

ZERO = "zero_optimization"
OFFLOAD = f"{ZERO}.offload_optimizer"
NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Defaults as docs/config.md publishes them; those of DeepSpeed's keys are DeepSpeed's own.
DEFAULTS = json.loads((Path(__file__).parent / "defaults.json").read_text())
# Parameters of schedules that have no default.
REQUIRED = {
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
    "WarmupDecayLR": {"total_num_steps": 5000},
    "WarmupCosineLR": {"total_num_steps": 5000},
}
ACTING = {info.path: info for info in catalog() if info.effect == "acts" and not info.is_block and not info.of}
# Keys whose values need other keys, or are tested apart.
APART = {"$schema", "optimizer.type", "optimizer.params", "scheduler.type", "scheduler.params", "wherry.profile.steps"}
APART |= {f"{ZERO}.offload_optimizer.nvme_path", f"{ZERO}.offload_param.nvme_path"}

# Other spellings of a value, and the value.
SPELLINGS = [
    ("steps_per_print", float("inf"), None),
    ("steps_per_print", "inf", None),
    ("data_types.param_dtype", "bfloat16", "bf16"),
    ("data_types.buffer_dtype", "torch.float32", "fp32"),
    ("checkpoint.tag_validation", "Fail", "FAIL"),
    ("bf16.enabled", 1, True),
    ("bf16.enabled", "True", True),
    ("log_level", "INFO", "info"),
    (f"{ZERO}.stage", True, 1),
    (f"{ZERO}.stage", 2.0, 2),
    (f"{ZERO}.reduce_bucket_size", 5e7, 50_000_000),
    (f"{ZERO}.stage3_prefetch_bucket_size", 943718.4, 943718),
    (f"{ZERO}.stage3_model_persistence_threshold", float("inf"), sys.maxsize),
    (f"{ZERO}.offload_optimizer.device", "CPU", "cpu"),
    ("activation_checkpointing.offload_min_bytes", "2MiB", 2 << 20),
    ("wherry.profile.steps", 5, "5"),
    ("wherry.host_memory", "1.5 KB", 1500),
    ("wherry.host_memory", 2e5, 200_000),
    ("wherry.host_memory", "2g", 2 * 10**9),
]


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
        config = config[name]
    return config


def test_defaults_are_those_that_are_published():
    assert load().to_dict() == DEFAULTS["config"]
    for name, params in DEFAULTS["optimizers"].items():
        assert load({"optimizer": {"type": name}}).to_dict()["optimizer"]["params"] == params, name
    for name, params in DEFAULTS["schedules"].items():
        given = REQUIRED.get(name, {})
        assert load({"scheduler": {"type": name, "params": given}}).to_dict()["scheduler"]["params"] == params | given
        signature = inspect.signature(getattr(schedules, name)).parameters.values()
        assert {p.name: p.default for p in signature if p.default is not p.empty} == params


def test_a_key_takes_null_auto_and_its_values():
    for path in sorted(ACTING.keys() - APART):
        default = at(DEFAULTS["config"], path)
        assert load(nested(path, None)).to_dict() == DEFAULTS["config"], path
        taken = 0
        for value in values_of(ACTING[path].schema):
            try:
                resolved = load(nested(path, value)).to_dict()
                assert load(resolved).to_dict() == resolved
                assert at(resolved, path) in (value if value is not None else default, 3 * 10**9), path
                taken += 1
            except ConfigError as error:  # the value contradicts other keys, or needs what this machine lacks
                assert not any("expected" in problem.message for problem in error.problems if problem.path == path)
        assert taken, path
        config = load(nested(path, "auto"))
        if path in ("activation_checkpointing.policy", "wherry.sequence_tiles", "wherry.update_on"):
            assert at(config.to_dict(), path) == "auto"  # a choice of their own
        else:
            assert at(config.to_dict(), path) == default
            assert config.auto == (() if default == "auto" else (path,))
            assert default == "auto" or any(path in note for note in config.notes)


def test_a_value_or_a_block_may_be_written_in_other_ways():
    for path, value, becomes in SPELLINGS:
        assert at(load(nested(path, value)).to_dict(), path) == becomes, path
    blocks = load({ZERO: "auto", "optimizer": None, "scheduler": "auto", "fp16": {"enabled": "auto"}})
    assert set(blocks.auto) == {ZERO, "scheduler", "fp16.enabled"}
    assert blocks.optimizer is None and blocks.scheduler is None
    assert load({ZERO: True}).zero_optimization.stage == 1


# --- keys without effect, and older ones ---


def with_optimizer(path, value):
    tree = nested(path, value)
    if "optimizer" in tree:
        row = idle_keys().get(path)
        tree["optimizer"]["type"] = row.of[-1] if row is not None and row.of else "AdamW"
    return tree


def test_a_key_without_effect_is_checked_and_noted():
    schemas = {info.path: info.schema for info in catalog()}
    for path, row in idle_keys().items():
        if row.effect != "none":
            continue
        plain = load(with_optimizer(path, None)).to_dict()
        holds_keys = row.is_block or row.type == "object"
        for value in [{}] if holds_keys else [value for value in values_of(schemas[path]) if value is not None]:
            config = load(with_optimizer(path, value))
            assert config.to_dict() == plain
            (note,) = [note for note in config.notes if "no effect here" in note]
            assert path.startswith(note.partition(": ")[0]) and note.endswith(f": no effect here: {row.why}")
        assert load(with_optimizer(path, "auto")).auto == (path,)
        for wrong in (True if row.type == "object" else {"a": 1}, float("-inf")):
            with pytest.raises(ConfigError) as caught:
                load(with_optimizer(path, wrong))
            assert all(problem.path.startswith(path) for problem in caught.value.problems)


def test_the_line_of_keys_without_effect_names_those_that_ask_for_other_than_what_happens():
    assert load({
        ZERO: {"contiguous_gradients": True, "reduce_scatter": "auto", "overlap_comm": False,
               "leaf_module": {"classes": ["Moe"]}, "stage3_max_reuse_distance": 0,
               "offload_optimizer": {"device": "cpu", "nvme_path": "/a", "pipeline_read": True}},
        "timers": {"throughput": {"enabled": False}}, "memory_breakdown": True,
        "optimizer": {"type": "AdamW", "params": {"fused": True, "torch_adam": True}},
    }).idle == [
        f"{ZERO}.overlap_comm", f"{ZERO}.leaf_module", f"{ZERO}.stage3_max_reuse_distance", "timers",
        "memory_breakdown", "optimizer.params.fused", f"{ZERO}.offload_optimizer.nvme_path (as the device is cpu)",
    ]  # fmt: skip


def test_hints_about_speed_are_left_aside_by_name():
    hints = {
        ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}},
        "compile": {"deepcompile": True, "passes": ["z3"]}, "hybrid_engine": {"enabled": True, "max_out_tokens": 512},
        "autotuning": {"enabled": False, "fast": True}, "graph_harvesting": True, "sparse_gradients": True,
        "optimizer": {"type": "AdamW", "legacy_fusion": True}, "aio": {"use_gds": True}, "vocabulary_size": 50257,
        "checkpoint": {"writer": {"decoupled": True}}, "disable_allgather": True,
        "use_data_before_expert_parallelism": True,
    }  # fmt: skip
    assert sorted(load(hints).idle) == sorted([
        *(f"{ZERO}.offload_optimizer.super_offload", "aio.use_gds", "checkpoint.writer"),
        *(name for name in hints if name not in (ZERO, "optimizer", "aio", "checkpoint", "autotuning")),
        "optimizer.legacy_fusion",
    ])  # fmt: skip


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
        assert at(config.to_dict(), new) == becomes
        if becomes is not None:
            assert any("read as" in note for note in config.notes)
        assert at(load(nested(old, "auto")).to_dict(), new) == at(DEFAULTS["config"], new)
    for name in ("cpu_offload_param", "cpu_offload_params"):
        zero = load({ZERO: {"stage": 3, name: True, "cpu_offload_use_pin_memory": False}}).zero_optimization
        assert (zero.offload_param.device, zero.offload_param.pin_memory) == ("cpu", False)


# --- what is not part of Wherry ---

NOT_OURS = {path: row for path, row in idle_keys().items() if row.effect == "refused"}
# What asks for nothing, beside null, false and what is empty.
OFF = {"pipeline": {}, "tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 1, "sparse_attention": {}}


def test_a_refused_key_has_a_message_of_its_own_and_is_no_error_where_it_asks_for_nothing():
    mistakes = json.loads(Path(__file__).with_name("mistakes.json").read_text())
    told = {line.partition(": ")[0] for each in mistakes for line in each["says"] if ": not part of Wherry: " in line}
    assert set(NOT_OURS) <= told
    for path, row in NOT_OURS.items():
        off = OFF.get(path, {row.switch: False, "other": 3} if row.switch else False)
        config = load(with_optimizer(path, off))
        assert sum(note.startswith(f"{path}: not part of Wherry; accepted") for note in config.notes) == 1
        load(with_optimizer(path, "auto"))


# --- batch sizes ---

sizes = st.integers(1, 64)


@given(sizes, sizes, st.integers(1, 16))
def test_batch_sizes_give_each_other(micro, accumulation, world):
    whole = dict(zip(NAMES, (micro * accumulation * world, micro, accumulation), strict=True))
    for left_out in (None, *whole):
        config = load({name: size for name, size in whole.items() if name != left_out})
        assert config.batch(world) == BatchSizes(micro * accumulation * world, micro, accumulation)
        assert config.notes == []
    # With one of them or none, accumulation is 1, or else the micro-batch.
    assert load({NAMES[0]: 8 * world}).batch(world) == (8 * world, 8, 1)
    assert load({NAMES[1]: micro}).batch(world) == (micro * world, micro, 1)
    assert load({NAMES[2]: accumulation}).batch(world) == (accumulation * world, 1, accumulation)
    assert load({}).batch(world) == (world, 1, 1)


CONTRADICTING = [
    ((12, 2, 3), 4, ["2 x 3 x 4 = 24", "set train_batch_size to 24", "4 data-parallel ranks)"]),
    ((7, None, None), 2, ["not divisible by 2", "6 or 8", "unset", "ranks, as WORLD_SIZE=2 of the launcher says)"]),
    ((4, 4, None), 2, ["not divisible by 8", "to 8", "micro_batch_size_per_gpu 4"]),
    ((2, None, None), 3, ["not divisible by 3", "set train_batch_size to 3,"]),
]


def test_contradicting_batch_sizes_show_the_numbers():
    for given_sizes, world, words in CONTRADICTING:
        with pytest.raises(ConfigError) as caught:
            config = load(dict(zip(NAMES, given_sizes, strict=True)))
            config.batch(world, "as WORLD_SIZE=2 of the launcher says" if world == 2 else "")
        assert [word for word in words if word not in str(caught.value)] == []


# --- contradictions; those that are errors are in mistakes.json ---

IDLE = [
    ({OFFLOAD + ".device": "cpu", OFFLOAD + ".nvme_path": "/a"}, f"{OFFLOAD}.nvme_path", "device is cpu"),
    ({OFFLOAD + ".ratio": 1}, OFFLOAD, "nothing is offloaded"),
    ({f"{ZERO}.mics_shard_size": 2}, f"{ZERO}.mics_shard_size", "at stage 0 nothing is partitioned"),
    ({"activation_checkpointing.memory": "3GB"}, "activation_checkpointing.memory", "no effect, as policy is none"),
    ({"wherry.update_policy": "delayed"}, "wherry.update_policy", "result differs"),
    ({"wherry.nonfinite": "raise", "fp16.enabled": True}, "wherry.nonfinite", "dynamic loss scale"),
    ({"wherry.delayed_update_warmup": 3}, "wherry.delayed_update_warmup", "no effect"),
    ({"wherry.update_on": 0.5}, "wherry.update_on", "no effect, as the optimizer's state rests on the device"),
    ({"scheduler.type": "WarmupDecayLR", "scheduler.params.total_num_steps": 5}, "scheduler.params.warmup_num_steps",
     "does not end"),
    ({"optimizer.type": "Adam", "optimizer.params.weight_decay": 0.1}, "optimizer.type", "adam_w_mode"),
]  # fmt: skip


def test_an_idle_key_is_noted():
    for overrides, path, words in IDLE:
        (note,) = load({}, overrides=overrides).notes
        assert note.startswith(f"{path}: ") and words in note
    # A folder and buffers may be given to a planner that chooses the device.
    config = load({ZERO: {"offload_optimizer": {"device": "auto", "nvme_path": "/a", "buffer_count": 2}}})
    assert config.notes == [f"auto, so chosen when training begins: {OFFLOAD}.device"]
    assert load({ZERO: {"offload_optimizer": {"device": "none", "nvme_path": None}}}).notes == []


# --- what follows ---


def test_the_placement_follows_from_stage_and_devices():
    for stage in range(4):
        for device, tier in (("none", Tier.DEVICE), ("cpu", Tier.HOST), ("nvme", Tier.DISK)):
            offload = {"device": device, "nvme_path": "/a"}
            tree = {"stage": stage, "offload_optimizer": offload}
            parameters = Tier.DEVICE
            if stage == 3:
                tree["offload_param"], parameters = offload, tier
            assert load({ZERO: tree}).placement() == Placement.of_stage(stage, optimizer=tier, parameters=parameters)


def test_dtypes():
    plain = load()
    assert plain.working_dtype() is plain.grad_accum_dtype() is plain.communication_dtype() is None
    assert plain.state_dtype() == "fp32"
    assert load({"fp16": {"enabled": True}}).working_dtype() is torch.float16
    bf16 = {"enabled": True, "bf16_optimizer_states": True}
    assert load({"bf16": bf16}).working_dtype() is torch.bfloat16 and load({"bf16": bf16}).state_dtype() == "bf16"
    assert load({"bf16": bf16, "wherry": {"state_dtype": "int8"}}).state_dtype() == "int8"
    types = {"param_dtype": "fp32", "grad_accum_dtype": "float32"}
    config = load({"data_types": types, "communication_data_type": "bf16"})
    assert config.working_dtype() is config.grad_accum_dtype() is torch.float32
    assert config.communication_dtype() is torch.bfloat16


# --- optimizers and schedules ---


def test_a_schedule_of_type_auto_is_the_one_that_has_the_parameters():
    for params, name in (
        ({"warmup_num_steps": "auto", "total_num_steps": "auto"}, None),
        ({"warmup_num_steps": 5}, "WarmupLR"),
        ({"warmup_num_steps": 5, "total_num_steps": "auto"}, "WarmupDecayLR"),
        ({"total_num_steps": 50, "cos_min_ratio": 0.1}, "WarmupCosineLR"),
        ({"cycle_min_lr": 0.1, "cycle_max_lr": 1}, "OneCycle"),
        ({"lr_range_test_min_lr": 0.1}, "LRRangeTest"),
    ):
        config = load({"scheduler": {"type": "auto", "params": params}})
        assert (config.scheduler and config.scheduler.type) == name
        assert "scheduler.type" in config.auto
        assert sum(note.startswith("scheduler.type: auto") for note in config.notes) == 1


RESOLVED = [
    ("adam", {}, "AdamW", {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
    ("Adam", {"adam_w_mode": False, "lr": 2}, "Adam", {"lr": 2.0, "weight_decay": 0.0}),
    ("Adam", {"amsgrad": True}, "AdamW", {"lr": 1e-3, "amsgrad": True}),
    ("ADAMW", {"lr": "auto", "weight_decay": None}, "AdamW", {"lr": 1e-3, "weight_decay": 0.0}),
    ("rmsprop", {"lr": 0.1, "alpha": "auto"}, "RMSprop", {"lr": 0.1}),
    ("Adafactor", {"eps": [1e-30, 0], "d": 2}, "Adafactor", {"eps": (1e-30, 0.0), "d": 2.0}),
    ("muon", {"lr": 0.1, "adam_lr": 0.2, "eps": 1e-6, "adjust_lr_fn": "Match_RMS_AdamW"}, "Muon",
     {"lr": 0.1, "adamw_lr": 0.2, "eps": 1e-7, "adamw_eps": 1e-6, "adjust_lr_fn": "match_rms_adamw"}),
    ("Muon", {"lr": 0.1, "muon_lr": 0.3}, "Muon", {"lr": 0.3, "adamw_lr": 0.1}),
    ("auto", {"lr": 0.5, "betas": "auto"}, "AdamW", {"lr": 0.5, "betas": (0.9, 0.999)}),
    *((name, {}, name, {}) for name in OPTIMIZERS if name != "Adam"),
]  # fmt: skip


def test_an_optimizer_is_resolved():
    for written, params, name, expected in RESOLVED:
        config = load({"optimizer": {"type": written, "params": params}})
        built_name, built = config.optimizer.build_args()
        assert built_name == name == config.optimizer.type
        assert expected.items() <= built.items()
        kind = getattr(wherry.optim, name, None) or getattr(torch.optim, name, None)
        if kind is not None:
            kind([torch.zeros(2)], **built)
        assert load(config.to_dict()).optimizer.build_args() == (name, built)
        assert (written == "auto") == ("optimizer.type: auto, so AdamW" in config.notes)


def test_an_optimizer_that_cannot_be_sharded_is_refused_with_the_reason():
    for name in REFUSED:
        with pytest.raises(ConfigError, match=f"^optimizer.type: {name} is not part of Wherry: "):
            load({"optimizer": {"type": name.upper()}})


def test_every_optimizer_of_torch_is_known_by_name(monkeypatch):
    kinds = (kind for kind in vars(torch.optim).values() if isinstance(kind, type))
    names = {kind.__name__ for kind in kinds if issubclass(kind, torch.optim.Optimizer)} - {"Optimizer"}
    assert set(TORCH_ELEMENTWISE) <= names <= {*OPTIMIZERS, *TORCH_ELEMENTWISE, *REFUSED}
    monkeypatch.setattr(torch.optim, "Newest", type("Newest", (torch.optim.SGD,), {}), raising=False)
    assert load({"optimizer": {"type": "Newest", "params": {"lr": 1}}}).optimizer.build_args() == ("Newest", {"lr": 1})
