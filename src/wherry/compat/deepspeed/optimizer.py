"""`engine.optimizer` with DeepSpeed's classes and names, around the optimizer that `initialize` was given or made."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from wherry.compat.deepspeed import ops
from wherry.compat.deepspeed.config import DeepSpeedConfigError
from wherry.compat.deepspeed.leaf_modules import z3_leaf_module
from wherry.errors import WherryError
from wherry.observe.log import say
from wherry.optim.muon import whole_shape
from wherry.placement import Tier
from wherry.update.optimizer import OptimizerLike, OptimizerSpec, ShardedOptimizer, from_config, resolve_optimizer

if TYPE_CHECKING:
    from wherry.config import Config
    from wherry.engine import Engine

# Below it DeepSpeed leaves a tensor off the disk.
MIN_SWAPPABLE_BYTES = 1024**2


class ZeRORuntimeException(WherryError, RuntimeError):
    """What DeepSpeed raises where an optimizer and offloading do not go together."""


class UnsupportedTypes(WherryError, NotImplementedError):
    """Types of weights and gradients that stage 0 does not mix."""


class States(MutableMapping[torch.Tensor, dict[str, Any]]):
    """`state` of an optimizer: what this rank keeps of each parameter, in the memory where it rests.

    What is written to these tensors is kept; to put others in their place is what `load_state_dict` is for.
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
        return any(parameter is one for one in self)

    def _refuse(self, *_: Any) -> None:
        raise WherryError(
            "optimizer.state: the state of a parameter cannot be replaced or taken out here, as it rests in the "
            "engine's memory; write to its tensors, or give optimizer.load_state_dict what optimizer.state_dict gave"
        )

    __setitem__ = __delitem__ = _refuse


class LossScale:
    """The loss scale under the names of DeepSpeed's scalers; `cur_scale` may be set."""

    scale_factor = 2.0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def cur_scale(self) -> float:
        return self._engine._scaler.scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        self._engine._scaler.scale = float(scale)

    loss_scale = cur_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        return self._engine._scaler.dynamic

    dynamic = dynamic_loss_scale

    @property
    def scale_window(self) -> int:
        return self._engine._scaler.window

    @property
    def min_loss_scale(self) -> float:
        return self._engine._scaler.min_scale

    min_scale = min_loss_scale

    @property
    def delayed_shift(self) -> int:
        return self._engine._scaler.hysteresis

    @property
    def cur_hysteresis(self) -> int:
        return self._engine._scaler._patience

    @property
    def consecutive_hysteresis(self) -> bool:
        return self._engine._scaler.consecutive_hysteresis

    @property
    def cur_iter(self) -> int:
        """Updates, skipped ones among them."""
        return self._engine.global_steps


