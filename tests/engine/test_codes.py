"""Frozen weights that are codes of any dtype: stored, gathered and saved as bytes, in flats of their own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.engine.harness import (
    VOCABULARY,
    WIDTH,
    Run,
    TinyLM,
    adamw,
    engine_of,
    make_model,
    on_ranks,
    token_batch,
    train,
    train_engine,
    train_plain,
)
from torch import nn
from torch.nn import functional as F

import wherry
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks

CODES = (".codes", ".kept", ".offset")


class Decoded(torch.autograd.Function):
    """Compute x W^T, with the codes kept for backward by an attribute, as bitsandbytes keeps them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.codes, ctx.scale = codes, scale
        return x @ (codes.to(x.dtype) * scale.to(x.dtype)).T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad @ (ctx.codes.to(grad.dtype) * ctx.scale.to(grad.dtype)), None, None


class Coded(nn.Module):
    """A linear layer of codes and its adapter."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, *, keeps: bool) -> None:
        super().__init__()
        codes = torch.randn(outputs, inputs) if dtype.is_floating_point else torch.randint(1, 40, (outputs, inputs))
        self.codes = nn.Parameter(codes.to(dtype), requires_grad=False)
        self.kept = nn.Parameter(torch.rand(outputs, inputs) > 0.1, requires_grad=False)
        self.offset = nn.Parameter(torch.randint(-9, 9, (outputs,)), requires_grad=False)
        self.register_buffer("scale", torch.full((outputs, 1), 0.02))
        self.down = nn.Linear(inputs, 4, bias=False)
        self.up = nn.Linear(4, outputs, bias=False)
        self.keeps = keeps

    def reset_parameters(self) -> None:
        assert not self.codes.is_meta

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.keeps:
            y = Decoded.apply(x, self.codes, self.scale)
        else:
            y = F.linear(x, self.codes.to(x.dtype) * self.scale.to(x.dtype))
        y = y + F.linear(x, self.kept.to(x.dtype) * 0.01) + self.offset.to(x.dtype) * 0.01
        return y + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = Coded(width, 2 * width, dtype, keeps=True)
        self.down = Coded(2 * width, width, dtype, keeps=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class CodedLM(TinyLM):
    """A model of which the adapters alone are trained."""

    def __init__(self, dtype: torch.dtype, width: int = WIDTH) -> None:
        super().__init__(width=width)
        self.blocks = nn.ModuleList(Block(width, dtype) for _ in range(3))
        self.head = nn.Linear(width, VOCABULARY)  # safetensors refuses tied weights
        for name, parameter in self.named_parameters():
            adapter = "down.weight" in name or "up.weight" in name
            parameter.requires_grad_(adapter and parameter.is_floating_point())


def coded(dtype: torch.dtype = torch.int8, seed: int = 0) -> nn.Module:
    return make_model(lambda: CodedLM(dtype), seed)


def resting(tier: str, folder: Path) -> dict[str, Any]:
    offload = {"offload_param": {"device": tier, "nvme_path": str(folder), "max_in_cpu": 0}} if tier != "none" else {}
    return {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **offload}}


def assert_trained(run: Run, oracle: Run, ranks: int) -> None:
    assert run.losses == pytest.approx(oracle.losses, rel=1e-5 if ranks > 1 else 1e-6)
    for name, value in oracle.weights.items():
        exact = {"rtol": 0, "atol": 0} if name.endswith(CODES) else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(run.weights[name], value, **exact, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    ("stage", "dtype", "ranks", "tier"),
    [
        (0, torch.int8, 2, "none"),
        (3, torch.uint8, 2, "none"),
        (3, torch.int8, 1, "cpu"),
        (3, torch.float8_e4m3fn, 2, "nvme"),
    ],
)
def test_trained_as_plain_pytorch(tmp_path: Path, stage: int, dtype: torch.dtype, ranks: int, tier: str) -> None:
    oracle = train_plain(coded(dtype), ranks=ranks, steps=3)
    config = resting(tier, tmp_path) if stage == 3 else {}
    assert_trained(train_engine(coded(dtype), stage=stage, ranks=ranks, steps=3, config=config), oracle, ranks)


@pytest.mark.parametrize(
    "more",
    [{"activation_checkpointing": {"policy": "recompute"}}, {"bf16": {"enabled": True}}],
    ids=["recompute", "bf16"],
)
def test_with_other_features(more: dict[str, Any]) -> None:
    """Recompute activations, and train in bf16: codes have no working dtype."""
    run = train_engine(coded(), stage=3, ranks=2, accumulation=2, steps=2, config=more)
    oracle = train_plain(coded(), ranks=2, accumulation=2, steps=2)
    assert run.losses == pytest.approx(oracle.losses, rel=2e-2 if "bf16" in more else 1e-5)
    for name, value in oracle.weights.items():
        if name.endswith(CODES):
            assert torch.equal(run.weights[name], value), name


def test_windows_whose_micro_batches_run_together() -> None:
    """Expect one gather of the codes for all forwards, and one for all backwards."""
    batches = [token_batch(0, micro, 0) for micro in range(3)]
    losses = [float(coded()(*batch).detach()) for batch in batches]

    def use(engine: Any) -> tuple[float, float]:
        traffic = engine.comm.traffic
        traffic.clear()
        with torch.no_grad():
            engine(*batches[0])
        once = traffic.bytes["all_gather"]
        traffic.clear()
        return float(engine.train_batch(iter(batches))), traffic.bytes["all_gather"] / once

    config = {"wherry": {"accumulation": "layer_major"}}
    for loss, gathers in on_ranks(use, accumulation=3, model=coded(), config=config):
        assert loss == pytest.approx(sum(losses) / 3, rel=1e-6)
        assert gathers <= 2


def adamw_of_trained(parameters: Any) -> torch.optim.Optimizer:
    return adamw([parameter for parameter in parameters if parameter.requires_grad])


def engine_with(comm: Comm, tier: str, folder: Path, model: nn.Module) -> Any:
    return engine_of(copy.deepcopy(model), resting(tier, folder), comm, adamw_of_trained)


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_shards_of_codes_are_where_the_config_says(tmp_path: Path, tier: str) -> None:
    """Count bytes of memory and of collectives; released codes read as the largest number."""
    model = make_model(lambda: CodedLM(torch.uint8, width=128))
    nbytes = sum(parameter.nbytes for parameter in model.parameters())

    def body(comm: Comm) -> Any:
        engine = engine_with(comm, tier, tmp_path, model)
        rows = {(row.state, row.tier): (row.bytes_expected, row.bytes_actual) for row in engine.memory()}
        comm.traffic.clear()
        with torch.no_grad():
            engine(*token_batch(0, 0, 0))
        gathered = comm.traffic.bytes["all_gather"]
        layer = engine.module.blocks[0].up
        released = layer.codes.flatten()[0].item(), layer.kept.flatten()[0].item(), layer.offset[0].item()
        engine.close()
        return rows, gathered, released

    for rows, gathered, released in run_ranks(4, body):
        place = ("parameters", {"none": "device", "cpu": "host", "nvme": "disk"}[tier])
        promised, actual = rows[place]
        assert nbytes / 4 <= actual == promised < 1.1 * nbytes / 4  # shards are padded
        assert nbytes <= gathered < 1.1 * nbytes
        assert released == (255, True, torch.iinfo(torch.int64).max)


def test_whole_codes_are_read_edited_and_unwrapped(tmp_path: Path) -> None:
    model = coded()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def body(comm: Comm) -> Any:
        engine = engine_with(comm, "cpu", tmp_path, model)
        layer = engine.module.blocks[1].down
        whole, own = engine.consolidated_state_dict(dtype=torch.bfloat16), engine.module.state_dict()
        with wherry.gathered(layer.codes, modifier_rank=1):
            if comm.rank == 1:
                layer.codes.data[0] = 7
        with wherry.gathered(layer.codes):
            edited = layer.codes[0].tolist()
        return whole, own, edited, engine.unwrap().state_dict()

    results = run_ranks(2, body)
    for whole, own, edited, back in results:
        assert edited == [7] * (2 * WIDTH)
        for name, tensor in expected.items():
            assert torch.equal(own[name], tensor), name
            if name != "blocks.1.down.codes":
                assert torch.equal(back[name], tensor), name
            if whole is not None and name.endswith(CODES):
                assert torch.equal(whole[name], tensor), name
        assert back["blocks.1.down.codes"][0].tolist() == edited
    assert results[0][0] is not None and results[1][0] is None


@pytest.mark.parametrize(("dtype", "without_frozen"), [(torch.int8, True), (torch.float8_e4m3fn, False)])
def test_checkpoints_over_other_ranks_and_tiers(tmp_path: Path, dtype: torch.dtype, without_frozen: bool) -> None:
    batch, models = token_batch(5, 0, 0), [coded(dtype), coded(dtype, seed=0 if without_frozen else 1)]

    def saving(comm: Comm) -> float:
        engine = engine_with(comm, "cpu", tmp_path, models[0])
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "saved", exclude_frozen_parameters=without_frozen)
        with torch.no_grad():
            return float(engine(*batch))

    def loading(comm: Comm) -> float:
        # A whole checkpoint replaces a base of another seed.
        engine = engine_with(comm, "none", tmp_path, models[1])
        engine.load_checkpoint(tmp_path / "saved")
        with torch.no_grad():
            return float(engine(*batch))

    [expected, _] = run_ranks(2, saving)
    assert run_ranks(3, loading) == pytest.approx([expected] * 3, rel=1e-6)


@pytest.mark.parametrize(("way", "ranks"), [("meta", 3), ("Init", 1), ("engine", 3)])
def test_files_of_codes_are_read_into_shards(tmp_path: Path, way: str, ranks: int) -> None:
    other = coded(torch.float8_e4m3fn, seed=3)
    save_file(other.state_dict(), tmp_path / "model.safetensors")

    def body(comm: Comm) -> Any:
        config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
        with wherry.Init(config, mesh=comm, meta=way == "meta", enabled=way != "engine", dtype=torch.float32):
            model = CodedLM(torch.float8_e4m3fn)
        if way != "engine":
            wherry.load_pretrained(model, tmp_path)
        engine = wherry.initialize(model=model, config=config, mesh=comm)[0]
        if way == "engine":
            wherry.load_pretrained(engine, tmp_path)
        return engine.consolidated_state_dict()

    state = run_ranks(ranks, body)[0]
    for name, tensor in other.state_dict().items():
        assert state[name].dtype is tensor.dtype, name
        assert torch.equal(state[name].view(torch.uint8), tensor.view(torch.uint8)), name


# Tensor subclasses that wrap other tensors, as torchao's do.


class Made(torch.Tensor):
    """Codes and their scales, which present themselves as fp32."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Made:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Made:
        return Made(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten._to_copy.default):
            kept = {key: value for key, value in (kwargs or {}).items() if key != "dtype"}
            return Made(func(args[0].codes, *args[1:], **kept), func(args[0].scale, *args[1:], **kept))
        raise AssertionError(func)


