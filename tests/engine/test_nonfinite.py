"""Steps whose gradients are inf or NaN: not taken, said aloud, and an error where skipping them leads nowhere."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import TinyLM, adamw, make_model, settings, token_batch, train_plain
from tests.tiers.rows import ROWS
from tests.tiers.test_placements import offload
from torch import nn

import wherry
from wherry.errors import NonFiniteError, WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.testing.late import Chaos, topology
from wherry.update import optimizer_states
from wherry.update.loss_scale import LossScaleError

NAN = float("nan")
ALL = ("at_step", "before_use", "in_backward", "delayed")
# Where gradients are lost: with the loss, or in the backward of the second of three blocks.
LOSS, BLOCK = "loss", "block"


class Spoilt(TinyLM):
    """Gradients that are NaN from the loss on, or from the second block on."""

    where = ""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        handle = self.blocks[1].register_forward_hook(self._lose) if self.where == BLOCK else None
        loss = super().forward(ids, targets)
        if handle is not None:
            handle.remove()
        return loss * NAN if self.where == LOSS else loss

    @staticmethod
    def _lose(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: grad * NAN)


def train(
    bad: dict[int, str],
    config: dict[str, Any],
    *,
    stage: int,
    ranks: int = 1,
    accumulation: int = 1,
    steps: int = 5,
    apart: bool = False,
    each: Callable[[Any, int], None] = lambda engine, step: None,
) -> dict[str, torch.Tensor]:
    """Train where the `bad` steps' first micro-batch is spoilt, on the last rank alone. The weights at the end."""
    model = make_model(Spoilt)

    def body(comm: Comm) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        mesh = topology(comm, Chaos(comm.rank)) if apart else comm
        given = settings(stage, accumulation, more=copy.deepcopy(config))
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=given, mesh=mesh)
        try:
            for step in range(steps):
                for micro in range(accumulation):
                    spoilt = step in bad and micro == 0 and comm.rank == ranks - 1
                    mine.where = bad[step] if spoilt else ""
                    engine.backward(engine(*token_batch(step, micro, comm.rank)))
                    engine.step()
                if comm.rank == 0:
                    each(engine, step)
            engine.settle()
            assert engine.skipped_steps == 0 or engine.global_steps == steps
            with wherry.gathered(mine):
                return {name: p.detach().clone() for name, p in mine.named_parameters()}
        finally:
            engine.close()

    return run_ranks(ranks, body)[0]


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def plain(ranks: int, accumulation: int = 1) -> dict[str, torch.Tensor]:
    """Plain PyTorch that is never given the third of five steps."""
    steps = [0, 1, 3, 4]
    run = train_plain(
        make_model(Spoilt),
        ranks=ranks,
        accumulation=accumulation,
        steps=len(steps),
        batch=lambda step, micro, rank: token_batch(steps[step], micro, rank),
    )
    return run.weights


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "gradients are not finite" in record.getMessage()]


