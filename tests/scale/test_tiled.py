"""Tiled linear layers: their results, their state_dict, and their peak of gathered bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.engine.harness import (
    PeakGathered,
    assert_near,
    assert_same,
    make_model,
    on_ranks,
    settings,
    state_of,
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


@pytest.mark.parametrize(("in_splits", "out_splits", "bias"), [(1, 1, True), (1, 3, False), (3, 5, True)])
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
    assert_same(state, linear.state_dict())
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
    weight = TiledLinear(400, 200, in_splits=4, out_splits=2).state_dict()["weight"]
    assert float(weight.abs().max()) == pytest.approx(1 / 20, rel=0.01)


class Wide(nn.Module):
    """Blocks with layers that are much larger than the rest."""

    def __init__(self) -> None:
        super().__init__()
        parts = (nn.LayerNorm(32), nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))
        self.blocks = nn.ModuleList([nn.Sequential(*parts)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.blocks[0](x)).square().mean()


def rows(step: int, micro: int, rank: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(3, 32, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)),)


@pytest.mark.parametrize("stage", [0, 2])
def test_training_with_tiles_equals_plain(stage: int) -> None:
    model, common = make_model(Wide), dict[str, Any](ranks=2, steps=2, batch=rows)
    plain = train_plain(model, **common)
    assert wherry.tile(model, max_bytes=8 * 1024)
    whole = train_engine(model, stage=stage, finish=lambda engine: engine.consolidated_state_dict(), **common).extra
    assert_near(whole, plain.weights, 5e-5)


def test_layers_beyond_the_budget_train_within_it() -> None:
    """Tile layers of 8,192 elements, of which 5,000 may be gathered; the optimizer is made before they are."""
    whole, budget = make_model(Wide), 5000
    plain = train_plain(whole, ranks=2, steps=2, accumulation=2, batch=rows)
    own = {"tile_linear": True, "accumulation": "layer_major"}
    config = {"wherry": own, "zero_optimization": {"stage3_max_live_parameters": budget}}

    def use(engine: Any) -> Any:
        assert any(isinstance(module, TiledLinear) for module in engine.module.modules())
        losses, live, comm = [], PeakGathered(engine), engine.comm
        for step in range(2):
            loss = engine.train_batch(iter([rows(step, micro, comm.rank) for micro in range(2)]))
            losses.append(sum(comm.gather_objects(float(loss))) / comm.size)
        return losses, live.take() // 4, engine.module.state_dict()

    for losses, peak, state in on_ranks(use, accumulation=2, model=whole, config=config):
        assert losses == pytest.approx(plain.losses, rel=1e-5)
        assert 0 < peak <= budget
        assert state.keys() == plain.weights.keys()
        assert_near(state, plain.weights, 5e-5)  # Adam's first steps enlarge what another order of additions does


@pytest.mark.parametrize(("live", "lines"), [(0, 0), (1000, 1), (10**6, 0)])
def test_layers_beyond_the_budget_that_are_not_tiled_are_logged_in_one_line(
    live: int, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "wherry")
    config = settings(3, more={"zero_optimization": {"stage3_max_live_parameters": live}})
    wherry.initialize(model=Wide(), config=config)[0].close()
    assert caplog.text.count("blocks.0.1 (of 2 linear layers) has more") == lines


def test_layers_that_others_read_or_compute_or_hook_stay_whole() -> None:
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
            self.hooked = nn.Linear(8, 64)
            self.hooked.register_forward_hook(lambda *_: None)
            self.small = nn.Linear(8, 2)
            self.plain = nn.Linear(8, 64)
            self.again = self.plain

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.old(self.normed(self.encoder(x)))
            return sum(layer(x) for layer in (self.one, self.other, self.cut, self.hooked, self.plain, self.again))

    model = Model().eval()
    x, names = torch.randn(2, 3, 8), set(model.state_dict())
    with torch.no_grad():
        expected = model(x)
        replaced = wherry.tile(model, max_bytes=400)
        torch.testing.assert_close(model(x), expected)
    assert isinstance(model.plain, TiledLinear) and model.again is model.plain
    assert sum(isinstance(module, TiledLinear) for module in model.modules()) == 1
    tiles = {new for several in replaced.values() for new in several}
    assert len(replaced) == 2 and tiles == set(model.plain.parameters())
    assert max(tile.nbytes for tile in tiles) <= 400
    assert set(model.state_dict()) == names


def test_files_and_init_with_tiles(tmp_path: Path) -> None:
    other: Any = make_model(Wide, seed=1)
    save_file(other.state_dict(), tmp_path / "model.safetensors")

    def body(comm: Comm) -> Any:
        with wherry.Init(settings(3), mesh=comm):
            model = Wide()
        with torch.device("meta"):
            meta = Wide()
        wherry.load_pretrained(meta, tmp_path)
        for each in (model, meta):
            wherry.tile(each, max_bytes=8 * 1024)
        assert all(shard_of(p) is not None and not shard_of(p).whole for p in model.parameters())
        engine, *_ = wherry.initialize(model=model, config=settings(3), mesh=comm)
        wherry.load_pretrained(engine, tmp_path)
        return engine.module.state_dict(), state_of(meta, mesh=comm)

    for states in run_ranks(2, body):
        for state in states:
            assert_same(state, other.state_dict())


def test_errors_of_files_name_the_layers_and_not_the_tiles(tmp_path: Path) -> None:
    model = Wide()
    state = model.state_dict()
    del state["blocks.0.3.weight"], state["blocks.0.3.bias"]
    state["blocks.0.1.weight"] = torch.zeros(32, 256)
    save_file(state, tmp_path / "model.safetensors")
    wherry.tile(model, max_bytes=8 * 1024)
    with pytest.raises(WherryError) as caught:
        wherry.load_pretrained(model, tmp_path)
    message = str(caught.value)
    assert "2 missing from the files: blocks.0.3.weight, blocks.0.3.bias\n" in message
    assert message.endswith("1 of another shape: blocks.0.1.weight: [32, 256] in the file, [256, 32] in the model")


def test_tiles_of_a_layer_on_the_meta_device_are_drawn() -> None:
    with torch.device("meta"):
        model = Wide()
    wherry.tile(model, max_bytes=8 * 1024)
    state = state_of(model)
    assert all(bool(value.isfinite().all()) for value in state.values())
    assert state["blocks.0.1.weight"].shape == (256, 32)
