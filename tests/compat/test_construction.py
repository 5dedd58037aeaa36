"""Models that are built inside `deepspeed.zero.Init`: when they are partitioned, in what type, what scripts see."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import wherry
from wherry.compat.deepspeed.parameters import ZeroParamStatus, is_zero_param, partitioned_param_data_shape
from wherry.compat.deepspeed.zero import (
    GatheredParameters,
    Init,
    restore_init_context,
    shutdown_init_context,
    why_group_is_too_small,
)
from wherry.parallel.comm import Comm
from wherry.sharding.init import entered
from wherry.testing import run_ranks

STAGE_3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


@pytest.fixture(autouse=True)
def _no_group_stays():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _init(comm: Comm | None = None, **arguments: Any) -> Init:
    arguments.setdefault("config_dict_or_path", STAGE_3)
    return Init(mpu=comm, **arguments)


def _built(comm: Comm) -> tuple[nn.Linear, torch.Tensor]:
    """A layer, and the values that it has: rank 0's."""
    values = torch.arange(15.0).view(3, 5)
    with _init(comm):
        layer = nn.Linear(5, 3)
        with torch.no_grad():
            layer.weight.copy_(values * (1 - comm.rank))
    return layer, values


def test_parameters_answer_as_partitioned_ones_from_the_context_on() -> None:
    def body(comm: Comm) -> tuple[torch.Tensor, torch.Tensor]:
        layer, expected = _built(comm)
        weight: Any = layer.weight
        assert is_zero_param(weight) and weight.ds_id != layer.bias.ds_id
        assert (weight.ds_shape, weight.ds_numel) == ((3, 5), 15)
        assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE and weight.ds_status in {ZeroParamStatus.NOT_AVAILABLE}
        assert weight.shape == torch.Size(partitioned_param_data_shape) and weight.numel() == 0
        share = math.ceil(15 / comm.size)
        assert weight.partition_numel() == weight.ds_tensor.numel() == weight.ds_tensor.ds_numel == share
        assert weight.ds_tensor.dtype == torch.float32 and weight.ds_tensor.device == expected.device
        assert weight.ds_tensor.status.name == "AVAILABLE" and not weight.ds_persist
        assert weight.ds_active_sub_modules == set() and not weight.is_external_param
        assert weight.ds_summary()["status"] == "NOT_AVAILABLE" and weight.ds_summary()["ds_shape"] == (3, 5)
        assert "Parameter containing" in repr(weight)
        with GatheredParameters(weight):
            assert weight.ds_status == ZeroParamStatus.AVAILABLE and weight.shape == (3, 5)
            assert torch.equal(weight, expected)
        assert weight.numel() == 0
        return weight.ds_tensor.clone(), expected

    parts = run_ranks(2, body)
    assert torch.equal(torch.cat([part for part, _ in parts])[:15].view(3, 5), parts[0][1])


def test_a_layer_that_has_just_been_built_has_its_part_already() -> None:
    def body(comm: Comm) -> None:
        with _init(comm, dtype=torch.bfloat16, config_dict_or_path=None):
            layer: Any = nn.Linear(3, 3)
            assert is_zero_param(layer.weight)
            assert (layer.weight.ds_tensor.numel(), layer.weight.ds_tensor.dtype) == (5, torch.bfloat16)
            assert torch.tensor([3, 3]).dtype == torch.long

    run_ranks(2, body)


def test_outside_of_the_context_nothing_is_marked() -> None:
    with _init():
        nn.Linear(2, 2)
    weight = nn.Linear(2, 2).weight
    assert type(weight) is nn.Parameter and not is_zero_param(weight) and weight.numel() == 4


def test_a_context_that_is_not_enabled_does_nothing() -> None:
    with Init(config_dict_or_path="/no/such/file.json", dtype=torch.float64, enabled=False):
        weight = nn.Linear(2, 2).weight
    assert type(weight) is nn.Parameter and weight.dtype == torch.float32
    assert not dist.is_initialized()


def test_contexts_within_contexts() -> None:
    with _init():
        with _init():
            inner: Any = nn.Linear(4, 4)
        assert is_zero_param(inner.weight)
        assert inner.weight.shape == (4, 4)  # what is built further may look at it
        outer: Any = nn.Sequential(inner, nn.Linear(4, 2))
    assert all(p.numel() == 0 and is_zero_param(p) for p in outer.parameters())
    assert [p.ds_numel for p in outer.parameters()] == [16, 4, 8, 2]


def test_a_context_can_be_left_for_a_while() -> None:
    with _init():
        first = nn.Linear(2, 2)
        shutdown_init_context()
        plain = nn.Linear(2, 2)
        assert first.weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
        restore_init_context()
        last = nn.Linear(2, 2)
    assert type(plain.weight) is nn.Parameter and plain.weight.numel() == 4
    assert is_zero_param(last.weight) and last.weight.numel() == 0
    restore_init_context()  # as often as one likes


def test_a_context_that_has_ended_does_not_come_back() -> None:
    with _init() as outer:
        with _init():
            shutdown_init_context()
        shutdown_init_context()
        restore_init_context()
        restore_init_context()
        assert entered() == [outer]
        shutdown_init_context()
    restore_init_context()
    assert entered() == []
    with _init():
        layer = nn.Linear(2, 2)
    assert is_zero_param(layer.weight) and layer.weight.numel() == 0


