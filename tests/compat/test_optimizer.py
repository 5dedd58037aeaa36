"""`engine.optimizer` and the calls around it, as a script written for DeepSpeed has them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import wherry
import wherry.optim
from wherry.compat.deepspeed import ops
from wherry.compat.deepspeed import optimizer as faces
from wherry.compat.deepspeed.config import load
from wherry.compat.deepspeed.engine import DeepSpeedEngine
from wherry.testing import run_ranks
from wherry.update.optimizer import ShardedOptimizer

ADAM = {"type": "Adam", "params": {"lr": 0.01}}
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}
HOST = {"offload_optimizer": {"device": "cpu"}}


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def engine_of(
    stage: int, *, model: nn.Module | None = None, given: Any = None, zero: Any = None, mesh: Any = None, **more: Any
) -> Any:
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage, **(zero or {})}, **more}
    if given is None:
        config.setdefault("optimizer", ADAM)
    model = model or make_model()
    return wherry.initialize(
        model=model, optimizer=given, config=load(config), mesh=mesh, engine_class=DeepSpeedEngine
    )[0]


def batch(engine: Any, seed: int = 0) -> torch.Tensor:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
    return x.to(engine.working_dtype or torch.float32)


def loss_of(engine: Any, seed: int = 0) -> torch.Tensor:
    return engine(batch(engine, seed)).float().mean()


def step(engine: Any, seed: int = 0) -> None:
    engine.backward(loss_of(engine, seed))
    engine.step()


def weights(engine: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in engine.module.parameters()]


def test_at_stage_0_in_fp32_it_is_the_very_optimizer_until_the_engine_ends():
    model, made = make_model(), []
    plain = copy.deepcopy(model)
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.AdamW(parameters, lr=0.1))
        return made[0]

    engine = engine_of(0, model=model, given=make, gradient_clipping=0.0)
    assert engine.optimizer is made[0]
    assert isinstance(made[0], torch.optim.AdamW)
    for seed in range(3):
        loss_of(engine, seed).backward()
        made[0].step()  # the script's own
        made[0].zero_grad()
        plain(batch(engine, seed)).mean().backward()
        other.step()
        other.zero_grad()
    first = next(engine.module.parameters())
    torch.testing.assert_close(first, next(plain.parameters()))
    torch.testing.assert_close(made[0].state[first]["exp_avg"], other.state[next(plain.parameters())]["exp_avg"])
    assert made[0].state_dict()["state"].keys() == other.state_dict()["state"].keys()
    engine.destroy()
    assert type(made[0]) is torch.optim.AdamW
    assert made[0].step.__func__ is not ShardedOptimizer.step


def test_a_schedule_that_was_made_before_the_engine_moves_it(recwarn):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    engine = engine_of(0, model=model, given=optimizer)
    step(engine)
    schedule.step()
    assert engine.get_lr() == [0.5]
    assert not [one for one in recwarn if "lr_scheduler" in str(one.message)]
    engine.destroy()
    assert optimizer.step._wrapped_by_lr_sched  # the schedule's, as it was


@pytest.mark.parametrize(
    ("stage", "more", "kind", "inner"),
    [
        (0, BF16, faces.FP16_Optimizer, ops.FusedAdam),
        (0, BF16 | {"optimizer": {"type": "Lion", "params": {}}}, faces.FP16_UnfusedOptimizer, ops.FusedLion),
        (1, {}, faces.DeepSpeedZeroOptimizer, ops.FusedAdam),
        (1, BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}, faces.BF16_Optimizer, ops.FusedAdam),
        (2, {"zero": HOST}, faces.DeepSpeedZeroOptimizer, ops.DeepSpeedCPUAdam),
        (2, {"zero": HOST, "optimizer": {"type": "Lion"}}, faces.DeepSpeedZeroOptimizer, ops.DeepSpeedCPULion),
        (3, FP16, faces.DeepSpeedZeroOptimizer_Stage3, ops.FusedAdam),
        (0, FP16 | {"optimizer": {"type": "Lamb"}}, faces.FP16_UnfusedOptimizer, ops.FusedLamb),
        (2, {"zero": HOST, "optimizer": {"type": "lamb"}}, faces.DeepSpeedZeroOptimizer, ops.FusedLamb),
        (3, {"optimizer": {"type": "muon"}}, faces.DeepSpeedZeroOptimizer_Stage3, ops.MuonWithAuxAdam),
        (3, {"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}, faces.ZeROOptimizer, torch.optim.AdamW),
    ],
)  # fmt: skip
def test_it_is_of_the_class_that_deepspeed_returns(stage, more, kind, inner):
    engine = engine_of(stage, **more)
    assert isinstance(engine.optimizer, kind)
    assert type(engine.optimizer.optimizer) is inner
    engine.destroy()


class Named(nn.Module):
    """Weights by whose names DeepSpeed tells what Muon is for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_in, self.wte, self.lm_head = nn.Embedding(5, 4), nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.mix, self.left_out, self.conv = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Conv1d(4, 4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.left_out(self.mix(self.embed_in(ids) + self.wte(ids)))
        return self.lm_head(self.conv(x.mT).mT)


@pytest.mark.parametrize("stage", [0, 3])
def test_muon_is_for_what_deepspeed_marks_by_name_unless_a_script_has(stage, caplog):
    model = Named()
    model.left_out.weight.use_muon = False
    plain = copy.deepcopy(model)
    params = {"lr": 0.1, "muon_lr": 0.2, "betas": [0.5, 0.5], "ns_method": "standard"}
    with caplog.at_level("INFO", "wherry"):
        engine = engine_of(stage, model=model, optimizer={"type": "Muon", "params": params}, gradient_clipping=0.0)
    assert "Muon is for matrices; AdamW updates what has more dims (1, like conv.weight)" in caplog.text
    names = {p: name for name, p in engine.module.named_parameters()}
    muon, adamw = engine.optimizer.param_groups
    assert [names[p] for p in muon["params"]] == ["wte.weight", "mix.weight"]
    assert (muon["lr"], muon["weight_decay"], adamw["lr"], adamw["betas"], adamw["eps"]) == (
        0.2,
        0,
        0.1,
        (0.5, 0.5),
        1e-10,
    )
    assert len(adamw["params"]) == len(names) - 2
    ops.MuonWithAuxAdam([{"params": [nn.Parameter(torch.ones(2, 2))], "use_muon": True, "ns_method": "gram"}])
    assert "MuonWithAuxAdam: ns_method='gram' is not used" in caplog.text

    matrices = [plain.wte.weight, plain.mix.weight]
    rest = [p for p in plain.parameters() if all(p is not each for each in matrices)]
    both = torch.optim.Muon(matrices, lr=0.2, weight_decay=0), torch.optim.AdamW(rest, 0.1, (0.5, 0.5), 1e-10, 0)
    for step in range(3):
        ids = torch.arange(step, step + 4).view(2, 2) % 5
        engine.backward(engine(ids).square().mean())
        engine.step()
        plain(ids).square().mean().backward()
        for each in both:
            each.step()
            each.zero_grad()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(engine.states.full(name, "master"), p.detach(), rtol=1e-4, atol=1e-5)
    engine.destroy()


def test_lamb_as_a_script_makes_it():
    model, other = make_model(), make_model()
    optimizer, theirs = (
        ops.FusedLamb(model.parameters(), 0.1, weight_decay=0.1),
        wherry.optim.Lamb(other.parameters(), 0.1, weight_decay=0.1),
    )
    engine = engine_of(1, model=model, given=optimizer, gradient_clipping=0.0)
    for seed in range(3):
        step(engine, seed)
        other(batch(engine, seed)).mean().backward()
        theirs.step()
        theirs.zero_grad()
    for p, q in zip(engine.module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    engine.destroy()
    with pytest.raises(RuntimeError, match="FusedLamb: amsgrad"):
        ops.FusedLamb(model.parameters(), amsgrad=True)
    with pytest.raises(wherry.WherryError, match=r"max_grad_norm=1\.0 is not offered; .*gradient_clipping"):
        ops.FusedLamb(model.parameters(), max_grad_norm=1.0)
    with pytest.raises(wherry.WherryError, match="adam_w_mode=False is not offered"):
        ops.MuonWithAuxAdam([{"params": model.parameters(), "use_muon": False}], adam_w_mode=False)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("zero", [None, HOST])
def test_adam_knows_its_mode(mode, zero):
    engine = engine_of(2, zero=zero, optimizer={"type": "Adam", "params": {"adam_w_mode": mode}})
    assert engine.optimizer.optimizer.adam_w_mode == mode
    engine.destroy()


def test_stage_0_does_not_mix_types():
    with pytest.raises(NotImplementedError, match="grad_accum_dtype"):
        engine_of(0, data_types={"grad_accum_dtype": "fp32"}, **BF16)


def test_the_bucket_of_gathers_is_even_where_deepspeed_asks_for_it():
    odd = {"allgather_bucket_size": 1001}
    for stage in (1, 2):
        with pytest.raises(AssertionError, match=r"multiple of nccl_start_alignment_factor.* got 1001"):
            engine_of(stage, zero=odd)
    for stage, more in ((0, {}), (1, BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}), (3, {})):
        engine_of(stage, zero=odd, **more).destroy()


def test_what_deepspeed_refuses_can_be_caught_as_there():
    class Mine(torch.optim.SGD):
        pass

    model = make_model()
    with pytest.raises(AssertionError, match="zero_allow_untested_optimizer"):
        engine_of(1, model=model, given=Mine(model.parameters(), lr=0.1))
    with pytest.raises(faces.ZeRORuntimeException, match="zero_force_ds_cpu_optimizer"):
        engine_of(
            2, model=model, given=torch.optim.Adam(model.parameters()), zero=HOST, zero_force_ds_cpu_optimizer=True
        )
    engine_of(2, model=model, given=torch.optim.Adam(model.parameters()), zero=HOST).destroy()


@pytest.mark.parametrize("zero", [{}, HOST])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_is_shown_and_written_where_it_rests(stage, zero):
    engine = engine_of(stage, zero=zero if stage else None, **BF16)
    step(engine)
    optimizer, first = engine.optimizer.optimizer, next(engine.module.parameters())
    assert len(optimizer.state) == 4
    assert float(optimizer.state[first]["step"]) == (1 if stage else 2)  # it begins with one on zeros, as there
    moment = optimizer.state[first]["exp_avg"]
    assert moment.abs().sum() > 0
    moment.zero_()
    assert engine.states.full("0.weight", "exp_avg").abs().sum() == 0
    with pytest.raises(wherry.WherryError, match="cannot be replaced"):
        optimizer.state[first] = {}
    with pytest.raises(wherry.WherryError, match="engine has the state"):
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.25
    assert engine.get_lr() == [0.25]
    engine.destroy()


@pytest.mark.parametrize("more", [{}, FP16, {"zero": HOST}], ids=str)
def test_state_dict_takes_everything_back(more):
    engine = engine_of(2, **more)
    step(engine)
    saved, before = copy.deepcopy(engine.optimizer.state_dict()), weights(engine)
    held = copy.deepcopy(engine.module.state_dict())
    step(engine, 1)
    after = weights(engine)
    saved["state"][0]["step"] = saved["state"][0]["step"].clone()
    engine.module.load_state_dict(held)
    engine.optimizer.load_state_dict([saved])  # one for each rank
    assert all(map(torch.equal, weights(engine), before))
    step(engine, 1)
    assert all(map(torch.equal, weights(engine), after))
    saved["state"][0]["exp_avg"].fill_(1.0)
    engine.optimizer.load_state_dict(saved)
    assert engine.states.full("0.weight", "exp_avg").eq(1).all()
    engine.destroy()


def test_the_loss_scale_is_shown_and_set():
    engine = engine_of(1, **FP16)
    optimizer = engine.optimizer
    for shown in (optimizer, optimizer.loss_scaler, optimizer.loss_scale_config):
        assert (shown.loss_scale, shown.cur_scale, shown.dynamic_loss_scale) == (16.0, 16.0, True)
    assert optimizer.loss_scaler.scale_window == 1000
    assert optimizer.needs_scaler()
    assert not optimizer.overflow
    optimizer.cur_scale = 4.0
    assert engine.loss_scale == 4.0
    optimizer.loss_scaler.cur_scale = 8.0
    loss = loss_of(engine)
    assert optimizer.scale_if_loss(loss) == loss * 8
    with pytest.raises(RuntimeError, match="Loss scaling is required"):
        loss.backward()
    step(engine)
    assert optimizer.loss_scaler.cur_iter == 1
    engine.destroy()


def test_backward_returns_the_loss_as_it_counts():
    engine = engine_of(1, gradient_accumulation_steps=4)
    loss = loss_of(engine)
    assert engine.backward(loss) == loss / 4
    engine.step()
    engine.zero_grad()  # what comes is counted on
    for _ in range(3):
        loss = loss_of(engine)
        engine.backward(loss)
        engine.step()
    assert engine.global_steps == 1
    loss = loss_of(engine)
    assert engine.backward(loss, scale_wrt_gas=False) == loss
    for wrong in (engine(batch(engine)), loss.detach(), 3.0):
        with pytest.raises(AssertionError, match="scalar tensor"):
            engine.scale(wrong)
        with pytest.raises(AssertionError, match="scalar tensor"):
            engine.backward(wrong)
    engine.destroy()
    engine = wherry.initialize(
        model=make_model(), config={"train_micro_batch_size_per_gpu": 2}, engine_class=DeepSpeedEngine
    )[0]
    with pytest.raises(AssertionError, match="must provide optimizer"):
        engine.backward(loss_of(engine))
    engine.destroy()


def test_zero_grad_drops_what_is_not_reduced_and_nothing_else():
    kept = {}
    for stage in (1, 2):
        engine = engine_of(stage, gradient_accumulation_steps=2)
        for seed in (0, 1):
            engine.backward(loss_of(engine, seed))
            engine.step()
            if seed == 0:
                engine.zero_grad()
        kept[stage] = engine.get_global_grad_norm()
        assert engine.global_steps == 1
        engine.destroy()
    plain = make_model()
    norms = {}
    for name, seeds in (("last", (1,)), ("both", (0, 1))):
        plain.zero_grad()
        for seed in seeds:
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
            (plain(x).mean() / 2).backward()
        norms[name] = torch.stack([p.grad.norm() for p in plain.parameters()]).norm().item()
    assert kept == {1: pytest.approx(norms["last"]), 2: pytest.approx(norms["both"])}


def test_no_sync_and_coalesced_reductions_assert_as_there():
    engine = engine_of(2)
    with pytest.raises(AssertionError, match="ZeRO stage 2"), engine.no_sync():
        pass
    with engine.coalesce_grad_reduction():
        engine.backward(loss_of(engine))
        with pytest.raises(AssertionError, match="no_sync"):
            engine.step()
        with pytest.raises(AssertionError, match="nested"), engine.coalesce_grad_reduction():
            pass
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()
    for stage, more, why in (
        (0, {}, "stage 1/2/3"),
        (1, BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}, "optimizer wrapper"),
    ):
        engine = engine_of(stage, **more)
        with pytest.raises(NotImplementedError, match=why), engine.coalesce_grad_reduction():
            pass
        engine.destroy()