class DeepSpeedOptimizer(ShardedOptimizer):
    """An optimizer around another, which is its `optimizer`."""

    # What its state dict has the fp32 weights under.
    MASTERS = "fp32_groups_flat"
    external_loss_scale = None
    custom_loss_scaler = False

    def __init__(self, instance: torch.optim.Optimizer, engine: Engine) -> None:
        super().__init__(instance, engine.update, engine.zero_grad_of_loop, lambda: engine.states)
        self._engine = engine
        self.state = instance.state = States(self)  # type: ignore[assignment]
        self._handle = instance.register_load_state_dict_pre_hook(_refuse_load)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """That which `initialize` was given or made, with the same groups and state."""
        return self.instance

    @property
    def loss_scaler(self) -> LossScale:
        return LossScale(self._engine)

    loss_scale_config = loss_scaler

    @property
    def loss_scale(self) -> float:
        return self._engine._scaler.scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._engine._scaler.scale = float(scale)

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        return self._engine._scaler.dynamic

    @property
    def clip_grad(self) -> float:
        return self._engine.gradient_clipping()

    @property
    def low_precision_dtype(self) -> torch.dtype | None:
        return self._engine.working_dtype

    @property
    def _global_grad_norm(self) -> float | None:
        return self._engine.get_global_grad_norm()

    def _masters(self) -> list[torch.Tensor]:
        """Of each group this rank's part of the fp32 weights, in one piece: a copy, for looking at."""
        states = self._engine.states
        parts = (
            [states.local(states.name_of(p), "master") for p in group["params"] if p.requires_grad]
            for group in self.param_groups
        )
        return [torch.cat([part for part in group if part is not None]) for group in parts]

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, **_: Any) -> None:
        """As `engine.backward` of a loss that was divided by the number of micro-batches."""
        self._engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state in torch's form, its masters of each group in one piece, and the loss scale."""
        scaler, found, masters = self._engine._scaler, super().state_dict(), self._masters()
        for group, flat in zip(found["param_groups"], masters, strict=True):
            # Masters of 16-bit weights are parts of that piece, which is saved once.
            parts = [part for number in group["params"] if "master" in (part := found["state"].get(number, {}))]
            at = 0
            for part in parts:
                own = part["master"]
                part["master"] = flat[at : at + own.numel()].view_as(own)
                at += own.numel()
        return {
            **found,
            self.MASTERS: masters,
            "loss_scaler": scaler.state_dict(),
            "dynamic_loss_scale": scaler.dynamic,
            "cur_scale": scaler.scale,
            "overflow": self.overflow,
        }

    def load_state_dict(self, state_dict: Any, load_optimizer_states: bool = True, **_: Any) -> None:
        """Take back what `state_dict` gave: this rank's, or a list with one for each data-parallel rank."""
        mine = state_dict[self._engine.comm.rank] if isinstance(state_dict, list | tuple) else state_dict
        scale = mine.get("loss_scaler")
        if not load_optimizer_states:
            mine = {key: value for key, value in mine.items() if key != "state"}
        super().load_state_dict(mine)
        if isinstance(scale, dict):
            self._engine._scaler.load_state_dict(scale)
        self.overflow = bool(mine.get("overflow", self.overflow))

    def close(self) -> None:
        super().close()
        self._handle.remove()
        self.state = self.instance.state = defaultdict(dict)


