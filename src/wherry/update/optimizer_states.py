"""The optimizer's state of all flats: masters and moments of what this rank owns, in buckets that are updated together.

A bucket's state is one record, which rests on one tier, and which an update fetches, changes and stores.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from wherry import native
from wherry.fake import address_of
from wherry.placement import Tier
from wherry.sharding.gradients import FlatGradient
from wherry.sharding.layout import SegmentSpan
from wherry.sharding.unit import Flat
from wherry.tiers.homes import Home, opened
from wherry.tiers.streams import Link
from wherry.tiers.tickets import DONE, Ticket
from wherry.update.record import Field, RecordLayout, State
from wherry.update.rules import Group, Groups, UpdateRule, UpdateSegment
from wherry.update.sizes import BUCKET_NUMEL, records_at_once

# What an update of an element reads besides its moments, by name.
WEIGHTS = ("working", "low", "master")

# Parameters that no rank has a gradient for, by their place in the flat.
Absent = Mapping[Flat, Collection[int]]


@dataclass(frozen=True)
class StateTier:
    """How the state of a flat is kept: on which tier, updated by the host's kernels or the device's.

    `apart` says that its record has a copy of the working weights, because the flat's own are out of the update's reach
    (on the device), or must not change yet (a delayed update). `split` asks for masters whose upper half these are.
    """

    tier: Tier
    on_host: bool
    apart: bool
    split: bool


class StateHomes(Protocol):
    """What knows where optimizer state rests: the placement table put to work."""

    link: Link

    def state_tier(self, flat: Flat) -> StateTier: ...

    def make_rule(self, kept: StateTier) -> UpdateRule: ...

    def make_home(self, tier: Tier, name: str, nbytes: int, untouched: int) -> Home:
        """A new one of so many bytes, of which `untouched` stay the zeros that they are until the first update."""


class FlatState:
    """What the optimizer knows about one flat."""

    def __init__(self, flat: Flat, groups: int, bucket: UpdateBucket) -> None:
        self.flat = flat
        self.bucket = bucket
        # Parameters that the optimizer was not given lie behind its groups.
        self.segments = [span for span in flat.layout.segments(flat.rank) if span.group < groups]
        known = [slot.group < groups for slot in flat.layout.slots]
        # Ranks whose shard is all padding have no segments, and yet take part in the flat's collectives.
        self.updated = any(known)
        # The updates that each parameter of the flat has had: one that no rank has a gradient for is left alone.
        self.steps = [0] * len(known)
        # The first of the bucket's segments that is this flat's.
        self.first = 0

    @property
    def rule(self) -> UpdateRule:
        return self.bucket.rule

    def begin_again(self, group: Group, values: dict[str, State], name: str) -> None:
        """Let a moment, among the `values` of a segment that is opened, be as before the parameter's first update."""
        value = values.get(name)
        if name not in {field.name for field in self.rule.fields(group, 1)}:
            values.pop(name, None)
        elif isinstance(value, native.Blocks8):
            value.codes.zero_()
            value.scales.zero_()
        elif value is not None:
            value.zero_()
        if name in values:
            self.rule.begin(group, {name: values[name]})

    @contextmanager
    def opened(self, *, write: bool = False) -> Iterator[list[dict[str, State]]]:
        """The state of each segment, by name: `master` in fp32 and the moments, wherever they rest.

        What is changed inside is kept if `write` is given, names that were added become state, and the working
        weights follow their masters. Tensors are valid inside only.
        """
        with self.bucket.opened(self if write else None) as views:
            yield views[self.first : self.first + len(self.segments)]


