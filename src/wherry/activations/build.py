"""From the config to an engine's `Activations`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from wherry.activations.blocks import Blocks
from wherry.activations.cut import Cut
from wherry.activations.manager import Activations, Groups, Settings
from wherry.activations.recompute import operations
from wherry.activations.saving import Beneath
from wherry.activations.stores import Allocate, DiskActivations, HostStore, Store, allocator
from wherry.observe.log import say, warn
from wherry.observe.memory import free_on_gpu, host_memory
from wherry.parallel.topology import Topology
from wherry.sharding.unit import Unit
from wherry.tiers.streams import link_to

if TYPE_CHECKING:
    from wherry.config import Config
    from wherry.config.blocks import ActivationCheckpointing

# A checkpoint that is smaller is not worth a gather.
SMALLEST_CUT = 4096
# Of what is free, `auto` leaves a part for what it cannot know: fragments, the largest unit's backward.
SHARE_OF_FREE = 0.8


def build(
    config: Config,
    units: Sequence[Unit],
    beneath: Beneath,
    topology: Topology,
    gather: Callable[[Unit], None],
) -> Activations:
    """What the block `activation_checkpointing` asks for; with an empty one nothing is wrapped."""
    block = config.activation_checkpointing
    device = topology.device
    policy = block.resolved_policy()
    blocks = None
    if block.contiguous_memory_optimization:
        blocks = Blocks(device, ahead=block.number_checkpoints or 1)
    allocate = allocator(device, blocks)
    store = _store(block, topology, allocate, checksum=config.aio.checksum)
    cut = None
    if block.partition_activations:
        if topology.tensor.size > 1:
            cut = Cut(topology.tensor, allocate, smallest=SMALLEST_CUT)
        else:
            warn("activation_checkpointing.partition_activations: no effect, as no ranks share a tensor-parallel axis")
    settings = Settings(
        policy=policy,
        every=block.every,
        save_operations=operations(block.save_operations),
        smallest=block.offload_min_bytes,
        synchronize=block.synchronize_checkpoint_boundary,
        profile=block.profile,
        budget=block.memory,
    )
    return Activations(
        units,
        settings,
        beneath,
        Groups(topology.data, topology.tensor),
        device,
        gather=gather,
        store=store,
        cut=cut,
        blocks=blocks,
        free_bytes=lambda: free_bytes(topology),
        rank=topology.global_rank,
    )


def _store(block: ActivationCheckpointing, topology: Topology, allocate: Allocate, *, checksum: bool) -> Store | None:
    if not (block.cpu_checkpointing or block.nvme_path):
        return None
    # A way of its own, so that activations do not wait behind weights and gradients.
    link = topology.link(True) if topology.link is not None else link_to(topology.device)
    if block.nvme_path:
        folders = [block.nvme_path] if isinstance(block.nvme_path, str) else block.nvme_path
        store = topology.open_store(folders, name="activations", checksum=checksum)
        return DiskActivations(store, link, allocate)
    if link.shared:
        say("activation_checkpointing.cpu_checkpointing: activations are in host memory, as the device is the host")
        link.close()
        return None
    return HostStore(link, allocate)


def free_bytes(topology: Topology) -> int:
    """What activations may still take on this rank's device."""
    device = topology.device
    if device.type == "cuda":
        return int(free_on_gpu(device) * SHARE_OF_FREE)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", topology.world_size))
    return int(host_memory().available * SHARE_OF_FREE / here)
