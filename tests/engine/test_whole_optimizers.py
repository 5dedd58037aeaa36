"""Optimizers whose update of an element needs the whole parameter, against plain PyTorch."""

from __future__ import annotations

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
    masters_of,
    on_ranks,
    settings,
    train_engine,
    train_masters,
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
    """An optimizer that the engine does not know, which scales every row by a mean of its gradient's lengths.

    Its state is more than tensors: a count, a factor, and a list of the last two lengths.
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


def muon(parameters: Any) -> torch.optim.Optimizer:
    """Give AdamW the embedding, which is the head too, and all that is no matrix."""
    parameters = list(parameters)
    hidden = [p for p in parameters if p.dim() == 2 and p.shape[0] != VOCABULARY]
    rest = [p for p in parameters if p.dim() != 2 or p.shape[0] == VOCABULARY]
    groups = [{"params": hidden, "use_muon": True}, {"params": rest, "use_muon": False}]
    return wherry.optim.Muon(groups, lr=1e-2, adamw_lr=3e-3)


MAKERS = {**OPTIMIZERS, "muon": muon, "transformers": adafactor_of_transformers}


@pytest.mark.parametrize(
    ("name", "stage", "ranks"),
    [
        ("adafactor", 1, 4),
        ("adafactor", 3, 2),
        ("lamb", 2, 2),
        ("lamb", 3, 4),
        ("rows", 0, 2),
        ("rows", 2, 4),
        ("rows", 3, 1),
        ("muon", 0, 2),
        ("muon", 1, 2),
        ("muon", 2, 4),
        ("muon", 3, 4),
        pytest.param("transformers", 3, 2, marks=pytest.mark.long),
    ],
)
def test_equal_to_plain_pytorch(name: str, stage: int, ranks: int) -> None:
    model = make_model()
    more = {"clip": 0.5, "accumulation": 2} if stage in (1, 3) else {}
    plain = train_plain(model, ranks=ranks, steps=4, optimizer=MAKERS[name], **more)
    ours = train_engine(model, stage=stage, ranks=ranks, steps=4, optimizer=MAKERS[name], config=VOUCHED, **more)
    # Products of Muon are in bf16: a sum over ranks in another order changes an update by a thousandth of itself.
    assert_close(ours, plain, 5e-4 if name == "muon" else 2e-5)


@pytest.mark.parametrize(
    ("name", "stage", "ranks"), [("muon", 3, 2), ("muon", 0, 1), ("adafactor", 3, 2), ("lamb", 2, 2)]
)
def test_masters_in_bf16(name: str, stage: int, ranks: int) -> None:
    model = make_model()
    oracle = train_masters(model, torch.bfloat16, ranks=ranks, steps=5, optimizer=MAKERS[name])
    config = {"bf16": {"enabled": True}, "wherry": {"master": "whole"}}
    common: dict[str, Any] = {"steps": 5, "optimizer": MAKERS[name], "config": config}
    ours = train_engine(model, stage=stage, ranks=ranks, finish=masters_of, **common)
    assert ours.losses == pytest.approx(oracle.losses, rel=5e-3)
    for key, expected in oracle.extra.items():
        moved = (expected - model.state_dict()[key]).norm()
        assert (ours.extra[key] - expected).norm() <= 0.1 * moved, key


@pytest.mark.parametrize("name", ["muon", "adafactor", "lamb"])
def test_weights_of_16_bits_without_masters(name: str) -> None:
    """Compare with plain PyTorch on a model in bf16, whose states are in bf16 too."""
    make = MAKERS[name]
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
def test_no_shard_cuts_a_parameter_and_shards_are_even(ranks: int) -> None:
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
    """An optimizer that counts its steps in an attribute, and lowers its rate at the third."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.counts = {"steps": 0}

    def step(self, closure: Any = None) -> None:
        self.counts["steps"] += 1
        for group in self.param_groups:
            group["lr"] = 1e-2 if self.counts["steps"] < 3 else 1e-3
        super().step()


class Twice(wherry.optim.Lamb):
    """A user's subclass of a known optimizer."""

    def step(self, closure: Any = None) -> None:
        super().step()
        super().step()


@pytest.mark.parametrize("cls", [Counted, Twice])
def test_a_user_s_own_class_runs_unchanged(cls: Any) -> None:
    model = make_model()
    plain = train_plain(model, steps=5, optimizer=cls)
    with pytest.raises(wherry.WherryError, match="cannot be sharded"):
        train_engine(model, stage=2, steps=1, optimizer=cls)
    assert_close(train_engine(model, stage=2, steps=5, optimizer=cls, config=VOUCHED), plain, 2e-5)


def test_torch_s_muon_is_used_for_the_inner_matrices_alone() -> None:
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


def test_a_schedule_of_an_unknown_optimizer_moves_the_rate() -> None:
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
    ("option", "message"),
    [
        ({"amsgrad": True}, "amsgrad=True is not offered"),
        ({"adamw_lr": 1.0}, "adamw_lr is for all groups; in a group it is lr"),
    ],
)
def test_options_that_muon_does_not_have_are_refused(option: dict[str, Any], message: str) -> None:
    group = {"params": [nn.Parameter(torch.ones(3))], "use_muon": False, **option}
    with pytest.raises(wherry.WherryError, match=message):
        wherry.optim.Muon([group])


def test_an_unknown_optimizer_is_refused_unless_the_config_allows_it() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(wherry.WherryError, match=r"every parameter by itself.*zero_allow_untested_optimizer"):
        wherry.initialize(model=model, optimizer=Rows(model.parameters()), config={"train_batch_size": 1})


@pytest.mark.parametrize(("name", "key"), [("adafactor", "mics_shard_size"), ("muon", "zero_hpz_partition_size")])
def test_replicas_of_states_or_of_weights(name: str, key: str) -> None:
    model = make_model()
    plain = train_plain(model, ranks=4, steps=3, optimizer=MAKERS[name])
    config = {"zero_optimization": {key: 2}}
    assert_close(train_engine(model, stage=3, ranks=4, steps=3, optimizer=MAKERS[name], config=config), plain, 5e-4)


def test_a_tensor_parallel_matrix_is_refused() -> None:
    def body(comm: Any) -> str:
        model = nn.Linear(8, 4)
        model.weight.tensor_model_parallel, model.weight.partition_dim = True, 0  # type: ignore[attr-defined]
        mesh = replace(topology(SoloComm()), tensor=comm)
        with pytest.raises(wherry.WherryError) as error:
            wherry.initialize(
                model=model, optimizer=torch.optim.Adafactor(model.parameters()), mesh=mesh, config=settings(1)
            )
        return str(error.value)

    for message in run_ranks(2, body):
        assert "weight: tensor-parallel ranks have cut it" in message and "without a tp axis" in message


def test_costly_padding_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2048, 1024, bias=False), nn.Linear(1024, 4, bias=False))
    on_ranks(lambda engine: None, ranks=4, stage=2, model=model, optimizer=OPTIMIZERS["adafactor"])
    [line] = [record.getMessage() for record in caplog.records if "whole parameters" in record.getMessage()]
    assert "300% more than its part" in line and "mics_shard_size" in line
