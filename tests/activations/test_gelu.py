"""A gelu and the linear layer behind it: plain PyTorch's results, from one saved tensor instead of two."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wherry
from wherry.nn import GeluLinear


class Plain(GeluLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(x, approximate="tanh"), self.weight, self.bias)


def grown(layer: nn.Linear, x: torch.Tensor, autocast: bool = False) -> list[torch.Tensor | None]:
    """Compute the result, and the gradients of the input and of the weights."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("kind", ["fp32", "bf16", "autocast", "no bias", "frozen"])
def test_it_is_a_gelu_and_a_linear_layer(kind: str) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    tolerance = 1e-2 if kind in ("bf16", "autocast") else 1e-6
    layer = GeluLinear(24, 7, bias=kind != "no bias").to(dtype)
    if kind == "frozen":
        layer.weight.requires_grad_(False)
    plain = copy.deepcopy(layer)
    plain.__class__ = Plain
    x = torch.randn(3, 5, 24, dtype=dtype)
    for one, other in zip(grown(layer, x, kind == "autocast"), grown(plain, x, kind == "autocast"), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=tolerance, atol=1e-6)


def test_second_derivatives() -> None:
    torch.manual_seed(0)
    layer, x = GeluLinear(4, 3).double(), torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    given = (x, *layer.parameters())

    def call(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return layer(x)

    assert torch.autograd.gradcheck(call, given) and torch.autograd.gradgradcheck(call, given)


def test_one_of_the_two_tensors_is_saved() -> None:
    saved: list[int] = []
    layer, x = GeluLinear(64, 16), torch.randn(8, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.untyped_storage().data_ptr()) or t, lambda t: t
    ):
        y = layer(x)
    assert set(saved) == {x.untyped_storage().data_ptr(), layer.weight.untyped_storage().data_ptr()}
    with torch.no_grad():
        assert torch.equal(layer(x), y)


def test_tiles_stand_for_it() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 24), GeluLinear(24, 6)), torch.randn(5, 6)
    expected = model(x)
    wherry.tile(model, max_bytes=200)
    assert isinstance(model[1], wherry.nn.TiledLinear) and len(model[1].tiles) > 1
    torch.testing.assert_close(model(x), expected)
