"""The update of all units: each flat's rule runs on the part this rank owns, and new weights travel at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from wherry.fake import address_of
from wherry.native import Blocks8
from wherry.observe.spans import span
from wherry.sharding.gradients import FlatGradient
from wherry.sharding.unit import Flat
from wherry.sharding.weights import Gatherer
from wherry.tiers.tickets import DONE
from wherry.update.rules import Rule, RuleFactory, Segment

# Flats together up to this many elements are updated in one call: below it, calling costs more than updating.
BATCH_NUMEL = 1 << 18


class FlatState:
    """The optimizer's side of one flat: masters and moments of what this rank owns."""

    def __init__(self, gradient: FlatGradient, master: torch.Tensor, groups: int) -> None:
        flat = gradient.flat
        self.flat = flat
        self.gradient = gradient
        self.master = master
        self.segments = [
            Segment(
                group=span.group,
                start=span.start,
                stop=span.stop,
                master=master[span.start : span.stop],
                working=flat.shard[span.start : span.stop],
                grad=gradient.owned[span.start : span.stop],
                first=flat.layout.shard_range(flat.rank)[0] + span.start,
            )
            for span in flat.layout.segments(flat.rank)
            if span.group < groups  # parameters that the optimizer was not given lie behind its groups
        ]
        # Ranks whose shard is all padding have no segments, and yet take part in the flat's collectives.
        self.updated = any(slot.group < groups for slot in flat.layout.slots)

    @contextmanager
    def opened(self, *, write: bool = False) -> Iterator[list[dict[str, torch.Tensor | Blocks8]]]:
        """The state of each segment, by name: `master` in fp32 and the moments, wherever they rest.

        What is changed inside is kept if `write` is given, names that were added become state, and the working
        weights follow their masters. Tensors are valid inside only.
        """
        shown = [{"master": segment.master, **segment.state} for segment in self.segments]
        yield shown
        if write:
            for segment, values in zip(self.segments, shown, strict=True):
                segment.state = {name: value for name, value in values.items() if name != "master"}
                if not segment.in_place:
                    segment.working.copy_(segment.master)

    @property
    def nbytes(self) -> int:
        """Of masters that are not the working weights, and of all state."""
        own = 0 if address_of(self.master) == address_of(self.flat.shard) else self.master.nbytes
        return own + sum(state.nbytes for segment in self.segments for state in segment.state.values())


@dataclass
class Batch:
    """Flats that one rule updates: one large flat, or small ones that follow each other."""

    states: list[FlatState]
    rule: Rule | None = None

    def fits(self, state: FlatState) -> bool:
        """Whether `state` may join: rules are for one dtype, and small batches keep updates of large flats apart."""
        numel = sum(member.master.numel() for member in self.states) + state.master.numel()
        return numel <= BATCH_NUMEL and self.states[0].master.dtype == state.master.dtype


class Updater:
    """Updates every flat once gradients are complete. (When each is updated is the policy; here: all of them, now.)"""

    def __init__(
        self,
        gradients: list[FlatGradient],
        masters: Mapping[Flat, torch.Tensor],
        make_rule: RuleFactory,
        groups: int,
        gatherer: Gatherer,
    ) -> None:
        self.gatherer = gatherer
        self.states = [
            FlatState(gradient, masters.get(gradient.flat, gradient.flat.shard), groups) for gradient in gradients
        ]
        self.batches: list[Batch] = []
        for state in self.states:
            if self.batches and self.batches[-1].fits(state):
                self.batches[-1].states.append(state)
            else:
                self.batches.append(Batch([state]))
        for batch in self.batches:
            segments = [segment for state in batch.states for segment in state.segments]
            batch.rule = make_rule(segments) if segments else None

    def run(self, groups: list[dict[str, Any]], multiplier: float) -> None:
        """Update every flat with its gradients times `multiplier`; resident flats are whole again when this returns."""
        with span("update"), torch.no_grad():
            updates = [(batch, batch.rule.update(groups, multiplier) if batch.rule else DONE) for batch in self.batches]
            refreshes = []
            for batch, update in updates:
                update.wait()
                for state in batch.states:
                    flat = state.flat
                    if state.updated and flat.resident and flat.layout.ranks > 1:
                        refreshes.append(self.gatherer.comm.all_gather(flat.whole, flat.shard, flat.name))
            for refresh in refreshes:
                refresh.wait()

    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states)

    def expected_nbytes(self) -> int:
        """Master weights, where the working weights are less precise, and moments, for the elements this rank owns."""
        total = 0.0
        for state in self.states:
            per_element = 4.0 if state.flat.dtype.itemsize < 4 else 0.0
            for kept in (kept for segment in state.segments[:1] for kept in segment.state.values()):
                if isinstance(kept, torch.Tensor) and not kept.dim():
                    continue
                per_element += kept.nbytes / max(1, kept.numel())
            total += per_element * state.flat.layout.shard_numel
        return math.ceil(total)

    def close(self) -> None:
        self.states.clear()
        self.batches.clear()
