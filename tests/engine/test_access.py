"""Weights from outside: shapes, gathered, generation, state_dict, gradients by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.harness import (
    WIDTH,
    TinyLM,
    assert_same,
    engine_of,
    gathered,
    make_model,
    masters_of,
    on_ranks,
    settings,
    token_batch,
    train,
    train_plain,
    train_step,
)
from tests.tiers.rows import ROWS, zero_block
from torch import nn
from torch.utils import dlpack

import wherry
from wherry.errors import DivergenceError, PeerError, WherryError
from wherry.testing import late

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


USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "pow": lambda weight: weight.pow(2).sum(),
    "sum": lambda weight: weight.sum(),
    "linear": torch.no_grad()(lambda weight: weight * torch.ones(1)),
    "view": lambda weight: weight.view(-1),
    "zero_": torch.no_grad()(lambda weight: weight.zero_()),
    "fill_": lambda weight: weight.data.fill_(1),
    "normal_": nn.init.normal_,
    "add_": torch.no_grad()(lambda weight: weight.add_(1)),
    "_foreach_add_": torch.no_grad()(lambda weight: torch._foreach_add_([weight], 1)),
    "__setitem__": lambda weight: weight.data.__setitem__(0, 1.0),
    "add": lambda weight: torch.add(torch.ones(1), 1, out=weight.data),
    "copy": copy.deepcopy,
}


def test_a_use_or_an_edit_of_a_released_parameter_names_it_and_the_cures() -> None:
    model = make_model()
    model.gain = nn.Parameter(torch.ones(1))
    model.gain.requires_grad_(False)
    model.blocks[0].scalar = nn.Parameter(torch.ones(1))

    def use(engine: Any) -> None:
        kept = dict(engine.module.named_parameters())
        for name in ("blocks.1.up.weight", "blocks.0.scalar", "gain"):
            for call, of in USES.items():
                named = "__mul__" if call == "linear" else call
                with pytest.raises(
                    WherryError, match=rf"^{name}: .*gathered\(.*register_external_parameter\("
                ) as raised:
                    of(kept[name])
                assert f": {named} was called" in str(raised.value) or call == "linear"
            weight = kept[name]
            # What says nothing of its values, and a look at it alone.
            assert isinstance(weight, nn.Parameter) and type(weight).__name__ == "Parameter"
            assert torch.zeros_like(weight).shape == weight.shape and weight.to("cpu") is weight
            assert weight.grad is None and "released" in repr(weight)
            with torch.no_grad():
                assert weight.norm().isnan() and weight.data.isnan().all() and weight.detach().isnan().all()
            with wherry.gathered(weight):
                assert type(weight) is nn.Parameter and weight.pow(2).sum().isfinite()
        engine.close()
        with pytest.raises(WherryError, match=r"sum: .*closed.*engine\.unwrap\(\)"):
            kept["gain"].sum()

    on_ranks(use, model=model, optimizer=None, config={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})


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
        with pytest.raises(KeyError), wherry.gathered(module):
            raise KeyError
        assert stage < 3 or module.head.weight.isnan().all()
        train(engine, 1)
        with wherry.gathered(module.blocks[0].mix.weight):
            # One step from the edited value, and not from the old master.
            assert 0 < (module.blocks[0].mix.weight - 0.25).abs().max() < 1e-2

    on_ranks(use, stage=stage, config=BF16)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)


EDITS = {
    "split masters": (BF16, adam),
    "whole masters": (BF16 | {"wherry": {"master": "whole"}}, adam),
    "fp16": ({"fp16": {"enabled": True, "initial_scale_power": 4}}, adam),
    "torch's state": (BF16, partial(torch.optim.RMSprop, lr=1e-2)),
    "fp32": ({}, adam),
    "in the backward": (BF16 | {"wherry": {"update_policy": "in_backward"}}, adam),
    "delayed": (BF16 | {"wherry": {"update_policy": "delayed", "delayed_update_warmup": 99}}, adam),
}


@pytest.mark.parametrize("apart", [False, True], ids=["shared", "apart"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("case", EDITS)
def test_edits_outside_gathered_are_kept(case: str, stage: int, apart: bool) -> None:
    """Edit resident weights between steps; at a rate of 0 they stay, and masters of all others do not change."""
    config, optimizer = EDITS[case]
    zero = {"offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 1e6}

    def use(engine: Any) -> None:
        train(engine, 2)
        engine.optimizer.param_groups[0]["lr"] = 0.0
        masters, (block, *_) = masters_of(engine), engine.module.blocks
        with torch.no_grad():
            block.mix.weight.zero_()
            block.up.weight.data[3].zero_()
            block.down.weight.data.copy_(block.down.weight.flip(0))
            block.down.weight.data[:, 3].neg_()
            block.down.bias.copy_(torch.linspace(-1, 1, WIDTH))
        edited = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
        for _ in range(2):
            train(engine, 3, 2)
            assert_same({n: p.detach().clone() for n, p in engine.module.named_parameters()}, edited)
        for name, after in masters_of(engine).items():
            if name.startswith("blocks.0.") and (name.endswith(("mix.weight", "up.weight")) or ".down." in name):
                close = (after - edited[name].float()).abs() <= edited[name].float().abs() / 256 + 1e-40
                assert close.all(), name
            else:
                assert torch.equal(after, masters[name]), name

    place = (lambda comm: late.topology(comm, late.Chaos(0))) if apart else (lambda comm: comm)
    on_ranks(use, stage=stage, optimizer=optimizer, config=config | {"zero_optimization": zero}, place=place)


def test_an_edit_that_a_delayed_update_would_overwrite_is_an_error() -> None:
    def use(engine: Any) -> None:
        train(engine, 3)
        engine.module.blocks[0].mix.weight.data.zero_()
        with pytest.raises(
            WherryError, match=r"step: weights of blocks\.0.* while a delayed update .*wherry\.gathered"
        ):
            train(engine, 4, 3)
        with wherry.gathered(engine.module):
            engine.module.blocks[0].mix.weight.data.zero_()
        train(engine, 5, 4)

    wherry_block = {"update_policy": "delayed", "delayed_update_warmup": 1}
    zero = {"offload_optimizer": {"device": "cpu"}}
    on_ranks(use, ranks=1, stage=2, config={"wherry": wherry_block, "zero_optimization": zero})


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
    plain: Any = make_model()
    sum(plain(*token_batch(0, 0, rank)) / 2 for rank in range(2)).backward()

    def use(engine: Any) -> None:
        engine.backward(engine(*token_batch(0, 0, engine.comm.rank)))
        name = "blocks.1.up.weight"
        for reader in range(2):  # each by itself
            engine.comm.barrier()
            if engine.comm.rank == reader:
                mine = engine.states.local_gradient(name)
        engine.comm.barrier()
        start, stop = engine.states.local_range(name)
        assert torch.equal(mine, engine.gradients(name).flatten()[start:stop])
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

    on_ranks(use, stage=stage, optimizer=None)


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
    # To read, or, where every rank has the weights, to edit.
    "gathered": lambda engine, folder: wherry.gathered(
        engine.module.norm, modifier_rank=None if engine.placement.parameters.partitioned else 0
    ).__enter__(),
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


# Stage 3, where every use communicates; stage 2, where an edit, a delayed update and the end of a save do.
ALONE = [(call, 3) for call in CALLS] + [("gathered", 2), ("settle", 2), ("wait_for_checkpoint", 2)]


@pytest.mark.parametrize(("call", "stage"), ALONE)
def test_a_call_of_one_rank_alone_is_named_on_every_rank(call: str, stage: int, tmp_path: Path) -> None:
    own = {"update_policy": "delayed", "delayed_update_warmup": 1, "checkpoint": {"async_save": True}}
    config = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "wherry": own} if stage == 2 else {}

    def use(engine: Any) -> str:
        train(engine, 1)
        if call == "wait_for_checkpoint":
            engine.save_checkpoint(tmp_path)
        with pytest.raises((DivergenceError, PeerError)) as raised:
            if engine.comm.rank > 0:
                train_step(engine, 1, 1)
            elif call in CALLS:
                CALLS[call](engine, tmp_path)
            else:
                getattr(engine, call)()
        return str(raised.value)

    for text in on_ranks(use, stage=stage, config=config):
        assert f"rank 0 wants {call}() " in text
        assert f"rank 1 {'all_gather' if stage == 3 else 'reduce_scatter'} of " in text
    assert stage == 2 or not list(tmp_path.iterdir())


# Generation: one gather for many forwards, and weights that are held do not change.


def test_many_forwards_gather_once_and_their_number_may_differ_between_ranks() -> None:
    reference = make_model()

    def use(engine: Any) -> list[float]:
        comm, losses = engine.comm, []
        for step in range(3):
            if step in (0, 2):
                comm.traffic.clear()
                with wherry.gathered_for_generation(engine):
                    once = comm.traffic.calls["all_gather"]
                    with torch.no_grad():
                        for turn in range(3 + comm.rank):
                            seen = float(engine(*token_batch(9, turn, 0)))
                            if step == 0:
                                assert seen == pytest.approx(float(reference(*token_batch(9, turn, 0))), rel=1e-6)
                    assert comm.traffic.calls["all_gather"] == once == len(engine.units)
                    with pytest.raises(WherryError, match="held by gathered_for_generation"):
                        engine.backward(engine(*token_batch(0, 0, 0)))
                assert gathered(engine) == 0
            losses += train(engine, step + 1, step)
        with pytest.raises(KeyError), wherry.gathered_for_generation(engine), wherry.gathered_for_generation(engine):
            raise KeyError("stop")
        assert gathered(engine) == 0, "an exception releases the weights"
        return losses

    losses = [sum(step) / 2 for step in zip(*on_ranks(use), strict=True)]
    assert losses == pytest.approx(train_plain(make_model(), ranks=2, steps=3).losses, rel=1e-5)


def test_held_weights_do_not_change() -> None:
    engine = engine_of(make_model(), settings(2))
    engine.backward(engine(*token_batch(0, 0, 0)))
    with wherry.gathered_for_generation(engine):
        for call in (engine.step, engine.offload_states):
            with pytest.raises(WherryError, match=f"{call.__name__}: weights are held by gathered_for_generation"):
                call()
    engine.step()
    assert engine.global_steps == 1
    with wherry.gathered_for_generation(engine):
        engine.close()
    assert engine.closed


# References that outlive an engine never crash the process.


def forms(tensors: Any) -> list[Any]:
    """Make every object that shares a tensor's memory."""
    found: list[Any] = []
    for tensor in (each.detach() for each in tensors):
        found += [tensor, tensor[:1], tensor.numpy(), memoryview(tensor.numpy())]
        found.append(dlpack.from_dlpack(dlpack.to_dlpack(tensor)))
    return found


def touch(kept: list[Any], *, write: bool = False) -> None:
    for form in kept:
        tensor = form.detach() if isinstance(form, torch.Tensor) else torch.from_numpy(np.asarray(form))
        float((tensor + 1).sum()), str(tensor[:1]), tensor.clone()
        if write and isinstance(form, torch.Tensor) and 0 not in form.stride():
            form.fill_(1.0)


def kept_from_gathered(engine: Any) -> None:
    with wherry.gathered(engine.module, modifier_rank=0):
        kept = forms(engine.module.parameters())
        kept[0][0] = 2.0 + engine.comm.rank
    assert (kept[0][0] == 2.0).all(), "the first rank's edit"
    tensors = kept[:: len(forms([kept[0]]))]
    values = [tensor.clone() for tensor in tensors]
    train(engine, 3, 1)
    touch(kept)
    # Weights that every rank holds are not copied by gathered, and are trained in the same memory.
    assert all(map(torch.equal, tensors, values)) is (engine.zero_optimization_stage() == 3)
    engine.close()
    touch(kept, write=True)


def kept_by_hooks(engine: Any) -> None:
    kept: list[Any] = []

    def keep(module: torch.nn.Module, *_: Any) -> None:
        kept.extend(forms(module.parameters(recurse=False)))

    for module in engine.module.modules():
        module.register_forward_hook(keep)
    for parameter in engine.module.parameters():
        parameter.register_hook(lambda grad: kept.append(grad))
    train(engine, 3, 1)
    touch(kept)
    engine.close()
    touch(kept, write=True)


@pytest.mark.parametrize("row", ["stage-3", "offload-2", "infinity"])
@pytest.mark.parametrize("case", [kept_from_gathered, kept_by_hooks])
def test_no_reference_crashes_the_process(case: Callable[[Any], None], row: str, tmp_path: Path) -> None:
    """A fault crashes the worker of this test."""
    stage, *tiers = ROWS.get(row, (3, "none", "none"))
    config = {"zero_optimization": zero_block(stage, *tiers, tmp_path), "wherry": {"update_policy": "at_step"}}

    def body(engine: Any) -> None:
        train(engine, 1)
        case(engine)

    on_ranks(body, ranks=1 if row == "infinity" else 2, stage=stage, model=make_model(lambda: TinyLM(1)), config=config)
