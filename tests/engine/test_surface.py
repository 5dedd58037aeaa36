"""Uses of a model around its training: copies, pickles, moves, and changes that the engine does not make."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    assert_near,
    assert_same,
    engine_of,
    make_model,
    masters_of,
    on_ranks,
    settings,
    token_batch,
    train,
    train_plain,
    weights_of,
)
from tests.models import Buffers, Stack, sgd, vectors
from torch import nn

import wherry
from wherry.errors import WherryError


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_state_dict_of_the_whole_and_of_a_part(stage: int) -> None:
    model: Any = make_model().bfloat16()
    other: Any = make_model(seed=9).bfloat16()

    def use(engine: Any) -> None:
        mine = engine.module
        assert_same(mine.state_dict(), model.state_dict())
        assert {f"module.{name}" for name in model.state_dict()} == engine.state_dict().keys()
        assert_same(mine.blocks[1].state_dict(), model.blocks[1].state_dict())
        assert stage < 3 or mine.head.weight.isnan().all()
        assert torch.equal(mine.embed.state_dict(prefix="x.")["x.weight"], model.embed.weight)
        mine.blocks[1].load_state_dict(other.blocks[1].state_dict())
        mine.norm.load_state_dict(other.norm.state_dict())
        loaded = {n: value for n, value in other.state_dict().items() if n.startswith(("blocks.1.", "norm."))}
        assert_same(mine.state_dict(), {**model.state_dict(), **loaded})
        masters = masters_of(engine)
        assert all(torch.equal(masters[name], value.float()) for name, value in loaded.items())

    on_ranks(use, stage=stage, model=model.float(), config={"bf16": {"enabled": True}})


def through_torch(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: list[Callable[[Any], nn.Module]] = [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_torch]


@pytest.mark.parametrize("stage", [0, 3])
def test_copies_and_pickles(stage: int) -> None:
    def use(engine: Any) -> None:
        for copied in COPIES if stage == 3 else ():
            with pytest.raises(WherryError, match=r"partitioned.*with wherry\.gathered"):
                copied(engine.module)
        with wherry.gathered(engine.module):
            others = [copied(engine.module) for copied in COPIES]
        train(engine, 1)
        for other in others:
            assert torch.equal(other(*token_batch(0, 0, 0)), model(*token_batch(0, 0, 0)))
            # It is an ordinary module: it can be cast, and another engine may have it.
            assert copy.deepcopy(other).half().norm.weight.dtype == torch.float16
            train(engine_of(other, settings(2), engine.comm), 1)

    model = make_model()
    on_ranks(use, stage=stage, model=model)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_backward_after_the_update_is_refused(stage: int) -> None:
    def use(engine: Any) -> None:
        first, second = (engine(*token_batch(0, micro, engine.comm.rank)) for micro in range(2))
        engine.backward(first)
        engine.step()
        for backward in (engine.backward, torch.Tensor.backward):
            with pytest.raises(WherryError, match="updated 1 times since the forward"):
                backward(second)
        train(engine, 2, 1)
        assert engine.was_step_applied()

    on_ranks(use, stage=stage)


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "half": nn.Module.half,
    "to(dtype)": lambda module: module.to(torch.bfloat16),
    "to(meta)": lambda module: module.to("meta"),
    "to_empty": lambda module: module.to_empty(device="cpu"),
}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_move_or_cast_of_an_engines_model_is_refused_at_the_call(stage: int) -> None:
    """Move the engine, the model, or a module of it: the error comes before any change."""

    def use(engine: Any) -> None:
        mine = engine.module
        parts = ((engine, "blocks.0.norm.weight"), (mine, "blocks.0.norm.weight"), (mine.out, "out.weight"))
        for move, (part, name) in itertools.product(MOVES.values(), parts):
            with pytest.raises(WherryError, match=rf"{name}: .* cannot be moved or cast") as raised:
                move(part)
            assert '"bf16"' in str(raised.value) and "engine.unwrap()" in str(raised.value)
        assert mine.shift.dtype == torch.float64
        assert {(p.dtype, p.device.type) for p in mine.parameters()} == {(torch.float32, "cpu")}
        for part in (engine, mine, mine.out):
            assert part.to("cpu") is part and part.float() is part and part.to(torch.float32) is part
        train(engine, 1, batch=vectors)
        assert engine.unwrap().double().out.weight.dtype == torch.float64

    on_ranks(use, stage=stage, model=make_model(Buffers))


@pytest.mark.parametrize("how", ["data", "set_", "swap_tensors"])
def test_other_data_in_a_parameter_are_refused_by_the_step(how: str) -> None:
    model: Any = make_model()
    engine = engine_of(model, settings(2))
    weight = model.blocks[0].mix.weight
    other = weight.detach().clone()
    if how == "data":
        weight.data = other
    elif how == "set_":
        with torch.no_grad():
            weight.set_(other)
    else:
        torch.utils.swap_tensors(weight, nn.Parameter(other))
    engine.backward(engine(*token_batch(0, 0, 0)))
    with pytest.raises(WherryError, match=r"blocks\.0\.mix\.weight: this parameter has been given other data"):
        engine.step()
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_replaced_and_unfrozen_parameters_are_errors(stage: int, tmp_path: Path) -> None:
    def use(engine: Any) -> None:
        frozen, mix = engine.module.blocks[0].up, engine.module.blocks[1].mix
        weight = mix.weight
        engine.backward(engine(*token_batch(0, 0, engine.comm.rank)))
        for call in (engine.step, lambda: engine.save_checkpoint(tmp_path)):
            frozen.requires_grad_(True)
            with pytest.raises(WherryError, match=r"blocks\.0\.up\.weight: this parameter was frozen"):
                call()
            frozen.requires_grad_(False)
            mix.weight = nn.Parameter(torch.zeros(16, 16))
            with pytest.raises(WherryError, match=r"blocks\.1\.mix\.weight: this parameter has been replaced"):
                call()
            mix.weight = weight
            engine.step()
        assert engine.global_steps == 1

    model: Any = make_model()
    model.blocks[0].requires_grad_(False)
    on_ranks(use, stage=stage, model=model, optimizer=lambda given: sgd(p for p in given if p.requires_grad))


def test_a_parameter_may_be_frozen_for_a_while() -> None:
    def use(engine: Any) -> None:
        for step in range(4):
            engine.module.blocks[1].requires_grad_(step % 2 == 0)
            before = {name: value.clone() for name, value in engine.module.state_dict().items()}
            train(engine, step + 1, step, vectors)
            for name, value in engine.module.state_dict().items():
                frozen = name.startswith("blocks.1.") and step % 2
                assert torch.equal(value, before[name]) == bool(frozen), (step, name)

    on_ranks(use, model=make_model(Stack), optimizer=sgd)


@pytest.mark.parametrize("by_iterator", [False, True])
def test_batch_sizes_that_change_while_training(by_iterator: bool, tmp_path: Path) -> None:
    """Train windows of one micro-batch of 2, then three of 2, then three of 4."""
    phases = ((1, 2), (3, 2), (3, 4))

    def use(engine: Any) -> dict[str, torch.Tensor]:
        for step, (micros, size) in enumerate(phases):
            engine.set_train_micro_batch_size(size)
            engine.set_train_batch_size(2 * micros * size)
            assert (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()) == (size, micros)
            if by_iterator:
                engine.train_batch(token_batch(step, micro, engine.comm.rank, size) for micro in range(micros))
            else:
                train(engine, step + 1, step, partial(token_batch, size=size))
        assert (engine.global_steps, engine.global_samples) == (3, 4 + 12 + 24)
        for wrong in (0, 7, -8):
            with pytest.raises(WherryError, match=r"a multiple of 8 \(micro-batch 4 x 2 ranks\), got"):
                engine.set_train_batch_size(wrong)
        with pytest.raises(WherryError, match="expected 1 or more, got 0"):
            engine.set_train_micro_batch_size(0)
        engine.save_checkpoint(tmp_path)
        engine.global_samples = 0
        engine.load_checkpoint(tmp_path)
        assert engine.global_samples == 40
        return weights_of(engine)

    def whole(step: int, micro: int, rank: int) -> Callable[[nn.Module], torch.Tensor]:
        micros, size = phases[step]
        parts = [token_batch(step, micro, rank, size) for rank in range(2) for micro in range(micros)]
        return lambda model: sum(model(*part) for part in parts) / len(parts)

    assert_near(on_ranks(use, stage=2)[0], train_plain(make_model(), steps=3, batch=whole).weights)


# torch.compile compiles each block alone, and never the model as a whole.


class Graphs:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 3])
def test_the_engine_compiles_every_block_and_nothing_else(stage: int) -> None:
    torch._dynamo.reset()
    model = make_model()
    mine: Any = copy.deepcopy(model)
    engine = engine_of(mine, settings(stage))
    assert not engine.is_compiled
    graphs = Graphs()
    engine.compile(backend=graphs, compile_kwargs={"dynamic": False})
    assert engine.is_compiled
    assert [m._compiled_call_impl is not None for m in mine.blocks] == [True] * 3
    assert mine._compiled_call_impl is None and mine.norm._compiled_call_impl is None
    assert train(engine, 3) == pytest.approx(train_plain(model, steps=3).losses, rel=1e-5)
    assert 1 <= graphs.count <= 3, "one graph for the blocks' common code, or one for each"
    engine.close()


@pytest.mark.long
def test_a_model_or_an_engine_compiled_as_a_whole_is_refused() -> None:
    torch._dynamo.reset()
    model = make_model()
    with pytest.raises(WherryError, match=r"torch.compile\(TinyLM\), and one graph .* engine.compile\(\)"):
        engine_of(torch.compile(model), settings(3))
    engine = engine_of(model, settings(3))
    with pytest.raises(WherryError, match=r"torch.compile\(engine\), and one graph .* call engine.compile\(\)"):
        torch.compile(engine, backend="eager")(*token_batch(0, 0, 0))
    model.compile(backend="eager")
    with pytest.raises(WherryError, match=r"compiled as a whole by TinyLM.compile\(\).* call engine.compile\(\)"):
        engine(*token_batch(0, 0, 0))


GRAPHS = (
    {"mode": "reduce-overhead"},
    {"compile_kwargs": {"mode": "max-autotune"}},
    {"options": {"triton.cudagraphs": True}},
    {"backend": "cudagraphs"},
)


@pytest.mark.parametrize("how", GRAPHS)
def test_cuda_graphs_are_refused_where_weights_are_partitioned(how: dict[str, Any]) -> None:
    with closing(engine_of(make_model(), settings(3))) as engine:
        message = (
            r"compile: CUDA graphs .* gathered at new addresses; expected mode=.*max-autotune-no-cudagraphs.*, got .*"
        )
        with pytest.raises(WherryError, match=message):
            engine.compile(**how)
        assert not engine.is_compiled
        for mode in ("default", "max-autotune-no-cudagraphs"):
            engine.compile(mode=mode)
        assert engine.is_compiled


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"activation_checkpointing": {"policy": "recompute"}}, "activation_checkpointing runs forwards again"),
        ({"wherry": {"accumulation": "layer_major"}}, "run in between each other"),
        ({}, "1 of 3 blocks have no weights that are trained"),
    ],
)
def test_cuda_graphs_are_refused_where_forwards_and_backwards_do_not_alternate(more: Any, reason: str) -> None:
    model = make_model()
    model.blocks[1].requires_grad_(bool(more))
    with (
        closing(engine_of(model, settings(2, more=more))) as engine,
        pytest.raises(WherryError, match=f"{reason}.* got backend='inductor', mode='max-autotune'"),
    ):
        engine.compile(mode="max-autotune")


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 2])
def test_cuda_graphs_train_and_leave_evaluation_to_the_interpreter(stage: int) -> None:
    """Compile by a backend that runs graphs as they are where there is no CUDA."""
    torch._dynamo.reset()
    model, counts = make_model(), torch._dynamo.utils.counters["stats"]
    with closing(engine_of(copy.deepcopy(model), settings(stage))) as engine:
        engine.compile(backend="cudagraphs")
        before = counts["unique_graphs"]
        with torch.no_grad():
            engine(*token_batch(0, 0, 0))
        assert counts["unique_graphs"] == before
        assert train(engine, 3) == pytest.approx(train_plain(model, steps=3).losses, rel=1e-5)
        assert counts["unique_graphs"] > before


def test_a_model_without_blocks_is_refused() -> None:
    model = torch.nn.Linear(4, 4)
    engine, *_ = wherry.initialize(model=model, config=settings(2))
    with pytest.raises(WherryError, match=r"no blocks to compile .*unit_classes"):
        engine.compile()
