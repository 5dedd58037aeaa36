"""Model, optimizer and config in; engine out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from wherry import config as configs
from wherry.dataloader import make_dataloader
from wherry.engine import Engine, Parts
from wherry.errors import ConfigError, WherryError
from wherry.fake import is_fake
from wherry.nn.tiled import tell_of_large_layers, tile_large_layers
from wherry.observe.log import follow, logger, say, warn
from wherry.observe.memory import format_bytes
from wherry.offload import Offload
from wherry.parallel import topology as topologies
from wherry.parallel.merged import Merging
from wherry.placement import Placement
from wherry.sharding.access import refuse_taken
from wherry.sharding.compiling import refuse_whole
from wherry.sharding.construct import Builder, move_buffers
from wherry.sharding.gradients import Gradients
from wherry.sharding.grouping import plan_units
from wherry.sharding.schedule import Schedule
from wherry.sharding.unit import Flat
from wherry.sharding.weights import Gatherer
from wherry.update import schedules
from wherry.update.loss_scale import LossScaler, sum_squares
from wherry.update.optimizer import OptimizerSpec, ShardedOptimizer, describe, from_config
from wherry.update.pipeline import Updater

if TYPE_CHECKING:
    from wherry.config import Config

# Classes of torch that do with a model what an engine does, and the names that people know them by.
_WRAPPERS = {
    "DataParallel": "DataParallel",
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",
}

OptimizerLike = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


def initialize(
    *,
    model: nn.Module,
    config: Config | str | Path | dict[str, Any] | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    mesh: Any = None,
    config_params: Config | str | Path | dict[str, Any] | None = None,
    args: Any = None,
    engine_class: type[Engine] = Engine,
) -> tuple[Engine, ShardedOptimizer | None, DataLoader[Any] | None, Any]:
    """Build an engine; returns `(engine, optimizer, dataloader, lr_scheduler)`.

    `config` is a path, a dict or JSON text. `optimizer` is a torch optimizer, a callable that makes one from the
    parameters, or left to the config; so is `lr_scheduler`. `model_parameters` are what such a callable or the config's
    optimizer is given: parameters, (name, parameter) pairs or groups as dicts; left out, all that are trained. A ready
    optimizer has its own already: parameters that it does not have are told of, and not trained.

    `mesh` is a DeviceMesh with axes named `dp`, `tp` and `pp`, or the `mpu` of Megatron-style code; without it all
    ranks that the launcher started share the data. The model has been parallelised over `tp`, by torch's
    `parallelize_module` or by hand, and is this rank's stage of `pp`.

        engine, optimizer, _, _ = wherry.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
            config={"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 8},
        )
    """
    if not isinstance(model, nn.Module):
        raise WherryError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    resolved = resolve_config(config, config_params, args)
    topology = topologies.find(mesh, timeout=resolved.wherry.timeout_s)
    try:
        topology = _divided(topology, resolved)
        resolved = _settled(resolved, topology, model, training_data, collate_fn)
        resolved.batch(topology.data.size, _who_counts(mesh))
        engine = _assemble(engine_class, resolved, topology, model, optimizer, model_parameters)
    except BaseException as error:
        topology.data.tell(error)
        raise
    try:
        engine.lr_scheduler = _lr_scheduler(lr_scheduler, resolved, engine.optimizer)
        if training_data is not None:
            engine.training_dataloader = make_dataloader(
                training_data, engine, collate_fn=collate_fn, drop_last=resolved.dataloader_drop_last
            )
    except BaseException as error:
        topology.data.tell(error)
        engine.close()
        raise
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _settled(
    config: Config,
    topology: topologies.Topology,
    model: nn.Module,
    data: Dataset[Any] | None,
    collate: Callable[[list[Any]], Any] | None,
) -> Config:
    """The config with what it leaves to the planner, as "auto", chosen for this model and this machine."""
    if not config.auto:
        return config
    from wherry.plan import runtime

    here = int(os.environ.get("LOCAL_WORLD_SIZE", topology.world_size))
    return runtime.settle(
        model, config, topology.data, topology.device, ranks_here=here, data=data, collate=collate,
        tensor=topology.tensor, pipe=topology.pipe,
    )  # fmt: skip


def _assemble(
    engine_class: type[Engine],
    resolved: Config,
    topology: topologies.Topology,
    model: nn.Module,
    optimizer: OptimizerLike | None,
    model_parameters: Iterable[Any] | None,
) -> Engine:
    _check_layer_major(resolved, model)
    follow(resolved)
    dry = any(is_fake(p) for p in model.parameters())  # no run of the config, and takes no memory
    if not dry:
        _tell(resolved)
    refuse_taken(model)
    refuse_whole(model)
    _refuse_wrapped(model)
    _refuse_lazy(model)
    if topology.data.size > 1 and topology.data.rank == 0:
        _warn_of_max_norm(model)
    placement = resolved.placement()
    if placement.parameters.partitioned:
        _warn_of_frozen_casts(model, resolved)
        live = resolved.zero_optimization.stage3_max_live_parameters
        if resolved.wherry.tile_linear:
            model_parameters = tile_large_layers(model, live, optimizer, model_parameters)
        else:
            tell_of_large_layers(model, live)
    spec = _optimizer(model, resolved, optimizer, model_parameters)
    # The groups hold the very parameters, in the order of the user's optimizer.
    group_of = {p: i for i, group in enumerate(spec.groups) for p in group["params"]} if spec else {}
    _check_groups(model, group_of)

    return _build(engine_class, resolved, topology, placement, model, spec, group_of, checks_room=not dry)


def _build(
    engine_class: type[Engine],
    config: Config,
    topology: topologies.Topology,
    placement: Placement,
    model: nn.Module,
    spec: OptimizerSpec | None,
    group_of: dict[nn.Parameter, int],
    *,
    checks_room: bool,
) -> Engine:
    """The parts of an engine, each given those that it uses: where states rest, units, gathers, gradients, updates."""
    zero = config.zero_optimization
    offload = Offload(config, placement, topology, spec, trainable=sum(p.numel() for p in group_of))
    gathers = Merging(zero.allgather_bucket_size)
    updater = None
    if spec is not None:
        updater = Updater(
            spec.groups,
            topology.shards,
            offload,
            offload.policy,
            gathers,
            alone=topology.data.size == 1,
            checks_finite=config.nonfinite() != "ignore",
        )
    builder = Builder(
        placement,
        topology.data,
        topology.device,
        working_dtype=config.working_dtype(),
        group_of=group_of,
        persistence_threshold=zero.stage3_param_persistence_threshold,
        persistence_limit=zero.stage3_model_persistence_threshold,
        home_of=offload.home_of,
        adopt=updater.states.adopt if updater is not None else lambda flat, master: None,
        tensor=topology.tensor,
        shards=topology.shards,
    )
    plans = plan_units(model, config.wherry.unit_classes)
    if checks_room:
        offload.check_room(plans)
    units = builder.build(plans, model)
    move_buffers(model, topology.device, topology.data, config.buffer_dtype())
    gatherer = Gatherer(
        units,
        topology.shards,
        Schedule(units, topology.data.size),
        offload.link,
        live_limit=zero.stage3_max_live_parameters,
        look_ahead=zero.stage3_prefetch_bucket_size,
        read_ahead=offload.read_ahead,
        merging=gathers,
        node=topology.node,
        **({"settle": updater.settle} if updater is not None else {}),
    )
    flats = [flat for unit in units for flat in unit.flats]
    policy = offload.gradient_policy(flats, config.batch(topology.data.size).accumulation)
    gradients = Gradients(
        flats,
        topology,
        placement.gradients,
        placement.optimizer,
        policy,
        sum_squares,
        offload.link,
        partial(offload.way_of, policy),
        Merging(zero.reduce_bucket_size),
        updates=updater,
    )
    if updater is not None:
        updater.attach(gradients)
        _share_rounded(updater, flats, topology)
    return engine_class(
        model,
        Parts(
            config=config,
            topology=topology,
            offload=offload,
            units=units,
            gatherer=gatherer,
            gradients=gradients,
            updater=updater,
            optimizer=spec,
            scaler=_scaler(config),
        ),
    )


def _share_rounded(updater: Updater, flats: list[Flat], topology: topologies.Topology) -> None:
    """Where masters are split each rank has rounded its own part anew, of weights that all of them hold whole."""
    split = {state.flat for bucket in updater.buckets if bucket.split for state in bucket.states}
    for flat in flats:
        if flat in split and flat.resident and flat.layout.ranks > 1 and flat.dtype is torch.bfloat16:
            topology.shards.all_gather(flat.whole, flat.shard_memory).wait()


def _who_counts(mesh: Any) -> str:
    """Who says how many data-parallel ranks there are."""
    if mesh is not None:
        return "as the mesh given to initialize has them"
    if "WORLD_SIZE" in os.environ:
        return f"as WORLD_SIZE={os.environ['WORLD_SIZE']} of the launcher says"
    if torch.distributed.is_initialized():
        return "as the process group of torch.distributed has them"
    return "as no launcher has set WORLD_SIZE; `wherry run --nproc N` starts more"


def _tell(config: Config) -> None:
    """What a user should know of the config: of what has no effect in a line that is seen, of the rest in the log."""
    if config.idle:
        warn("config: without effect here: %s; `wherry config explain KEY` says why", ", ".join(config.idle))
    for note in config.news:
        say("%s", note)


def _scaler(config: Config) -> LossScaler:
    if config.scales_loss() and not config.fp16.enabled:  # autocast's: as torch.amp.GradScaler
        return LossScaler(2.0**16, dynamic=True, window=2000, hysteresis=1, min_scale=config.fp16.min_loss_scale)
    return LossScaler.from_config(config.fp16)


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


def resolve_config(config: Any, config_params: Any, args: Any) -> Config:
    """The one config that `initialize` was given, whichever way."""
    ways = {"config": config, "config_params": config_params}
    for name in ("wherry_config", "deepspeed_config"):
        ways[f"args.{name}"] = getattr(args, name, None) or None  # a flag that was left out may be ""
    given = {name: value for name, value in ways.items() if value is not None}
    if len(given) > 1:
        raise WherryError(
            f"initialize: the config was given {len(given)} times, as {' and as '.join(given)}; give it once"
        )
    source = next(iter(given.values()), None)
    return source if isinstance(source, configs.Config) else configs.load(source)


def _check_layer_major(config: Config, model: nn.Module) -> None:
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


def _divided(topology: topologies.Topology, config: Config) -> topologies.Topology:
    """The data axis cut into the groups that the config asks for."""
    if config.zero_optimization.mics_shard_size != -1 or topology.group is None:
        topology = topology.divided(config.shard_ranks(topology.data.size))
    size, shards = config.zero_optimization.zero_hpz_partition_size, topology.shards
    if size == 1 or not config.placement().parameters.partitioned:
        return topology
    if shards.size % size:
        raise WherryError(
            f"zero_optimization.zero_hpz_partition_size: {size} does not divide the {shards.size} data-parallel ranks "
            "that share out the weights; give the number of ranks in a node"
        )
    return replace(topology, node=shards.within(size))


def _optimizer(
    model: nn.Module, config: Config, optimizer: OptimizerLike | None, model_parameters: Iterable[Any] | None
) -> OptimizerSpec | None:
    given = _listed(model_parameters)
    parameters = given or [p for p in model.parameters() if p.requires_grad]
    if not parameters and not isinstance(optimizer, torch.optim.Optimizer) and (optimizer or config.optimizer):
        raise WherryError(
            "optimizer: no parameter of the model requires a gradient, so there is nothing to train; call "
            "requires_grad_() on what is to be trained, or leave the optimizer out for an engine that only evaluates"
        )
    if optimizer is not None and config.optimizer is not None:
        warn("optimizer: the config's %s is not used, as initialize was given one", config.optimizer.type)
    if optimizer is None:
        if config.optimizer is None:
            return None
        name, options = config.optimizer.build_args()
        instance = from_config(name, options, parameters)
    elif isinstance(optimizer, torch.optim.Optimizer):
        instance = optimizer
        _tell_of_left_out(given, instance)
    elif callable(optimizer):
        instance = optimizer(parameters)
    else:
        raise WherryError(
            f"optimizer: expected a torch.optim.Optimizer or a callable that makes one, got {optimizer!r}"
        )
    return describe(instance, allow_untested=config.zero_allow_untested_optimizer, state_dtype=config.state_dtype())


def _tell_of_left_out(given: list[Any], optimizer: torch.optim.Optimizer) -> None:
    """A ready optimizer has its parameters: those of `model_parameters` that it does not have are not trained."""
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    left_out = [p for p in _parameters_in(given) if p.requires_grad and p not in known]
    if left_out:
        warn(
            "model_parameters: %d that require a gradient are not in the %s that initialize was given, which decides, "
            "and are not trained; the first has shape %s",
            len(left_out), type(optimizer).__name__, tuple(left_out[0].shape),
        )  # fmt: skip


def _parameters_in(given: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The parameters among parameters, (name, parameter) pairs and groups of either."""
    for item in given:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, dict):
            params = item.get("params", ())
            yield from _parameters_in([params] if isinstance(params, torch.Tensor) else params)
        elif isinstance(item, list | tuple):
            yield from _parameters_in(item[1:])


