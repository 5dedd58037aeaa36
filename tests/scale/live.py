"""Count the bytes of all live storages after every operation."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Track the storages that operations return; `peak` is the most bytes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    @property
    def live(self) -> int:
        # Sizes change: a flat's storage is emptied and grows again.
        return sum(storage.nbytes() for known in list(self._known.values()) if (storage := known()) is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                storage = value.untyped_storage()
                key = storage._cdata
                if key not in self._known or self._known[key]() is None:
                    self._known[key] = weakref.ref(storage)
        self.peak = max(self.peak, self.live)
        return result
