"""From what the user gives (a mesh, a launcher's environment, nothing) to the groups of ranks along each mesh axis."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from wherry.errors import WherryError
from wherry.parallel.comm import Comm, ProcessGroupComm, SoloComm, Traffic, start_default_group
from wherry.tiers.disk import DiskStore
from wherry.tiers.streams import Link, accelerator

DATA_AXES = ("dp", "data", "data_parallel", "dp_shard")
# Beside a data axis: along it ranks hold copies of what the ranks along the data axis share out.
REPLICA_AXES = ("dp_replicate", "replicate")
# Within a data axis: along it ranks have the same samples, and each of them a part of their sequence.
CONTEXT_AXES = ("cp", "context", "context_parallel")
TENSOR_AXES = ("tp", "tensor", "tensor_parallel", "mp", "model")
PIPE_AXES = ("pp", "pipe", "pipeline", "pipeline_parallel")


@dataclass(frozen=True)
class Topology:
    """The groups this rank belongs to, and the device it computes on."""

    data: Comm
    device: torch.device
    global_rank: int
    local_rank: int
    world_size: int
    # The model-parallel axes. Along `tensor` ranks hold parts of the same parameters, along `pipe` other layers.
    tensor: Comm = field(default_factory=SoloComm)
    pipe: Comm = field(default_factory=SoloComm)
    # Makes the way between the device and the host, with pinned memory or not; None for that of the device.
    link: Callable[[bool], Link] | None = None
    open_store: Callable[..., DiskStore] = DiskStore
    # The data axis as two: the ranks that share out one copy of what is partitioned (None: all of them), and those that
    # hold the same part of it as this one.
    group: Comm | None = None
    replicas: Comm = field(default_factory=SoloComm)
    # The ranks among which weights are shared out a second time, so that backward gathers from near.
    node: Comm = field(default_factory=SoloComm)
    # The ranks, next to each other along the data axis, that share the sequence of the same samples.
    context: Comm = field(default_factory=SoloComm)

    @property
    def shards(self) -> Comm:
        """The ranks that share out one copy of what is partitioned."""
        return self.data if self.group is None else self.group

    def divided(self, ranks: int) -> Topology:
        """With one copy of what is partitioned for every `ranks` data-parallel ranks next to each other."""
        if ranks == self.shards.size:
            return self
        return replace(self, group=self.data.within(ranks), replicas=self.data.across(ranks))

    @property
    def readers(self) -> tuple[int, int]:
        """This rank's place among those that read different samples, and how many these are."""
        return self.data.rank // self.context.size, self.data.size // self.context.size

    def traffic(self) -> Iterator[tuple[str, Traffic]]:
        """What this rank has asked of each group along the data axis, and what the group is called beside the whole."""
        names = {self.data: ""}
        names.setdefault(self.shards, f" within groups of {self.shards.size}")
        names.setdefault(self.replicas, " across groups")
        names.setdefault(self.node, f" within nodes of {self.node.size}")
        names.setdefault(self.context, f" within a sequence on {self.context.size}")
        yield from ((name, comm.traffic) for comm, name in names.items() if not name or comm.size > 1)

    def close(self) -> None:
        """Give back the groups along the data axis."""
        parts = dict.fromkeys((self.context, self.node, self.replicas, self.shards))
        for comm in (*(part for part in parts if part is not self.data), self.data):
            comm.close()

    @property
    def local_ranks(self) -> int:
        """Ranks on this machine, as far as the launcher has told."""
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class World(Comm):
    """All ranks of all mesh axes as one group, for what is rare and small: agreeing, reporting, telling failures.

    Its objects go through the groups of a topology, one after the other: data fastest, then tensor, then pipe.
    """

    def __init__(self, topology: Topology) -> None:
        self._axes = (topology.data, topology.tensor, topology.pipe)
        rank, size = 0, 1
        for axis in self._axes:
            rank += axis.rank * size
            size *= axis.size
        super().__init__(rank, size)

    def _gather_objects(self, value: Any) -> list[Any]:
        found = [value]
        for axis in self._axes:
            found = [item for part in axis.gather_objects(found) for item in part]
        return found

    def _meet(self, what: str) -> None:
        for axis in self._axes:
            axis.meet(what)


def world_of(topology: Topology) -> Comm:
    """The group of all ranks: the data axis itself, where there is no other."""
    return topology.data if topology.tensor.size == topology.pipe.size == 1 else World(topology)


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def default_device() -> torch.device:
    """The device of this rank, as launchers count them; without a launcher the one that the program has chosen."""
    kind = accelerator()
    if kind is None:
        return torch.device("cpu")
    launched = "LOCAL_RANK" in os.environ
    count, current = torch.accelerator.device_count(), torch.accelerator.current_device_index()
    device = torch.device(kind.type, local_rank() % count if launched else current)
    torch.accelerator.set_device_index(device)
    return device


