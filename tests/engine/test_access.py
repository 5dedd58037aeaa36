"""Weights from outside: shapes, gathered, state_dict, gradients by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    WIDTH,
    TinyLM,
    assert_same,
    engine_of,
    make_model,
    masters_of,
    on_ranks,
    settings,
    token_batch,
    train,
    train_plain,
    train_step,
)

import wherry
from wherry.errors import DivergenceError, PeerError, WherryError

BF16 = {"bf16": {"enabled": True}}


def test_a_released_parameter_keeps_its_shape_and_reads_as_nan() -> None:
    def use(engine: Any) -> None:
        parameters = dict(engine.module.named_parameters())
        for name, original in make_model().named_parameters():
            assert (parameters[name].shape, parameters[name].dtype) == (original.shape, original.dtype), name
            assert parameters[name].numel() == original.numel()
            assert parameters[name].isnan().all()
        with pytest.raises(RuntimeError):
            engine.module.head.weight.data.add_(1)

    on_ranks(use)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gathered_reads_and_edits(stage: int) -> None:
    original = dict(make_model().bfloat16().named_parameters())

    def use(engine: Any) -> None:
        module, rank, masters = engine.module, engine.comm.rank, masters_of(engine)
        with wherry.gathered(module):
            assert torch.equal(module.blocks[1].mix.weight, original["blocks.1.mix.weight"])
        assert_same(masters_of(engine), masters)
        # One rank edits for all.
        with wherry.gathered([module.blocks[0].mix.weight, module.head.weight], modifier_rank=1):
            if rank == 1:
                module.blocks[0].mix.weight.data = torch.full((WIDTH, WIDTH), 0.25)
                module.head.weight.data[3] = 7
        # All ranks make the same edit.
        with torch.no_grad(), wherry.gathered(module.blocks[2]):
            module.blocks[2].down.bias.fill_(-1)
        with wherry.gathered(module.parameters()):
            assert (module.blocks[0].mix.weight == 0.25).all()
            assert (module.embed.weight[3] == 7).all()
            assert torch.equal(module.embed.weight[4], original["embed.weight"][4])
            assert (module.blocks[2].down.bias == -1).all()
            assert torch.equal(module.blocks[2].up.weight, original["blocks.2.up.weight"])
        with wherry.gathered(module.head.weight), wherry.gathered(module.embed.weight):
            assert not module.head.weight.isnan().any()
        with wherry.gathered([]), wherry.gathered(torch.ones(2)):
            pass
        with pytest.raises(WherryError, match="not a rank of 0 to 1"), wherry.gathered(module, modifier_rank=2):
            pass
        train(engine, 1)
        with wherry.gathered(module.blocks[0].mix.weight):
            # One step from the edited value, and not from the old master.
            assert 0 < (module.blocks[0].mix.weight - 0.25).abs().max() < 1e-2

    on_ranks(use, stage=stage, config=BF16)


@pytest.mark.parametrize("stage", [0, 3])
def test_views_kept_of_gathered_weights_stay_valid(stage: int) -> None:
    """Keep a tensor and a NumPy array; weights that every rank holds are trained in the same memory."""

    def use(engine: Any) -> None:
        weight = engine.module.blocks[1].mix.weight
        with wherry.gathered(weight, modifier_rank=0):
            kept, array = weight.detach(), weight.detach().numpy()
            kept[0] = 2.0 if engine.comm.rank == 0 else 3.0
        assert (kept[0] == 2.0).all() and (array[0] == 2.0).all()
        before = kept.clone()
        train(engine, 2)
        assert torch.equal(kept, before) is (stage == 3)
        assert torch.equal(torch.from_numpy(array), kept)

    on_ranks(use, stage=stage)


def test_a_backward_outside_of_gathered_of_a_forward_inside_equals_plain() -> None:
    def use(engine: Any) -> list[float]:
        losses = []
        for step in range(2):
            with wherry.gathered(engine.module.blocks[1]):
                loss = engine(*token_batch(step, 0, engine.comm.rank))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses

    losses = [sum(step) / 2 for step in zip(*on_ranks(use), strict=True)]
    assert losses == pytest.approx(train_plain(make_model(), ranks=2, steps=2).losses, rel=1e-5)


def test_an_edit_that_fails_leaves_a_healthy_engine() -> None:
    def use(engine: Any) -> None:
        with pytest.raises(KeyError), wherry.gathered(engine.module):
            raise KeyError
        assert engine.module.head.weight.isnan().all()
        train(engine, 1)

    on_ranks(use)


def test_state_dict_has_whole_weights_under_every_name() -> None:
    expected = make_model().state_dict()

    def use(engine: Any) -> None:
        assert_same(engine.module.state_dict(), dict(expected))
        assert {f"module.{name}" for name in expected} == engine.state_dict().keys()
        assert engine.module.head.weight.isnan().all()

    on_ranks(use)


def test_a_bad_load_names_the_keys_and_changes_nothing() -> None:
    state = make_model(seed=5).state_dict()
    del state["norm.bias"]
    state["surplus"] = torch.ones(1)

    def use(engine: Any) -> None:
        with pytest.raises(RuntimeError, match=r"(?s)norm\.bias.*surplus"):
            engine.module.load_state_dict(state)
        before = engine.module.blocks[0].state_dict()
        with pytest.raises(RuntimeError, match="surplus"):
            engine.module.blocks[0].load_state_dict({"surplus": torch.ones(1)})
        assert engine.module.head.weight.isnan().all()
        assert_same(engine.module.blocks[0].state_dict(), before)

    on_ranks(use)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_by_name(stage: int) -> None:
    plain: Any = TinyLM()
    plain.load_state_dict(make_model().state_dict())
    sum(plain(*token_batch(0, 0, rank)) / 2 for rank in range(2)).backward()

    def use(engine: Any) -> None:
        engine.backward(engine(*token_batch(0, 0, engine.comm.rank)))
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(engine.gradients(name), parameter.grad, rtol=1e-5, atol=1e-7)
        with pytest.raises(WherryError, match=r"did you mean 'blocks\.1\.mix\.weight'"):
            engine.gradients("blocks.1.mix.weigth")
        replaced = 3 * engine.gradients("blocks.1.up.weight")
        engine.states.set_gradient("blocks.1.up.weight", replaced)
        assert torch.equal(engine.gradients("blocks.1.up.weight"), replaced)
        engine.step()
        norms = engine.gradient_norms()
        assert set(norms) == {"root", "blocks.0", "blocks.1", "blocks.2"}
        total = sum(value**2 for value in norms.values()) ** 0.5
        assert total == pytest.approx(engine.get_global_grad_norm())
        torch.testing.assert_close(engine.gradients("norm.weight"), plain.norm.weight.grad, rtol=1e-5, atol=1e-7)

    on_ranks(use, stage=stage)


def test_reads_of_gradients_change_no_bit(tmp_path: Path) -> None:
    """Read norms by unit and single gradients, and save a checkpoint, between backward and step."""

    def trained(read: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        engine, norms = engine_of(copy.deepcopy(model), settings(1, clip=0.05, more=BF16)), []
        for step in range(3):
            engine.backward(engine(*token_batch(step, 0, 0)))
            if read:
                engine.gradients("blocks.1.up.weight")
                by_unit = engine.gradient_norms()
                engine.save_checkpoint(tmp_path)
            engine.step()
            norms.append(engine.get_global_grad_norm())
            if read:
                assert sum(norm**2 for norm in by_unit.values()) == pytest.approx(norms[-1] ** 2, rel=1e-12)
        return norms, masters_of(engine)

    model = make_model()
    (norms, masters), (norms_read, masters_read) = trained(False), trained(True)
    assert norms_read == norms
    assert_same(masters_read, masters)


@pytest.mark.parametrize("stage", [0, 3])
def test_incomplete_or_dropped_gradients_are_refused(stage: int) -> None:
    def use(engine: Any) -> None:
        def refused() -> None:
            with pytest.raises(WherryError, match=r"there is none of norm\.weight now"):
                engine.gradients("norm.weight")

        refused()
        engine.set_train_batch_size(8)
        for micro in range(2):
            refused()
            engine.backward(engine(*token_batch(0, micro, engine.comm.rank)))
        assert engine.gradients("norm.weight").any()
        engine.zero_grad()
        refused()

    on_ranks(use, stage=stage)


def test_gradients_used_in_the_backward_are_refused() -> None:
    def use(engine: Any) -> None:
        for step in range(2):
            engine.backward(engine(*token_batch(step, 0, engine.comm.rank)))
            with pytest.raises(WherryError, match="its gradients are gone"):
                engine.gradients("norm.weight")
            engine.step()

    on_ranks(use, config={"wherry": {"update_policy": "in_backward"}})


@pytest.mark.parametrize(("stage", "master"), [(0, "split"), (2, "split"), (2, "whole"), (3, "whole")])
def test_load_state_dict_reaches_shards_and_masters(stage: int, master: str) -> None:
    """Expect the masters of one flat to undo no edit of another in the same update."""

    def use(engine: Any) -> None:
        train(engine, 1)
        wanted = {name: weight * 0.5 for name, weight in engine.module.state_dict().items()}
        engine.module.load_state_dict(wanted)
        assert_same(engine.module.state_dict(), wanted)
        for name, value in masters_of(engine).items():
            assert torch.equal(value.to(wanted[name].dtype), wanted[name]), name
        train(engine, 2, 1)
        for name, value in masters_of(engine).items():
            assert 0 < (value - wanted[name].float()).abs().max() < 5e-2, name

    on_ranks(use, stage=stage, config={**BF16, "wherry": {"master": master}})


CALLS: dict[str, Callable[[Any, Path], Any]] = {
    "state_dict": lambda engine, folder: engine.module.state_dict(),
    "load_state_dict": lambda engine, folder: engine.module.load_state_dict({}),
    "gathered": lambda engine, folder: wherry.gathered(engine.module.norm).__enter__(),
    "gathered_for_generation": lambda engine, folder: wherry.gathered_for_generation(engine).__enter__(),
    "unwrap": lambda engine, folder: engine.unwrap(),
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder),
    "load_checkpoint": lambda engine, folder: engine.load_checkpoint(folder),
    "save_16bit_model": lambda engine, folder: engine.save_16bit_model(folder),
    "consolidated_state_dict": lambda engine, folder: engine.consolidated_state_dict(),
    "gradients": lambda engine, folder: engine.gradients("norm.weight"),
    "states.full": lambda engine, folder: engine.states.full("norm.weight", "exp_avg"),
    "set_train_batch_size": lambda engine, folder: engine.set_train_batch_size(2 * engine.train_batch_size()),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_one_rank_alone_is_named_on_every_rank(call: str, tmp_path: Path) -> None:
    def use(engine: Any) -> str:
        train(engine, 1)
        with pytest.raises((DivergenceError, PeerError)) as raised:
            if engine.comm.rank == 0:
                CALLS[call](engine, tmp_path)
            else:
                engine(*token_batch(1, 0, 1))
        return str(raised.value)

    for text in on_ranks(use):
        assert f"rank 0 wants {call}() " in text and "rank 1 all_gather of " in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["gathered", "settle", "wait_for_checkpoint"])
def test_a_call_of_one_rank_alone_on_whole_weights_is_named(call: str, tmp_path: Path) -> None:
    """Call what communicates at stage 2: an edit, a delayed update, the end of an asynchronous save."""
    own = {"update_policy": "delayed", "delayed_update_warmup": 1, "checkpoint": {"async_save": True}}

    def use(engine: Any) -> str:
        train(engine, 1)
        if call == "wait_for_checkpoint":
            engine.save_checkpoint(tmp_path)
        with pytest.raises((DivergenceError, PeerError)) as raised:
            if engine.comm.rank > 0:
                train_step(engine, 1, 1)
            elif call == "gathered":
                wherry.gathered(engine.module.norm, modifier_rank=0).__enter__()
            else:
                getattr(engine, call)()
        return str(raised.value)

    config = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "wherry": own}
    for text in on_ranks(use, stage=2, config=config):
        assert f"rank 0 wants {call}() " in text and "rank 1 reduce_scatter of " in text


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_rank_reads_its_own_part_of_a_gradient_alone(stage: int) -> None:
    def use(engine: Any) -> None:
        engine.backward(engine(*token_batch(0, 0, engine.comm.rank)))
        name = "blocks.1.up.weight"
        start, stop = engine.states.local_range(name)
        engine.comm.barrier()
        mine = [engine.states.local_gradient(name)] if engine.comm.rank == 0 else []
        engine.comm.barrier()
        mine = mine or [engine.states.local_gradient(name)]
        assert torch.equal(mine[0], engine.gradients(name).flatten()[start:stop])

    on_ranks(use, stage=stage)