class UpdateBucket:
    """Flats that one rule updates, and whose state is one record: a large one, or small ones that follow each other."""

    def __init__(self, kept: StateTier, homes: StateHomes) -> None:
        self.tier = kept.tier
        self.apart = kept.apart
        self.rule = homes.make_rule(kept)
        self.split = kept.split and self.rule.splits
        self.link = homes.link
        # Whether its updates are kernels of the device, queued by whoever asks for them.
        self.on_device = kept.tier is Tier.DEVICE and not homes.link.shared
        self.states: list[FlatState] = []
        # Those of the states' flats.
        self.gradients: list[FlatGradient] = []
        self.spans: list[tuple[FlatState, SegmentSpan]] = []
        self._homes = homes
        self._layout: RecordLayout | None = None
        # Where the record rests; None where there is none, as rules of torch's keep their state themselves.
        self.home: Home | None = None
        # New weights of a delayed update, of each segment, until they are published: the flats have those before it.
        self.fresh: list[torch.Tensor] | None = None
        self._bound: list[UpdateSegment] | None = None
        # Where the flats' weights were then. Who sends a parameter to another process moves them to shared memory.
        self._places: list[int] = []

    @property
    def name(self) -> str:
        return self.states[0].flat.name if len(self.states) == 1 else f"{self.states[0].flat.name} and others"

    @property
    def numel(self) -> int:
        return sum(span.stop - span.start for _, span in self.spans)

    def add(self, flat: Flat, groups: int) -> FlatState:
        state = FlatState(flat, groups, self)
        state.first = len(self.spans)
        self.states.append(state)
        self.spans += [(state, span) for span in state.segments]
        return state

    # The record.

    def _weight_fields(self, dtype: torch.dtype, numel: int) -> list[Field]:
        fields = [Field("working", dtype, numel)] if self.apart else []
        if dtype.itemsize < torch.float32.itemsize:
            split = self.split and dtype is torch.bfloat16
            fields.append(Field("low", torch.int16, numel) if split else Field("master", torch.float32, numel))
        return fields

    @torch.no_grad()
    def fill(self, groups: Groups, masters: Sequence[torch.Tensor | None]) -> None:
        """Make the record, from the fp32 masters of the states' flats, None where the working weights are as good."""
        segments = []
        for state, span in self.spans:
            numel = span.stop - span.start
            segments.append(self._weight_fields(state.flat.dtype, numel) + self.rule.fields(groups[span.group], numel))
        self._layout = RecordLayout(segments)
        if not self._layout.nbytes:
            return
        self.home = self._homes.make_home(self.tier, self.name, self._layout.nbytes, self._untouched(groups))
        master_of = dict(zip(self.states, masters, strict=True))
        memory = self.home.blank(zeros=True)
        for (state, span), views in zip(self.spans, self._layout.views(memory), strict=True):
            self.rule.begin(groups[span.group], _moments(views))
            master = master_of[state]
            with state.flat.opened(write=True) as shard:
                own = shard[span.start : span.stop]
                _set_master(views, own, own if master is None else master[span.start : span.stop])
        self.home.store().wait()
        self.home.leave()

    def _untouched(self, groups: Groups) -> int:
        """Bytes of the new record that nothing is written to: moments that begin as zeros."""
        assert self._layout is not None
        return sum(
            field.nbytes
            for (_, span), fields in zip(self.spans, self._layout.fields, strict=True)
            if self.rule.begins_with_zeros(groups[span.group])
            for field, _ in fields
            if field.name not in WEIGHTS
        )

    @property
    def on_disk(self) -> bool:
        return self.home is not None and self.home.on_disk

    @property
    def nbytes(self) -> int:
        """Of the state, wherever it is; without what aligns a record's fields, as that is a matter of the layout."""
        return (self._layout.payload if self._layout is not None else 0) + self.rule.nbytes()

    @property
    def record_nbytes(self) -> int:
        """As much as it takes in memory."""
        return self._layout.nbytes if self._layout is not None else 0

    @property
    def in_memory(self) -> int:
        return (self.home.in_memory if self.home is not None else 0) + self.rule.nbytes()

    def memory(self) -> Iterator[torch.Tensor]:
        """What holds the state, where it rests in memory."""
        if self.home is not None and not self.home.on_disk:
            yield self.home.memory
        for kept in self.rule.kept():
            yield from (value for value in kept.values() if value.dim())

    # The update.

    @property
    def steps(self) -> list[int]:
        """Of each segment the updates that its parameter has had."""
        return [state.steps[span.slot] for state, span in self.spans]

    def update(
        self,
        groups: Groups,
        multiplier: float,
        absent: Absent | None = None,
        aside: Sequence[torch.Tensor] | None = None,
    ) -> Ticket:
        """Begin the update, with the states' gradients or with those set aside; `absent` ones are left alone.

        Record and weights have been fetched, and gradients have arrived.
        """
        for state in self.states:
            if state.flat.reader is not DONE:
                state.flat.quiet()
            gone = absent.get(state.flat, ()) if absent else ()
            for slot in range(len(state.steps)):
                state.steps[slot] += slot not in gone
        if not self.spans:
            return DONE
        places = [address_of(state.flat.whole) for state in self.states]
        if places != self._places:
            self._bound = None
            self._places = places
        segments = self._bound
        if segments is None or aside is not None:
            grads = aside or [gradient.owned for gradient in self.gradients]
            grad_of = dict(zip(self.states, grads, strict=True))
            segments = self._segments(self._views())
            for segment, (state, span) in zip(segments, self.spans, strict=True):
                segment.grad = grad_of[state][span.start : span.stop]
            if aside is None and self.in_place and all(gradient.steady for gradient in self.gradients):
                self._bound = segments
        if absent:
            segments = [
                replace(segment, grad=None) if span.slot in absent.get(state.flat, ()) else segment
                for segment, (state, span) in zip(segments, self.spans, strict=True)
            ]
        return self.rule.update(segments, self.steps, groups, multiplier)

    @property
    def in_place(self) -> bool:
        """Whether weights and state are in the same memory in every step."""
        return not self.on_disk and (self.apart or not any(state.flat.at_rest_on_disk for state in self.states))

    def working(self) -> list[torch.Tensor]:
        """The working weights of each segment that the record holds."""
        return [fields["working"] for fields in self._views()]  # type: ignore[misc]

    def publish(self, fence: Ticket) -> list[Ticket]:
        """Send working weights, those of the record or fresh ones, to where flats have theirs."""
        parts = iter(self.working() if self.fresh is None else self.fresh)
        self.fresh = None
        tickets = []
        for state in self.states:
            if state.flat.reader is not DONE:
                state.flat.quiet()
            if state.flat.home is None:
                shard = state.flat.shard_memory
                tickets += [
                    self.link.up(shard[span.start : span.stop], next(parts), after=fence) for span in state.segments
                ]
                continue
            with state.flat.opened(write=True) as shard:
                for span in state.segments:
                    shard[span.start : span.stop].copy_(next(parts))
        return tickets

    def forget(self) -> None:
        """Let go of memory that is only borrowed for an update: it is about to be given back, or to move."""
        self._bound = None
        self.rule.forget()

    def detach(self) -> None:
        """Its gradients go, and nothing of them is kept."""
        self.gradients = []
        self.forget()

    def _views(self) -> list[dict[str, State]]:
        assert self._layout is not None
        return self._layout.views(self.home.memory) if self.home is not None else [{} for _ in self.spans]

    def _segments(self, fields: list[dict[str, State]]) -> list[UpdateSegment]:
        segments = []
        for (state, span), views in zip(self.spans, fields, strict=True):
            flat = state.flat
            working = views["working"] if self.apart else flat.shard_memory[span.start : span.stop]
            segments.append(
                UpdateSegment(
                    group=span.group,
                    working=working,  # type: ignore[arg-type]
                    master=views.get("master"),  # type: ignore[arg-type]
                    low=views.get("low"),  # type: ignore[arg-type]
                    state=_moments(views),
                    first=flat.layout.shard_range(flat.rank)[0] + span.start,
                )
            )
        return segments

    @contextmanager
    @torch.no_grad()
    def opened(self, changed: FlatState | None) -> Iterator[list[dict[str, State]]]:
        """Of each segment `master` and moments; see `FlatState.opened`.

        What is kept is of the flat that is `changed`: weights of the others may be in an edit of their own.
        """
        assert self.fresh is None, f"{self.name}: its update is yet to be published"
        write = changed is not None
        for state in self.states if write else ():
            state.flat.quiet()
        with ExitStack() as stack:
            if self.home is not None:
                stack.enter_context(opened(self.home, write=write))
            fields = self._views()
            shards = {state: stack.enter_context(state.flat.opened(write=write)) for state in self.states}
            owns = [shards[state][span.start : span.stop] for state, span in self.spans]
            kept = self.rule.kept() or [{} for _ in self.spans]
            shown = [
                {"master": _join(views, views.get("working", own)), **_moments(views), **moments}
                for views, own, moments in zip(fields, owns, kept, strict=True)
            ]
            yield shown
            if write:
                for (state, _), views, own, after in zip(self.spans, fields, owns, shown, strict=True):
                    if state is changed:
                        _set_master(views, own, after["master"])  # type: ignore[arg-type]
                        _replace(_moments(views), after)
                self.rule.load_kept(self._segments(fields), self.steps, [_moments(after) for after in shown])

    # For checkpoints.

    def widths(self) -> list[float]:
        """Bytes of an element of each segment, as `opened` shows its master and moments."""
        assert self._layout is not None
        kept = self.rule.kept() or [{} for _ in self.spans]
        found = []
        for (state, _), fields, own in zip(self.spans, self._layout.fields, kept, strict=True):
            width = {field.name: field.payload / max(1, field.numel) for field, _ in fields}
            whole = 4.0 if "low" in width else width.get("master", float(state.flat.dtype.itemsize))
            moments = sum(value for name, value in width.items() if name not in WEIGHTS)
            found.append(whole + moments + sum(value.element_size() for value in own.values() if value.dim()))
        return found

    def close(self) -> None:
        self.detach()
        self.fresh = None
        if self.home is not None:
            self.home.close()
            self.home = None
        self.states.clear()
        self.spans.clear()


