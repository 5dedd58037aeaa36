"""States off the device give the bits of the same training without offload: what the lives of tests/life.py lack."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import Run, TinyLM, adamw, assert_equal, make_model, settings, token_batch, train_engine
from tests.tiers.rows import ROWS, offload
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import wherry
from wherry import native
from wherry.errors import WherryError
from wherry.parallel.comm import Comm, SoloComm
from wherry.parallel.topology import Topology
from wherry.testing.late import Chaos, ChaosLink, topology

STEPS = 4


def train(
    config: dict[str, Any],
    *,
    stage: int,
    seed: int | None = None,
    free: int | None = None,
    model: Callable[[], Any] = make_model,
    steps: int = STEPS,
    **how: Any,
) -> Run:
    """Losses, norms and final weights; with a `seed` under chaos."""

    def place(comm: Comm) -> Topology:
        if seed is None:
            return topology(comm)
        chaos = Chaos(1000 * seed + comm.rank)
        return topology(comm, chaos, link=ChaosLink(chaos, free=free))

    return train_engine(model(), stage=stage, config=config, place=place, steps=steps, **how)


@functools.cache
def plain(
    row: str, ranks: int, precision: str, *, seed: int | None = None, model: Callable[[], Any] = make_model
) -> Run:
    """The same stage without offload. Where the optimizer stays on a device that is not the host, so does its."""
    stage, optimizer, _ = ROWS[row]
    config = {} if precision == "fp32" else {precision: {"enabled": True}}
    seed = seed if optimizer == "none" else None
    return train(config, stage=stage, ranks=ranks, seed=seed, model=model)


@pytest.mark.parametrize(("row", "policy"), [("offload-3-parameters", "at_step"), ("infinity", "before_use")])
def test_fp16_with_skipped_steps(row: str, policy: str, tmp_path: Path) -> None:
    """A loss scale that overflows at first: skipped steps change nothing anywhere."""
    stage = ROWS[row][0]
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 17, "hysteresis": 1}}
    oracle = train(fp16, stage=stage, ranks=2, steps=6, finish=lambda engine: engine.skipped_steps)
    assert 0 < oracle.extra < 6
    assert_equal(train(offload(row, tmp_path, policy, **fp16), stage=stage, ranks=2, seed=3, steps=6), oracle)


@pytest.mark.parametrize(
    ("ratio", "policy", "ranks"),
    [(0.0, "before_use", 2), (0.4, "in_backward", 1), (0.4, "at_step", 2), (0.7, "in_backward", 2)],
)
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
    oracle = plain("offload-2", ranks, "fp32")
    for name, weight in oracle.weights.items():
        torch.testing.assert_close(run.weights[name], weight, rtol=0, atol=1e-6)


OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda groups: torch.optim.Adam(groups, lr=3e-3, betas=(0.8, 0.95), eps=1e-6),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=3e-3, maximize=True),
}


def test_the_policy_that_is_chosen_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Noted(native.Pool):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            threads.append(self.threads)

    monkeypatch.setattr(native, "Pool", Noted)
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    for row, clip, more, chosen, own in (
        ("offload-2", 0.0, {}, "in_backward", []),
        ("offload-2", 0.5, {}, "before_use", []),
        ("infinity", 0.0, fp16, "before_use", []),
        ("parameters-only", 0.0, {}, "at_step", []),
        ("offload-2", 0.5, {"optimizer": {"cpuadam_cores_perc": 0.01}}, "before_use", [1]),
    ):
        threads: list[int] = []  # of pools of the engine's own, which has one only if its cores are given
        model, config = make_model(), settings(ROWS[row][0], 1, clip, offload(row, tmp_path, "auto", **more))
        place = topology(SoloComm(), Chaos(1))
        engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config, mesh=place)
        engine.backward(engine(*token_batch(0, 0, 0)))
        try:
            engine.gradients("norm.weight")
            updated = False
        except WherryError:
            updated = True
        engine.step()
        pending = any(unit.pending for unit in engine.units)
        engine.close()
        assert ("in_backward" if updated else "before_use" if pending else "at_step") == chosen
        assert threads == own


def partly_frozen() -> Any:
    model = make_model()
    model.blocks[1].requires_grad_(False)
    return model


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize(
    ("name", "row", "seed", "ratio", "tiers"),
    [
        ("Adam", "offload-2", 5, 1.0, {"host"}),
        ("Adagrad", "infinity", 6, 1.0, {"disk"}),
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
    how: dict[str, Any] = {"ranks": 2, "accumulation": 2, "clip": 0.3, "steps": 6}
    how |= {"model": partly_frozen, "optimizer": grouped, "finish": look}
    how["schedule"] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    stage = ROWS[row][0]
    oracle = train(fp16, stage=stage, **how)
    config = offload(row, tmp_path, "before_use", optimizer={"ratio": ratio}, **fp16)
    run = train(config, stage=stage, seed=seed, **how)
    assert_equal(run, oracle)
    skipped, rates, _ = oracle.extra
    assert 0 < skipped < 6
    assert run.extra == (skipped, rates, tiers)
    assert torch.equal(run.weights["blocks.1.up.weight"], make_model().half().blocks[1].up.weight)


@pytest.mark.parametrize(
    ("row", "policy", "free"),
    [("offload-2", "in_backward", 0), ("offload-2", "before_use", None), ("infinity", "before_use", 0)],
)
def test_windows_that_grow_are_summed_as_long_ones_are(row: str, policy: str, free: int | None, tmp_path: Path) -> None:
    """One micro-batch is kept as it came, in bf16; the sum of several is in fp32, on the device or on the host."""

    def grow(engine: Any, step: int) -> None:
        if step in (1, 2):
            engine.set_train_batch_size((3 if step == 1 else 1) * 2 * engine.world_size)

    more: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}}
    how: dict[str, Any] = {"stage": ROWS[row][0], "ranks": 2, "before_step": grow, "steps": 4}
    oracle = train({"bf16": {"enabled": True}} | more, **how)
    assert_equal(train(offload(row, tmp_path, policy, "bf16", **more), **how, seed=6, free=free), oracle)


class Recurring(TinyLM):
    """Blocks that reentrant checkpoints come back to: their gradients arrive twice in one backward."""

    again = (1, 0)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in (*self.blocks, *(self.blocks[index] for index in self.again)):
            x = checkpoint(block, x, use_reentrant=True)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize(("row", "ranks"), [("offload-1", 2), ("offload-3-parameters", 1), ("infinity", 2)])
def test_a_block_in_two_reentrant_checkpoints(row: str, ranks: int, tmp_path: Path) -> None:
    recurring = functools.partial(make_model, Recurring)
    oracle = plain(row, ranks, "fp32", model=recurring)
    run = train(offload(row, tmp_path, "in_backward"), stage=ROWS[row][0], ranks=ranks, seed=7, model=recurring)
    assert_equal(run, oracle)


class ComesLate(TinyLM):
    """A block outside checkpoints that one comes back to: its update may have begun when more arrives."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.blocks[2], self.embed(ids), use_reentrant=True)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@pytest.mark.usefixtures("every_flat_alone")
