"""Tiled linear layers: their results, their state_dict, and their peak of gathered bytes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.engine.harness import (
    PeakGathered,
    assert_close,
    assert_near,
    assert_same,
    on_ranks,
    settings,
    train_engine,
    train_plain,
)
from torch import nn

import wherry
from wherry.errors import WherryError
from wherry.nn import TiledLinear
from wherry.parallel.comm import Comm
from wherry.sharding.param_shard import shard_of
from wherry.testing import run_ranks


@pytest.mark.parametrize(
    ("in_splits", "out_splits", "bias"), [(1, 1, True), (1, 3, False), (4, 1, True), (3, 5, False), (3, 5, True)]
)
def test_results_and_state_dict_are_a_linear_layers(in_splits: int, out_splits: int, bias: bool) -> None:
    linear = nn.Linear(13, 17, bias=bias)
    tiled = TiledLinear.from_linear(linear, in_splits, out_splits)
    assert len(tiled.tiles) == in_splits * out_splits
    x, y = torch.randn(2, 5, 13, requires_grad=True), torch.randn(2, 5, 17)
    torch.testing.assert_close(tiled(x), linear(x))
    (linear(x) * y).sum().backward()
    expected, x.grad = x.grad, None
    (tiled(x) * y).sum().backward()
    torch.testing.assert_close(x.grad, expected)
    for name, place in tiled.places().items():
        torch.testing.assert_close(tiled.get_parameter(name).grad, place.of(linear.get_parameter(place.whole).grad))
    state = tiled.state_dict()
    assert list(state) == list(linear.state_dict())
    for name, value in linear.state_dict().items():
        assert torch.equal(state[name], value)
    other = TiledLinear(13, 17, in_splits, out_splits, bias=bias)
    assert other.load_state_dict(linear.state_dict()).missing_keys == []
    torch.testing.assert_close(other(x), linear(x))
    linear.load_state_dict(other.state_dict())
    assert tiled.weight.shape == linear.weight.shape and bool(tiled.weight.isnan().all())


def test_wrong_splits_and_shapes() -> None:
    with pytest.raises(WherryError, match="out_splits is between 1 and the 4 features, got 5"):
        TiledLinear(4, 4, 1, 5)
    with pytest.raises(RuntimeError, match=r"size mismatch for weight: \(5, 4\) in the checkpoint, \(4, 4\)"):
        TiledLinear(4, 4, 2, 2).load_state_dict({"weight": torch.zeros(5, 4), "bias": torch.zeros(4)})


def test_a_tile_is_initialized_as_a_part_of_the_whole() -> None:
    tiled = TiledLinear(400, 200, in_splits=4, out_splits=2)
    weight = tiled.state_dict()["weight"]
    assert float(weight.abs().max()) == pytest.approx(1 / 20, rel=0.01)


class Wide(nn.Module):
    """Blocks with one layer that is much larger than the rest."""

    def __init__(self, width: int = 32, hidden: int = 256) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def rows(step: int, micro: int, rank: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(3, 32, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)),)


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (2, 2), (3, 2)])
def test_training_with_tiles_equals_plain(stage: int, ranks: int) -> None:
    torch.manual_seed(0)
    model = Wide()
    plain = train_plain(model, ranks=ranks, steps=3, batch=rows)
    tiled = copy.deepcopy(model)
    replaced = wherry.tile(tiled, max_bytes=8 * 1024)
    assert [type(m).__name__ for m in tiled.blocks[0]] == ["LayerNorm", "TiledLinear", "GELU", "TiledLinear"]
    assert len(replaced) == 2 * 2 * 2 and not set(replaced) & set(tiled.parameters())
    assert {new for several in replaced.values() for new in several} < set(tiled.parameters())
    assert max(p.nbytes for p in tiled.parameters()) <= 8 * 1024

    def finish(engine: Any) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in engine.module.state_dict().items()}

    run = train_engine(tiled, stage=stage, ranks=ranks, steps=3, batch=rows, finish=finish)
    run.weights = run.extra
    assert run.weights.keys() == plain.weights.keys()
    assert_close(run, plain, 5e-5)  # Adam's first steps enlarge what another order of additions does


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_layer_beyond_the_budget_trains_within_it(accumulation: int) -> None:
    """Train a layer of 256 x 512 elements, of which 19,200 may be gathered."""
    budget = 256 * 512 * 600 // 4096
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh())

    class Loss(nn.Module):
        def __init__(self, layers: nn.Module) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(3, 256, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)),)

    whole = Loss(model)
    plain = train_plain(whole, ranks=2, steps=3, accumulation=accumulation, batch=batch)
    config = {
        "wherry": {"tile_linear": True, "accumulation": "layer_major"},
        "zero_optimization": {"stage3_max_live_parameters": budget},
    }

    # The harness makes the optimizer before the layers are tiled, as most scripts do.
    def use(engine: Any) -> Any:
        losses, live, comm = [], PeakGathered(engine), engine.comm
        for step in range(3):
            loss = engine.train_batch(iter([batch(step, micro, comm.rank) for micro in range(accumulation)]))
            losses.append(sum(comm.gather_objects(float(loss))) / comm.size)
        return losses, live.take() // 4, engine.module.state_dict()

    for losses, peak, state in on_ranks(use, accumulation=accumulation, model=whole, config=config):
        assert losses == pytest.approx(plain.losses, rel=1e-5)
        assert 0 < peak <= budget
        assert state.keys() == plain.weights.keys()
        assert_near(state, plain.weights)


@pytest.mark.parametrize("live", [0, 1000, 10**6])
def test_layers_beyond_the_budget_that_are_not_tiled_are_logged_in_one_line(
    live: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "wherry")
    config = settings(3, more={"zero_optimization": {"stage3_max_live_parameters": live}})
    engine, *_ = wherry.initialize(model=Wide(), config=config)
    lines = [record.getMessage() for record in caplog.records if "tile_linear" in record.getMessage()]
    assert len(lines) == (live == 1000)
    assert all(line.startswith("blocks.0.1 (of 4 linear layers) has more") for line in lines)
    engine.close()


def test_layers_that_stay_whole() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 8)
            self.head = nn.Linear(8, 50, bias=False)
            self.head.weight = self.embed.weight
            self.hooked = nn.Linear(8, 50)
            self.hooked.register_forward_hook(lambda *_: None)
            self.small = nn.Linear(2, 2)
            self.shared = nn.Linear(8, 50)
            self.again = self.shared

    model = Tied()
    replaced = wherry.tile(model, max_bytes=400)
    assert type(model.head) is type(model.hooked) is type(model.small) is nn.Linear
    assert isinstance(model.shared, TiledLinear) and model.again is model.shared
    assert len(replaced) == 2
    assert set(model.state_dict()) == set(Tied().state_dict())


def test_files_and_init_with_tiles(tmp_path: Path) -> None:
    torch.manual_seed(1)
    other = Wide()
    save_file(other.state_dict(), tmp_path / "model.safetensors")

    def body(comm: Comm) -> Any:
        with wherry.Init(settings(3), mesh=comm):
            model = Wide()
        wherry.tile(model, max_bytes=8 * 1024)
        assert all(shard_of(p) is not None and not shard_of(p).whole for p in model.parameters())
        engine, *_ = wherry.initialize(model=model, config=settings(3), mesh=comm)
        wherry.load_pretrained(engine, tmp_path)
        return {name: value.clone() for name, value in engine.module.state_dict().items()}

    for state in run_ranks(2, body):
        assert_same(state, other.state_dict())


def test_errors_of_files_name_the_layers_and_not_the_tiles(tmp_path: Path) -> None:
    model = Wide()
    state = model.state_dict()
    del state["blocks.0.1.weight"], state["blocks.1.3.bias"]
    state["blocks.1.1.weight"] = torch.zeros(32, 256)
    save_file(state, tmp_path / "model.safetensors")
    wherry.tile(model, max_bytes=8 * 1024)
    engine, *_ = wherry.initialize(model=model, config=settings(3))
    with pytest.raises(WherryError) as caught:
        wherry.load_pretrained(engine, tmp_path)
    message = str(caught.value)
    assert "2 missing from the files: blocks.0.1.weight, blocks.1.3.bias\n" in message
    assert message.endswith("1 of another shape: blocks.1.1.weight: [32, 256] in the file, [256, 32] in the model")
    engine.close()


def test_layers_whose_weight_others_read_or_compute_stay_whole() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(8, 2, 64, batch_first=True)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 64))
            with pytest.warns(FutureWarning):
                self.old = nn.utils.weight_norm(nn.Linear(64, 8))
            self.one, self.other = nn.Linear(8, 64), nn.Linear(8, 64)
            self.other.bias = self.one.bias
            self.cut = nn.Linear(8, 64)
            self.cut.weight.tensor_model_parallel = True
            self.plain = nn.Linear(8, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.old(self.normed(self.encoder(x)))
            return self.one(x) + self.other(x) + self.cut(x) + self.plain(x)

    model = Model().eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        expected = model(x)
        replaced = wherry.tile(model, max_bytes=400)
        torch.testing.assert_close(model(x), expected)
    assert isinstance(model.plain, TiledLinear) and len(replaced) == 2
    assert sum(isinstance(module, TiledLinear) for module in model.modules()) == 1
    assert model.plain.bias.shape == (64,) and TiledLinear(2, 2, bias=False).bias is None


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Wide()
    wherry.tile(model, max_bytes=8 * 1024)
    engine, *_ = wherry.initialize(model=model, config=settings(3))
    state = engine.module.state_dict()
    assert all(bool(value.isfinite().all()) for value in state.values())
    assert state["blocks.0.1.weight"].shape == (256, 32)