def _moments(views: dict[str, State]) -> dict[str, State]:
    return {name: value for name, value in views.items() if name not in WEIGHTS}


def _replace(moments: dict[str, State], after: dict[str, State]) -> None:
    """Copy in what was put in the place of a moment."""
    for name, kept in moments.items():
        given = after[name]
        if given is kept:
            continue
        if isinstance(kept, native.Blocks8):
            assert isinstance(given, native.Blocks8), name
            kept.codes.copy_(given.codes)
            kept.scales.copy_(given.scales)
        else:
            kept.copy_(given)  # type: ignore[arg-type]


def _join(views: dict[str, State], working: State) -> torch.Tensor:
    """The fp32 master: a copy where it is split, or rests somewhere that may not be kept."""
    assert isinstance(working, torch.Tensor)
    if "low" in views:
        master = torch.empty(working.numel(), dtype=torch.float32)
        native.join(working, views["low"], master)  # type: ignore[arg-type]
        return master
    return views.get("master", working)  # type: ignore[return-value]


def _set_master(views: dict[str, State], own: torch.Tensor, master: torch.Tensor) -> None:
    """Let the master be `master`, and the working weights, `own` and those in the record, what it rounds to."""
    if "low" in views:
        high = torch.empty(own.numel(), dtype=torch.bfloat16)
        native.split(master.to("cpu", torch.float32).contiguous(), high, views["low"])  # type: ignore[arg-type]
        own.copy_(high)
        if "working" in views:
            views["working"].copy_(high)  # type: ignore[union-attr]
        return
    if "master" in views and views["master"] is not master:
        views["master"].copy_(master)  # type: ignore[union-attr]
    if address_of(own) != address_of(master):
        own.copy_(master)
    if "working" in views:
        views["working"].copy_(own)  # type: ignore[union-attr]


