"""Model, optimizer and config in; engine out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from wherry import __version__
from wherry import config as configs
from wherry.dataloader import make_dataloader
from wherry.engine import Engine
from wherry.errors import WherryError
from wherry.fake import faking
from wherry.memory_report import check_room
from wherry.nn.context_parallel import ContextParallel
from wherry.nn.lazy_logits import LazyHead, why_not
from wherry.nn.sequence_tiles import SequenceTiles
from wherry.nn.tiled import tell_of_large_layers, tile_large_layers
from wherry.observe.log import follow, say, warn
from wherry.offload import Offload
from wherry.parallel import topology as topologies
from wherry.parallel.agreement import agree
from wherry.parallel.comm import Merging
from wherry.sharding.construct import Builder, move_buffers
from wherry.sharding.gradients import Gradients
from wherry.sharding.grouping import plan_units
from wherry.sharding.model_checks import check_model
from wherry.sharding.model_checks import described as model_described
from wherry.sharding.unit import Flat
from wherry.sharding.weights import Gatherer
from wherry.tiers.streams import check_device
from wherry.update import schedules
from wherry.update.optimizer import OptimizerLike, OptimizerSpec, ShardedOptimizer, groups_described
from wherry.update.optimizer import described as optimizer_described
from wherry.update.updater import Updater

if TYPE_CHECKING:
    from wherry.config import Config


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
    ranks that the launcher started share the data. The model has been parallelized over `tp`, by torch's
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
        resolved = _with_context(resolved, topology)
        # First of all, as ranks that differ may hang in any collective after this.
        agree(topology, everywhere=_described(resolved, topology, training_data), part=model_described(model))
        topology = _divided(topology, resolved)
        resolved = _settled(resolved, topology, model, training_data, collate_fn)
        if topology.pipe.size > 1:
            resolved = without_layer_major(resolved, "a pipeline runs the backward of each micro-batch by itself")
        resolved.batch(topology.data.size, _who_counts(mesh))
        engine = _assemble(engine_class, resolved, topology, model, optimizer, model_parameters)
    except BaseException as error:
        topology.data.tell(error)
        raise
    try:
        engine.lr_scheduler = schedules.resolve(
            lr_scheduler, resolved.scheduler, engine.optimizer, engine.build_schedule
        )
        agree(topology, stage=schedules.described(engine.lr_scheduler))
        if training_data is not None:
            engine.training_dataloader = make_dataloader(
                training_data, engine, collate_fn=collate_fn, drop_last=resolved.dataloader_drop_last
            )
    except BaseException as error:
        topology.data.tell(error)
        engine.close()
        raise
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def gathered_for_generation(engine: Engine) -> AbstractContextManager[None]:
    """Gather every unit once, for as many forwards as run inside, and release them at the end.

    Every rank must enter. The forwards communicate nothing, so ranks may make different numbers of them. Weights are
    for reading here: edits are lost, and there are no backwards or steps inside. One thread at a
    time reads; another is told. It takes the memory of a whole model in the working type.

        with wherry.gathered_for_generation(engine):
            tokens = engine.module.generate(prompt, max_new_tokens=200)
    """
    return engine.gathered_for_generation()


def _described(config: Config, topology: topologies.Topology, data: Dataset[Any] | None) -> Iterator[tuple[str, str]]:
    """What every rank must have been given alike, beside the model and what trains it."""
    yield from (("Wherry's version", __version__), ("torch's version", torch.__version__))
    yield "the kind of device", topology.device.type
    yield "the number of data-parallel ranks", str(topology.data.size)
    yield "the number of ranks that share out one copy", str(topology.shards.size)
    yield "the number of tensor-parallel ranks", str(topology.tensor.size)
    yield "the number of pipeline stages", str(topology.pipe.size)
    yield from config.described()
    if config.auto and topology.pipe.size == 1:  # all ranks plan by it together
        yield "training_data", "missing" if data is None else "given"


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
    follow(resolved)
    if not faking():  # a dry run is no run of the config
        _tell(resolved)
    trains = optimizer is not None or resolved.optimizer is not None
    check_model(model, resolved, topology.data, trains=trains)
    check_device(topology.device)
    for axis in (topology.data, topology.tensor, topology.pipe):
        axis.check_reaches(topology.device)
    if resolved.placement().parameters.partitioned:
        live = resolved.zero_optimization.stage3_max_live_parameters
        if resolved.wherry.tile_linear:
            model_parameters = tile_large_layers(model, live, optimizer, model_parameters)
        else:
            tell_of_large_layers(model, live)
    spec = engine_class.resolve_optimizer(model, resolved, optimizer, model_parameters)
    agree(topology, stage=optimizer_described(spec), part=groups_described(spec, model))
    return _build(engine_class, resolved, topology, model, spec)


def _build(
    engine_class: type[Engine],
    config: Config,
    topology: topologies.Topology,
    model: nn.Module,
    spec: OptimizerSpec | None,
) -> Engine:
    """The parts of an engine, each given those that it uses: where states rest, units, gathers, gradients, updates."""
    zero = config.zero_optimization
    offload = Offload(config, topology, spec)
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
    plans = plan_units(model, config.wherry.unit_classes)
    if not faking():  # a dry run takes no memory
        check_room(offload, plans)
    adopt = updater.states.adopt if updater is not None else None
    groups, whole = (spec.groups, spec.whole) if spec is not None else ((), ())
    builder = Builder(config, topology, groups, whole, offload.storage_of, adopt)
    units = builder.build(plans, model)
    move_buffers(model, topology.device, topology.data, config.buffer_dtype())
    gatherer = Gatherer(
        units,
        topology,
        offload.link,
        gathers,
        live_limit=zero.stage3_max_live_parameters,
        look_ahead=zero.stage3_prefetch_bucket_size,
        read_ahead=offload.read_ahead,
        settle=updater.settle if updater is not None else lambda flats: None,
    )
    flats = [flat for unit in units for flat in unit.flats]
    policy = offload.gradient_policy(flats, config.batch(topology.data.size).accumulation)
    gradients = Gradients(
        flats,
        topology,
        offload.placement,
        policy,
        offload.link,
        partial(offload.way_of, policy),
        Merging(zero.reduce_bucket_size),
        updater,
    )
    if updater is not None:
        updater.attach(gradients)
        _share_rounded(updater, flats, topology)
    engine = engine_class(model, offload, builder, gatherer, gradients, updater)
    _run_in_pieces(engine, model, config)
    return engine


def _run_in_pieces(engine: Engine, model: nn.Module, config: Config) -> None:
    """Have the loss, MLPs, norms and the sequence itself take less memory, as the config asks."""
    own, context = config.wherry, engine.topology.context
    if context.size > 1:
        engine.keep(ContextParallel(model, context).handles)
    if own.sequence_tiles is not None:
        modules = [module for unit in engine.units if not unit.root for module in unit.modules]
        engine.keep(SequenceTiles(model, modules, own.sequence_tiles, units=modules).handles)
    if own.chunked_loss and (reason := why_not(model)):
        say("chunked_loss: the loss is computed from whole logits, as %s", reason)
    elif own.chunked_loss:
        engine.keep(LazyHead(model, engine.weights_version).handles)


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
    config = source if isinstance(source, configs.Config) else configs.load(source)
    # What `wherry run --profile` asks for.
    steps = os.environ.get("WHERRY_PROFILE")
    return configs.load(config, overrides={"wherry.profile.steps": steps}) if steps and not faking() else config


def without_layer_major(config: Config, why: str) -> Config:
    """The config for one that cannot run the micro-batches of a window together."""
    if config.wherry.accumulation != "layer_major":
        return config
    warn('wherry.accumulation: %s: "layer_major" is left out', why)
    return configs.load(config, overrides={"wherry.accumulation": "step_major"})


def _with_context(config: Config, topology: topologies.Topology) -> Config:
    """The config with as many ranks on a sequence as the mesh has."""
    of_mesh, asked = topology.context.size, config.wherry.context_parallel
    if of_mesh == 1:
        return config
    if asked not in (1, of_mesh):
        raise WherryError(
            f"wherry.context_parallel: {asked}, and the mesh has {of_mesh} ranks along its axis for the sequence; "
            "leave the key out"
        )
    return configs.load(config, overrides={"wherry.context_parallel": of_mesh})


def _divided(topology: topologies.Topology, config: Config) -> topologies.Topology:
    """The data axis cut into the groups that the config asks for."""
    if config.zero_optimization.mics_shard_size != -1 or topology.group is None:
        topology = topology.divided(config.shard_ranks(topology.data.size))
    if topology.context.size == 1:
        together = topology.data.size // config.readers(topology.data.size)
        topology = replace(topology, context=topology.data.within(together))
    size, shards = config.zero_optimization.zero_hpz_partition_size, topology.shards
    if size == 1 or not config.placement().parameters.partitioned:
        return topology
    if shards.size % size:
        raise WherryError(
            f"zero_optimization.zero_hpz_partition_size: {size} does not divide the {shards.size} data-parallel ranks "
            "that share out the weights; give the number of ranks in a node"
        )
    return replace(topology, node=shards.within(size))
