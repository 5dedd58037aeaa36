"""`deepspeed.accelerator`: torch's accelerator, or the CPU, under the names that scripts ask."""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from wherry.observe.memory import host_memory
from wherry.parallel.topology import default_device


class Accelerator:
    """The device that this process computes on. Other names are those of `torch.cuda` or `torch.cpu`."""

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._communication_backend_name = "nccl" if kind == "cuda" else "gloo"
        self._module: Any = getattr(torch, kind)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._module, name)

    def is_synchronized_device(self) -> bool:
        return self._name == "cpu"

    def use_host_timers(self) -> bool:
        return self._name == "cpu"

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device(self) -> int | str:
        return int(os.environ.get("LOCAL_RANK", "0")) if self._name == "cpu" else self._module.current_device()

    def current_device_name(self) -> str:
        return "cpu" if self._name == "cpu" else f"{self._name}:{self._module.current_device()}"

    def device(self, device_index: int | None = None) -> Any:
        return nullcontext() if self._name == "cpu" else self._module.device(device_index)

    def set_device(self, device_index: int) -> None:
        if self._name != "cpu":
            self._module.set_device(device_index)

    def device_count(self) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self._name == "cpu" else self._module.device_count()

    def is_available(self) -> bool:
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        if self._name != "cpu":
            self._module.synchronize(device_index)

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def is_bf16_supported(self) -> bool:
        return self._name == "cpu" or self._module.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def is_triton_supported(self) -> bool:
        return self._name == "cuda"

    def amp(self) -> Any:
        return torch.amp

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if self._name == "cpu" else self._module.stream(stream)

    def range_push(self, message: str) -> None:
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(message)

    def range_pop(self) -> None:
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Any) -> None:
        callback()

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._name != "cpu" and tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def _at(self, device_index: int | None) -> int:
        return int(self._module.current_device()) if device_index is None else device_index

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed) if self._name == "cpu" else self._module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.manual_seed(seed) if self._name == "cpu" else self._module.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed() if self._name == "cpu" else self._module.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state() if self._name == "cpu" else self._module.get_rng_state(self._at(device_index))

    def set_rng_state(self, state: torch.Tensor, device_index: int | None = None) -> None:
        if self._name == "cpu":
            torch.set_rng_state(state)
        else:
            self._module.set_rng_state(state, self._at(device_index))

    def empty_cache(self) -> None:
        if self._name != "cpu":
            self._module.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return host_memory().resident if self._name == "cpu" else self._module.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return host_memory().peak if self._name == "cpu" else self._module.max_memory_allocated(device_index)

    memory_cached = memory_reserved = memory_allocated
    max_memory_cached = max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self._name != "cpu":
            self._module.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def total_memory(self, device_index: int | None = None) -> int:
        if self._name == "cpu":
            return host_memory().total
        return self._module.get_device_properties(self._at(device_index)).total_memory

    def available_memory(self, device_index: int | None = None) -> int:
        return host_memory().available if self._name == "cpu" else self._module.mem_get_info(device_index)[0]


@functools.cache
def get_accelerator() -> Accelerator:
    return Accelerator(default_device().type)


def set_accelerator(accelerator: Any) -> None:
    if accelerator is not get_accelerator():
        from wherry.compat.deepspeed import not_part_of_wherry

        raise not_part_of_wherry("set_accelerator with an accelerator of one's own", "torch's accelerator is used")


def is_current_accelerator_supported() -> bool:
    return True
