"""Optimizers whose update of an element needs the whole parameter, against plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    VOCABULARY,
    TinyLM,
    assert_close,
    engine_of,
    make_model,
    masters_of,
    settings,
    train_engine,
    train_masters,
    train_plain,
)
from torch import nn

import wherry
from wherry.parallel.comm import SoloComm
from wherry.sharding.layout import lay_out
from wherry.testing import run_ranks
from wherry.testing.late import topology
from wherry.update.rules import like


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
                    state |= {"step": 0, "factor": 1.0, "lasts": [], "first": None}
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


def muon(parameters: Any) -> torch.optim.Optimizer:
    """Give AdamW the embedding, which is the head too, and all that is no matrix."""
    parameters = list(parameters)
    hidden = [p for p in parameters if p.dim() == 2 and p.shape[0] != VOCABULARY]
    rest = [p for p in parameters if p.dim() != 2 or p.shape[0] == VOCABULARY]
    groups = [{"params": hidden, "use_muon": True}, {"params": rest, "use_muon": False}]
    return wherry.optim.Muon(groups, lr=1e-2, adamw_lr=3e-3)


MAKERS = {**OPTIMIZERS, "muon": muon}


@pytest.mark.parametrize(
    ("name", "stage", "ranks", "zero"),
    [
        ("adafactor", 1, 4, {}),
        ("adafactor", 3, 4, {"mics_shard_size": 2}),
        ("lamb", 2, 2, {}),
        ("lamb", 3, 4, {}),
        ("rows", 0, 2, {}),
        ("rows", 2, 4, {}),
        ("muon", 1, 2, {}),
        ("muon", 2, 4, {}),
        ("muon", 3, 4, {"zero_hpz_partition_size": 2}),
    ],
)
def test_equal_to_plain_pytorch(name: str, stage: int, ranks: int, zero: dict[str, int]) -> None:
    common: dict[str, Any] = {"ranks": ranks, "steps": 4, "optimizer": MAKERS[name]}
    common |= {"clip": 0.5, "accumulation": 2} if stage in (1, 3) else {}
    ours = train_engine(make_model(), stage=stage, config=VOUCHED | {"zero_optimization": zero}, **common)
    # Products of Muon are in bf16: a sum over ranks in another order changes an update by a thousandth of itself.
    assert_close(ours, train_plain(make_model(), **common), 5e-4 if name == "muon" else 2e-5)


@pytest.mark.parametrize(("name", "stage", "ranks"), [("muon", 3, 2), ("adafactor", 0, 1), ("lamb", 2, 2)])
def test_masters_in_bf16(name: str, stage: int, ranks: int) -> None:
    model = make_model()
    common: dict[str, Any] = {"ranks": ranks, "steps": 5, "optimizer": MAKERS[name]}
    oracle = train_masters(model, torch.bfloat16, **common)
    config = {"bf16": {"enabled": True}, "wherry": {"master": "whole"}}
    ours = train_engine(model, stage=stage, finish=masters_of, config=config, **common)
    assert ours.losses == pytest.approx(oracle.losses, rel=5e-3)
    for key, expected in oracle.extra.items():
        moved = (expected - model.state_dict()[key]).norm()
        assert (ours.extra[key] - expected).norm() <= 0.1 * moved, key


@pytest.mark.parametrize("name", ["muon", "adafactor", "lamb"])
def test_weights_of_16_bits_without_masters(name: str) -> None:
    """Compare with plain PyTorch on a model in bf16, whose states are in bf16 too."""
    model, common = make_model().bfloat16(), {"steps": 5, "optimizer": MAKERS[name]}
    block = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    plain = train_plain(model, **common)  # type: ignore[arg-type]
    ours = train_engine(model, stage=1, config={"bf16": block}, **common)  # type: ignore[arg-type]
    for key, expected in plain.weights.items():
        if name == "muon" and (expected.dim() < 2 or "embed" in key):
            continue  # AdamW here is in fp32, and rounded once
        moved = (expected.float() - model.state_dict()[key].float()).norm()
        assert (ours.weights[key].float() - expected.float()).norm() <= 0.1 * moved, key


class Twice(wherry.optim.Lamb):
    """A user's subclass of a known optimizer."""

    def step(self, closure: Any = None) -> None:
        super().step()
        super().step()


def test_a_subclass_of_a_known_optimizer_makes_its_own_steps() -> None:
    plain = train_plain(make_model(), steps=4, optimizer=Twice)
    assert_close(train_engine(make_model(), stage=2, steps=4, optimizer=Twice, config=VOUCHED), plain, 2e-5)


@pytest.mark.parametrize("ranks", [1, 3, 8])
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


def test_an_unknown_optimizer_is_refused_unless_the_config_allows_it() -> None:
    with pytest.raises(wherry.WherryError, match=r"every parameter by itself.*zero_allow_untested_optimizer"):
        train_engine(make_model(), stage=2, steps=1, optimizer=Rows)


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


def test_a_tensor_parallel_matrix_is_refused() -> None:
    def body(comm: Any) -> str:
        model = nn.Linear(8, 4)
        model.weight.tensor_model_parallel, model.weight.partition_dim = True, 0  # type: ignore[attr-defined]
        mesh = replace(topology(SoloComm()), tensor=comm)
        with pytest.raises(wherry.WherryError) as error:
            engine_of(model, settings(1), mesh, torch.optim.Adafactor)
        return str(error.value)

    for message in run_ranks(2, body):
        assert "weight: tensor-parallel ranks have cut it" in message and "without a tp axis" in message


def test_an_optimizer_without_its_constructor_steps_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch asks groups for "capturable" there, which Adafactor's have not, unless a constructor was called."""
    stream = SimpleNamespace(is_capturing=lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.ones(4, 4)
    group = torch.optim.Adafactor([weight]).param_groups[0]
    like(torch.optim.Adafactor, [group]).step()
    assert not torch.equal(weight, torch.ones(4, 4))
