"""Models that are built inside `deepspeed.zero.Init`: when they are partitioned, in what type, what scripts see."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import wherry
from wherry.compat.deepspeed.parameters import ZeroParamStatus, is_zero_param
from wherry.compat.deepspeed.zero import GatheredParameters, Init
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks

STAGE_3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def init(comm: Comm | None = None, **arguments: Any) -> Init:
    arguments.setdefault("config_dict_or_path", STAGE_3)
    return Init(mpu=comm, **arguments)


def test_parameters_answer_as_partitioned_ones_from_the_context_on() -> None:
    def body(comm: Comm) -> tuple[torch.Tensor, torch.Tensor]:
        expected = torch.arange(15.0).view(3, 5)
        with init(comm):
            layer: Any = nn.Linear(5, 3)
            assert is_zero_param(layer.weight) and layer.weight.ds_tensor.numel() == 8
            with torch.no_grad():
                layer.weight.copy_(expected * (1 - comm.rank))  # rank 0's values count
        weight = layer.weight
        assert weight.ds_id != layer.bias.ds_id and (weight.ds_shape, weight.ds_numel) == ((3, 5), 15)
        assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE and weight.ds_status in {ZeroParamStatus.NOT_AVAILABLE}
        assert weight.shape == (0,) and weight.numel() == 0
        assert weight.partition_numel() == weight.ds_tensor.numel() == 8 and weight.ds_active_sub_modules == set()
        with GatheredParameters(weight):
            assert weight.ds_status == ZeroParamStatus.AVAILABLE and torch.equal(weight, expected)
        assert weight.numel() == 0

        copied = copy.deepcopy(layer)
        assert not is_zero_param(copied.weight) and copied.weight.shape == (3, 5)
        with wherry.gathered(copied.weight):
            assert torch.equal(copied.weight, expected)
        return weight.ds_tensor.clone(), expected

    parts = run_ranks(2, body)
    assert torch.equal(torch.cat([part for part, _ in parts])[:15].view(3, 5), parts[0][1])


@pytest.mark.parametrize(
    ("config", "asked", "dtype"),
    [
        ({**STAGE_3, "bf16": {"enabled": True}}, None, torch.bfloat16),
        ({**STAGE_3, "fp16": {"enabled": True}}, torch.float32, torch.float32),
        (STAGE_3, None, torch.float32),
        (None, None, torch.float16),
    ],
)
def test_parameters_are_built_in_the_type_that_is_asked_for(config: Any, asked: Any, dtype: torch.dtype) -> None:
    with init(config_dict_or_path=config, dtype=asked):
        layer: Any = nn.Linear(3, 3)
        assert layer.weight.dtype == layer.weight.ds_tensor.dtype == dtype
        assert torch.tensor([3, 3]).dtype == torch.long
        layer.bias.data = torch.ones(3)
    with GatheredParameters(list(layer.parameters())):
        assert layer.weight.dtype == dtype and torch.equal(layer.bias, torch.ones(3, dtype=dtype))


def test_modules_without_values_and_with_values_are_partitioned() -> None:
    def body(comm: Comm) -> None:
        with init(comm):
            model = nn.Sequential(nn.utils.skip_init(nn.Linear, 10, 10), nn.Linear(10, 10))
        assert [p.ds_tensor.numel() for p in model.parameters()] == [50, 5, 50, 5]  # type: ignore[union-attr]
        with Init(data_parallel_group=comm, config_dict_or_path=STAGE_3):
            layer: Any = nn.Linear(4, 4)
        assert layer.weight.partition_numel() == 8

    run_ranks(2, body)
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    init(module=model)
    assert all(p.numel() == 0 and is_zero_param(p) for p in model.parameters())
    with GatheredParameters(model.parameters()):
        assert torch.equal(model.weight, before)
    init(module=(whole := nn.Linear(2, 2)), config_dict_or_path={"zero_optimization": {"stage": 2}})
    assert whole.weight.numel() == 4


def test_arguments_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(AssertionError, match=r"dtype torch\.float64 is not offered"):
        Init(dtype=torch.float64)
    with pytest.raises(ValueError, match="both given"):
        Init(data_parallel_group=object(), sequence_data_parallel_group=object())
    with pytest.raises(NotImplementedError, match=r"Init\(zero_quantized_weights=\.\.\.\) is not part of Wherry"):
        Init(zero_quantized_weights=True, param_swapper=None)
    with Init(config_dict_or_path=STAGE_3):
        assert is_zero_param(nn.Linear(2, 2).weight)
    monkeypatch.setenv("WORLD_SIZE", "8")
    Init(data_parallel_group=dist.group.WORLD)
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE=8.*init_distributed"):
        Init()
