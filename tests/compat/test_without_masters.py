"""`bf16_master_weights_and_grads` and its like: weights of 16 bits are what is updated, with DeepSpeed's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wherry
from wherry.compat.deepspeed import ops
from wherry.compat.deepspeed.config import DeepSpeedConfigError, load
from wherry.compat.deepspeed.engine import DeepSpeedEngine
from wherry.config import load as load_own
from wherry.testing import run_ranks
from wherry.update.optimizer import describe
from wherry.update.rules import TorchRule, UpdateSegment

LR, DECAY, CLIP = 0.01, 0.1, 0.01
BF16, FP16 = torch.bfloat16, torch.float16
ADAM = {"type": "Adam", "params": {"lr": LR, "weight_decay": DECAY}}


def asked(dtype: torch.dtype, *, states: bool = False) -> dict[str, Any]:
    if dtype is FP16:
        return {"fp16": {"enabled": True, "initial_scale_power": 4, "fp16_master_weights_and_grads": True}}
    return {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": states}}


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def engine_of(stage: int, offload: str, given: Any = None, model: nn.Module | None = None, **more: Any) -> Any:
    zero = {"stage": stage, "offload_optimizer": {"device": offload}}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "gradient_clipping": CLIP, **more}
    if given is None:
        config["optimizer"] = ADAM
    model = model or make_model()
    return wherry.initialize(model=model, optimizer=given, config=load(config), engine_class=DeepSpeedEngine)[0]


def batch(seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


def train(engine: Any, steps: int, first: int = 0) -> None:
    for seed in range(first, first + steps):
        engine.backward(engine(batch(seed, engine.working_dtype)).float().mean())
        engine.step()


class ByHand:
    """AdamW of weights of 16 bits as DeepSpeed's kernels make it: in fp32, each result rounded to its own type."""

    def __init__(self, dtype: torch.dtype, moments: torch.dtype, scale: float) -> None:
        self.model, self.dtype, self.scale, self.steps = make_model().to(dtype), dtype, scale, 0
        self.weights = [*self.model.parameters()]
        self.mean = [torch.zeros_like(p, dtype=moments) for p in self.weights]
        self.square = [torch.zeros_like(p, dtype=moments) for p in self.weights]

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        grads = [p.grad for p in self.weights]
        norm = torch.stack([g.float().norm() for g in grads]).norm() / self.scale  # type: ignore[union-attr]
        factor = 1 / (self.scale * max(1.0, float((norm + 1e-6) / CLIP)))
        for p, grad, mean, square in zip(self.weights, grads, self.mean, self.square, strict=True):
            assert grad is not None
            g = (grad * factor).float()
            m = 0.9 * mean.float() + 0.1 * g
            v = 0.999 * square.float() + 0.001 * g * g
            denominator = v.sqrt() / (1 - 0.999**self.steps) ** 0.5 + 1e-8
            p.copy_(p.float() * (1 - LR * DECAY) - LR / (1 - 0.9**self.steps) * m / denominator)
            mean.copy_(m)
            square.copy_(v)
            p.grad = None

    def train(self, steps: int) -> None:
        for seed in range(steps):
            (self.model(batch(seed, self.dtype)).float().mean() * self.scale).backward()
            self.update()


CASES = [
    (1, BF16, "none", True), (2, BF16, "cpu", True), (3, BF16, "cpu", False), (1, FP16, "cpu", False),
    (2, FP16, "cpu", False), (3, BF16, "none", True),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "dtype", "offload", "states"), CASES)
def test_its_numbers(stage: int, dtype: torch.dtype, offload: str, states: bool):
    engine = engine_of(stage, offload, **asked(dtype, states=states))
    moments = dtype if states else torch.float32
    train(engine, 8)
    ours = ByHand(dtype, moments, 16.0 if dtype is FP16 else 1.0)
    ours.train(8)
    for (name, _), weight, mean in zip(engine.module.named_parameters(), ours.weights, ours.mean, strict=True):
        ulp = torch.finfo(dtype).eps
        torch.testing.assert_close(engine.states.full(name, "master"), weight.float(), rtol=ulp, atol=1e-6)
        torch.testing.assert_close(engine.states.full(name, "exp_avg"), mean.float(), rtol=ulp, atol=1e-6)
    state = next(iter(engine.optimizer.optimizer.state.values()))
    assert state["exp_avg"].dtype is moments and state["exp_avg_sq"].dtype is moments
    # Nothing is kept but the moments: 2 or 4 bytes each, and the weights are their own masters.
    kept = next(row.bytes_actual for row in engine.memory() if row.state == "optimizer")
    assert kept == sum(2 * p.numel() * moments.itemsize for p in make_model().parameters())
    engine.destroy()


def test_a_small_update_is_lost_as_it_is_there():
    """1 and 1e-3 are 1 in bf16, and an fp32 master would have counted ten of them."""
    found = {}
    for name, bf16 in (("masters", {"bf16": {"enabled": True}}), ("none", asked(BF16, states=True))):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        engine = engine_of(2, "none", model=model, **bf16)
        for group in engine.optimizer.param_groups:
            group.update(lr=1e-3, weight_decay=0.0)
        for _ in range(10):
            engine.backward(engine(torch.ones(1, 1, dtype=BF16)).sum())
            engine.step()
        found[name] = float(engine.states.full("weight", "master"))
        engine.destroy()
    assert found["none"] == 1.0 and found["masters"] == pytest.approx(0.99, abs=1e-4)


