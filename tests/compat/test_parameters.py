"""Partitioned parameters as scripts see them in an engine, and what they gather, register and tile them with."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from tests.compat.harness import SGD, engine_of, step
from torch import nn

from wherry.compat.deepspeed import leaf_modules
from wherry.compat.deepspeed.engine import DeepSpeedEngine, OnDevice, initialize
from wherry.compat.deepspeed.parameters import (
    ZeroParamStatus,
    is_zero_param,
    register_external_parameter,
    unregister_external_parameter,
)
from wherry.compat.deepspeed.zero import GatheredParameters, Init, TiledLinear, TiledLinearReturnBias
from wherry.parallel.comm import Comm
from wherry.sharding.grouping import LEAF, plan_units
from wherry.testing import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 5), nn.Linear(5, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.arange(float(parameter.numel())).view_as(parameter) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x)).sum()


def config_of(stage: int = 3, **zero: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **zero}
    return {"train_micro_batch_size_per_gpu": 1, "optimizer": SGD, "zero_optimization": zero}


def partitioned(comm: Comm) -> DeepSpeedEngine:
    zero = {"stage3_param_persistence_threshold": 0}
    return engine_of(3, model=Net(), zero=zero, mesh=comm, optimizer=SGD)  # type: ignore[no-any-return]


def test_an_engine_marks_what_it_partitions() -> None:
    """Mark parameters until the engine ends; hold one whole from `all_gather` to `partition`."""

    def body(comm: Comm) -> dict[str, torch.Tensor]:
        engine = partitioned(comm)
        params: dict[str, Any] = dict(engine.module.named_parameters())
        shapes = {name: p.shape for name, p in Net().named_parameters()}
        assert {name: p.ds_shape for name, p in params.items()} == shapes
        assert all(p.shape == (0,) and p.ds_status == ZeroParamStatus.NOT_AVAILABLE for p in params.values())
        assert all(p.partition_numel() == math.ceil(p.ds_numel / 2) for p in params.values())
        parts = {name: p.ds_tensor.clone() for name, p in params.items()}

        weight, bias = engine.module.one.weight, engine.module.one.bias
        weight.all_gather()
        assert torch.equal(weight.data, Net().one.weight) and weight.ds_status == ZeroParamStatus.AVAILABLE
        weight.partition()
        weight.all_gather([weight, bias])
        with torch.no_grad():
            bias.fill_(7)
        weight.partition([weight, bias], has_been_updated=True)
        assert weight.numel() == bias.numel() == 0
        with GatheredParameters([bias]):
            assert bias.tolist() == [7.0] * 5
            engine.empty_partition_cache()
            assert bias.numel() == 5
        weight.all_gather()
        engine.empty_partition_cache()
        assert weight.numel() == 0

        seen = []
        for layer in (engine.module.one, engine.module.two):
            layer.register_forward_hook(lambda module, *_: seen.append((module.weight.ds_status, module.weight.shape)))
        engine.backward(engine(torch.ones(1, 3)))
        assert seen == [(ZeroParamStatus.AVAILABLE, shapes[f"{name}.weight"]) for name in ("one", "two")]
        engine.step()
        assert all(p.numel() == 0 and p.ds_status == ZeroParamStatus.NOT_AVAILABLE for p in params.values())
        one, two = engine.module.one, engine.module.two
        register_external_parameter(one, two.weight)
        assert [p is two.weight for _, p in one.ds_external_parameters()] == [True]
        with GatheredParameters(two.bias, fwd_module=one):
            assert len(one.ds_external_parameters()) == 2
        unregister_external_parameter(one, two.weight)
        assert [p is two.bias for _, p in one.ds_external_parameters()] == [True]
        for call in (register_external_parameter, unregister_external_parameter):
            with pytest.raises(RuntimeError, match=r"not a torch\.nn\.Parameter"):
                call(one, torch.ones(1))
        with GatheredParameters(weight):
            for made in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
                assert type(made) is nn.Parameter and torch.equal(made, weight) and not is_zero_param(made)
        whole = engine.module.state_dict()
        engine.unwrap()
        assert not hasattr(one, "ds_external_parameters")
        assert all(type(p) is nn.Parameter and not is_zero_param(p) for p in params.values())
        assert all(torch.equal(p, whole[name]) for name, p in params.items())
        return parts

    both = run_ranks(2, body)
    for name, parameter in Net().named_parameters():
        assert torch.equal(torch.cat([parts[name] for parts in both]), parameter.detach().flatten())


@pytest.mark.parametrize("with_engine", [False, True])
def test_gathered_parameters(with_engine: bool) -> None:
    def body(comm: Comm) -> None:
        if with_engine:
            model: Any = partitioned(comm).module
        else:
            with Init(mpu=comm, config_dict_or_path=config_of()):
                model = Net()
        weight, plain = model.one.weight, nn.Parameter(torch.ones(2))
        before = Net().one.weight.detach()
        with GatheredParameters([weight, plain, model.one.bias], modifier_rank=1):
            kept = weight.detach()
            with GatheredParameters(weight), GatheredParameters([]), GatheredParameters(iter([plain])):
                assert torch.equal(weight, before)
            assert weight.shape == (5, 3)
            if comm.rank == 1:
                with torch.no_grad():
                    weight.zero_()
                    model.one.bias.data = torch.full((5,), 3.0)
        assert weight.numel() == 0 and plain.tolist() == [1.0, 1.0]
        # What the script has taken lives on, each rank's own.
        assert kept.shape == (5, 3) and (comm.rank == 0 or not kept.any())
        with GatheredParameters(model.parameters()):
            assert not weight.any() and model.one.bias.tolist() == [3.0] * 5
        with GatheredParameters(model.parameters(), enabled=False):
            assert weight.numel() == 0
        with pytest.raises(KeyError), GatheredParameters(weight):
            raise KeyError
        assert weight.numel() == 0

    run_ranks(2, body)


def test_a_trained_parameter_without_a_gradient_is_an_error_where_that_is_asked_for() -> None:
    def train(**zero: Any) -> None:
        model = Net()
        model.unused = nn.Linear(2, 2)
        engine, *_ = initialize(model=model, config=config_of(2, offload_optimizer={"device": "cpu"}, **zero))
        assert not any(map(is_zero_param, model.parameters()))
        engine.backward(engine(torch.ones(1, 3)))
        engine.step()
        engine.close()

    train()
    with pytest.raises(AssertionError, match=r"unused\.weight, unused\.bias got no gradient.*ignore_unused_parameters"):
        train(ignore_unused_parameters=False)


class ReturnsBias(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.linear(x, self.weight), self.bias


def test_tiles_of_a_linear_layer() -> None:
    linear, x = nn.Linear(8, 9), torch.randn(2, 8)
    tiled = TiledLinear(8, 9, in_splits=3, out_splits=2, init_linear=linear)
    torch.testing.assert_close(tiled(x), linear(x))
    rows = [torch.cat([tile.weight for tile in row], 1) for row in tiled.linears]
    assert torch.equal(torch.cat(rows), linear.weight)
    # The first parts are the larger ones, as DeepSpeed cuts them.
    assert [(tile.in_features, tile.bias is not None) for tile in tiled.linears[0]] == [
        (3, False),
        (3, False),
        (2, True),
    ]
    with pytest.raises(RuntimeError, match="in_splits is between 1 and the 8 features"):
        TiledLinear(8, 9, in_splits=9)
    parts = {"input_is_already_split": True, "combine_out_splits": False}
    tiled = TiledLinear(8, 9, in_splits=2, out_splits=2, init_linear=linear, **parts)
    torch.testing.assert_close(torch.cat(tiled(x.split(4, -1)), -1), linear(x))
    fused = TiledLinearReturnBias(8, 9, in_splits=2, out_splits=2, linear_cls=ReturnsBias, init_linear=linear)
    output, bias = fused(x)
    assert torch.equal(bias, linear.bias)
    torch.testing.assert_close(output, linear(x) - linear.bias)
    engine = engine_of(3, model=nn.Sequential(TiledLinear(4, 3, in_splits=2), nn.Linear(3, 1)))
    step(engine)
    assert [unit.name for unit in engine.units] == ["root", "0.linears.0.0", "0.linears.0.1"]
    assert next(iter(engine.consolidated_state_dict())) == "0.linears.0.0.weight"
    engine.destroy()


@pytest.mark.parametrize(("enabled", "kind"), [(True, (torch.half, "meta")), (False, (torch.float32, "cpu"))])
def test_on_device(enabled: bool, kind: tuple[torch.dtype, str]) -> None:
    with OnDevice(dtype=torch.half, device="meta", enabled=enabled):
        assert {(p.dtype, p.device.type) for p in nn.Linear(2, 2).parameters()} == {kind}


def test_initialize_takes_models_whose_shapes_are_not_seen() -> None:
    with Init(config_dict_or_path=config_of()):
        model = Net()
    number = model.one.weight.ds_id
    assert model.one.weight.numel() == 0
    engine, *_ = initialize(model=model, config=config_of(leaf_module={"names": "one"}))
    assert model.one.weight.ds_id == number
    assert [hasattr(each, LEAF) for each in (model.one, model.two)] == [True, False]
    twin, x = Net(), torch.ones(1, 3)
    engine.backward(engine(x))
    engine.step()
    twin(x).backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    with GatheredParameters(model.parameters()):
        torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()))
    engine.close()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


def test_leaves() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "experts": Experts()})
    for cls in (Experts, "Experts", f"{Experts.__module__}.{Experts.__qualname__}"):
        model["experts"] = leaf = Experts()
        assert [plan.name for plan in plan_units(model)] == ["root", "experts.each.0", "experts.each.1"]
        assert leaf_modules.set_z3_leaf_modules(model, [cls]) == [leaf]
        assert [plan.name for plan in plan_units(model)] == ["root", "experts"]
    with pytest.raises(ValueError, match="No modules of type"):
        leaf_modules.set_z3_leaf_modules(model, ["Nothing"])
    assert leaf_modules.set_z3_leaf_modules_by_suffix(model, ["each"]) == ([leaf.each], [])
    assert leaf_modules.set_z3_leaf_modules_by_name(model, ["experts", "x"], raise_if_not_found=False) == (
        [leaf],
        ["x"],
    )
    with pytest.raises(ValueError, match="No modules named"):
        leaf_modules.set_z3_leaf_modules_by_name(model, ["x"])
