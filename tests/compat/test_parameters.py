"""Partitioned parameters as scripts see them in an engine, and what they gather, register and tile them with."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from wherry.build import initialize as wherry_initialize
from wherry.compat.deepspeed import leaf_modules
from wherry.compat.deepspeed.config import DeepSpeedZeroConfig
from wherry.compat.deepspeed.engine import DeepSpeedEngine, OnDevice, initialize
from wherry.compat.deepspeed.parameters import (
    MultipleAllGatherHandles,
    ZeroParamStatus,
    is_zero_param,
    register_external_parameter,
    unregister_external_parameter,
)
from wherry.compat.deepspeed.zero import (
    GatheredParameters,
    Init,
    TiledLinear,
    TiledLinearReturnBias,
    unwrap_model_for_generation,
)
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks


@pytest.fixture(autouse=True)
def _no_group_stays():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    if "ds_status" in torch.Tensor.__dict__:
        del torch.Tensor.ds_status


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 5), nn.Linear(5, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.arange(float(parameter.numel())).view_as(parameter) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x)).sum()


def _config(stage: int = 3, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    }


def _engine(comm: Comm, model: nn.Module | None = None, **config: Any) -> DeepSpeedEngine:
    engine, *_ = wherry_initialize(
        model=model or Net(), config=_config(**config), mesh=comm, engine_class=DeepSpeedEngine
    )
    assert isinstance(engine, DeepSpeedEngine)
    return engine


def _on_two(body: Callable[[Comm], Any]) -> list[Any]:
    return run_ranks(2, body)


def test_an_engine_marks_what_it_partitions() -> None:
    def body(comm: Comm) -> dict[str, torch.Tensor]:
        engine = _engine(comm)
        params: dict[str, Any] = dict(engine.module.named_parameters())
        shapes = {name: p.shape for name, p in Net().named_parameters()}
        assert {name: p.ds_shape for name, p in params.items()} == shapes
        assert all(p.shape == (0,) and p.ds_status == ZeroParamStatus.NOT_AVAILABLE for p in params.values())
        assert all(p.partition_numel() == math.ceil(p.ds_numel / 2) for p in params.values())
        parts = {name: p.ds_tensor.clone() for name, p in params.items()}

        seen = []
        for layer in (engine.module.one, engine.module.two):
            layer.register_forward_hook(lambda module, *_: seen.append((module.weight.ds_status, module.weight.shape)))
        engine.backward(engine(torch.ones(1, 3)))
        assert seen == [(ZeroParamStatus.AVAILABLE, shapes[f"{name}.weight"]) for name in ("one", "two")]
        engine.step()
        assert all(p.numel() == 0 and p.ds_status == ZeroParamStatus.NOT_AVAILABLE for p in params.values())
        whole = engine.module.state_dict()
        assert {name: tensor.shape for name, tensor in whole.items()} == shapes

        engine.unwrap()
        assert all(type(p) is nn.Parameter and not is_zero_param(p) for p in params.values())
        assert all(torch.equal(p, whole[name]) for name, p in params.items())
        return parts

    both = _on_two(body)
    for name, parameter in Net().named_parameters():
        assert torch.equal(torch.cat([parts[name] for parts in both]), parameter.detach().flatten())


def test_below_stage_3_parameters_are_as_they_were() -> None:
    def body(comm: Comm) -> None:
        engine = _engine(comm, stage=2)
        assert all(type(p) is nn.Parameter and not is_zero_param(p) and p.numel() for p in engine.module.parameters())
        engine.close()

    _on_two(body)


def test_an_engine_of_a_model_from_init_trains_it_like_any_other() -> None:
    def body(comm: Comm) -> None:
        with Init(mpu=comm, config_dict_or_path=_config()):
            model = Net()
        number = model.one.weight.ds_id
        engine = _engine(comm, _with_shapes(model))
        twin = Net()
        assert model.one.weight.ds_id == number and model.one.weight.numel() == 0
        x = torch.ones(1, 3)
        engine.backward(engine(x))
        engine.step()
        twin(x).backward()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        with GatheredParameters(model.parameters()):
            for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(mine.data, theirs.data)
        engine.close()

    _on_two(body)


def _with_shapes(model: nn.Module) -> nn.Module:
    """As `initialize` of the alias has it before it builds an engine."""
    from wherry.compat.deepspeed.parameters import show_shapes

    show_shapes(model)
    return model


def test_initialize_takes_models_whose_shapes_are_not_seen() -> None:
    with Init(config_dict_or_path=_config()):
        model = Net()
    assert model.one.weight.numel() == 0
    engine, *_ = initialize(model=model, config=_config())
    assert torch.equal(engine.module.one.weight, Net().one.weight)
    engine.close()


def test_a_parameter_is_whole_from_all_gather_to_partition() -> None:
    def body(comm: Comm) -> None:
        engine = _engine(comm)
        weight, bias = engine.module.one.weight, engine.module.one.bias
        weight.all_gather()
        assert torch.equal(weight.data, Net().one.weight) and weight.ds_status == ZeroParamStatus.AVAILABLE
        weight.partition()
        assert weight.numel() == 0
        MultipleAllGatherHandles([weight.all_gather_coalesced([weight, bias]), weight.all_gather(async_op=True)]).wait()
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
        engine.close()

    _on_two(body)


@pytest.mark.parametrize("with_engine", [False, True])
def test_gathered_parameters(with_engine: bool) -> None:
    def body(comm: Comm) -> None:
        if with_engine:
            engine = _engine(comm)
            model: Any = engine.module
        else:
            with Init(mpu=comm, config_dict_or_path=_config()):
                model = Net()
        weight, plain = model.one.weight, nn.Parameter(torch.ones(2))
        before = Net().one.weight.detach()
        with GatheredParameters([weight, plain, model.one.bias], modifier_rank=1):
            kept, view = weight.detach(), weight.data[0]
            with GatheredParameters(weight), GatheredParameters([]), GatheredParameters(iter([plain])):
                assert torch.equal(weight, before)
            assert weight.shape == (5, 3)
            if comm.rank == 1:
                with torch.no_grad():
                    weight.zero_()
                    model.one.bias.data = torch.full((5,), 3.0)
        assert weight.numel() == 0 and plain.tolist() == [1.0, 1.0]
        # What the script has taken lives on, each rank's own.
        assert torch.equal(kept, before * (1 - comm.rank)) or comm.rank == 0
        assert kept.shape == (5, 3) and bool(view.isfinite().all())
        with GatheredParameters(model.parameters()):
            assert not weight.any() and model.one.bias.tolist() == [3.0] * 5
        with GatheredParameters(model.parameters(), enabled=False):
            assert weight.numel() == 0
        with pytest.raises(KeyError), GatheredParameters(weight):
            raise KeyError
        assert weight.numel() == 0

    _on_two(body)


def test_edits_that_would_be_lost_are_an_error_where_that_is_asked_for() -> None:
    def body(comm: Comm) -> None:
        with Init(mpu=comm, config_dict_or_path=_config(enable_sanity_checks=True)):
            model: Any = Net()
        weight = model.one.weight
        with pytest.raises(RuntimeError, match="in-place modification"), GatheredParameters([weight, model.one.bias]):
            if comm.rank == 1:
                with torch.no_grad():
                    weight.add_(1)
        with GatheredParameters(weight):
            assert torch.equal(weight, Net().one.weight)
        with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight.add_(1)

    _on_two(body)


def test_external_parameters_are_listed() -> None:
    def body(comm: Comm) -> None:
        engine = _engine(comm)
        one, two = engine.module.one, engine.module.two
        assert list(one.ds_external_parameters()) == []
        register_external_parameter(one, two.weight)
        assert [p is two.weight for _, p in one.ds_external_parameters()] == [True] and two.weight.is_external_param
        with GatheredParameters(two.bias, fwd_module=one):
            assert len(one.ds_external_parameters()) == 2
        unregister_external_parameter(one, two.weight)
        assert [p is two.bias for _, p in one.ds_external_parameters()] == [True]
        with pytest.raises(RuntimeError, match=r"not a torch\.nn\.Parameter"):
            register_external_parameter(one, torch.ones(1))
        with pytest.raises(RuntimeError, match="not a registered external parameter"):
            unregister_external_parameter(one, two.weight)
        engine.close()
        assert not hasattr(one, "ds_external_parameters")

    _on_two(body)


def test_generation_is_without_hooks_and_with_whole_weights() -> None:
    def body(comm: Comm) -> None:
        engine = _engine(comm)
        hooked = engine.optimizer.parameter_offload
        assert hooked.forward_hooks and hooked.backward_hooks
        with unwrap_model_for_generation(engine) as model:
            assert model is engine.module and not hooked.forward_hooks and model.one.weight.shape == (5, 3)
        assert hooked.forward_hooks and engine.module.one.weight.numel() == 0
        for hook in hooked.forward_hooks:
            hook.remove()
        engine.close()

    _on_two(body)


def test_copies_and_pickles_of_a_whole_parameter_are_ordinary() -> None:
    def body(comm: Comm) -> None:
        engine = _engine(comm)
        weight = engine.module.one.weight
        with GatheredParameters(weight):
            for made in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
                assert type(made) is nn.Parameter and torch.equal(made, weight) and not is_zero_param(made)
        engine.close()

    _on_two(body)


def test_a_trained_parameter_without_a_gradient_is_an_error_where_that_is_asked_for() -> None:
    def step(**zero: Any) -> None:
        model = Net()
        model.unused = nn.Linear(2, 2)
        engine, *_ = initialize(model=model, config=_config(2, offload_optimizer={"device": "cpu"}, **zero))
        engine.backward(engine(torch.ones(1, 3)))
        engine.step()
        engine.close()

    step()
    with pytest.raises(AssertionError, match=r"unused\.weight, unused\.bias got no gradient.*ignore_unused_parameters"):
        step(ignore_unused_parameters=False)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 3), (5, 4)])
def test_tiles(rows: int, columns: int) -> None:
    linear = nn.Linear(7, 9)
    tiled = TiledLinear(7, 9, in_splits=columns, out_splits=rows, init_linear=linear)
    for row in range(rows):
        for column in range(columns):
            tile = tiled.linears[row][column]
            (top, bottom), (left, right) = tiled.out_parts[row : row + 2], tiled.in_parts[column : column + 2]
            assert isinstance(tile, nn.Linear) and torch.equal(tile.weight, linear.weight[top:bottom, left:right])
            assert (tile.bias is not None) == (column == columns - 1)
    x = torch.randn(2, 7)
    torch.testing.assert_close(tiled(x), linear(x))
    assert next(iter(tiled.state_dict())) == "linears.0.0.weight"


def test_tiles_of_inputs_that_are_split_and_outputs_that_stay_so() -> None:
    linear, x = nn.Linear(6, 4), torch.randn(2, 6)
    tiled = TiledLinear(
        6, 4, in_splits=2, out_splits=2, input_is_already_split=True, combine_out_splits=False, init_linear=linear
    )
    torch.testing.assert_close(torch.cat(tiled(x.split(3, -1)), -1), linear(x))
    for splits in (0, 7):
        with pytest.raises(RuntimeError, match="in_splits is between 1 and the 6 features"):
            TiledLinear(6, 4, in_splits=splits)


def test_tiles_that_return_their_bias() -> None:
    class Returning(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return nn.functional.linear(x, self.weight), self.bias

    linear, x = nn.Linear(6, 4), torch.randn(2, 6)
    tiled = TiledLinearReturnBias(6, 4, in_splits=2, out_splits=2, linear_cls=Returning, init_linear=linear)
    out, bias = tiled(x)
    assert torch.equal(bias, linear.bias)
    torch.testing.assert_close(out + bias, linear(x))


class Base(nn.Module):
    pass


class Leaf(Base):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 2)


def test_leaves() -> None:
    model = nn.ModuleDict({"leaf": Leaf()})
    leaf = model["leaf"]
    for cls in (Base, "Leaf", f"{Leaf.__module__}.{Leaf.__qualname__}"):
        assert leaf_modules.set_z3_leaf_modules(model, [cls]) == [leaf] == leaf_modules.get_z3_leaf_modules(model)
        assert leaf_modules.unset_z3_leaf_modules(model, [cls]) == [leaf] and not leaf_modules.z3_leaf_module(leaf)
    assert leaf_modules.set_z3_leaf_modules(model, ["Nothing"], raise_if_not_found=False) == []
    with pytest.raises(ValueError, match="No modules of type"):
        leaf_modules.set_z3_leaf_modules(model, ["Nothing"])
    assert leaf_modules.set_z3_leaf_modules_by_suffix(model, ["child"]) == ([leaf.child], [])
    assert leaf_modules.set_z3_leaf_modules_by_name(model, ["x"], raise_if_not_found=False) == ([], ["x"])


def test_leaves_of_a_config() -> None:
    assert DeepSpeedZeroConfig().leaf_module.classes == leaf_modules.DEFAULT_LEAF_MODULE_CLASSES
    block = DeepSpeedZeroConfig(leaf_module={"classes": "my.Class", "names": ["one", "one"]}).leaf_module
    assert (block.classes, block.names, block.name_suffixes) == (["my.Class"], ["one"], [])
    model = Net()
    engine, *_ = initialize(model=model, config=_config(leaf_module={"names": "one"}))
    assert leaf_modules.get_z3_leaf_modules(model) == [model.one]
    engine.close()


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_on_device(device: str) -> None:
    with OnDevice(dtype=torch.half, device=device):
        layer = nn.Linear(2, 2)
    assert {(p.dtype, p.device.type) for p in layer.parameters()} == {(torch.half, device)}
    with OnDevice(dtype=torch.half, device=device, enabled=False):
        assert nn.Linear(2, 2).weight.dtype == torch.float32
