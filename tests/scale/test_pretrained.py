"""Safetensors files are read into shards: values, the parts that are read, and all mistakes in one error."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.harness import (
    VOCABULARY,
    WIDTH,
    TinyLM,
    adamw,
    assert_same,
    make_model,
    masters_of,
    on_ranks,
    settings,
    token_batch,
)
from torch import nn

import wherry
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.sharding import safetensors_folder
from wherry.sharding.meta import GIVEN
from wherry.testing import run_ranks

BF16 = {"bf16": {"enabled": True}}


def saved(model: nn.Module, folder: Path, files: int = 1, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Write files as `transformers` does: tied weights once, and an index of several files."""
    state: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict().items():
        if value.data_ptr() not in seen:
            state[name] = value.to(dtype) if dtype and value.is_floating_point() else value
        seen.add(value.data_ptr())
    if files == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return state
    names = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    weight_map = {name: names[i % files] for i, name in enumerate(state)}
    for file in names:
        save_file({n: v.contiguous() for n, v in state.items() if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return state


def saved_model(folder: Path) -> Any:
    """Build a model and write its file."""
    model = make_model(seed=1)
    saved(model, folder)
    return model


class Buffered(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(3.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


@pytest.mark.parametrize(("stage", "ranks", "files"), [(0, 1, 3), (2, 3, 1), (3, 1, 1), (3, 3, 3)])
def test_an_engine_has_the_weights_of_the_files(tmp_path: Path, stage: int, ranks: int, files: int) -> None:
    other: Any = make_model(Buffered, seed=1)
    other.seen.fill_(9.0)
    saved(other, tmp_path, files)

    def use(engine: Any) -> float:
        engine.comm.traffic.clear()
        result = wherry.load_pretrained(engine, tmp_path)
        assert not result.missing and not result.unexpected
        assert stage < 3 or not engine.comm.traffic.calls, "weights are read, not communicated"
        assert_same(engine.module.state_dict(), other.state_dict())
        return first_loss(engine)

    expected = float(other(*token_batch(0, 0, 0)).detach())
    losses = on_ranks(use, ranks=ranks, stage=stage, model=make_model(Buffered))
    assert losses == pytest.approx([expected] * ranks, rel=1e-6)


def test_bf16_files_into_fp32_models(tmp_path: Path) -> None:
    other = make_model(seed=1)
    saved(other, tmp_path, dtype=torch.bfloat16)
    engine, *_ = wherry.initialize(model=make_model(), config=settings(3))
    wherry.load_pretrained(engine, tmp_path)
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, other.state_dict()[name].bfloat16().float()), name


@pytest.mark.parametrize(("ranks", "partitioned"), [(2, False), (1, True), (2, True)])
def test_models_before_they_have_an_engine(tmp_path: Path, ranks: int, partitioned: bool) -> None:
    other = make_model(seed=1)
    saved(other, tmp_path, 2)

    def body(comm: Comm) -> Any:
        with wherry.Init(settings(3), mesh=comm, enabled=partitioned):
            model = TinyLM()
        wherry.load_pretrained(model, tmp_path)
        engine, *_ = wherry.initialize(model=model, config=settings(3), mesh=comm)
        return engine.module.state_dict()

    for state in run_ranks(ranks, body):
        assert_same(state, other.state_dict())


# Models on the meta device: weights of files are never drawn.


class Undrawable(Buffered):
    """A model whose modules have no reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        del self.scratch  # it is in no file
        for module in self.modules():
            module.reset_parameters = None


def on_meta(kind: type[nn.Module]) -> Any:
    with torch.device("meta"):
        return kind()


def loaded(folder: Path, kind: Any = TinyLM, *, strict: bool = True) -> Any:
    """Build a model on the meta device and find its values in a folder."""
    model = on_meta(kind)
    wherry.load_pretrained(model, folder, strict=strict)
    return model


def state_of(model: nn.Module, stage: int = 3, more: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """Read the values of a model by a new engine."""
    with wherry.initialize(model=model, config=settings(stage, more=more))[0] as engine:
        return {name: value.clone() for name, value in engine.module.state_dict().items()}


def first_loss(engine: Any) -> float:
    loss = engine(*token_batch(0, 0, 0))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


@pytest.mark.parametrize(("stage", "ranks", "more"), [(0, 2, BF16), (2, 2, {}), (3, 1, {}), (3, 2, BF16)])
def test_a_model_on_the_meta_device_is_read_and_not_drawn(
    tmp_path: Path, stage: int, ranks: int, more: dict[str, Any]
) -> None:
    other = make_model(Buffered, seed=1)
    other.seen.fill_(9.0)
    saved(other, tmp_path, 2)

    def trained(comm: Comm, after: bool) -> Any:
        model: Any = make_model(Buffered) if after else on_meta(Undrawable)
        if not after:
            result = wherry.load_pretrained(model, tmp_path)
            assert not result.missing and not result.unexpected
        comm.traffic.clear()
        engine, *_ = wherry.initialize(model=model, optimizer=adamw, config=settings(stage, more=more), mesh=comm)
        if after:
            wherry.load_pretrained(engine, tmp_path)
        else:
            weights = sum(p.numel() for p in other.parameters()) * other.head.weight.itemsize
            assert comm.traffic.bytes["broadcast"] < weights / 10, "weights are read, not communicated"
        masters = masters_of(engine) if more else {}
        state = {name: value.clone() for name, value in engine.module.state_dict().items()}
        return state, masters, [first_loss(engine) for _ in range(2)]

    expected = run_ranks(ranks, lambda comm: trained(comm, True))
    for (state, masters, losses), (state2, masters2, losses2) in zip(
        run_ranks(ranks, lambda comm: trained(comm, False)), expected, strict=True
    ):
        assert losses == losses2
        assert_same(masters, masters2)
        assert_same(state, state2)
        assert state["seen"].tolist() == [9.0] * 3


class Half(nn.Module):
    """A model with weights of another dtype, frozen ones and integers, buffers, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = TinyLM()
        self.lm.blocks[1].requires_grad_(False)
        self.lm.blocks[2].up.to(torch.bfloat16)
        self.codes = nn.Parameter(torch.arange(5), requires_grad=False)
        self.scale = nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("kept", torch.arange(4.0))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def reset_parameters(self) -> None:
        self.codes.copy_(torch.arange(5))
        self.scale.fill_(-1.0)
        self.kept.zero_()
        self.table.copy_(torch.arange(3.0))

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


SOME = ("lm.blocks.0.norm.weight", "scale", "kept")


@pytest.mark.parametrize(
    ("stage", "ranks", "absent"),
    [(1, 2, ()), (3, 1, ()), (1, 1, SOME), (3, 2, SOME), (1, 2, ("lm.embed.weight",)), (3, 2, ("lm.embed.weight",))],
)
def test_weights_of_no_file_are_drawn_and_others_are_read(
    tmp_path: Path, stage: int, ranks: int, absent: tuple[str, ...]
) -> None:
    other = make_model(Half, seed=1)
    other.kept.fill_(9.0)
    other.codes.data.fill_(7)
    other.lm.blocks[0].norm.weight.data.fill_(3.0)
    state = saved(other, tmp_path)
    save_file({name: value for name, value in state.items() if name not in absent}, tmp_path / "model.safetensors")

    def body(comm: Comm) -> Any:
        model = on_meta(Half)
        result = wherry.load_pretrained(model, tmp_path, strict=not absent)
        assert sorted(result.missing) == sorted(absent)
        engine, *_ = wherry.initialize(model=model, config=settings(stage), mesh=comm)
        return {name: value.clone() for name, value in engine.module.state_dict().items()}, model.table.clone()

    for state, table in run_ranks(ranks, body):
        assert table.tolist() == [0.0, 1.0, 2.0]
        for name, value in other.state_dict().items():
            if name not in (*absent, *(("lm.head.weight",) if "lm.embed.weight" in absent else ())):
                assert torch.equal(state[name], value), name
            else:
                assert not state[name].isnan().any() and not torch.equal(state[name], value), name


def test_replaced_weights_of_files_are_an_error(tmp_path: Path) -> None:
    saved_model(tmp_path)

    untied = loaded(tmp_path)
    untied.head.weight = nn.Parameter(untied.embed.weight.clone())
    with pytest.raises(WherryError, match=r"head\.weight: load_pretrained has given it values, and another tensor"):
        wherry.initialize(model=untied, config=settings(3))
    resized = loaded(tmp_path)
    resized.head.weight = resized.embed.weight = nn.Parameter(torch.ones(VOCABULARY, WIDTH))
    assert state_of(resized)["head.weight"].eq(1).all()
    converted = loaded(tmp_path).to(torch.bfloat16)
    expected = {name: value.bfloat16() for name, value in make_model(seed=1).state_dict().items()}
    assert_same(state_of(converted), expected)


def test_a_shape_that_changes_after_a_load_is_an_error(tmp_path: Path) -> None:
    saved(make_model(Buffered, seed=1), tmp_path)
    model = loaded(tmp_path, Buffered)
    model.norm.bias.data = torch.empty(2 * WIDTH, device="meta")
    with pytest.raises(WherryError, match=rf"norm\.bias: .* shape \[{WIDTH}\], and it has been made \[{2 * WIDTH}\]"):
        wherry.initialize(model=model, config=settings(3))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "bf16": lambda model: model.to(torch.bfloat16),
    "half, then float": lambda model: model.half().float(),
    "type": lambda model: model.type(torch.float16),
    "layout": lambda model: model.to(memory_format=torch.channels_last),
    "a copy": copy.deepcopy,
    "a copy of a cast one": lambda model: copy.deepcopy(model.half()),
    "a cast copy": lambda model: copy.deepcopy(model).half(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_buffers_without_values_are_cast_and_copied_alike(tmp_path: Path, change: str) -> None:
    other = make_model(Undrawable, seed=1)
    other.seen.copy_(torch.tensor([0.1, 1 / 3, 1e-3]))
    saved(other, tmp_path)
    expected = CHANGES[change](other)
    model = loaded(tmp_path, Undrawable)
    model = CHANGES[change](model)
    engine, *_ = wherry.initialize(model=model, config=settings(3))
    assert engine.module.seen.dtype == expected.seen.dtype
    assert torch.equal(engine.module.seen, expected.seen)
    for name, parameter in expected.named_parameters():
        value = engine.module.state_dict()[name]
        assert value.dtype == parameter.dtype
        assert torch.allclose(value, parameter, rtol=1e-3), name  # weights are as precise as the files
    assert copy.deepcopy(model).seen.tolist() == expected.seen.tolist(), "it is a model as any other"


def test_a_model_and_its_tiled_copy_read_the_same_files(tmp_path: Path) -> None:
    other = saved_model(tmp_path)
    model = loaded(tmp_path)
    copied = copy.deepcopy(model)
    wherry.tile(copied, max_bytes=1024)
    assert any(isinstance(module, wherry.nn.TiledLinear) for module in copied.modules())
    for one in (model, copied):
        assert_same(state_of(one), other.state_dict())


@pytest.mark.parametrize(
    "move",
    [lambda model: model.to_empty(device="cpu"), lambda model: model.cpu(), lambda model: model.head.to("cpu")],
    ids=["to_empty", "cpu", "to, of one"],
)
def test_memory_before_the_values_are_read_is_refused(tmp_path: Path, move: Any) -> None:
    other = make_model(Undrawable, seed=1)
    saved(other, tmp_path)
    model = loaded(tmp_path, Undrawable)
    with pytest.raises(WherryError, match=r"weight: load_pretrained has found its values .* leave out the to_empty"):
        move(model)
    assert_same(state_of(model), other.state_dict())
    emptied = on_meta(Undrawable).to_empty(device="cpu")
    emptied.head.weight = emptied.embed.weight
    wherry.load_pretrained(emptied, tmp_path)
    assert torch.equal(emptied.cpu().head.weight, other.head.weight), "in memory they are read at once"
    emptied.to_empty(device="cpu")


class Wrapped(nn.Module):
    """A module that takes over the weights of a layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.register_buffer("scale", torch.ones(1))


@pytest.mark.parametrize("change", [lambda model: model, copy.deepcopy], ids=["as it is", "a copy"])
def test_weights_that_another_module_takes_over_are_read(tmp_path: Path, change: Any) -> None:
    other = saved_model(tmp_path)
    model = loaded(tmp_path)
    model.blocks[0].mix = Wrapped(model.blocks[0].mix)
    for name in ("weight", "bias"):
        nn.utils.parametrize.register_parametrization(model.blocks[1].mix, name, nn.Identity())
    model = change(model)
    with pytest.raises(WherryError, match=r"blocks\.1\.mix\.weight: load_pretrained has found"):
        model.blocks[1].mix.to_empty(device="cpu")
    engine, *_ = wherry.initialize(model=model, config=settings(3))
    state = engine.module.state_dict()
    for name in ("weight", "bias"):
        state[f"blocks.1.mix.{name}"] = state[f"blocks.1.mix.parametrizations.{name}.original"]
    for name, value in other.state_dict().items():
        assert torch.equal(state[name], value), name
    assert not any(GIVEN in module.__dict__ for module in engine.module.modules())
    assert not any("__deepcopy__" in parameter.__dict__ for parameter in engine.module.parameters())


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).mT

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu()


def parametrized(model: Any) -> None:
    nn.utils.parametrize.register_parametrization(model.blocks[0].mix, "weight", Symmetric())


def filled(model: Any) -> None:
    with torch.no_grad():
        copy.deepcopy(model).bfloat16().head.weight[2:4] = 1.0


def tiled(model: Any) -> None:
    wherry.tile(model, max_bytes=1024)
    nn.init.normal_(model.blocks[0].up.tiles[0].weight)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda model: nn.init.zeros_(model.head.weight), "embed.weight"),
        (filled, "embed.weight"),
        (tiled, r"tiles\.0\.weight"),
        (parametrized, r"blocks\.0\.mix\.weight"),
    ],
    ids=["init", "copied, cast", "tiled", "parametrized"],
)
def test_writes_before_the_values_are_read_are_an_error(tmp_path: Path, write: Any, name: str) -> None:
    saved_model(tmp_path)
    model = loaded(tmp_path)
    with pytest.raises(WherryError, match=rf"{name}: load_pretrained .* a write does nothing on the meta device"):
        write(model)
        wherry.initialize(model=model, config=settings(3))


def test_a_new_module_in_the_place_of_one_that_has_values_is_drawn(tmp_path: Path) -> None:
    """Follow the advice of the error for writes."""
    other = saved_model(tmp_path)
    model = loaded(tmp_path)
    model.head = nn.Linear(WIDTH, VOCABULARY, bias=False, device="meta")
    model.blocks[0].mix.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    state = state_of(model)
    assert torch.equal(state["embed.weight"], other.embed.weight)
    assert not torch.equal(state["head.weight"], other.head.weight) and not state["head.weight"].isnan().any()
    assert state["blocks.0.mix.weight"].eq(1).all()


def test_a_loaded_model_on_the_meta_device_is_not_pickled(tmp_path: Path) -> None:
    saved(make_model(Undrawable, seed=1), tmp_path)
    model = loaded(tmp_path, Undrawable)
    for save in (pickle.dumps, lambda model: torch.save(model, tmp_path / "model.pt"), ForkingPickler.dumps):
        with pytest.raises(WherryError, match=r"only found the values of this model on the meta device"):
            save(model)
    engine, *_ = wherry.initialize(model=model, config=settings(0))
    assert torch.equal(copy.deepcopy(engine.module).seen, torch.arange(3.0))


def test_a_buffer_of_some_ranks_files_is_rank_0s(tmp_path: Path) -> None:
    other = make_model(Half, seed=1)
    other.kept.fill_(9.0)
    state = saved(other, tmp_path)
    (tmp_path / "less").mkdir()
    save_file({name: value for name, value in state.items() if name != "kept"}, tmp_path / "less/model.safetensors")

    def body(comm: Comm) -> None:
        model = on_meta(Half)
        wherry.load_pretrained(model, tmp_path / "less" if comm.rank else tmp_path, strict=False)
        wherry.initialize(model=model, config=settings(1), mesh=comm)
        assert model.kept.eq(9.0).all()

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("into", "absent"), [("the engine", ("norm.bias",)), ("the meta device", ()), ("the meta device", ("norm.bias",))]
)
def test_masters_are_as_precise_as_the_files(tmp_path: Path, absent: tuple[str, ...], into: str) -> None:
    other = make_model(seed=1)
    state = saved(other, tmp_path)
    save_file({name: value for name, value in state.items() if name not in absent}, tmp_path / "model.safetensors")
    plain = make_model().to(torch.bfloat16)

    def body(comm: Comm) -> None:
        model = copy.deepcopy(plain) if into == "the engine" else on_meta(TinyLM).to(torch.bfloat16)
        if into != "the engine":
            wherry.load_pretrained(model, tmp_path, strict=not absent)
        config = settings(3, more={"bf16": {"enabled": True}})
        engine, *_ = wherry.initialize(model=model, optimizer=adamw, config=config, mesh=comm)
        if into == "the engine":
            wherry.load_pretrained(engine, tmp_path, strict=not absent)
        weights = engine.module.state_dict()
        for name, _ in model.named_parameters():
            if name not in absent:
                assert torch.equal(engine.states.full(name, "master"), state[name]), name
                assert torch.equal(weights[name], state[name].bfloat16()), name

    run_ranks(2, body)


@pytest.mark.parametrize(("stage", "absent"), [(0, ("up.bias",)), (3, ()), (3, ("up.bias",))])
def test_frozen_weights_of_another_dtype_than_the_engines(tmp_path: Path, stage: int, absent: tuple[str, ...]) -> None:
    """Build the model in fp32, as for adapters; frozen weights have no masters."""
    other = make_model(seed=1)
    state = saved(other, tmp_path)
    kept = {name: value for name, value in state.items() if not name.endswith(absent or "none")}
    save_file(kept, tmp_path / "model.safetensors")
    model = on_meta(TinyLM)
    model.blocks.requires_grad_(False)
    wherry.load_pretrained(model, tmp_path, strict=not absent)
    config = settings(stage, more={"bf16": {"enabled": True}})
    engine, *_ = wherry.initialize(model=model, optimizer=adamw, config=config)
    weights = engine.module.state_dict()
    for name, value in kept.items():
        assert torch.equal(weights[name], value.bfloat16()), name
    assert not any(value.isnan().any() for value in weights.values())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_weight_shared_with_a_later_unit_is_read(tmp_path: Path, stage: int) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3))
            self.last = nn.Linear(8, 8, bias=False)
            for block in self.blocks:
                block[0].weight = self.last.weight

    other = make_model(Tied, seed=1)
    state = saved(other, tmp_path)
    model = loaded(tmp_path, Tied)
    engine, *_ = wherry.initialize(model=model, config=settings(stage))
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, state[name] if name in state else other.state_dict()[name]), name


@pytest.mark.parametrize("stage", [0, 3])
def test_a_buffer_of_a_file_is_not_drawn_over(tmp_path: Path, stage: int) -> None:
    """Draw its module for another weight, which is in no file."""
    other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    other[1].running_mean.fill_(9.0)
    state = {name: value for name, value in other.state_dict().items() if name != "1.weight"}
    save_file(state, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    wherry.load_pretrained(model, tmp_path, strict=False)
    engine, *_ = wherry.initialize(model=model, config=settings(stage))
    values = engine.module.state_dict()
    assert torch.equal(values["1.weight"], torch.ones(4))
    for name, value in state.items():
        assert torch.equal(values[name], value), name


def test_ranks_that_load_and_ranks_that_do_not(tmp_path: Path) -> None:
    saved_model(tmp_path)

    def body(comm: Comm) -> None:
        model = on_meta(TinyLM)
        if comm.rank == 0:
            wherry.load_pretrained(model, tmp_path)
        with pytest.raises(WherryError, match=r"differ.*to be read from a file\]? on rank 0 and .* rank 1"):
            wherry.initialize(model=model, config=settings(3), mesh=comm)

    run_ranks(2, body)


def test_a_rank_reads_its_shards_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = saved_model(tmp_path)
    read: list[int] = []
    elements = safetensors_folder.TensorSource.elements

    def counted(self: Any, start: int, stop: int) -> torch.Tensor:
        read.append(stop - start)
        return elements(self, start, stop)

    monkeypatch.setattr(safetensors_folder.TensorSource, "elements", counted)

    def body(comm: Comm) -> None:
        model = on_meta(TinyLM)
        wherry.load_pretrained(model, tmp_path)
        wherry.initialize(model=model, config=settings(3), mesh=comm)

    run_ranks(4, body)
    assert sum(read) == sum(p.numel() for p in other.parameters())


def test_all_mistakes_are_listed_at_once_and_nothing_is_loaded(tmp_path: Path) -> None:
    other = make_model(seed=1)
    state = {name: value for name, value in other.state_dict().items() if name != "head.weight"}
    del state["blocks.0.mix.bias"], state["norm.bias"]
    state["blocks.1.mix.weight"] = torch.zeros(3, 16)
    state["blocks.7.mix.weight"] = torch.zeros(16, 16)
    save_file(state, tmp_path / "weights.safetensors")
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine, *_ = wherry.initialize(model=model, config=settings(3))
    with pytest.raises(WherryError) as caught:
        wherry.load_pretrained(engine, tmp_path)
    message = str(caught.value)
    assert "2 missing from the files: blocks.0.mix.bias, norm.bias" in message
    assert "1 that the model does not have: blocks.7.mix.weight (the model has blocks." in message
    assert "1 of another shape: blocks.1.mix.weight: [3, 16] in the file, [16, 16] in the model" in message
    with pytest.raises(WherryError, match="1 of another shape") as caught:
        wherry.load_pretrained(engine, tmp_path, strict=False)
    assert "missing" not in str(caught.value)
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, before[name])
    del state["blocks.1.mix.weight"]
    save_file(state, tmp_path / "weights.safetensors")
    result = wherry.load_pretrained(engine, tmp_path, strict=False)
    assert result.missing == ["blocks.0.mix.bias", "blocks.1.mix.weight", "norm.bias"]
    assert result.unexpected == ["blocks.7.mix.weight"]


def test_the_index_chooses_between_two_files(tmp_path: Path) -> None:
    other = make_model(seed=1)
    state = saved(other, tmp_path, 2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    stale = {name: torch.zeros_like(value) for name, value in load_file(first).items()}
    save_file({**stale, **load_file(second)}, second)
    model = make_model()
    wherry.load_pretrained(model, tmp_path)
    for name, value in state.items():
        assert torch.equal(model.state_dict()[name], value), name


def test_folders_and_files_that_cannot_be_read(tmp_path: Path) -> None:
    model = make_model()
    for make, message in (
        (lambda: None, r"has no \*\.safetensors file; it has nothing"),
        (lambda: (tmp_path / "model.bin").write_text("x"), "it has model.bin"),
        (lambda: (tmp_path / "model.safetensors").write_text("x" * 100), "is not a whole safetensors file"),
        (lambda: (tmp_path / "model.safetensors.index.json").write_text("{}"), "is not an index"),
        (lambda: (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": []}'), "is not an index"),
        (lambda: (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}'), "is not an index"),
        (
            lambda: (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
            "names files that are not there: b.safetensors",
        ),
    ):
        make()
        with pytest.raises(WherryError, match=message):
            wherry.load_pretrained(model, tmp_path)
    with pytest.raises(WherryError, match="there is no file or folder"):
        wherry.load_pretrained(model, tmp_path / "nothing")


def test_the_module_of_an_engine_is_refused(tmp_path: Path) -> None:
    model = make_model()
    saved_model(tmp_path)
    engine, *_ = wherry.initialize(model=model, config=settings(3))
    with pytest.raises(WherryError, match=r"embed\.weight belongs to an engine.*give the engine"):
        wherry.load_pretrained(engine.module, tmp_path)
    engine.close()


def test_backward_gathers_loaded_weights_and_not_stale_secondary_shards(tmp_path: Path) -> None:
    """Run a forward without a backward, which leaves stale secondary shards."""
    other = saved_model(tmp_path)
    other(*token_batch(0, 0, 0)).backward()

    def use(engine: Any) -> None:
        engine(*token_batch(1, 0, 0))
        wherry.load_pretrained(engine, tmp_path)
        engine.backward(engine(*token_batch(0, 0, 0)))
        for name, parameter in other.named_parameters():
            torch.testing.assert_close(engine.gradients(name), parameter.grad, rtol=0, atol=1e-6)

    on_ranks(use, config={"zero_optimization": {"zero_hpz_partition_size": 2}})


def test_a_file_that_one_rank_lacks_is_an_error_on_all(tmp_path: Path) -> None:
    saved_model(tmp_path)

    def use(engine: Any) -> str:
        with pytest.raises(WherryError) as caught:
            wherry.load_pretrained(engine, tmp_path if engine.comm.rank == 0 else tmp_path / "elsewhere")
        return str(caught.value)

    assert "rank 1: load_pretrained: there is no file" in on_ranks(use)[0]
