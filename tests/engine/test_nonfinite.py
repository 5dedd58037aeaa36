"""Steps whose gradients are inf or NaN are skipped and logged, and raise where skipping cannot help."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    TinyLM,
    assert_near,
    assert_same,
    engine_of,
    make_model,
    on_ranks,
    settings,
    token_batch,
    train_plain,
    weights_of,
)
from tests.tiers.rows import ROWS
from tests.tiers.test_placements import offload
from torch import nn

from wherry.errors import NonFiniteError, WherryError
from wherry.testing.late import Chaos, topology
from wherry.update import optimizer_states
from wherry.update.loss_scale import LossScaleError

NAN = float("nan")
ALL = ("at_step", "before_use", "in_backward", "delayed")
# Gradients become NaN with the loss, or in the backward of the second of three blocks.
LOSS, BLOCK = "loss", "block"


class Spoiled(TinyLM):
    """A model whose gradients are NaN from the loss on, or from the second block on."""

    where = ""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        handle = self.blocks[1].register_forward_hook(self._spoil) if self.where == BLOCK else None
        loss = super().forward(ids, targets)
        if handle is not None:
            handle.remove()
        return loss * NAN if self.where == LOSS else loss

    @staticmethod
    def _spoil(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: grad * NAN)


def train(
    bad: dict[int, str],
    config: dict[str, Any],
    *,
    stage: int,
    ranks: int = 1,
    accumulation: int = 1,
    steps: int = 5,
    late: bool = False,
    each: Callable[[Any, int], None] = lambda engine, step: None,
) -> dict[str, torch.Tensor]:
    """Train with the first micro-batch of the `bad` steps spoiled on the last rank; return the weights.

    With `late`, the device has memory of its own, and its copies are late.
    """

    def use(engine: Any) -> dict[str, torch.Tensor]:
        rank = engine.comm.rank
        for step in range(steps):
            for micro in range(accumulation):
                spoiled = step in bad and micro == 0 and rank == ranks - 1
                engine.module.where = bad[step] if spoiled else ""
                engine.backward(engine(*token_batch(step, micro, rank)))
                engine.step()
            if rank == 0:
                each(engine, step)
        engine.settle()
        assert engine.skipped_steps == 0 or engine.global_steps == steps
        return weights_of(engine)

    return on_ranks(
        use,
        ranks=ranks,
        stage=stage,
        accumulation=accumulation,
        model=make_model(Spoiled),
        config=config,
        place=lambda comm: topology(comm, Chaos(comm.rank)) if late else comm,
    )[0]


@functools.cache
def plain(ranks: int, accumulation: int = 1) -> dict[str, torch.Tensor]:
    """Train by plain PyTorch without the third of five steps."""
    steps = [0, 1, 3, 4]

    def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, ...]:
        return token_batch(steps[step], micro, rank)

    return train_plain(make_model(Spoiled), ranks=ranks, accumulation=accumulation, steps=4, batch=batch).weights


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "gradients are not finite" in record.getMessage()]


@pytest.mark.parametrize(
    ("stage", "policy", "ranks"),
    [
        (0, "at_step", 2),
        (3, "at_step", 2),
        (1, "before_use", 2),
        (2, "before_use", 1),
        (0, "in_backward", 1),
        (2, "in_backward", 2),
        (3, "in_backward", 2),
        (1, "delayed", 1),
        (3, "delayed", 2),
    ],
)
def test_a_step_of_nan_is_skipped_and_logged_once(
    stage: int, policy: str, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Spoil one rank's batch in fp32 without clipping: weights equal those of training without that step."""
    seen: list[tuple[bool, bool, int]] = []

    def each(engine: Any, step: int) -> None:
        seen.append((engine.was_step_applied(), engine.optimizer.overflow, engine.skipped_steps))

    own = {"wherry": {"update_policy": policy}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    ours = train({2: LOSS}, own, stage=stage, ranks=ranks, each=each)
    assert [applied for applied, _, _ in seen] == [True, True, False, True, True]
    assert all(overflow is not applied for applied, overflow, _ in seen)
    assert [skipped for _, _, skipped in seen] == [0, 0, 1, 1, 1]
    if policy != "delayed":
        assert_near(ours, plain(ranks), 2e-5)
    assert all(weight.isfinite().all() for weight in ours.values())
    where = "nan on rank 1" if ranks == 2 else "nan"
    assert lines(caplog) == [
        "step 3 skipped: its gradients are not finite, first in blocks.2; no loss scale; last loss " + where
    ]


@pytest.mark.parametrize(
    ("row", "policy", "ranks"),
    [
        ("offload-0", "before_use", 1),
        ("offload-3-parameters", "in_backward", 2),
        ("disk-2", "at_step", 2),
        ("disk-2", "in_backward", 1),
        ("infinity", "before_use", 2),
    ],
)
def test_on_a_device_with_memory_of_its_own(
    row: str, policy: str, ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    how: dict[str, Any] = {"stage": ROWS[row][0], "ranks": ranks, "accumulation": ranks}
    ours = train({2: LOSS}, offload(row, tmp_path, policy), **how, late=True)
    assert_near(ours, plain(ranks, ranks), 2e-5)
    assert len(lines(caplog)) == 1


@pytest.mark.parametrize(
    ("policy", "stage", "ranks"), [("at_step", 0, 2), ("before_use", 3, 2), ("delayed", 0, 1), ("delayed", 2, 2)]
)
def test_the_first_unit_with_nan_is_named(
    policy: str, stage: int, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Spoil the second block: the loss and the gradients of the block before it in backward are finite."""
    train({2: BLOCK}, {"wherry": {"update_policy": policy}}, stage=stage, ranks=ranks, steps=4)
    (line,) = lines(caplog)
    assert "not finite, first in blocks.1; no loss scale; last loss 1" in line, line


class Branch(nn.Module):
    """Blocks of which ranks use different numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        for block in self.blocks[:used]:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_without_gradients_of_such_a_step_agree_with_the_others(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_states, "BUCKET_NUMEL", 1)
    own = {"update_policy": "in_backward", "unit_classes": ["Sequential"]}
    config = {"wherry": own, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}

    def use(engine: Any) -> dict[str, torch.Tensor]:
        for step in range(4):
            loss = engine(torch.ones(2, 8), 2 + engine.comm.rank)
            engine.backward(loss * NAN if step == 1 else loss)
            engine.step()
        return weights_of(engine)

    first, second = on_ranks(use, stage=stage, model=make_model(Branch), config=config)
    assert all(weight.isfinite().all() for weight in first.values())
    assert_same(first, second)


@pytest.mark.parametrize(("stage", "ranks"), [(2, 1), (1, 2), (3, 2)])
def test_updates_made_in_the_backward_before_the_nan_are_logged(
    stage: int, ranks: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expect in_backward to keep updates of blocks with finite gradients, and to skip the others."""
    monkeypatch.setattr(optimizer_states, "BUCKET_NUMEL", 1)
    seen: list[dict[str, torch.Tensor]] = []
    own = {"wherry": {"update_policy": "in_backward"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}

    def each(engine: Any, step: int) -> None:
        if ranks == 1:
            seen.append(weights_of(engine))

    after = train({2: BLOCK}, own, stage=stage, ranks=ranks, each=each)
    assert all(weight.isfinite().all() for weight in after.values())
    (line,) = lines(caplog)
    parts = "2 of 8 parts of the model on 2 ranks" if ranks == 2 else "1 of 4 parts of the model"
    assert "first in blocks.1; no loss scale; last loss 1" in line and parts in line, line
    if seen:
        changed = {name for name, weight in seen[2].items() if not torch.equal(weight, seen[1][name])}
        assert changed == {name for name in after if name.startswith("blocks.2.")}


@pytest.mark.parametrize("more", [{}, {"fp16": {"enabled": True, "loss_scale": 4.0}}])
def test_ten_in_a_row_are_an_error(more: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    weights: list[dict[str, torch.Tensor]] = []
    bad = dict.fromkeys([*range(9), *range(10, 30)], LOSS)

    def each(engine: Any, step: int) -> None:
        if step >= 9:
            weights.append(weights_of(engine))

    with pytest.raises(NonFiniteError) as raised:
        train(bad, more, stage=2, ranks=2, steps=30, each=each)
    # Nine in a row are skipped, before a good step and after it.
    assert len(lines(caplog)) == 18 and len(weights) == 10
    assert all(torch.equal(weights[-1][name], weight) for name, weight in weights[0].items())
    for part in (
        "step 20 skipped",
        "first in blocks.2",
        "loss scale 4 -> 4" if "fp16" in more else "no loss scale",
        "last loss nan on rank 1",
        "The 10 steps since step 11 were skipped alike",
        "learning rate below 0.003",
        "batches",
    ):
        assert part in str(raised.value), (part, str(raised.value))


def test_the_first_raises_with_nonfinite_raise(caplog: pytest.LogCaptureFixture) -> None:
    for policy in ALL:
        with pytest.raises(NonFiniteError, match=r"step 3 skipped: .* first in blocks\.2; .* look for inf or NaN"):
            train({2: LOSS}, {"wherry": {"nonfinite": "raise", "update_policy": policy}}, stage=1)
    assert not lines(caplog)


@pytest.mark.parametrize(
    "config",
    [
        {"wherry": {"nonfinite": "ignore"}},
        {"wherry": {"nonfinite": "ignore", "update_policy": "in_backward"}},
        {"bf16": {"enabled": True, "check_grad_overflow": False}},
    ],
)
def test_ignored_nan_is_applied_as_in_plain_pytorch(config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    after = train({2: LOSS}, config, stage=1, ranks=2)
    assert all(weight.isnan().all() for name, weight in after.items() if name.startswith("blocks."))
    (line,) = lines(caplog)  # for three such steps
    assert line.startswith("step 3: ") and "the update is made all the same" in line


def test_nan_in_updates_on_the_device_is_an_error(tmp_path: Path) -> None:
    """Raise where in_backward uses a gradient on the device unchecked, which spoils the weights."""
    config = offload("parameters-only", tmp_path, "in_backward")
    with pytest.raises(WherryError, match=r"has updated .* on the device .* go back to a checkpoint") as raised:
        train({2: LOSS}, config, stage=3, late=True)
    assert isinstance(raised.value, NonFiniteError)


def test_each_skip_of_fp16_is_one_line_with_the_scale(caplog: pytest.LogCaptureFixture) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 2, "hysteresis": 1, "min_loss_scale": 1}
    with pytest.raises(LossScaleError):
        train(dict.fromkeys(range(1, 6), LOSS), {"fp16": fp16}, stage=2, ranks=2)
    logged = lines(caplog)
    assert [line.partition("; ")[2] for line in logged] == [
        f"loss scale {scale}; last loss nan on rank 1" for scale in ("4 -> 2", "2 -> 1", "1 -> 1")
    ]
    assert all(len(line) < 160 for line in logged)


def test_the_logged_loss_is_unscaled(caplog: pytest.LogCaptureFixture) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}
    engine = engine_of(make_model(), settings(2, more={"fp16": fp16}))
    loss = engine(*token_batch(0, 0, 0))
    engine.backward(loss)
    engine.step()
    (line,) = lines(caplog)
    assert line.endswith(f"last loss {float(loss.detach()):g}") and "loss scale 1.09951e+12 -> 5.49756e+11" in line
    assert caplog.records[-1].levelno == logging.WARNING
    # A plain backward does not give the engine the loss.
    engine(*token_batch(1, 0, 0)).mul(NAN).backward()
    engine.step()
    assert lines(caplog)[-1].endswith("-> 2.74878e+11")
    engine.close()