@pytest.mark.parametrize("reduced_by", ["allreduce_gradients", "coalesce_grad_reduction"])
def test_gradients_that_have_waited_are_reduced_before_the_step(reduced_by):
    model = make_model()

    def body(comm: Any) -> torch.Tensor:
        engine = engine_of(1, model=copy.deepcopy(model), mesh=comm)
        inside = engine.no_sync if reduced_by == "allreduce_gradients" else engine.coalesce_grad_reduction
        with inside():
            engine.backward(loss_of(engine, comm.rank))
        if reduced_by == "allreduce_gradients":
            engine.allreduce_gradients()
        assert engine.has_gradients()
        gradient = engine.gradients("0.weight")
        engine.step()
        engine.destroy()
        return gradient

    first, second = run_ranks(2, body)
    for seed in (0, 1):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        (model(x).mean() / 2).backward()
    torch.testing.assert_close(first, model[0].weight.grad)
    torch.testing.assert_close(second, first)


@pytest.mark.parametrize("stage", [0, 2])
def test_sparse_gradients_are_trained_as_dense_ones(stage):
    def make(sparse: bool) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.EmbeddingBag(10, 4, mode="sum", sparse=sparse), nn.Linear(4, 1))

    with torch.random.fork_rng():
        models = [make(True), make(False)]
    tokens, found = torch.tensor([[1, 2, 2], [4, 9, 1]]), []
    for model in models:
        engine = engine_of(stage, model=model, sparse_gradients=model[0].sparse)
        for _ in range(3):
            engine.backward(engine(tokens).mean())
            engine.step()
        found.append(weights(engine))
        engine.destroy()
    assert all(map(torch.equal, *found))


