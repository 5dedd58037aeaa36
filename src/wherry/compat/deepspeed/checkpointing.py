"""`deepspeed.checkpointing`: activation checkpoints in a model's code, and their settings for the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import wherry
from wherry import config as configs
from wherry.activations import recompute
from wherry.compat.deepspeed import unlisted
from wherry.compat.deepspeed.accelerator import get_accelerator
from wherry.compat.deepspeed.parameters import live_engines
from wherry.config import Config
from wherry.errors import WherryError
from wherry.observe.log import warn
from wherry.tiers.streams import can_pin

# Keys of the block `activation_checkpointing` of a config.
_KEYS = (
    "partition_activations", "contiguous_memory_optimization", "cpu_checkpointing", "number_checkpoints",
    "synchronize_checkpoint_boundary", "profile",
)  # fmt: skip
# The settings of the last `configure`; None before.
_settings: dict[str, Any] | None = None
mpu: Any = None


class NoNumberOfLayers(WherryError, AssertionError):
    """Contiguous checkpoints were requested without their number."""


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
    """Set how activation checkpoints are kept in the engines that `deepspeed.initialize` builds from now on.

    The settings replace those of the block `activation_checkpointing` in their configs. The model's own code makes the
    checkpoints.
    """
    global _settings, mpu
    config = configs.load(deepspeed_config)
    block, written = config.activation_checkpointing, config.given.get("activation_checkpointing") or {}
    settings = {key: value for key in _KEYS if (value := getattr(block, key, written.get(key)))}
    arguments = (partition_activations, contiguous_checkpointing, checkpoint_in_cpu, num_checkpoints, synchronize,
                 profile)  # fmt: skip
    settings |= {key: value for key, value in zip(_KEYS, arguments, strict=True) if value is not None}
    _, contiguous, on_host, number, *_ = map(settings.get, _KEYS)
    if contiguous and not on_host and not number:
        raise NoNumberOfLayers(
            "checkpointing.configure: contiguous checkpointing needs the number of layers; give num_checkpoints, or "
            "activation_checkpointing.number_checkpoints in the config"
        )
    _settings = settings
    mpu = mpu_ if mpu_ is not None else mpu
    for engine in live_engines():
        own = engine.config["activation_checkpointing"]
        if late := [key for key, value in settings.items() if own.get(key, value) != value]:
            warn("checkpointing: the engine keeps its own %s; configure before initialize", ", ".join(late))


def laid_over(config: Config) -> Config:
    """Replace an engine's settings by those of `configure`."""
    if _settings is None:
        return config
    # By default the script makes its checkpoints itself.
    policy = {} if config.activation_checkpointing.policy is not None else {"policy": "none"}
    return configs.load(config, overrides={"activation_checkpointing": _settings | policy})


def is_configured() -> bool:
    return _settings is not None


def reset() -> None:
    """Do nothing: no buffers are kept between steps."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Keep only the inputs of `function`, and recompute it in the backward, like `wherry.checkpoint`.

    Outside an engine's forward, `configure(checkpoint_in_cpu=True)` keeps them on the host.
    """
    call = _tracked(function)
    alone = recompute.running.get() is None and not recompute.inside.get() and torch.is_grad_enabled()
    if alone and (_settings or {}).get("cpu_checkpointing"):
        kind = get_accelerator().device_name()
        host = torch.autograd.graph.save_on_cpu(pin_memory=kind != "cpu" and can_pin(), device_type=kind)
        return recompute.recomputed(call, args, kwargs, saving=host)
    return wherry.checkpoint(call, *args, **kwargs)


def _tracked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that its recomputation draws the same numbers from the tracker's named states."""
    if not _tracker.states_:
        return function
    before: dict[str, torch.Tensor] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        now = _tracker.get_states()
        if not before:
            before.update(now)
            return function(*args, **kwargs)
        _tracker.set_states(dict(before))
        try:
            return function(*args, **kwargs)
        finally:
            _tracker.set_states(now)

    call.__qualname__ = getattr(function, "__qualname__", type(function).__name__)
    return call


class CheckpointFunction:
    """The call of older Megatron code, `CheckpointFunction.apply(function, all_outputs, *args)`."""

    @staticmethod
    def apply(function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        outputs = checkpoint(function, *args)
        all_outputs.extend(outputs if isinstance(outputs, tuple) else (outputs,))
        return outputs


class CudaRNGStatesTracker:
    """Named states of the device's random generator, for parts of a model that draw numbers of their own."""

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
        self.states_[name] = get_accelerator().get_rng_state()
        with self.fork(name):
            get_accelerator().manual_seed(seed)

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
    """Seed the default state alike on all model-parallel ranks, and a named state differently on each."""
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    names = ("get_tensor_model_parallel_rank", "get_model_parallel_rank")
    rank = next((getattr(mpu, name)() for name in names if hasattr(mpu, name)), 0)
    _tracker.add("model-parallel-rng", seed + 2718 + rank)


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed


def __getattr__(name: str) -> Any:
    return unlisted("runtime.activation_checkpointing.checkpointing", name)
