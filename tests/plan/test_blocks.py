"""A model of many equal blocks runs with few of them, and its profile is the whole one's, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from wherry import config as configs
from wherry.plan.grid import Grid
from wherry.plan.profile import Profile, Recompute
from wherry.plan.trace import Profiler, profile
from wherry.sources import Source, of_shape
from wherry.train.presets import Shape

WIDTH, LENGTH = 16, 6


class Layer(nn.Module):
    """One of many; `kind` widens it, and `place` is where it stands."""

    ran = 0

    def __init__(self, kind: int = 0, place: int = 0) -> None:
        super().__init__()
        self.kind, self.place = kind, place
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, (3 + kind) * WIDTH)
        self.down = nn.Linear((3 + kind) * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        Layer.ran += 1
        h = self.norm(x if beside is None else x + beside)
        return x + self.down(F.gelu(self.up(h)))


class Stack(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 10, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


class TwoStacks(nn.Module):
    """An encoder of wide layers, and a decoder whose every layer looks at what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.encoder = nn.Sequential(*(Layer(kind=1) for _ in range(9)))
        self.decoder = nn.ModuleList(Layer() for _ in range(12))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        seen = self.encoder(self.embed(ids))
        x = self.embed(ids)
        for layer in self.decoder:
            x = layer(x, seen)
        return x.mean()


class Counting(Stack):
    """It knows how many blocks it has, and takes them by number."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for number in range(10):
            x = self.blocks[number](x)
        return x.mean()


class Secretive(Layer):
    """It does more in some places, which nothing that it holds tells."""

    first = 7

    def forward(self, x: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        x = super().forward(x, beside)
        return torch.sin(x) if self.place >= self.first or self.place % 3 == 2 else x


class Late(Secretive):
    def forward(self, x: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        x = Layer.forward(self, x, beside)
        return torch.sin(x) if self.place >= self.first else x


def profiled(make: Callable[[], nn.Module], *, whole: bool, micro: int = 2, **settings: Any) -> tuple[Profile, int]:
    """The profile, and how many layers ran for it."""

    def build(micro_batch: int) -> Any:
        return make(), (torch.zeros(micro_batch, LENGTH, dtype=torch.int64),), {}

    Layer.ran = 0
    found = profile(build, micro, whole=whole, **{"dtype": None, **settings})
    return found, Layer.ran


def assert_same(few: Profile, all_of_them: Profile) -> None:
    assert few.moments == all_of_them.moments
    for name in ("units", "buffers", "inputs", "micro_batch", "kept", "joined", "activations"):
        assert getattr(few, name) == getattr(all_of_them, name), name
    for name in ("flops", "bytes", "slow", "backward", "kind"):
        assert np.array_equal(getattr(few.operations, name), getattr(all_of_them.operations, name)), name


def rows_of(count: int) -> list[nn.Module]:
    return [Layer() for _ in range(count)]


# How many layers run for each: four periods of each pattern.
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "equal": (lambda: Stack(*rows_of(12)), 4),
    "in pairs": (lambda: Stack(*(Layer(kind=place % 2) for place in range(14))), 8),
    "after others": (lambda: Stack(Layer(kind=4), *rows_of(9)), 5),
    "between others": (lambda: Stack(Layer(kind=4), *rows_of(9), Layer(kind=5)), 6),
    "two stacks": (TwoStacks, 8),
    "numbered": (lambda: Stack(*(Layer(place=place) for place in range(12))), 6),
    "few": (lambda: Stack(*rows_of(4)), 4),
}
# Those that cannot run with few, or would not do the same.
WHOLE: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "counted": (lambda: Counting(*rows_of(10)), 10),
    "some do more": (lambda: Stack(*(Secretive(place=place) for place in range(10))), 10),
    "later ones do more": (lambda: Stack(*(Late(place=place) for place in range(10))), 10),
}


@pytest.mark.parametrize("name", MODELS)
def test_few_blocks_tell_of_all(name: str) -> None:
    make, expected = MODELS[name]
    few, ran = profiled(make, whole=False)
    all_of_them, _ = profiled(make, whole=True)
    assert_same(few, all_of_them)
    assert ran == expected


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_told_by_few_runs_whole(name: str) -> None:
    make, expected = WHOLE[name]
    found, ran = profiled(make, whole=False)
    assert_same(found, profiled(make, whole=True)[0])
    assert ran > expected  # few were tried first


class Middle(Stack):
    """After one block of many it does more, by counting."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 6:
                x = x + torch.sin(x)
        return x.mean()


