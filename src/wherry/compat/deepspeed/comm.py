"""`deepspeed.comm`: torch.distributed under its own names, and the few that torch does not have."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from wherry.compat.deepspeed.accelerator import get_accelerator
from wherry.compat.deepspeed.parameters import live_engines
from wherry.errors import WherryError
from wherry.observe.log import is_rank_zero, logger, say
from wherry.parallel.topology import default_device, local_rank

if TYPE_CHECKING:
    from wherry.compat.deepspeed.comms_logging import CommsLogger

NCCL_BACKEND, GLOO_BACKEND, MPI_BACKEND, CCL_BACKEND = "nccl", "gloo", "mpi", "ccl"

# The collectives that are timed when a script asks for it, and where among their arguments is what they send.
_TIMED = {"inference_all_reduce": 0, "gather": 0, "barrier": 0, "monitored_barrier": 0} | {
    **dict.fromkeys(("all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "send", "recv", "isend", "irecv"), 0),
    **dict.fromkeys(("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"), 1),
    **dict.fromkeys(("all_to_all", "all_to_all_single", "scatter"), 1),
}
_comms: CommsLogger | None = None


class NotStarted(WherryError, AssertionError):
    """torch.distributed has not started, and is not to be started."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "comms_logger":
        return _comms_logger()
    return _collective(name) if name in _TIMED else getattr(dist, name)


def _comms_logger() -> CommsLogger:
    """Made when a script asks for it."""
    global _comms
    if _comms is None:
        from wherry.compat.deepspeed.comms_logging import CommsLogger

        _comms = CommsLogger()
    return _comms


@functools.cache
def _collective(name: str) -> Callable[..., Any]:
    """torch's collective, which also takes what is said to the log of collectives."""
    plain = getattr(dist, name.removeprefix("inference_"))

    @functools.wraps(plain)
    def call(*args: Any, prof: bool = False, log_name: str = name, debug: Any = None, **kwargs: Any) -> Any:
        if _comms is None or not ((_comms.enabled and prof) or _comms.wants(log_name)):
            return plain(*args, **kwargs)
        start = time.perf_counter()
        result = plain(*args, **kwargs)
        get_accelerator().synchronize()
        sent = args[_TIMED[name]] if len(args) > _TIMED[name] else next(iter(kwargs.values()), None)
        tensors = sent if isinstance(sent, list | tuple) else [sent]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors if torch.is_tensor(tensor))
        _comms.append(name, log_name, (time.perf_counter() - start) * 1e3, size)
        return result

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
    **options: Any,
) -> None:
    """Start torch.distributed from what a launcher has set; without a launcher, as a group of one."""
    if not started() and dist_init_required is False:
        raise NotStarted(
            "init_distributed(dist_init_required=False): torch.distributed has not started; call "
            "torch.distributed.init_process_group first, or leave dist_init_required out"
        )
    if not started():
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


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """torch's device mesh of these dims."""
    return dist.device_mesh.init_device_mesh(get_accelerator().device_name(), mesh_shape, mesh_dim_names=mesh_dim_names)


def has_all_gather_into_tensor() -> bool:
    return True


def has_reduce_scatter_tensor() -> bool:
    return True


def has_all_reduce_coalesced() -> bool:
    return True


def has_coalescing_manager() -> bool:
    return True


def get_world_rank_from_launcher() -> int:
    return int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)


def get_world_size_from_launcher() -> int:
    return int(os.environ.get("WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)


def get_local_rank_from_launcher() -> int:
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or 0)


def get_local_rank() -> int:
    return local_rank()


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


def configure(
    deepspeed_config: Any = None, enabled: bool | None = None, prof_all: bool | None = None,
    prof_ops: list[str] | None = None, verbose: bool | None = None, debug: bool | None = None,
) -> None:  # fmt: skip
    """Say whether, and which, of the script's own collectives are timed. Engines count what they send in any case."""
    given = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    for name, value in given.items():
        if value is not None:
            setattr(_comms_logger(), name, value)


def reset_log() -> None:
    _comms_logger().reset_data()


def has_comm_data() -> bool:
    return _comms_logger().has_data()


def get_comm_operation_count() -> int:
    return _comms_logger().get_total_operations()


def get_logged_comm_ops() -> list[str]:
    return _comms_logger().get_operation_names()


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Tell of the script's own collectives, and of what this process's engines have sent, by operation.

    What engines send is counted, not timed: it is under "engine: " and the operation, with the mean size.
    """
    told = _comms_logger().log_all(print_log=is_rank_zero(), show_straggler=show_straggler, return_dict=True)
    assert told is not None
    for operation, (calls, size) in _engines_traffic().items():
        say("%s: %d calls, %.1f MB", operation, calls, size / 1e6)
        mean = size // max(calls, 1)
        row = {"count": calls, "msg_size_bytes": mean, "total_latency_ms": 0.0, "avg_latency_ms": 0.0}
        told["summary"][f"engine: {operation}"] = {mean: row}
    return told if return_dict else None


def _engines_traffic() -> dict[str, tuple[int, int]]:
    """Calls and bytes of each operation."""
    table: dict[str, tuple[int, int]] = {}
    for engine in live_engines():
        for among, traffic in engine.topology.traffic():
            for operation, calls in traffic.calls.items():
                before = table.get(operation + among, (0, 0))
                table[operation + among] = before[0] + calls, before[1] + traffic.bytes[operation]
    return table
