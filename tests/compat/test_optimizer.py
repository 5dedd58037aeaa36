"""`engine.optimizer` and the calls around it, as a script written for DeepSpeed has them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.compat.harness import BF16, FP16, HOST, batch, engine_of, line, loss_of, make_model, masters, step
from torch import nn

import wherry
from wherry.compat.deepspeed import ops
from wherry.compat.deepspeed import optimizer as faces
from wherry.compat.deepspeed.engine import DeepSpeedEngine
from wherry.testing import run_ranks

SUMS_IN_FP32 = BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}


def test_at_stage_0_in_fp32_it_is_the_very_optimizer_until_the_engine_ends(recwarn):
    model, plain = make_model(), make_model()
    made, other = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain))
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda epoch: 0.5**epoch) for each in (made, other)]
    engine = engine_of(0, model=model, given=made, gradient_clipping=0.0)
    assert engine.optimizer is made and isinstance(made, torch.optim.AdamW)
    for seed in range(3):
        for forward, optimizer, schedule in zip((engine, plain), (made, other), schedules, strict=True):
            forward(batch(seed)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    assert engine.get_lr() == [0.0125] and not [one for one in recwarn if "lr_scheduler" in str(one.message)]
    first, expected = model[0].weight, plain[0].weight
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(made.state[first]["exp_avg"], other.state[expected]["exp_avg"])
    assert made.state_dict()["state"].keys() == other.state_dict()["state"].keys()
    engine.destroy()
    assert type(made) is torch.optim.AdamW


@pytest.mark.parametrize(
    ("stage", "more", "kind", "inner"),
    [
        (0, BF16, faces.FP16_Optimizer, ops.FusedAdam),
        (0, BF16 | {"optimizer": {"type": "Lion"}}, faces.FP16_UnfusedOptimizer, ops.FusedLion),
        (1, SUMS_IN_FP32, faces.BF16_Optimizer, ops.FusedAdam),
        (2, {"zero": HOST}, faces.DeepSpeedZeroOptimizer, ops.DeepSpeedCPUAdam),
        (2, {"zero": HOST, "optimizer": {"type": "Lion"}}, faces.DeepSpeedZeroOptimizer, ops.DeepSpeedCPULion),
        (2, {"zero": HOST, "optimizer": {"type": "lamb"}}, faces.DeepSpeedZeroOptimizer, ops.FusedLamb),
        (3, FP16, faces.DeepSpeedZeroOptimizer_Stage3, ops.FusedAdam),
        (3, {"optimizer": {"type": "muon"}}, faces.DeepSpeedZeroOptimizer_Stage3, ops.MuonWithAuxAdam),
        (3, {"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}, faces.DeepSpeedZeroOptimizer_Stage3,
         torch.optim.AdamW),
    ],
)  # fmt: skip
def test_it_is_of_the_class_that_deepspeed_returns(stage, more, kind, inner):
    engine = engine_of(stage, **more)
    assert isinstance(engine.optimizer, kind)
    assert type(engine.optimizer.optimizer) is inner
    assert getattr(engine.optimizer.optimizer, "adam_w_mode", True)
    engine.destroy()


def test_muon_is_for_matrices_that_are_not_excluded_by_name_or_by_the_script():
    parts = {
        "embed_in": nn.Embedding(5, 4), "wte": nn.Embedding(5, 4), "lm_head": nn.Linear(4, 5, bias=False),
        "mix": nn.Linear(4, 4), "left_out": nn.Linear(4, 4, bias=False), "conv": nn.Conv1d(4, 4, 1),
    }  # fmt: skip
    parts["left_out"].weight.use_muon = False  # type: ignore[assignment]
    params = {"lr": 0.1, "muon_lr": 0.2, "betas": [0.5, 0.5], "ns_method": "standard"}
    engine = engine_of(3, model=nn.ModuleDict(parts), optimizer={"type": "Muon", "params": params})
    names = {p: name for name, p in engine.module.named_parameters()}
    muon, adamw = engine.optimizer.param_groups
    assert [names[p] for p in muon["params"]] == ["wte.weight", "mix.weight"]
    assert len(adamw["params"]) == len(names) - 2
    assert (muon["lr"], muon["weight_decay"], adamw["lr"]) == (0.2, 0, 0.1)
    assert (adamw["betas"], adamw["eps"]) == ((0.5, 0.5), 1e-10)
    engine.destroy()


class Mine(torch.optim.SGD):
    """An optimizer of the script's own."""


@pytest.mark.parametrize(
    ("stage", "make", "more", "kind", "message"),
    [
        (0, None, SUMS_IN_FP32, AssertionError, "grad_accum_dtype"),
        (1, lambda p: Mine(p, lr=0.1), {}, AssertionError, "zero_allow_untested_optimizer"),
        (2, torch.optim.Adam, {"zero": HOST, "zero_force_ds_cpu_optimizer": True}, AssertionError,
         "zero_force_ds_cpu_optimizer"),
        (1, lambda p: ops.FusedLamb(p, max_grad_norm=1.0), {}, wherry.WherryError,
         r"max_grad_norm=1\.0 is not offered; .*gradient_clipping"),
        (1, lambda p: ops.FusedAdam(p, amsgrad=True), {}, RuntimeError, "amsgrad"),
    ],
)  # fmt: skip
def test_optimizers_that_are_refused(stage, make, more, kind, message):
    with pytest.raises(kind, match=message):
        engine_of(stage, given=make, **more)
    if "zero" in more:  # which is what is refused alone
        engine_of(3, zero=more["zero"], given=make).destroy()


