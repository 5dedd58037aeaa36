"""`deepspeed.comm`: torch.distributed under its own names, and the few that torch does not have."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from wherry.compat.deepspeed.accelerator import get_accelerator
from wherry.compat.deepspeed.parameters import live_engines
from wherry.observe.log import is_rank_zero, logger, say
from wherry.parallel.topology import default_device


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(dist, name)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
    **options: Any,
) -> None:
    """Start torch.distributed from what a launcher has set; without a launcher, as a group of one."""
    if not started() and dist_init_required is not False:
        if auto_mpi_discovery:
            _from_mpi(distributed_port)
        backend = _backend(dist_backend)
        count = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1 and init_method is None:
            options |= {"store": dist.HashStore()}
            rank, world_size, verbose = 0, 1, False
        else:
            os.environ.setdefault("MASTER_PORT", str(distributed_port))
        dist.init_process_group(
            backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size, **options
        )
        if verbose:
            say("torch.distributed has started: %d ranks, backend %s", dist.get_world_size(), backend)
    _tell_accelerate()


def _backend(asked: str | None) -> str:
    kind, own = default_device().type, get_accelerator().communication_backend_name()
    if asked not in (None, "nccl", own):
        return str(asked)
    if asked == "nccl" and kind == "cpu" and is_rank_zero():
        logger.warning("init_distributed: nccl needs a GPU and there is none here, so gloo is used")
    return own if own == "gloo" else f"cpu:gloo,{kind}:{own}"


def _from_mpi(port: int) -> None:
    """Ranks that mpirun started know who they are by its own variables."""
    if "RANK" in os.environ or "OMPI_COMM_WORLD_RANK" not in os.environ:
        return
    for ours, theirs in (("RANK", "RANK"), ("LOCAL_RANK", "LOCAL_RANK"), ("WORLD_SIZE", "SIZE")):
        os.environ[ours] = os.environ[f"OMPI_COMM_WORLD_{theirs}"]
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(port))


def started() -> bool:
    """Whether torch.distributed has started."""
    return dist.is_available() and dist.is_initialized()


def is_initialized() -> bool:
    """Whether torch.distributed has started, for all that the asker needs of it.

    Accelerate, while it has no backend, is answered no: it calls `init_distributed` then, and is told of one there.
    """
    return started() and _accelerate_without_backend() is None


def _accelerate_without_backend() -> dict[str, Any] | None:
    """Accelerate's state while it is being made, if it knows no backend.

    It knows none for ranks without a GPU, and takes each for the only one.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    shared = getattr(state, "_shared_state", {})
    return shared if "num_processes" not in shared and shared.get("backend", "") is None else None


def _tell_accelerate() -> None:
    """Which backend there is. It looks at its state again after it has called `init_distributed`."""
    shared = _accelerate_without_backend()
    if shared is not None and started():
        shared["backend"] = dist.get_backend()


def get_rank(group: Any = None) -> int:
    return dist.get_rank(group) if started() else int(os.environ.get("RANK", "0"))


def get_world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if started() else int(os.environ.get("WORLD_SIZE", "1"))


def get_world_group() -> Any:
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def has_all_gather_into_tensor() -> bool:
    return True


def has_reduce_scatter_tensor() -> bool:
    return True


def reduce_scatter_fn(
    output_tensor: torch.Tensor, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None,
    async_op: bool = False, debug: str = "",
) -> Any:  # fmt: skip
    return dist.reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op)


def allgather_fn(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False, debug: str = ""
) -> Any:
    return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[torch.Tensor], group: Any = None,
    async_op: bool = False,
) -> Any:  # fmt: skip
    pairs = zip(output_tensors, input_tensors, strict=True)
    works = [dist.all_gather_into_tensor(out, own, group=group, async_op=async_op) for out, own in pairs]
    return _Works(works) if async_op else None


class _Works:
    """Several collectives as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> bool:
        return all(work.wait() for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def configure(*_: Any, **__: Any) -> None:
    """Nothing to set: engines count what they send, and `comms_logger` in the config logs it."""


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, dict[str, int]] | None:
    """Log what this process's engines have sent, by operation."""
    table: dict[str, dict[str, int]] = {}
    for engine in live_engines():
        for among, traffic in engine.topology.traffic():
            for operation, calls in traffic.calls.items():
                row = table.setdefault(operation + among, {"calls": 0, "bytes": 0})
                row["calls"] += calls
                row["bytes"] += traffic.bytes[operation]
    for operation, row in table.items():
        say("%s: %d calls, %.1f MB", operation, row["calls"], row["bytes"] / 1e6)
    return table if return_dict else None