def find(mesh: Any = None, *, device: torch.device | None = None, timeout: float = 600.0) -> Topology:
    """The topology for `mesh`: a DeviceMesh, an `mpu`, a Comm, or None for all ranks that the launcher started.

    An `mpu` is the object of Megatron-style code that knows the groups: `get_data_parallel_group()` and, where ranks
    share a model, `get_tensor_model_parallel_group()` or `get_model_parallel_group()`, and
    `get_pipeline_model_parallel_group()`.
    """
    if isinstance(mesh, Topology):
        return mesh
    device = device or default_device()
    if isinstance(mesh, Comm):
        return Topology(mesh, device, mesh.rank, local_rank(), mesh.size)
    if mesh is not None:
        known = hasattr(mesh, "get_data_parallel_group")
        axes = _axes_of_mpu(mesh, timeout) if known else _axes_of_mesh(mesh, timeout)
        ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (axes[0].rank, axes[0].size)
        topology = Topology(axes[0], device, ranks[0], local_rank(), ranks[1], axes[1], axes[2])
        if known:
            return topology
        topology = replace(topology, context=axes[0].within(_size_along(mesh, CONTEXT_AXES)))
        return topology.divided(topology.data.size // _size_along(mesh, REPLICA_AXES))
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        start_default_group(device.type, timeout)
    if dist.is_initialized() and dist.get_world_size() > 1:
        comm = ProcessGroupComm(timeout=timeout)
        return Topology(comm, device, comm.rank, local_rank(), comm.size)
    return Topology(SoloComm(), device, 0, local_rank(), 1)


def _axes_of_mesh(mesh: Any, timeout: float) -> tuple[Comm, Comm, Comm]:
    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    families = (DATA_AXES, TENSOR_AXES, PIPE_AXES, REPLICA_AXES, CONTEXT_AXES)
    chosen = [[name for name in known if name in names] for known in families]
    strangers = [name for name in names if not any(name in known for known in chosen)]
    doubled = [found for found in chosen if len(found) > 1]
    data, tensor, pipe, replicas, context = chosen
    if not names or not any((data, tensor, pipe, context)) or strangers or doubled or (replicas and not data):
        others = ", ".join((*DATA_AXES[1:], *TENSOR_AXES[1:], *PIPE_AXES[1:]))
        raise WherryError(
            f"mesh: expected axes named dp, cp, tp and pp (or {others}), each once at most, and before dp perhaps "
            f"{' or '.join(REPLICA_AXES)}, got {names or 'no axis names'}; "
            'build it with init_device_mesh(device, shape, mesh_dim_names=("dp", ...))'
        )
    # States are shared out over all of these.
    of_data = [*replicas, *data, *context]
    for slower, faster in pairwise(of_data):
        if names.index(slower) > names.index(faster):
            raise WherryError(
                f"mesh: expected axis {slower} before {faster}, which runs faster, got {names}; ranks that share "
                f"{'the sequence of a sample' if faster in context else 'out one copy of the states'} are next to each "
                "other"
            )

    def along(found: list[str]) -> Comm:
        if not found:
            return SoloComm()
        part = mesh[tuple(found)]._flatten() if len(found) > 1 else mesh[found[0]]
        return ProcessGroupComm(part.get_group(), timeout=timeout)

    return along(of_data), along(tensor), along(pipe)


def _size_along(mesh: Any, axes: tuple[str, ...]) -> int:
    return next((mesh[name].size() for name in axes if name in mesh.mesh_dim_names), 1)


def _axes_of_mpu(mpu: Any, timeout: float) -> tuple[Comm, Comm, Comm]:
    def comm_of(*axes: str) -> Comm:
        for axis in axes:
            get = getattr(mpu, f"get_{axis}_group", None)
            if get is None:
                continue
            group = get()
            size = getattr(mpu, f"get_{axis}_world_size", lambda: None)()
            # Code without model parallelism may have no group to give; the data's None is torch's, for all ranks.
            if group is None and axis != "data_parallel" and size in (None, 1):
                continue
            comm = group if isinstance(group, Comm) else ProcessGroupComm(group, timeout=timeout)
            if size not in (None, comm.size):
                raise WherryError(
                    f"mpu: get_{axis}_world_size() is {size}, and get_{axis}_group() "
                    f"{'is None, which stands for all' if group is None else 'has'} {comm.size} ranks; give the group"
                )
            return comm
        return SoloComm()

    return (
        comm_of("data_parallel"),
        comm_of("tensor_model_parallel", "model_parallel"),
        comm_of("pipeline_model_parallel", "pipe_parallel"),
    )
