"""Safetensors files are read into shards: values, the parts that are read, and all mistakes in one error."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
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
    state_of,
    token_batch,
)
from tests.models import MODELS
from torch import nn

import wherry
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.sharding.safetensors_folder import TensorSource
from wherry.testing import run_ranks

BF16 = {"bf16": {"enabled": True}}


def saved(
    model: nn.Module, folder: Path, files: int = 1, *, dtype: torch.dtype | None = None, absent: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """Write files as `transformers` does: tied weights once, and an index of several files."""
    state: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict().items():
        if value.data_ptr() not in seen and not name.endswith(absent or ("nothing",)):
            state[name] = value.to(dtype) if dtype and value.is_floating_point() else value
        seen.add(value.data_ptr())
    folder.mkdir(exist_ok=True)
    if files == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return state
    names = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    weight_map = {name: names[i % files] for i, name in enumerate(state)}
    for file in names:
        save_file({n: v.contiguous() for n, v in state.items() if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return state


def saved_model(folder: Path, kind: Any = TinyLM) -> Any:
    """Build a model and write its file."""
    model: Any = make_model(kind, seed=1)
    if isinstance(model, Buffered):
        model.seen.copy_(torch.tensor([0.1, 1 / 3, 1e-3]))
    saved(model, folder)
    return model


def on_meta(kind: Callable[[], nn.Module] = TinyLM) -> Any:
    with torch.device("meta"):
        return kind()


def loaded(folder: Path, kind: Any = TinyLM) -> Any:
    """Build a model on the meta device and find its values in a folder."""
    model = on_meta(kind)
    wherry.load_pretrained(model, folder)
    return model


def assert_has(state: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    assert_same({name: state[name] for name in values}, values)


class Buffered(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(3.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def reset_parameters(self) -> None:
        self.seen.zero_()
        self.scratch.zero_()


class Undrawable(Buffered):
    """A model whose modules have no reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        del self.scratch  # it is in no file
        for module in self.modules():
            module.reset_parameters = None


BFLOAT16 = torch.bfloat16


@pytest.mark.parametrize(
    ("target", "stage", "ranks", "working", "in_files", "absent"),
    [
        ("engine", 0, 1, None, None, ()),
        ("engine", 2, 3, None, None, ()),
        ("engine", 3, 3, BFLOAT16, None, ("norm.bias",)),
        ("model", 3, 2, None, None, ()),
        ("Init", 3, 2, None, BFLOAT16, ()),
        ("meta", 2, 2, None, None, ()),
        ("meta", 3, 2, BFLOAT16, None, ()),
        ("meta", 3, 2, BFLOAT16, None, ("norm.bias",)),
    ],
)
def test_weights_and_masters_are_those_of_the_files(
    target: str, stage: int, ranks: int, working: Any, in_files: Any, absent: tuple[str, ...], tmp_path: Path
) -> None:
    """Weights are read and not communicated; those of a model on the meta device are not drawn."""
    other: Any = make_model(Buffered, seed=1)
    other.seen.fill_(9.0)
    files = saved(other, tmp_path, 2, dtype=in_files, absent=absent)
    whole = sum(p.numel() for p in other.parameters()) * other.head.weight.itemsize
    kind = Undrawable if target == "meta" and not absent else Buffered
    models = [make_model(kind) for _ in range(ranks)]

    def body(comm: Comm) -> Any:
        with wherry.Init(settings(3), mesh=comm, enabled=target == "Init"):
            model = kind() if target == "Init" else on_meta(kind) if target == "meta" else models[comm.rank]
        model = model.to(working or torch.float32)
        if target != "engine":
            result = wherry.load_pretrained(model, tmp_path, strict=not absent)
        comm.traffic.clear()
        config = settings(stage, more={"bf16": {"enabled": working is not None}})
        engine, *_ = wherry.initialize(model=model, optimizer=adamw, config=config, mesh=comm)
        assert target != "meta" or absent or comm.traffic.bytes["broadcast"] < whole / 10
        if target == "engine":
            comm.traffic.clear()
            result = wherry.load_pretrained(engine, tmp_path, strict=not absent)
            assert stage < 3 or not comm.traffic.calls
        assert not result.unexpected and all(name.endswith(absent) for name in result.missing)
        state = {name: value.clone() for name, value in engine.module.state_dict().items()}
        return state, masters_of(engine), float(engine(*token_batch(0, 0, 0)).detach())

    expected = float(other(*token_batch(0, 0, 0)).detach())
    for state, masters, loss in run_ranks(ranks, body):
        for name, value in files.items():
            assert torch.equal(state[name], value.to(working or torch.float32)), name
            assert name not in masters or torch.equal(masters[name], value.float()), name
        assert loss == pytest.approx(expected, rel=2e-2 if working or in_files else 1e-6)