class ZeROOptimizer(DeepSpeedOptimizer):
    """What it is at stages 1 to 3."""

    def needs_scaler(self) -> bool:
        """Whether a loss has to be scaled before its backward: `engine.scale(loss)` does it."""
        return self.dynamic_loss_scale

    def scale_if_loss(self, value: Any) -> Any:
        is_loss = isinstance(value, torch.Tensor) and value.numel() == 1 and value.grad_fn is not None
        return self._engine.scale(value) if is_loss else value

    @property
    def is_gradient_accumulation_boundary(self) -> bool:
        return self._engine.is_gradient_accumulation_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_boundary)


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Stages 1 and 2."""

    MASTERS = "single_partition_of_fp32_groups"
    single_partition_of_fp32_groups = property(ZeROOptimizer._masters)


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """Stage 3."""

    MASTERS = "fp32_flat_groups"
    fp32_partitioned_groups_flat = property(ZeROOptimizer._masters)

    @property
    def averaged_gradients(self) -> dict[int, list[torch.Tensor]]:
        return {number: [*parts.values()] for number, parts in self.get_fp32_grad_partitions().items()}

    @property
    def leaf_parameters(self) -> dict[nn.Module, set[nn.Parameter]]:
        """The parameters of the modules that are gathered whole."""
        return {module: set(module.parameters()) for module in self._engine.module.modules() if z3_leaf_module(module)}

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor]]:
        """Of each group and each of its parameters this rank's equal share of the gradient, padded with zeros."""
        shards, states = self._engine.topology.shards, self._engine.states
        found: dict[int, dict[int, torch.Tensor]] = {}
        numbers = {parameter: number for number, parameter in enumerate(self._engine.module.parameters())}
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                whole = states.gradient_so_far(states.name_of(parameter))
                if whole is not None:
                    size = -(-whole.numel() // shards.size)
                    share = whole.flatten()[shards.rank * size : (shards.rank + 1) * size]
                    padded = nn.functional.pad(share, (0, size - share.numel()))
                    found.setdefault(number, {})[numbers[parameter]] = padded
        return found


class BF16_Optimizer(ZeROOptimizer):
    """Stage 1 in bf16, with gradients that are summed in fp32."""


class FP16_Optimizer(DeepSpeedOptimizer):
    """Stage 0 in fp16 or bf16, with a fused Adam."""

    fp32_groups_flat = property(DeepSpeedOptimizer._masters)


class FP16_UnfusedOptimizer(DeepSpeedOptimizer):
    """Stage 0 in fp16 or bf16, with any other optimizer."""


class Itself(ShardedOptimizer):
    """Stage 0 in fp32: the very optimizer that `initialize` was given or made, whose `step` is the engine's.

    It is of a class derived from its own, until the engine is closed.
    """

    _base: type[torch.optim.Optimizer]
    _watched: Any

    def close(self) -> None:
        """It is as it was."""
        vars(self).pop("step", None)
        if self._watched is not None:
            self.step = self._watched  # type: ignore[method-assign]
        self.state = defaultdict(dict)
        base = self._base
        for name in _TAKEN:
            del vars(self)[name]
        self.__class__ = base  # type: ignore[assignment]


# What it has beside, until then.
_TAKEN = ("instance", "_update", "_drop", "_states", "overflow", "_base", "_watched")


def _itself(instance: torch.optim.Optimizer, engine: Engine) -> ShardedOptimizer:
    base, taken = type(instance), vars(instance)
    instance.__class__ = type(base.__name__, (Itself, base), {"__module__": base.__module__})
    assert isinstance(instance, Itself)
    instance._patch_step_function()
    # A schedule that was made before has put a step of its own there, and looks for it later.
    watched = taken.pop("step", None)
    if watched is not None:
        step: Any = partial(type(instance).step, instance)
        step._wrapped_by_lr_sched = True
        taken["step"] = step
    taken.update(_base=base, _watched=watched, instance=instance, overflow=False, state=States(instance))
    taken.update(_update=engine.update, _drop=engine.zero_grad_of_loop, _states=lambda: engine.states)
    return instance


def face(instance: torch.optim.Optimizer, engine: Engine) -> ShardedOptimizer:
    """The optimizer that DeepSpeed would have for the engine's config."""
    config, stage = engine._config, engine.zero_optimization_stage()
    if stage == 0:
        if not (config.fp16.enabled or config.bf16.enabled):
            return _itself(instance, engine)
        return (FP16_Optimizer if isinstance(instance, ops.FusedAdam) else FP16_UnfusedOptimizer)(instance, engine)
    if _has_bf16_optimizer(config):
        return BF16_Optimizer(instance, engine)
    return (DeepSpeedZeroOptimizer_Stage3 if stage == 3 else DeepSpeedZeroOptimizer)(instance, engine)


def _has_bf16_optimizer(config: Config) -> bool:
    sums_in_fp32 = config.bf16.enabled and config.grad_accum_dtype() is torch.float32
    return config.zero_optimization.stage == 1 and sums_in_fp32 and not _offloads(config)


def resolve(
    model: nn.Module, config: Config, optimizer: OptimizerLike | None, model_parameters: Iterable[Any] | None
) -> OptimizerSpec | None:
    """As Wherry's own; what a config names is of DeepSpeed's classes, and what DeepSpeed refuses is refused."""
    if optimizer is not None or config.optimizer is not None:
        _check_types(config)
        _check_bucket(config)
    spec = resolve_optimizer(model, config, optimizer, model_parameters, partial(make, model))
    if spec is not None:
        if not config.keeps_masters():
            spec = _without_masters(config, spec)
        # Unset, DeepSpeed demands it too; here a torch optimizer gets its host counterpart.
        if optimizer is not None and _offloads(config) and config.written.get("zero_force_ds_cpu_optimizer") is True:
            _check_of_host(spec.instance)
        spec.instance.param_groups[:] = [group for group in spec.groups if len(group["params"])]
    return spec


def make(model: nn.Module, config: Config, parameters: list[Any]) -> torch.optim.Optimizer:
    """The optimizer of a config, of the class that DeepSpeed makes it of."""
    assert config.optimizer is not None
    name, options = config.optimizer.build_args()
    if config.written.get("optimizer", {}).get("params", {}).get("torch_adam") or options.get("maximize"):
        return from_config(name, options, parameters)
    offloads = _offloads(config)
    cls: Any = None
    if name in ("Adam", "AdamW"):
        options = {key: value for key, value in options.items() if key != "maximize"}
        options["adamw_mode" if offloads else "adam_w_mode"] = name == "AdamW"
        if offloads:
            options["fp32_optimizer_states"] = config.keeps_masters() or config.state_dtype() != "bf16"
        cls = ops.DeepSpeedCPUAdam if offloads else ops.FusedAdam
    elif name == "Lion":
        options = {key: value for key, value in options.items() if key != "maximize"}
        cls = ops.DeepSpeedCPULion if offloads else ops.FusedLion
    elif name == "Lamb":
        cls = ops.FusedLamb
    elif name == "Muon":
        _mark_for_muon(model)
        return ops.MuonWithAuxAdam.for_model(model, parameters, **options)
    return from_config(name, options, parameters, cls=cls)


def _mark_for_muon(model: nn.Module) -> None:
    """As DeepSpeed does: by the parameters' names. What a script has marked stays as it is."""
    unmarked = [(name, p) for name, p in model.named_parameters() if not hasattr(p, "use_muon")]
    chosen = {name: p for name, p in unmarked if not re.search("embed|lm_head", name.lower())}
    others = [name for name, p in chosen.items() if len(whole_shape(p)) > 2]
    if others:
        say("optimizer: Muon is for matrices; AdamW updates what has more dims (%d, like %s)", len(others), others[0])
    for name, parameter in unmarked:
        is_matrix = len(whole_shape(parameter)) == 2
        parameter.use_muon = is_matrix and name in chosen  # type: ignore[attr-defined]


def _check_types(config: Config) -> None:
    """At stage 0 gradients are summed in the type of the weights."""
    weights = config.working_dtype() or torch.float32
    sums = config.grad_accum_dtype() or weights
    if config.zero_optimization.stage == 0 and sums is not weights:
        raise UnsupportedTypes(
            f"data_types.grad_accum_dtype: {sums} with weights in {weights} needs zero_optimization.stage 1 or more; "
            "leave the key out at stage 0"
        )


def _check_bucket(config: Config) -> None:
    zero = config.zero_optimization
    if zero.stage in (1, 2) and zero.allgather_bucket_size % 2 and not _has_bf16_optimizer(config):
        raise DeepSpeedConfigError(
            "zero_optimization.allgather_bucket_size must be a multiple of nccl_start_alignment_factor, which is 2, at "
            f"stages 1 and 2, got {zero.allgather_bucket_size}"
        )


def _without_masters(config: Config, spec: OptimizerSpec) -> OptimizerSpec:
    """What DeepSpeed demands of an optimizer then; moments are as the optimizer has them."""
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


def _check_of_host(instance: torch.optim.Optimizer) -> None:
    if not isinstance(instance, ops.DeepSpeedCPUAdam | ops.DeepSpeedCPULion | ops.DeepSpeedCPUAdagrad):
        raise ZeRORuntimeException(
            f"zero_force_ds_cpu_optimizer: offload_optimizer with a {type(instance).__name__} of the script's own; "
            "give deepspeed.ops.adam.DeepSpeedCPUAdam, or set that key to false"
        )


def _offloads(config: Config) -> bool:
    return config.placement().optimizer.tier is not Tier.DEVICE


def _refuse_load(optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
    raise WherryError(
        f"{type(optimizer).__name__}.load_state_dict: the engine has the state of this optimizer; call load_state_dict "
        "of engine.optimizer, or engine.load_checkpoint"
    )
