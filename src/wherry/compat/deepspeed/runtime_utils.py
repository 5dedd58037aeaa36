"""`deepspeed.runtime.utils`: clip gradients, move batches, seed, and log memory, for scripts that do so themselves."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from wherry.compat.deepspeed import groups
from wherry.compat.deepspeed.accelerator import get_accelerator
from wherry.compat.deepspeed.comm import get_rank, get_world_size, started
from wherry.observe.log import logger
from wherry.observe.memory import device_memory, format_bytes, host_memory
from wherry.parallel.topology import default_device


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
) -> torch.Tensor:
    """Clip gradients in place by the mean of the norms of the data-parallel ranks; returns it."""
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    trained = [p for p in chosen if p.grad is not None]
    norms = [torch.linalg.vector_norm(p.grad.detach().float(), norm_type) for p in trained if p.grad is not None]
    total = torch.linalg.vector_norm(torch.stack(norms or [torch.zeros((), device=default_device())]), norm_type)
    if started():
        group = groups._get_data_parallel_group()
        total = total / get_world_size(group)
        dist.all_reduce(total, group=group)
    nn.utils.clip_grads_with_norm_(trained, max_norm, total)
    return total


def move_to_device(item: Any, device: torch.device | str) -> Any:
    """Copy all tensors of a nested structure to a device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), item)


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log memory in use on rank 0, if `force` is set, and start counting the device's peak anew."""
    if not force:
        return
    gc.collect()
    if get_rank() == 0:
        host, device = host_memory(), device_memory(default_device())
        on_device = f"device {format_bytes(device.allocated)}, peak {format_bytes(device.peak)}; " if device else ""
        on_host = f"host {format_bytes(host.resident)}, peak {format_bytes(host.peak)}"
        logger.info("%s: %s%s", message, on_device, on_host)
    get_accelerator().reset_peak_memory_stats()