# Models on the meta device: weights of files are never drawn.


class Mixed(nn.Module):
    """Weights of another dtype, frozen ones, integers and buffers, one of which is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = TinyLM()
        self.lm.blocks[1].requires_grad_(False)
        self.lm.blocks[2].up.to(torch.bfloat16)
        self.codes = nn.Parameter(torch.arange(5), requires_grad=False)
        self.scale = nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("kept", torch.full((4,), 9.0))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def reset_parameters(self) -> None:
        self.codes.copy_(torch.arange(5))
        self.scale.fill_(-1.0)
        self.kept.zero_()
        self.table.copy_(torch.arange(3.0))


SOME = ("lm.blocks.0.norm.weight", "scale", "kept")


@pytest.mark.parametrize(
    ("stage", "more", "absent"),
    [(3, {}, ()), (0, BF16, SOME), (1, {}, SOME), (3, BF16, SOME), (3, {}, ("lm.embed.weight",)), (3, {}, ("scale",))],
)
def test_weights_of_no_file_are_drawn_and_others_are_read(
    stage: int, more: dict[str, Any], absent: tuple[str, ...], tmp_path: Path
) -> None:
    """Keep a buffer of the files when its module is drawn for another weight."""
    other: Any = make_model(Mixed, seed=1)
    other.codes.data.fill_(7)
    other.lm.blocks[0].norm.weight.data.fill_(3.0)
    saved(other, tmp_path, absent=absent)

    def body(comm: Comm) -> Any:
        model = on_meta(Mixed)
        result = wherry.load_pretrained(model, tmp_path, strict=not absent)
        assert sorted(result.missing) == sorted(absent)
        return state_of(model, stage, comm, **more), model.table.tolist()

    drawn = (*absent, "lm.head.weight") if "lm.embed.weight" in absent else absent
    for state, table in run_ranks(2, body):
        assert table == [0.0, 1.0, 2.0]
        for name, value in other.state_dict().items():
            if more and value.is_floating_point() and name in dict(other.named_parameters(remove_duplicate=False)):
                value = value.bfloat16()
            assert not state[name].isnan().any() and torch.equal(state[name], value) == (name not in drawn), name


def test_weights_shared_with_later_units_are_read(tmp_path: Path) -> None:
    other = saved_model(tmp_path, MODELS["tied"])
    assert_same(state_of(loaded(tmp_path, MODELS["tied"])), other.state_dict())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "half, then float": lambda model: model.half().float(),
    "layout": lambda model: model.to(memory_format=torch.channels_last),
    "a copy of a cast one": lambda model: copy.deepcopy(model.bfloat16()),
    "a cast copy": lambda model: copy.deepcopy(model).half(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_values_of_files_are_cast_and_copied_as_in_memory(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    expected = change(saved_model(tmp_path, Undrawable))
    model = change(loaded(tmp_path, Undrawable))
    state = state_of(model)
    for name, value in expected.state_dict().items():
        assert state[name].dtype == value.dtype
        assert torch.allclose(state[name], value, rtol=1e-3), name  # weights are as precise as the files
    assert torch.equal(state["seen"], expected.seen)
    assert copy.deepcopy(model).seen.tolist() == expected.seen.tolist(), "it is a model as any other"


class Wrapped(nn.Module):
    """A module that takes over the weights of a layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.register_buffer("scale", torch.ones(1))


