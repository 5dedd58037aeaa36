"""Wrap the optimizer of `initialize` in DeepSpeed's classes, as `engine.optimizer`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from wherry.compat.deepspeed import ops
from wherry.compat.deepspeed.config import DeepSpeedConfigError
from wherry.errors import WherryError
from wherry.observe.log import say
from wherry.optim.muon import whole_shape
from wherry.placement import Tier
from wherry.update.optimizer import OptimizerLike, OptimizerSpec, ShardedOptimizer, from_config, resolve_optimizer

if TYPE_CHECKING:
    from wherry.config import Config
    from wherry.engine import Engine


class States(MutableMapping[torch.Tensor, dict[str, Any]]):
    """`state` of an optimizer: this rank's part of each parameter's state, in the memory where it rests.

    Writes to these tensors are kept; `load_state_dict` replaces them.
    """

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        states = self._optimizer._states()
        return states.parts([states.name_of(parameter)], copy=False)[0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        states = self._optimizer._states()
        for group in self._optimizer.param_groups:
            yield from (parameter for parameter in group["params"] if states.updates(states.name_of(parameter)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        return any(parameter is each for each in self)

    def _refuse(self, *_: Any) -> None:
        raise WherryError(
            "optimizer.state: the state of a parameter cannot be replaced or taken out here, as it rests in the "
            "engine's memory; write to its tensors, or give optimizer.load_state_dict what optimizer.state_dict gave"
        )

    __setitem__ = __delitem__ = _refuse


class DeepSpeedOptimizer(ShardedOptimizer):
    """An optimizer around another, which is its `optimizer`."""

    # The key of the masters in a state dict.
    MASTERS = "fp32_groups_flat"

    def __init__(self, instance: torch.optim.Optimizer, engine: Engine) -> None:
        super().__init__(instance, engine.update, engine.zero_grad_of_loop, lambda: engine.states)
        self._engine = engine
        self.state = instance.state = States(self)  # type: ignore[assignment]
        self._handle = instance.register_load_state_dict_pre_hook(_refuse_load)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.instance

    @property
    def cur_scale(self) -> float:
        return self._engine.loss_scale

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of a loss that is already divided by the number of micro-batches."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state in torch's form, its masters by group, and the loss scale."""
        state_dict, scaler, masters = super().state_dict(), self._engine.scaler, self._masters()
        for group, flat in zip(state_dict["param_groups"], masters, strict=True):
            # Masters of 16-bit weights are parts of that piece, which is saved once.
            at = 0
            for number in group["params"]:
                if (own := state_dict["state"].get(number, {}).get("master")) is not None:
                    state_dict["state"][number]["master"] = flat[at : at + own.numel()].view_as(own)
                    at += own.numel()
        scale = {"loss_scaler": scaler.state_dict(), "dynamic_loss_scale": scaler.dynamic, "cur_scale": scaler.scale}
        return {**state_dict, self.MASTERS: masters, **scale, "overflow": self.overflow}

    def _masters(self) -> list[torch.Tensor]:
        """Copy this rank's part of the fp32 weights, each group's in one piece."""
        states = self._engine.states
        parts = (
            [states.local(states.name_of(p), "master") for p in group["params"] if p.requires_grad]
            for group in self.param_groups
        )
        return [torch.cat([part for part in group if part is not None]) for group in parts]

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what `state_dict` returned: this rank's, or a list with that of each rank."""
        if isinstance(state_dict, list | tuple):
            state_dict = state_dict[self._engine.comm.rank]
        super().load_state_dict(state_dict)
        if "loss_scaler" in state_dict:
            self._engine.scaler.load_state_dict(state_dict["loss_scaler"])
        self.overflow = bool(state_dict.get("overflow", self.overflow))

    def close(self) -> None:
        super().close()
        self._handle.remove()
        self.state = self.instance.state = defaultdict(dict)


class DeepSpeedZeroOptimizer(DeepSpeedOptimizer):
    """Stages 1 and 2."""

    MASTERS = "single_partition_of_fp32_groups"


class DeepSpeedZeroOptimizer_Stage3(DeepSpeedOptimizer):
    """Stage 3."""

    MASTERS = "fp32_flat_groups"


