"""Optimizers that look at a parameter as a whole, against plain PyTorch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    VOCABULARY,
    TinyLM,
    assert_close,
    make_model,
    settings,
    token_batch,
    train_engine,
    train_plain,
    train_step,
)
from torch import nn

import wherry
from wherry.parallel.comm import SoloComm
from wherry.sharding.layout import lay_out
from wherry.testing import run_ranks
from wherry.testing.late import topology


class Rows(torch.optim.Optimizer):
    """One that nobody knows: every row goes by its own length, which it keeps a mean of.

    It has more than tensors: a count as Python has it, a factor, and a list of what the last two lengths were.
    """

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["lengths"] = torch.zeros(p.shape[0], 1) if p.dim() == 2 else torch.zeros_like(p)
                    state["mean"] = torch.zeros_like(p)
                    state |= {"step": 0, "factor": 1.0, "lasts": []}
                length = p.grad.norm(dim=1, keepdim=True) if p.dim() == 2 else p.grad.abs()
                state["step"] += 1
                state["factor"] *= 0.9
                state["lasts"] = [*state["lasts"][-1:], length]
                state["lengths"].lerp_(sum(state["lasts"]), 0.1)
                state["mean"].lerp_(p.grad, 0.5)
                rate = group["lr"] * (state["factor"] + 0.3 / math.sqrt(state["step"]))
                p.addcdiv_(state["mean"], state["lengths"] + 1e-3, value=-rate)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2, weight_decay=0.1),
    "lamb": lambda p: wherry.optim.Lamb(p, lr=1e-2, weight_decay=0.1),
    "rows": Rows,
}
VOUCHED = {"zero_allow_untested_optimizer": True}


def adafactor_of_transformers(parameters: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-2, relative_step=False, weight_decay=0.1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "transformers"])
def test_equal_to_plain_pytorch(name: str, stage: int, ranks: int) -> None:
    model, make = make_model(), OPTIMIZERS.get(name, adafactor_of_transformers)
    more = {"clip": 0.5, "accumulation": 2} if stage in (1, 3) else {}
    plain = train_plain(model, ranks=ranks, steps=5, optimizer=make, **more)
    ours = train_engine(model, stage=stage, ranks=ranks, steps=5, optimizer=make, config=VOUCHED, **more)
    assert_close(ours, plain, 2e-5)


def muon(parameters: Any) -> torch.optim.Optimizer:
    """AdamW has the embedding, which is the head too, and what is no matrix."""
    parameters = list(parameters)
    hidden = [p for p in parameters if p.dim() == 2 and p.shape[0] != VOCABULARY]
    rest = [p for p in parameters if p.dim() != 2 or p.shape[0] == VOCABULARY]
    groups = [{"params": hidden, "use_muon": True}, {"params": rest, "use_muon": False}]
    return wherry.optim.Muon(groups, lr=1e-2, adamw_lr=3e-3)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_muon_with_adamw_beside_it(stage: int, ranks: int) -> None:
    """Its products are in bf16: a sum over ranks in another order changes an update by a thousandth of itself."""
    model = make_model()
    more = {"clip": 0.5, "accumulation": 2} if stage in (1, 3) else {}
    plain = train_plain(model, ranks=ranks, steps=5, optimizer=muon, **more)
    ours = train_engine(model, stage=stage, ranks=ranks, steps=5, optimizer=muon, **more)
    assert_close(ours, plain, 5e-4)


def train_masters(model: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer], ranks: int, steps: int) -> Any:
    """The oracle in bf16: weights in fp32, and a model that is what they round to."""
    master, working = copy.deepcopy(model), copy.deepcopy(model).bfloat16()
    opt, losses = optimizer(master.parameters()), []
    for step in range(steps):
        summed = [torch.zeros_like(p) for p in master.parameters()]
        total = 0.0
        for rank in range(ranks):
            loss = working(*token_batch(step, 0, rank))
            gradients = torch.autograd.grad(loss, list(working.parameters()))
            torch._foreach_add_(summed, [g.float() for g in gradients], alpha=1 / ranks)
            total += float(loss.detach()) / ranks
        for parameter, gradient in zip(master.parameters(), summed, strict=True):
            parameter.grad = gradient
        opt.step()
        with torch.no_grad():
            torch._foreach_copy_(list(working.parameters()), list(master.parameters()))
        losses.append(total)
    return losses, {name: p.detach() for name, p in master.named_parameters()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", ["muon", "adafactor", "lamb"])
def test_masters_in_bf16(name: str, stage: int, ranks: int) -> None:
    make = OPTIMIZERS.get(name, muon)
    model = make_model()
    losses, weights = train_masters(model, make, ranks, 5)

    def masters(engine: Any) -> dict[str, torch.Tensor]:
        return {name: engine.states.full(name, "master") for name in weights}

    config = {"bf16": {"enabled": True}, "wherry": {"master": "whole"}}
    ours = train_engine(model, stage=stage, ranks=ranks, steps=5, optimizer=make, config=config, finish=masters)
    assert ours.losses == pytest.approx(losses, rel=5e-3)
    for key, expected in weights.items():
        moved = (expected - model.state_dict()[key]).norm()
        assert (ours.extra[key] - expected).norm() <= 0.1 * moved, key


@pytest.mark.parametrize("name", ["muon", "adafactor", "lamb"])
def test_weights_of_16_bits_without_masters(name: str) -> None:
    """Those of plain PyTorch on a model in bf16, whose states are in bf16 too."""
    make = OPTIMIZERS.get(name, muon)
    model = make_model().bfloat16()
    block = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    plain = train_plain(model, steps=5, optimizer=make)
    ours = train_engine(model, stage=1, steps=5, optimizer=make, config={"bf16": block})
    assert ours.losses == pytest.approx(plain.losses, rel=1e-2)
    for key, expected in plain.weights.items():
        if name == "muon" and (expected.dim() < 2 or "embed" in key):
            continue  # AdamW here is in fp32, and rounded once
        moved = (expected.float() - model.state_dict()[key].float()).norm()
        assert (ours.weights[key].float() - expected.float()).norm() <= 0.1 * moved, key


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_no_shard_cuts_a_parameter_and_loads_are_even(ranks: int) -> None:
    model = make_model(TinyLM)
    parameters = [(name, tuple(p.shape), 0) for name, p in model.named_parameters()]
    layout = lay_out(parameters, ranks, whole=[0])
    loads = [0] * ranks
    for slot in layout.slots:
        owners = [rank for rank in range(ranks) if layout.overlap(slot, rank) is not None]
        assert len(owners) == 1
        loads[owners[0]] += slot.numel
    assert sorted(slot.name for slot in layout.slots) == sorted(name for name, _, _ in parameters)
    assert [slot.start for slot in layout.slots] == sorted(slot.start for slot in layout.slots)
    largest = max(math.prod(shape) for _, shape, _ in parameters)
    assert layout.shard_numel <= max(largest, sum(loads) / ranks) * 1.5 + 128
    assert sum(stop - start for start, stop in layout.gaps()) == layout.numel - layout.payload


def test_element_wise_optimizers_keep_their_layout() -> None:
    shapes = [("w", (30, 30), 0), ("b", (30,), 1)]
    assert lay_out(shapes, 4) == lay_out(shapes, 4, whole=[2])
    assert lay_out(shapes, 1) == lay_out(shapes, 1, whole=[0])


class Counted(Rows):
    """It counts its steps in an attribute, and is slower from the third on."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.counts = {"steps": 0}

    def step(self, closure: Any = None) -> None:
        self.counts["steps"] += 1
        for group in self.param_groups:
            group["lr"] = 1e-2 if self.counts["steps"] < 3 else 1e-3
        super().step()


