"""The optimizer's side of flats: masters and moments of what this rank owns, and where they rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from wherry import native
from wherry.fake import address_of
from wherry.sharding.gradients import FlatGradient
from wherry.sharding.layout import SegmentSpan
from wherry.sharding.unit import Flat
from wherry.tiers.homes import Home, opened
from wherry.tiers.streams import Link
from wherry.tiers.tickets import DONE, Ticket
from wherry.update.record import Field, RecordLayout, State
from wherry.update.rules import Group, Groups, Rule, Segment

# What an update of an element reads besides its moments, by name.
WEIGHTS = ("working", "low", "master")

# Parameters that no rank has a gradient for, by their place in the flat.
Absent = Mapping[Flat, Collection[int]]
# By its name, its bytes, and how many of them stay the zeros that they are until the first update.
MakeHome = Callable[[str, int, int], Home]


class FlatState:
    """What the optimizer knows about one flat."""

    def __init__(self, flat: Flat, groups: int, batch: Batch) -> None:
        self.flat = flat
        self.batch = batch
        # Parameters that the optimizer was not given lie behind its groups.
        self.segments = [span for span in flat.layout.segments(flat.rank) if span.group < groups]
        known = [slot.group < groups for slot in flat.layout.slots]
        # Ranks whose shard is all padding have no segments, and yet take part in the flat's collectives.
        self.updated = any(known)
        self.updates_all = all(known)
        # The updates that each parameter of the flat has had: one that no rank has a gradient for is left alone.
        self.steps = [0] * len(known)
        # The first of the batch's segments that is this flat's.
        self.first = 0

    @property
    def rule(self) -> Rule:
        return self.batch.rule

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
        weights follow their masters: between two delayed updates, those that are yet to be published. Tensors are
        valid inside only.
        """
        with self.batch.opened(self if write else None) as views:
            yield views[self.first : self.first + len(self.segments)]

    @property
    def numel(self) -> int:
        return sum(span.stop - span.start for span in self.segments)