class BF16_Optimizer(DeepSpeedOptimizer):
    """Stage 1 in bf16, with gradients that are summed in fp32."""


class FP16_Optimizer(DeepSpeedOptimizer):
    """Stage 0 in fp16 or bf16, with a fused Adam."""


class FP16_UnfusedOptimizer(DeepSpeedOptimizer):
    """Stage 0 in fp16 or bf16, with any other optimizer."""


class Itself(ShardedOptimizer):
    """At stage 0 in fp32, make the script's or the config's own optimizer step by the engine.

    Its class is one derived from its own until the engine is closed.
    """

    _base: type[torch.optim.Optimizer]
    _watched: Any

    def close(self) -> None:
        """Restore the optimizer's own class, step and state."""
        vars(self).pop("step", None)
        if self._watched is not None:
            self.step = self._watched  # type: ignore[method-assign]
        self.state = defaultdict(dict)
        base = self._base
        for name in _TAKEN:
            del vars(self)[name]
        self.__class__ = base  # type: ignore[assignment]


# Attributes that the optimizer has until the engine is closed.
_TAKEN = ("instance", "_update", "_drop", "_states", "overflow", "_base", "_watched")


def _itself(instance: torch.optim.Optimizer, engine: Engine) -> ShardedOptimizer:
    base, taken = type(instance), vars(instance)
    instance.__class__ = type(base.__name__, (Itself, base), {"__module__": base.__module__})
    assert isinstance(instance, Itself)
    instance._patch_step_function()
    # A schedule that was built earlier has wrapped the optimizer's step, and warns where the wrapper is missing.
    watched = taken.pop("step", None)
    if watched is not None:
        step: Any = partial(type(instance).step, instance)
        step._wrapped_by_lr_sched = True
        taken["step"] = step
    taken.update(_base=base, _watched=watched, instance=instance, overflow=False, state=States(instance))
    taken.update(_update=engine.update, _drop=engine.zero_grad_of_loop, _states=lambda: engine.states)
    return instance


def face(instance: torch.optim.Optimizer, engine: Engine) -> ShardedOptimizer:
    """Wrap an optimizer in the class that DeepSpeed uses for the engine's config."""
    config, stage = engine.settings, engine.zero_optimization_stage()
    if stage == 0:
        if not (config.fp16.enabled or config.bf16.enabled):
            return _itself(instance, engine)
        return (FP16_Optimizer if isinstance(instance, ops.FusedAdam) else FP16_UnfusedOptimizer)(instance, engine)
    sums_in_fp32 = config.bf16.enabled and config.grad_accum_dtype() is torch.float32
    if stage == 1 and sums_in_fp32 and not _offloads(config):
        return BF16_Optimizer(instance, engine)
    return (DeepSpeedZeroOptimizer_Stage3 if stage == 3 else DeepSpeedZeroOptimizer)(instance, engine)


def resolve(
    model: nn.Module, config: Config, optimizer: OptimizerLike | None, model_parameters: Iterable[Any] | None
) -> OptimizerSpec | None:
    """Resolve the optimizer of `initialize`, with DeepSpeed's classes for names in a config, and its refusals."""
    weights = config.working_dtype() or torch.float32
    sums = config.grad_accum_dtype() or weights
    has_optimizer = optimizer is not None or config.optimizer is not None
    if has_optimizer and config.zero_optimization.stage == 0 and sums is not weights:
        raise DeepSpeedConfigError(
            f"data_types.grad_accum_dtype: {sums} with weights in {weights} needs zero_optimization.stage 1 or more; "
            "leave the key out at stage 0"
        )
    spec = resolve_optimizer(model, config, optimizer, model_parameters, partial(make, model))
    if spec is None:
        return None
    if not config.keeps_masters():
        spec = _without_masters(config, spec)
    # DeepSpeed refuses a torch optimizer also if the key is unset; Wherry replaces it by its host counterpart.
    forced = _offloads(config) and config.written.get("zero_force_ds_cpu_optimizer") is True
    if forced and optimizer is not None and not isinstance(spec.instance, _ON_HOST):
        raise DeepSpeedConfigError(
            f"zero_force_ds_cpu_optimizer: offload_optimizer with the script's own {type(spec.instance).__name__}; "
            "give deepspeed.ops.adam.DeepSpeedCPUAdam, or set that key to false"
        )
    spec.instance.param_groups[:] = [group for group in spec.groups if len(group["params"])]
    return spec


