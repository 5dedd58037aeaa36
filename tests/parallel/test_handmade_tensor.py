"""Every ZeRO stage beside tensor parallelism made by hand equals one process."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    Run,
    assert_close,
    assert_equal,
    engine_of,
    make_model,
    settings,
    token_batch,
    train_plain,
    train_step,
)
from tests.parallel.handmade import Model
from tests.tiers.rows import offload

import wherry
from wherry.errors import WherryError
from wherry.parallel import topology
from wherry.parallel.comm import Comm
from wherry.parallel.topology import Topology
from wherry.sharding.layout import Slot
from wherry.testing import run_grid
from wherry.testing.late import Chaos
from wherry.testing.late import topology as chaotic

STEPS, CLIP = 3, 0.3
MODEL: Any = make_model(partial(Model, blocks=2))


def cut_model(place: Topology, **how: Any) -> Any:
    """Copy the model and keep this rank's parts."""
    mine = copy.deepcopy(MODEL)
    mine.cut(place.tensor, **how)
    return mine


@cache
def oracle(data: int, accumulation: int = 1) -> Run:
    return train_plain(MODEL, ranks=data, accumulation=accumulation, steps=STEPS, clip=CLIP)


class Mpu:
    """The model-parallel unit of Megatron-style code, with groups of threads."""

    def __init__(self, place: Topology) -> None:
        self.place = place

    def get_data_parallel_group(self) -> Comm:
        return self.place.data

    def get_model_parallel_group(self) -> Comm:
        return self.place.tensor

    def get_model_parallel_world_size(self) -> int:
        return self.place.tensor.size


def joined(engine: Any, name: str, parameter: torch.Tensor, comm: Comm) -> torch.Tensor:
    """Join a logical parameter from the slices that its slots name."""
    slots = {s.name: s for unit in engine.units for flat in unit.flats for s in flat.layout.slots}
    slot: Slot = slots[name]
    if slot.part is None:
        return parameter.detach().clone()
    whole = torch.full(slot.part.global_shape, float("nan"))
    for offsets, part in comm.gather_objects((slot.part.offsets, parameter.detach().clone())):
        whole[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part
    return whole


def train(place: Topology, engine: Any, accumulation: int = 1) -> Run:
    """Train and close; the weights are whole."""
    run = Run()
    for step in range(STEPS):
        total = 0.0
        for micro in range(accumulation):
            loss = engine(*token_batch(step, micro, place.data.rank))
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / accumulation
        run.losses.append(sum(place.data.gather_objects(total)) / place.data.size)
        run.norms.append(engine.get_global_grad_norm())
        assert math.hypot(*engine.gradient_norms().values()) == pytest.approx(run.norms[-1], rel=1e-6)
    with wherry.gathered(engine.module):
        parameters = engine.module.named_parameters()
        run.weights = {name: joined(engine, name, p, place.tensor) for name, p in parameters}
    engine.close()
    return run


@cache
def resident(stage: int, data: int, tensor: int, accumulation: int) -> list[Run]:
    """Train with all states on the device."""
    config = settings(stage, accumulation, CLIP)
    return run_grid(
        lambda place: train(place, engine_of(cut_model(place), config, place), accumulation), data=data, tensor=tensor
    )


@pytest.mark.parametrize(
    ("stage", "data", "tensor", "accumulation"), [(0, 2, 2, 2), (1, 2, 2, 1), (2, 1, 4, 1), (3, 2, 2, 2)]
)
def test_tensor_times_data_equals_one_process(stage: int, data: int, tensor: int, accumulation: int) -> None:
    runs = resident(stage, data, tensor, accumulation)
    for run in runs:
        assert_close(run, oracle(data, accumulation))
        assert run.losses == runs[0].losses


@pytest.mark.parametrize(("row", "policy"), [("offload-0", "before_use"), ("infinity", "at_step")])
def test_tensor_parallelism_beside_host_and_disk(row: str, policy: str, tmp_path: Path) -> None:
    """Train on a device apart from the host, whose copies are late."""
    config = offload(row, tmp_path, policy)
    stage = config["zero_optimization"]["stage"]

    def body(place: Topology) -> Run:
        # Stores are named after the ranks of all axes.
        late = chaotic(place.data, Chaos(place.global_rank))
        mesh = replace(late, tensor=place.tensor, global_rank=place.global_rank, world_size=place.world_size)
        full = settings(stage, 2, CLIP, copy.deepcopy(config))
        return train(place, engine_of(cut_model(place), full, mesh), 2)

    for run, same in zip(run_grid(body, data=2, tensor=2), resident(stage, 2, 2, 2), strict=True):
        assert_equal(run, same)
    assert not list(tmp_path.iterdir())


def test_gradients_of_cut_parameters_are_whole() -> None:
    def body(place: Topology) -> dict[str, torch.Tensor]:
        engine = engine_of(cut_model(place), settings(2), place, optimizer=None)
        engine.backward(engine(*token_batch(0, 0, place.data.rank)))
        return {name: engine.gradients(name) for name, _ in engine.module.named_parameters()}

    ours = run_grid(body, data=2, tensor=2)
    model = copy.deepcopy(MODEL)
    for rank in range(2):
        (model(*token_batch(0, 0, rank)) / 2).backward()
    for name, parameter in model.named_parameters():
        for gradients in ours:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_an_mpu_joins_its_groups_whether_the_dim_of_a_cut_is_known_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train through DeepSpeed's initialize, and with the marks of old code, which name no dim."""
    from wherry.compat.deepspeed import engine as engines

    monkeypatch.setattr(engines, "init_distributed", lambda **_: None)  # ranks here are threads

    def body(place: Topology) -> Run:
        mine, config = cut_model(place), settings(3, 1, CLIP)
        optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-3, weight_decay=0.1)
        engine = engines.initialize(model=mine, optimizer=optimizer, mpu=Mpu(place), config=config)[0]
        assert (engine.dp_world_size, engine.topology.tensor.size, engine.train_batch_size()) == (2, 2, 4)
        run = train(place, engine)
        old = engine_of(cut_model(place, dim_is_known=False), settings(2, 1, CLIP), Mpu(place))
        train_step(old, 0, place.data.rank)
        assert old.get_global_grad_norm() == pytest.approx(run.norms[0], rel=1e-5)
        old.close()
        return run

    for run in run_grid(body, data=2, tensor=2):
        assert_close(run, oracle(2))