class Twice(wherry.optim.Lamb):
    """A user's own, of one that is known."""

    def step(self, closure: Any = None) -> None:
        super().step()
        super().step()


@pytest.mark.parametrize("cls", [Counted, Twice])
def test_a_user_s_own_class_runs_as_it_is_written(cls: Any) -> None:
    model = make_model()
    plain = train_plain(model, steps=5, optimizer=cls)
    with pytest.raises(wherry.WherryError, match="cannot be sharded"):
        train_engine(model, stage=2, steps=1, optimizer=cls)
    assert_close(train_engine(model, stage=2, steps=5, optimizer=cls, config=VOUCHED), plain, 2e-5)


def test_torch_s_own_muon_is_for_the_matrices_inside_alone() -> None:
    model = make_model()
    for made in (torch.optim.Muon, partial(torch.optim.Muon, lr=0.25, weight_decay=0.5)):
        engine, optimizer, *_ = wherry.initialize(model=make_model(), optimizer=made, config=settings(2))
        assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]
        engine.close()
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.25, 0.5)] * 2
    hidden = [p for name, p in model.named_parameters() if "blocks" in name]
    engine, *_ = wherry.initialize(model=model, optimizer=torch.optim.AdamW(hidden), config=settings(2))
    with pytest.raises(wherry.WherryError, match=r"embed.weight: the optimizer does not update a parameter"):
        engine.states.full("embed.weight", "master")
    engine.close()


