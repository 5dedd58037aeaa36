"""`deepspeed.checkpointing`: activation checkpoints in the model's own code, kept as scripts say for the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import wherry
from wherry import config as configs
from wherry.activations import recompute
from wherry.compat.deepspeed import not_part_of_wherry
from wherry.compat.deepspeed.accelerator import get_accelerator
from wherry.compat.deepspeed.parameters import live_engines
from wherry.config import Config
from wherry.errors import WherryError
from wherry.observe.log import warn
from wherry.tiers.streams import can_pin

# Keys of the config's block, in the order of the arguments of `configure`, and the names that scripts read.
_KEYS = {
    "partition_activations": "PARTITION_ACTIVATIONS",
    "contiguous_memory_optimization": "CONTIGUOUS_CHECKPOINTING",
    "cpu_checkpointing": "CPU_CHECKPOINT",
    "synchronize_checkpoint_boundary": "SYNCHRONIZE",
    "profile": "PROFILE_TIME",
    "number_checkpoints": "num_layers",
}
# What `configure` was given; None before. Scripts also set the names of `_KEYS` themselves, as globals of this module.
_asked: dict[str, Any] | None = None
mpu: Any = None
deepspeed_checkpointing_enabled = False


class NoNumberOfLayers(WherryError, AssertionError):
    """Room for checkpoints was asked for, and not for how many."""


def _settings() -> dict[str, Any]:
    """What `configure` was given, and what a script has set itself."""
    names = globals()
    return {**(_asked or {}), **{key: names[constant] for key, constant in _KEYS.items() if names.get(constant)}}


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say how activation checkpoints are kept, for the engines that `deepspeed.initialize` builds afterwards.

    It is laid over the block `activation_checkpointing` of their configs. What is checkpointed the model's code says.
    """
    global _asked, mpu, deepspeed_checkpointing_enabled
    config = configs.load(deepspeed_config)
    block, written = config.activation_checkpointing, config.given.get("activation_checkpointing") or {}
    asked = {key: value for key in _KEYS if (value := getattr(block, key, written.get(key)))}
    arguments = (partition_activations, contiguous_checkpointing, checkpoint_in_cpu, synchronize, profile,
                 num_checkpoints)  # fmt: skip
    asked |= {key: value for key, value in zip(_KEYS, arguments, strict=True) if value is not None}
    on_device = asked.get("contiguous_memory_optimization") and not asked.get("cpu_checkpointing")
    if on_device and not asked.get("number_checkpoints"):
        raise NoNumberOfLayers(
            "checkpointing.configure: contiguous checkpointing needs the number of layers; give num_checkpoints, or "
            "activation_checkpointing.number_checkpoints in the config"
        )
    for constant in _KEYS.values():
        globals().pop(constant, None)
    _asked, deepspeed_checkpointing_enabled = asked, True
    if mpu_ is not None:
        mpu = mpu_
    _tell_if_late()


def _tell_if_late() -> None:
    for engine in live_engines():
        block = engine.config["activation_checkpointing"]
        late = [key for key, value in _settings().items() if block.get(key, value) != value]
        if late:
            warn("checkpointing: the engine keeps its own %s; configure before initialize", ", ".join(late))


def laid_over(config: Config) -> Config:
    """An engine's config, with what `configure` was given."""
    block = _settings()
    if _asked is None and not block:
        return config
    if config.activation_checkpointing.policy is None:
        block["policy"] = "none"  # the script makes its checkpoints itself
    return configs.load(config, overrides={"activation_checkpointing": block})


def is_configured() -> bool:
    return _asked is not None


def reset() -> None:
    """Nothing is kept between steps."""


def set_num_layers(nlayers: int) -> None:
    """Room is made for as many checkpoints as there turn out to be."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    global _asked
    _asked = {**(_asked or {}), "partition_activations": partition_activation}
    _tell_if_late()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Keep the inputs of `function` only, and compute it again in the backward; `wherry.checkpoint` by another name.

    Outside an engine's forward, checkpoints are on the host where `configure` has said so.
    """
    call = _tracked(function)
    alone = recompute.running.get() is None and not recompute.inside.get() and torch.is_grad_enabled()
    if alone and _settings().get("cpu_checkpointing"):
        kind = get_accelerator().device_name()
        host = torch.autograd.graph.save_on_cpu(pin_memory=kind != "cpu" and can_pin(), device_type=kind)
        return recompute.recomputed(call, args, kwargs, saving=host)
    return wherry.checkpoint(call, *args, **kwargs)


def _tracked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose recomputation draws again what it has drawn from the tracker's named states."""
    if not _tracker.states_:
        return function
    before: dict[str, torch.Tensor] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal before
        if before is None:
            before = _tracker.get_states()
            return function(*args, **kwargs)
        now = _tracker.get_states()
        _tracker.set_states(dict(before))
        try:
            return function(*args, **kwargs)
        finally:
            _tracker.set_states(now)

    call.__qualname__ = getattr(function, "__qualname__", type(function).__name__)
    return call


non_reentrant_checkpoint = checkpoint


class CheckpointFunction:
    """Older Megatron code calls `CheckpointFunction.apply(function, all_outputs, *args)`."""

    @staticmethod
    def apply(function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        outputs = checkpoint(function, *args)
        all_outputs.extend(outputs if isinstance(outputs, tuple) else (outputs,))
        return outputs


class CudaRNGStatesTracker:
    """Named states of the device's random generator, for parts of a model that must draw apart."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_.clear()
        self.seeds_.clear()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        if seed in self.seeds_ or name in self.states_:
            raise ValueError(f"CudaRNGStatesTracker: seed {seed} or name {name!r} is taken already")
        self.seeds_.add(seed)
        before = get_accelerator().get_rng_state()
        get_accelerator().manual_seed(seed)
        self.states_[name] = get_accelerator().get_rng_state()
        get_accelerator().set_rng_state(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        if name not in self.states_:
            raise ValueError(f"CudaRNGStatesTracker: no state is named {name!r}; call add() first")
        before = get_accelerator().get_rng_state()
        get_accelerator().set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = get_accelerator().get_rng_state()
            get_accelerator().set_rng_state(before)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """The default state for what all model-parallel ranks draw alike, and a named one for what they draw apart."""
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    rank = 0
    for name in ("get_model_parallel_rank", "get_tensor_model_parallel_rank"):
        if hasattr(mpu, name):
            rank = getattr(mpu, name)()
    _tracker.add("model-parallel-rng", seed + 2718 + rank)


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed


def __getattr__(name: str) -> Any:
    for key, constant in _KEYS.items():
        if name == constant:
            return _settings().get(key, None if key == "number_checkpoints" else False)
    if name in ("gather_partitioned_activations", "merge_tensors", "extract_tensors"):
        raise not_part_of_wherry(f"deepspeed.checkpointing.{name}", "the engine cuts and joins checkpoints itself")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