def test_an_mpu_whose_sizes_contradict_its_groups() -> None:
    class Wrong(Mpu):
        def get_model_parallel_world_size(self) -> int:
            return 4

    def body(place: Topology) -> None:
        with pytest.raises(WherryError, match=r"get_model_parallel_world_size\(\) is 4, and get_model_parallel_group"):
            topology.find(Wrong(place))

    run_grid(body, data=1, tensor=2)


def test_an_unmarked_parameter_that_differs_is_refused() -> None:
    def body(place: Topology) -> None:
        mine = copy.deepcopy(MODEL)
        with torch.no_grad():
            mine.blocks[1].norm.bias += place.tensor.rank
        wherry.initialize(model=mine, mesh=place, config=settings(1))

    with pytest.raises(WherryError, match=r"blocks\.1\.norm\.bias: this parameter differs between tensor-parallel"):
        run_grid(body, data=2, tensor=2)


def test_each_tensor_parallel_rank_checks_the_parameters_that_all_hold(caplog: pytest.LogCaptureFixture) -> None:
    """The first rank alone counts them for the norm; before an update in the backward every rank checks them."""

    def body(place: Topology) -> list[bool]:
        mine = cut_model(place)
        zero = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
        engine = engine_of(mine, settings(2, more=zero | {"wherry": {"update_policy": "in_backward"}}), place)
        for step in range(3):
            handle = mine.blocks[1].bias.register_hook(lambda grad: grad * float("nan")) if step == 1 else None
            train_step(engine, step, 0)
            if handle is not None:
                handle.remove()
        assert engine.skipped_steps == 1
        finite = [bool(parameter.isfinite().all()) for parameter in engine.module.parameters()]
        engine.close()
        return finite

    assert all(all(finite) for finite in run_grid(body, data=1, tensor=2))
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "step 2 skipped: its gradients are not finite, first in blocks.1"
    ]
