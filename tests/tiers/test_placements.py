"""States off the device give the bits of the same training without offload: the cases that tests/life.py lacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    Run,
    TinyLM,
    assert_equal,
    assert_near,
    assert_same,
    engine_of,
    make_model,
    settings,
    token_batch,
    train_engine,
    weights_of,
)
from tests.models import MODELS, D, Stack, vectors
from tests.tiers.rows import ROWS, offload
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import wherry
from wherry import native
from wherry.errors import WherryError
from wherry.parallel.comm import Comm, SoloComm
from wherry.parallel.topology import Topology
from wherry.testing.late import Chaos, ChaosLink, topology


def train(
    config: dict[str, Any],
    *,
    stage: int,
    seed: int | None = None,
    free: int | None = None,
    model: Callable[[], Any] = make_model,
    steps: int = 4,
    **how: Any,
) -> Run:
    """Train; with a `seed`, on a device apart from the host whose copies are late."""

    def place(comm: Comm) -> Topology:
        if seed is None:
            return topology(comm)
        chaos = Chaos(1000 * seed + comm.rank)
        return topology(comm, chaos, link=ChaosLink(chaos, free=free))

    return train_engine(model(), stage=stage, config=config, place=place, steps=steps, **how)


@pytest.mark.parametrize(("ratio", "policy", "ranks"), [(0.0, "before_use", 2), (0.4, "in_backward", 1)])
def test_part_of_the_state_stays_on_the_device(ratio: float, policy: str, ranks: int, tmp_path: Path) -> None:
    """On the device torch's AdamW updates, on the host the native kernel: near each other, and each as it is alone."""

    def tiers(engine: Any) -> dict[str, int]:
        held = {row.tier: row.bytes_actual for row in engine.memory() if row.state == "optimizer"}
        return {"device": 0, "host": 0} | held

    config = offload("offload-2", tmp_path, policy, optimizer={"ratio": ratio})
    run = train(config, stage=2, ranks=ranks, seed=4, finish=tiers)
    total = sum(run.extra.values())
    # To the size of a block: a third of the model.
    assert ratio * total <= run.extra["host"] <= (ratio + 0.34) * total
    assert_near(run.weights, train({}, stage=2, ranks=ranks).weights, 1e-6)


@pytest.mark.parametrize(
    ("row", "clip", "more", "chosen"),
    [
        ("offload-2", 0.0, {}, "before_use"),
        ("disk-2", 0.5, {}, "before_use"),
        ("infinity", 0.0, {"fp16": {"enabled": True, "initial_scale_power": 8}}, "before_use"),
        ("parameters-only", 0.0, {}, "at_step"),
    ],
)
def test_the_policy_that_is_chosen_by_itself(row: str, clip: float, more: Any, chosen: str, tmp_path: Path) -> None:
    config = settings(ROWS[row][0], 1, clip, offload(row, tmp_path, "auto", **more))
    engine = engine_of(make_model(), config, topology(SoloComm(), Chaos(1)))
    engine.backward(engine(*token_batch(0, 0, 0)))
    engine.gradients("norm.weight")  # which in_backward has used by now
    engine.step()
    pending = any(unit.pending for unit in engine.units)
    engine.close()
    assert ("before_use" if pending else "at_step") == chosen


# Each letter is a call, and blanks are for the reader: (b)ackward; (s)tep; (z)ero_grad; (g)enerator, a backward through
# the model to one before it, which is updated; and (x), a backward whose last gradient raises an error.
LOOPS = {"GAN": "bbsz gz bbsz gz", "skipped batch": "bsz bz bsz", "two backwards": "bbsz bbsz", "error": "bsz xz bsz"}


def run_loop(loop: str, net: Any, backward: Any, step: Any, zero_grad: Any) -> torch.Tensor:
    """Run a loop's calls, and return the generator's weight."""
    generator = make_model(functools.partial(torch.nn.Linear, D, D))

    def raise_error(_: torch.Tensor) -> None:
        raise ArithmeticError

    for number, call in enumerate(loop.replace(" ", "")):
        x, y = vectors(number, 0, 0)
        if call == "g":
            backward(net(generator(x), y))
            generator.weight.data -= generator.weight.grad
            generator.zero_grad()
        elif call == "b":
            backward(net(x, y))
        elif call == "x":
            x.requires_grad_().register_hook(raise_error)
            with pytest.raises(ArithmeticError):
                backward(net(x, y))
        else:
            (step if call == "s" else zero_grad)()
    return generator.weight


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize("row", ["offload-2", "disk-0", "disk-3-parameters", "infinity"])
@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_trains_as_plain_torch_does_on_every_tier(loop: str, row: str, tmp_path: Path) -> None:
    """Products with a power of two are exact, so that even a fused multiply-add gives the bits of SGD."""
    sgd = functools.partial(torch.optim.SGD, lr=2**-4)
    plain, ours = make_model(Stack), make_model(Stack)
    optimizer = sgd(plain.parameters())
    oracle = run_loop(LOOPS[loop], plain, torch.Tensor.backward, optimizer.step, optimizer.zero_grad)
    chaos = Chaos(8)
    config = settings(ROWS[row][0], more=offload(row, tmp_path, "auto"))
    engine = engine_of(ours, config, topology(SoloComm(), chaos, link=ChaosLink(chaos)), sgd)
    assert torch.equal(run_loop(LOOPS[loop], engine, engine.backward, engine.step, engine.zero_grad), oracle)
    assert_same(weights_of(engine), dict(plain.named_parameters()))
    engine.close()


