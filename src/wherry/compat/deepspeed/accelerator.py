"""`deepspeed.accelerator`: torch's accelerator, or the CPU, under the names that scripts ask."""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from wherry.compat.deepspeed import not_part_of_wherry
from wherry.observe.memory import host_memory
from wherry.parallel.topology import default_device


class Accelerator:
    """The device that this process computes on. What is not here is as in torch's module of its kind."""

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._communication_backend_name = dist.Backend.default_device_backend_map.get(kind, "gloo")
        self._module: Any = torch.get_device_module(kind)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._module, name)

    def _at(self, device_index: int | None) -> int:
        return self.current_device() if device_index is None else device_index

    def is_synchronized_device(self) -> bool:
        return False

    use_host_timers = is_synchronized_device

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(self._at(None))

    def is_available(self) -> bool:
        return True

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def is_triton_supported(self) -> bool:
        return self._name == "cuda"

    def amp(self) -> Any:
        return torch.amp

    def range_push(self, message: str) -> None:
        if hasattr(self._module, "nvtx"):
            self._module.nvtx.range_push(message)

    def range_pop(self) -> None:
        if hasattr(self._module, "nvtx"):
            self._module.nvtx.range_pop()

    def lazy_call(self, callback: Any) -> None:
        callback()

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return self._module.get_rng_state(self._at(device_index))

    def set_rng_state(self, state: torch.Tensor, device_index: int | None = None) -> None:
        self._module.set_rng_state(state, self._at(device_index))

    def total_memory(self, device_index: int | None = None) -> int:
        return self._module.get_device_properties(self._at(device_index)).total_memory

    def available_memory(self, device_index: int | None = None) -> int:
        return self._module.mem_get_info(device_index)[0]


class _Host(Accelerator):
    """The CPU: as many devices as there are ranks here, nothing to wait for, and the process's memory."""

    def is_synchronized_device(self) -> bool:
        return True

    use_host_timers = is_bf16_supported = is_synchronized_device

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def device(self, device_index: int | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    stream = device

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def device_count(self) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing is under way."""

    set_device = empty_cache = reset_peak_memory_stats = synchronize
    reset_max_memory_allocated = reset_max_memory_cached = synchronize

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return False

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(state)

    def memory_allocated(self, device_index: int | None = None) -> int:
        return host_memory().resident

    memory_cached = memory_reserved = memory_allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return host_memory().peak

    max_memory_cached = max_memory_reserved = max_memory_allocated

    def total_memory(self, device_index: int | None = None) -> int:
        return host_memory().total

    def available_memory(self, device_index: int | None = None) -> int:
        return host_memory().available


@functools.cache
def get_accelerator() -> Accelerator:
    kind = default_device().type
    return _Host(kind) if kind == "cpu" else Accelerator(kind)


def set_accelerator(accelerator: Any) -> None:
    if accelerator is not get_accelerator():
        raise not_part_of_wherry("set_accelerator with an accelerator of one's own", "torch's accelerator is used")


def is_current_accelerator_supported() -> bool:
    return True
