"""What a model must be before an engine takes it, and what of it a user should know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from wherry.errors import ConfigError, WherryError
from wherry.observe.log import logger, warn
from wherry.observe.memory import format_bytes
from wherry.parallel.comm import Comm
from wherry.parallel.partition import part_of
from wherry.parallel.topology import Topology
from wherry.sharding.meta import source_of
from wherry.sharding.param_shard import shared_with
from wherry.sharding.shared_memory import overlapping
from wherry.sharding.watched_params import HANDLE

if TYPE_CHECKING:
    from wherry.config import Config

# Classes of torch that do with a model what an engine does, and the names that people know them by.
_WRAPPERS = {
    "DataParallel": "DataParallel",
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",
}

_WHY = (
    "one graph over the whole model has no places left between its blocks, where weights are gathered, released and "
    "reduced"
)


def check_model(model: nn.Module, config: Config, comm: Comm, *, trains: bool) -> None:
    """Refuse a model that cannot be trained so, and warn of what in it works otherwise than one would think."""
    _refuse_taken(model)
    refuse_whole(model)
    _refuse_wrapped(model)
    _refuse_lazy(model)
    _refuse_shared_memory(model)
    if trains:
        _refuse_parted_by_init(model)
    _check_layer_major(model, config)
    if comm.size > 1 and comm.rank == 0:
        _warn_of_max_norm(model)
    if config.placement().parameters.partitioned:
        _warn_of_frozen_casts(model, config)


def taken(model: nn.Module) -> str | None:
    """The name of a parameter that an engine has, if there is one."""
    for name, parameter in model.named_parameters():
        mark = getattr(parameter, HANDLE, None)
        if mark is not None and mark() is not None:
            return name
    return None


def _refuse_taken(model: nn.Module) -> None:
    """A parameter has one engine at a time."""
    name = taken(model)
    if name is not None:
        raise WherryError(
            f"{name}: this parameter belongs to another engine already; call that engine's close() first, or give "
            "wherry.initialize a copy of the model"
        )


@torch._disable_dynamo
def refuse_engine() -> None:
    """What dynamo comes to when it traces an engine: a call that it leaves to the interpreter, where it raises."""
    raise WherryError(f"forward: this is torch.compile(engine), and {_WHY}; call engine.compile(), for each block")


def refuse_whole(model: nn.Module) -> None:
    """A model that is compiled as a whole cannot be trained in units."""
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, nn.Module):
        raise WherryError(
            f"initialize: the model is torch.compile({type(inner).__name__}), and {_WHY}; give the model itself, and "
            "call engine.compile(), which compiles each block"
        )
    if model._compiled_call_impl is not None:
        raise WherryError(
            f"the model was compiled as a whole by {type(model).__name__}.compile(), and {_WHY}; call engine.compile() "
            "instead, which compiles each block"
        )


def uses_cuda_graphs(backend: Any, mode: str | None = None, options: Any = None, **_: Any) -> bool:
    """Return whether torch.compile records CUDA graphs with these arguments."""
    if getattr(backend, "compiler_name", backend) == "cudagraphs":
        return True
    if backend != "inductor" and not mode and not options:
        return False
    from torch._inductor import config, list_mode_options

    chosen: dict[str, Any] = {"triton.cudagraphs": backend == "inductor" and config.triton.cudagraphs}
    chosen |= list_mode_options().get(mode or "default", {}) | (options or {})
    return bool(chosen["triton.cudagraphs"])


def refuse_cuda_graphs(
    arguments: Mapping[str, Any], config: Config, topology: Topology, blocks: Sequence[nn.Module]
) -> None:
    """Refuse CUDA graphs where torch would replay them on memory that has become another's.

    A graph has its inputs and outputs at fixed addresses. torch frees the outputs of all blocks' graphs with the first
    forward after a backward has begun, or at the next block if the forward before it has no backward.
    """
    frozen = [block for block in blocks if not any(p.requires_grad for p in block.parameters())]
    reasons = (
        (
            config.placement().parameters.partitioned,
            "partitioned weights are released, and gathered at new addresses",
            'set "zero_optimization": {"stage": 2} or less',
        ),
        (
            config.activation_checkpointing.resolved_policy() != "none",
            "activation_checkpointing runs forwards again in the backward, or moves what a graph has saved",
            "leave activation_checkpointing out",
        ),
        (
            config.wherry.accumulation == "layer_major" or topology.pipe.size > 1,
            "forwards and backwards of several micro-batches run in between each other",
            'leave out "accumulation": "layer_major" and pipeline parallelism',
        ),
        (
            bool(frozen),
            f"{len(frozen)} of {len(blocks)} blocks have no weights that are trained, and so no backward of their own",
            "train some weights of every block",
        ),
    )
    for applies, reason, cure in reasons:
        if applies:
            asked = ", ".join(
                f"{name}={arguments[name]!r}" for name in ("backend", "mode", "options") if name in arguments
            )
            raise WherryError(
                f'compile: CUDA graphs replay fixed addresses, but {reason}; expected mode="default" or '
                f'mode="max-autotune-no-cudagraphs", got {asked}; leave the graphs out, or {cure}'
            )


def compile_for_training_only(module: nn.Module) -> None:
    """Call a compiled block uncompiled under no_grad: the next block's CUDA graph would free its output."""
    compiled = module._compiled_call_impl
    assert compiled is not None

    def call(*args: Any, **kwargs: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else module._call_impl)(*args, **kwargs)

    module._compiled_call_impl = call


