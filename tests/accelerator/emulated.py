"""The device "emulated": an accelerator made of host memory, whose work runs late and in an order drawn by chance.

Importing this module registers it with torch. It must come before the first backward pass of the process, as torch
starts its autograd threads then.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from tests.accelerator.build import load

device_lib = load()

# ---- What the tests set

seed: Callable[[int], None] = device_lib.seed
mark: Callable[[str], None] = device_lib.mark
allocations: Callable[[], int] = device_lib.allocations
register_pinned: Callable[[int, int], None] = device_lib.register_pinned
unregister_pinned: Callable[[int], None] = device_lib.unregister_pinned
take_failure: Callable[[], str] = device_lib.take_failure


def lateness(probability: float) -> float:
    """Set how late work runs: at 1 only when something waits for it, at 0 at once. Returns the value before."""
    return device_lib.lateness(probability)


def limit(nbytes: int | None, device: int = 0) -> None:
    """Limit the device's memory. Cached blocks count, until a new block needs their room."""
    device_lib.limit(device, nbytes or 0)


def fail_after(count: int | None) -> None:
    """The count-th allocation from now raises torch.OutOfMemoryError, once."""
    device_lib.fail_after(count or 0)


def poison_targets(on: bool) -> bool:
    """Fill host memory that a late copy will write with 0xFF until then, or not. Returns the value before."""
    return device_lib.poison_targets(on)


@contextmanager
def held(kind: str) -> Iterator[None]:
    """Hold back copies "up" or "down" of side streams: other threads wait for them, and this one raises if it does."""
    device_lib.hold(kind)
    try:
        yield
    finally:
        device_lib.hold("")


def queued(device: int = 0) -> int:
    """Count the items that wait in the streams of the device."""
    return device_lib.queued(device)


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous device tensor as it is now, for the host. Keeps nothing alive, waits for nothing."""
    if not tensor.is_contiguous():
        raise ValueError("host_view: the tensor is not contiguous")
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_char * tensor.nbytes).from_address(device_lib.shadow(tensor.data_ptr()))
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


@dataclass(frozen=True)
class Traced:
    """One item of a stream, or a mark of the host's (stream -1). Times are in seconds, of time.monotonic."""

    device: int
    stream: int
    kind: str
    name: str
    nbytes: int
    queued: float
    begun: float
    ended: float


@dataclass
class Trace:
    items: list[Traced] = field(default_factory=list)

    def of(self, kind: str, name: str | None = None) -> list[Traced]:
        return [item for item in self.items if item.kind == kind and name in (None, item.name)]


@contextmanager
def trace() -> Iterator[Trace]:
    """Records what is queued meanwhile. Complete once the context is left; items that have not run have times of 0."""
    device_lib.start_trace()
    found = Trace()
    try:
        yield found
    finally:
        found.items += [Traced(*row) for row in device_lib.stop_trace()]


# ---- torch.emulated

NAME = "emulated"
module = ModuleType("torch.emulated")


def index_of(device: Any = None) -> int:
    if device is None:
        return device_lib.current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return device_lib.current_device() if index is None else index


class device:
    """The context in which a device is the current one."""

    def __init__(self, device: Any) -> None:
        self.index = index_of(device)

    def __enter__(self) -> None:
        self.before = device_lib.current_device()
        device_lib.set_device(self.index)

    def __exit__(self, *_: object) -> None:
        device_lib.set_device(self.before)


def default_generator(device: Any = None) -> torch.Generator:
    return module.default_generators[index_of(device)]


def manual_seed_all(seed: int) -> None:
    for generator in module.default_generators:
        generator.manual_seed(seed)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
    else:
        with stream:
            yield


def properties(device: Any = None) -> SimpleNamespace:
    total = torch.accelerator.get_memory_info(index_of(device))[1]
    return SimpleNamespace(name="Emulated", total_memory=total, major=1, minor=0, multi_processor_count=1)


def on_index(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda device=None: function(index_of(device))


def fill_module(pid: int) -> None:
    accelerator = torch.accelerator
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_is_in_bad_fork": lambda: os.getpid() != pid,
        "device_count": device_lib.device_count,
        "current_device": device_lib.current_device,
        "set_device": lambda device: device_lib.set_device(index_of(device)),
        "device": device,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "stream": stream,
        "set_stream": accelerator.set_stream,
        "synchronize": on_index(accelerator.synchronize),
        "current_stream": on_index(accelerator.current_stream),
        "default_stream": lambda device=None: torch.Stream(
            stream_id=0, device_index=index_of(device), device_type=int(torch._C._autograd.DeviceType.PrivateUse1)
        ),
        "empty_cache": accelerator.empty_cache,
        "mem_get_info": on_index(accelerator.get_memory_info),
        "get_rng_state": lambda device=None: default_generator(device).get_state(),
        "set_rng_state": lambda state, device=None: default_generator(device).set_state(state),
        "initial_seed": lambda: default_generator().initial_seed(),
        "manual_seed": lambda seed: default_generator().manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_properties": properties,
        "get_device_name": lambda device=None: "Emulated",
        "get_device_capability": lambda device=None: (1, 0),
    }
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats"):
        functions[name] = on_index(getattr(accelerator, name))
    for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        functions[name] = on_index(getattr(accelerator, name))
    for name, function in functions.items():
        setattr(module, name, function)


def register() -> None:
    torch.utils.rename_privateuse1_backend(NAME)
    fill_module(os.getpid())
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    module.default_generators = tuple(device_lib.default_generator(index) for index in range(4))


register()
