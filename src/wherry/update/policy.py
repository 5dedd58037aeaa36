"""When units are updated, by the config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.errors import ConfigError
from wherry.placement import Placement, Tier, effective
from wherry.update.updater import UpdatePolicy

if TYPE_CHECKING:
    from wherry.config import Config


def update_policy(config: Config, placement: Placement, *, shared: bool) -> UpdatePolicy:
    """When units are updated, where the device and the host have one memory or two."""
    offload = config.zero_optimization.offload_optimizer
    when = config.wherry.update_policy
    tier = effective(placement.optimizer.tier, shared=shared)
    if when == "in_backward" and (waits := _waits_for_all(config)):
        raise ConfigError(f"wherry.update_policy: in_backward updates before all gradients are known, and {waits}")
    if when == "delayed" and offload.ratio < 1:
        raise ConfigError(
            "wherry.update_policy: delayed is for state that is all offloaded, and "
            f"zero_optimization.offload_optimizer.ratio is {offload.ratio}; set the ratio to 1, or another policy"
        )
    if when == "delayed" and tier is Tier.DEVICE and not shared:
        raise ConfigError(
            "wherry.update_policy: delayed is for optimizer state on the host or on disk; set "
            "zero_optimization.offload_optimizer.device, or another policy"
        )
    if when == "auto":
        # Not in_backward: a GAN, a skipped batch or an exception in a backward leaves gradients that no step may use.
        when = "at_step" if tier is Tier.DEVICE else "before_use"
    return UpdatePolicy(when, config.wherry.delayed_update_warmup if when == "delayed" else 0, offload.buffer_count)


def _waits_for_all(config: Config) -> str | None:
    """Why an update must wait for all gradients; None if it need not."""
    if config.gradient_clipping > 0:
        return f"gradient_clipping {config.gradient_clipping:g} needs their norm; set it to 0, or use before_use"
    if config.scales_loss():
        return "with fp16 a step may have to be skipped; use bf16, or before_use"
    if not config.managed_gradient_accumulation:
        return "the step ends a window, whose last backward nobody has named; use before_use"
    bf16 = config.bf16
    if bf16.enabled and bf16.check_grad_overflow and "check_grad_overflow" in bf16.model_fields_set:
        return "bf16.check_grad_overflow may skip a step; leave it out, or use before_use"
    return None
