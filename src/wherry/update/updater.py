"""When buckets are updated: all at the step, each before its next use, in the backward, or a step late."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from wherry.errors import WherryError
from wherry.observe.log import logger
from wherry.observe.spans import SILENT, recording, span
from wherry.parallel.comm import Comm, Merging
from wherry.sharding.flat_gradient import FlatGradient
from wherry.sharding.gradients import Gradients
from wherry.sharding.unit import Flat
from wherry.tickets import Ticket, TicketGroup
from wherry.update.optimizer_states import Absent, OptimizerStates, StateStorages, UpdateBucket
from wherry.update.pipeline import BucketPipeline, Phase, UpdateTerms
from wherry.update.rules import Groups, snapshot
from wherry.update.update_thread import UpdateJob, UpdateThread, drive_all


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


class PartialUpdate(WherryError):
    """A step that did not end has updated parts of the model, in its backward: what is left is of no step."""

    def __init__(self, changed: Sequence[str], parts: int) -> None:
        self.changed, self.parts = list(changed), parts
        names = ", ".join(changed[:3]) + ", ..." * (len(changed) > 3)
        super().__init__(
            f"gradients were dropped that no step has ended, and the update policy in_backward has updated "
            f"{len(changed)} of {parts} parts of the model from them already ({names}). Go back to a checkpoint with "
            "load_checkpoint(), which loses nothing; or train on with the weights as they are, after "
            "engine.accept_partial_update() on every rank"
        )


class InBackward:
    """One window's updates in its boundary's backward, from there to its step.

    They are not taken back: the step can only find that all of them were made, and with the options that it would have
    made them with.
    """

    def __init__(self, groups: Groups, multiplier: float) -> None:
        self.groups = snapshot(groups)
        self.multiplier = multiplier
        # Those that have begun, in the order of the backward.
        self.begun: dict[BucketPipeline, UpdateJob] = {}
        # Buckets of which this rank misses gradients: the step tells whether another rank has them.
        self.deferred: list[BucketPipeline] = []
        # How many flats of each have landed.
        self.landed: Counter[BucketPipeline] = Counter()

    def check(self, groups: Groups, multiplier: float) -> None:
        """The step has come, with these."""
        if self.multiplier != multiplier or self.groups != snapshot(groups):
            raise WherryError(
                "step: learning rate or other options changed between backward and step, and the weights have been "
                'updated with those before; set "wherry": {"update_policy": "before_use"} to change them there'
            )


class Updater:
    """Updates every flat once its gradients are complete.

    Its `states` are built first, and then it is given the gradients (`attach`); to be given others later, it lets go of
    these first (`detach`).
    """

    def __init__(
        self,
        groups: Groups,
        comm: Comm,
        storages: StateStorages,
        policy: UpdatePolicy,
        merging: Merging,
        *,
        alone: bool,
        checks_finite: bool = True,
    ) -> None:
        self.comm = comm
        self.link = storages.link
        self.policy = policy
        self.in_backward = policy.when == "in_backward"
        # Whether the next forward waits for records on disk.
        self.reads_ahead = False
        self.states = OptimizerStates(groups, storages)
        self.buckets = self.states.buckets
        self._merging = merging
        # Whether a gradient that this rank misses no other rank can have.
        self._alone = alone
        # Whether an update in the backward leaves gradients alone that are not finite.
        self._checks_finite = checks_finite
        self._gradients: Gradients | None = None
        # In the order in which units run.
        self.pipelines: list[BucketPipeline] = []
        self._pipeline_of: dict[Flat, BucketPipeline] = {}
        # The window whose updates are made in its backward, from there to its step.
        self._in_backward: InBackward | None = None
        self._thread: UpdateThread | None = None
        # The thread is in this process alone, and not in one that is forked from it.
        self._process = os.getpid()
        # Whether no update has to read anything from disk.
        self._all_in_place = True
        self._steps_made = 0
        # What went wrong in an update: from then on there is no step to go on from, until all is loaded anew.
        self.broken: BaseException | None = None

    # Before the update.

    def attach(self, gradients: Gradients) -> None:
        """All flats have been adopted; these are their gradients from now on."""
        self.states.complete()
        self._gradients = gradients
        gradient_of = {gradient.flat: gradient for gradient in gradients.all}
        for bucket in self.buckets:
            mine = [gradient_of[state.flat] for state in bucket.states]
            pipeline = BucketPipeline(bucket, mine, self._merging, self.comm)
            self.pipelines.append(pipeline)
            self._pipeline_of |= dict.fromkeys(pipeline.flats, pipeline)
        self._all_in_place = all(bucket.in_place for bucket in self.buckets)
        depth, on_disk = self.policy.depth, any(bucket.on_disk for bucket in self.buckets)
        self.reads_ahead = self.policy.when in ("before_use", "in_backward") and on_disk
        if self.reads_ahead and self.in_backward:
            depth = max(1, depth - 1)  # one buffer is for what is read ahead
        self._thread = UpdateThread(depth, self.link.device)

    def detach(self) -> None:
        """The gradients are about to be others. Updates under way read them to their ends first."""
        self.flush()
        self.drop_reads()
        self.forget()
        self._let_go()

    def forget(self) -> None:
        """Buffers are about to be freed: nothing of updates before holds on to them. No update may be under way."""
        for bucket in self.buckets:
            bucket.forget()

    def go_on_from(self, steps: int) -> None:
        """So many updates have been made, by the run that this one goes on from."""
        self._steps_made = steps

    def begin_backward(self, groups: Groups, multiplier: float, *, boundary: bool) -> None:
        """No update is under way while gradients come, but those that the policy makes of these very gradients."""
        if self.broken is not None:
            self.check_whole()
        if self.policy.when in ("before_use", "in_backward"):
            self.settle()
        if boundary and self.in_backward:
            if self._in_backward is not None and self._in_backward.landed:
                raise WherryError(
                    "backward: the weights of this accumulation window have been updated already, in the backward "
                    'before this one; for several backwards before a step set "wherry": {"update_policy": "before_use"}'
                )
            self.take_edits()
            self._in_backward = InBackward(groups, multiplier)

    @torch.no_grad()
    def take_edits(self) -> None:
        """Keep edits that were made to weights outside of the engine, where masters would overwrite them."""
        editable = [(pipeline, state) for pipeline in self.pipelines for state in pipeline.bucket.editable]
        if not editable:
            return
        edited = torch.stack([state.compare_weights() for _, state in editable]).tolist()
        for (pipeline, state), changed in zip(editable, edited, strict=True):
            if not changed:
                continue
            if pipeline.phase is not Phase.SETTLED and pipeline.phase is not Phase.STORING:
                raise WherryError(
                    f"step: weights of {state.flat.name} were edited while a delayed update of them was under way, "
                    "which would overwrite the edit; edit them inside wherry.gathered(...), which waits for it"
                )
            self._wait_for_store(pipeline)
            pipeline.bucket.take_weights(state)
            logger.debug("%s: weights that were edited outside wherry.gathered are kept", state.flat.name)

    def cancel_backward(self) -> None:
        """It was none of weights."""
        if self._in_backward is not None and not self._in_backward.landed:
            self._in_backward = None

    # The step.

    def check_whole(self) -> None:
        """Raise if an update has failed: weights and optimizer state are not those of one step any more."""
        if isinstance(self.broken, PartialUpdate):
            raise PartialUpdate(self.broken.changed, self.broken.parts)  # anew, as it keeps the frames it goes through
        if self.broken is not None:
            what = str(self.broken) or (
                f"{type(self.broken).__name__} left it unfinished, and weights and optimizer state are not those of "
                "one step any more: go on from a checkpoint"
            )
            raise WherryError(f"an update has failed before: {what}") from self.broken

    def step(self, groups: Groups, multiplier: float, absent: Absent | None = None) -> None:
        """Update every flat with its gradients times `multiplier`, now or as the policy has it.

        `absent`: the parameters that no rank has a gradient for, by their place in the flat. They are left alone.
        """
        self.check_whole()
        self._steps_made += 1
        late = self.policy.when == "delayed" and self._steps_made >= self.policy.warmup
        with span("update") if recording() else SILENT, torch.no_grad():
            if not (late or self.policy.when in ("before_use", "in_backward")):
                self._update_now(groups, multiplier, absent)
                return
            window = self._end_window(groups, multiplier)
            if window is None:
                self.settle()
            try:
                terms = UpdateTerms(snapshot(groups), multiplier, absent, self.link.fence())
                for pipeline in self.pipelines if window is None else window.deferred:
                    self._send(pipeline, terms, late=late)
            except BaseException as error:  # some updates go on, and the others never will
                self.broken = self.broken or error
                raise
            self._arrange()
            if not late:
                self._begin_gathers()

    def _update_now(self, groups: Groups, multiplier: float, absent: Absent | None) -> None:
        self.flush()
        terms = UpdateTerms(groups, multiplier, absent, self.link.fence())
        try:
            jobs = [pipeline.begin(terms) for pipeline in self.pipelines]
            for pipeline in self.pipelines:
                if pipeline.bucket.by_device and pipeline.bucket.in_place:
                    pipeline.job.launch()  # before any copy down is waited for
            drive_all(jobs, len(jobs) if self._all_in_place else self.policy.depth)
            self._publish(self.pipelines)
            self._wait_for_gathers(self.pipelines)
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """An error or Ctrl-C has left updates unfinished that only the step runs: who waited for one, waited for ever.

        Updates that were all made are published by whoever waits for them next.
        """
        if not all(pipeline.job.ended_well for pipeline in self.pipelines):
            self.broken = self.broken or error
            for pipeline in self.pipelines:
                pipeline.give_up(error)

    def interrupted(self, error: BaseException) -> None:
        """Ctrl-C in a step: what of it was made, and of what is kept beside it, nobody knows."""
        self.broken = self.broken or error

    def give_up_for_load(self) -> None:
        """An update of this rank or of another has failed, and all values are about to be loaded.

        Nothing of it is published any more. Every rank makes the call.
        """
        self.broken = self.broken or WherryError("it is of another rank; go on from a checkpoint")
        for pipeline in self.pipelines:
            pipeline.job.wait_for_end()
            pipeline.give_up(self.broken)

    def made_whole(self) -> None:
        """Every value has been loaded, and they are those of one step again; or what they are has been accepted."""
        self.broken = None

    @torch.no_grad()
    def skip(
        self, groups: Groups, multiplier: float, unfit: Collection[FlatGradient]
    ) -> tuple[list[UpdateBucket], list[UpdateBucket]]:
        """The step is not taken, for the `unfit` gradients that are not finite.

        The buckets that the backward has updated all the same: from finite gradients, and from others, on the device.
        """
        window = self._end_window(groups, multiplier)
        if window is None:
            return [], []
        terms = UpdateTerms(groups, multiplier, None, self.link.fence())
        for pipeline in window.deferred:
            # A rank that misses nothing of it has begun its update, and sends its weights to all.
            self._send(pipeline, terms, fit=lambda: False)
        self._arrange()
        self._begin_gathers()
        for job in self._pending_jobs():
            job.wait_for_end()
        made = [pipeline for pipeline in self.pipelines if pipeline.updated and pipeline.bucket.spans]
        spoilt = [p for p in made if p.bucket.on_device and any(gradient in unfit for gradient in p.gradients)]
        return [p.bucket for p in made if p not in spoilt], [p.bucket for p in spoilt]

    def landed(self, gradient: FlatGradient) -> None:
        """In a backward: a flat's gradients are complete, reduced, and on their way to where the update finds them."""
        window = self._in_backward
        if window is None:
            return
        pipeline = self._pipeline_of[gradient.flat]
        window.landed[pipeline] += 1
        if window.landed[pipeline] < len(pipeline.flats):
            return
        absent = {gradient.flat: gradient.absent for gradient in pipeline.gradients if gradient.absent}
        if absent and not self._alone:
            window.deferred.append(pipeline)
            return
        # On the device gradients are not waited for: the step finds out whether they are finite.
        checks = self._checks_finite and not pipeline.bucket.on_device
        terms = UpdateTerms(window.groups, window.multiplier, absent, self.link.fence())
        window.begun[pipeline] = self._send(pipeline, terms, fit=partial(self._finite, pipeline) if checks else None)
        # A backward that is faster than the updates waits for them, or all gradients would be in memory at once.
        waiting = [job for job in window.begun.values() if not job.ready_for_use]
        for job in waiting[: max(0, len(waiting) - 2 * self.policy.depth)]:
            job.wait()

    def drop(self) -> list[str]:
        """The window's gradients are dropped. What has been updated from them already, by name."""
        window, self._in_backward = self._in_backward, None
        changed: list[str] = []
        if window is not None:
            for job in window.begun.values():
                job.wait_for_end()  # it may read the gradients that are given back next, and what was read for it
            changed = [p.bucket.name for p in self.pipelines if p in window.begun and p.updated]
        if changed:
            self.broken = self.broken or PartialUpdate(changed, len(self.pipelines))
        self.drop_reads()
        return changed

    def left(self) -> tuple[list[str], list[str], str | None]:
        """What a step that did not end has updated, and those of the updates that are not published, by name.

        Or what has gone wrong otherwise, with which nothing can go on.
        """
        pending = [pipeline.bucket.name for pipeline in self.pipelines if pipeline.phase is Phase.PENDING]
        if self.broken is None or isinstance(self.broken, PartialUpdate):
            return self.broken.changed if self.broken is not None else [], pending, None
        try:
            self.check_whole()
        except WherryError as error:
            return [], pending, str(error)
        raise AssertionError("an update that is broken is whole")

    @torch.no_grad()
    def publish_left(self, pending: Collection[str]) -> None:
        """A step that did not end has made these updates, on any rank; all ranks take part in what one has begun."""
        under_way = [pipeline for pipeline in self.pipelines if pipeline.bucket.name in pending]
        for pipeline in under_way:
            self._wait_for_store(pipeline)
            for flat in pipeline.flats:
                flat.begin_update()
        self._publish(under_way)
        self._wait_for_gathers(under_way)

    def _finite(self, pipeline: BucketPipeline) -> bool:
        assert self._gradients is not None
        return all(map(self._gradients.finite, pipeline.gradients))

    def _end_window(self, groups: Groups, multiplier: float) -> InBackward | None:
        """The step has come. None if its updates have yet to be made: its boundary was decided after its backward."""
        window, self._in_backward = self._in_backward, None
        if window is not None:
            window.check(groups, multiplier)
            assert len(window.begun) + len(window.deferred) == len(self.pipelines)
        return window

    def _send(
        self,
        pipeline: BucketPipeline,
        terms: UpdateTerms,
        *,
        late: bool = False,
        fit: Callable[[], bool] | None = None,
    ) -> UpdateJob:
        """Set an update going beside what comes next."""
        self._wait_for_store(pipeline)
        assert self._thread is not None
        job = pipeline.begin(terms, late=late, fit=fit)
        try:
            for flat in pipeline.flats if not late else ():
                flat.begin_update()
            if pipeline.bucket.on_device:
                job.launch()  # its kernels go to the device's current stream, which the thread does not share
            if not job.done():
                self._thread.add(job)
        except BaseException as error:  # Ctrl-C between two of its steps
            job.give_up(error)
            raise
        return job

    def _arrange(self) -> None:
        """Updates in the backward come in its order, and are waited for in the forward's."""
        assert self._thread is not None
        self._thread.arrange(self._pending_jobs())

    # State that is read before its update begins.

    def read_ahead(self) -> None:
        """In a backward: begin to read what the next forward will wait for first.

        One buffer of those that there may be is left for whatever else; buffers that the last updates still write from
        are not there. Where updates run in the backward too, it is one record, whose update is the last to begin.
        """
        on_disk = [pipeline for pipeline in self.pipelines if pipeline.bucket.on_disk]
        busy = [p for p in on_disk if p.phase is Phase.PENDING or not p.job.done()]
        room = min(1, self.policy.depth - 1) if self.in_backward else self.policy.depth - 1 - len(busy)
        try:
            for pipeline in on_disk[: max(0, room)]:
                if pipeline in busy:
                    return
                pipeline.read_ahead()
        except BaseException as error:
            self.comm.tell(error)  # before any hook takes part in another collective
            raise

    def drop_reads(self) -> None:
        """Release what was read for updates that do not come."""
        for pipeline in self.pipelines:
            pipeline.drop_reads()

    # Updates become weights.

    @property
    def pending(self) -> bool:
        """Whether there are updates whose weights are not published."""
        return bool(self._pending_jobs())

    @torch.no_grad()
    def settle(self, flats: Iterable[Flat] | None = None) -> None:
        """Complete the updates of these flats, or of all: their weights are those after the last step."""
        under_way = [pipeline for pipeline in self.pipelines if pipeline.phase is not Phase.SETTLED]
        if flats is not None and under_way:
            # In one order on every rank, whatever order the updates were begun in.
            wanted = {self._pipeline_of.get(flat) for flat in flats}
            under_way = [pipeline for pipeline in under_way if pipeline in wanted]
        for pipeline in under_way:
            if pipeline.phase is Phase.STORING and pipeline.job.done():
                self._wait_for_store(pipeline)  # it may have failed
        under_way = [pipeline for pipeline in under_way if pipeline.phase in (Phase.PENDING, Phase.PUBLISHED)]
        if under_way:
            self._refuse_fork()
            self.check_whole()
            pending = [pipeline for pipeline in under_way if pipeline.phase is Phase.PENDING]
            for flat in [flat for pipeline in pending for flat in pipeline.flats if not flat.pending]:
                flat.begin_update()  # after a Ctrl-C in here, the next use settles
            self._publish(pending)
            self._wait_for_gathers(under_way)

    def flush(self) -> None:
        """As `settle`, for all, and nothing is on its way to the disk any more. Whoever reads from outside calls it."""
        under_way = [pipeline for pipeline in self.pipelines if pipeline.phase is not Phase.SETTLED]
        if not under_way:
            return
        self.check_whole()
        # Delayed updates have made new weights that every rank holds whole: to publish them takes all ranks.
        if any(pipeline.phase is Phase.PENDING and pipeline.together for pipeline in under_way):
            self.comm.meet("settle()")
        self.settle()
        for pipeline in under_way:
            if pipeline.phase is Phase.STORING:
                self._refuse_fork()
                self._wait_for_store(pipeline)

    def _begin_gathers(self) -> None:
        """New weights that every rank holds whole are gathered from here on, and each unit waits for its own.

        All ranks are here. Were gathers begun where a unit is used, a rank that looks at its model alone would wait for
        the others.
        """
        pending = [pipeline for pipeline in self.pipelines if pipeline.phase is Phase.PENDING]
        # Weights that an update is about to change, or is changing, are read by nobody who has not waited for it.
        for flat in [flat for pipeline in pending for flat in pipeline.flats]:
            if flat.resident:
                flat.show_blanks()
        self._publish([pipeline for pipeline in pending if pipeline.together])

    def _publish(self, pipelines: Sequence[BucketPipeline]) -> None:
        """Wait for these updates, and begin to gather what every rank holds whole of their weights."""
        try:
            for pipeline in pipelines:
                self._wait(pipeline.job)
                try:
                    pipeline.publish()
                except KeyboardInterrupt as error:
                    # Which gathers were launched is unknown: launched again, they would meet other collectives.
                    if pipeline.together:
                        self.interrupted(error)
                    raise
        except BaseException:
            self._end_gathers()
            raise

    def _wait_for_gathers(self, pipelines: Sequence[BucketPipeline]) -> None:
        try:
            for pipeline in pipelines:
                pipeline.wait_for_gathers()
        except BaseException:
            self._end_gathers()
            raise

    def _end_gathers(self) -> None:
        """Wait for every gather that was begun; there is an error to be told already."""
        with suppress(Exception):
            TicketGroup([ticket for pipeline in self.pipelines for ticket in pipeline.gathers]).wait()

    def _wait_for_store(self, pipeline: BucketPipeline) -> None:
        """The state that the last update has made is stored: the next one may change it."""
        if pipeline.phase is Phase.STORING:
            pipeline.job.wait_for_end()
            pipeline.phase = Phase.SETTLED
            self._wait(pipeline.job)

    def _pending_jobs(self) -> list[UpdateJob]:
        return [pipeline.job for pipeline in self.pipelines if pipeline.phase is Phase.PENDING]

    def _wait(self, job: Ticket) -> None:
        try:
            job.wait()
        except BaseException as error:
            if not isinstance(error, Exception) and not job.done():
                raise  # Ctrl-C: the update goes on, and who waited for it does not
            self.broken = self.broken or error
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
            end.callback(self.states.close)
            end.callback(self._let_go)
            for pipeline in self.pipelines:
                end.callback(pipeline.show)
            end.callback(self._end_gathers)
            if self._thread is not None:
                end.callback(self._thread.close)  # first of all: what it runs uses the buckets
        # An error has the frames that it went through, these a loss, and that its graph, whose hooks are the engine's:
        # a circle that no collector of garbage sees.
        self.broken = None

    def _let_go(self) -> None:
        if self._thread is not None:
            self._thread.close()
        self._in_backward = self._gradients = self._thread = None
        self.pipelines.clear()
        self._pipeline_of.clear()