# The classes of a config's optimizer, on the device and on the host.
_CLASSES: Mapping[str, tuple[Any, Any]] = {
    "Adam": (ops.FusedAdam, ops.DeepSpeedCPUAdam),
    "AdamW": (ops.FusedAdam, ops.DeepSpeedCPUAdam),
    "Lion": (ops.FusedLion, ops.DeepSpeedCPULion),
    "Lamb": (ops.FusedLamb, ops.FusedLamb),
}
_ON_HOST = (ops.DeepSpeedCPUAdam, ops.DeepSpeedCPULion, ops.DeepSpeedCPUAdagrad)


def make(model: nn.Module, config: Config, parameters: list[Any]) -> torch.optim.Optimizer:
    """Build the optimizer of a config, of the class that DeepSpeed builds."""
    assert config.optimizer is not None
    name, options = config.optimizer.build_args()
    if config.written.get("optimizer", {}).get("params", {}).get("torch_adam") or options.get("maximize"):
        return from_config(name, options, parameters)
    if name == "Muon":
        _mark_for_muon(model)
        return ops.MuonWithAuxAdam.for_model(model, parameters, **options)
    offloads = _offloads(config)
    options = {key: value for key, value in options.items() if key != "maximize"}
    if name in ("Adam", "AdamW"):
        options["adamw_mode" if offloads else "adam_w_mode"] = name == "AdamW"
        if offloads:
            options["fp32_optimizer_states"] = config.keeps_masters() or config.state_dtype() != "bf16"
    on_device, on_host = _CLASSES.get(name, (None, None))
    return from_config(name, options, parameters, cls=on_host if offloads else on_device)


def _mark_for_muon(model: nn.Module) -> None:
    """Mark parameters by their names, as DeepSpeed does; a script's own marks stay."""
    unmarked = [(name, p) for name, p in model.named_parameters() if not hasattr(p, "use_muon")]
    chosen = {name: p for name, p in unmarked if not re.search("embed|lm_head", name.lower())}
    others = [name for name, p in chosen.items() if len(whole_shape(p)) > 2]
    if others:
        say("optimizer: Muon is for matrices; AdamW updates what has more dims (%d, like %s)", len(others), others[0])
    for name, parameter in unmarked:
        is_matrix = len(whole_shape(parameter)) == 2
        parameter.use_muon = is_matrix and name in chosen  # type: ignore[attr-defined]


def _without_masters(config: Config, spec: OptimizerSpec) -> OptimizerSpec:
    """Check an optimizer that updates 16-bit weights themselves, and store moments in its own type."""
    states, optimizer = config.bf16.bf16_optimizer_states, spec.instance
    offloads = _offloads(config)
    if (offloads or not states) and not (offloads and type(optimizer) is ops.DeepSpeedCPUAdam):
        raise DeepSpeedConfigError(
            f"Master weights feature requires ZeRO Offload with DeepSpeedCPUAdam, got a {type(optimizer).__name__} and "
            f"offload_optimizer {config.zero_optimization.offload_optimizer.device}; without offload set "
            "bf16.bf16_optimizer_states"
        )
    full = offloads and optimizer.fp32_optimizer_states  # type: ignore[attr-defined]
    if states and full:
        raise DeepSpeedConfigError(
            "bf16_optimizer_states with ZeRO-Offload requires DeepSpeedCPUAdam constructed with "
            "fp32_optimizer_states=False, so that moments are in bf16"
        )
    if not full and config.fp16.enabled:
        raise WherryError(
            "DeepSpeedCPUAdam: fp32_optimizer_states=False with fp16 weights is not offered; leave it out"
        )
    return spec if spec.state_dtype == "int8" else replace(spec, state_dtype="fp32" if full else "bf16")


def _offloads(config: Config) -> bool:
    return config.placement().optimizer.tier is not Tier.DEVICE


def _refuse_load(optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
    raise WherryError(
        f"{type(optimizer).__name__}.load_state_dict: the engine has the state of this optimizer; call load_state_dict "
        "of engine.optimizer, or engine.load_checkpoint"
    )
