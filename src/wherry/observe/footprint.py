"""Bytes of all tensors that torch makes, by what they are for, and their highest sum: of real tensors or fake ones."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wherry.fake import is_fake

_DEVICE = torch.ops.prim.device.default
WORKING = "activations"
"""Whatever a forward or backward makes that nobody has given another name."""


class Footprint(TorchDispatchMode):
    """While entered, counts the storages that operations of this thread make, until they are freed.

    A storage counts in the category that `label` gave it, and else as activations. Of storages that are resized no
    operation tells: once they have been, `follow_resized` reads their sizes each time.

    Categories that are `elsewhere`, in another memory, are not part of the sum.

    >>> with Footprint() as footprint:
    ...     x = torch.zeros(100)
    ...     del x
    >>> footprint.peak, footprint.live["activations"]
    (400, 0)
    """

    def __init__(self, elsewhere: Collection[str] = ()) -> None:
        super().__init__()
        self.elsewhere = frozenset(elsewhere)
        self.peak = 0
        # Bytes by category when the sum was highest, and the highest of each category by itself.
        self.at_peak: dict[str, int] = {}
        self.peaks: dict[str, int] = {}
        self._live: dict[str, int] = {WORKING: 0}
        self._entries: dict[int, tuple[str, int, weakref.ref[Any]]] = {}
        # Of storages that are gone. Any thread may have let go of them, and one alone counts.
        self._gone: deque[tuple[str, int]] = deque()
        # By category: storages whose sizes change while they live.
        self._resized: dict[str, dict[int, weakref.ref[Any]]] = {}

    @property
    def live(self) -> dict[str, int]:
        while self._gone:
            category, nbytes = self._gone.popleft()
            self._live[category] -= nbytes
        return self._live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and is_fake(args[0]):
            return args[0].fake_device  # autograd asks it of every tensor, and it makes nothing
        result = func(*args, **(kwargs or {}))
        self._see(result)
        return result

    def _see(self, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self._add(result)
        elif isinstance(result, tuple | list):
            for item in result:
                self._see(item)

    def _add(self, tensor: torch.Tensor, category: str = WORKING) -> None:
        tensor = own_tensor(tensor)
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._entries or any(key in found for found in self._resized.values()):
            return
        nbytes = storage.nbytes()
        if not nbytes:
            return
        self._entries[key] = (category, nbytes, weakref.ref(storage, lambda _: self._free(key)))
        live = self.live
        live[category] = live.get(category, 0) + nbytes
        self.sample()

    def _free(self, key: int) -> None:
        category, nbytes, _ = self._entries.pop(key)
        self._gone.append((category, nbytes))

    def sample(self) -> None:
        """Look at all bytes there are now. New tensors do this by themselves; resized ones do not."""
        now = self.now()
        for category, nbytes in now.items():
            if nbytes > self.peaks.get(category, 0):
                self.peaks[category] = nbytes
        total = self.total(now)
        if total > self.peak:
            self.peak, self.at_peak = total, now

    def total(self, of: Mapping[str, int]) -> int:
        return sum(nbytes for category, nbytes in of.items() if category not in self.elsewhere)

    def now(self) -> dict[str, int]:
        resized = {
            category: sum(storage.nbytes() for reference in found.values() if (storage := reference()) is not None)
            for category, found in self._resized.items()
        }
        return self.live | resized

    def reset(self) -> None:
        """Forget the highest values so far."""
        self.peak, self.at_peak, self.peaks = 0, {}, {}
        self.sample()

    def label(self, category: str, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors count as `category` from now on; those made before the footprint was entered begin to."""
        for tensor in tensors:
            self._add(tensor, category)
            self._move(own_tensor(tensor).untyped_storage()._cdata, category)

    def label_rest(self, category: str) -> None:
        """All that counts as activations now is `category`."""
        for key, (name, _, _) in list(self._entries.items()):
            if name == WORKING:
                self._move(key, category)

    def follow_resized(self, category: str) -> None:
        """Storages that have another size now than when they were made count as `category`, at the size of the time."""
        found = self._resized.setdefault(category, {})
        for key, (_, nbytes, reference) in list(self._entries.items()):
            storage = reference()
            if storage is not None and storage.nbytes() != nbytes:
                self._free(key)
                found[key] = weakref.ref(storage, partial(_forget, found, key))

    def _move(self, key: int, category: str) -> None:
        if key not in self._entries:
            return
        name, nbytes, reference = self._entries[key]
        self._entries[key] = (category, nbytes, reference)
        live = self.live
        live[name] -= nbytes
        live[category] = live.get(category, 0) + nbytes


def _forget(found: dict[int, Any], key: int, _: Any) -> None:
    found.pop(key, None)


def own_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that has the memory: of one that ranks share out, this rank's part."""
    own: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return own