def _refuse_wrapped(model: nn.Module) -> None:
    """A wrapper that shards weights or reduces gradients would do it once more, or to parts of them."""
    for name, module in model.named_modules():
        found = next((base for base in type(module).__mro__ if base.__name__ in _WRAPPERS), None)
        if found is not None and found.__module__.startswith("torch."):
            where = f"its part {name} is" if name else "it is"
            raise WherryError(
                f"model: {where} wrapped already, by torch's {_WRAPPERS[found.__name__]}; give initialize the model as "
                "it was before that"
            )


def _refuse_lazy(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise WherryError(
                f"{name}: it has no shape before a lazy layer's first batch; run one through the model, under "
                "torch.no_grad(), and make the optimizer and the engine then"
            )


def _refuse_shared_memory(model: nn.Module) -> None:
    """Refuse parameters, and buffers beside trained ones, that share memory: flats give each parameter its own."""
    parameters, buffers = list(model.named_parameters()), list(model.named_buffers())
    tensors = [tensor for _, tensor in (*parameters, *buffers)]
    for one, other in overlapping(tensors):
        if other < len(parameters) and (tensors[one].requires_grad or tensors[other].requires_grad):
            raise _untied(parameters[one][0], parameters[other][0])
        if one < len(parameters) <= other and tensors[one].requires_grad:
            name, buffer = parameters[one][0], buffers[other - len(parameters)][0]
            raise WherryError(
                f"{buffer}: this buffer shares memory with {name}, whose updates it would no longer see, as a trained "
                f"parameter gets memory of its own; compute it from {name} in forward, or make it a clone()"
            )


def _refuse_parted_by_init(model: nn.Module) -> None:
    """Refuse parameters that shared memory until `wherry.Init` partitioned each by itself."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, name in names.items():
        other = shared_with(parameter)
        if other in names:
            raise _untied(*sorted((name, names[other]), key=list(names.values()).index))


def _untied(one: str, other: str) -> WherryError:
    return WherryError(
        f"{one}, {other}: two parameters share memory, and an engine updates each in memory of its own, so they would "
        f"drift apart; tie them as one parameter ({one} = {other}), or untie them ({one}.data = {one}.data.clone())"
    )


def _check_layer_major(model: nn.Module, config: Config) -> None:
    """Gradients of micro-batches that run together are summed in fp32, which not every torch does."""
    if config.wherry.accumulation != "layer_major" or hasattr(torch.Tensor, "grad_dtype"):
        return
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    working = config.working_dtype()
    if any(dtype.itemsize < torch.float32.itemsize for dtype in ({working} if working is not None else dtypes)):
        raise ConfigError(
            f"wherry.accumulation: layer_major sums gradients in fp32, and torch {torch.__version__} sums them in the "
            "type of the weights, which is narrower here; install torch 2.10 or later, or leave the key out"
        )


def described(model: nn.Module) -> Iterator[tuple[str, str]]:
    """What of a model every data-parallel rank must have alike, or they would hang, or sum unlike gradients."""
    for name, parameter in model.named_parameters():
        frozen = "" if parameter.requires_grad else " frozen"
        in_file = "" if source_of(parameter) is None else ", to be read from a file"
        yield f"parameter {name}", _kind(parameter) + frozen + in_file
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", _kind(buffer)


def _kind(tensor: torch.Tensor) -> str:
    return "lazy" if is_lazy(tensor) else f"{tuple(part_of(tensor).shape)} {tensor.dtype}"


def _warn_of_max_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            logger.warning(
                "%s: max_norm rescales the rows that a rank looks up, on that rank alone: ranks would come to have "
                "different weights, and partitioned weights forget it; leave it out, and rescale the weight after a "
                "step inside wherry.gathered", name or "model",
            )  # fmt: skip


def _warn_of_frozen_casts(model: nn.Module, config: Config) -> None:
    cast_to, recomputes = config.autocast_dtype(), config.activation_checkpointing.resolved_policy() == "recompute"
    if cast_to is None or recomputes or (config.working_dtype() or torch.float32) is not torch.float32:
        return
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad and p.dtype is torch.float32)
    if frozen:
        warn(
            "torch_autocast: from forward to backward autograd keeps the %s copies of frozen weights, up to %s on each "
            'rank; give them that type themselves, or set "activation_checkpointing": {"policy": "recompute"}',
            str(cast_to).removeprefix("torch."), format_bytes(frozen * cast_to.itemsize),
        )  # fmt: skip
