"""Whether the micro-batches of a window go through a unit together: `wherry train` asks for it where that pays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from wherry.activations.build import free_bytes
from wherry.config import load
from wherry.parallel.topology import Topology
from wherry.placement import Tier
from wherry.train.presets import Shape


def runs_together(config: Mapping[str, Any], place: Topology, shape: Shape, checkpointed: bool) -> bool:
    """Where the config leaves it open: whether each micro-batch would send weights or gradients over a wire, a bus or
    to a disk, and half of what is free has room for the activations of all of them.
    """
    resolved = load(config)
    placement, batch, dtype = resolved.placement(), resolved.batch(place.data.size), resolved.working_dtype()
    if batch.accumulation == 1 or (config.get("wherry") or {}).get("accumulation", "auto") != "auto":
        return False
    itemsize = (dtype or torch.float32).itemsize
    if itemsize < torch.float32.itemsize and not hasattr(torch.Tensor, "grad_dtype"):
        return False  # torch before 2.10 would sum the gradients of all of them in so few bits
    states = (placement.parameters, placement.gradients)
    travels = (
        (place.data.size > 1 and any(state.partitioned for state in states))
        or (place.device.type != "cpu" and any(state.tier is not Tier.DEVICE for state in states))
        or placement.parameters.tier is Tier.DISK
    )
    activations = shape.activation_bytes(batch.micro, checkpointed=checkpointed, itemsize=itemsize)
    return travels and batch.accumulation * activations <= free_bytes(place) // 2