def test_a_schedule_made_before_on_one_that_is_vouched_for() -> None:
    model = make_model()
    mine = Rows(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(mine, 1, gamma=0.5)
    engine = wherry.initialize(model=model, optimizer=mine, config=settings(2, more=VOUCHED))[0]
    for step in range(2):
        train_step(engine, step, 0)
        schedule.step()
    assert engine.get_lr() == pytest.approx([2.5e-3])
    engine.close()


@pytest.mark.parametrize("given", [True, 1])
def test_use_muon_may_be_a_number_after_a_load(given: Any) -> None:
    model = make_model()
    engine, optimizer, *_ = wherry.initialize(model=model, optimizer=muon(model.parameters()), config=settings(2))
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["use_muon"] = type(given)(group["use_muon"])
    optimizer.load_state_dict(saved)
    before = engine.states.full("blocks.0.mix.weight", "master")
    train_step(engine, 0, 0)
    assert not torch.equal(engine.states.full("blocks.0.mix.weight", "master"), before)
    engine.close()


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"amsgrad": True}, "amsgrad=True is not offered"),
        ({"adamw_lr": 1.0}, "adamw_lr is for all groups; in a group it is lr"),
    ],
)
def test_options_that_muon_cannot_follow(option: dict[str, Any], told: str) -> None:
    group = {"params": [nn.Parameter(torch.ones(3))], "use_muon": False, **option}
    with pytest.raises(wherry.WherryError, match=told):
        wherry.optim.Muon([group])


def test_one_that_nobody_has_vouched_for_is_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(wherry.WherryError, match=r"every parameter by itself.*zero_allow_untested_optimizer"):
        wherry.initialize(model=model, optimizer=Rows(model.parameters()), config={"train_batch_size": 1})


@pytest.mark.parametrize("block", [{"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}], ids=lambda b: next(iter(b)))
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_groups_of_ranks(name: str, block: dict[str, Any]) -> None:
    """That share out copies, of weights or of all states."""
    make = OPTIMIZERS.get(name, muon)
    model = make_model()
    plain = train_plain(model, ranks=4, steps=4, optimizer=make)
    ours = train_engine(model, stage=3, ranks=4, steps=4, optimizer=make, config={"zero_optimization": block})
    assert_close(ours, plain, 5e-4)


def test_a_matrix_that_tensor_parallel_ranks_have_cut_is_refused() -> None:
    def body(comm: Any) -> str:
        model = nn.Linear(8, 4)
        model.weight.tensor_model_parallel, model.weight.partition_dim = True, 0  # type: ignore[attr-defined]
        mesh = replace(topology(SoloComm()), tensor=comm)
        with pytest.raises(wherry.WherryError) as error:
            wherry.initialize(
                model=model, optimizer=torch.optim.Adafactor(model.parameters()), mesh=mesh, config=settings(1)
            )
        return str(error.value)

    for told in run_ranks(2, body):
        assert "weight: tensor-parallel ranks have cut it" in told and "without a tp axis" in told


def test_padding_that_costs_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def body(comm: Any) -> None:
        model = nn.Sequential(nn.Linear(2048, 1024, bias=False), nn.Linear(1024, 4, bias=False))
        wherry.initialize(model=model, optimizer=OPTIMIZERS["adafactor"](model.parameters()), mesh=comm, config={
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}})[0].close()  # fmt: skip

    run_ranks(4, body)
    [line] = [record.getMessage() for record in caplog.records if "whole parameters" in record.getMessage()]
    assert "300% more than its part" in line and "mics_shard_size" in line