class OptimizerStates:
    """The buckets, built flat by flat, so that one flat's state above the rest is ever in memory."""

    def __init__(self, groups: Groups, homes: StateHomes) -> None:
        self._groups = groups
        self._homes = homes
        # In the order in which units run.
        self.buckets: list[UpdateBucket] = []
        self.state_of: dict[Flat, FlatState] = {}
        # The bucket that flats are still added to, how they are kept, and their masters.
        self._open: tuple[UpdateBucket, StateTier, torch.dtype] | None = None
        self._masters: list[torch.Tensor | None] = []

    def adopt(self, flat: Flat, master: torch.Tensor | None) -> None:
        """Begin to keep state for a flat. `master` is the fp32 shard, None where the working weights are as good."""
        kept = self._homes.state_tier(flat)
        if self._open is not None:
            bucket, open_tier, dtype = self._open
            # Of whole shards, padding included: every rank makes the same buckets.
            numel = sum(state.flat.layout.shard_numel for state in bucket.states) + flat.layout.shard_numel
            if numel > BUCKET_NUMEL or dtype != flat.dtype or open_tier != kept or flat.at_rest_on_disk:
                self.complete()
        if self._open is None:
            self._open = UpdateBucket(kept, self._homes), kept, flat.dtype
            self.buckets.append(self._open[0])
        bucket = self._open[0]
        self.state_of[flat] = bucket.add(flat, len(self._groups))
        self._masters.append(master)
        if flat.at_rest_on_disk:
            self.complete()

    def complete(self) -> None:
        """No flat is added to the last bucket any more."""
        if self._open is not None:
            self._open[0].fill(self._groups, self._masters)
        self._open = None
        self._masters = []

    def of(self, flats: Iterable[Flat]) -> list[UpdateBucket]:
        """The buckets that these flats are in, in the order in which units run."""
        wanted = {self.state_of[flat].bucket for flat in flats if flat in self.state_of}
        return [bucket for bucket in self.buckets if bucket in wanted]

    # Accounts.

    def nbytes(self) -> dict[Tier, int]:
        """Bytes of state by tier: whole masters or low halves, and moments."""
        total: dict[Tier, int] = {}
        for bucket in self.buckets:
            total[bucket.tier] = total.get(bucket.tier, 0) + bucket.nbytes
        return total

    def expected_nbytes(self) -> dict[Tier, int]:
        """What the placement comes to, padding of shards included."""
        total: dict[Tier, float] = {}
        for bucket in self.buckets:
            shards = sum(state.flat.layout.shard_numel for state in bucket.states)
            padded = bucket.nbytes * max(1.0, shards / max(1, bucket.numel))
            total[bucket.tier] = total.get(bucket.tier, 0.0) + padded
        return {tier: math.ceil(value) for tier, value in total.items()}

    def device_memory(self) -> Iterator[torch.Tensor]:
        """The tensors of state that rests on the device."""
        for bucket in self.buckets:
            if bucket.tier is Tier.DEVICE:
                yield from bucket.memory()

    def on_disk(self) -> list[UpdateBucket]:
        return [bucket for bucket in self.buckets if bucket.on_disk]

    def host_bytes(self) -> int:
        """Host memory that records on disk take at the moment."""
        return sum(bucket.in_memory for bucket in self.on_disk())

    def expected_host_bytes(self, depth: int) -> int:
        """The most that may be: so many of the largest records as may be in memory at once."""
        return records_at_once((bucket.record_nbytes for bucket in self.on_disk()), depth)

    def waiting_bytes(self) -> int:
        """Weights that delayed updates have made, in memory of their own until they are published."""
        return sum(weights.nbytes for bucket in self.on_disk() for weights in bucket.fresh or ())

    def expected_waiting_bytes(self) -> int:
        """What they come to once updates are delayed."""
        spans = (item for bucket in self.on_disk() for item in bucket.spans)
        return sum((span.stop - span.start) * state.flat.dtype.itemsize for state, span in spans)

    def close(self) -> None:
        with ExitStack() as end:
            for bucket in self.buckets:
                end.callback(bucket.close)
        self.buckets.clear()
        self.state_of.clear()
