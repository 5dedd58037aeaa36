"""The config of a run, from our defaults, the user's file, the flags and `--set`: each lies over the one before it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wherry.config import load, parse_overrides
from wherry.config.optimizer import optimizer_name
from wherry.errors import ConfigError, WherryError
from wherry.placement import Tier
from wherry.train.options import Options, keys_of
from wherry.train.presets import Shape

if TYPE_CHECKING:
    from wherry.parallel.topology import Topology

DEFAULT_MICRO_BATCH = 8
_TRAIN, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"
_OPEN = (None, "auto")


def peak_lr(parameters: int) -> float:
    """A learning rate that suits a model of this size: 1e-3 up to 20M parameters, then with the cube root down."""
    return min(1e-3, round(1e-3 * (2e7 / parameters) ** (1 / 3), 6))


# By optimizer: its learning rate where AdamW's is 1, and its other parameters. Those that are not here get AdamW's rate
# and nothing else. Weight decay is for those that decouple it; Lion's rate times its decay is AdamW's.
_ADAM = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
_OPTIMIZERS: dict[str, tuple[float, dict[str, Any]]] = {
    "AdamW": (1.0, _ADAM),
    "Adam": (1.0, _ADAM),
    "NAdam": (1.0, {**_ADAM, "decoupled_weight_decay": True}),
    "RAdam": (1.0, {**_ADAM, "decoupled_weight_decay": True}),
    "Lion": (0.2, {"betas": [0.9, 0.99], "weight_decay": 0.5}),
    "Adagrad": (10.0, {}),
    "SGD": (100.0, {"momentum": 0.9}),
    "ASGD": (1000.0, {}),
    "Adadelta": (1000.0, {}),
}


def optimizer_block(name: str, parameters: int) -> dict[str, Any]:
    """An optimizer with what suits a model of this size."""
    rate, params = _OPTIMIZERS.get(name, (1.0, {}))
    return {"type": name, "params": {"lr": rate * peak_lr(parameters), **copy.deepcopy(params)}}


def build_config(
    options: Options,
    parameters: int,
    *,
    bf16: bool,
    given: Mapping[str, Any] | None,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The config of a run.

    A file (`given`) is taken at its word: of our defaults it gets an optimizer where it has none, and what it leaves to
    "auto". A resumed run has, instead of our optimizer and schedule, those of the `earlier` run.
    """
    options = Options(**vars(options) | {"optimizer": options.optimizer or _set_optimizer(options)})
    config = _defaults(options, parameters, bf16=bf16 and options.precision is None)
    if given is not None:
        config = _under_file(config, given, options.optimizer)
    if earlier is not None:
        _keep(config, earlier, given, options)
    if options.global_batch_size is not None:
        config.pop(_ACCUMULATION, None)
    if options.warmup is not None and not isinstance(config.get("scheduler"), dict):
        raise WherryError(
            f"--lr-warmup-iters {options.warmup}: the config has no schedule, so nothing would warm up; give it a "
            'block "scheduler", or leave the flag out'
        )
    for key, (flag, value) in keys_of(options).items():
        put(config, key, value, flag)
    for name in ("bf16", "fp16") if options.precision else ():
        if options.precision == name or name in config:
            put(config, f"{name}.enabled", options.precision == name, "--precision")
    if options.nvme_path is not None:
        name_the_disk(config, options.nvme_path)
    own = {name: copy.deepcopy(config.get(name)) for name in ("optimizer", "scheduler")}
    for key, value in parse_overrides(options.settings).items():
        put(config, key, value, "--set")
    # As in a file, "auto" is what there would be without it.
    config.update({name: block for name, block in own.items() if config.get(name) == "auto"})
    if config["optimizer"] is None:
        raise WherryError("optimizer: it is null, and nothing is trained without one; leave it out for AdamW")
    return config


def _set_optimizer(options: Options) -> str | None:
    """The optimizer that `--set` names, which gets what suits it."""
    named = parse_overrides(options.settings).get("optimizer.type")
    try:
        return optimizer_name(named) if named is not None else None
    except ValueError:  # it is told of with all other mistakes
        return None


def _defaults(options: Options, parameters: int, *, bf16: bool) -> dict[str, Any]:
    warmup = max(1, options.steps // 10) if options.warmup is None else options.warmup
    return {
        _MICRO: options.batch_size or DEFAULT_MICRO_BATCH,
        # A pipeline is full with a micro-batch for each stage, and mostly full with twice as many.
        _ACCUMULATION: 2 * options.pipeline_parallel if options.pipeline_parallel > 1 else 1,
        "optimizer": optimizer_block(options.optimizer or "AdamW", parameters),
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": max(options.steps, warmup + 1),
                "warmup_num_steps": warmup,
                "warmup_type": "linear",
                "warmup_min_ratio": 1 / (warmup + 1),  # else the first update would change nothing
                "cos_min_ratio": 0.1,
            },
        },
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        **({"bf16": {"enabled": True}} if bf16 else {}),
    }