def test_weights_that_another_module_takes_over_are_read_also_by_a_copy(tmp_path: Path) -> None:
    other = saved_model(tmp_path)
    model = loaded(tmp_path)
    model.blocks[0].mix = Wrapped(model.blocks[0].mix)
    for name in ("weight", "bias"):
        nn.utils.parametrize.register_parametrization(model.blocks[1].mix, name, nn.Identity())
    for one in (copy.deepcopy(model), model):
        state = state_of(one)
        for name in ("weight", "bias"):
            state[f"blocks.1.mix.{name}"] = state[f"blocks.1.mix.parametrizations.{name}.original"]
        assert_has(state, dict(other.state_dict()))


def test_new_modules_and_weights_in_the_place_of_ones_that_have_values(tmp_path: Path) -> None:
    """Follow the advice of the error for writes."""
    other = saved_model(tmp_path)
    model = loaded(tmp_path)
    model.head = nn.Linear(WIDTH, VOCABULARY, bias=False, device="meta")
    model.blocks[0].mix.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    state = state_of(model)
    assert torch.equal(state["embed.weight"], other.embed.weight)
    assert not torch.equal(state["head.weight"], other.head.weight) and not state["head.weight"].isnan().any()
    assert state["blocks.0.mix.weight"].eq(1).all()


def untied(model: Any) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.clone())


def widened(model: Any) -> None:
    model.norm.bias.data = torch.empty(2 * WIDTH, device="meta")


def filled(model: Any) -> None:
    with torch.no_grad():
        copy.deepcopy(model).bfloat16().head.weight[2:4] = 1.0


class Invertible(nn.Identity):
    right_inverse = nn.Identity.forward


def parametrized(model: Any) -> None:
    nn.utils.parametrize.register_parametrization(model.blocks[0].mix, "weight", Invertible())


def tiled(model: Any) -> None:
    wherry.tile(model, max_bytes=1024)
    nn.init.normal_(model.blocks[0].up.tiles[0].weight)


WRITTEN = "load_pretrained .* a write does nothing on the meta device"
MOVED = "weight: load_pretrained has found its values .* leave out the to_empty"
PICKLED = "only found the values of this model on the meta device"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (untied, r"head\.weight: load_pretrained has given it values, and another tensor"),
        (widened, rf"norm\.bias: .* shape \[{WIDTH}\], and it has been made \[{2 * WIDTH}\]"),
        (lambda model: nn.init.zeros_(model.head.weight), rf"embed\.weight: {WRITTEN}"),
        (filled, rf"embed\.weight: {WRITTEN}"),
        (tiled, rf"tiles\.0\.weight: {WRITTEN}"),
        (parametrized, rf"blocks\.0\.mix\.weight: {WRITTEN}"),
        (lambda model: model.to_empty(device="cpu"), MOVED),
        (lambda model: model.cpu(), MOVED),
        (lambda model: model.head.to("cpu"), MOVED),
        (pickle.dumps, PICKLED),
    ],
)
def test_changes_before_the_values_are_read_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    saved_model(tmp_path)
    model = loaded(tmp_path)
    with pytest.raises(WherryError, match=message):
        change(model)
        wherry.initialize(model=model, config=settings(3))


def test_ranks_that_load_and_ranks_that_do_not(tmp_path: Path) -> None:
    saved_model(tmp_path)

    def body(comm: Comm) -> None:
        model = loaded(tmp_path) if comm.rank == 0 else on_meta()
        with pytest.raises(WherryError, match=r"differ.*to be read from a file\]? on rank 0 and .* rank 1"):
            wherry.initialize(model=model, config=settings(3), mesh=comm)

    run_ranks(2, body)