def test_what_gives_the_same_numbers_is_accepted():
    """Masters are fp32, so moments of their type are so as well; stage 3's keys have a shorter spelling."""
    config = {
        "zero_optimization": {"stage": 3, "param_persistence_threshold": 7, "prefetch_bucket_size": 11},
        "optimizer": {"type": "Adam", "params": {"fp32_optimizer_states": False}},
    }
    zero = load(config).zero_optimization
    assert (zero.stage3_param_persistence_threshold, zero.stage3_prefetch_bucket_size) == (7, 11)


def test_a_schedule_of_another_optimizer_is_an_assertion():
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(other, float)
    with pytest.raises(AssertionError, match="built on another optimizer"):
        wherry.initialize(
            model=make_model(),
            config=load({"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM}),
            lr_scheduler=schedule,
            engine_class=DeepSpeedEngine,
        )


def test_moments_of_bf16_weights_may_be_bf16_outside_an_engine():
    torch.manual_seed(0)
    start, grads = torch.randn(64).bfloat16(), torch.randn(10, 64).bfloat16()
    found = []
    for full in (True, False):
        parameter = nn.Parameter(start.clone())
        optimizer = ops.DeepSpeedCPUAdam([parameter], fp32_optimizer_states=full)
        for grad in grads:
            parameter.grad = grad.clone()
            optimizer.step()
        assert optimizer.state[parameter]["exp_avg"].dtype is (torch.float32 if full else torch.bfloat16)
        found.append(parameter.detach().float())
    torch.testing.assert_close(*found, atol=0.02, rtol=0.02)
    half = nn.Parameter(start.half())
    half.grad = grads[0].half()
    with pytest.raises(wherry.WherryError, match="fp32_optimizer_states"):
        ops.DeepSpeedCPUAdam([half], fp32_optimizer_states=False).step()


def test_a_step_of_a_part_is_taken_back():
    parameter = nn.Parameter(torch.randn(16, generator=torch.Generator().manual_seed(0)))
    before = parameter.detach().clone()
    optimizer = ops.DeepSpeedCPUAdam([parameter], lr=0.1, weight_decay=0.1)
    with pytest.raises(RuntimeError, match="Cannot rollback optimizer state for sub_group_id 3"):
        optimizer.rollback_subgroup(3)
    parameter.grad = torch.ones(16)
    optimizer.step_subgroup(3)
    assert optimizer.state[3]["step"] == 1
    assert parameter not in optimizer.state
    expected = before * (1 - 0.1 * 0.1) - 0.1
    torch.testing.assert_close(parameter.detach(), expected)
    optimizer.rollback_subgroup(3)
    torch.testing.assert_close(parameter.detach(), before)
    assert optimizer.state[3]["exp_avg"].abs().max() < 1e-6
    with pytest.raises(RuntimeError, match="step count is 0"):
        optimizer.rollback_subgroup(3)


def test_adagrad_takes_sparse_gradients():
    found = []
    for cls in (torch.optim.Adagrad, ops.DeepSpeedCPUAdagrad):
        parameter = nn.Parameter(torch.ones(8))
        optimizer = cls([parameter], lr=0.1)
        for _ in range(3):
            parameter.grad = torch.sparse_coo_tensor([[1, 5]], [1.0, -2.0], (8,))
            optimizer.step()
        found.append(parameter.detach())
    torch.testing.assert_close(*found)


def test_fused_adam_is_no_adam_of_the_host():
    parameter = nn.Parameter(torch.empty(1, device="meta"))
    assert not isinstance(ops.FusedAdam([parameter]), ops.DeepSpeedCPUAdam)
    parameter.grad = torch.empty(1, device="meta")
    with pytest.raises(AssertionError, match="on meta"):
        ops.DeepSpeedCPUAdam([parameter]).step()
    with pytest.raises(RuntimeError, match="amsgrad"):
        ops.FusedAdam([parameter], amsgrad=True)


def test_equal_shares_of_gradients_at_stage_3():
    model = make_model()

    def body(comm: Any) -> dict[int, dict[int, torch.Tensor]]:
        engine = engine_of(3, model=copy.deepcopy(model), mesh=comm)
        engine.backward(loss_of(engine))
        found = engine.optimizer.get_fp32_grad_partitions()
        engine.destroy()
        return found

    parts = run_ranks(3, body)
    model(torch.randn(2, 4, generator=torch.Generator().manual_seed(0))).mean().backward()
    for number, parameter in enumerate(model.parameters()):
        assert {part[0][number].numel() for part in parts} == {-(-parameter.numel() // 3)}
        whole = torch.cat([part[0][number] for part in parts])
        torch.testing.assert_close(whole[: parameter.numel()], parameter.grad.flatten())


@pytest.mark.parametrize(("stage", "half"), [(0, BF16), (1, BF16), (1, {}), (3, BF16), (3, {})])
def test_a_state_dict_has_the_masters_of_each_group_in_one_piece(stage, half):
    engine = engine_of(stage, **half)
    step(engine)
    found = engine.optimizer.state_dict()
    key = {0: "fp32_groups_flat", 1: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}[stage]
    names = [name for name, _ in engine.module.named_parameters()]
    expected = torch.cat([engine.states.full(name, "master").flatten() for name in names])
    assert torch.equal(torch.cat(found[key]), expected)
    if half:  # they are parts of it, and not there twice
        (storage,) = {flat.untyped_storage().data_ptr() for flat in found[key]}
        assert {part["master"].untyped_storage().data_ptr() for part in found["state"].values()} == {storage}
    engine.optimizer.load_state_dict(found)
    assert torch.equal(torch.cat(engine.optimizer.state_dict()[key]), expected)
    engine.destroy()
