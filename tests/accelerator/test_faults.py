"""That the other tests can fail: each of these takes one wait, one lifetime or one order from the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator.machine import MACHINE
from tests.covering import Case
from tests.engine.harness import Run, assert_equal
from tests.life import BASE, at, on_ranks, whole

from wherry.activations import stores
from wherry.sharding.flat_gradient import FlatGradient
from wherry.sharding.gradients import Gradients
from wherry.tickets import DONE, Ticket
from wherry.tiers import storage, streams
from wherry.tiers.streams import CopiesDown, DeviceLink, _Copy
from wherry.update.pipeline import BucketPipeline
from wherry.update.update_thread import UpdateJob

SEEDS = 12
Patch = pytest.MonkeyPatch


def copies_up_at_once(patch: Patch) -> None:
    """A copy up does not wait for what its target's memory was used for."""
    patch.setattr(DeviceLink, "_record", lambda self: _nothing())


def copies_down_at_once(patch: Patch) -> None:
    """A copy down does not wait for what computes its source."""

    def down(self: DeviceLink, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        return self._copy(self._down, target, source, on_host=True)

    patch.setattr(DeviceLink, "down", down)


def weights_before_they_come(patch: Patch) -> None:
    """The computing stream does not wait for weights that are on their way up."""
    wait = _Copy.wait
    patch.setattr(_Copy, "wait", lambda self: wait(self) if self._on_host else None)


def updates_before_gradients_land(patch: Patch) -> None:
    """The host does not wait for copies down."""
    patch.setattr(_Copy, "finish", lambda self: None)


def buffers_given_back_early(patch: Patch) -> None:
    """What a copy down reads is written again before it was read."""

    def begin(self: CopiesDown, target: torch.Tensor, source: torch.Tensor, give: Callable[[], None]) -> Ticket:
        copied = self.link.down(target, source)
        give()
        return copied

    patch.setattr(CopiesDown, "begin", begin)


def sums_overwritten(patch: Patch) -> None:
    """The next window's first gradient overwrites a sum that is still being copied down, for a thread that is late."""
    _slow_updates(patch)
    begin = Gradients.begin

    def careless(self: Gradients) -> None:
        link, self.link = self.link, _Orderless()
        try:
            begin(self)
        finally:
            self.link = link

    patch.setattr(Gradients, "begin", careless)


def disk_buffers_reused_under_a_copy(patch: Patch) -> None:
    """A buffer of the disk tier is another's while a copy up still reads it."""
    release = storage.DiskStorage.release
    patch.setattr(storage.DiskStorage, "release", lambda self, _=DONE, *, failed=False: release(self, failed=failed))


def activations_fetched_before_they_went(patch: Patch) -> None:
    """An activation comes back before it has been copied away."""
    up = DeviceLink.up
    patch.setattr(DeviceLink, "up", lambda self, target, source, *, fence=None, after=DONE: up(self, target, source))


def activations_freed_under_a_copy(patch: Patch) -> None:
    """The memory of an activation is another's while it is copied away."""
    patch.setattr(_Copy, "__init__", _forgetful(_Copy.__init__))


def host_buffers_reused_under_a_copy(patch: Patch) -> None:
    """A host buffer of an activation is another's while it is copied back."""
    patch.setattr(stores.Returning, "give", lambda self, host, tickets: self.link.host.give(host))


def late_weights_overwritten(patch: Patch) -> None:
    """A delayed update writes weights that are still being sent up."""
    publish = BucketPipeline.publish

    def forgets(self: BucketPipeline) -> None:
        publish(self)
        self._published = []

    patch.setattr(BucketPipeline, "publish", forgets)


def lent_gradients_overwritten(patch: Patch) -> None:
    """The next window's gradients come to where a delayed update reads those before."""
    _slow_updates(patch)
    patch.setattr(FlatGradient, "_writable", lambda self: self.owned)


def sums_added_before_they_land(patch: Patch) -> None:
    """The host adds a micro-batch that has not come down."""
    begin = CopiesDown.begin

    def careless(self: CopiesDown, *arguments: Any) -> Ticket:
        begin(self, *arguments)
        return DONE

    patch.setattr(CopiesDown, "begin", careless)


def gathered_before_the_copy_up(patch: Patch) -> None:
    """Ranks gather a part of the weights that is still on its way up."""

    @contextmanager
    def uploading(self: DeviceLink) -> Iterator[None]:
        yield

    patch.setattr(DeviceLink, "uploading", uploading)


def saved_before_it_was_computed(patch: Patch) -> None:
    """A save beside the training copies what kernels queued before have yet to write."""

    def aside(self: DeviceLink, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        self._aside = self._aside or streams.new_stream(self.device)
        return self._copy(self._aside, target, source, on_host=True)

    patch.setattr(DeviceLink, "aside", aside)


def _slow_updates(patch: Patch) -> None:
    go_on = UpdateJob.go_on
    patch.setattr(UpdateJob, "go_on", lambda self: (time.sleep(0.05), go_on(self)))


class _Orderless:
    def order(self, ticket: Ticket) -> None:
        """Nothing waits."""


def _nothing() -> torch.Event:
    """An event of a stream with nothing on it."""
    event = torch.Event(torch.accelerator.current_accelerator())
    event.record(torch.Stream(torch.accelerator.current_accelerator()))
    return event


def _forgetful(init: Callable[..., None]) -> Callable[..., None]:
    def without_memory(self: _Copy, device: Any, event: Any, on_host: bool, *_: Any) -> None:
        init(self, device, event, on_host)

    return without_memory


FAULTS: list[tuple[Callable[[Patch], None], Case]] = [
    (copies_up_at_once, {}),
    (copies_down_at_once, {}),
    (weights_before_they_come, {}),
    (updates_before_gradients_land, {}),
    (buffers_given_back_early, {}),
    (sums_overwritten, {"window": "three", "policy": "delayed"} | at("offload-2")),
    (disk_buffers_reused_under_a_copy, at("infinity")),
    (activations_fetched_before_they_went, at("device-2") | {"activations": "host"}),
    (activations_freed_under_a_copy, at("device-2") | {"activations": "host"}),
    (host_buffers_reused_under_a_copy, at("device-2") | {"activations": "disk"}),
    (late_weights_overwritten, at("offload-2") | {"policy": "delayed", "further": 6}),
    (lent_gradients_overwritten, at("offload-2") | {"policy": "delayed"}),
    (sums_added_before_they_land, at("offload-3") | {"window": "three", "sums": "host"}),
    (gathered_before_the_copy_up, {"ranks": 2}),
    (saved_before_it_was_computed, at("device-2") | {"save": "beside"}),
]


def life(case: Case, folder: Path, seed: int | None = None) -> Run:
    body = partial(whole, saved=folder / "saved", further=case.get("further", 0))
    return on_ranks(body, BASE | case, folder, MACHINE, seed=seed)


@pytest.mark.nightly
@pytest.mark.parametrize(("fault", "case"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_planted_fault_is_found(
    fault: Callable[[Patch], None], case: Case, tmp_path: Path, monkeypatch: Patch
) -> None:
    calm = life(case, tmp_path / "calm")

    def differs(seed: int) -> bool:
        try:
            assert_equal(life(case, tmp_path / str(seed), seed), calm)
        except Exception:  # an assertion, or an error of the engine that finds it before the numbers do
            return True
        finally:
            torch.accelerator.synchronize()
        return False

    with monkeypatch.context() as patch:
        fault(patch)
        assert any(map(differs, range(SEEDS))), fault.__doc__
    assert_equal(life(case, tmp_path / "mended", 0), calm)