def close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_of_nan_is_left_out_and_told_once(
    stage: int, policy: str, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """In fp32, without clipping, one rank's batch alone: weights and moments are those without that step."""
    seen: list[tuple[bool, bool, int]] = []

    def each(engine: Any, step: int) -> None:
        seen.append((engine.was_step_applied(), engine.optimizer.overflow, engine.skipped_steps))

    own = {"wherry": {"update_policy": policy}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    ours = train({2: LOSS}, own, stage=stage, ranks=ranks, each=each)
    assert [applied for applied, _, _ in seen] == [True, True, False, True, True]
    assert all(overflow is not applied for applied, overflow, _ in seen)
    assert [skipped for _, _, skipped in seen] == [0, 0, 1, 1, 1]
    if policy != "delayed":
        close(ours, plain(ranks))
    assert all(weight.isfinite().all() for weight in ours.values())
    where = "nan on rank 1" if ranks == 2 else "nan"
    assert lines(caplog) == [
        "step 3 skipped: its gradients are not finite, first in blocks.2; no loss scale; last loss " + where
    ]


@pytest.mark.parametrize("policy", ["at_step", "before_use", "in_backward"])
@pytest.mark.parametrize("row", ["offload-0", "offload-3-parameters", "disk-2", "infinity"])
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (2, 2)])
def test_on_a_device_apart_from_the_host(
    row: str, policy: str, ranks: int, accumulation: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = offload(row, tmp_path, policy)
    how: dict[str, Any] = {"stage": ROWS[row][0], "ranks": ranks, "accumulation": accumulation}
    close(train({2: LOSS}, config, **how, apart=True), plain(ranks, accumulation))
    assert len(lines(caplog)) == 1


@pytest.mark.parametrize("policy", ["at_step", "before_use", "delayed"])
def test_the_unit_that_had_it_first_is_named(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """The loss is fine, and so are the gradients of the block that comes first in the backward."""
    for stage, ranks in ((0, 1), (0, 2), (2, 2), (3, 2)):
        caplog.clear()
        train({2: BLOCK}, {"wherry": {"update_policy": policy}}, stage=stage, ranks=ranks)
        (line,) = lines(caplog)
        assert "not finite, first in blocks.1; no loss scale; last loss 1" in line, line


class Branch(nn.Module):
    """A block that one of the ranks does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        for block in self.blocks[:used]:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_miss_gradients_of_such_a_step_keep_to_the_others(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_states, "BUCKET_NUMEL", 1)
    model = make_model(Branch)
    own = {"update_policy": "in_backward", "unit_classes": ["Sequential"]}
    config = settings(stage, more={"wherry": own, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}})

    def body(comm: Comm) -> list[torch.Tensor]:
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=config, mesh=comm)
        for step in range(4):
            loss = engine(torch.ones(2, 8), 2 + comm.rank)
            engine.backward(loss * NAN if step == 1 else loss)
            engine.step()
        with wherry.gathered(mine):
            weights = [p.detach().clone() for p in mine.parameters()]
        engine.close()
        return weights

    first, second = run_ranks(2, body)
    for one, other in zip(first, second, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


@pytest.mark.parametrize(("stage", "ranks"), [(2, 1), (1, 2), (3, 2)])
def test_what_the_backward_has_updated_by_then_is_told(
    stage: int, ranks: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """in_backward cannot take back a block whose gradients were fine; those that were not are left alone."""
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


@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 4.0}}])
def test_ten_in_a_row_are_an_error(more: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    weights: list[dict[str, torch.Tensor]] = []
    bad = dict.fromkeys([*range(9), *range(10, 30)], LOSS)

    def each(engine: Any, step: int) -> None:
        if step >= 9:
            weights.append(weights_of(engine))

    with pytest.raises(NonFiniteError) as told:
        train(bad, more, stage=2, ranks=2, steps=30, each=each)
    # Nine are let pass, before a good step and after it.
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
        assert part in str(told.value), (part, str(told.value))


def test_the_first_is_an_error_if_asked_for(caplog: pytest.LogCaptureFixture) -> None:
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
def test_ignored_it_is_what_plain_pytorch_makes_of_it(config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    after = train({2: LOSS}, config, stage=1, ranks=2)
    assert all(weight.isnan().all() for name, weight in after.items() if name.startswith("blocks."))
    (line,) = lines(caplog)  # of three such steps
    assert line.startswith("step 3: ") and "the update is made all the same" in line


def test_what_was_updated_on_the_device_is_an_error(tmp_path: Path) -> None:
    """There nothing waits for a gradient before in_backward uses it, and so its weights are lost."""
    config = offload("parameters-only", tmp_path, "in_backward")
    with pytest.raises(WherryError, match=r"has updated .* on the device .* go back to a checkpoint") as told:
        train({2: LOSS}, config, stage=3, apart=True)
    assert isinstance(told.value, NonFiniteError)


def test_each_skip_of_fp16_is_one_line_with_the_scale(caplog: pytest.LogCaptureFixture) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 2, "hysteresis": 1, "min_loss_scale": 1}
    with pytest.raises(LossScaleError):
        train(dict.fromkeys(range(1, 6), LOSS), {"fp16": fp16}, stage=2, ranks=2)
    told = lines(caplog)
    assert [line.partition("; ")[2] for line in told] == [
        f"loss scale {scale}; last loss nan on rank 1" for scale in ("4 -> 2", "2 -> 1", "1 -> 1")
    ]
    assert all(len(line) < 160 for line in told)


def test_the_loss_that_is_told_is_the_users(caplog: pytest.LogCaptureFixture) -> None:
    """Without the loss scale."""
    fp16 = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}
    losses: list[float] = []
    model = make_model()
    engine, *_ = wherry.initialize(
        model=model, optimizer=adamw(model.parameters()), config=settings(2, more={"fp16": fp16})
    )
    loss = engine(*token_batch(0, 0, 0))
    engine.backward(loss)
    losses.append(float(loss.detach()))
    engine.step()
    (line,) = lines(caplog)
    assert line.endswith(f"last loss {losses[0]:g}") and "loss scale 1.09951e+12 -> 5.49756e+11" in line
    assert caplog.records[-1].levelno == logging.WARNING
    # A backward of one's own does not tell the engine what it is of.
    engine(*token_batch(1, 0, 0)).mul(NAN).backward()
    engine.step()
    assert lines(caplog)[-1].endswith("-> 2.74878e+11")
    engine.close()
