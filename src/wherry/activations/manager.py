"""An engine's activations: which policy each unit has, and the unit's forward wrapped to follow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from wherry.activations.auto import Policy, SavedBytes, is_strange
from wherry.activations.kv_caches import KeyValueCaches
from wherry.activations.partition import CheckpointPartition
from wherry.activations.recompute import Anew, ContextPair, inside, operations, recomputed, running, selective
from wherry.activations.saving import Beneath, Saver
from wherry.activations.stores import Store
from wherry.nn.stand_in import StandIn
from wherry.observe.log import get_logger
from wherry.observe.spans import Spans
from wherry.parallel.topology import Topology
from wherry.sharding.autograd import NO_TASK, backward_task
from wherry.sharding.unit import Unit

if TYPE_CHECKING:
    from wherry.config.blocks import ActivationCheckpointing

T = TypeVar("T")

# Forwards between two accounts of `profile`.
TELL_EVERY = 10


class Activations:
    """Wraps the units' forwards as the config says, and unwraps them at the end."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        block: ActivationCheckpointing,
        beneath: Beneath,
        topology: Topology,
        *,
        gather: Callable[[Unit], None],
        free_bytes: Callable[[], int],
        store: Store | None = None,
        partition: CheckpointPartition | None = None,
    ) -> None:
        self.units = [unit for unit in units if not unit.root]
        self.block = block
        self.topology = topology
        self.device = topology.device
        self.store = store
        self._forwards = 0
        self._recomputations = 0
        self._save_operations = operations(block.save_operations)
        self._gather = gather
        self._free_bytes = free_bytes
        self._all = list(units)
        self._saver: Saver | None = None
        if store is not None or partition is not None:
            smallest = block.offload_min_bytes if store is not None else 1
            self._saver = Saver(
                store, beneath, smallest=smallest, partition=partition, weights=self._weights, device=self.device
            )
        self._log = get_logger(topology.global_rank)
        self._spans = Spans(wall_clock=block.profile, synchronize=self._synchronize if block.profile else None)
        self._counts: SavedBytes | None = None
        self.policies = self._first_policies()
        self._wrapped: list[StandIn] = []
        self._caches = KeyValueCaches(model) if Policy.RECOMPUTE in self.policies else None
        if any(policy is not Policy.KEEP for policy in self.policies):
            self._wrap()

    # Installation.

    def _first_policies(self) -> list[Policy]:
        count, policy = len(self.units), self.block.resolved_policy()
        if policy == "recompute":
            return [Policy.RECOMPUTE if place % self.block.every == 0 else Policy.KEEP for place in range(count)]
        if policy == "offload" and self.store is not None:
            return [Policy.OFFLOAD] * count
        if policy == "auto":
            # Counted while the least memory is used.
            self._counts = SavedBytes(count, self._weight_storages)
            return [Policy.RECOMPUTE] * count
        return [Policy.KEEP] * count

    def _wrap(self) -> None:
        for place, unit in enumerate(self.units):
            self._wrapped += [StandIn(module, "forward", partial(self.run, place)) for module in unit.modules]

    def close(self) -> None:
        """The model's forwards are its own again, and nothing is held."""
        for wrapper in self._wrapped:
            wrapper.remove()
        self._wrapped.clear()
        if self._caches is not None:
            self._caches.turn(on=True)
            self._caches = None
        self.units = self._all = []
        if self.store is not None:
            self.store.close()

    # A forward.

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward of the whole model."""
        token = running.set(self)
        try:
            yield
        finally:
            running.reset(token)
            if self._caches is not None:
                self._caches.turn(on=True)

    def begin(self) -> None:
        """A forward of the whole model begins, on all ranks."""
        self._forwards += 1
        if self.block.profile and self._forwards % TELL_EVERY == 0:
            self._log.info("activations of %d forwards: %s", TELL_EVERY, self._spans.breakdown())
        if self._saver is not None:
            self._saver.begin()
        if self._caches is not None:
            self._caches.turn(on=not torch.is_grad_enabled())
        if self._counts is not None and self._recomputations and torch.is_grad_enabled():
            self._decide(self._counts)

    def run(self, place: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A unit's forward, by its policy."""
        if not torch.is_grad_enabled() or inside.get():
            return forward(*args, **kwargs)
        policy = self.policies[place]
        if policy is Policy.RECOMPUTE:
            unit = self.units[place]
            assert self._caches is not None
            self._caches.refuse(unit.name, args, kwargs)
            return self._recomputed(unit.name, self._counted(place, forward), args, kwargs, unit)
        if policy is Policy.OFFLOAD:
            assert self._saver is not None
            with self._saver.hooks():
                return forward(*args, **kwargs)
        return forward(*args, **kwargs)

    def checkpointed(self, name: str, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        """A checkpoint that the model's own code asks for."""
        return self._recomputed(name, fn, args, kwargs, None)

    def _recomputed(
        self, name: str, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any], unit: Unit | None
    ) -> T:
        if self.block.synchronize_checkpoint_boundary:
            self._synchronize()

        def contexts() -> ContextPair:
            first, second = selective(self._save_operations)
            return first, Anew(partial(self._again, name, unit, second))

        saving = self._saver.hooks(checkpoint=name) if self._saver is not None else None
        with self._spans(f"wherry::checkpoint ({name})"):
            return recomputed(fn, args, kwargs, contexts=contexts, saving=saving)

    @contextmanager
    def _again(self, name: str, unit: Unit | None, kept: AbstractContextManager[Any]) -> Iterator[None]:
        """Around a recomputation, in backward, which takes results that were `kept` from there."""
        self._recomputations += 1
        if self.block.synchronize_checkpoint_boundary:
            self._synchronize()
        with self._spans(f"wherry::recompute ({name})"):
            if unit is not None:
                self._gather(unit)
            with kept:
                yield

    # `auto`.

    def _counted(self, place: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The unit's forward; the first time, what it saves is counted."""
        counts = self._counts
        if counts is None:
            return forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            if backward_task() != NO_TASK:
                return forward(*args, **kwargs)
            with counts.counting(place, (*args, *kwargs.values())):
                return forward(*args, **kwargs)

        return counted

    def _decide(self, counts: SavedBytes) -> None:
        """After the first step: what units save is known, and what is free now that every state has its place."""
        self._counts = None
        self.policies, memory = counts.decide(
            self._free_bytes() if self.block.memory is None else self.block.memory,
            (self.topology.data, self.topology.tensor),
            checkpoints_stay=self._saver is None,
        )
        kept = self.policies.count(Policy.KEEP)
        told = f"{kept} kept, {len(self.policies) - kept} recomputed; {memory / 1e9:.3g} GB may stay"
        self._log.info("activations of %d units: %s", len(self.policies), told)

    # Small things.

    def _weights(self) -> Iterator[torch.Tensor]:
        """Tensors that are there for longer than a step: they are never put away."""
        for unit in self._all:
            yield from (flat.whole for flat in unit.flats)
        for unit in self.units:
            for module in unit.modules:
                yield from (buffer for buffer in module.buffers() if not is_strange(buffer))

    def _weight_storages(self) -> set[int]:
        return {weight.untyped_storage()._cdata for weight in self._weights()}

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