class OfMade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Made) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x @ (weight.codes * weight.scale).T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        [weight] = ctx.saved_tensors
        return grad @ (weight.codes * weight.scale), None


class MadeLM(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            codes = torch.randint(-99, 99, (WIDTH, WIDTH), dtype=torch.int8)
            block.base = nn.Parameter(Made(codes, torch.full((WIDTH, 1), 0.002)), requires_grad=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) + OfMade.apply(x, block.base)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def test_tensors_that_wrap_others(tmp_path: Path) -> None:
    """Partition the largest wrapped tensor. The root uses them outside of their units, as a saved tensor."""
    batches = [token_batch(step, 0, 0) for step in range(3)]
    oracle: Any = make_model(MadeLM)
    copies: list[Any] = [make_model(MadeLM) for _ in range(2)]
    optimizer, expected = adamw_of_trained(oracle.parameters()), []
    for batch in batches:
        optimizer.zero_grad()
        loss = oracle(*batch)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))

    def body(comm: Comm) -> Any:
        mine = copies[comm.rank]
        engine = engine_of(mine, resting("cpu", tmp_path), comm, adamw_of_trained)
        released, losses = mine.blocks[0].base.codes, []
        assert released.unique().tolist() == [127] and released.stride() == (0, 0)
        for batch in batches:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        engine.save_checkpoint(tmp_path / "saved")
        with wherry.gathered(mine.blocks[1].base):
            mine.blocks[1].base.codes.zero_()
        mine.blocks[1].base.scale.zero_()
        engine.load_checkpoint(tmp_path / "saved")
        return losses, [block.base for block in engine.unwrap().blocks]

    for losses, bases in run_ranks(2, body):
        assert losses == pytest.approx(expected, rel=1e-6)
        for made, block in zip(bases, oracle.blocks, strict=True):
            assert torch.equal(made.codes, block.base.codes) and torch.equal(made.scale, block.base.scale)


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    """Refuse a cast, which would lack the scales that belong to codes."""
    state = {n: t.float() if n.endswith("up.codes") else t for n, t in coded().state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(
        WherryError, match=r"blocks\.0\.up\.codes: torch\.float32 in the file, torch\.int8 in the model"
    ):
        wherry.load_pretrained(coded(), tmp_path)