def _listed(given: Iterable[Any] | None) -> list[Any]:
    """`model_parameters`, as torch's optimizers take them."""
    if isinstance(given, torch.Tensor | dict | str):
        raise WherryError(
            f"model_parameters: expected parameters, (name, parameter) pairs, or groups as dicts, in a list or another "
            f"iterable, got one {type(given).__name__}"
        )
    return list(given) if given is not None else []


def _check_groups(model: nn.Module, group_of: dict[nn.Parameter, int]) -> None:
    inside = set(model.parameters())
    strangers = [parameter for parameter in group_of if parameter not in inside]
    if strangers:
        shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:5])
        raise WherryError(
            f"optimizer: {len(strangers)} of its parameters are not the model's (shapes {shapes}); was the model "
            "copied, moved or wrapped after the optimizer was made?"
        )


def _lr_scheduler(given: Any, config: Config, optimizer: ShardedOptimizer | None) -> Any:
    named = config.scheduler if config.scheduler is not None and config.scheduler.type is not None else None
    if given is None:
        if named is None:
            return None
        if optimizer is None:
            warn(
                "scheduler: the config's %s is not used, as there is no optimizer whose rate it could set; give "
                'initialize an optimizer, or the config a block "optimizer"', named.type,
            )  # fmt: skip
            return None
        return schedules.build(named, optimizer)
    if named is not None:
        warn("scheduler: the config's %s is not used, as initialize was given one", named.type)
    if optimizer is None:
        raise WherryError(
            "lr_scheduler: this engine has no optimizer whose rate it could set; give initialize the optimizer too, or "
            'the config a block "optimizer"'
        )
    if isinstance(given, type) or (callable(given) and not hasattr(given, "step")):
        return given(optimizer)
    built_on = getattr(given, "optimizer", None)
    if isinstance(built_on, torch.optim.Optimizer):
        ours = {id(group) for group in optimizer.param_groups}
        if not any(id(group) in ours for group in built_on.param_groups):
            raise WherryError(
                f"lr_scheduler: {type(given).__name__} was built on another optimizer ({type(built_on).__name__}) and "
                "would move nothing here; build it on the one given to initialize, or give a callable that takes the "
                "optimizer and makes it"
            )
    return given
