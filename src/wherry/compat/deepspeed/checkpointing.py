"""`deepspeed.checkpointing`: activation checkpoints, by torch's own, with the settings that scripts make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from wherry import config as configs
from wherry.compat.deepspeed.parts import not_part_of_wherry
from wherry.observe.log import say

PARTITION_ACTIVATIONS = CPU_CHECKPOINT = CONTIGUOUS_CHECKPOINTING = SYNCHRONIZE = PROFILE_TIME = False
_configured = False


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
    """Say how activation checkpoints are kept, for the whole process, as scripts expect."""
    global PARTITION_ACTIVATIONS, CPU_CHECKPOINT, CONTIGUOUS_CHECKPOINTING, SYNCHRONIZE, PROFILE_TIME, _configured
    block = configs.load(deepspeed_config).activation_checkpointing if deepspeed_config is not None else None

    def value(given: bool | None, key: str) -> bool:
        return bool(given if given is not None else getattr(block, key, False))

    PARTITION_ACTIVATIONS = value(partition_activations, "partition_activations")
    CONTIGUOUS_CHECKPOINTING = value(contiguous_checkpointing, "contiguous_memory_optimization")
    CPU_CHECKPOINT = value(checkpoint_in_cpu, "cpu_checkpointing")
    SYNCHRONIZE = value(synchronize, "synchronize_checkpoint_boundary")
    PROFILE_TIME = value(profile, "profile")
    _configured = True
    for name, on in (("partition_activations", PARTITION_ACTIVATIONS), ("contiguous_checkpointing",
                     CONTIGUOUS_CHECKPOINTING), ("synchronize", SYNCHRONIZE), ("profile", PROFILE_TIME)):  # fmt: skip
        if on:
            say("checkpointing.configure: %s has no effect on checkpoints made in the model's own code", name)


def is_configured() -> bool:
    return _configured


def reset() -> None:
    """Nothing is kept between steps."""


def set_num_layers(nlayers: int) -> None:
    """Checkpoints need no buffer of a fixed number."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    configure(partition_activations=partition_activation, checkpoint_in_cpu=CPU_CHECKPOINT)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Keep the inputs of `function` only, and compute it again in the backward."""
    if not CPU_CHECKPOINT:
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


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
        before = _get_rng_state()
        _seed(seed)
        self.states_[name] = _get_rng_state()
        _set_rng_state(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        if name not in self.states_:
            raise ValueError(f"CudaRNGStatesTracker: no state is named {name!r}; call add() first")
        before = _get_rng_state()
        _set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _get_rng_state()
            _set_rng_state(before)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """The default state for what all model-parallel ranks draw alike, and a named one for what they draw apart."""
    _tracker.reset()
    _seed(seed)
    _tracker.add("model-parallel-rng", seed + 2718)


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed


def _seed(seed: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _get_rng_state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_rng_state(state: torch.Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def __getattr__(name: str) -> Any:
    if name == "mpu":
        return None
    if name in ("gather_partitioned_activations", "merge_tensors", "extract_tensors"):
        raise not_part_of_wherry(f"deepspeed.checkpointing.{name}", "checkpoints are torch's own")
    raise AttributeError(name)
