"""Weights from outside: shapes, gathered, state_dict."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import WIDTH, Run, TinyLM, adamw, assert_equal, make_model, settings, token_batch, train_plain

import wherry
from wherry.errors import DivergenceError, PeerError, WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks


def on_ranks(stage: int, use: Any, ranks: int = 2, more: dict[str, Any] | None = None) -> list[Any]:
    model = make_model()

    def body(comm: Comm) -> Any:
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(
            model=mine, optimizer=adamw(mine.parameters()), config=settings(stage, more=more), mesh=comm
        )
        return use(engine, comm)

    return run_ranks(ranks, body)


def test_a_released_parameter_keeps_its_shape_and_is_loud() -> None:
    def use(engine: Any, comm: Comm) -> None:
        for (name, parameter), (_, original) in zip(
            engine.module.named_parameters(), make_model().named_parameters(), strict=True
        ):
            assert parameter.shape == original.shape, name
            assert parameter.dtype == original.dtype
            assert parameter.numel() == original.numel()
            assert parameter.isnan().all()
        with pytest.raises(RuntimeError):
            engine.module.head.weight.data.add_(1)

    on_ranks(3, use)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gathered_reads_and_edits(stage: int) -> None:
    original = dict(make_model().named_parameters())

    def use(engine: Any, comm: Comm) -> None:
        module = engine.module
        with wherry.gathered(module.blocks[1].mix.weight):
            assert torch.equal(module.blocks[1].mix.weight, original["blocks.1.mix.weight"])
        # One rank edits, for all.
        with wherry.gathered([module.blocks[0].mix.weight, module.head.weight], modifier_rank=1):
            if comm.rank == 1:
                module.blocks[0].mix.weight.data.fill_(0.25)
                module.head.weight.data[3] = 7
        # All edit alike.
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

    on_ranks(stage, use)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_edit_reaches_the_fp32_master_and_reading_does_not(stage: int) -> None:
    def use(engine: Any, comm: Comm) -> tuple[torch.Tensor, torch.Tensor]:
        def masters() -> dict[str, torch.Tensor]:
            return {name: engine.states.full(name, "master") for name, _ in engine.module.named_parameters()}

        before = masters()
        with wherry.gathered(engine.module):
            pass
        assert all(torch.equal(master, before[name]) for name, master in masters().items())
        weight = engine.module.blocks[1].up.weight
        with wherry.gathered(weight, modifier_rank=0):
            if comm.rank == 0:
                weight.data.zero_()
        engine.backward(engine(*token_batch(0, 0, comm.rank)))
        engine.step()
        with wherry.gathered(weight):
            # One step of Adam from zero, and not from the old master.
            assert 0 < weight.abs().max() < 4e-3
        assert not torch.equal(masters()["blocks.0.up.weight"], before["blocks.0.up.weight"])

    on_ranks(stage, use, more={"bf16": {"enabled": True}})


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_is_assigned_to_the_data_of_a_gathered_weight_is_an_edit(stage: int) -> None:
    def use(engine: Any, comm: Comm) -> None:
        weight = engine.module.blocks[1].mix.weight
        with wherry.gathered(weight, modifier_rank=0):
            if comm.rank == 0:
                weight.data = torch.full_like(weight, 0.5)
        with wherry.gathered(weight):
            assert (weight == 0.5).all()
        engine.backward(engine(*token_batch(0, 0, comm.rank)))
        engine.step()
        with wherry.gathered(weight):
            assert 0 < (weight - 0.5).abs().max() < 1e-2

    on_ranks(stage, use)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_kept_of_gathered_weights_stays(stage: int) -> None:
    """In forms that torch knows of and in others. Weights that every rank holds are trained on, in the same memory."""

    def use(engine: Any, comm: Comm) -> None:
        weight = engine.module.blocks[1].mix.weight
        with wherry.gathered(weight, modifier_rank=0):
            kept, array = weight.detach(), weight.detach().numpy()
            kept[0] = 2.0 if comm.rank == 0 else 3.0
        assert (kept[0] == 2.0).all() and (array[0] == 2.0).all()
        before = kept.clone()
        for step in range(2):
            engine.backward(engine(*token_batch(step, 0, comm.rank)))
            engine.step()
        assert torch.equal(kept, before) is (stage == 3)
        assert torch.equal(torch.from_numpy(array), kept)
        with wherry.gathered(weight), wherry.gathered_for_generation(engine):
            # A forward inside reads what is shown, and its backward may come later.
            loss = engine.module(*token_batch(2, 0, comm.rank))
        assert torch.isfinite(loss)

    on_ranks(stage, use)


def test_a_backward_outside_of_gathered_of_a_forward_inside_equals_plain() -> None:
    def use(engine: Any, comm: Comm) -> list[float]:
        losses = []
        for step in range(3):
            with wherry.gathered(engine.module.blocks[1]):
                loss = engine(*token_batch(step, 0, comm.rank))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses

    plain = train_plain(make_model(), ranks=2, steps=3).losses
    found = [sum(step) / 2 for step in zip(*on_ranks(3, use), strict=True)]
    assert found == pytest.approx(plain, rel=1e-5)


def test_an_edit_that_fails_leaves_a_healthy_engine() -> None:
    def use(engine: Any, comm: Comm) -> None:
        with pytest.raises(KeyError), wherry.gathered(engine.module):
            raise KeyError
        assert engine.module.head.weight.isnan().all()
        engine.backward(engine(*token_batch(0, 0, comm.rank)))
        engine.step()

    on_ranks(3, use)


def test_modifier_rank_is_checked() -> None:
    def use(engine: Any, comm: Comm) -> None:
        with pytest.raises(WherryError, match="not a rank of 0 to 1"), wherry.gathered(engine.module, modifier_rank=2):
            pass

    on_ranks(3, use)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_state_dict_holds_whole_weights_under_every_name(stage: int) -> None:
    expected = make_model().state_dict()

    def use(engine: Any, comm: Comm) -> None:
        state = engine.module.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        assert {f"module.{name}" for name in expected} == engine.state_dict().keys()
        if stage == 3:
            assert engine.module.head.weight.isnan().all()

    on_ranks(stage, use)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_load_state_dict_reaches_shards_and_masters(stage: int, precision: str) -> None:
    other = make_model(seed=5).state_dict()

    def use(engine: Any, comm: Comm) -> None:
        engine.module.load_state_dict(other)
        state = engine.module.state_dict()
        assert all(torch.equal(state[name], value.to(state[name].dtype)) for name, value in other.items())
        engine.backward(engine(*token_batch(0, 0, comm.rank)))
        engine.step()
        after = engine.module.state_dict()
        for name, value in other.items():
            assert (after[name].float() - value).abs().max() < (5e-3 if precision == "fp32" else 3e-2), name

    on_ranks(stage, use, more={} if precision == "fp32" else {"bf16": {"enabled": True}})


def test_a_bad_load_names_the_keys_and_loses_nothing() -> None:
    state = make_model(seed=5).state_dict()
    del state["norm.bias"]
    state["surplus"] = torch.ones(1)

    def use(engine: Any, comm: Comm) -> None:
        with pytest.raises(RuntimeError, match=r"(?s)norm\.bias.*surplus"):
            engine.module.load_state_dict(state)
        before = engine.module.state_dict()
        with pytest.raises(RuntimeError, match="surplus"):
            engine.module.blocks[0].load_state_dict({"surplus": torch.ones(1)})
        assert all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items())
        engine.module.load_state_dict(before)
        engine.backward(engine(*token_batch(0, 0, comm.rank)))
        engine.step()
        assert engine.module.head.weight.isnan().all()

    on_ranks(3, use)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_by_name(stage: int) -> None:
    plain = TinyLM()
    plain.load_state_dict(make_model().state_dict())
    sum(plain(*token_batch(0, 0, rank)) / 2 for rank in range(2)).backward()

    def use(engine: Any, comm: Comm) -> None:
        engine.backward(engine(*token_batch(0, 0, comm.rank)))
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

    on_ranks(stage, use)


def test_looking_at_gradients_changes_no_bit(tmp_path: Path) -> None:
    """Norms by unit, single gradients, and a checkpoint between backward and step."""

    def train(more: dict[str, Any], *, look: bool) -> Run:
        model = copy.deepcopy(source)
        config = settings(1, clip=0.05, more=more)
        engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
        run = Run()
        for step in range(6):
            engine.backward(engine(*token_batch(step, 0, 0)))
            if look:
                norms = engine.gradient_norms()
                grad = engine.gradients("blocks.1.up.weight")
                assert 0 < float(grad.norm()) <= norms["blocks.1"] * (1 + 1e-6)
            if look and step % 2:
                engine.save_checkpoint(tmp_path)
            engine.step()
            run.norms.append(engine.get_global_grad_norm())
            if look:
                squares = sum(norm**2 for norm in norms.values())
                assert squares == pytest.approx(run.norms[-1] ** 2, rel=1e-12)
        run.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        engine.close()
        return run

    source = make_model()
    for more in ({}, {"bf16": {"enabled": True}}):
        plain, watched = train(more, look=False), train(more, look=True)
        assert watched.norms == plain.norms
        assert_equal(watched, plain)


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_that_are_not_complete_or_dropped_are_refused(stage: int) -> None:
    def use(engine: Any, comm: Comm) -> None:
        def refused() -> None:
            with pytest.raises(WherryError, match=r"there is none of norm\.weight now"):
                engine.gradients("norm.weight")

        refused()
        engine.set_train_batch_size(8)
        for micro in range(2):
            refused()
            engine.backward(engine(*token_batch(0, micro, comm.rank)))
        assert engine.gradients("norm.weight").any()
        engine.zero_grad()
        refused()

    on_ranks(stage, use)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_updates_use_in_the_backward_are_refused_on_every_rank(stage: int) -> None:
    """However far the updates have come on each of them."""

    def use(engine: Any, comm: Comm) -> None:
        for step in range(4):
            engine.backward(engine(*token_batch(step, 0, comm.rank)))
            for name in ("norm.weight", "blocks.2.up.weight"):
                with pytest.raises(WherryError, match="its gradients are gone"):
                    engine.gradients(name)
            engine.step()

    on_ranks(stage, use, more={"wherry": {"update_policy": "in_backward"}})


def test_ranks_start_from_the_weights_of_rank_0() -> None:
    def body(comm: Comm) -> dict[str, torch.Tensor]:
        engine, *_ = wherry.initialize(model=models[comm.rank], config=settings(3), mesh=comm)
        return engine.module.state_dict()

    models = [make_model(seed=rank) for rank in range(2)]
    expected = make_model(seed=0).state_dict()
    for state in run_ranks(2, body):
        assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_that_is_unwrapped_leaves_the_model_whole(stage):
    shared = make_model()

    def body(comm):
        model = copy.deepcopy(shared)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        engine, *_ = wherry.initialize(model=model, mesh=comm, config=settings(stage))
        assert engine.unwrap() is model
        assert engine.closed
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name]), name
        again, *_ = wherry.initialize(model=model, mesh=comm, config=settings(stage))
        again.close()

    run_ranks(2, body)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("master", ["whole", "split"])
def test_flats_that_are_updated_together_are_edited_each_by_itself(stage: int, master: str) -> None:
    """All of the model at once, as load_state_dict does: no edit is undone by the masters of another flat's."""

    def use(engine: Any, comm: Comm) -> None:
        engine.backward(engine(*token_batch(0, 0, comm.rank)))
        engine.step()
        wanted = {name: weight * 0.5 for name, weight in engine.module.state_dict().items()}
        engine.module.load_state_dict(wanted)
        found = engine.module.state_dict()
        assert [name for name, weight in wanted.items() if not torch.equal(found[name], weight)] == []
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(engine.states.full(name, "master").to(parameter.dtype), wanted[name]), name

    on_ranks(stage, use, more={"bf16": {"enabled": True}, "wherry": {"master": master}})


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
    "gradient_norms": lambda engine, folder: engine.gradient_norms(),
    "states.full": lambda engine, folder: engine.states.full("norm.weight", "exp_avg"),
    "states.set_local": lambda engine, folder: engine.states.set_local(
        "norm.weight", "master", engine.states.local("norm.weight", "master")
    ),
    "states.set_full": lambda engine, folder: engine.states.set_full("norm.weight", "exp_avg", torch.ones(WIDTH)),
    "states.set_gradient": lambda engine, folder: engine.states.set_gradient("norm.weight", torch.ones(WIDTH)),
    "load_pretrained": lambda engine, folder: wherry.load_pretrained(engine, folder),
    "set_train_batch_size": lambda engine, folder: engine.set_train_batch_size(2 * engine.train_batch_size()),
    "set_train_micro_batch_size": lambda engine, folder: engine.set_train_micro_batch_size(5),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_one_rank_makes_alone_is_named_on_every_rank(call: str, tmp_path: Path) -> None:
    def use(engine: Any, comm: Comm) -> str:
        engine.backward(engine(*token_batch(0, 0, comm.rank)))
        engine.step()
        with pytest.raises((DivergenceError, PeerError)) as told:
            if comm.rank == 0:
                CALLS[call](engine, tmp_path)
            else:
                engine(*token_batch(1, 0, comm.rank))
        return str(told.value)

    for text in on_ranks(3, use):
        assert f"rank 0 wants {call}() " in text and "rank 1 all_gather of " in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["gathered", "settle", "wait_for_checkpoint"])
