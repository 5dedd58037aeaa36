"""What the keys of a config must be to each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from wherry.config.draft import Draft
from wherry.config.scheduler import NEEDS_TOTAL
from wherry.config.schema import ACCUMULATION, MICRO, TRAIN, Config
from wherry.config.source import KeyPath

Finding = tuple[KeyPath, str]
ZERO = "zero_optimization"


def check(config: Config, draft: Draft) -> None:
    """Add every contradiction between keys to the draft's problems, and every key left idle to its notes."""
    for rule in _RULES:
        for path, message in rule(config, draft):
            draft.problem_once(path, message)
    for path, message in _idle(config, draft):
        draft.note_idle(path, message, f"{'.'.join(path)} ({message.removeprefix('no effect, ')})")
    for remark in _REMARKS:
        for path, message in remark(config, draft):
            draft.note(path, message)


def _batch(config: Config, draft: Draft) -> Iterator[Finding]:
    if any(draft.is_bad((name,)) for name in (TRAIN, MICRO, ACCUMULATION)):
        return
    train, micro, accumulation = (getattr(config, name) for name in (TRAIN, MICRO, ACCUMULATION))
    given = [(name, size) for name, size in ((MICRO, micro), (ACCUMULATION, accumulation)) if size is not None]
    product = math.prod(size for _, size in given)
    if train is not None and train % product:
        others = " x ".join(f"{name} {size}" for name, size in given) + (f" = {product}" if len(given) > 1 else "")
        message = f"{train} is not divisible by {others}, so no number of ranks fits; "
        yield (TRAIN,), f"{message}set it to a multiple of {product}, or leave one of them out"


def _precision(config: Config, draft: Draft) -> Iterator[Finding]:
    if config.fp16.enabled and config.bf16.enabled:
        yield ("bf16", "enabled"), "fp16.enabled is true too; working weights have one type, so set one to false"
    working = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else None
    asked = config.data_types.param_dtype
    if working and asked not in (None, working):
        yield ("data_types", "param_dtype"), f"is {asked}, but {working}.enabled is true; remove one of the two"
    if config.fp16.enabled and 2.0**config.fp16.initial_scale_power < config.fp16.min_loss_scale:
        start = f"2**{config.fp16.initial_scale_power}"
        yield ("fp16", "min_loss_scale"), f"is above the first loss scale, {start} (initial_scale_power); lower it"


def _offload(config: Config, draft: Draft) -> Iterator[Finding]:
    zero = config.zero_optimization
    stage_is_known = not any(bad[:1] == (ZERO,) and len(bad) == 2 for bad in draft.bad)
    if zero.offload_param.device != "none" and zero.stage < 3 and stage_is_known:
        message = (
            f"{zero.offload_param.device} needs {ZERO}.stage 3, got stage {zero.stage}, at which every rank keeps "
            'whole parameters; set "stage": 3, or remove offload_param'
        )
        yield (ZERO, "offload_param", "device"), message
    for name in ("offload_optimizer", "offload_param"):
        offload, path = getattr(zero, name), (ZERO, name)
        if offload.device == "nvme" and offload.nvme_path is None:
            message = 'is required, as the device is nvme; give a folder on a fast disk, like "/mnt/nvme"'
            yield (*path, "nvme_path"), message
        if not _is_auto(draft, name) and offload.nvme_path is not None and "device" not in offload.model_fields_set:
            message = 'is not given, so nvme_path would do nothing; add "device": "nvme", or remove nvme_path'
            yield (*path, "device"), message


def _is_auto(draft: Draft, name: str) -> bool:
    """Whether it is left to the planner where something rests."""
    return f"{ZERO}.{name}.device" in draft.autos


def _groups(config: Config, draft: Draft) -> Iterator[Finding]:
    size, within = config.zero_optimization.mics_shard_size, config.zero_optimization.zero_hpz_partition_size
    if size == 0:
        yield (ZERO, "mics_shard_size"), "expected a number of ranks, or -1 for all of them, got 0"
    elif size > 0 and size % within:
        message = f"{within} does not divide mics_shard_size {size}, within which weights are gathered; "
        yield (ZERO, "zero_hpz_partition_size"), f"{message}set it to a divisor, or to 1"


def _activations(config: Config, draft: Draft) -> Iterator[Finding]:
    block, path = config.activation_checkpointing, ("activation_checkpointing",)
    if block.cpu_checkpointing and block.nvme_path is not None:
        yield (*path, "nvme_path"), "cpu_checkpointing is true too; checkpoints rest in one place, so remove one"
    if block.policy == "offload" and not block.cpu_checkpointing and block.nvme_path is None:
        yield (*path, "policy"), 'offload needs to know where to: add "cpu_checkpointing": true, or an nvme_path'


def _own(config: Config, draft: Draft) -> Iterator[Finding]:
    policy, own = config.wherry.update_policy, ("wherry", "update_policy")
    if policy == "in_backward" and config.gradient_clipping > 0:
        message = "in_backward updates before the norm of all gradients is known, so it excludes gradient_clipping"
        yield own, f'{message} {config.gradient_clipping:g}; set gradient_clipping to 0, or use "before_use"'
    if not config.managed_gradient_accumulation:
        if policy == "in_backward":
            message = "in_backward needs to know the last backward of a window"
            yield own, f"{message}; set managed_gradient_accumulation to true"
        if config.wherry.accumulation == "layer_major":
            message = "layer_major runs a window as a whole; set managed_gradient_accumulation to true"
            yield ("wherry", "accumulation"), message
    if policy == "in_backward" and config.scales_loss():
        yield own, 'in_backward excludes fp16, whose steps are skipped on overflow; use bf16, or "before_use"'
    if config.wherry.context_parallel > 1 and config.gradient_allreduce_op == "sum":
        message = "ranks that share a sequence have its mean gradient together, which a sum has several times"
        yield ("wherry", "context_parallel"), f'{message}; set gradient_allreduce_op to "mean"'
    nonfinite = config.wherry.nonfinite
    if nonfinite in ("skip", "raise") and config.bf16.enabled and not config.bf16.check_grad_overflow:
        yield ("wherry", "nonfinite"), f"is {nonfinite}, but bf16.check_grad_overflow is false; remove one of the two"
    working_is_bf16 = config.bf16.enabled or config.data_types.param_dtype == "bf16"
    if config.wherry.master == "split" and not working_is_bf16:
        yield ("wherry", "master"), 'split needs bf16 working weights; add "bf16": {"enabled": true}, or use "whole"'
    if config.wherry.master != "auto" and not config.keeps_masters():
        key = "fp16.fp16" if config.fp16.enabled else "bf16.bf16"
        message = f"is {config.wherry.master}, but {key}_master_weights_and_grads asks for none; remove one of the two"
        yield ("wherry", "master"), message


def _optimizer(config: Config, draft: Draft) -> Iterator[Finding]:
    if config.optimizer is None:
        return
    name, params = config.optimizer.type, config.optimizer.params
    if name == "Adam" and str(draft.get(("optimizer", "type"))).lower() == "adamw":
        message = 'false contradicts the type AdamW, whose weight decay is decoupled; use the type "Adam"'
        yield ("optimizer", "params", "adam_w_mode"), message
    if name == "Lamb" and (least := params["min_coeff"]) > (most := params["max_coeff"]):
        yield ("optimizer", "params", "min_coeff"), f"{least:g} is above max_coeff {most:g}; exchange them"


def _schedule(config: Config, draft: Draft) -> Iterator[Finding]:
    path = ("scheduler", "params")
    if config.scheduler is None or path in draft.bad:
        return
    params = config.scheduler.params
    if config.scheduler.type in NEEDS_TOTAL and params.get("total_num_steps") is None:
        yield (*path, "total_num_steps"), f"{config.scheduler.type} needs the number of steps of the whole training"
    if config.scheduler.type == "OneCycle":
        for low, high in (("cycle_min_lr", "cycle_max_lr"), ("cycle_min_mom", "cycle_max_mom")):
            if _any_above(params[low], params[high]) and not draft.is_bad((*path, high)):
                yield (*path, low), f"{params[low]} is above {high} {params[high]}; exchange them"


def _any_above(low: Any, high: Any) -> bool:
    """Of numbers, or lists with one for each group."""
    lows, highs = ([value] if not isinstance(value, list) else value for value in (low, high))
    many = max(len(lows), len(highs))
    pairs = zip(lows * many if len(lows) == 1 else lows, highs * many if len(highs) == 1 else highs, strict=False)
    return any(one > other for one, other in pairs)


def _idle(config: Config, draft: Draft) -> Iterator[Finding]:
    zero, own = config.zero_optimization, config.wherry
    for name in ("offload_optimizer", "offload_param"):
        offload = getattr(zero, name)
        if _is_auto(draft, name):
            continue
        given = offload.model_fields_set or any(path[:2] == (ZERO, name) for path in draft.without_effect)
        if given and "device" not in offload.model_fields_set:
            yield (ZERO, name), "nothing is offloaded, as the device is none; set it to cpu or nvme"
        elif offload.device != "nvme" and offload.nvme_path is not None:
            yield (ZERO, name, "nvme_path"), f"no effect, as the device is {offload.device}"
    if zero.mics_shard_size > 0 and zero.stage == 0:
        yield (ZERO, "mics_shard_size"), "no effect, as at stage 0 nothing is partitioned"
    if own.nonfinite in ("raise", "ignore") and config.nonfinite() == "skip":
        yield ("wherry", "nonfinite"), "no effect, as fp16's dynamic loss scale skips, until it is at its minimum"
    if (
        own.update_on is not None
        and zero.offload_optimizer.device == "none"
        and not _is_auto(draft, "offload_optimizer")
    ):
        yield ("wherry", "update_on"), "no effect, as the optimizer's state rests on the device"
    yield from _idle_activations(config)
    usual = type(own).model_fields["delayed_update_warmup"].default
    if own.update_policy != "delayed" and own.delayed_update_warmup != usual:
        yield ("wherry", "delayed_update_warmup"), f"no effect, as update_policy is {own.update_policy}"


def _idle_activations(config: Config) -> Iterator[Finding]:
    block, path = config.activation_checkpointing, ("activation_checkpointing",)
    policy = block.resolved_policy()
    idle = {
        "every": block.every > 1 and policy != "recompute",
        "save_operations": block.save_operations and policy in ("none", "offload"),
        "memory": block.memory is not None and policy != "auto",
    }
    for name, without_effect in idle.items():
        if without_effect:
            yield (*path, name), f"no effect, as policy is {policy}"


def _delayed(config: Config, draft: Draft) -> Iterator[Finding]:
    if config.wherry.update_policy == "delayed":
        yield ("wherry", "update_policy"), "delayed updates use gradients one step old, so the result differs"


def _short_schedule(config: Config, draft: Draft) -> Iterator[Finding]:
    params = config.scheduler.params if config.scheduler else {}
    total, warmup = params.get("total_num_steps"), params.get("warmup_num_steps")
    if isinstance(total, int) and isinstance(warmup, int) and total < warmup:
        yield ("scheduler", "params", "warmup_num_steps"), f"the warm-up of {warmup} steps does not end in {total}"


def _adam(config: Config, draft: Draft) -> Iterator[Finding]:
    asked = str(draft.get(("optimizer", "type"))).lower() == "adam"
    optimizer = config.optimizer
    if asked and optimizer is not None and optimizer.type == "AdamW" and optimizer.params.get("weight_decay"):
        message = "Adam decouples its weight decay, as AdamW does; for decay inside the gradient set adam_w_mode"
        yield ("optimizer", "type"), f"{message} to false"


Rule = Callable[[Config, Draft], Iterator[Finding]]
_RULES: tuple[Rule, ...] = (
    *(_batch, _precision, _offload, _groups, _activations, _optimizer, _schedule),
    _own,
)
_REMARKS: tuple[Rule, ...] = (_delayed, _short_schedule, _adam)
