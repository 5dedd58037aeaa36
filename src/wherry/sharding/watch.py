"""What a model's forward leaves behind on its modules: what micro-batches that run together would share by mistake."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from wherry.sharding.attached import Hook

# Kept by torch or by the engine, or written by no forward.
_OURS = {"_parameters", "_buffers", "_modules", "training", "_non_persistent_buffers_set"}
_VALUES = (int, float, str, bytes, bool, complex, type(None))
_CONTAINERS = (list, tuple, set, dict, deque)
# Running statistics are read and written by the layer itself: they come out the same in either order of the units.
_IN_ORDER = nn.modules.batchnorm._NormBase
_LONGEST = 256

Snapshot = dict[tuple[str, str], Any]


class StateWatch:
    """Compares the state of all modules of a model at several moments of a forward.

    Attributes (by identity, plain values by value, containers by their items, objects one level deep) and buffers and
    other tensors (by their version) are looked at, and so is what the user's forward hooks hold. What a forward keeps
    elsewhere, in globals, is not seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.changed: dict[str, None] = {}
        self._last: Snapshot = {}
        # Whatever identities were noted of stays alive until the next look.
        self._kept: list[Any] = []

    def begin(self) -> None:
        """The next look is compared with the state now."""
        self._last, self._kept = self._snapshot()

    def look(self) -> None:
        """Note what has changed since the last look."""
        now, kept = self._snapshot()
        for key in self._last.keys() | now.keys():
            if self._last.get(key) != now.get(key):
                self.changed[".".join(part for part in key if part)] = None
        self._last, self._kept = now, kept

    def end(self) -> None:
        self._last, self._kept = {}, []

    def _snapshot(self) -> tuple[Snapshot, list[Any]]:
        snapshot: Snapshot = {}
        kept: list[Any] = []
        modules = {module: path for path, module in self.model.named_modules()}
        for module, path in modules.items():
            for name, value in module.__dict__.items():
                if name not in _OURS and not name.endswith(("_hooks", "_hooks_with_kwargs", "_always_called")):
                    snapshot[path, name] = _token(value, kept, depth=1)
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                if not isinstance(hook, Hook):
                    held = tuple(_token(value, kept, depth=1) for value in _held_by(hook, modules))
                    snapshot[path, f"forward hook {_name(hook)}"] = held
            if not isinstance(module, _IN_ORDER):
                for name, buffer in module._buffers.items():
                    snapshot[path, name] = _token(buffer, kept, depth=0)
        return snapshot, kept


def _held_by(hook: Any, modules: Container[nn.Module]) -> Iterator[Any]:
    """What a hook can write to: the object it is a method of, its arguments, and what it has closed over.

    `modules` are looked at anyway.
    """
    while isinstance(hook, partial):
        yield from (*hook.args, *hook.keywords.values())
        hook = hook.func
    owner = getattr(hook, "__self__", hook)
    yield vars(owner) if isinstance(owner, nn.Module) and owner not in modules else owner
    for cell in getattr(hook, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that has no value yet
            yield None


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def _token(value: Any, kept: list[Any], depth: int) -> Any:
    """Something that compares equal as long as the value is what it was."""
    if isinstance(value, _VALUES):
        return type(value).__name__, repr(value) if isinstance(value, float | complex) else value
    kept.append(value)
    if isinstance(value, torch.Tensor):
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, _CONTAINERS):
        items = list(value.items()) if isinstance(value, dict) else list(value)
        kept.append(items)
        some = items[:_LONGEST]
        if isinstance(value, dict):
            return id(value), len(items), tuple((id(k), _token(v, kept, 0)) for k, v in some)
        return id(value), len(items), tuple(_token(item, kept, 0) for item in some)
    if depth and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
        return id(value), tuple((name, _token(item, kept, 0)) for name, item in vars(value).items())
    return id(value)
