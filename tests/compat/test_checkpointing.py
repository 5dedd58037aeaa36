"""`deepspeed.checkpointing`: settings that scripts make for the process reach the config, and the numbers stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from wherry.compat.deepspeed import checkpointing


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checkpointing, "_settings", None)
    monkeypatch.setattr(checkpointing, "mpu", None)
    yield
    checkpointing.get_cuda_rng_tracker().reset()


def test_what_is_configured_reaches_the_engine() -> None:
    """Lay the settings of the last call over the block of an engine's config."""
    with pytest.raises(AssertionError, match="number of layers"):
        checkpointing.configure(partition_activations=True, contiguous_checkpointing=True)
    config = {"activation_checkpointing": {"cpu_checkpointing": True, "profile": True}}
    for arguments, given, expected in (
        (None, {"profile": True}, {"policy": None, "profile": True}),
        ({"partition_activations": True}, {"profile": True}, {"partition_activations": True, "profile": True}),
        (
            {"checkpoint_in_cpu": True, "partition_activations": False},
            {"partition_activations": True},
            {"partition_activations": False, "cpu_checkpointing": True},
        ),
        ({"deepspeed_config": config, "profile": False}, {}, {"cpu_checkpointing": True, "profile": False}),
        ({"deepspeed_config": config}, {"policy": "recompute"}, {"policy": "recompute", "cpu_checkpointing": True}),
    ):
        if arguments is not None:
            checkpointing.configure(**arguments)
        assert checkpointing.is_configured() == (arguments is not None)
        block = checkpointing.laid_over(checkpointing.configs.load({"activation_checkpointing": given}))
        values = block.activation_checkpointing.model_dump()
        assert values | expected == values
        assert arguments is None or "policy" in given or values["policy"] == "none"
    with pytest.raises(NotImplementedError, match="set_num_layers is not part of Wherry"):
        checkpointing.set_num_layers(2)


def test_checkpoints_of_older_scripts() -> None:
    outputs: list[Any] = []
    x = torch.ones(4, requires_grad=True)
    y, flag = checkpointing.CheckpointFunction.apply(lambda x, flag: (x * 2, flag), outputs, x, True)
    assert flag is True and outputs[0] is y and torch.autograd.grad(y.sum(), x)[0].tolist() == [2.0] * 4


@pytest.mark.parametrize("on_host", [False, True])
def test_a_recomputation_draws_the_same_again(on_host: bool) -> None:
    """Draw dropout from the default generator and from a named state of the tracker, inside and outside checkpoints."""
    layer = nn.Linear(8, 8)

    def part(x: torch.Tensor) -> torch.Tensor:
        x = torch.dropout(layer(x), 0.5, True)
        with checkpointing.get_cuda_rng_tracker().fork():
            return torch.dropout(layer(x), 0.5, True)

    def run(call: Any, rank: int = 0) -> tuple[torch.Tensor, ...]:
        mpu = type("mpu", (), {"get_model_parallel_rank": staticmethod(lambda: rank)})
        checkpointing.configure(mpu, checkpoint_in_cpu=on_host)
        checkpointing.model_parallel_cuda_manual_seed(3)
        x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
        y = call(part, call(part, x))
        gradients = torch.autograd.grad(y.square().sum(), [x, layer.weight])
        with checkpointing.get_cuda_rng_tracker().fork():
            own = torch.rand(3)
        return (y.detach(), *gradients, own, torch.rand(3))

    plain = run(lambda f, x: f(x))
    assert all(map(torch.equal, run(checkpointing.checkpoint), plain))
    *_, own, alike = run(checkpointing.checkpoint, rank=1)
    assert torch.equal(alike, plain[-1]) and not torch.equal(own, plain[-2])
