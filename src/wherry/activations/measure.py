"""Measuring what a unit's activations cost: the time of its forward, and the bytes that it saves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from wherry.activations.policy import Cost, Speeds
from wherry.activations.stores import Store

# The size of the transfer that the speed of a store is taken from.
PROBE = 16 << 20

Mark = Any


class Meter:
    """Counts what is saved inside `watching`, and times it; the numbers are there once the device has caught up."""

    def __init__(self, device: torch.device, weights: Callable[[], set[int]]) -> None:
        self.device = device
        self._weights = weights
        self._spans: dict[int, tuple[Mark, Mark]] = {}
        self._saved: dict[int, int] = {}
        self._inputs: dict[int, int] = {}

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def watching(self, place: int, inputs: int) -> Iterator[None]:
        """Around the forward of unit `place`, inside whatever hooks autograd's saved tensors go through."""
        storages: dict[int, int] = {}
        weights = self._weights()
        above = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def pack(tensor: torch.Tensor) -> Any:
            if not is_strange(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in weights:
                    storages[storage._cdata] = storage.nbytes()
            return above[0](tensor) if above is not None else tensor

        def unpack(saved: Any) -> torch.Tensor:
            return above[1](saved) if above is not None else saved

        begin = self._mark()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        # A unit that runs more than once in a forward counts as often.
        self._spans[place] = begin, self._mark()
        self._saved[place] = self._saved.get(place, 0) + sum(storages.values())
        self._inputs[place] = self._inputs.get(place, 0) + inputs

    def costs(self, units: int) -> list[Cost]:
        return [
            Cost(self._seconds(place), self._saved.get(place, 0), self._inputs.get(place, 0)) for place in range(units)
        ]

    def _seconds(self, place: int) -> float:
        if place not in self._spans:
            return 0.0
        begin, end = self._spans[place]
        if isinstance(begin, float):
            return end - begin
        end.synchronize()
        return begin.elapsed_time(end) / 1000


def is_strange(tensor: torch.Tensor) -> bool:
    """Whether it has no storage of its own to look at."""
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided


def speeds_of(store: Store | None, device: torch.device) -> Speeds:
    """How fast a store takes and gives back: the mean of both, from one round trip after a first."""
    if store is None:
        return Speeds()
    data = torch.zeros(PROBE, dtype=torch.uint8, device=device)
    seconds = 0.0
    for _ in range(2):
        _synchronize(device)
        begin = time.perf_counter()
        store.put(data).take()
        _synchronize(device)
        seconds = time.perf_counter() - begin
    speed = 2 * PROBE / max(seconds, 1e-6)
    return Speeds(speed, speed)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
