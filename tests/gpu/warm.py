"""The device under test, and the memory that torch's libraries keep from their first use of it on."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from wherry.tiers.streams import accelerator

DEVICE = accelerator()


def warm_up() -> None:
    """Make the workspaces for products of this thread and of autograd's: tens of MB for each."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.ones(128, 128, device=DEVICE, dtype=dtype, requires_grad=True)
        F.linear(x, x, x[0]).sum().backward()
    torch.accelerator.synchronize()