def test_so_is_one_of_weights_that_every_rank_holds(call: str, tmp_path: Path) -> None:
    """An edit travels to the others, a late update as well; and a save behind training ends on all ranks."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    own = {"update_policy": "delayed", "delayed_update_warmup": 1, "checkpoint": {"async_save": True}}

    def use(engine: Any, comm: Comm) -> str:
        engine.backward(engine(*token_batch(0, 0, comm.rank)))
        engine.step()
        if call == "wait_for_checkpoint":
            engine.save_checkpoint(tmp_path)
        with pytest.raises((DivergenceError, PeerError)) as told:
            if comm.rank > 0:
                engine.backward(engine(*token_batch(1, 0, comm.rank)))
            elif call == "gathered":
                wherry.gathered(engine.module.norm, modifier_rank=0).__enter__()
            else:
                getattr(engine, call)()
        return str(told.value)

    for text in on_ranks(2, use, more={"zero_optimization": zero, "wherry": own}):
        assert f"rank 0 wants {call}() " in text and "rank 1 reduce_scatter of " in text


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_rank_looks_at_its_own_part_of_a_gradient_alone(stage: int) -> None:
    def use(engine: Any, comm: Comm) -> None:
        engine.backward(engine(*token_batch(0, 0, comm.rank)))
        name = "blocks.1.up.weight"
        start, stop = engine.states.local_range(name)
        comm.barrier()
        mine = [engine.states.local_gradient(name)] if comm.rank == 0 else []
        comm.barrier()
        mine = mine or [engine.states.local_gradient(name)]
        assert torch.equal(mine[0], engine.gradients(name).flatten()[start:stop])

    on_ranks(stage, use)
