"""Numbers through the alias: defaults, masters, loss scales, norms and sums are DeepSpeed's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import wherry
from wherry.compat.deepspeed import constants
from wherry.compat.deepspeed import engine as engines
from wherry.compat.deepspeed.config import DeepSpeedConfig, get_gradient_clipping, load, loss_scaler
from wherry.compat.deepspeed.engine import DeepSpeedEngine, initialize
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.update.loss_scale import LossScaleError


@pytest.fixture(autouse=True)
def no_group_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks here are threads, or one; what starts torch.distributed is tested elsewhere."""
    monkeypatch.setattr(engines, "init_distributed", lambda **_: None)


def made(model: nn.Module, config: dict[str, Any], **given: Any) -> Any:
    given.setdefault("model_parameters", model.parameters())
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, **config}
    return initialize(model=model, config=settings, **given)[0]


def line(weight: float = 1.0) -> nn.Module:
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    return model


def step(engine: Any, size: float, backwards: int = 1) -> None:
    for _ in range(backwards):
        engine.backward(engine(torch.full((1, 4), size, dtype=engine.working_dtype)).sum())
    engine.step()


SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}}


@pytest.mark.parametrize(
    ("given", "norm"), [({}, 1.0), ({"gradient_clipping": 0.0}, 6.0), ({"gradient_clipping": 3}, 3.0)]
)
def test_gradients_are_clipped_to_1_unless_it_is_said(given: dict[str, Any], norm: float) -> None:
    model = line()
    engine = made(model, {**SGD, **given})
    step(engine, 3.0)  # a gradient of norm 6
    assert engine.gradient_clipping() == given.get("gradient_clipping", 1.0)
    assert torch.linalg.vector_norm(model.weight.detach() - 1).item() == pytest.approx(norm, rel=1e-5)
    assert engine.get_global_grad_norm() == pytest.approx(6.0)
    engine.destroy()
    assert wherry.config.load({}).gradient_clipping == 0.0
    assert get_gradient_clipping({}) == constants.GRADIENT_CLIPPING_DEFAULT == 1.0
    assert DeepSpeedConfig({"train_batch_size": 1, **given}).gradient_clipping == given.get("gradient_clipping", 1.0)


@pytest.mark.parametrize(("stage", "kind"), [(0, "bf16"), (1, "fp16"), (3, "bf16"), (3, "fp16")])
def test_masters_begin_at_the_rounded_weights(stage: int, kind: str) -> None:
    value = 1.0 + 2**-12  # between two numbers of either type
    config = {**SGD, kind: {"enabled": True}, "zero_optimization": {"stage": stage}}
    engine = made(line(value), config)
    assert engine.states.full("weight", "master").unique().tolist() == [1.0]
    engine.destroy()
    mine, *_ = wherry.initialize(model=line(value), config=config)
    assert mine.states.full("weight", "master").unique().tolist() == [value]
    mine.close()


def scales(config: dict[str, Any], overflows: str) -> list[float]:
    scaler, found = loss_scaler(load({"fp16": {"enabled": True, **config.pop("fp16")}, **config})), []
    for mark in overflows:
        scaler.update(mark == "x")
        found.append(scaler.scale)
    return found