def test_a_gradient_after_the_update_is_an_error(tmp_path: Path) -> None:
    late = functools.partial(make_model, ComesLate)
    with pytest.raises(WherryError, match=r"blocks\.2: a gradient came after .* \"before_use\""):
        train(offload("offload-2", tmp_path, "in_backward"), stage=2, model=late)
    run = train(offload("offload-2", tmp_path, "before_use"), stage=2, model=late)
    assert_equal(run, plain("offload-2", 1, "fp32", model=late))


class PartlyUsed(TinyLM):
    """With a layer that no forward goes through; it belongs to the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(4, 4)


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize(("row", "ranks"), [("offload-0", 1), ("offload-3-parameters", 2)])
def test_an_unused_layer_holds_up_no_update(row: str, ranks: int, tmp_path: Path) -> None:
    partly = functools.partial(make_model, PartlyUsed)

    def look(engine: Any, step: int) -> None:
        waiting = {unit.name for unit in engine.units if unit.pending}
        assert waiting == (set() if step == 0 else {"root", "blocks.0", "blocks.1", "blocks.2"})

    oracle = plain(row, ranks, "fp32", model=partly)
    config = offload(row, tmp_path, "before_use")
    run = train(config, stage=ROWS[row][0], ranks=ranks, seed=8, model=partly, before_step=look)
    assert_equal(run, oracle)
    assert torch.equal(run.weights["unused.weight"], partly().unused.weight)


@pytest.mark.parametrize("row", ["offload-3-parameters", "infinity"])
def test_a_run_may_begin_with_an_evaluation(row: str, tmp_path: Path) -> None:
    """Buffers that are made under torch.inference_mode are used in training, and edited, later."""

    def look(engine: Any, step: int) -> None:
        if step == 0 and evaluates:
            with torch.inference_mode():
                engine(*token_batch(9, 0, 0))
        if step == 2:
            with wherry.gathered(weight := engine.module.blocks[1].mix.weight):
                weight.data.mul_(0.5)

    evaluates = False
    oracle = train({}, stage=3, before_step=look)
    evaluates = True
    config = offload(row, tmp_path, "before_use")
    assert_equal(train(config, stage=3, seed=9, before_step=look), oracle)
