"""`auto`: the bytes that each unit saves, counted in the first step, and as few units recomputed as must be."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from wherry.parallel.comm import Comm


class Policy(enum.Enum):
    """What becomes of what a unit's forward saves."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


def choose(saved: Sequence[int], checkpoints: Sequence[int], memory: int) -> list[Policy]:
    """Keep what units save, of the last one first, as long as it fits in `memory` beside the others' checkpoints.

    The last units' activations are wanted back first: what they take is free again when earlier ones are recomputed.

    >>> choose([100, 100, 100], [10, 10, 10], 210)
    [<Policy.RECOMPUTE: 'recompute'>, <Policy.KEEP: 'keep'>, <Policy.KEEP: 'keep'>]
    """
    policies = [Policy.RECOMPUTE] * len(saved)
    taken = sum(checkpoints)
    for place in reversed(range(len(saved))):
        more = saved[place] - checkpoints[place]
        if taken + more <= memory:
            policies[place] = Policy.KEEP
            taken += more
    return policies


class SavedBytes:
    """What autograd saves of each unit, and what a checkpoint of it takes: its inputs."""

    def __init__(self, units: int, weights: Callable[[], set[int]]) -> None:
        self._weights = weights
        self._saved = [0] * units
        self._inputs = [0] * units

    @contextmanager
    def counting(self, place: int, inputs: Iterable[Any]) -> Iterator[None]:
        """Around the forward of unit `place`, inside whatever hooks autograd's saved tensors go through."""
        storages: dict[int, int] = {}
        weights = self._weights()
        above = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def pack(tensor: torch.Tensor) -> Any:
            if not is_strange(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in weights:
                    storages[storage._cdata] = storage.nbytes()
            if above is not None:
                return above[0](tensor)
            return tensor if tensor.grad_fn is None else tensor.detach()  # as `SavedWeights.pack`

        def unpack(saved: Any) -> torch.Tensor:
            return above[1](saved) if above is not None else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        # A unit that runs more than once in a forward counts as often.
        self._saved[place] += sum(storages.values())
        self._inputs[place] += sum(t.nbytes for t in inputs if isinstance(t, torch.Tensor) and not is_strange(t))

    def decide(self, memory: int, comms: Sequence[Comm], *, checkpoints_stay: bool) -> tuple[list[Policy], int]:
        """A policy for each unit, and the bytes that may stay: the same on all ranks that hold these units."""
        saved, inputs = self._saved, self._inputs
        for comm in comms:
            for other_saved, other_inputs, other_memory in comm.gather_objects((saved, inputs, memory)):
                saved, inputs = list(map(max, saved, other_saved)), list(map(max, inputs, other_inputs))
                memory = min(memory, other_memory)
        return choose(saved, inputs if checkpoints_stay else [0] * len(inputs), memory), memory


def is_strange(tensor: torch.Tensor) -> bool:
    """Whether it has no storage of its own to look at."""
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided
