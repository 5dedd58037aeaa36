"""What a placement keeps and sends by the published formulas: where a search begins, before the engine is run."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from wherry.placement import Tier, effective
from wherry.plan.counts import GATHERED, HOST, Counts
from wherry.plan.model_states import STATE_WORDS, WORKING_BYTES, Cost, states

if TYPE_CHECKING:
    from wherry.config import Config
    from wherry.plan.parts import Outline


def precision_of(config: Config) -> str:
    return config.working_precision() or "fp32"


def optimizer_of(config: Config) -> str | None:
    """The optimizer of a config, as `STATE_WORDS` knows it."""
    if config.optimizer is None or config.optimizer.type is None:
        return None
    name = config.optimizer.type.lower()
    if name == "sgd" and (config.optimizer.params or {}).get("momentum"):
        return "sgd-momentum"
    if (config.optimizer.params or {}).get("amsgrad"):
        return f"{name}-amsgrad"  # torch's own update, which the host's kernels do not know
    return name


def states_between_steps(count: int, config: Config, ranks: int, *, gpu: bool) -> dict[tuple[str, str], int]:
    """Bytes of the states of so many parameters, of which a share may keep its optimizer state on the device."""
    placement, offload = config.placement(), config.zero_optimization.offload_optimizer
    optimizer, shards = optimizer_of(config), config.shard_ranks(ranks)
    # Of an optimizer that the host's kernels do not know, as many moments are counted as most have.
    counted = optimizer if optimizer in STATE_WORDS else "adamw"

    away = count if offload.device == "none" else round(offload.ratio * count)
    found: Counter[tuple[str, str]] = Counter()
    for numel, gradients, tier in (
        (away, placement.gradients.tier, placement.optimizer.tier),
        (count - away, Tier.DEVICE, Tier.DEVICE),
    ):
        if numel:
            on_host = not gpu or tier is not Tier.DEVICE
            split = on_host and precision_of(config) == "bf16" and config.wherry.master != "whole"
            cost = Cost.of(
                precision_of(config),
                counted,
                config.data_types.grad_accum_dtype,
                state_dtype=config.state_dtype(),
                split=split and optimizer in (None, *STATE_WORDS),
                masters=config.keeps_masters(),
            )
            held = states(numel, placement, shards, cost)
            found["parameters", str(effective(placement.parameters.tier, shared=not gpu))] += held.parameters
            found["gradients", str(effective(gradients, shared=not gpu))] += held.gradients
            found["optimizer", str(effective(tier, shared=not gpu))] += held.optimizer
    return dict(found)


def placed(of: Outline, config: Config, ranks: int, *, gpu: bool) -> Counts:
    """All but activations and operations, which are the model's."""
    placement, zero = config.placement(), config.zero_optimization
    width, shards = WORKING_BYTES[precision_of(config)], config.shard_ranks(ranks)
    accumulation = config.batch(ranks).accumulation if config.wherry.accumulation != "layer_major" else 1
    found = states_between_steps(of.trained, config, ranks, gpu=gpu)
    frozen = "parameters", str(effective(placement.parameters.tier, shared=not gpu))
    parts = shards if placement.parameters.partitioned else 1
    weights, gradients = width * of.parameters - (width - 1) * of.codes, width * of.trained
    found[frozen] = found.get(frozen, 0) + -(-(weights - gradients) // parts)

    sent: dict[str, float] = {}
    if not placement.optimizer.partitioned:
        sent["all_reduce"] = gradients
    else:
        sent["reduce_scatter"] = gradients * (accumulation if placement.gradients.partitioned else 1)
        sent["all_gather"] = weights * (2 * accumulation if placement.parameters.partitioned else 1)

    moved = dict.fromkeys(("up", "down", "read", "written"), 0.0)
    share = zero.offload_optimizer.ratio if zero.offload_optimizer.device != "none" else 0.0
    shard = gradients / (shards if placement.optimizer.partitioned else 1)
    moved["down"] = moved["up"] = share * shard
    if placement.parameters.tier is not Tier.DEVICE:
        moved["up"] = 2 * accumulation * weights / shards

    def on(place: Tier) -> float:
        return sum(nbytes for (_, tier), nbytes in found.items() if tier == str(place))

    moved["read"] = moved["written"] = on(Tier.DISK)
    top = {"resting": on(Tier.DEVICE), HOST: on(Tier.HOST)}
    if placement.parameters.partitioned:
        # The largest unit, and what is gathered ahead of its use.
        largest = width * of.largest_unit - (width - 1) * of.largest_codes
        top[GATHERED] = min(weights, largest + width * zero.stage3_prefetch_bucket_size)
    if placement.gradients.partitioned:
        # One unit's gradients while they are reduced, and the next one's as they arrive.
        top["resting"] += width * min(of.trained, 2 * of.largest_unit)
    return Counts(
        parameters=of.parameters,
        trained=of.trained,
        states=found,
        on_disk=on(Tier.DISK),
        peaks={"top": top},
        highest={HOST: top[HOST]},
        kept=0.0,
        calls={},
        bytes=sent,
        moved=moved,
        operations={},
    )
