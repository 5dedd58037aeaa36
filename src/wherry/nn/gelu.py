"""A linear layer behind a gelu, for which autograd keeps what the gelu is given and not its result as well."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

APPROXIMATE = "tanh"


class GeluLinear(nn.Linear):
    """`linear(gelu(x))`, with the gelu's approximation by tanh. The result is computed a second time in backward.

    In a transformer the two tensors are the widest of a block, four times its stream each. One is enough: a gelu costs
    little beside the matrices around it.

    >>> GeluLinear(8, 2)(torch.zeros(3, 8)).shape
    torch.Size([3, 2])
    """

    def forward(self, x: Tensor) -> Tensor:
        # Function transforms take the two operations by themselves. A Function that they can take looks at its own
        # signature in every call.
        if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return F.linear(F.gelu(x, approximate=APPROXIMATE), self.weight, self.bias)
        return _GeluLinear.apply(x, self.weight, self.bias)


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(F.gelu(x, approximate=APPROXIMATE), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        rows = grad.reshape(-1, grad.shape[-1])
        # One after the other: each of them makes tensors as wide as what was saved.
        if ctx.needs_input_grad[1]:
            result = F.gelu(x, approximate=APPROXIMATE).to(grad.dtype)
            of_weight = rows.t() @ result.reshape(-1, result.shape[-1])
            del result
        if ctx.needs_input_grad[0]:
            # Under autocast the product was of another type than what went in.
            of_result = (grad @ weight.to(grad.dtype)).to(x.dtype)
            of_x = torch.ops.aten.gelu_backward(of_result, x, approximate=APPROXIMATE)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_x, of_weight, of_bias
