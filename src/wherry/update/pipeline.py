"""The update of all flats: when each is updated, beside what, and when its new weights may be used."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from wherry.errors import WherryError
from wherry.observe.spans import span
from wherry.parallel.comm import Comm
from wherry.parallel.merged import Merging
from wherry.placement import Tier
from wherry.sharding.gradients import FlatGradient, Gradients
from wherry.sharding.unit import Flat
from wherry.tiers.streams import Link
from wherry.update.ahead import Ahead
from wherry.update.course import course
from wherry.update.departures import Departure, Departures
from wherry.update.early import Early
from wherry.update.holdings import Holdings, StateTier
from wherry.update.jobs import Crew, Job, Steps, drive_all, drive_one
from wherry.update.rules import Groups, snapshot
from wherry.update.state import Absent, Batch

EVERYTHING = 1 << 30


@dataclass(frozen=True)
class UpdatePolicy:
    """When units are updated. The first three give the same results."""

    when: str = "at_step"  # at_step, before_use, in_backward, delayed
    # `delayed`: the steps that are made as usual, one less than the step whose update is the first to be late.
    warmup: int = 0
    # Batches that may have their state in host memory at once, where it rests on disk.
    depth: int = 4

    @cached_property
    def beside(self) -> bool:
        """Whether updates run beside the forward or the backward."""
        return self.when != "at_step"


class Updater:
    """Updates every flat once its gradients are complete.

    Its `holdings` are built first, and then it is given the gradients (`attach`); to be given others later, it lets go
    of these first (`detach`). An update is a job. It is pending until its weights are published: settled, they set out
    to the ranks that hold them whole, and arrive there.
    """

    def __init__(
        self,
        groups: Groups,
        comm: Comm,
        link: Link,
        policy: UpdatePolicy,
        tier_of: Callable[[Flat], StateTier],
        merging: Merging,
        *,
        alone: bool,
        checks_finite: bool = True,
    ) -> None:
        self.comm = comm
        # Whether a gradient that this rank misses no other rank can have.
        self._alone = alone
        self.link = link
        self.policy = policy
        self.in_backward = policy.when == "in_backward"
        # Whether the next forward waits for records on disk.
        self.reads_ahead = False
        self.holdings = Holdings(groups, link, tier_of)
        self.batches = self.holdings.batches
        self.early = Early(self.batches)
        # Whether an update in the backward leaves gradients alone that are not finite.
        self._checks_finite = checks_finite
        self._finite: Callable[[FlatGradient], bool] | None = None
        self.steps_made = 0
        self._ahead = Ahead()
        self._departures = Departures(comm, merging)
        self._crew = Crew(policy.depth, link.device)
        # The thread of the crew is in this process alone, and not in one that is forked from it.
        self._process = os.getpid()
        # What went wrong in an update: from then on there is no step to go on from.
        self._broken: BaseException | None = None
        # Updates whose weights have not been published.
        self._pending: dict[Batch, Job] = {}
        # Those whose weights are in use, and whose state is still on its way to the disk.
        self._storing: dict[Batch, Job] = {}
        # In a backward, those of which this rank misses gradients: the step tells whether another rank has them.
        self._deferred: list[Batch] = []
        # Those that a backward has not updated, as their gradients are not finite: the step is not taken.
        self._left_alone: set[Batch] = set()
        # Whether no update has to read anything from disk.
        self._all_in_place = True

    # Before the update.

    def attach(self, gradients: Gradients) -> None:
        """All flats have been adopted; these are their gradients from now on."""
        self.holdings.complete()
        self._departures.pack(self.batches)
        self._all_in_place = all(batch.in_place for batch in self.batches)
        self.reads_ahead = self.policy.when in ("before_use", "in_backward") and any(b.on_disk for b in self.batches)
        if self.reads_ahead and self.in_backward:
            self._crew.depth = max(1, self.policy.depth - 1)  # one buffer is for what is read ahead
        self._finite = gradients.finite if self._checks_finite else None
        gradient_of = {gradient.flat: gradient for gradient in gradients.all}
        for batch in self.batches:
            batch.gradients = [gradient_of[state.flat] for state in batch.states]
        if self.policy.when in ("before_use", "in_backward"):
            self._departures.open_beside(self.link.device)

    def detach(self) -> None:
        """The gradients are about to be others. Updates under way read them to their ends first."""
        self.rest()
        for batch in self.batches:
            batch.detach()

    def forget(self) -> None:
        """Buffers are about to be freed: nothing of updates before holds on to them. No update may be under way."""
        for batch in self.batches:
            batch.forget()

    def read_ahead(self) -> None:
        """In a backward: begin to read what the next forward will wait for first.

        One buffer of those that there may be is left for whatever else; buffers that the last updates still write from
        are not there. Where updates run in the backward too, it is one record, whose update is the last to begin.
        """
        storing = [batch for batch, job in self._storing.items() if not job.done()]
        room = self.policy.depth - 1
        room = room - len(storing) if self.policy.when == "before_use" else min(1, room)
        try:
            self._ahead.read(self.holdings.on_disk()[: max(0, room)], busy={*storing, *self._pending})
        except BaseException as error:
            self.comm.tell(error)  # before any hook takes part in another collective
            raise

    def stop_reading(self) -> None:
        """Let go of what was read for updates that do not come."""
        self._ahead.stop()

    # The update.

    def step(self, groups: Groups, multiplier: float, absent: Absent | None = None) -> None:
        """Update every flat with its gradients times `multiplier`, now or as the policy has it.

        `absent`: the parameters that no rank has a gradient for, by their place in the flat. They are left alone.
        """
        if self._broken is not None:
            raise WherryError(f"an update has failed before: {self._broken}") from self._broken
        self.steps_made += 1
        when = self.policy.when
        with span("update"), torch.no_grad():
            if when == "in_backward":
                if self.early.end(groups, multiplier):
                    self._send_all(self._take_deferred(), groups, multiplier, absent)
                    self._arrange()
                else:
                    self._begin(groups, multiplier, absent)
            elif when == "before_use":
                self._begin(groups, multiplier, absent)
            elif when == "delayed" and self.steps_made >= self.policy.warmup:
                self._begin(groups, multiplier, absent, late=True)
            else:
                self._at_once(self.batches, groups, multiplier, absent)
            if self._pending and when != "delayed":
                self._promise()
                self._hide()

    @torch.no_grad()
    def skip(
        self, groups: Groups, multiplier: float, unfit: Collection[FlatGradient]
    ) -> tuple[list[Batch], list[Batch]]:
        """The step is not taken, for the `unfit` gradients that are not finite.

        The batches that the backward has updated all the same: from finite gradients, and from others, on the device.
        """
        if not self.early.end(groups, multiplier):
            return [], []
        deferred = self._take_deferred()
        for batch in deferred:  # a rank that misses nothing of it has begun its update, and sends its weights to all
            unchanged = course(batch, self._ahead.take, groups, multiplier, self.link.fence(), fit=lambda: False)
            self._send(batch, unchanged)
        self._arrange()
        self._promise()
        self._hide()
        for job in self._pending.values():
            job.come_to_an_end()
        left, self._left_alone = {*deferred, *self._left_alone}, set()
        begun = [batch for batch in self.batches if batch.spans and batch not in left]
        spoilt = [batch for batch in begun if self._inline(batch) and any(g in unfit for g in batch.gradients)]
        return [batch for batch in begun if batch not in spoilt], spoilt

    def _arrange(self) -> None:
        """Updates came in the backward's order, and are waited for in the forward's."""
        self._crew.arrange([self._pending[batch] for batch in self.batches if batch in self._pending])

    def landed(self, gradient: FlatGradient) -> None:
        """In a backward: a flat's gradients are complete, reduced, and on their way to where the update finds them."""
        if not self.early.expected:
            return
        batch = self.holdings.state_of[gradient.flat].batch
        terms = self.early.landed(batch)
        if terms is None:
            return
        absent = {gradient.flat: gradient.absent for gradient in batch.gradients if gradient.absent}
        if absent and not self._alone:
            self._deferred.append(batch)
            return
        # On the device they are not waited for: the step finds out.
        fit = None if self._finite is None or self._inline(batch) else partial(self._fit, batch)
        self._send(batch, course(batch, self._ahead.take, *terms, self.link.fence(), absent, fit=fit))
        self._keep_pace()

    def _take_deferred(self) -> list[Batch]:
        deferred, self._deferred = self._deferred, []
        return deferred

    def _fit(self, batch: Batch) -> bool:
        assert self._finite is not None
        if all(map(self._finite, batch.gradients)):
            return True
        self._left_alone.add(batch)
        return False

    def _inline(self, batch: Batch) -> bool:
        """Whether its updates are kernels of the device, queued by whoever asks for them."""
        return self.holdings.tiers[batch] is Tier.DEVICE and not self.link.shared

    def _keep_pace(self) -> None:
        """A backward that is faster than the updates waits for them, or all gradients would be in memory at once."""
        waiting = [job for job in self._pending.values() if not job.ready_for_use]
        for job in waiting[: max(0, len(waiting) - 2 * self.policy.depth)]:
            job.wait()

    def abandon(self) -> list[str]:
        """The window's gradients are dropped. What has been updated from them already, by name."""
        if self.early.expected:
            for job in self._pending.values():
                job.come_to_an_end()  # it may read the gradients that are given back next, and what was read for it
        self._ahead.stop()
        left, self._left_alone = {*self._take_deferred(), *self._left_alone}, set()
        return self.early.drop(left)

    def _at_once(
        self, batches: Sequence[Batch], groups: Groups, multiplier: float, absent: Absent | None = None
    ) -> None:
        if self._pending or self._departures.arriving or self._storing:
            self.complete()
        # Records that were read for other updates are in memory beside these.
        depth = EVERYTHING if self._all_in_place else max(1, self.policy.depth - self._ahead.beside(batches))
        fence = self.link.fence()
        read = self._ahead.take
        jobs = {batch: Job(batch.name, course(batch, read, groups, multiplier, fence, absent)) for batch in batches}
        drive_all(jobs.values(), depth)  # to their ends, also if one has failed
        self._set_out(jobs)
        self._arrive(batches)

    def _begin(self, groups: Groups, multiplier: float, absent: Absent | None, *, late: bool = False) -> None:
        """Set all updates going beside what comes next, in the order in which units run."""
        self.settle()
        self._send_all(self.batches, groups, multiplier, absent, late=late)

    def _send_all(
        self,
        batches: Iterable[Batch],
        groups: Groups,
        multiplier: float,
        absent: Absent | None,
        *,
        late: bool = False,
    ) -> None:
        groups = snapshot(groups)
        fence = self.link.fence()
        for batch in batches:
            aside = [gradient.set_aside() for gradient in batch.gradients] if late else None
            self._send(batch, course(batch, self._ahead.take, groups, multiplier, fence, absent, aside))

    def _send(self, batch: Batch, steps: Steps) -> None:
        """Set an update going."""
        self._stored(batch)
        job = Job(batch.name, steps)
        self._pending[batch] = job
        if self.policy.when != "delayed":
            for state in batch.states:
                state.flat.pending = True
                state.flat.ungathered = True
        if self._inline(batch):
            # They go to the device's current stream, which the crew's thread does not share.
            return drive_one(job)
        self._crew.add(job)

    def _promise(self) -> None:
        """New weights that every rank holds whole will set out without further ado, and each unit waits for its own.

        If they set out where a unit is used, a rank that looks at its model alone would wait for the others. Here all
        ranks are: where no group is for gathers after an update, they begin here.
        """
        jobs = {b: self._pending[b] for b in self.batches if b in self._pending and self._departures.travels(b)}
        if self._departures.beside is None:
            return self._set_out(jobs)
        for batch, job in jobs.items():
            self._departures.promise(batch, job)

    def _hide(self) -> None:
        """Weights that an update is about to change, or is changing, are read by nobody who has not waited for it."""
        for batch in self._pending:
            for state in batch.states:
                if state.flat.resident:
                    state.flat.show_blanks()

    # Where updates become weights.

    @torch.no_grad()
    def settle(self, flats: Iterable[Flat] | None = None) -> None:
        """Complete the updates of these flats, or of all: their weights are those after the last step."""
        if flats is None and self._storing:
            for batch in [batch for batch, job in self._storing.items() if job.done()]:
                self._stored(batch)  # it may have failed
        if not (self._pending or self._departures.arriving):
            return
        self._refuse_fork()
        # In one order on every rank, whatever order the updates were begun in.
        batches = self.batches if flats is None else self.holdings.of(flats)
        self._set_out({batch: self._pending[batch] for batch in batches if batch in self._pending})
        self._arrive([batch for batch in batches if batch in self._departures.arriving])

    def complete(self) -> None:
        """As `settle`, for all, and nothing is on its way to the disk any more."""
        self.settle()
        self._all_stored()

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

    def _set_out(self, jobs: Mapping[Batch, Job]) -> None:
        """These updates come to their ends, and what every rank holds whole of their weights sets out to all."""
        try:
            for batch, job in jobs.items():
                self._wait(self._departures.promised.get(batch) or job)
                if batch.fresh is not None:
                    self._publish(batch)
                self._departures.set_out(batch)
                self._pending.pop(batch, None)
                if not job.done():
                    self._storing[batch] = job
        except BaseException:
            self._departures.arrive_quietly()
            raise

    def _arrive(self, batches: Iterable[Batch]) -> None:
        """The weights of these batches are whole everywhere."""
        for batch in batches:
            self._departures.arrive(batch)
            if self.policy.beside:
                self._show(batch)

    def _show(self, batch: Batch) -> None:
        for state in batch.states:
            if state.flat.pending:
                state.flat.pending = False
                if state.flat.resident:
                    state.flat.show_whole()

    def _publish(self, batch: Batch) -> None:
        """Put weights that a delayed update has made to where they rest."""
        for ticket in batch.publish(self.link.fence()):
            ticket.finish()  # the next update writes the memory that is copied from

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

    def _wait(self, update: Job | Departure) -> None:
        try:
            update.wait()
        except BaseException as error:
            if not isinstance(error, Exception) and not update.done():
                raise  # Ctrl-C: the update goes on, and who waited for it does not
            self._broken = self._broken or error
            self.comm.tell(error)  # before any hook takes part in another collective
            raise

    def _refuse_fork(self) -> None:
        if os.getpid() != self._process:
            raise WherryError(
                f"weights were read whose update is under way in process {self._process}, and this is its fork "
                f"{os.getpid()}, where that update does not run; call engine.settle() before the fork (as before a "
                "DataLoader starts its workers), or read weights in the first process"
            )

    # Delayed updates.

    @property
    def publishes(self) -> bool:
        """Whether to complete delayed updates takes all ranks: new weights that every rank holds whole travel then."""
        return any(map(self._departures.travels, self._pending))

    def behind(self, flat: Flat) -> bool:
        """Whether a flat's weights are one update older than its master, between two steps of delayed updates."""
        state = self.holdings.state_of.get(flat)
        return state is not None and state.batch.fresh is not None

    @torch.no_grad()
    def hold_back(self) -> None:
        """Masters were loaded that are one update ahead of the weights: these follow in the next step."""
        assert self.policy.when == "delayed" and not self._pending, self.policy
        for batch in self.batches:
            batch.fresh = batch.fetched_working()
            self._pending[batch] = job = Job(batch.name, _no_steps())
            drive_one(job)

    # The end.

    def close(self) -> None:
        with ExitStack() as end:
            end.callback(self._forget)
            end.callback(self.holdings.close)
            for batch in self.batches:
                end.callback(self._show, batch)
            end.callback(self._departures.close)
            end.callback(self._crew.close)  # first of all: what it runs uses the batches

    def _forget(self) -> None:
        self.early.forget()
        self._ahead.forget()
        self._deferred.clear()
        self._left_alone.clear()
        self._pending.clear()
        self._storing.clear()


def _no_steps() -> Steps:
    yield from ()