def _under_file(ours: dict[str, Any], given: Mapping[str, Any], optimizer: str | None) -> dict[str, Any]:
    """The file, with the optimizer that was asked for, and with our values where it leaves them open."""
    config = copy.deepcopy(dict(given))
    if optimizer is not None and isinstance(config.get("optimizer"), dict):
        config["optimizer"]["type"] = optimizer
    if config.get("optimizer") in _OPEN:
        config["optimizer"] = "auto"
        config.setdefault("scheduler", "auto")
    for name in ("optimizer", "scheduler"):
        block, own = config.get(name), ours[name]
        params = (block.get("params") or {}) if isinstance(block, dict) else {}
        kind = str(block.get("type") if isinstance(block, dict) else block).lower()
        if kind == "auto" and all(value in _OPEN for value in params.values()):
            config[name] = own
        elif name == "scheduler" or kind in ("adam", "adamw", "auto", own["type"].lower()):
            params.update({key: own["params"][key] for key in own["params"] if params.get(key) == "auto"})
    if config.get(_MICRO) == "auto" and config.get(_TRAIN) in _OPEN:
        config[_MICRO] = ours[_MICRO]
    # What is still left open follows from the others; a resumed run reads them as numbers.
    return {
        key: value for key, value in config.items() if value != "auto" or key not in (_TRAIN, _MICRO, _ACCUMULATION)
    }


def _keep(
    config: dict[str, Any], earlier: Mapping[str, Any], given: Mapping[str, Any] | None, options: Options
) -> None:
    """What a resumed run goes on with where no file says it. A schedule that would end before the run is stretched."""
    written = given or {}
    if written.get("optimizer") not in _OPEN:
        return
    trained = earlier.get("optimizer")
    another = options.optimizer and isinstance(trained, dict) and trained.get("type") != options.optimizer
    kept = ["optimizer"] if not another else []
    kept += ["scheduler"] if written.get("scheduler") in _OPEN else []
    kept += ["gradient_clipping"] if given is None else []
    found = {name: copy.deepcopy(earlier[name]) for name in kept if name in earlier}
    try:
        load(found)
    except ConfigError as error:
        raise WherryError(f"--resume: the config of the earlier run is none:\n{error}") from None
    config.update(found)
    block = config.get("scheduler")
    schedule = (block.get("params") or {}) if isinstance(block, dict) else {}
    if isinstance(schedule.get("total_num_steps"), int):
        schedule["total_num_steps"] = max(schedule["total_num_steps"], options.steps)


def put(config: dict[str, Any], key: str, value: Any, flag: str) -> None:
    """Write `a.b=value`; blocks that are missing or left open are made."""
    *path, last = key.split(".")
    block = config
    for depth, name in enumerate(path, 1):
        if block.get(name) in _OPEN:
            block[name] = {}
        elif block[name] is True and name == "zero_optimization":  # an old form of stage 1
            block[name] = {"stage": 1}
        block = block[name]
        if not isinstance(block, dict):
            raise WherryError(f"{flag}: {'.'.join(path[:depth])} is {block!r} in the config, not a block")
    block[last] = value


def name_the_disk(config: dict[str, Any], folder: str) -> None:
    zero = config.get("zero_optimization")
    blocks = zero if isinstance(zero, dict) else {}
    offloads = {name: blocks.get(name) for name in ("offload_optimizer", "offload_param")}
    on_disk = {name: b for name, b in offloads.items() if isinstance(b, dict) and b.get("device") == "nvme"}
    if not on_disk:
        raise WherryError(
            f"--nvme-path {folder}: nothing rests on disk; add --offload-optimizer nvme, or --offload-param nvme, or "
            "leave it out"
        )
    for block in on_disk.values():
        block["nvme_path"] = folder
    # Weights that are sent to disk by a flag are to be there.
    on_disk.get("offload_param", {}).setdefault("max_in_cpu", 0)


def layer_major_pays(config: Mapping[str, Any], place: Topology, shape: Shape, checkpointed: bool) -> bool:
    """Where the config leaves it open: whether each micro-batch would send weights or gradients over a wire, a bus or
    to a disk, and half of what is free has room for the activations of all of them.
    """
    import torch

    from wherry.activations.build import free_bytes

    resolved = load(config)
    placement, batch = resolved.placement(), resolved.batch(place.data.size)
    if batch.accumulation == 1 or resolved.wherry.accumulation != "auto":
        return False
    itemsize = (resolved.working_dtype() or torch.float32).itemsize
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
