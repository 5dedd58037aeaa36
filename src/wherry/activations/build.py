"""From the config to an engine's `Activations`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import nn

from wherry.activations.manager import Activations
from wherry.activations.partition import CheckpointPartition
from wherry.activations.saving import Beneath
from wherry.activations.stores import DiskActivations, HostStore, Store
from wherry.observe.log import say, warn
from wherry.observe.memory import free_on_gpu
from wherry.parallel.topology import Topology
from wherry.sharding.unit import Unit
from wherry.tiers.host import free_host_memory
from wherry.tiers.streams import link_to

if TYPE_CHECKING:
    from wherry.config import Config
    from wherry.config.blocks import ActivationCheckpointing

# A checkpoint that is smaller is not worth a gather.
SMALLEST_PARTITIONED = 4096
# Of what is free, `auto` leaves a part for what it cannot know: fragments, the largest unit's backward.
SHARE_OF_FREE = 0.8


def build(
    config: Config,
    model: nn.Module,
    units: Sequence[Unit],
    beneath: Beneath,
    topology: Topology,
    gather: Callable[[Unit], None],
) -> Activations:
    """What the block `activation_checkpointing` asks for; with an empty one nothing is wrapped."""
    block = config.activation_checkpointing
    partition = None
    if block.partition_activations:
        if topology.tensor.size > 1:
            partition = CheckpointPartition(topology.tensor, smallest=SMALLEST_PARTITIONED)
        else:
            warn("activation_checkpointing.partition_activations: no effect, as no ranks share a tensor-parallel axis")
    return Activations(
        model,
        units,
        block,
        beneath,
        topology,
        gather=gather,
        free_bytes=lambda: free_bytes(topology, config.wherry.host_memory),
        store=_store(block, topology, checksum=config.aio.checksum),
        partition=partition,
    )


def _store(block: ActivationCheckpointing, topology: Topology, *, checksum: bool) -> Store | None:
    if not (block.cpu_checkpointing or block.nvme_path):
        return None
    # A way of its own, so that activations do not wait behind weights and gradients.
    link = topology.link(True) if topology.link is not None else link_to(topology.device)
    if block.nvme_path:
        folders = [block.nvme_path] if isinstance(block.nvme_path, str) else block.nvme_path
        store = topology.open_store(folders, name="activations", checksum=checksum)
        return DiskActivations(store, link)
    if link.shared:
        say("activation_checkpointing.cpu_checkpointing: activations are in host memory, as the device is the host")
        link.close()
        return None
    return HostStore(link)


def free_bytes(topology: Topology, limit: int | None = None) -> int:
    """Return the bytes that activations may still take on this rank's device, given `wherry.host_memory`."""
    device = topology.device
    if device.type != "cpu":
        return int(free_on_gpu(device) * SHARE_OF_FREE)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", topology.world_size))
    return int(free_host_memory(here, limit) * SHARE_OF_FREE / here)