def test_a_loss_scale_doubles_a_step_later_after_the_start_and_after_an_overflow() -> None:
    fp16 = {"initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1}
    zero = {"zero_optimization": {"stage": 2}}
    assert scales({"fp16": dict(fp16), **zero}, ".....x....") == [16, 16, 32, 32, 64, 32, 32, 32, 64, 64]


def test_hysteresis_is_for_stages_with_partitions() -> None:
    fp16 = {"initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 2}
    partitioned = {"zero_optimization": {"stage": 1}}
    assert scales({"fp16": dict(fp16), **partitioned}, "x.xx") == [16, 16, 8, 4]
    refilled = {**fp16, "consecutive_hysteresis": True}
    assert scales({"fp16": refilled, **partitioned}, "x.xx") == [16, 16, 16, 8]
    assert scales({"fp16": dict(fp16)}, "x.xx") == [8, 8, 4, 2]


def test_at_the_minimum_stages_with_partitions_stop() -> None:
    fp16 = {"initial_scale_power": 2, "min_loss_scale": 2, "hysteresis": 1}
    assert scales({"fp16": dict(fp16)}, "xxx") == [2, 2, 2]
    with pytest.raises(LossScaleError):
        scales({"fp16": dict(fp16), "zero_optimization": {"stage": 1}}, "xx")


def test_the_norm_after_an_overflow_is_that_of_the_last_update() -> None:
    engine = made(line(), {**SGD, "fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 4}})
    step(engine, 60_000.0)
    assert (engine.get_global_grad_norm(), engine.skipped_steps, engine.loss_scale) == (0.0, 1, 8.0)
    step(engine, 1.0)
    assert engine.get_global_grad_norm() == pytest.approx(2.0, rel=1e-3)
    step(engine, 60_000.0)
    assert engine.get_global_grad_norm() == pytest.approx(2.0, rel=1e-3) and engine.skipped_steps == 2
    engine.destroy()


@pytest.mark.parametrize(
    ("block", "plain"),
    [
        ({"type": "Adam", "params": {"weight_decay": 0.5}}, torch.optim.AdamW),
        ({"type": "Adam", "params": {"weight_decay": 0.5, "adam_w_mode": False}}, torch.optim.Adam),
        ({"type": "AdamW", "params": {"weight_decay": 0.5, "adam_w_mode": False}}, torch.optim.AdamW),
        ({"type": "Adam", "params": {"weight_decay": 0.5, "adam_w_mode": False, "torch_adam": True}}, torch.optim.Adam),
    ],
)
def test_adam_decouples_its_decay_unless_it_is_said(block: dict[str, Any], plain: type[torch.optim.Optimizer]) -> None:
    model, other = line(), line()
    block["params"]["lr"] = 0.1
    engine = made(model, {"optimizer": block, "gradient_clipping": 0.0})
    optimizer = plain(other.parameters(), lr=0.1, weight_decay=0.5)
    for size in (1.0, 0.1, 2.0):
        step(engine, size)
        other(torch.full((1, 4), size)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model.weight, other.weight)
    engine.destroy()


@pytest.mark.parametrize(
    ("params", "decay"), [({}, 0.0), ({"torch_adam": True}, 0.01), ({"torch_adam": True, "weight_decay": 0}, 0.0)]
)
def test_the_decay_of_torchs_own_adamw_is_its_default(params: dict[str, Any], decay: float) -> None:
    engine = made(line(), {"optimizer": {"type": "AdamW", "params": params}})
    assert engine.optimizer.param_groups[0]["weight_decay"] == decay
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(("op", "change"), [("mean", 1.5), ("SUM", 3.0)])
def test_gradients_may_be_summed_over_ranks(stage: int, op: str, change: float) -> None:
    source = line()

    def train(comm: Comm) -> float:
        model = copy.deepcopy(source)
        config = {**SGD, "gradient_allreduce_op": op, "zero_optimization": {"stage": stage}}
        engine, *_ = wherry.initialize(model=model, config=config, mesh=comm)
        step(engine, 1.0 + comm.rank)
        moved = float(1 - engine.states.full("weight", "master")[0, 0])
        engine.close()
        return moved

    assert run_ranks(2, train) == pytest.approx([change, change])


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_without_managed_accumulation_every_step_is_a_boundary(stage: int, accumulation: int) -> None:
    config = {
        **SGD,
        "managed_gradient_accumulation": False,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    }
    engine = made(line(), config)
    assert not engine.managed_gradient_accumulation()
    expected, samples = 1.0, 0
    for number in (3, 1, 5):
        assert not engine.is_gradient_accumulation_boundary()
        step(engine, 1.0, backwards=number)
        expected, samples = expected - number / accumulation, samples + number
        assert engine.states.full("weight", "master").unique().tolist() == pytest.approx([expected])
        assert engine.was_step_applied() and engine.global_samples == samples
    assert engine.global_steps == 3
    engine.destroy()


@pytest.mark.parametrize(
    ("optimizer", "plain"),
    [
        ({"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}, torch.optim.AdamW),
        ({"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False}}, torch.optim.Adam),
        ({"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}}, torch.optim.SGD),
    ],
)
@pytest.mark.parametrize("policy", ["at_step", "in_backward"])
def test_stage_0_in_16_bits_begins_with_an_update_on_zeros(
    optimizer: dict[str, Any], plain: type[torch.optim.Optimizer], policy: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    other = copy.deepcopy(model).bfloat16()
    masters = [weight.detach().float() for weight in other.parameters()]
    options = {key: value for key, value in optimizer["params"].items() if key != "adam_w_mode"}
    oracle = plain(masters, **options)

    def update() -> None:
        for master, weight in zip(masters, other.parameters(), strict=True):
            master.grad = torch.zeros_like(master) if weight.grad is None else weight.grad.float()
        oracle.step()
        for master, weight in zip(masters, other.parameters(), strict=True):
            weight.data.copy_(master)

    more = {"bf16": {"enabled": True}, "gradient_clipping": 0.0, "gradient_accumulation_steps": 2}
    engine = made(model, {"optimizer": optimizer, "wherry": {"update_policy": policy}, **more})
    update()
    given = torch.randn(5, 4).bfloat16()
    for _ in range(2):
        engine.backward(engine(given).float().pow(2).mean())
        engine.step()
        (other(given).float().pow(2).mean() / 2).backward()
    update()
    for (name, _), master in zip(model.named_parameters(), masters, strict=True):
        torch.testing.assert_close(engine.states.full(name, "master"), master, rtol=0, atol=1e-8)
    assert (engine.global_steps, engine.micro_steps) == (1, 2)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_masters_are_rounded_by_a_load_without_their_optimizer(stage: int, tmp_path: Any) -> None:
    how = [{"load_module_only": True}, {"load_optimizer_states": False}][stage % 2]
    half = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    optimizer = {"optimizer": {"type": "SGD", "params": {"lr": 1e-4}}}
    engine = made(line(), {**half, **optimizer})
    step(engine, 3.0)
    trained = engine.states.full("weight", "master").clone()
    assert not torch.equal(trained, trained.bfloat16().float())
    engine.save_checkpoint(tmp_path)
    step(engine, 1.0)
    engine.load_checkpoint(tmp_path)
    assert torch.equal(engine.states.full("weight", "master"), trained)
    step(engine, 1.0)
    engine.load_checkpoint(tmp_path, **how)
    assert torch.equal(engine.states.full("weight", "master"), trained.bfloat16().float())
    engine.destroy()


def test_without_managed_accumulation_no_sync_holds_a_step_back() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "managed_gradient_accumulation": False, **SGD}
    model = line()
    engine, *_ = wherry.initialize(model=model, model_parameters=model.parameters(), config=config)
    with engine.no_sync():
        step(engine, 1.0)
    assert torch.equal(model.weight, torch.ones(1, 4)) and engine.global_steps == 0
    step(engine, 1.0)
    assert torch.equal(model.weight, torch.full((1, 4), -1.0)) and engine.global_steps == 1
    engine.close()


def test_what_does_not_go_with_accumulation_by_hand_asserts_as_there() -> None:
    by_hand = {"managed_gradient_accumulation": False, **SGD}
    with pytest.raises(AssertionError, match="overlap_comm only with ZeRO stage 2"):
        made(line(), {**by_hand, "zero_optimization": {"stage": 1, "overlap_comm": True}})
    engine = made(line(), {**by_hand, "zero_optimization": {"stage": 2, "overlap_comm": True}})
    with pytest.raises(AssertionError, match="managed_gradient_accumulation"), engine.coalesce_grad_reduction():
        pass
    engine.destroy()


@pytest.mark.parametrize("half", [{}, {"bf16": {"enabled": True}}])
def test_gradients_that_a_script_has_set_are_taken_at_stage_0(half: dict[str, Any]) -> None:
    model = line()
    engine = made(model, {**SGD, **half, "gradient_clipping": 0.0})
    for moved in (0.5, 0.75):
        model.weight.grad = torch.full_like(model.weight, 0.5 if moved == 0.5 else 0.25)
        engine.step()
        assert model.weight.grad is None
        assert torch.equal(engine.states.full("weight", "master"), torch.full((1, 4), 1 - moved))
    assert engine.global_steps == 2
    engine.step()  # without any, nothing is updated
    assert engine.global_steps == 2
    engine.destroy()


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_gradients_that_a_script_has_set_on_several_ranks_are_those_of_each(op: str) -> None:
    def train(comm: Comm) -> float:
        model = line()
        config = {"train_micro_batch_size_per_gpu": 1, "gradient_allreduce_op": op, **SGD, "gradient_clipping": 0.0}
        engine, *_ = wherry.initialize(
            model=model, model_parameters=model.parameters(), mesh=comm, config=config, engine_class=DeepSpeedEngine
        )
        model.weight.grad = torch.full_like(model.weight, 0.5)
        engine.step()
        moved = float(1 - engine.states.full("weight", "master")[0, 0])
        model.weight.grad = torch.ones_like(model.weight) if comm.rank else None
        with pytest.raises(WherryError, match="set by hand"):
            engine.step()
        engine.close()
        return moved

    assert run_ranks(2, train) == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("whose", ["the config's", "the script's"])
def test_the_update_on_zeros_leaves_frozen_weights_and_hooks_alone(whose: str) -> None:
    model, called = nn.Linear(4, 1), []
    model.bias.requires_grad_(False)
    model.weight.register_hook(lambda grad: called.append(1))
    given = {} if whose == "the config's" else {"optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}
    block = (
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
        if not given
        else {"zero_allow_untested_optimizer": True}
    )
    more = {"gradient_accumulation_steps": 2, "wherry": {"accumulation": "layer_major"}}
    engine = made(model, {**block, **more, "bf16": {"enabled": True}}, **given)
    assert called == [] and engine.global_steps == 0
    engine.destroy()
