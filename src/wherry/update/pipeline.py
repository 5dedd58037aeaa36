"""The update of all units: which flats are updated together, when, and how new weights get to where they rest."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from wherry.errors import WherryError
from wherry.observe.log import logger
from wherry.observe.spans import span
from wherry.parallel import merged
from wherry.parallel.comm import Comm
from wherry.parallel.merged import Merging
from wherry.placement import Tier
from wherry.sharding.gradients import FlatGradient
from wherry.sharding.unit import Flat
from wherry.tiers.streams import Link
from wherry.tiers.tickets import DONE, OnHost, Ticket, TicketGroup
from wherry.update.jobs import READ, READY, UPDATE, WRITE, Crew, Departure, Job, Steps, drive_all, drive_one
from wherry.update.rules import Groups, Rule
from wherry.update.sizes import BATCH_NUMEL
from wherry.update.state import Batch, FlatState, MakeHome
from wherry.update.untouched import Untouched

EVERYTHING = 1 << 30
# Parameters without a gradient, by their place in the flat.
Absent = Mapping[Flat, Sequence[int]]


@dataclass(frozen=True)
class UpdatePolicy:
    """When units are updated. The first three give the same results."""

    when: str = "at_step"  # at_step, before_use, in_backward, delayed
    # `delayed`: the steps that are made as usual, one less than the step whose update is the first to be late.
    warmup: int = 0
    # Batches that may have their state in host memory at once, where it rests on disk.
    depth: int = 4

    @property
    def beside(self) -> bool:
        """Whether updates run beside the forward or the backward."""
        return self.when != "at_step"


@dataclass
class StateTier:
    """How the state of one flat is kept: on which tier, and by which rule."""

    tier: Tier
    make_rule: Callable[[], Rule]
    make_home: MakeHome
    apart: bool
    split: bool


class Updater:
    """Updates every flat once its gradients are complete.

    Built flat by flat (`adopt`), so that one flat's state above the rest is ever in memory, and then given the
    gradients (`attach`); to be given others later, it lets go of these first (`detach`).
    """

    def __init__(
        self, groups: Groups, comm: Comm, link: Link, policy: UpdatePolicy, tier_of: Callable[[Flat], StateTier]
    ) -> None:
        self.groups = groups
        self.comm = comm
        self.link = link
        self.policy = policy
        self.tier_of = tier_of
        self.merging = Merging(0)
        self.states: list[FlatState] = []
        self.batches: list[Batch] = []
        self.tiers: dict[Batch, Tier] = {}
        self.state_of: dict[Flat, FlatState] = {}
        self.steps_made = 0
        self._masters: list[torch.Tensor | None] = []
        self._open: tuple[Batch, StateTier, torch.dtype] | None = None
        self._crew = Crew(policy.depth, link.device)
        # The thread of the crew is in this process alone, and not in one that is forked from it.
        self._process = os.getpid()
        # What went wrong in an update: from then on there is no step to go on from.
        self._broken: BaseException | None = None
        # Updates whose weights have not been published.
        self._pending: dict[Batch, Job] = {}
        # Those whose weights are in use, and whose state is still on its way to the disk.
        self._storing: dict[Batch, Job] = {}
        # Whether no update has to read anything from disk.
        self._all_in_place = True
        # Records that are read, or have been, for updates that have not begun.
        self._reading: dict[Batch, Ticket] = {}
        # Gathers of published weights, on their way to every rank.
        self._arriving: dict[Batch, list[Ticket]] = {}
        # The ranks as a group whose collectives a thread begins, where there is one, and what it has been asked for.
        self._beside: Comm | None = None
        self._departing: dict[Batch, Departure] = {}
        # in_backward: what the updates of this window were begun with, and how many flats of a batch have landed.
        self._early: tuple[list[dict[str, Any]], float] | None = None
        self._landed: dict[Batch, int] = {}

    # Building.

    def adopt(self, flat: Flat, master: torch.Tensor | None) -> None:
        """Begin to keep state for a flat. `master` is the fp32 shard, None where the working weights are as good."""
        kept = self.tier_of(flat)
        state_dtype = flat.dtype
        if self._open is not None:
            batch, open_tier, dtype = self._open
            # Of whole shards, padding included: every rank makes the same batches.
            numel = sum(state.flat.layout.shard_numel for state in batch.states) + flat.layout.shard_numel
            if numel > BATCH_NUMEL or dtype != state_dtype or open_tier != kept or flat.at_rest_on_disk:
                self._fill()
        if self._open is None:
            batch = Batch(kept.make_rule(), self.link, apart=kept.apart, split=kept.split, make_home=kept.make_home)
            self._open = batch, kept, state_dtype
            self.batches.append(batch)
            self.tiers[batch] = kept.tier
        batch = self._open[0]
        state = FlatState(flat, len(self.groups), batch)
        batch.add(state)
        self.states.append(state)
        self.state_of[flat] = state
        self._masters.append(master)
        if flat.at_rest_on_disk:
            self._fill()

    def _fill(self) -> None:
        if self._open is not None:
            self._open[0].fill(self.groups, self._masters)
        self._open = None
        self._masters = []

    def attach(self, gradients: Sequence[FlatGradient]) -> None:
        """All flats have been adopted; these are their gradients from now on."""
        self._fill()
        self._all_in_place = all(batch.in_place for batch in self.batches)
        if self.reads_ahead and self.policy.when == "in_backward":
            self._crew.depth = max(1, self.policy.depth - 1)  # one buffer is for what is read ahead
        gradient_of = {gradient.flat: gradient for gradient in gradients}
        for batch in self.batches:
            batch.gradients = [gradient_of[state.flat] for state in batch.states]
        sends = self.policy.when in ("before_use", "in_backward") and any(batch.resident for batch in self.batches)
        if sends and self._beside is None:
            self._beside = self.comm.beside(self.link.device)

    def detach(self) -> None:
        """The gradients are about to be others. Updates under way read them to their ends first."""
        self.rest()
        for batch in self.batches:
            batch.detach()

    def forget(self) -> None:
        """Buffers are about to be freed: nothing of updates before holds on to them. No update may be under way."""
        for batch in self.batches:
            batch.forget()

    # Before the update.

    @property
    def reads_ahead(self) -> bool:
        """Whether the next forward waits for records on disk."""
        return self.policy.when in ("before_use", "in_backward") and any(batch.on_disk for batch in self.batches)

    def read_ahead(self) -> None:
        """In a backward: begin to read what the next forward will wait for first.

        One buffer of those that there may be is left for whatever else; buffers that the last updates still write from
        are not there. Where updates run in the backward too, it is one record, whose update is the last to begin.
        """
        busy = {batch for batch, job in self._storing.items() if not job.done()}
        room = self.policy.depth - 1 - len(busy) if self.policy.when == "before_use" else min(1, self.policy.depth - 1)
        wanted = [batch for batch in self.batches if batch.on_disk][: max(0, room)]
        for batch in wanted:
            if batch in busy or batch in self._pending:
                return
            if batch in self._reading:
                continue
            try:
                ticket = batch.fetch()
            except BaseException as error:
                self.comm.tell(error)  # before any hook takes part in another collective
                raise
            assert ticket is not None
            self._reading[batch] = ticket

    def stop_reading(self) -> None:
        """Let go of what was read for updates that do not come."""
        while self._reading:
            batch, _ = self._reading.popitem()
            batch.leave(DONE)

    # The update.

    def step(self, groups: Groups, multiplier: float, absent: Absent | None = None) -> None:
        """Update every flat with its gradients times `multiplier`, now or as the policy has it.

        `absent`: the parameters that no rank has a gradient for, by their place in the flat. They are left alone, but
        for policies that begin before that is known, or end after the next step: for these, zeros count.
        """
        self._refuse_broken()
        self.steps_made += 1
        with span("update"), torch.no_grad():
            late = self.policy.when == "delayed" and self.steps_made >= self.policy.warmup
            if self.policy.when == "in_backward":
                self._finish_early(groups, multiplier)
            elif late:
                self._begin(groups, multiplier, late=True)
            elif self.policy.when == "before_use":
                self._begin(groups, multiplier, absent=absent)
            else:
                self._at_once(self.batches, groups, multiplier, absent)
            if self._pending and self.policy.when != "delayed":
                self._send_resident()
                self._hide()

    def _send_resident(self) -> None:
        """New weights that every rank holds whole will set out without further ado, and each unit waits for its own.

        If they set out where a unit is used, a rank that looks at its model alone would wait for the others. A thread
        begins their gathers, each after its update, in the order in which they are asked for here, where all ranks are;
        where no group is for that, they begin here.
        """
        jobs = {batch: self._pending[batch] for batch in self.batches if batch in self._pending and batch.resident}
        if self._beside is None:
            return self._set_out(jobs)
        assert self._beside.starter is not None
        for batch, job in jobs.items():
            self._departing[batch] = departure = Departure()
            self._beside.starter.add(partial(self._depart, batch, job, departure))

    def _depart(self, batch: Batch, job: Job, departure: Departure) -> None:
        """In the starter's thread: the update ends, and the gathers of its weights begin."""
        assert self._beside is not None and self._beside.starter is not None
        starter = self._beside.starter
        try:
            job.wait()
            if starter.stopped is not None:
                raise starter.stopped
            with torch.no_grad():
                departure.leave([*self._refresh(batch, self._beside)])
        except BaseException as error:
            if starter.stopped is None:
                starter.stopped = error
                self._beside.tell(error)
            departure.fail(error)

    def _hide(self) -> None:
        """Weights that an update is about to change, or is changing, are read by nobody who has not waited for it."""
        for batch in self._pending:
            for state in batch.states:
                if state.flat.resident:
                    state.flat.show_blanks()

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise WherryError(f"an update has failed before: {self._broken}") from self._broken

    def _at_once(
        self, batches: Sequence[Batch], groups: Groups, multiplier: float, absent: Absent | None = None
    ) -> None:
        if self._pending or self._arriving or self._storing:
            self.complete()
        untouched = Untouched([state for batch in batches for state in batch.states], absent) if absent else None
        depth = EVERYTHING if self._all_in_place else self._depth_beside(batches)
        fence = self.link.fence()
        jobs = {batch: Job(batch.name, self._steps(batch, groups, multiplier, fence)) for batch in batches}
        drive_all(jobs.values(), depth)  # to their ends, also if one has failed
        self._set_out(jobs, untouched)
        self._arrive(batches)

    def _depth_beside(self, batches: Sequence[Batch]) -> int:
        """How many of these updates may run at once, beside the records that were read for others."""
        return max(1, self.policy.depth - sum(batch not in batches for batch in self._reading))

    def _begin(self, groups: Groups, multiplier: float, *, late: bool = False, absent: Absent | None = None) -> None:
        """Set all updates going beside what comes next, in the order in which units run.

        Those with `absent` parameters are made at once: what they must not touch is put back before anybody looks.
        """
        self.settle()
        now = [batch for batch in self.batches if any(state.flat in (absent or ()) for state in batch.states)]
        if now:
            self._at_once(now, groups, multiplier, absent)
        groups = _snapshot(groups)
        fence = self.link.fence()
        for batch in self.batches:
            if batch in now:
                continue
            aside = [gradient.set_aside() for gradient in batch.gradients] if late else None
            self._send(batch, self._steps(batch, groups, multiplier, fence, aside))

    def _send(self, batch: Batch, steps: Steps) -> None:
        self._stored(batch)
        job = Job(batch.name, steps)
        self._pending[batch] = job
        if self.policy.when != "delayed":
            for state in batch.states:
                state.flat.pending = True
                state.flat.ungathered = True
        if self.tiers[batch] is Tier.DEVICE and not self.link.shared:
            # Kernels of the device are queued on its current stream, which the crew's thread does not share.
            return drive_one(job)
        self._crew.add(job)

    def _steps(
        self,
        batch: Batch,
        groups: Groups,
        multiplier: float,
        fence: Ticket,
        aside: list[torch.Tensor] | None = None,
    ) -> Steps:
        """The update of one batch: fetch, update, and send home what has changed.

        With gradients set `aside` it is a late one: new weights are kept until they are published.
        """
        flats = [state.flat for state in batch.states]
        homes = [] if batch.apart else [flat.home for flat in flats if flat.home is not None]
        fetched, has_record = 0, False
        uploads: list[Ticket] = []
        try:
            record = self._reading.pop(batch, None) or batch.fetch()
            has_record = True
            tickets = [record] if record is not None else []
            for home in homes:
                tickets.append(home.fetch())
                fetched += 1
            # What was begun before and still reads the weights that are about to change.
            tickets += [home.quiet() for home in homes]
            if aside is None:
                tickets += [gradient.landing for gradient in batch.gradients]
            for ticket in tickets:
                if ticket is not DONE:
                    yield READ, ticket
            if batch.spans:
                yield UPDATE, batch.update(groups, multiplier, aside)
            for gradient in batch.gradients:
                gradient.spent()
            tickets = []
            if aside is not None:
                batch.fresh = [w.clone() if batch.on_disk else w for w in batch.working()]
            elif batch.apart:
                uploads = [OnHost(ticket) for ticket in batch.publish(fence)]
            stored = batch.store()
            tickets += [stored] if stored is not None else []
            tickets += [home.store() for home in homes]
            for ticket in uploads:
                yield WRITE, ticket
            tickets = [ticket for ticket in tickets if ticket is not DONE]
            if tickets:
                yield READY, DONE
            for ticket in tickets:
                yield WRITE, ticket
        finally:
            if has_record:
                batch.leave(uploads[-1] if uploads else DONE)
            for home in homes[:fetched]:
                home.leave()

    # Updates in the backward.

    def expects(self, groups: Groups, multiplier: float) -> None:
        """The boundary's backward begins: what its updates are to be made with."""
        if self._early is not None:
            raise WherryError(
                "backward: the weights of this accumulation window have been updated already, in the backward before "
                'this one; for several backwards before a step set "wherry": {"update_policy": "before_use"}'
            )
        self.settle()
        self._early = _snapshot(groups), multiplier
        self._landed = dict.fromkeys(self.batches, 0)

    def retract(self) -> None:
        """The backward was none of weights: nothing has landed and nothing was updated."""
        if self._early is not None and not any(self._landed.values()):
            self._early = None

    def landed(self, gradient: FlatGradient) -> None:
        """A flat's gradients are complete, reduced, and where the update finds them or on their way there."""
        if self._early is None:
            return
        batch = self.state_of[gradient.flat].batch
        self._landed[batch] += 1
        if self._landed[batch] == len(batch.states):
            groups, multiplier = self._early
            self._send(batch, self._steps(batch, groups, multiplier, self.link.fence()))
            self._hold_back()

    def _hold_back(self) -> None:
        """A backward that is faster than the updates waits for them, or all gradients would be in memory at once."""
        waiting = [job for job in self._pending.values() if not job.ready_for_use]
        for job in waiting[: max(0, len(waiting) - 2 * self.policy.depth)]:
            job.wait()

    def _finish_early(self, groups: Groups, multiplier: float) -> None:
        if self._early is None:  # a boundary that was decided after its backward
            return self._begin(groups, multiplier)
        (used, used_multiplier), self._early = self._early, None
        if used_multiplier != multiplier or used != _snapshot(groups):
            raise WherryError(
                "step: learning rate or other options changed between backward and step, and the weights have been "
                'updated with those before; set "wherry": {"update_policy": "before_use"} to change them there'
            )
        for batch in self.batches:
            assert self._landed[batch] == len(batch.states), batch.name

    def changed_early(self) -> list[str]:
        """What has been updated already from the gradients of a window that no step has ended."""
        if self._early is None:
            return []
        return [batch.name for batch in self.batches if self._landed[batch] == len(batch.states)]

    def abandon(self) -> None:
        """The window's gradients are dropped, perhaps after an exception in the backward."""
        if self._early is not None:
            for job in self._pending.values():
                job.come_to_an_end()  # it may read the gradients that are given back next, and what was read for it
        self.stop_reading()
        if self._early is None:
            return
        changed = self.changed_early()
        self._early = None
        if changed:
            logger.warning(
                "a backward ended early, and the update policy in_backward had updated %d of %d parts of the model "
                "from its gradients: %s ...; to lose nothing go back to a checkpoint",
                len(changed), len(self.batches), changed[0],
            )  # fmt: skip

    # Where updates become weights.

    @torch.no_grad()
    def settle(self, flats: Iterable[Flat] | None = None) -> None:
        """Complete the updates of these flats, or of all: their weights are those after the last step."""
        if flats is None:
            for batch in [batch for batch, job in self._storing.items() if job.done()]:
                self._stored(batch)  # it may have failed
        if not (self._pending or self._arriving):
            return
        self._refuse_fork()
        # In one order on every rank, whatever order the updates were begun in.
        batches = self.batches if flats is None else self._batches_of(flats)
        self._set_out({batch: self._pending[batch] for batch in batches if batch in self._pending})
        self._arrive([batch for batch in batches if batch in self._arriving])

    def complete(self) -> None:
        """As `settle`, for all, and nothing is on its way to the disk any more."""
        self.settle()
        self._all_stored()

    def _all_stored(self) -> None:
        if self._storing:
            self._refuse_fork()
        for batch in [*self._storing]:
            self._stored(batch)

    def _stored(self, batch: Batch) -> None:
        """The state that the last update has made is at home: the next one may change it."""
        job = self._storing.pop(batch, None)
        if job is not None:
            job.come_to_an_end()
            self._wait(job)

    def _set_out(self, jobs: Mapping[Batch, Job], untouched: Untouched | None = None) -> None:
        """These updates come to their ends, and what every rank holds whole of their weights sets out to all."""
        try:
            for batch, job in jobs.items():
                departure = self._departing.get(batch)
                self._wait(departure or job)
                if untouched is not None:
                    for state in batch.states:
                        untouched.put_back(state)
                if batch.fresh is not None:
                    self._publish(batch)
                self._arriving[batch] = [*self._refresh(batch, self.comm)] if departure is None else departure.tickets
                self._departing.pop(batch, None)
                self._pending.pop(batch, None)
                if not job.done():
                    self._storing[batch] = job
        except BaseException:
            self._arrive_quietly()
            raise

    def _arrive(self, batches: Sequence[Batch]) -> None:
        """The weights of these batches are whole everywhere."""
        try:
            for batch in batches:
                for ticket in self._arriving[batch]:
                    ticket.wait()
                del self._arriving[batch]
                for state in batch.states:
                    if state.flat.pending:
                        self._show(state.flat)
        except BaseException:
            self._arrive_quietly()
            raise

    def _show(self, flat: Flat) -> None:
        flat.pending = False
        if flat.resident:
            flat.show_whole()

    def _arrive_quietly(self) -> None:
        """What was begun comes to its end; there is an error to be told already."""
        for departure in self._departing.values():
            departure.come_to_an_end()
        begun = [*self._arriving.values(), *(departure.tickets for departure in self._departing.values())]
        with suppress(Exception):
            TicketGroup([ticket for tickets in begun for ticket in tickets]).wait()

    def rest(self) -> None:
        """Updates under way have ended, and the training that follows is what it would be without this call.

        For whoever only looks, or writes both weights and masters. As `settle`, but that weights which a delayed
        update has made are published when its time has come.
        """
        if self.policy.when != "delayed":
            self.settle()
        if self._pending:
            self._refuse_fork()
        for job in self._pending.values():
            job.come_to_an_end()
            self._wait(job)
        self._all_stored()

    def behind(self, flat: Flat) -> bool:
        """Whether a flat's weights are one update older than its master, between two steps of delayed updates."""
        return flat in self.state_of and self.state_of[flat].batch.fresh is not None

    @torch.no_grad()
    def hold_back(self) -> None:
        """Masters were loaded that are one update ahead of the weights: these follow in the next step."""
        assert self.policy.when == "delayed" and not self._pending, self.policy
        for batch in self.batches:
            batch.fresh = batch.fetched_working()
            self._pending[batch] = job = Job(batch.name, _no_steps())
            drive_one(job)

    def _refuse_fork(self) -> None:
        if os.getpid() != self._process:
            raise WherryError(
                f"weights were read whose update is under way in process {self._process}, and this is its fork "
                f"{os.getpid()}, where that update does not run; call engine.settle() before the fork (as before a "
                "DataLoader starts its workers), or read weights in the first process"
            )

    def _wait(self, update: Job | Departure) -> None:
        try:
            update.wait()
        except BaseException as error:
            self._broken = self._broken or error
            self.comm.tell(error)  # before any hook takes part in another collective
            raise

    def _batches_of(self, flats: Iterable[Flat]) -> list[Batch]:
        wanted = {self.state_of[flat].batch for flat in flats if flat in self.state_of}
        return [batch for batch in self.batches if batch in wanted]

    def _publish(self, batch: Batch) -> None:
        """Put weights that a delayed update has made to where they rest."""
        for ticket in batch.publish(self.link.fence()):
            ticket.finish()  # the next update writes the memory that is copied from

    def _refresh(self, batch: Batch, comm: Comm) -> Iterator[Ticket]:
        """Gather the new weights of flats that are whole on every rank; small ones together."""
        changed = [state.flat for state in batch.states if state.updated]
        together: list[Flat] = []
        for flat in (flat for flat in changed if flat.resident and flat.layout.ranks > 1):
            if not self.merging.takes(flat.whole):
                yield self._gather([flat], comm)
                continue
            if not self.merging.fits([other.whole for other in together], flat.whole):
                yield self._gather(together, comm)
                together = []
            together.append(flat)
        if together:
            yield self._gather(together, comm)

    def _gather(self, flats: Sequence[Flat], comm: Comm) -> Ticket:
        wholes, shards = [flat.whole for flat in flats], [flat.shard_memory for flat in flats]
        return merged.all_gather(comm, wholes, shards, merged.name_of(flats))

    # Accounts, and the end.

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

    def host_bytes(self) -> int:
        """Host memory that records on disk take at the moment."""
        return sum(batch.in_memory for batch in self.batches if batch.on_disk)

    def expected_host_bytes(self) -> int:
        """The most that may be: so many of the largest records as may be under way at once."""
        largest = sorted((batch.record_nbytes for batch in self.batches if batch.on_disk), reverse=True)
        return sum(largest[: self.policy.depth])

    def waiting_bytes(self) -> int:
        """Weights that delayed updates have made, in memory of their own until they are published."""
        fresh = (weights for batch in self.batches if batch.on_disk for weights in batch.fresh or ())
        return sum(weights.nbytes for weights in fresh)

    def expected_waiting_bytes(self) -> int:
        """What they come to once updates are delayed."""
        if self.policy.when != "delayed":
            return 0
        spans = (item for batch in self.batches if batch.on_disk for item in batch.spans)
        return sum((span.stop - span.start) * state.flat.dtype.itemsize for state, span in spans)

    def close(self) -> None:
        with ExitStack() as end:
            end.callback(self._forget)
            if self._beside is not None:
                end.callback(self._beside.close)
            for batch in self.batches:
                end.callback(batch.close)
                for state in batch.states:
                    if state.flat.pending:
                        end.callback(self._show, state.flat)
            end.callback(self._arrive_quietly)
            end.callback(self._crew.close)  # first of all: what it runs uses the batches

    def _forget(self) -> None:
        self._reading.clear()
        self._pending.clear()
        self._storing.clear()
        self._arriving.clear()
        self._departing.clear()
        self.states.clear()
        self.batches.clear()
        self.tiers.clear()
        self.state_of.clear()


def _no_steps() -> Steps:
    yield from ()


def _snapshot(groups: Groups) -> list[dict[str, Any]]:
    """The options as they are now: a schedule may change them while the update runs."""
    options = []
    for group in groups:
        copy = {key: value for key, value in group.items() if key != "params"}
        copy.update({k: float(v) for k, v in copy.items() if isinstance(v, torch.Tensor) and v.numel() == 1})
        options.append(copy)
    return options
