"""Steps whose gradients are inf or NaN are skipped and logged, and raise where skipping cannot help."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    Run,
    assert_near,
    assert_same,
    engine_of,
    make_model,
    on_ranks,
    settings,
    token_batch,
    train_engine,
    train_plain,
    weights_of,
)
from tests.models import Choosing, sgd, vectors
from tests.tiers.rows import ROWS, offload
from torch import nn

from wherry.errors import NonFiniteError
from wherry.testing.late import Chaos, topology

NAN = float("nan")
Loss = Callable[..., torch.Tensor]
ALL = ("at_step", "before_use", "in_backward", "delayed")


def by_loss(model: Any, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return model(ids, targets) * NAN


def by_block(model: Any, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Spoil the gradients in the backward of the second of three blocks."""

    def spoil(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: grad * NAN)

    handle = model.blocks[1].register_forward_hook(spoil)
    loss = model(ids, targets)
    handle.remove()
    return loss


def train(bad: dict[int, Loss], config: dict[str, Any], *, ranks: int = 1, late: bool = False, **how: Any) -> Run:
    """Train with the first micro-batch of the `bad` steps spoiled on the last rank.

    With `late`, the device has memory of its own, and its copies are late.
    """

    def batch(step: int, micro: int, rank: int) -> Any:
        inputs = token_batch(step, micro, rank)
        if step in bad and micro == 0 and rank == ranks - 1:
            return lambda model: bad[step](model, *inputs)
        return inputs

    how = {"place": lambda comm: topology(comm, Chaos(comm.rank)) if late else comm, "steps": 5, **how}
    return train_engine(make_model(), ranks=ranks, batch=batch, config=config, **how)


@functools.cache
def plain(ranks: int, accumulation: int = 1) -> dict[str, torch.Tensor]:
    """Train by plain PyTorch without the third of five steps."""
    steps = [0, 1, 3, 4]

    def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, ...]:
        return token_batch(steps[step], micro, rank)

    return train_plain(make_model(), ranks=ranks, accumulation=accumulation, steps=4, batch=batch).weights


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "gradients are not finite" in record.getMessage()]