def trained(ranks: int = 1, **more: Any) -> list[torch.Tensor]:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM, **asked(BF16), **more}
    config["zero_optimization"] = {"stage": 3, **more.get("zero_optimization", {})}

    def rank(mesh: Any) -> list[torch.Tensor]:
        engine = wherry.initialize(model=make_model(), config=config, mesh=mesh)[0]
        train(engine, 4)
        engine.settle()
        found = [engine.states.full(name, "master") for name, _ in engine.module.named_parameters()]
        engine.close()
        return found

    return run_ranks(ranks, rank)[0]


def test_every_placement_has_the_same_bits(tmp_path: Path):
    plain = trained()
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    ways: list[dict[str, Any]] = [
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": disk},
        {"zero_optimization": {**disk, "offload_param": {"device": "cpu"}}},
        {"wherry": {"update_policy": "in_backward"}},
        {"wherry": {"update_policy": "before_use"}},
    ]
    for way in ways:
        assert all(map(torch.equal, trained(**way), plain)), way
    # Every rank has the same batch, whose mean gradient is that of one.
    assert all(map(torch.equal, trained(2), plain))


def test_a_checkpoint_goes_on_and_loads_where_there_are_masters(tmp_path: Path):
    engine = engine_of(2, "none", **asked(BF16, states=True))
    train(engine, 3)
    engine.save_checkpoint(str(tmp_path))
    train(engine, 3, first=3)
    names = [name for name, _ in engine.module.named_parameters()]
    expected = [engine.states.full(name, "master") for name in names]
    engine.destroy()
    again = engine_of(3, "cpu", **asked(BF16, states=True))
    again.load_checkpoint(str(tmp_path))
    saved = [again.states.full(name, "exp_avg") for name in names]
    train(again, 3, first=3)
    assert all(map(torch.equal, [again.states.full(name, "master") for name in names], expected))
    again.destroy()
    other = engine_of(2, "none", bf16={"enabled": True})
    other.load_checkpoint(str(tmp_path))
    assert all(map(torch.equal, [other.states.full(name, "exp_avg") for name in names], saved))
    other.destroy()


def test_torchs_own_rule_updates_the_weights_themselves():
    """As on a device of its own: gradients, accumulated in fp32, are rounded first, and moments are of their type."""
    weights, grads = torch.randn(64).bfloat16(), torch.randn(4, 64)
    plain = nn.Parameter(weights.clone())
    adam = torch.optim.AdamW([plain], lr=LR)
    spec = describe(torch.optim.AdamW([nn.Parameter(weights)], lr=LR), state_dtype="bf16")
    rule = spec.make_rule(on_host=False, masters=False)
    assert isinstance(rule, TorchRule)
    segment = UpdateSegment(grad=None, working=weights)
    for step, grad in enumerate(grads, 1):
        plain.grad = grad.bfloat16() * 0.3
        adam.step()
        segment.grad = grad
        rule.update([segment], [step], spec.groups, 0.3)
    assert torch.equal(weights, plain.detach())
    assert {value.dtype for value in rule.kept()[0].values()} == {BF16}
    fp32 = describe(torch.optim.AdamW([nn.Parameter(weights)], lr=LR))
    with pytest.raises(wherry.WherryError, match=r"no masters with moments in fp32 needs Adam.* on the host"):
        fp32.make_rule(on_host=False, masters=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({**asked(BF16), "zero_optimization": {"stage": 0}}, "bf16_master_weights_and_grads is only supported with"),
        ({**asked(FP16), "zero_optimization": {"stage": 0}}, "fp16_master_weights_and_grads is only supported with"),
        (
            {"bf16": {"enabled": True, "bf16_optimizer_states": True}, "zero_optimization": {"stage": 2}},
            "requires bf16.bf16_master_weights_and_grads",
        ),
    ],
)
def test_configs_that_deepspeed_refuses(given: dict[str, Any], said: str):
    with pytest.raises(AssertionError, match=said):
        load({"train_batch_size": 1, **given})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizers_that_deepspeed_refuses(stage: int):
    def cpu(full: bool) -> Any:
        return lambda parameters: ops.DeepSpeedCPUAdam(parameters, fp32_optimizer_states=full)

    for offload, given, config in (
        ("none", None, asked(BF16)),
        ("none", None, asked(FP16)),
        ("cpu", torch.optim.AdamW, asked(BF16)),
        ("cpu", ops.FusedAdam, asked(BF16, states=True)),
    ):
        with pytest.raises(AssertionError, match="requires ZeRO Offload with DeepSpeedCPUAdam"):
            engine_of(stage, offload, given, **config)
    with pytest.raises(AssertionError, match="fp32_optimizer_states=False"):
        engine_of(stage, "cpu", cpu(True), **asked(BF16, states=True))
    with pytest.raises(wherry.WherryError, match="with fp16 weights is not offered"):
        engine_of(stage, "cpu", cpu(False), **asked(FP16))
    engine = engine_of(stage, "cpu", cpu(False), **asked(BF16))
    train(engine, 1)
    assert next(iter(engine.optimizer.optimizer.state.values()))["exp_avg"].dtype is BF16
    engine.destroy()


def test_moments_follow_the_masters():
    params = {"params": {"fp32_optimizer_states": False}, "type": "Adam"}
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert load({**config, "optimizer": params, **asked(BF16)}).state_dtype() == "bf16"
    assert load({**config, "optimizer": params, "bf16": {"enabled": True}}).state_dtype() == "fp32"
    with pytest.raises(DeepSpeedConfigError, match="fp32_optimizer_states"):
        load({**config, "optimizer": params, **asked(FP16)})


def test_where_there_are_masters():
    assert not load_own(asked(FP16)).keeps_masters() and load_own({"bf16": {"enabled": True}}).keeps_masters()
    assert load_own({"bf16": {"bf16_master_weights_and_grads": True}}).keeps_masters()
