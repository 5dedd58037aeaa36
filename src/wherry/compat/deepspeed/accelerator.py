"""`deepspeed.accelerator`: torch's accelerator, or the CPU, under the names that scripts ask."""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from wherry.compat.deepspeed import builders, not_part_of_wherry
from wherry.errors import WherryError
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


class UnknownBackend(WherryError, ValueError):
    """`set_compile_backend` was given what torch.compile does not have."""


class Accelerator:
    """The device that this process computes on. What is not here is as in torch's module of its kind."""

    def __init__(self, kind: str | None = None) -> None:
        kind = kind or default_device().type
        self._name = kind
        self._compile_backend = "inductor"
        self._communication_backend_name = dist.Backend.default_device_backend_map.get(kind, "gloo")
        self._module: Any = torch.get_device_module(kind)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _TENSORS:
            return functools.partial(torch.tensor, dtype=_TENSORS[name], device=self._name)
        return getattr(self._module, name)

    def _at(self, device_index: int | None) -> int:
        return self.current_device() if device_index is None else device_index

    def is_synchronized_device(self) -> bool:
        return False

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(self._at(None))

    def is_available(self) -> bool:
        return self._module.is_available()

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def is_fp16_supported(self) -> bool:
        return True

    is_fp64_supported = is_fp16_supported

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    def is_triton_supported(self) -> bool:
        return self._name == "cuda"

    def prefer_triton_grouped_mm(self) -> bool:
        return False

    def amp(self) -> Any:
        return torch.amp

    def random(self) -> Any:
        return torch.random

    def default_generator(self, device_index: int) -> torch.Generator:
        return self._module.default_generators[device_index]

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        if hasattr(self._module, "nvtx"):
            self._module.nvtx.range_push(msg)

    def range_pop(self, domain: str | None = None) -> None:
        if hasattr(self._module, "nvtx"):
            self._module.nvtx.range_pop()

    def lazy_call(self, callback: Any) -> Any:
        return callback()

    def create_graph(self) -> Any:
        return self._module.CUDAGraph() if hasattr(self._module, "CUDAGraph") else None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        return nullcontext() if graph is None else self._module.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        if graph is not None:
            graph.replay()

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True, align_bytes: int = 1
    ) -> torch.Tensor:
        return tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """torch frees pinned memory with the tensor."""

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> Any:
        """A builder; that of nothing for a name that is no builder's."""
        return getattr(builders, class_name if class_name in builders.OPERATIONS else "NotImplementedBuilder")

    def create_op_builder(self, class_name: str) -> Any:
        return self.get_op_builder(class_name)()

    def build_extension(self) -> Any:
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    def export_envs(self) -> list[str]:
        return {"cuda": ["NCCL"]}.get(self._name, [])

    def visible_devices_envs(self) -> list[str]:
        return {"xpu": ["ZE_AFFINITY_MASK"]}.get(self._name, ["CUDA_VISIBLE_DEVICES"])

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise UnknownBackend(
                f"set_compile_backend: {backend!r} is no backend of torch.compile here; they are {', '.join(known)}"
            )
        self._compile_backend = backend

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


class Host(Accelerator):
    """The CPU: as many devices as there are ranks here, nothing to wait for, and the process's memory."""

    # As there: what a script does with streams it leaves alone where these are None.
    Stream = Event = None
    BFloat16Tensor, ByteTensor, DoubleTensor = torch.BFloat16Tensor, torch.ByteTensor, torch.DoubleTensor
    FloatTensor, HalfTensor = torch.FloatTensor, torch.HalfTensor
    IntTensor, LongTensor = torch.IntTensor, torch.LongTensor

    def __init__(self, kind: str = "cpu") -> None:
        super().__init__("cpu")

    def is_synchronized_device(self) -> bool:
        return True

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device
    is_available = is_bf16_supported = is_synchronized_device

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def device(self, device_index: int | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    stream = device

    def current_stream(self, device_index: int | None = None) -> None:
        """There is none."""

    default_stream = current_stream

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def device_count(self) -> int:
        return int(os.environ.get("LOCAL_SIZE") or 0) or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing is under way."""

    set_device = empty_cache = reset_peak_memory_stats = synchronize
    reset_max_memory_allocated = reset_max_memory_cached = synchronize

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True, align_bytes: int = 1
    ) -> torch.Tensor:
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return False

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

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

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        memory = host_memory()
        return {"allocated_bytes.all.current": memory.resident, "allocated_bytes.all.peak": memory.peak}

    def total_memory(self, device_index: int | None = None) -> int:
        return host_memory().total

    def available_memory(self, device_index: int | None = None) -> int:
        return host_memory().available


@functools.cache
def get_accelerator() -> Accelerator:
    kind = default_device().type
    return Host() if kind == "cpu" else Accelerator(kind)


def set_accelerator(accelerator: Any) -> None:
    if accelerator is not get_accelerator():
        raise not_part_of_wherry("set_accelerator with an accelerator of one's own", "torch's accelerator is used")


def is_current_accelerator_supported() -> bool:
    return True


SUPPORTED_ACCELERATOR_LIST = ["cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa"]
