"""`deepspeed.comm`: torch.distributed under its own names, and the names that only DeepSpeed has."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from wherry.compat.deepspeed.accelerator import get_accelerator
from wherry.compat.deepspeed.parameters import live_engines
from wherry.errors import WherryError
from wherry.observe.log import is_rank_zero, logger, say, warn
from wherry.parallel.comm import Traffic
from wherry.parallel.topology import default_device, local_rank

# The collectives that are counted, and where among their arguments the tensors are that they send.
_SENT = {
    **dict.fromkeys(("all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "gather", "barrier"), 0),
    **dict.fromkeys(("send", "recv", "isend", "irecv"), 0),
    **dict.fromkeys(("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"), 1),
    **dict.fromkeys(("all_to_all", "all_to_all_single", "scatter"), 1),
}
# DeepSpeed's names for collectives of torch.
_RENAMED = {"allgather_fn": "all_gather_into_tensor", "reduce_scatter_fn": "reduce_scatter_tensor"}
_watched = frozenset(_SENT)
script_traffic = Traffic()


class NotStarted(WherryError, AssertionError):
    """torch.distributed has not started, and the call may not start it."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    name = _RENAMED.get(name, name)
    return _counted(name) if name in _SENT else getattr(dist, name)


@functools.cache
def _counted(name: str) -> Callable[..., Any]:
    """Wrap torch's collective so that its calls and bytes are counted."""
    plain, position = getattr(dist, name), _SENT[name]

    @functools.wraps(plain)
    def call(*args: Any, prof: Any = None, log_name: Any = None, debug: Any = None, **kwargs: Any) -> Any:
        if name in _watched:
            sent = dict(enumerate([*args, *kwargs.values()])).get(position)
            tensors = sent if isinstance(sent, list | tuple) else [sent]
            script_traffic.add(name, sum(tensor.nbytes for tensor in tensors if torch.is_tensor(tensor)))
        return plain(*args, **kwargs)

    return call


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
) -> None:
    """Start torch.distributed from what a launcher has set; without a launcher, as a group of one."""
    if not started():
        if dist_init_required is False:
            raise NotStarted(
                "init_distributed(dist_init_required=False): torch.distributed has not started; call "
                "torch.distributed.init_process_group first, or leave dist_init_required out"
            )
        if auto_mpi_discovery:
            _from_mpi(distributed_port)
        backend, store = _backend(dist_backend), None
        count = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
        if count == 1 and init_method is None:
            store, rank, world_size, verbose = dist.HashStore(), 0, 1, False
        else:
            os.environ.setdefault("MASTER_PORT", str(distributed_port))
        dist.init_process_group(
            backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size, store=store
        )
        if verbose:
            say("torch.distributed has started: %d ranks, backend %s", dist.get_world_size(), backend)
    # Accelerate reads its state again after this call.
    if (shared := _accelerate_without_backend()) is not None:
        shared["backend"] = dist.get_backend()


def _backend(asked: str | None) -> str:
    kind, own = default_device().type, get_accelerator().communication_backend_name()
    if asked not in (None, "nccl", own):
        return str(asked)
    if asked == "nccl" and kind == "cpu" and is_rank_zero():
        logger.warning("init_distributed: nccl needs a GPU and there is none here, so gloo is used")
    return own if own == "gloo" else f"cpu:gloo,{kind}:{own}"


def _from_mpi(port: int) -> None:
    """Set the variables of a launcher from those of mpirun, where only mpirun has started the ranks."""
    if "RANK" in os.environ or "OMPI_COMM_WORLD_RANK" not in os.environ:
        return
    for ours, theirs in (("RANK", "RANK"), ("LOCAL_RANK", "LOCAL_RANK"), ("WORLD_SIZE", "SIZE")):
        os.environ[ours] = os.environ[f"OMPI_COMM_WORLD_{theirs}"]
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(port))


def started() -> bool:
    """Return whether torch.distributed has started."""
    return dist.is_available() and dist.is_initialized()


def is_initialized() -> bool:
    """Return whether torch.distributed has started; False to an Accelerate that knows no backend.

    Accelerate calls `init_distributed` then, which gives it the backend.
    """
    return started() and _accelerate_without_backend() is None


def _accelerate_without_backend() -> dict[str, Any] | None:
    """Return Accelerate's state while it is being made, if it has no backend.

    For ranks without a GPU Accelerate has none, and takes each rank for the only one.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    shared = getattr(state, "_shared_state", {})
    return shared if "num_processes" not in shared and shared.get("backend", "") is None else None


def get_rank(group: Any = None) -> int:
    return dist.get_rank(group) if started() else int(os.environ.get("RANK", "0"))


def get_world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if started() else int(os.environ.get("WORLD_SIZE", "1"))


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


get_local_rank = local_rank


def has_all_gather_into_tensor() -> bool:
    return True


def configure(
    deepspeed_config: Any = None, enabled: bool | None = None, prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None, verbose: bool | None = None, debug: bool | None = None,
) -> None:  # fmt: skip
    """Choose which of the script's own collectives are counted; those of engines always are."""
    global _watched
    if enabled is False:
        _watched = frozenset()
    elif prof_ops and not prof_all:
        _watched = frozenset(prof_ops)
    elif enabled or prof_all:
        _watched = frozenset(_SENT)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Log calls and bytes of each operation: the script's own, and under "engine: " those of live engines."""
    if show_straggler:
        warn("log_summary(show_straggler=True): collectives are counted, not timed; use torch.profiler for times")
    engines = [("engine: ", *pair) for engine in live_engines() for pair in engine.topology.traffic()]
    totals: dict[str, list[int]] = {}
    for whose, among, traffic in [("", "", script_traffic), *engines]:
        for operation, calls in traffic.calls.items():
            total = totals.setdefault(whose + operation + among, [0, 0])
            total[0] += calls
            total[1] += traffic.bytes[operation]
    summary = {}
    for name, (calls, sent) in totals.items():
        say("%s: %d calls, %.1f MB", name, calls, sent / 1e6)
        summary[name] = {sent // calls: {"count": calls, "msg_size_bytes": sent // calls}}
    return {"summary": summary} if return_dict else None