def test_a_buffer_of_some_ranks_files_is_rank_0s(tmp_path: Path) -> None:
    other = make_model(Mixed, seed=1)
    saved(other, tmp_path / "0")
    saved(other, tmp_path / "1", absent=("kept",))

    def body(comm: Comm) -> None:
        model = on_meta(Mixed)
        wherry.load_pretrained(model, tmp_path / str(comm.rank), strict=False)
        wherry.initialize(model=model, config=settings(1), mesh=comm)
        assert model.kept.eq(9.0).all()

    run_ranks(2, body)


def test_a_rank_reads_its_shards_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = saved_model(tmp_path)
    read: list[int] = []
    elements = TensorSource.elements

    def counted(self: Any, start: int, stop: int) -> torch.Tensor:
        read.append(stop - start)
        return elements(self, start, stop)

    monkeypatch.setattr(TensorSource, "elements", counted)
    run_ranks(4, lambda comm: wherry.initialize(model=loaded(tmp_path), config=settings(3), mesh=comm))
    assert sum(read) == sum(p.numel() for p in other.parameters())


def test_all_mistakes_are_listed_at_once_and_nothing_is_loaded(tmp_path: Path) -> None:
    state = saved(make_model(seed=1), tmp_path)
    del state["blocks.0.mix.bias"], state["norm.bias"]
    state |= {"blocks.1.mix.weight": torch.zeros(3, 16), "blocks.7.mix.weight": torch.zeros(16, 16)}
    save_file(state, tmp_path / "model.safetensors")
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
    assert_same(engine.module.state_dict(), before)
    del state["blocks.1.mix.weight"]
    save_file(state, tmp_path / "model.safetensors")
    result = wherry.load_pretrained(engine, tmp_path, strict=False)
    assert result.missing == ["blocks.0.mix.bias", "blocks.1.mix.weight", "norm.bias"]
    assert result.unexpected == ["blocks.7.mix.weight"]
    state |= {"head.weight": state["embed.weight"]}
    assert_same(engine.module.state_dict(), before | {name: state[name] for name in before.keys() & state.keys()})


def test_the_index_chooses_between_two_files(tmp_path: Path) -> None:
    state = saved(make_model(seed=1), tmp_path, 2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    stale = {name: torch.zeros_like(value) for name, value in load_file(first).items()}
    save_file({**stale, **load_file(second)}, second)
    model = make_model()
    wherry.load_pretrained(model, tmp_path)
    assert_has(dict(model.state_dict()), state)


def test_folders_and_files_that_cannot_be_read(tmp_path: Path) -> None:
    model = make_model()
    with pytest.raises(WherryError, match=r"has no \*\.safetensors file; it has nothing"):
        wherry.load_pretrained(model, tmp_path)
    for name, text, message in (
        ("model.bin", "x", "it has model.bin"),
        ("model.safetensors", "x" * 100, "is not a whole safetensors file"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(WherryError, match=message):
            wherry.load_pretrained(model, tmp_path)
    with pytest.raises(WherryError, match="there is no file or folder"):
        wherry.load_pretrained(model, tmp_path / "nothing")
    engine, *_ = wherry.initialize(model=model, config=settings(3))
    with pytest.raises(WherryError, match=r"embed\.weight belongs to an engine.*give the engine"):
        wherry.load_pretrained(engine.module, tmp_path)


def test_a_file_that_one_rank_lacks_is_an_error_on_all(tmp_path: Path) -> None:
    saved_model(tmp_path)

    def use(engine: Any) -> str:
        with pytest.raises(WherryError) as caught:
            wherry.load_pretrained(engine, tmp_path if engine.comm.rank == 0 else tmp_path / "elsewhere")
        return str(caught.value)

    assert "rank 1: load_pretrained: there is no file" in on_ranks(use)[0]


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
