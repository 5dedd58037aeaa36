"""The optimizer's state of all flats: masters and moments of what this rank owns, in buckets that are updated together.

A bucket's state is one record, which rests on one tier, and which an update fetches, changes and stores.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from wherry import native
from wherry.fake import address_of, is_fake
from wherry.placement import Tier
from wherry.sharding.flat_gradient import FlatGradient
from wherry.sharding.layout import SegmentSpan
from wherry.sharding.unit import Flat
from wherry.tickets import DONE, Ticket
from wherry.tiers.storage import Storage, opened
from wherry.tiers.streams import Link
from wherry.update.record import Field, RecordLayout, State
from wherry.update.rules import Group, Groups, Shape, UpdateRule, UpdateSegment
from wherry.update.streamed import NEAR, StreamedUpdates

# Flats together up to this many elements are updated in one call: below it, calling costs more than updating.
BUCKET_NUMEL = 1 << 18
# Weights that go elsewhere once they are updated do so in pieces of as many elements, while the next one is updated.
PIECE_NUMEL = 1 << 24
# And what is updated on the device, of which three pieces are there at a time.
STREAMED_NUMEL = 1 << 22
# What an update of an element reads besides its moments, by name.
WEIGHTS = ("working", "low", "master")

# Parameters that no rank has a gradient for, by their place in the flat.
Absent = Mapping[Flat, Collection[int]]


@dataclass(frozen=True)
class StateTier:
    """How the state of a flat is kept: on which tier, updated by the host's kernels or the device's.

    `streamed`: by the device's, though it rests elsewhere. `apart` says that its record has a copy of the working
    weights, because the flat's own are out of the update's reach (on the device), or must not change yet (a delayed
    update). `split` asks for masters whose upper half these are; without `masters` weights of 16 bits are updated.
    """

    tier: Tier
    on_host: bool
    apart: bool
    split: bool
    masters: bool = True
    streamed: bool = False


class StateStorages(Protocol):
    """What knows where optimizer state rests: the placement table put to work."""

    link: Link
    # What updates go through that are made on the device, of state that is not there.
    streamed: StreamedUpdates

    def state_tier(self, flat: Flat) -> StateTier: ...

    def make_rule(self, kept: StateTier) -> UpdateRule: ...

    def make_storage(self, tier: Tier, name: str, nbytes: int) -> Storage:
        """A new one of so many bytes."""


def record_fields(kept: StateTier, rule: UpdateRule, group: Group, dtype: torch.dtype, shape: Shape) -> list[Field]:
    """What the record has of a parameter of that shape, or of so many elements of one: weights, and moments unless the
    rule keeps them itself."""
    numel = math.prod(shape)
    fields = [Field("working", dtype, numel)] if kept.apart else []
    if kept.masters and dtype.itemsize < torch.float32.itemsize:
        split = kept.split and rule.splits and dtype is torch.bfloat16
        fields.append(Field("low", torch.int16, numel) if split else Field("master", torch.float32, numel))
    updated = torch.promote_types(dtype, torch.float32) if kept.masters else dtype
    return fields + rule.fields(group, shape, updated)


@dataclass(frozen=True)
class UpdatePiece:
    """Segments that are updated in one call, and of which flat each is, and where."""

    segments: list[UpdateSegment]
    places: list[tuple[FlatState, SegmentSpan]]


def _without(piece: UpdatePiece, absent: Absent) -> UpdatePiece:
    """The piece, with no gradients of those that are absent."""
    gone = [span.slot in absent.get(state.flat, ()) for state, span in piece.places]
    if not any(gone):
        return piece
    found = [
        replace(segment, grad=None) if left else segment for left, segment in zip(gone, piece.segments, strict=True)
    ]
    return UpdatePiece(found, piece.places)


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
        # A digest of its weights as the last update left them, where the record has masters that overwrite them.
        self._digest: torch.Tensor | None = None

    @property
    def rule(self) -> UpdateRule:
        return self.bucket.rule

    def note_weights(self) -> None:
        self._digest = native.digest(self.flat.shard_memory)

    def compare_weights(self) -> torch.Tensor:
        """Tell whether the weights have changed since the last update. On a device the result stays there."""
        assert self._digest is not None, self.flat
        return native.digest(self.flat.shard_memory) != self._digest

    def shape_of(self, span: SegmentSpan) -> Shape | None:
        """The shape of its parameter, where the rule asks for that and the span is all of it."""
        slot = self.flat.layout.slots[span.slot]
        return slot.shape if self.rule.whole and span.stop - span.start == slot.numel else None

    def begin_again(self, group: Group, values: dict[str, State], name: str) -> None:
        """Let a moment, among the `values` of a segment that is opened, be as before the parameter's first update."""
        value = values.get(name)
        if name not in values or self.rule.keeps_state:
            values.pop(name, None)
        elif isinstance(value, native.Blocks8):
            value.codes.zero_()
            value.scales.zero_()
        elif value is not None:
            value.zero_()
        if name in values:
            self.rule.begin(group, {name: values[name]})

    def objects(self) -> list[dict[str, Any]]:
        """What the optimizer keeps of each segment that is no tensor."""
        found = self.rule.objects()
        return found[self.first : self.first + len(self.segments)] if found else [{} for _ in self.segments]

    def load_objects(self, number: int, objects: Mapping[str, Any]) -> None:
        """Replace that of one segment, once its tensors and its count of updates are loaded."""
        self.rule.load_objects(self.first + number, self.steps[self.segments[number].slot], objects)

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

    def __init__(self, kept: StateTier, storages: StateStorages) -> None:
        self.kept = kept
        self.tier = kept.tier
        self.apart = kept.apart
        self.rule = storages.make_rule(kept)
        self.split = kept.split and self.rule.splits
        self.link = storages.link
        self.streamed = storages.streamed if kept.streamed else None
        # Whether its updates are kernels of the device, queued by whoever asks for them.
        self.on_device = kept.tier is Tier.DEVICE and not storages.link.shared
        # Whether they are the device's work, wherever the state rests.
        self.by_device = self.on_device or kept.streamed
        self.states: list[FlatState] = []
        # Those whose weights anybody can edit, and whose masters would overwrite the edit.
        self.editable: list[FlatState] = []
        self.spans: list[tuple[FlatState, SegmentSpan]] = []
        self._storages = storages
        self._layout = RecordLayout([])
        self._groups: Groups = ()
        # Where the record rests; None where there is none, as rules of torch's keep their state themselves.
        self.storage: Storage | None = None
        # New weights of a delayed update, of each segment, until they are published: the flats have those before it.
        self._fresh: list[torch.Tensor] | None = None
        self._bound: list[UpdatePiece] | None = None
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

    @torch.no_grad()
    def fill(self, groups: Groups, masters: Sequence[torch.Tensor | None]) -> None:
        """Make the record, from the fp32 masters of the states' flats, None where the working weights are as good."""
        self._groups = groups
        segments = []
        for state, span in self.spans:
            shape = state.shape_of(span) or (span.stop - span.start,)
            segments.append(record_fields(self.kept, self.rule, groups[span.group], state.flat.dtype, shape))
        self._layout = RecordLayout(segments)
        if not self._layout.nbytes:
            return
        self.storage = self._storages.make_storage(self.tier, self.name, self._layout.nbytes)
        master_of = dict(zip(self.states, masters, strict=True))
        memory = self.storage.blank()
        for (state, span), views in zip(self.spans, self._layout.views(memory), strict=True):
            self.rule.begin(groups[span.group], _moments(views))
            master = master_of[state]
            with state.flat.opened(write=True) as shard:
                own = shard[span.start : span.stop]
                _set_master(views, own, own if master is None else master[span.start : span.stop])
        self.storage.store().wait()
        self.storage.release()
        if any(field.name in ("working", "master") for fields in self._layout.fields for field, _ in fields):
            self.editable = [s for s in self.states if s.flat.resident and not is_fake(s.flat.whole)]
        self.note_weights()

    def note_weights(self) -> None:
        """Note the weights of flats that anybody can edit, to find out before the next update whether somebody has."""
        for state in self.editable:
            state.note_weights()

    @torch.no_grad()
    def take_weights(self, state: FlatState) -> None:
        """Let the masters of weights that were edited outside of the engine be what these are now."""
        with self.opened(state) as segments:
            for (owner, span), views, fields in zip(self.spans, self._views(), segments, strict=True):
                master = fields["master"]
                if owner is not state or not isinstance(master, torch.Tensor):
                    continue
                own = state.flat.shard_memory[span.start : span.stop].to(master.device)
                kept = views.get("working")
                before = kept if isinstance(kept, torch.Tensor) else master.to(own.dtype)
                fields["master"] = torch.where(own != before, own.to(master.dtype), master)
        state.note_weights()

    @property
    def on_disk(self) -> bool:
        return self.storage is not None and self.storage.on_disk

    @property
    def nbytes(self) -> int:
        """Of the state, wherever it is; without what aligns a record's fields, as that is a matter of the layout."""
        return self._layout.payload + self.rule.nbytes()

    @property
    def record_nbytes(self) -> int:
        """As much as it takes in memory."""
        return self._layout.nbytes

    @property
    def room_nbytes(self) -> int:
        """The most that it has on the device at a time, with gradients and weights, where it is `streamed`."""
        if self.streamed is None or not self.spans:
            return 0
        widest, most, runs = 0.0, STREAMED_NUMEL, 0
        for (state, span), fields in zip(self.spans, self._layout.fields, strict=True):
            numel = span.stop - span.start
            own = sum(field.nbytes for field, _ in fields) / numel
            widest = max(widest, own + torch.float32.itemsize + state.flat.dtype.itemsize)
            most = max(most, 0 if self.rule.cuts(self._groups[span.group]) else numel)
            runs += len(fields) + 2
        return math.ceil(widest * min(self.numel, most)) + NEAR * runs

    @property
    def in_memory(self) -> int:
        return (self.storage.in_memory if self.storage is not None else 0) + self.rule.nbytes()

    @property
    def held_nbytes(self) -> int:
        """Of weights that a delayed update has made, in memory of their own until they are published."""
        return sum(weights.nbytes for weights in self._fresh or ()) if self.on_disk else 0

    def memory(self) -> Iterator[torch.Tensor]:
        """What holds the state, where it rests in memory."""
        if self.storage is not None and not self.storage.on_disk:
            yield self.storage.memory
        for kept in self.rule.kept():
            yield from (value for value in kept.values() if value.dim())

    # The update.

    @property
    def steps(self) -> list[int]:
        """Of each segment the updates that its parameter has had."""
        return [state.steps[span.slot] for state, span in self.spans]

    def begin_update(
        self,
        gradients: Sequence[FlatGradient],
        absent: Absent | None = None,
        lent: Sequence[torch.Tensor] | None = None,
    ) -> list[UpdatePiece]:
        """An update with the gradients of its flats, or what they have lent; `absent` ones are left alone.

        Record and weights have been fetched, and gradients have arrived. What is returned is for `update`.
        """
        for state in self.states:
            if state.flat.reader is not DONE:
                with self.link.updating(DONE) if self.streamed is not None else nullcontext():
                    state.flat.quiet()
            gone = absent.get(state.flat, ()) if absent else ()
            for slot in range(len(state.steps)):
                state.steps[slot] += slot not in gone
        if not self.spans:
            return []
        places = [address_of(state.flat.whole) for state in self.states]
        if places != self._places:
            self._bound = None
            self._places = places
        pieces = self._bound
        if pieces is None or lent is not None:
            self.rule.forget()
            grads = [gradient.owned for gradient in gradients] if lent is None else lent
            stay = all(gradient.stays for gradient in gradients) and lent is None
            pieces = self._pieces(self._segments(self._views(), grads, grads_stay=stay), whole=lent is not None)
            # What is lent takes turns with another buffer.
            self._bound = None
            if lent is None and self.in_place and not any(gradient.brief for gradient in gradients):
                self._bound = pieces
        return [_without(piece, absent) for piece in pieces] if absent else pieces

    def update(self, piece: UpdatePiece, groups: Groups, multiplier: float, fence: Ticket) -> Ticket:
        """Complete when it is made; where it is `streamed`, when all is back where it rests."""
        steps = [state.steps[span.slot] for state, span in piece.places]
        if self.streamed is not None:
            return self.streamed.update(self.rule, piece.segments, steps, groups, multiplier, fence)
        return self.rule.update(piece.segments, steps, groups, multiplier)

    def _pieces(self, segments: list[UpdateSegment], *, whole: bool) -> list[UpdatePiece]:
        """A large bucket whose weights are sent elsewhere, or that is updated elsewhere, is cut: where its rule allows
        that, and else between parameters."""
        most = STREAMED_NUMEL if self.streamed is not None else PIECE_NUMEL
        cut = self.streamed is not None or (self.apart and not whole)
        if not cut or self.numel <= most:
            return [UpdatePiece(segments, self.spans)]
        pieces, room = [UpdatePiece([], [])], most
        for segment, (state, span) in zip(segments, self.spans, strict=True):
            length = span.stop - span.start
            size = most if self.rule.cuts(self._groups[span.group]) else length
            for first in range(0, length, size):
                last = min(first + size, length)
                if last - first > room and pieces[-1].segments:
                    pieces.append(UpdatePiece([], []))
                    room = most
                part = replace(span, start=span.start + first, stop=span.start + last)
                pieces[-1].segments.append(segment if last - first == length else segment.cut(first, last))
                pieces[-1].places.append((state, part))
                room -= last - first
        return pieces

    @property
    def in_place(self) -> bool:
        """Whether weights and state are in the same memory in every step."""
        return not self.on_disk and (self.apart or not any(state.flat.at_rest_on_disk for state in self.states))

    def working(self) -> list[torch.Tensor]:
        """The working weights of each segment that the record holds."""
        return [fields["working"] for fields in self._views()]  # type: ignore[misc]

    @property
    def holds_weights(self) -> bool:
        return self._fresh is not None

    def hold_weights(self) -> None:
        """A delayed update is complete: keep its weights until they are published, whatever becomes of the record."""
        self._fresh = [weights.clone() if self.on_disk else weights for weights in self.working()]

    def publish(self) -> list[Ticket]:
        """Copy the working weights that it holds to the flats. They are dropped last, so that it can be repeated."""
        assert self._fresh is not None, self.name
        with ExitStack() as opened:
            for state in self.states:
                if state.flat.storage is not None:
                    opened.enter_context(state.flat.opened(write=True))
            tickets = [self._send(*place, part) for place, part in zip(self.spans, self._fresh, strict=True)]
            for ticket in tickets if self.on_device else ():
                ticket.finish()  # before it is stored
        for ticket in tickets:
            ticket.wait()
        self._fresh = None
        return tickets

    def send(self, piece: UpdatePiece, fence: Ticket) -> list[Ticket]:
        """The working weights of what was updated, to where flats have theirs: what rests elsewhere has been fetched.

        The `fence` is for another thread than the one that computes.
        """
        found = zip(piece.places, piece.segments, strict=True)
        return [self._send(*place, s.working, fence) for place, s in found if s.working is not None]

    def _send(self, state: FlatState, span: SegmentSpan, part: torch.Tensor, fence: Ticket | None = None) -> Ticket:
        if state.flat.reader is not DONE:
            state.flat.quiet()
        target = state.flat.shard_memory[span.start : span.stop]
        if state.flat.storage is None:
            return self.link.up(target, part, fence=fence)
        if self.on_device:
            return self.link.down(target, part)
        target.copy_(part)
        return DONE

    def forget(self) -> None:
        """Let go of memory that is only borrowed for an update: it is about to be given back, or to move."""
        self._bound = self._fresh = None
        self.rule.forget()
        if self.streamed is not None:
            self.streamed.trim()

    def _views(self) -> list[dict[str, State]]:
        return self._layout.views(self.storage.memory) if self.storage is not None else [{} for _ in self.spans]

    def _segments(
        self,
        fields: list[dict[str, State]],
        gradients: Sequence[torch.Tensor] | None = None,
        *,
        grads_stay: bool = False,
    ) -> list[UpdateSegment]:
        """`gradients` are those of the flats, if it is for an update; they may `stay` on the device."""
        grad_of = dict(zip(self.states, gradients, strict=True)) if gradients is not None else {}
        segments = []
        for (state, span), views in zip(self.spans, fields, strict=True):
            flat = state.flat
            working = views["working"] if self.apart else flat.shard_memory[span.start : span.stop]
            segments.append(
                UpdateSegment(
                    grad=grad_of[state][span.start : span.stop] if grad_of else None,
                    working=working,  # type: ignore[arg-type]
                    master=views.get("master"),  # type: ignore[arg-type]
                    low=views.get("low"),  # type: ignore[arg-type]
                    state=tuple(_moments(views).values()),
                    # The draws of stochastic rounding follow the element, however the flat is cut.
                    start=flat.own.start + span.start,
                    group=span.group,
                    shape=state.shape_of(span),
                    on_device=self._on_device(flat, grads_stay),
                )
            )
        return segments

    def _on_device(self, flat: Flat, grads_stay: bool) -> tuple[str, ...]:
        weights = ("working",) if flat.storage is None and not self.apart else ()
        return (*weights, "grad") if grads_stay else weights

    @contextmanager
    @torch.no_grad()
    def opened(self, changed: FlatState | None) -> Iterator[list[dict[str, State]]]:
        """Of each segment `master` and moments; see `FlatState.opened`.

        What is kept is of the flat that is `changed`: weights of the others may be in an edit of their own.
        """
        assert self._fresh is None, f"{self.name}: its update is yet to be published"
        write = changed is not None
        for state in self.states if write else ():
            state.flat.quiet()
        with ExitStack() as stack:
            if self.storage is not None:
                stack.enter_context(opened(self.storage, write=write))
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

    def close(self) -> None:
        self.forget()
        self._fresh = None
        if self.storage is not None:
            self.storage.close()
            self.storage = None
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
        native.join(working.to("cpu"), views["low"], master)  # type: ignore[arg-type]
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

    def __init__(self, groups: Groups, storages: StateStorages) -> None:
        self._groups = groups
        self._storages = storages
        # In the order in which units run.
        self.buckets: list[UpdateBucket] = []
        self.state_of: dict[Flat, FlatState] = {}
        # The bucket that flats are still added to, and their masters.
        self._open: UpdateBucket | None = None
        self._masters: list[torch.Tensor | None] = []

    def adopt(self, flat: Flat, master: torch.Tensor | None) -> None:
        """Begin to keep state for a flat. `master` is the fp32 shard, None where the working weights are as good."""
        kept = self._storages.state_tier(flat)
        if self._open is not None:
            others = [state.flat for state in self._open.states]
            # Of whole shards, padding included: every rank makes the same buckets.
            numel = sum(each.layout.shard_numel for each in (*others, flat))
            alike = others[0].dtype == flat.dtype and self._open.kept == kept
            if numel > BUCKET_NUMEL or not alike or flat.at_rest_on_disk:
                self.complete()
        if self._open is None:
            self._open = UpdateBucket(kept, self._storages)
            self.buckets.append(self._open)
        self.state_of[flat] = self._open.add(flat, len(self._groups))
        self._masters.append(master)
        if flat.at_rest_on_disk:
            self.complete()

    def complete(self) -> None:
        """No flat is added to the last bucket any more."""
        if self._open is not None:
            self._open.fill(self._groups, self._masters)
        self._open = None
        self._masters = []

    def device_memory(self) -> Iterator[torch.Tensor]:
        """The tensors of state that rests on the device."""
        for bucket in self.buckets:
            if bucket.tier is Tier.DEVICE:
                yield from bucket.memory()

    def close(self) -> None:
        with ExitStack() as end:
            for bucket in self.buckets:
                end.callback(bucket.close)
        self.buckets.clear()
        self.state_of.clear()