def test_a_model_that_is_not_known_runs_whole_once() -> None:
    def run(profiler: Profiler, cls: type[Stack], micro: int) -> tuple[Profile, int]:
        Layer.ran = 0
        found = profiler.make(
            lambda micro: (cls(*rows_of(13)), (torch.zeros(micro, LENGTH, dtype=torch.int64),), {}), micro, None
        )
        return found, Layer.ran

    for cls, ran in ((Middle, (17, 13)), (Stack, (17, 4))):
        profiler = Profiler(known=False)
        for micro, expected in zip((1, 3), ran, strict=True):
            found, times = run(profiler, cls, micro)
            assert_same(found, profiled(lambda cls=cls: cls(*rows_of(13)), whole=True, micro=micro)[0])
            assert times == expected
    found, times = run(Profiler(known=True), Middle, 1)
    assert times == 4
    assert not found.same(profiled(lambda: Middle(*rows_of(13)), whole=True, micro=1)[0])  # so it matters


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("recompute", "expected"),
    [(Recompute(), 8), (Recompute(2), 12), (Recompute(save_operations=("matmul",)), 8)],
    ids=["all", "every second", "but for products"],
)
def test_recomputation(recompute: Recompute, expected: int, dtype: torch.dtype | None) -> None:
    settings: dict[str, Any] = {"recompute": recompute, "dtype": dtype, "micro": 3}
    few, ran = profiled(MODELS["equal"][0], whole=False, **settings)
    assert_same(few, profiled(MODELS["equal"][0], whole=True, **settings)[0])
    assert ran == expected  # the recomputed ones twice


def test_a_model_is_whole_again() -> None:
    model = Stack(*rows_of(12))
    before = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
    found = [profiled(lambda: model, whole=False, recompute=Recompute())[0] for _ in range(2)]
    assert_same(*found)
    assert {name: (p.shape, p.dtype) for name, p in model.named_parameters()} == before
    assert len(model.blocks) == 12
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_there_is_already_is_left_alone(device: str) -> None:
    """Whether it has values or is on the meta device, and whether its inputs are."""
    with torch.device(device):
        model = Stack(*rows_of(7))
    before = {name: (p, p.dtype, p.device, None if p.is_meta else p.clone()) for name, p in model.named_parameters()}
    found, _ = profiled(lambda: model, whole=False, dtype=torch.bfloat16)
    assert_same(found, profiled(lambda: Stack(*rows_of(7)), whole=True, dtype=torch.bfloat16)[0])
    for name, p in model.named_parameters():
        same, dtype, where, values = before[name]
        assert p is same and (p.dtype, p.device) == (dtype, where)
        assert values is None or torch.equal(p, values)


@pytest.mark.parametrize("grid", [Grid(), Grid(tensor=2), Grid(pipe=2, stage=1)], ids=["alone", "tensor", "pipe"])
def test_a_gpt_and_its_parts(grid: Grid) -> None:
    shape = Shape(layers=16, hidden=64, heads=4, sequence=16, vocabulary=64)
    source = of_shape("deep", shape).share(grid, torch.bfloat16)
    found = [_of_source(source, whole=whole) for whole in (False, True)]
    assert_same(*found)
    shallow = _of_source(of_shape("shallow", replace(shape, layers=8)).share(grid, torch.bfloat16), whole=True)
    assert found[0].activations > shallow.activations and found[0].flops > 1.5 * shallow.flops
    assert (found[0].joined > 0) == (grid.tensor > 1)


def _of_source(source: Source, *, whole: bool) -> Profile:
    def build(micro_batch: int) -> Any:
        model, batch = source.make(micro_batch, 16)
        assert batch is not None
        return model, batch.args, batch.kwargs

    recompute = Recompute.of(configs.load({}))
    return profile(build, 2, torch.bfloat16, recompute=recompute, whole=whole)


def test_a_model_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers", reason="models of Hugging Face need transformers")
    shape = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=7, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=40, max_position_embeddings=32,
    )  # fmt: skip

    def build(micro_batch: int) -> Any:
        model = transformers.AutoModelForCausalLM.from_config(shape)
        model.config.use_cache = False
        ids = torch.zeros(micro_batch, 8, dtype=torch.int64)
        return model, (), {"input_ids": ids, "labels": ids}

    assert_same(*(profile(build, 2, torch.bfloat16, whole=whole) for whole in (False, True)))