def test_the_cores_of_updates_beside_training_are_those_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares, init = [], native.Pool.__init__
    monkeypatch.setattr(
        native.Pool, "__init__", lambda pool, **how: shares.append(how.get("share")) or init(pool, **how)
    )
    config = offload("offload-2", tmp_path, "before_use", optimizer={"cpuadam_cores_perc": 0.01})
    engine_of(make_model(), settings(2, more=config)).close()
    assert 0.01 in shares


def partly_frozen() -> Any:
    model = make_model()
    model.blocks[1].requires_grad_(False)
    return model


OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.95), eps=1e-6, maximize=True),
}


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize(
    ("name", "row", "seed", "ratio", "tiers"),
    [
        ("Adagrad", "offload-2", 6, 1.0, {"host"}),
        ("SGD", "disk-2", None, 0.4, {"device", "disk"}),
        ("AdamW", "infinity", 7, 1.0, {"disk"}),
    ],
)
def test_optimizers_of_torch_with_groups_a_schedule_and_frozen_weights(
    name: str, row: str, seed: int | None, ratio: float, tiers: set[str], tmp_path: Path
) -> None:
    """In fp16 with skipped steps, clipping and accumulation; also where a part of the state stays in memory."""

    def grouped(parameters: Any) -> torch.optim.Optimizer:
        trained = [p for p in parameters if p.requires_grad]
        matrices = {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.3}
        rest = {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 1e-3}
        return OTHERS[name]([matrices, rest])

    def look(engine: Any) -> Any:
        tiers = {row.tier for row in engine.memory() if row.state == "optimizer" and row.bytes_actual}
        return engine.skipped_steps, engine.get_lr(), tiers

    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}}
    how: dict[str, Any] = {"ranks": 2, "accumulation": 2, "clip": 0.3, "steps": 6, "stage": ROWS[row][0]}
    how |= {"model": partly_frozen, "optimizer": grouped, "finish": look}
    how["schedule"] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    oracle = train(fp16, **how)
    run = train(offload(row, tmp_path, "before_use", optimizer={"ratio": ratio}, **fp16), seed=seed, **how)
    assert_equal(run, oracle)
    skipped, rates, _ = oracle.extra
    assert 0 < skipped < 6
    assert run.extra == (skipped, rates, tiers)
    assert torch.equal(run.weights["blocks.1.up.weight"], make_model().half().blocks[1].up.weight)


@pytest.mark.parametrize(("row", "policy", "free"), [("offload-2", "in_backward", 0), ("infinity", "before_use", None)])
def test_windows_that_grow_are_summed_as_long_ones_are(row: str, policy: str, free: int | None, tmp_path: Path) -> None:
    """One micro-batch is kept as it came, in bf16; the sum of several is in fp32, on the device or on the host.

    Buffers that are made under torch.inference_mode are used in training, and weights edited, later.
    """

    def grow(engine: Any, step: int) -> None:
        if step == 0:
            with torch.inference_mode():
                engine(*token_batch(9, 0, 0))
        else:
            engine.set_train_batch_size((3 if step == 1 else 1) * 2 * engine.world_size)
        if step == 2:
            with wherry.gathered(weight := engine.module.blocks[1].mix.weight):
                weight.data.mul_(0.5)

    more: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}}
    how: dict[str, Any] = {"stage": ROWS[row][0], "ranks": 2, "before_step": grow}
    oracle = train({"bf16": {"enabled": True}} | more, **how)
    assert_equal(train(offload(row, tmp_path, policy, "bf16", **more), **how, seed=6, free=free), oracle)


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize(("row", "ranks"), [("offload-3-parameters", 1), ("infinity", 2)])
def test_a_block_in_two_reentrant_checkpoints(row: str, ranks: int, tmp_path: Path) -> None:
    """Its gradients arrive twice in one backward."""
    twice = functools.partial(make_model, MODELS["checkpointed twice, reentrant"])
    how: dict[str, Any] = {"stage": 3, "ranks": ranks, "model": twice, "batch": vectors}
    assert_equal(train(offload(row, tmp_path, "in_backward"), seed=7, **how), train({}, **how))


class ComesLate(TinyLM):
    """A block outside checkpoints that one comes back to: its update may have begun when more arrives."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.blocks[2], self.embed(ids), use_reentrant=True)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@pytest.mark.usefixtures("every_flat_alone")
def test_a_gradient_after_the_update_is_an_error(tmp_path: Path) -> None:
    how: dict[str, Any] = {"stage": 2, "model": functools.partial(make_model, ComesLate)}
    with pytest.raises(WherryError, match=r"blocks\.2: a gradient came after .* \"before_use\""):
        train(offload("offload-2", tmp_path, "in_backward"), **how)
    assert_equal(train(offload("offload-2", tmp_path, "before_use"), **how), train({}, **how))
