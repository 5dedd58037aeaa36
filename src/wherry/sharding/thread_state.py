"""What torch keeps for each thread and `with` blocks change: taken off and put back where forwards take turns."""

from __future__ import annotations

import hashlib
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_A = torch._C._autograd
_C = torch._C


@dataclass
class ThreadState:
    """Saved-tensor hooks, modes, grad mode, autocast, streams: all that a forward may have entered and not left."""

    hooks: list[Any] = field(default_factory=list)
    hooks_disabled: str | None = None
    function_modes: list[Any] = field(default_factory=list)
    dispatch_modes: list[Any] = field(default_factory=list)
    grad: bool = True
    autocast: list[tuple[str, bool, torch.dtype]] = field(default_factory=list)
    autocast_cache: bool = True
    eval_frame: Any = None
    # Those that work is given to: of the engine's device, and of the one that is current.
    streams: list[torch.Stream] = field(default_factory=list)


def can_switch() -> bool:
    """Whether all of the thread's state is of the kinds that can be taken off and put back."""
    return not torch.is_inference_mode_enabled() and torch._C._functorch.peek_interpreter_stack() is None


def swap(new: ThreadState | None, device: torch.device) -> ThreadState:
    """Put `new` in the place of the thread's state, which is returned; None leaves the thread as it is."""
    old = _take(device)
    _put(new if new is not None else old)
    return old


def _take(device: torch.device) -> ThreadState:
    state = ThreadState(grad=torch.is_grad_enabled())
    state.hooks_disabled = _A._saved_tensors_hooks_get_disabled_error_message()
    if state.hooks_disabled is not None:
        _A._saved_tensors_hooks_enable()
    while (top := _A._top_saved_tensors_default_hooks(True)) is not None:
        state.hooks.append(top)
        _A._pop_saved_tensors_default_hooks()
    while _C._len_torch_function_stack():
        state.function_modes.append(_C._pop_torch_function_stack())
    if _C._len_torch_dispatch_stack():
        from torch.utils._python_dispatch import _pop_mode

        while _C._len_torch_dispatch_stack():
            state.dispatch_modes.append(_pop_mode())
    kinds = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
    state.autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    state.autocast_cache = torch.is_autocast_cache_enabled()
    # Casts of weights are shared until they are cleared: gradients of all forwards would be summed in their dtype.
    torch.clear_autocast_cache()
    frames = sys.modules.get("torch._C._dynamo.eval_frame")
    if frames is not None:
        state.eval_frame = frames.set_eval_frame(None)
    if device.type != "cpu":
        state.streams = [torch.accelerator.current_stream(device), torch.accelerator.current_stream()]
    return state


def _put(state: ThreadState) -> None:
    for pack, unpack in reversed(state.hooks):
        _A._push_saved_tensors_default_hooks(pack, unpack)
    if state.hooks_disabled is not None:
        _A._saved_tensors_hooks_disable(state.hooks_disabled)
    for mode in reversed(state.function_modes):
        _C._push_on_torch_function_stack(mode)
    if state.dispatch_modes:
        from torch.utils._python_dispatch import _push_mode

        for mode in reversed(state.dispatch_modes):
            _push_mode(mode)
    torch._C._set_grad_enabled(state.grad)
    for kind, enabled, dtype in state.autocast:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(state.autocast_cache)
    frames = sys.modules.get("torch._C._dynamo.eval_frame")
    if frames is not None:
        frames.set_eval_frame(state.eval_frame)
    for stream in state.streams:  # the last one's device becomes current
        torch.accelerator.set_stream(stream)


def _without_modes() -> AbstractContextManager[None]:
    """A generator's state has values, also where a mode makes tensors that have none."""
    return _disable_current_modes() if _C._len_torch_dispatch_stack() else nullcontext()


class RandomStream:
    """The state of torch's generators: each forward draws from a stream of its own.

    An activation checkpoint notes the state before its block and draws again from there. Other forwards that draw in
    between, from the same stream, would make the second draw another one.
    """

    def __init__(self, device: torch.device, host: torch.Tensor, on_device: torch.Tensor | None) -> None:
        self.device = device
        self.host = host
        self.on_device = on_device

    @classmethod
    def now(cls, device: torch.device) -> RandomStream:
        with _without_modes():
            on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
            return cls(device, torch.get_rng_state(), on_device)

    def several(self, count: int) -> list[RandomStream]:
        """Streams for so many forwards: this one, and others that it gives by their number."""
        with _without_modes():
            return [self, *(self.derived(number) for number in range(1, count))]

    def derived(self, number: int) -> RandomStream:
        """Another stream, given by this one and a number: the same again for the same two."""
        device = torch.device("cpu") if self.on_device is None else self.device
        state = self.host if self.on_device is None else torch.cat([self.host, self.on_device.cpu()])
        digest = hashlib.blake2b(state.numpy().tobytes() + bytes([number % 256, number // 256]), digest_size=8)
        seed = int.from_bytes(digest.digest(), "little", signed=True)
        host = torch.Generator().manual_seed(seed).get_state()
        on_device = None if self.on_device is None else torch.Generator(device).manual_seed(seed).get_state()
        return RandomStream(self.device, host, on_device)

    def use(self) -> None:
        torch.set_rng_state(self.host)
        if self.on_device is not None:
            torch.get_device_module(self.device).set_rng_state(self.on_device, self.device)
