"""The optimizer's state of all flats: in batches, each one update and one record; and what it comes to in bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from wherry.placement import Tier
from wherry.sharding.unit import Flat
from wherry.tiers.streams import Link
from wherry.update.rules import Groups, Rule
from wherry.update.sizes import BATCH_NUMEL, records_at_once
from wherry.update.state import Batch, FlatState, MakeHome


@dataclass
class StateTier:
    """How the state of one flat is kept: on which tier, and by which rule."""

    tier: Tier
    make_rule: Callable[[], Rule]
    make_home: MakeHome
    apart: bool
    split: bool


class Holdings:
    """The batches, built flat by flat, so that one flat's state above the rest is ever in memory."""

    def __init__(self, groups: Groups, link: Link, tier_of: Callable[[Flat], StateTier]) -> None:
        self._groups = groups
        self._link = link
        self._tier_of = tier_of
        # In the order in which units run.
        self.batches: list[Batch] = []
        self.tiers: dict[Batch, Tier] = {}
        self.state_of: dict[Flat, FlatState] = {}
        # The batch that flats are still added to, and the masters of those.
        self._open: tuple[Batch, StateTier, torch.dtype] | None = None
        self._masters: list[torch.Tensor | None] = []

    def adopt(self, flat: Flat, master: torch.Tensor | None) -> None:
        """Begin to keep state for a flat. `master` is the fp32 shard, None where the working weights are as good."""
        kept = self._tier_of(flat)
        if self._open is not None:
            batch, open_tier, dtype = self._open
            # Of whole shards, padding included: every rank makes the same batches.
            numel = sum(state.flat.layout.shard_numel for state in batch.states) + flat.layout.shard_numel
            if numel > BATCH_NUMEL or dtype != flat.dtype or open_tier != kept or flat.at_rest_on_disk:
                self.complete()
        if self._open is None:
            batch = Batch(kept.make_rule(), self._link, apart=kept.apart, split=kept.split, make_home=kept.make_home)
            self._open = batch, kept, flat.dtype
            self.batches.append(batch)
            self.tiers[batch] = kept.tier
        batch = self._open[0]
        state = FlatState(flat, len(self._groups), batch)
        batch.add(state)
        self.state_of[flat] = state
        self._masters.append(master)
        if flat.at_rest_on_disk:
            self.complete()

    def complete(self) -> None:
        """No flat is added to the last batch any more."""
        if self._open is not None:
            self._open[0].fill(self._groups, self._masters)
        self._open = None
        self._masters = []

    def of(self, flats: Iterable[Flat]) -> list[Batch]:
        """The batches that these flats are in, in the order in which units run."""
        wanted = {self.state_of[flat].batch for flat in flats if flat in self.state_of}
        return [batch for batch in self.batches if batch in wanted]

    # Accounts.

    def nbytes(self) -> dict[Tier, int]:
        """Bytes of state by tier: whole masters or low halves, and moments."""
        total: dict[Tier, int] = {}
        for batch, tier in self.tiers.items():
            total[tier] = total.get(tier, 0) + batch.nbytes + batch.rule.nbytes()
        return total

    def expected_nbytes(self) -> dict[Tier, int]:
        """What the placement comes to, padding of shards included."""
        total: dict[Tier, float] = {}
        for batch, tier in self.tiers.items():
            own = batch.nbytes + batch.rule.nbytes()
            numel = max(1, batch.numel)
            shards = sum(state.flat.layout.shard_numel for state in batch.states)
            total[tier] = total.get(tier, 0.0) + own * max(1.0, shards / numel)
        return {tier: math.ceil(value) for tier, value in total.items()}

    def device_memory(self) -> Iterator[torch.Tensor]:
        """The tensors of state that rests on the device."""
        for batch, tier in self.tiers.items():
            if tier is Tier.DEVICE:
                yield from batch.memory()

    def on_disk(self) -> list[Batch]:
        return [batch for batch in self.batches if batch.on_disk]

    def host_bytes(self) -> int:
        """Host memory that records on disk take at the moment."""
        return sum(batch.in_memory for batch in self.on_disk())

    def expected_host_bytes(self, depth: int) -> int:
        """The most that may be: so many of the largest records as may be in memory at once."""
        return records_at_once((batch.record_nbytes for batch in self.on_disk()), depth)

    def waiting_bytes(self) -> int:
        """Weights that delayed updates have made, in memory of their own until they are published."""
        return sum(weights.nbytes for batch in self.on_disk() for weights in batch.fresh or ())

    def expected_waiting_bytes(self) -> int:
        """What they come to once updates are delayed."""
        spans = (item for batch in self.on_disk() for item in batch.spans)
        return sum((span.stop - span.start) * state.flat.dtype.itemsize for state, span in spans)

    def close(self) -> None:
        with ExitStack() as end:
            for batch in self.batches:
                end.callback(batch.close)
        self.batches.clear()
        self.tiers.clear()
        self.state_of.clear()