@pytest.mark.parametrize(
    ("stage", "more", "key"),
    [
        (0, BF16, "fp32_groups_flat"),
        (1, FP16, "single_partition_of_fp32_groups"),
        (2, {"zero": HOST, **BF16}, "single_partition_of_fp32_groups"),
        (3, BF16, "fp32_flat_groups"),
    ],
)
def test_state_is_shown_written_and_restored_where_it_rests(stage, more, key):
    engine = engine_of(stage, **more)
    step(engine)
    optimizer, first = engine.optimizer.optimizer, next(engine.module.parameters())
    assert len(optimizer.state) == 4
    assert float(optimizer.state[first]["step"]) == (1 if stage else 2)  # it begins with one on zeros, as there
    assert optimizer.state[first]["exp_avg"].abs().sum() > 0
    state, before = engine.optimizer.state_dict(), masters(engine)
    assert torch.equal(torch.cat(state[key]), torch.cat([master.flatten() for master in before]))
    # Masters of 16-bit weights are parts of the flat, and are not saved twice.
    (storage,) = {flat.untyped_storage().data_ptr() for flat in state[key]}
    assert {part["master"].untyped_storage().data_ptr() for part in state["state"].values()} == {storage}
    saved = [copy.deepcopy(state)]  # one for each rank
    held = copy.deepcopy(engine.module.state_dict())
    step(engine, 1)
    after = masters(engine)
    engine.module.load_state_dict(held)
    engine.optimizer.load_state_dict(saved)
    assert all(map(torch.equal, masters(engine), before))
    step(engine, 1)
    assert all(map(torch.equal, masters(engine), after))
    optimizer.state[first]["exp_avg"].zero_()
    assert engine.states.full("0.weight", "exp_avg").abs().sum() == 0
    with pytest.raises(wherry.WherryError, match="cannot be replaced"):
        optimizer.state[first] = {}
    with pytest.raises(wherry.WherryError, match="engine has the state"):
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.25
    assert engine.get_lr() == [0.25]
    engine.destroy()


def test_the_loss_scale_is_shown_and_needed():
    norms = []
    for by_optimizer in (True, False):
        engine = engine_of(1, gradient_accumulation_steps=2, **FP16)
        assert engine.optimizer.cur_scale == 16.0 and not engine.optimizer.overflow
        with pytest.raises(RuntimeError, match="Loss scaling is required"):
            loss_of(engine).backward()
        for seed in range(2):
            loss = loss_of(engine, seed)
            if by_optimizer:  # of a loss that is divided already
                engine.optimizer.backward(loss / 2)
            else:
                engine.backward(loss)
            engine.step()
        assert engine.global_steps == 1
        norms.append(engine.get_global_grad_norm())
        engine.destroy()
    assert norms[0] == norms[1]


def test_backward_refuses_what_is_no_loss_and_zero_grad_keeps_the_count_of_micro_batches():
    engine = engine_of(1, gradient_accumulation_steps=2, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    engine.backward(loss_of(engine))
    engine.step()
    engine.zero_grad()
    loss = loss_of(engine, 1)
    assert engine.backward(loss, scale_wrt_gas=False) == loss
    engine.step()
    assert engine.global_steps == 1
    plain = make_model()
    plain(batch(1)).mean().backward()
    torch.testing.assert_close(
        engine.get_global_grad_norm(), nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    )
    for wrong in (engine(batch()), loss.detach(), 3.0):
        for call in (engine.scale, engine.backward):
            with pytest.raises(AssertionError, match="scalar tensor"):
                call(wrong)
    engine.destroy()
    with pytest.raises(ValueError, match="has been destroyed; call deepspeed"):
        engine(batch())
    config = {"train_micro_batch_size_per_gpu": 2}
    engine = wherry.initialize(model=make_model(), config=config, engine_class=DeepSpeedEngine)[0]
    with pytest.raises(AssertionError, match="must provide optimizer"):
        engine.backward(loss_of(engine))
    engine.destroy()


def test_coalesced_gradients_are_reduced_together_at_the_end():
    def body(comm: Any) -> torch.Tensor:
        engine = engine_of(1, model=line(), mesh=comm)
        with pytest.raises(ZeroDivisionError), engine.coalesce_grad_reduction():
            raise ZeroDivisionError
        with engine.coalesce_grad_reduction():
            for size in (1.0, 2.0):
                engine.backward(engine(torch.full((1, 4), size + 4 * comm.rank)).sum())
            with pytest.raises(AssertionError, match="no_sync"):
                engine.step()
            with pytest.raises(AssertionError, match="nested"), engine.coalesce_grad_reduction():
                pass
        gradient = engine.gradients("weight")
        engine.step()
        assert engine.was_step_applied()
        engine.destroy()
        return gradient

    for gradient in run_ranks(2, body):
        assert torch.equal(gradient, torch.full((1, 4), (1.0 + 2 + 5 + 6) / 2))
    for stage, more, message in ((0, {}, "stage 1/2/3"), (1, SUMS_IN_FP32, "optimizer wrapper")):
        engine = engine_of(stage, **more)
        with pytest.raises(NotImplementedError, match=message), engine.coalesce_grad_reduction():
            pass
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 2])
def test_sparse_gradients_are_trained_as_dense_ones(stage):
    tokens, found = torch.tensor([[1, 2, 2], [4, 9, 1]]), []
    for sparse in (True, False):
        model = nn.Sequential(nn.EmbeddingBag(10, 4, mode="sum", sparse=sparse), nn.Linear(4, 1))
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)
        engine = engine_of(stage, model=model, sparse_gradients=sparse)
        for _ in range(2):
            engine.backward(engine(tokens).mean())
            engine.step()
        found.append(masters(engine))
        engine.destroy()
    assert all(map(torch.equal, *found))