@pytest.mark.parametrize(
    ("config", "asked", "dtype"),
    [
        ({**STAGE_3, "bf16": {"enabled": True}}, None, torch.bfloat16),
        ({**STAGE_3, "fp16": {"enabled": True}}, None, torch.float16),
        (STAGE_3, None, torch.float32),
        ({**STAGE_3, "bf16": {"enabled": True}}, torch.float32, torch.float32),
        (None, torch.bfloat16, torch.bfloat16),
        (None, None, torch.float16),
    ],
)
def test_parameters_are_built_in_the_type_that_is_asked_for(config: Any, asked: Any, dtype: torch.dtype) -> None:
    with _init(config_dict_or_path=config, dtype=asked):
        layer: Any = nn.Linear(3, 3)
        assert layer.weight.dtype == dtype
        layer.bias.data = torch.ones(3)
    with GatheredParameters(list(layer.parameters())):
        assert (layer.weight.dtype, layer.bias.dtype) == (dtype, dtype)
        assert torch.equal(layer.bias, torch.ones(3, dtype=dtype))


def test_other_types_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"dtype torch\.float64 is not offered"):
        Init(dtype=torch.float64)


class Grandparent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(5))
        self.first.data = (self.first.data + 1).data


class Parent(Grandparent):
    def __init__(self) -> None:
        self.width = 5  # before torch's own
        super().__init__()
        self.second = nn.Parameter(torch.ones(self.width))
        self.second.data = (self.second.data + 1).data
        self.first.data = (self.first.data + 1).data


def test_subclasses_go_on_with_what_their_parents_have_made() -> None:
    with _init():

        class Child(Parent):
            def __init__(self) -> None:
                super().__init__()
                self.third = nn.Parameter(torch.ones(5))
                self.first.data = (self.first.data + 1).data

        model: Any = Child()
        made = type("Made", (nn.Linear,), {})(5, 1)
    assert [p.ds_status.name for p in model.parameters()] == ["NOT_AVAILABLE"] * 3
    assert is_zero_param(made.weight) and made.weight.ds_shape == (1, 5)
    with GatheredParameters(list(model.parameters())):
        assert [p[0].item() for p in model.parameters()] == [4.0, 2.0, 1.0]


def test_parents_initialise_their_children() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
            self.apply(self._init)

        def _init(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                with torch.no_grad():
                    module.weight.fill_(module.weight.shape[0])

    with _init():
        model = Net()
    with GatheredParameters(model.parameters()):
        assert all(bool((layer.weight == 3).all()) for layer in model.layers)


def test_layers_without_values_are_partitioned_too() -> None:
    def body(comm: Comm) -> None:
        with _init(comm):
            model = nn.Sequential(nn.utils.skip_init(nn.Linear, 10, 10), nn.Linear(10, 10))
        assert [p.ds_tensor.numel() for p in model.parameters()] == [50, 5, 50, 5]  # type: ignore[union-attr]

    run_ranks(2, body)


def test_a_module_that_is_built_already_is_partitioned_at_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    before = [p.detach().clone() for p in model.parameters()]
    _init(module=model)
    assert all(p.numel() == 0 and is_zero_param(p) for p in model.parameters())
    with GatheredParameters(model.parameters()):
        assert all(torch.equal(now, was) for now, was in zip(model.parameters(), before, strict=True))
    _init(module=(whole := nn.Linear(2, 2)), config_dict_or_path={"zero_optimization": {"stage": 2}})
    assert whole.weight.numel() == 4


def test_a_group_of_its_own() -> None:
    def body(comm: Comm) -> None:
        for name in ("data_parallel_group", "sequence_data_parallel_group"):
            with Init(**{name: comm}, config_dict_or_path=STAGE_3):
                layer: Any = nn.Linear(4, 4)
            assert layer.weight.partition_numel() == 8

    run_ranks(2, body)
    with pytest.raises(ValueError, match="both given"):
        Init(data_parallel_group=object(), sequence_data_parallel_group=object())


def test_a_group_that_contradicts_the_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    why = why_group_is_too_small(1, None, {"WORLD_SIZE": "8"})
    assert why is not None and "WORLD_SIZE=8" in why and "init_distributed" in why
    for group, ranks, env in ((None, 8, {"WORLD_SIZE": "8"}), (object(), 1, {"WORLD_SIZE": "8"}), (None, 1, {}),
                              (None, 1, {"WORLD_SIZE": "1"}), (None, 1, {"WORLD_SIZE": None})):  # fmt: skip
        assert why_group_is_too_small(ranks, group, env) is None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(RuntimeError, match="WORLD_SIZE=8"):
        Init()


def test_more_parameters_are_partitioned_as_one_is() -> None:
    def body(comm: Comm) -> None:
        layer: Any = _built(comm)[0]
        other: Any = nn.Parameter(torch.arange(6.0) * (1 - comm.rank))
        layer.weight.convert_to_zero_parameters([other])
        assert is_zero_param(other) and other.ds_tensor.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]][comm.rank]

    run_ranks(2, body)


def test_a_copy_of_a_released_parameter_is_an_ordinary_one() -> None:
    def body(comm: Comm) -> None:
        layer, expected = _built(comm)
        copied = copy.deepcopy(layer)
        assert not is_zero_param(copied.weight) and copied.weight.shape == (3, 5)
        with wherry.gathered(copied.weight):
            assert torch.equal(copied.weight, expected)

    run_ranks(2, body)
