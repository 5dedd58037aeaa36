"""The update of all flats: for each bucket a pipeline that fetches state, updates, stores, and publishes weights."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property

import torch

from wherry.errors import WherryError
from wherry.observe.spans import span
from wherry.parallel import merged
from wherry.parallel.comm import Comm
from wherry.parallel.merged import Merging
from wherry.sharding.gradients import FlatGradient, Gradients
from wherry.sharding.unit import Flat
from wherry.tiers.homes import Home
from wherry.tiers.tickets import DONE, OnHost, Ticket, TicketGroup
from wherry.update.in_backward import InBackward
from wherry.update.optimizer_states import Absent, OptimizerStates, StateHomes, UpdateBucket
from wherry.update.rules import Groups, snapshot
from wherry.update.update_thread import FETCH, READY, STORE, UPDATE, Steps, UpdateJob, UpdateThread, drive_all


@dataclass(frozen=True)
class UpdateTerms:
    """What all updates of one step are made with."""

    groups: Groups
    multiplier: float
    # Left alone.
    absent: Absent | None
    # What the device's current stream was given before.
    fence: Ticket


@dataclass(frozen=True)
class UpdatePolicy:
    """When units are updated. The first three give the same results."""

    when: str = "at_step"  # at_step, before_use, in_backward, delayed
    # `delayed`: the steps that are made as usual, one less than the step whose update is the first to be late.
    warmup: int = 0
    # Buckets that may have their state in host memory at once, where it rests on disk.
    depth: int = 4

    @cached_property
    def beside(self) -> bool:
        """Whether updates run beside the forward or the backward."""
        return self.when != "at_step"


class Updater:
    """Updates every flat once its gradients are complete.

    Its `states` are built first, and then it is given the gradients (`attach`); to be given others later, it lets go of
    these first (`detach`). An update is pending until its weights are published: they are where they rest, and those
    that every rank holds whole are being gathered.
    """

    def __init__(
        self,
        groups: Groups,
        comm: Comm,
        homes: StateHomes,
        policy: UpdatePolicy,
        merging: Merging,
        *,
        alone: bool,
        checks_finite: bool = True,
    ) -> None:
        self.comm = comm
        self.link = homes.link
        self.policy = policy
        self.in_backward = policy.when == "in_backward"
        # Whether the next forward waits for records on disk.
        self.reads_ahead = False
        self.states = OptimizerStates(groups, homes)
        self.buckets = self.states.buckets
        self.steps_made = 0
        # Whether a gradient that this rank misses no other rank can have.
        self._alone = alone
        # Whether an update in the backward leaves gradients alone that are not finite.
        self._checks_finite = checks_finite
        self._gradients: Gradients | None = None
        self._window = InBackward(self.buckets)
        self._thread = UpdateThread(policy.depth, self.link.device)
        # The thread is in this process alone, and not in one that is forked from it.
        self._process = os.getpid()
        # What went wrong in an update: from then on there is no step to go on from.
        self._broken: BaseException | None = None
        # Records that are being read, or have been, for updates that have not begun.
        self._prefetched: dict[UpdateBucket, Ticket] = {}
        # Updates whose weights have not been published.
        self._pending: dict[UpdateBucket, UpdateJob] = {}
        # Those whose weights are in use, and whose state is still on its way to the disk.
        self._storing: dict[UpdateBucket, UpdateJob] = {}
        # Of each bucket the flats that every rank holds whole and ranks share the update of: those that are gathered
        # together, and their gathers that have begun.
        self._merging = merging
        self._together: dict[UpdateBucket, list[list[Flat]]] = {}
        self._gathers: dict[UpdateBucket, list[Ticket]] = {}
        # Whether no update has to read anything from disk.
        self._all_in_place = True

    # Before the update.

    def attach(self, gradients: Gradients) -> None:
        """All flats have been adopted; these are their gradients from now on."""
        self.states.complete()
        self._gradients = gradients
        self._together = {bucket: self._gathered_together(bucket) for bucket in self.buckets}
        self._all_in_place = all(bucket.in_place for bucket in self.buckets)
        on_disk = any(bucket.on_disk for bucket in self.buckets)
        self.reads_ahead = self.policy.when in ("before_use", "in_backward") and on_disk
        if self.reads_ahead and self.in_backward:
            self._thread.depth = max(1, self.policy.depth - 1)  # one buffer is for what is read ahead
        gradient_of = {gradient.flat: gradient for gradient in gradients.all}
        for bucket in self.buckets:
            bucket.gradients = [gradient_of[state.flat] for state in bucket.states]

    def detach(self) -> None:
        """The gradients are about to be others. Updates under way read them to their ends first."""
        self.flush()
        for bucket in self.buckets:
            bucket.detach()

    def forget(self) -> None:
        """Buffers are about to be freed: nothing of updates before holds on to them. No update may be under way."""
        for bucket in self.buckets:
            bucket.forget()

    def begin_backward(self, groups: Groups, multiplier: float, *, boundary: bool) -> None:
        """No update is under way while gradients come, but those that the policy makes of these very gradients."""
        if self.policy.when in ("before_use", "in_backward"):
            self.settle()
        if boundary and self.in_backward:
            self._window.expect(groups, multiplier)

    def cancel_backward(self) -> None:
        """It was none of weights."""
        self._window.cancel()

    # The step.

    def step(self, groups: Groups, multiplier: float, absent: Absent | None = None) -> None:
        """Update every flat with its gradients times `multiplier`, now or as the policy has it.

        `absent`: the parameters that no rank has a gradient for, by their place in the flat. They are left alone.
        """
        if self._broken is not None:
            raise WherryError(f"an update has failed before: {self._broken}") from self._broken
        self.steps_made += 1
        when = self.policy.when
        with span("update"), torch.no_grad():
            late = when == "delayed" and self.steps_made >= self.policy.warmup
            if when == "at_step" or (when == "delayed" and not late):
                self._run(groups, multiplier, absent)
                return
            buckets = self.buckets
            if self.in_backward and self._window.end(groups, multiplier):
                buckets = self._window.deferred
            else:
                self.settle()
            terms = UpdateTerms(snapshot(groups), multiplier, absent, self.link.fence())
            for bucket in buckets:
                aside = [gradient.set_aside() for gradient in bucket.gradients] if late else None
                self._send(bucket, self._steps(bucket, terms, aside))
            self._window.clear()
            self._arrange()
            if not late:
                self._begin_gathers()

    @torch.no_grad()
    def skip(
        self, groups: Groups, multiplier: float, unfit: Collection[FlatGradient]
    ) -> tuple[list[UpdateBucket], list[UpdateBucket]]:
        """The step is not taken, for the `unfit` gradients that are not finite.

        The buckets that the backward has updated all the same: from finite gradients, and from others, on the device.
        """
        if not self._window.end(groups, multiplier):
            return [], []
        terms = UpdateTerms(groups, multiplier, None, self.link.fence())
        for bucket in self._window.deferred:
            # A rank that misses nothing of it has begun its update, and sends its weights to all.
            self._send(bucket, self._steps(bucket, terms, changes=False))
        self._arrange()
        self._begin_gathers()
        for job in self._pending.values():
            job.wait_for_end()
        begun = [bucket for bucket in self._window.begun() if bucket.spans]
        self._window.clear()
        spoilt = [bucket for bucket in begun if bucket.on_device and any(g in unfit for g in bucket.gradients)]
        return [bucket for bucket in begun if bucket not in spoilt], spoilt

    def landed(self, gradient: FlatGradient) -> None:
        """In a backward: a flat's gradients are complete, reduced, and on their way to where the update finds them."""
        if not self._window.expected:
            return
        bucket = self.states.state_of[gradient.flat].bucket
        given = self._window.landed(bucket)
        if given is None:
            return
        absent = {gradient.flat: gradient.absent for gradient in bucket.gradients if gradient.absent}
        if absent and not self._alone:
            self._window.deferred.append(bucket)
            return
        # On the device gradients are not waited for: the step finds out whether they are finite.
        checks = self._checks_finite and not bucket.on_device
        terms = UpdateTerms(*given, absent, self.link.fence())
        self._send(bucket, self._steps(bucket, terms, checks_finite=checks))
        # A backward that is faster than the updates waits for them, or all gradients would be in memory at once.
        waiting = [job for job in self._pending.values() if not job.ready_for_use]
        for job in waiting[: max(0, len(waiting) - 2 * self.policy.depth)]:
            job.wait()

    def drop(self) -> list[str]:
        """The window's gradients are dropped. What has been updated from them already, by name."""
        if self._window.expected:
            for job in self._pending.values():
                job.wait_for_end()  # it may read the gradients that are given back next, and what was read for it
        self.stop_reading()
        return self._window.drop()

    def _run(self, groups: Groups, multiplier: float, absent: Absent | None) -> None:
        """Update everything, here and now."""
        self.flush()
        terms = UpdateTerms(groups, multiplier, absent, self.link.fence())
        jobs: dict[UpdateBucket, UpdateJob] = {}
        for bucket in self.buckets:
            jobs[bucket] = UpdateJob(bucket.name, self._steps(bucket, terms))
        drive_all(jobs.values(), len(jobs) if self._all_in_place else self.policy.depth)
        self._publish(jobs)
        self._wait_for_gathers(self.buckets)

    def _send(self, bucket: UpdateBucket, steps: Steps) -> None:
        """Set an update going beside what comes next."""
        self._wait_for_store(bucket)
        job = self._pending[bucket] = UpdateJob(bucket.name, steps)
        if self.policy.when != "delayed":
            for state in bucket.states:
                state.flat.pending = True
                state.flat.ungathered = True
        if bucket.on_device:
            job.run()  # its kernels go to the device's current stream, which the thread does not share
        else:
            self._thread.add(job)

    def _arrange(self) -> None:
        """Updates in the backward come in its order, and are waited for in the forward's."""
        self._thread.arrange([self._pending[bucket] for bucket in self.buckets if bucket in self._pending])

    # The pipeline of one bucket.

    def _steps(
        self,
        bucket: UpdateBucket,
        terms: UpdateTerms,
        aside: list[torch.Tensor] | None = None,
        *,
        changes: bool = True,
        checks_finite: bool = False,
    ) -> Steps:
        """Its steps between waits, for a job.

        With gradients set `aside` it is a late one: new weights are kept until they are published. One that is not to
        change anything, or whose gradients turn out not to be finite, leaves state and weights as they are.
        """
        weights = [] if bucket.apart else [s.flat.home for s in bucket.states if s.flat.home is not None]
        fetched: list[Home] = []
        uploads: list[Ticket] = []
        try:
            # Fetch: the record, weights that the update reaches, and gradients.
            tickets: list[Ticket] = []
            if bucket.home is not None:
                read = self._prefetched.pop(bucket, None)
                tickets.append(bucket.home.fetch() if read is None else read)
                fetched.append(bucket.home)
            for home in weights:
                tickets.append(home.fetch())
                fetched.append(home)
            for home in weights:
                tickets.append(home.quiet())  # what was begun before and still reads what is about to change
            for gradient in bucket.gradients if aside is None else ():
                tickets.append(gradient.landing)
            for ticket in tickets:
                if ticket is not DONE:
                    yield FETCH, ticket
            # Update.
            if changes and (not checks_finite or self._all_finite(bucket)):
                yield UPDATE, bucket.update(terms.groups, terms.multiplier, terms.absent, aside)
            for gradient in bucket.gradients:
                gradient.spent()
            # Publish, on this rank, and store.
            if aside is not None:
                bucket.fresh = [w.clone() if bucket.on_disk else w for w in bucket.working()]
            elif bucket.apart:
                uploads = [OnHost(ticket) for ticket in bucket.publish(terms.fence)]
            stores = [ticket for home in fetched if (ticket := home.store()) is not DONE]
            for ticket in uploads:
                yield STORE, ticket
            if stores:
                yield READY, DONE
            for ticket in stores:
                yield STORE, ticket
        finally:
            for home in fetched:
                home.leave(uploads[-1] if uploads and home is bucket.home else DONE)

    def _all_finite(self, bucket: UpdateBucket) -> bool:
        assert self._gradients is not None
        if all(map(self._gradients.finite, bucket.gradients)):
            return True
        self._window.not_finite.add(bucket)
        return False

    # Fetch: state that is read before its update begins.

    def read_ahead(self) -> None:
        """In a backward: begin to read what the next forward will wait for first.

        One buffer of those that there may be is left for whatever else; buffers that the last updates still write from
        are not there. Where updates run in the backward too, it is one record, whose update is the last to begin.
        """
        storing = [bucket for bucket, job in self._storing.items() if not job.done()]
        room = self.policy.depth - 1
        room = min(1, room) if self.in_backward else room - len(storing)
        busy = {*storing, *self._pending}
        try:
            for bucket in self.states.on_disk()[: max(0, room)]:
                if bucket in busy:
                    return
                if bucket not in self._prefetched:
                    assert bucket.home is not None, bucket.name
                    self._prefetched[bucket] = bucket.home.fetch()
        except BaseException as error:
            self.comm.tell(error)  # before any hook takes part in another collective
            raise

    def stop_reading(self) -> None:
        """Release what was read for updates that do not come."""
        while self._prefetched:
            bucket, _ = self._prefetched.popitem()
            assert bucket.home is not None, bucket.name
            bucket.home.leave(DONE)

    # Publish: updates become weights.

    @property
    def pending(self) -> bool:
        """Whether there are updates whose weights are not published."""
        return bool(self._pending)

    @property
    def publishes(self) -> bool:
        """Whether to settle takes all ranks, as delayed updates have made new weights that every rank holds whole."""
        return any(self._together[bucket] for bucket in self._pending)

    @torch.no_grad()
    def settle(self, flats: Iterable[Flat] | None = None) -> None:
        """Complete the updates of these flats, or of all: their weights are those after the last step."""
        if flats is None and self._storing:
            for bucket in [bucket for bucket, job in self._storing.items() if job.done()]:
                self._wait_for_store(bucket)  # it may have failed
        if not (self._pending or self._gathers):
            return
        self._refuse_fork()
        # In one order on every rank, whatever order the updates were begun in.
        buckets = self.buckets if flats is None else self.states.of(flats)
        self._publish({bucket: self._pending[bucket] for bucket in buckets if bucket in self._pending})
        self._wait_for_gathers([bucket for bucket in buckets if bucket in self._gathers])

    def flush(self) -> None:
        """As `settle`, for all, and nothing is on its way to the disk any more. Whoever reads from outside calls it."""
        if not (self._pending or self._gathers or self._storing):
            return
        if self.publishes:
            self.comm.meet("settle()")
        self.settle()
        if self._storing:
            self._refuse_fork()
        for bucket in [*self._storing]:
            self._wait_for_store(bucket)

    def _begin_gathers(self) -> None:
        """New weights that every rank holds whole are gathered from here on, and each unit waits for its own.

        All ranks are here. Were gathers begun where a unit is used, a rank that looks at its model alone would wait for
        the others.
        """
        # Weights that an update is about to change, or is changing, are read by nobody who has not waited for it.
        for bucket in self._pending:
            for state in bucket.states:
                if state.flat.resident:
                    state.flat.show_blanks()
        self._publish({b: self._pending[b] for b in self.buckets if b in self._pending and self._together[b]})

    def _publish(self, jobs: Mapping[UpdateBucket, UpdateJob]) -> None:
        """Wait for these updates, and begin to gather what every rank holds whole of their weights."""
        try:
            for bucket, job in jobs.items():
                self._wait(job)
                if bucket.fresh is not None:
                    for ticket in bucket.publish(self.link.fence()):
                        ticket.finish()  # the next update writes the memory that is copied from
                tickets = self._gathers[bucket] = []
                for flats in self._together[bucket]:
                    wholes, shards = [flat.whole for flat in flats], [flat.shard_memory for flat in flats]
                    tickets.append(merged.all_gather(self.comm, wholes, shards, merged.name_of(flats)))
                self._pending.pop(bucket, None)
                if not job.done():
                    self._storing[bucket] = job
        except BaseException:
            self._end_gathers()
            raise

    def _gathered_together(self, bucket: UpdateBucket) -> list[list[Flat]]:
        """The bucket's flats that every rank holds whole and ranks share the update of, small ones together."""
        found: list[list[Flat]] = []
        together: list[Flat] = []
        for flat in (state.flat for state in bucket.states if state.updated):
            if not flat.resident or flat.layout.ranks == 1:
                continue
            if not self._merging.takes(flat.whole):
                found.append([flat])
                continue
            if not self._merging.fits([other.whole for other in together], flat.whole):
                found.append(together)
                together = []
            together.append(flat)
        return [*found, together] if together else found

    def _wait_for_gathers(self, buckets: Sequence[UpdateBucket]) -> None:
        """The weights of these buckets are whole everywhere."""
        for bucket in buckets:
            try:
                for ticket in self._gathers[bucket]:
                    ticket.wait()
            except BaseException:
                self._end_gathers()
                raise
            del self._gathers[bucket]
            if self.policy.beside:
                self._show(bucket)

    def _end_gathers(self) -> None:
        """Wait for every gather that was begun; there is an error to be told already."""
        with suppress(Exception):
            TicketGroup([ticket for tickets in self._gathers.values() for ticket in tickets]).wait()

    def _show(self, bucket: UpdateBucket) -> None:
        for state in bucket.states:
            if state.flat.pending:
                state.flat.pending = False
                if state.flat.resident:
                    state.flat.show_whole()

    def _wait_for_store(self, bucket: UpdateBucket) -> None:
        """The state that the last update has made is at home: the next one may change it."""
        job = self._storing.pop(bucket, None)
        if job is not None:
            job.wait_for_end()
            self._wait(job)

    def _wait(self, job: UpdateJob) -> None:
        try:
            job.wait()
        except BaseException as error:
            if not isinstance(error, Exception) and not job.done():
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

    def close(self) -> None:
        with ExitStack() as end:
            end.callback(self._forget)
            end.callback(self.states.close)
            for bucket in self.buckets:
                end.callback(self._show, bucket)
            end.callback(self._end_gathers)
            end.callback(self._thread.close)  # first of all: what it runs uses the buckets

    def _forget(self) -> None:
        self._window.clear()
        self._gradients = None
        for under_way in (self._prefetched, self._pending, self._storing, self._together, self._gathers):
            under_way.clear()