@pytest.mark.parametrize(
    ("stage", "policy", "ranks", "where"),
    [
        (0, "at_step", 2, by_loss),
        (3, "at_step", 2, by_block),
        (1, "before_use", 2, by_loss),
        (2, "before_use", 1, by_block),
        (0, "in_backward", 1, by_loss),
        (3, "in_backward", 2, by_loss),
        (1, "delayed", 1, by_loss),
        (3, "delayed", 2, by_block),
    ],
)
def test_a_step_of_nan_is_skipped_and_logged_once(
    stage: int, policy: str, ranks: int, where: Loss, caplog: pytest.LogCaptureFixture
) -> None:
    """Spoil one rank's batch in fp32 without clipping: weights equal those of training without that step."""

    def counts(engine: Any, step: int) -> tuple[Any, ...]:
        assert engine.global_steps == step + 1
        return engine.was_step_applied(), engine.optimizer.overflow, engine.skipped_steps

    own = {"wherry": {"update_policy": policy}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    run = train({2: where}, own, stage=stage, ranks=ranks, each_step=counts)
    applied, skipped = (True, False, 0), (False, True, 1)
    assert run.extra == [applied, applied, skipped, (True, False, 1), (True, False, 1)]
    if policy != "delayed":
        assert_near(run.weights, plain(ranks), 2e-5)
    assert all(weight.isfinite().all() for weight in run.weights.values())
    (line,) = lines(caplog)
    first, loss = ("blocks.1", "1") if where == by_block else ("blocks.2", "nan on rank 1" if ranks == 2 else "nan")
    assert line.startswith(
        f"step 3 skipped: its gradients are not finite, first in {first}; no loss scale; last loss {loss}"
    )


@pytest.mark.parametrize(
    ("row", "policy", "ranks"),
    [("offload-3-parameters", "in_backward", 2), ("disk-2", "at_step", 2), ("infinity", "before_use", 2)],
)
def test_on_a_device_with_memory_of_its_own(
    row: str, policy: str, ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    how: dict[str, Any] = {"stage": ROWS[row][0], "ranks": ranks, "accumulation": ranks}
    run = train({2: by_loss}, offload(row, tmp_path, policy), **how, late=True)
    assert_near(run.weights, plain(ranks, ranks), 2e-5)
    assert len(lines(caplog)) == 1


@pytest.mark.parametrize(
    ("policy", "more"), [*((policy, {}) for policy in ALL), ("at_step", {"fp16": {"enabled": True, "loss_scale": 4.0}})]
)
def test_the_first_raises_with_nonfinite_raise(
    policy: str, more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NonFiniteError, match=r"step 3 skipped: .* first in blocks\.2; .* look for inf or NaN"):
        train({2: by_loss}, {"wherry": {"nonfinite": "raise", "update_policy": policy}} | more, stage=1)
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
    after = train({2: by_loss}, config, stage=1, ranks=2).weights
    assert all(weight.isnan().all() for name, weight in after.items() if name.startswith("blocks."))
    (line,) = lines(caplog)  # for three such steps
    assert line.startswith("step 3: ") and "the update is made all the same" in line


def test_nan_in_updates_on_the_device_is_an_error(tmp_path: Path) -> None:
    """Raise where in_backward uses a gradient on the device unchecked, which spoils the weights."""
    config = offload("parameters-only", tmp_path, "in_backward")
    with pytest.raises(NonFiniteError, match=r"has updated .* on the device .* go back to a checkpoint"):
        train({2: by_loss}, config, stage=3, late=True)


def test_ranks_without_gradients_of_such_a_step_agree_with_the_others(small_sizes: Any) -> None:
    """Let ranks use different blocks."""
    small_sizes(bucket=1)
    config = {"wherry": {"update_policy": "in_backward"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}

    def use(engine: Any) -> dict[str, torch.Tensor]:
        for step in range(4):
            loss = engine(*vectors(step, 0, engine.comm.rank))
            engine.backward(loss * NAN if step == 1 else loss)
            engine.step()
        return weights_of(engine)

    first, second = on_ranks(use, model=make_model(Choosing), config=config)
    assert all(weight.isfinite().all() for weight in first.values())
    assert_same(first, second)


def test_updates_made_in_the_backward_before_the_nan_are_kept_and_logged(
    caplog: pytest.LogCaptureFixture, small_sizes: Any
) -> None:
    small_sizes(bucket=1)
    own = {"wherry": {"update_policy": "in_backward"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    run = train({2: by_block}, own, stage=2, each_step=lambda engine, step: weights_of(engine))
    assert all(weight.isfinite().all() for weight in run.weights.values())
    (line,) = lines(caplog)
    assert "first in blocks.1; no loss scale; last loss 1" in line and "1 of 4 parts of the model" in line, line
    changed = {name for name, weight in run.extra[2].items() if not torch.equal(weight, run.extra[1][name])}
    assert changed == {name for name in run.weights if name.startswith("blocks.2.")}


@pytest.mark.parametrize("more", [{}, {"fp16": {"enabled": True, "loss_scale": 4.0}}])
def test_ten_in_a_row_are_an_error(more: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    weights: list[dict[str, torch.Tensor]] = []
    bad = dict.fromkeys([*range(9), *range(10, 30)], by_loss)

    def each(engine: Any, step: int) -> None:
        if step >= 9 and engine.comm.rank == 0:
            weights.append(weights_of(engine))

    with pytest.raises(NonFiniteError) as raised:
        train(bad, more, stage=2, ranks=2, steps=30, each_step=each)
    # Nine in a row are skipped, before a good step and after it.
    assert len(lines(caplog)) == 18 and len(weights) == 10
    assert all(torch.equal(weights[-1][name], weight) for name, weight in weights[0].items())
    scale = "loss scale 4 -> 4" if "fp16" in more else "no loss scale"
    alike = "The 10 steps since step 11 were skipped alike"
    for part in ("step 20 skipped", scale, alike, "learning rate below 0.003"):
        assert part in str(raised.value), (part, str(raised.value))


def test_the_logged_loss_is_unscaled(caplog: pytest.LogCaptureFixture) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}
    engine = engine_of(make_model(), settings(2, more={"fp16": fp16}))
    loss = engine(*token_batch(0, 0, 0))
    engine.backward(loss)
    engine.step()
    # A plain backward does not give the engine the loss.
    engine(*token_batch(1, 0, 0)).mul(NAN).backward()
    engine.step()
    first, second = lines(caplog)
    assert first.endswith(f"loss scale 1.09951e+12 -> 5.49756e+11; last loss {float(loss.detach()):g}")
    assert second.endswith("-> 2.74878e+11")
    engine.close()


def test_an_infinite_gradient_is_clipped_as_torch_clips_it() -> None:
    def first(model: Any) -> torch.Tensor:
        return getattr(model, "module", model)[0](torch.tensor([1.0, float("inf"), 1.0])).sum()

    model = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1))
    common: dict[str, Any] = {"steps": 1, "clip": 1.0, "optimizer": sgd, "batch": lambda *_: first}
    plain = train_plain(model, **common)
    run = train_engine(model, stage=2, config={"wherry": {"nonfinite": "ignore"}}, **common)
    assert run.norms == plain.norms == [float("inf")]
    assert_near(run.weights, plain.weights)