class Batch:
    """Flats that one rule updates, and whose state is one record: one large flat, or small ones that follow each other.

    `apart` says that the record has a copy of the working weights, because the flat's own are out of the update's
    reach (on the device), or must not change yet (a delayed update).
    """

    def __init__(self, rule: Rule, link: Link, *, apart: bool, split: bool, make_home: MakeHome) -> None:
        self.rule = rule
        self.link = link
        self.apart = apart
        self.split = split and rule.splits
        self.make_home = make_home
        self.states: list[FlatState] = []
        # Those of the states' flats.
        self.gradients: list[FlatGradient] = []
        self.spans: list[tuple[FlatState, SegmentSpan]] = []
        # Whether the optimizer was given every parameter.
        self._updates_all = True
        self._layout: RecordLayout | None = None
        self._home: Home | None = None
        # New weights of a delayed update, of each segment, until they are published: the flats have those before it.
        self.fresh: list[torch.Tensor] | None = None
        self._bound: list[Segment] | None = None
        # The same, without gradients.
        self._bare: list[Segment] | None = None
        # Where the flats' weights were then. Who sends a parameter to another process moves them to shared memory.
        self._places: list[int] = []

    @property
    def name(self) -> str:
        return self.states[0].flat.name if len(self.states) == 1 else f"{self.states[0].flat.name} and others"

    @property
    def numel(self) -> int:
        return sum(span.stop - span.start for _, span in self.spans)

    def add(self, state: FlatState) -> None:
        state.first = len(self.spans)
        self.states.append(state)
        self._updates_all = self._updates_all and state.updates_all
        self.spans += [(state, span) for span in state.segments]

    # The record.

    def _weight_fields(self, dtype: torch.dtype, numel: int) -> list[Field]:
        fields = [Field("working", dtype, numel)] if self.apart else []
        if dtype.itemsize < torch.float32.itemsize:
            split = self.split and dtype is torch.bfloat16
            fields.append(Field("low", torch.int16, numel) if split else Field("master", torch.float32, numel))
        return fields

    def layout(self, groups: Groups) -> RecordLayout:
        """Where everything lies; `groups` are the optimizer's."""
        segments = []
        for state, span in self.spans:
            numel = span.stop - span.start
            segments.append(self._weight_fields(state.flat.dtype, numel) + self.rule.fields(groups[span.group], numel))
        return RecordLayout(segments)

    @torch.no_grad()
    def fill(self, groups: Groups, masters: Sequence[torch.Tensor | None]) -> None:
        """Make the record, from the fp32 masters of the states' flats, None where the working weights are as good."""
        self._layout = self.layout(groups)
        if not self._layout.nbytes:
            return
        self._home = self.make_home(self.name, self._layout.nbytes, self._untouched(groups))
        master_of = dict(zip(self.states, masters, strict=True))
        memory = self._home.blank(zeros=True)
        for (state, span), views in zip(self.spans, self._layout.views(memory), strict=True):
            self.rule.begin(groups[span.group], _moments(views))
            master = master_of[state]
            with state.flat.opened(write=True) as shard:
                own = shard[span.start : span.stop]
                _set_master(views, own, own if master is None else master[span.start : span.stop])
        self._home.store().wait()
        self._home.leave()

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

    def fetch(self) -> Ticket | None:
        return self._home.fetch() if self._home is not None else None

    def store(self) -> Ticket | None:
        return self._home.store() if self._home is not None else None

    def leave(self, after: Ticket) -> None:
        if self._home is not None:
            self._home.leave(after)

    @property
    def on_disk(self) -> bool:
        return self._home is not None and self._home.on_disk

    @property
    def nbytes(self) -> int:
        """Of the record, wherever it is; without what aligns its fields, as that is a matter of the layout."""
        return self._layout.payload if self._layout is not None else 0

    @property
    def record_nbytes(self) -> int:
        """As much as it takes in memory."""
        return self._layout.nbytes if self._layout is not None else 0

    @property
    def in_memory(self) -> int:
        return (self._home.in_memory if self._home is not None else 0) + self.rule.nbytes()

    def memory(self) -> Iterator[torch.Tensor]:
        """What holds the state, where it rests in memory."""
        if self._home is not None and not self._home.on_disk:
            yield self._home.memory
        for kept in self.rule.kept():
            yield from (value for value in kept.values() if value.dim())

    # The segments, with their tensors in place.

    def bind(self, aside: Sequence[torch.Tensor] | None = None) -> list[Segment]:
        """The segments for an update; record and weights have been fetched, and gradients have arrived.

        `aside` are gradients to be used instead of the states' own.
        """
        if self._bound is not None and aside is None:
            return self._bound
        grads = aside or [gradient.owned for gradient in self.gradients]
        grad_of = dict(zip(self.states, grads, strict=True))
        bound = self._segments(self._views())
        for segment, (state, span) in zip(bound, self.spans, strict=True):
            segment.grad = grad_of[state][span.start : span.stop]
        if aside is None and self.in_place and all(gradient.steady for gradient in self.gradients):
            self._bound = bound
        return bound

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
        """Begin the update, with the states' gradients or with those set aside; `absent` ones are left alone."""
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
            self._bound = self._bare = None
            self._places = places
        loose = [gradient.loose for gradient in self.gradients if gradient.loose is not None]
        if not loose or len(loose) < len(self.gradients) or aside is not None or not self._updates_all:
            for gradient in self.gradients if loose else ():
                gradient.lay_out()
            segments = self.bind(aside)
            if absent:
                segments = [
                    replace(segment, grad=None) if span.slot in absent.get(state.flat, ()) else segment
                    for segment, (state, span) in zip(segments, self.spans, strict=True)
                ]
            return self.rule.update(segments, self.steps, groups, multiplier)
        bare = self._bare
        if bare is None:
            bare = self._segments(self._views())
            if self.in_place:
                self._bare = bare
        return self.rule.update(bare, self.steps, groups, multiplier, loose)

    @property
    def in_place(self) -> bool:
        """Whether weights and state are in the same memory in every step."""
        return not self.on_disk and (self.apart or not any(state.flat.at_rest_on_disk for state in self.states))

    def working(self) -> list[torch.Tensor]:
        """The working weights of each segment that the record holds."""
        return [fields["working"] for fields in self._views()]  # type: ignore[misc]

    def fetched_working(self) -> list[torch.Tensor]:
        """As `working`, wherever the record is; copies of what rests on disk."""
        if self._home is None or not self.on_disk:
            return self.working()
        with opened(self._home, write=False):
            return [weights.clone() for weights in self.working()]

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
        self._bound = self._bare = None
        self.rule.forget()

    def detach(self) -> None:
        """Its gradients go, and nothing of them is kept."""
        self.gradients = []
        self.forget()

    def _views(self) -> list[dict[str, State]]:
        assert self._layout is not None
        return self._layout.views(self._home.memory) if self._home is not None else [{} for _ in self.spans]

    def _segments(self, fields: list[dict[str, State]]) -> list[Segment]:
        segments = []
        for (state, span), views in zip(self.spans, fields, strict=True):
            flat = state.flat
            working = views["working"] if self.apart else flat.shard_memory[span.start : span.stop]
            segments.append(
                Segment(
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
        write = changed is not None
        for state in self.states if write else ():
            state.flat.quiet()
        with ExitStack() as stack:
            if self._home is not None:
                stack.enter_context(opened(self._home, write=write))
            fields = self._views()
            if self.fresh is not None:
                owns = self.fresh  # what follows from masters now
            else:
                shards = {state: stack.enter_context(state.flat.opened(write=write)) for state in self.states}
                owns = [shards[state][span.start : span.stop] for state, span in self.spans]
            shown = _shown(fields, owns, self.rule.kept() or [{} for _ in self.spans])
            yield shown
            if write:
                for (state, _), views, own, after in zip(self.spans, fields, owns, shown, strict=True):
                    if state is changed:
                        _set_master(views, own, after["master"])  # type: ignore[arg-type]
                        _replace(_moments(views), after)
                self.rule.load_kept(self._segments(fields), self.steps, [_moments(after) for after in shown])

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
        if self._home is not None:
            self._home.close()
            self._home = None
        self.states.clear()
        self.spans.clear()


def _shown(
    fields: Sequence[dict[str, State]], owns: Sequence[torch.Tensor], kept: Sequence[Mapping[str, State]]
) -> list[dict[str, State]]:
    """Of each segment `master` and moments; `owns` are its working weights, `kept` what the rule keeps itself."""
    return [
        {"master": _join(views, views.get("working", own)), **_moments(views), **moments}
        for views, own, moments in zip(fields, owns, kept, strict=True)
    ]


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
