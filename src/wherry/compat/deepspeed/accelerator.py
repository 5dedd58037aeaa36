"""`deepspeed.accelerator`: torch's accelerator, or the CPU, with the methods that scripts call."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from wherry.compat.deepspeed import builders
from wherry.observe.memory import host_memory
from wherry.parallel.topology import default_device

_TENSORS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}
# Attributes of the CPU that are those of the module torch.
_OF_TORCH = {*_TENSORS, "manual_seed", "initial_seed"}


class Accelerator:
    """The device that this process computes on; other attributes are those of torch's module of its kind."""

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._module: Any = torch.get_device_module(kind)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _TENSORS:
            return functools.partial(torch.tensor, dtype=_TENSORS[name], device=self._name)
        return getattr(self._module, name)

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def communication_backend_name(self) -> str:
        return dist.Backend.default_device_backend_map.get(self._name, "gloo")

    def default_generator(self, device_index: int) -> torch.Generator:
        return self._module.default_generators[device_index]

    def total_memory(self, device_index: int | None = None) -> int:
        index = self.current_device() if device_index is None else device_index
        return self._module.get_device_properties(index).total_memory

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def get_op_builder(self, class_name: str) -> Any:
        """Return the builder of that name, or one of nothing for other names."""
        return getattr(builders, class_name if class_name in builders.OPERATIONS else "NotImplementedBuilder")

    def get_compile_backend(self) -> str:
        return "inductor"


class Host(Accelerator):
    """The CPU: a device for each rank here, nothing to synchronize, and the memory of the process."""

    manual_seed_all = staticmethod(torch.manual_seed)

    Stream = Event = None  # by which scripts know that there are none

    def __getattr__(self, name: str) -> Any:
        # torch's own tensor classes take sizes as well as values.
        return getattr(torch if name in _OF_TORCH else torch.cpu, name)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def device(self, device_index: int | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def is_available(self) -> bool:
        return True

    is_bf16_supported = is_available

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def device_count(self) -> int:
        # DeepSpeed's launcher sets the first for ranks on CPUs.
        return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: the CPU runs nothing asynchronously."""

    set_device = empty_cache = reset_peak_memory_stats = synchronize

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    def memory_allocated(self, device_index: int | None = None) -> int:
        return host_memory().resident

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return host_memory().peak

    memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated

    def total_memory(self, device_index: int | None = None) -> int:
        return host_memory().total


@functools.cache
def get_accelerator() -> Accelerator:
    """Return the accelerator of this process."""
    kind = default_device().type
    return Host(kind) if kind == "cpu" else Accelerator(kind)
