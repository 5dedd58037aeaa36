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
    TinyLM,
    adamw,
    assert_same,
    engine_of,
    make_model,
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


@pytest.mark.parametrize(
    ("stage", "dtype", "ranks", "tier", "precision"),
    [
        (0, torch.int8, 2, "none", "fp32"),
        (3, torch.uint8, 2, "none", "bf16"),
        (3, torch.int8, 1, "cpu", "fp32"),
        (3, torch.float8_e4m3fn, 2, "nvme", "fp32"),
    ],
)
def test_trained_as_plain_pytorch(
    tmp_path: Path, stage: int, dtype: torch.dtype, ranks: int, tier: str, precision: str
) -> None:
    config = (resting(tier, tmp_path) if stage == 3 else {}) | {"bf16": {"enabled": precision == "bf16"}}
    oracle = train_plain(coded(dtype), ranks=ranks, accumulation=2, steps=3)
    run = train_engine(coded(dtype), stage=stage, ranks=ranks, accumulation=2, steps=3, config=config)
    assert run.losses == pytest.approx(oracle.losses, rel=2e-2 if precision == "bf16" else 1e-5)
    for name, value in oracle.weights.items():
        if name.endswith(CODES):
            assert torch.equal(run.weights[name], value), name
        elif precision == "fp32":
            torch.testing.assert_close(run.weights[name], value, rtol=1e-4, atol=1e-5)


def adamw_of_trained(parameters: Any) -> torch.optim.Optimizer:
    return adamw([parameter for parameter in parameters if parameter.requires_grad])


def engine_with(comm: Comm, tier: str, folder: Path, model: nn.Module) -> Any:
    return engine_of(copy.deepcopy(model), resting(tier, folder), comm, adamw_of_trained)


@pytest.mark.parametrize(("tier", "place"), [("none", "device"), ("cpu", "host"), ("nvme", "disk")])
def test_shards_of_codes_are_where_the_config_says(tmp_path: Path, tier: str, place: str) -> None:
    """Count bytes of memory and of collectives; released codes read as the largest number."""
    model = make_model(lambda: CodedLM(torch.uint8, width=128))
    nbytes = sum(parameter.nbytes for parameter in model.parameters())

    def body(comm: Comm) -> None:
        engine = engine_with(comm, tier, tmp_path, model)
        row = next(row for row in engine.memory() if (row.state, row.tier) == ("parameters", place))
        assert nbytes / 4 <= row.bytes_actual == row.bytes_expected < 1.1 * nbytes / 4  # shards are padded
        comm.traffic.clear()
        with torch.no_grad():
            engine(*token_batch(0, 0, 0))
        assert nbytes <= comm.traffic.bytes["all_gather"] < 1.1 * nbytes
        layer = engine.module.blocks[0].up
        assert (layer.codes == 255).all() and layer.kept.all()
        assert (layer.offset == torch.iinfo(torch.int64).max).all()
        engine.close()

    run_ranks(4, body)


def test_whole_codes_are_read_edited_and_unwrapped(tmp_path: Path) -> None:
    model = coded()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def body(comm: Comm) -> None:
        engine = engine_with(comm, "cpu", tmp_path, model)
        assert_same(engine.module.state_dict(), expected)
        whole = engine.consolidated_state_dict(dtype=torch.bfloat16)
        assert (whole is None) == (comm.rank > 0)
        assert all(
            torch.equal(tensor, expected[name]) for name, tensor in (whole or {}).items() if name.endswith(CODES)
        )
        codes = engine.module.blocks[1].down.codes
        with wherry.gathered(codes, modifier_rank=1):
            if comm.rank == 1:
                codes.data[0] = 7
        edited = expected["blocks.1.down.codes"].clone()
        edited[0] = 7
        with wherry.gathered(codes):
            assert torch.equal(codes, edited)
        assert_same(engine.unwrap().state_dict(), expected | {"blocks.1.down.codes": edited})

    run_ranks(2, body)


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
        if func.__name__ in ("detach.default", "alias.default", "_to_copy.default", "clone.default"):
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
    oracle: Any
    oracle, *copies = (make_model(MadeLM) for _ in range(3))
    expected = train_plain(oracle, ranks=2, steps=3, in_place=True).losses

    def body(comm: Comm) -> Any:
        mine: Any = copies[comm.rank]
        engine = engine_of(mine, resting("cpu", tmp_path), comm, adamw_of_trained)
        released = mine.blocks[0].base.codes
        assert released.unique().tolist() == [127] and released.stride() == (0, 0)
        losses = train(engine, 3)
        engine.save_checkpoint(tmp_path / "saved")
        with wherry.gathered(mine.blocks[1].base):
            mine.blocks[1].base.codes.zero_()
        mine.blocks[1].base.scale.zero_()
        engine.load_checkpoint(tmp_path / "saved")
        return losses, [block.base for block in engine.unwrap().blocks]

    (losses, bases), (others, more) = run_ranks(2, body)
    assert [sum(pair) / 2 for pair in zip(losses, others, strict=True)] == pytest.approx(expected, rel=1e-5)
    for found in (bases, more):
        for made, block in zip(found, oracle.blocks, strict=True):
            assert torch.equal(made.codes, block.base.codes) and torch.equal(made.scale, block.base.scale)


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    """Refuse a cast, which would lack the scales that belong to codes."""
    state = {n: t.float() if n.endswith("up.codes") else t for n, t in coded().state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(WherryError, match=r"0\.up\.codes: torch\.float32 in the file, torch\.int8 in the model"):
        wherry.load_pretrained(coded(), tmp_path)
