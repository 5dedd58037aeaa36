"""What the keys of a config must be to each other, the batch sizes, optimizers, schedules, and what follows."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wherry.optim
from wherry.config import BatchSizes, ConfigError, load
from wherry.config.optimizer import OPTIMIZERS, REFUSED, TORCH_ELEMENTWISE
from wherry.placement import Placement, Tier

ZERO = "zero_optimization"


def the_problem(tree):
    with pytest.raises(ConfigError) as caught:
        load(tree)
    (problem,) = caught.value.problems
    return problem


# --- batch sizes ---

sizes = st.integers(1, 64)


@given(sizes, sizes, st.integers(1, 16))
def test_any_two_batch_sizes_give_the_third(micro, accumulation, world):
    whole = {
        "train_batch_size": micro * accumulation * world,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    for left_out in (None, *whole):
        config = load({name: size for name, size in whole.items() if name != left_out})
        assert config.batch(world) == BatchSizes(micro * accumulation * world, micro, accumulation)
        assert config.notes == []


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({}, (4, 1, 1)),
        ({"train_batch_size": 32}, (32, 8, 1)),
        ({"train_micro_batch_size_per_gpu": 3}, (12, 3, 1)),
        ({"gradient_accumulation_steps": 3}, (12, 1, 3)),
    ],
)
def test_one_batch_size_or_none(tree, expected):
    config = load(tree)
    assert config.batch(4) == expected
    assert config.batch(4) == expected


def test_the_world_size_is_only_asked_for_when_it_is_known():
    config = load({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2})
    assert config.batch(1).accumulation == 4
    assert config.batch(4).accumulation == 1
    with pytest.raises(ConfigError, match="8 data-parallel ranks"):
        config.batch(8)


CONTRADICTING = [
    ((12, 2, 3), 4, ["2 x 3 x 4 = 24", "set train_batch_size to 24", "4 data-parallel ranks"]),
    ((7, None, None), 2, ["not divisible by 2", "6 or 8", "unset", "2 data-parallel ranks"]),
    ((4, 4, None), 2, ["not divisible by 8", "to 8", "micro_batch_size_per_gpu 4"]),
    ((2, None, None), 3, ["not divisible by 3", "set train_batch_size to 3,"]),
]


def test_contradicting_batch_sizes_show_the_numbers():
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for sizes, world, words in CONTRADICTING:
        with pytest.raises(ConfigError) as caught:
            load(dict(zip(names, sizes, strict=True))).batch(world)
        assert [word for word in words if word not in str(caught.value)] == []


def test_a_batch_problem_says_where_the_number_of_ranks_comes_from():
    config = load({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 1})
    for counted in ("as WORLD_SIZE=2 of the launcher says", ""):
        with pytest.raises(ConfigError) as caught:
            config.batch(2, counted)
        assert f"on 2 data-parallel ranks{', ' * bool(counted)}{counted})" in str(caught.value)


def test_a_batch_problem_keeps_its_line():
    with pytest.raises(ConfigError, match="config text:2: train_batch_size: 7 must be"):
        load('{\n"train_batch_size": 7}').batch(2)


# --- contradictions ---


def test_a_folder_may_be_given_to_a_planner_that_chooses_the_device():
    config = load({ZERO: {"offload_optimizer": {"device": "auto", "nvme_path": "/a", "buffer_count": 2}}})
    assert config.auto == (f"{ZERO}.offload_optimizer.device",)
    assert config.notes == [f"auto, so chosen when training begins: {ZERO}.offload_optimizer.device"]


OFFLOAD = f"{ZERO}.offload_optimizer"
IDLE = [
    ({OFFLOAD + ".device": "cpu", OFFLOAD + ".nvme_path": "/a"}, f"{OFFLOAD}.nvme_path", "device is cpu"),
    ({OFFLOAD + ".device": "none", OFFLOAD + ".nvme_path": "/a"}, f"{OFFLOAD}.nvme_path", "device is none"),
    ({OFFLOAD + ".ratio": 1}, OFFLOAD, "nothing is offloaded"),
    ({"wherry.update_policy": "delayed"}, "wherry.update_policy", "result differs"),
    ({"wherry.nonfinite": "raise", "fp16.enabled": True}, "wherry.nonfinite", "dynamic loss scale"),
    ({"wherry.delayed_update_warmup": 3}, "wherry.delayed_update_warmup", "no effect"),
    ({"wherry.update_on": 0.5}, "wherry.update_on", "no effect, as the optimizer's state rests on the device"),
    ({"scheduler.type": "WarmupDecayLR", "scheduler.params.total_num_steps": 5}, "scheduler.params.warmup_num_steps",
     "does not end"),
    ({"optimizer.type": "Adam", "optimizer.params.weight_decay": 0.1}, "optimizer.type", "adam_w_mode"),
    ({"optimizer.type": "Adam", "optimizer.params.torch_adam": True}, "optimizer.params.torch_adam", "no effect here"),
]  # fmt: skip


def test_an_idle_key_is_noted():
    for overrides, path, words in IDLE:
        (note,) = load({}, overrides=overrides).notes
        assert note.startswith(f"{path}: ") and words in note


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
    assert load().working_dtype() is None
    assert load().grad_accum_dtype() is None
    assert load().communication_dtype() is None
    assert load({"fp16": {"enabled": True}}).working_dtype() is torch.float16
    assert load({"bf16": {"enabled": True}}).working_dtype() is torch.bfloat16
    config = load(
        {"data_types": {"param_dtype": "fp32", "grad_accum_dtype": "float32"}, "communication_data_type": "bf16"}
    )
    assert (config.working_dtype(), config.grad_accum_dtype()) == (torch.float32, torch.float32)
    assert config.communication_dtype() is torch.bfloat16


def test_the_type_of_the_moments():
    assert load().state_dtype() == "fp32"
    assert load({"bf16": {"enabled": True, "bf16_optimizer_states": True}}).state_dtype() == "bf16"
    both = {"bf16": {"bf16_optimizer_states": True}, "wherry": {"state_dtype": "int8"}}
    assert load(both).state_dtype() == "int8"


# --- optimizers ---


def test_an_optimizer_of_type_auto_is_adamw():
    config = load({"optimizer": {"type": "auto", "params": {"lr": 0.5, "betas": "auto"}}})
    assert config.optimizer.build_args()[0] == "AdamW" and config.optimizer.params["lr"] == 0.5
    assert "optimizer.type" in config.auto and "optimizer.type: auto, so AdamW" in config.notes
    assert not any("left at their defaults" in note and "optimizer.type" in note for note in config.notes)


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({}, None),
        ({"warmup_num_steps": "auto", "total_num_steps": "auto"}, None),
        ({"warmup_num_steps": 5}, "WarmupLR"),
        ({"warmup_num_steps": 5, "total_num_steps": "auto"}, "WarmupDecayLR"),
        ({"total_num_steps": 50, "cos_min_ratio": 0.1}, "WarmupCosineLR"),
        ({"cycle_min_lr": 0.1, "cycle_max_lr": 1}, "OneCycle"),
        ({"lr_range_test_min_lr": 0.1}, "LRRangeTest"),
    ],
)
def test_a_schedule_of_type_auto_is_the_one_that_has_the_parameters(params, name):
    config = load({"scheduler": {"type": "auto", "params": params}})
    assert (config.scheduler and config.scheduler.type) == name
    assert "scheduler.type" in config.auto
    assert sum(note.startswith("scheduler.type: auto") for note in config.notes) == 1


@pytest.mark.parametrize(
    ("block", "name", "params"),
    [
        ({"type": "adam"}, "AdamW", {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
        ({"type": "Adam", "params": {"adam_w_mode": False, "lr": 2}}, "Adam", {"lr": 2.0, "weight_decay": 0.0}),
        ({"type": "ADAMW", "params": {"lr": "auto", "weight_decay": None}}, "AdamW", {"lr": 1e-3, "weight_decay": 0.0}),
        ({"type": "Adagrad"}, "Adagrad", {"lr": 1e-2, "eps": 1e-10, "lr_decay": 0.0}),
        ({"type": "Lion"}, "Lion", {"lr": 1e-3, "betas": (0.9, 0.99)}),
        (
            {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            "SGD",
            {"lr": 0.1, "momentum": 0.9, "nesterov": False},
        ),
        ({"type": "rmsprop", "params": {"lr": 0.1, "alpha": "auto"}}, "RMSprop", {"lr": 0.1}),
        ({"type": "adafactor", "params": {"d": 2}}, "Adafactor", {"lr": 1e-2, "eps": (None, 1e-3), "d": 2.0}),
        ({"type": "Adafactor", "params": {"eps": [1e-30, 0]}}, "Adafactor", {"eps": (1e-30, 0.0)}),
        ({"type": "lamb"}, "Lamb", {"lr": 1e-3, "eps": 1e-8, "max_coeff": 10.0, "min_coeff": 0.01}),
        (
            {"type": "muon", "params": {"lr": 0.1, "adam_lr": 0.2, "eps": 1e-6, "adjust_lr_fn": "Match_RMS_AdamW"}},
            "Muon",
            {"lr": 0.1, "adamw_lr": 0.2, "eps": 1e-7, "adamw_eps": 1e-6, "adjust_lr_fn": "match_rms_adamw"},
        ),
        ({"type": "Muon", "params": {"lr": 0.1, "muon_lr": 0.3}}, "Muon", {"lr": 0.3, "adamw_lr": 0.1}),
    ],
)
def test_an_optimizer_is_resolved(block, name, params):
    resolved = load({"optimizer": block}).optimizer
    built_name, built = resolved.build_args()
    assert built_name == name == resolved.type
    assert params.items() <= built.items()
    kind = getattr(wherry.optim, name, None) or getattr(torch.optim, name, None)
    if kind is not None:
        kind([torch.zeros(2)], **built)
    assert load(load({"optimizer": block}).to_dict()).optimizer.build_args() == (name, built)


def test_an_optimizer_that_cannot_be_sharded_is_refused_with_the_reason():
    for name in REFUSED:
        problem = the_problem({"optimizer": {"type": name.upper()}})
        assert problem.path == "optimizer.type"
        assert problem.message.startswith(f"{name} is not part of Wherry: ")


def test_every_optimizer_of_torch_is_known_by_name():
    of_torch = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    assert of_torch <= {*OPTIMIZERS, *TORCH_ELEMENTWISE, *REFUSED}
    assert set(TORCH_ELEMENTWISE) <= of_torch


def test_a_new_optimizer_of_torch_is_found(monkeypatch):
    class Newest(torch.optim.SGD):
        pass

    monkeypatch.setattr(torch.optim, "Newest", Newest, raising=False)
    assert load({"optimizer": {"type": "Newest", "params": {"lr": 1}}}).optimizer.build_args() == ("Newest", {"lr": 1})


def test_a_config_with_everything_loads_without_torch(launched):
    code = (
        "import sys; from wherry.config import load;"
        "c = load({'optimizer': {'type': 'AdamW'}, 'scheduler': {'type': 'WarmupLR'}, 'bf16': {'enabled': True}});"
        "c.placement(); c.batch(2); c.to_dict(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
