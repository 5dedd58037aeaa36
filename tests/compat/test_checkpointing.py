"""`deepspeed.checkpointing`: settings that scripts make for the process reach the engine, and the numbers stay."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.activations.model import late_links
from tests.engine.harness import LENGTH, WIDTH, adamw, make_model, settings, token_batch
from tests.parallel.handmade import Block, Model
from torch import nn

from wherry.activations import build
from wherry.build import initialize
from wherry.compat.deepspeed import checkpointing
from wherry.compat.deepspeed.engine import DeepSpeedEngine
from wherry.parallel.topology import Topology
from wherry.testing import run_grid
from wherry.testing.late import ChaosLink

BATCH = 2
CHECKPOINT = BATCH * LENGTH * WIDTH * 4


@pytest.fixture(autouse=True)
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ChaosLink]]:
    monkeypatch.setattr(checkpointing, "_asked", None)
    monkeypatch.setattr(checkpointing, "mpu", None)
    monkeypatch.setattr(checkpointing, "deepspeed_checkpointing_enabled", False)
    monkeypatch.setattr(build, "SMALLEST_PARTITIONED", 1)
    yield late_links(monkeypatch)
    checkpointing.get_cuda_rng_tracker().reset()


class Checkpointed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpointing.checkpoint(self.counted, x)

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


def train(place: Topology, source: Model, given: dict[str, Any]) -> tuple[list[float], int, int, dict[str, Any]]:
    model = copy.deepcopy(source)
    model.cut(place.tensor)
    config = checkpointing.laid_over(
        checkpointing.configs.load(settings(3, more={"activation_checkpointing": given} if given else {}))
    )
    engine, *_ = initialize(
        model=model, optimizer=adamw(model.parameters()), mesh=place, config=config, engine_class=DeepSpeedEngine
    )
    losses = []
    for step in range(2):
        loss = engine(*token_batch(step, 0, place.data.rank, BATCH))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    gathered = place.tensor.traffic.bytes["all_gather"]
    calls = sum(getattr(block, "calls", 0) for block in model.blocks)
    block = engine.config["activation_checkpointing"]
    engine.close()
    return losses, gathered // 2, calls, block


def test_what_is_configured_reaches_the_engine(links: list[ChaosLink]) -> None:
    source = make_model(Model)
    assert isinstance(source, Model)
    plain = run_grid(lambda place: train(place, source, {}), data=2, tensor=2)
    own = copy.deepcopy(source)
    for block in own.blocks:
        block.__class__ = Checkpointed
    assert not checkpointing.is_configured() and checkpointing.PARTITION_ACTIVATIONS is False
    checkpointing.configure(partition_activations=True)
    assert checkpointing.is_configured() and checkpointing.PARTITION_ACTIVATIONS is True
    cut = run_grid(lambda place: train(place, own, {"profile": True}), data=2, tensor=2)
    blocks = len(own.blocks)
    for (losses, gathered, calls, block), (expected, *_) in zip(cut, plain, strict=True):
        assert losses == expected
        # Each checkpoint, of the model's own making only; and each is run twice in each of two steps.
        assert (gathered, calls) == (blocks * CHECKPOINT, 2 * 2 * blocks)
        assert block["policy"] == "none" and block["profile"]
    assert not links
    checkpointing.configure(checkpoint_in_cpu=True, partition_activations=False)
    with_config = run_grid(
        lambda place: train(place, own, {"partition_activations": True, "offload_min_bytes": 1}), data=2, tensor=2
    )
    for (losses, gathered, calls, _), (expected, *_) in zip(with_config, plain, strict=True):
        assert losses == expected
        assert (gathered, calls) == (0, 2 * 2 * blocks)
    assert [link.bytes_down for link in links] == [2 * blocks * CHECKPOINT] * 4


def test_the_config_that_configure_is_given_counts() -> None:
    checkpointing.configure(
        deepspeed_config={"activation_checkpointing": {"cpu_checkpointing": True, "profile": True}}, profile=False
    )
    block = checkpointing.laid_over(checkpointing.configs.load({})).activation_checkpointing
    assert (block.cpu_checkpointing, block.profile, block.resolved_policy()) == (True, False, "none")
    own = {"activation_checkpointing": {"policy": "recompute"}}
    assert checkpointing.laid_over(checkpointing.configs.load(own)).activation_checkpointing.policy == "recompute"


def test_what_scripts_set_themselves_counts_until_configure() -> None:
    with pytest.raises(AssertionError, match="number of layers"):
        checkpointing.configure(partition_activations=True, contiguous_checkpointing=True)
    assert not checkpointing.is_configured() and not checkpointing.PARTITION_ACTIVATIONS
    saved = {name: getattr(checkpointing, name) for name in checkpointing._KEYS.values()}
    assert saved["num_layers"] is None and not checkpointing.deepspeed_checkpointing_enabled
    try:
        checkpointing.CPU_CHECKPOINT = True
        block = checkpointing.laid_over(checkpointing.configs.load({})).activation_checkpointing
        assert block.cpu_checkpointing and block.resolved_policy() == "none"
        checkpointing.configure(contiguous_checkpointing=True, partition_activations=True, num_checkpoints=3)
        assert checkpointing.num_layers == 3 and not checkpointing.CPU_CHECKPOINT
        assert checkpointing.deepspeed_checkpointing_enabled
        checkpointing.configure(contiguous_checkpointing=True, partition_activations=True, checkpoint_in_cpu=True)
    finally:
        for name in checkpointing._KEYS.values():
            vars(checkpointing).pop(name, None)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_checkpoint_takes_and_gives_every_kind_of_value(on_host: bool) -> None:
    """Tensors without gradients, none at all, other values and containers, by position and by name."""
    checkpointing.configure(checkpoint_in_cpu=on_host)

    def part(x: torch.Tensor, mask: Any, *, scale: torch.Tensor, rest: Any) -> tuple[Any, ...]:
        kept = x if mask is None else x * mask
        return kept * scale + rest["offset"][0], mask, (None, True, rest)

    scale = torch.linspace(1, 2, 4).requires_grad_()
    rest = {"offset": [torch.ones(4, requires_grad=True), 2.5]}
    for mask in (None, torch.tensor([True, False, True, True]), torch.tensor([0.0, 1, 1, 0])):
        for call in (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint):
            found, expected = [], []
            for results, run in ((found, lambda *a, call=call, **k: call(part, *a, **k)), (expected, part)):
                x = torch.linspace(-1, 1, 4).requires_grad_()
                y, given, others = run(x, mask, scale=scale, rest=rest)
                assert given is mask and others[:2] == (None, True) and others[2]["offset"][1] == 2.5
                results += [y.detach(), *torch.autograd.grad(y.sum(), [x, scale, rest["offset"][0]])]
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    outputs: list[Any] = []
    x = torch.ones(4, requires_grad=True)
    y, flag = checkpointing.CheckpointFunction.apply(lambda x, flag: (x * 2, flag), outputs, x, True)
    assert flag is True and outputs[0] is y and torch.autograd.grad(y.sum(), x)[0].tolist() == [2.0] * 4


@pytest.mark.parametrize("on_host", [False, True])
def test_a_recomputation_draws_the_same_again(on_host: bool) -> None:
    """Dropout from the default generator and from a named state of the tracker, inside and outside checkpoints."""
    layer = nn.Linear(8, 8)

    def part(x: torch.Tensor) -> torch.Tensor:
        x = torch.dropout(layer(x), 0.5, True)
        with checkpointing.get_cuda_rng_tracker().fork():
            return torch.dropout(layer(x), 0.5, True)

    def run(call: Any) -> tuple[torch.Tensor, ...]:
        checkpointing.model_parallel_cuda_manual_seed(3)
        x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
        y = call(part, call(part, x))
        gradients = torch.autograd.grad(y.square().sum(), [x, layer.weight])
        with checkpointing.get_cuda_rng_tracker().fork():
            after = torch.rand(3)
        return (y.detach(), *gradients, after, torch.rand(3))

    checkpointing.configure(checkpoint_in_cpu=on_host)
    for one, other in zip(run(lambda f, x: f(x)), run(checkpointing.checkpoint), strict=True):
        assert torch.equal(one, other)


def test_model_parallel_ranks_draw_apart_where_they_must() -> None:
    """And alike elsewhere."""

    def drawn(rank: int) -> tuple[list[float], list[float]]:
        checkpointing.configure(type("mpu", (), {"get_model_parallel_rank": staticmethod(lambda: rank)}))
        checkpointing.model_parallel_cuda_manual_seed(3)
        with checkpointing.get_cuda_rng_tracker().fork():
            apart = torch.rand(3).tolist()
        return torch.rand(3).tolist(), apart

    (alike, first), (same, second) = drawn(0), drawn(1)
    assert alike == same and first != second
