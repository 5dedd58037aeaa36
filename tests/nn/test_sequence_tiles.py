"""MLPs and norms over pieces of the sequence: the same results, without their wide activations."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from tests.nn.test_cross_entropy import peak
from torch import nn
from torch.nn import functional as F

import wherry
from wherry.errors import ConfigError
from wherry.nn.sequence_tiles import SequenceTiles
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.train.model import GPT, GPTConfig

WIDTH, LENGTH = 8, 13


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class MLP(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.p = p
        self.rows: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.append(x.shape[1])
        return F.dropout(self.down(F.silu(self.gate(x)) * self.up(x)), self.p, self.training)


class Block(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.mlp = RMSNorm(), MLP(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(p) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def made(kind: Any = Model, *args: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(*args)


def x_of(seed: int = 0, length: int = LENGTH) -> torch.Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_outputs_are_the_same_bits_and_gradients_the_same_sums() -> None:
    whole, model = made(), made()
    pieces = SequenceTiles(model, model.blocks, 5)
    found = []
    for each in (whole, model):
        x = x_of().requires_grad_()
        out = each.blocks[0](x)
        out.square().sum().backward()
        found.append((out.detach(), x.grad, {name: p.grad for name, p in each.blocks[0].named_parameters()}))
    (out, of_x, weights), (tiled_out, tiled_of_x, tiled_weights) = found
    assert torch.equal(out, tiled_out)
    torch.testing.assert_close(tiled_of_x, of_x, rtol=1e-6, atol=1e-6)
    for name, gradient in weights.items():
        if gradient is None:
            assert "unused" in name and tiled_weights[name] is None
        else:
            torch.testing.assert_close(tiled_weights[name], gradient, rtol=2e-6, atol=2e-6)
    # Pieces of a forward, and again in backward.
    assert model.blocks[0].mlp.rows == [3, 3, 3, 2, 2] * 2 and model.blocks[1].mlp.rows == []
    for handle in pieces.handles:
        handle.remove()
    assert "forward" not in model.blocks[0].mlp.__dict__


def test_sums_of_16_bits_are_in_fp32() -> None:
    errors = {}
    for pieces in (1, 64):
        model = made().bfloat16()
        exact = copy.deepcopy(model).double()
        SequenceTiles(model, model.blocks, pieces)
        x = x_of(length=256).bfloat16()
        for each, given in ((model, x), (exact, x.double())):
            each.blocks[0](given).sum().backward()
        mine, its = (each.blocks[0].mlp.down.weight.grad.double() for each in (model, exact))
        errors[pieces] = float((mine - its).norm() / its.norm())
    assert errors[64] < 1.5 * errors[1] < 0.02


def test_random_numbers_are_the_same_in_backward_and_go_on_behind_it() -> None:
    model = made(Model, 0.5).double()
    SequenceTiles(model, model.blocks, 4)
    x = x_of().double()

    def loss(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return model(x)

    assert torch.autograd.gradcheck(loss, x.requires_grad_(), fast_mode=True)
    loss(x.detach())
    after = torch.get_rng_state()
    loss(x).backward()
    assert torch.equal(torch.get_rng_state(), after)


def test_wide_activations_are_never_whole() -> None:
    length, width = 4096, 32
    x = x_of(length=length).requires_grad_()
    found = []
    for pieces in (None, 16):
        block = made(Block)
        if pieces:
            SequenceTiles(block, [block], pieces)
        found.append(peak(lambda block=block: block(x).sum().backward()))
    wide = 4 * 2 * length * width
    assert found[0] > 4 * wide > 2 * found[1]


def test_auto_makes_pieces_no_longer_than_wide_and_no_wider_than_all_states() -> None:
    for length, pieces in ((4, 4), (13, 4), (33, 5)):
        model = made()
        SequenceTiles(model, model.blocks, "auto")
        model(x_of(length=length))
        assert len(model.blocks[0].mlp.rows) == pieces, length


def engine_of(model: nn.Module, mesh: Any = None, **config: Any) -> Any:
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, **config}
    return wherry.initialize(model=model, config=config, mesh=mesh)[0]


STAGE3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
CONFIGS: dict[str, dict[str, Any]] = {
    "recompute": STAGE3 | {"activation_checkpointing": {"policy": "recompute"}},
    "in_backward": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "wherry": {"update_policy": "in_backward"},
    },
    "clipped": {"zero_optimization": {"stage": 2}, "gradient_clipping": 1e-2},
    "autocast": STAGE3 | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_training_is_the_same_and_gathers_are_as_many(config: dict[str, Any]) -> None:
    model = made(GPT, GPTConfig(layers=2, hidden=16, heads=2, sequence=LENGTH, vocabulary=31))

    def ids_of(step: int, rank: int) -> torch.Tensor:
        return torch.randint(0, 31, (2, LENGTH), generator=torch.Generator().manual_seed(10 * step + rank))

    def train(pieces: Any, comm: Comm) -> Any:
        own = {**config.get("wherry", {}), **({"sequence_tiles": pieces, "chunked_loss": True} if pieces else {})}
        mine = copy.deepcopy(model)
        with engine_of(mine, comm, **config | {"wherry": own}) as engine:
            losses, norms, calls = [], [], {}
            for step in range(3):
                comm.traffic.clear()
                ids = ids_of(step, comm.rank)
                loss = engine(ids, ids)
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
                norms.append(engine.get_global_grad_norm())
                calls = dict(comm.traffic.calls)
            weights = engine.consolidated_state_dict()
        assert not any("forward" in module.__dict__ for module in mine.modules())
        return losses, norms, weights, calls

    tolerance = 2e-2 if "torch_autocast" in config else 1e-4
    whole, tiled = (run_ranks(2, lambda comm, n=n: train(n, comm))[0] for n in (None, 4))
    assert tiled[0] == pytest.approx(whole[0], rel=tolerance) and tiled[3] == whole[3]
    assert tiled[1] == pytest.approx(whole[1], rel=tolerance)
    for name, weight in whole[2].items():
        torch.testing.assert_close(tiled[2][name], weight, rtol=tolerance, atol=tolerance)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))


class Shifting(nn.Module):
    """A layer that mixes each row with the one before, as RWKV has."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.up = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)


def test_modules_that_run_whole_are_logged(caplog: Any) -> None:
    model = made()
    model.blocks[0].mlp, model.blocks[1].mlp = Routed(), Shifting()
    with caplog.at_level(logging.INFO, "wherry"):
        engine_of(model, wherry={"sequence_tiles": 2}).close()
        assert "Block.mlp runs whole, as it sends tokens to experts" in caplog.text
        assert "Block.mlp runs whole, as it has weights beside those of linear layers and norms" in caplog.text
        engine_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), wherry={"sequence_tiles": 2}).close()
        assert "the model's blocks hold no MLP" in caplog.text
    with pytest.raises(ConfigError, match=r'wherry.sequence_tiles: expected a number of pieces.*or "auto", got 0'):
        engine_of(made(), wherry={"sequence_tiles": 0})
