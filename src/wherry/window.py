"""The accumulation window: the micro-batches of one update, and what its gradients are multiplied by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from wherry.errors import WherryError

if TYPE_CHECKING:
    from wherry.config import BatchSizes


class Window:
    """How far the window under way has come. One for the life of an engine: `reset` begins the next.

    `batch` has its size, on so many `ranks`, of which `together` have the same samples. Micro-batches are counted
    twice: by their backwards, and by the calls of `step`. A loop may call `step` once for several backwards, or learn
    of the boundary before the backward of its last micro-batch.
    """

    def __init__(
        self,
        batch: BatchSizes,
        ranks: int,
        *,
        together: int = 1,
        layer_major: bool = False,
        managed: bool = True,
        summed: bool = False,
    ) -> None:
        self.batch = batch
        self.ranks = ranks
        self._readers = ranks // together
        # Whether micro-batches are counted, to `batch.accumulation`; else every step ends the window.
        self.managed = managed
        # Whether gradients are summed over ranks, and not averaged.
        self._summed = summed
        self._layer_major = layer_major
        # Whether the next backward is the window's last, decided by hand; None to count micro-batches.
        self._forced: bool | None = None
        # Of the last backward: how many micro-batches it was of, whether their gradients are to be divided by the
        # window's number of them, and whether their losses carried the loss scale.
        self.micro_batches = 1
        self.averaged = True
        self.scaled = True
        self.reset()

    def reset(self) -> None:
        """No micro-batch has run."""
        self.backwards = 0
        self.steps = 0
        # What `averaged` and `scaled` were in the backwards that have made its gradients; None before the first.
        self._alike: tuple[bool, bool] | None = None

    @property
    def so_far(self) -> int:
        """How many micro-batches of it have run. A checkpoint is of the last update, without them."""
        return max(self.backwards, self.steps)

    # The micro-batches of a window.

    def begin_backward(
        self,
        micro_batches: int,
        *,
        averaged: bool,
        scaled: bool,
        loss_scale: float,
        counts: Callable[[], bool] = lambda: True,
    ) -> bool:
        """A backward of so many micro-batches begins. Returns whether it is the window's last.

        One that makes no gradients of weights, as of torch.autograd.grad for inputs, does not count for it.
        """
        wrong = self._what_is_wrong(micro_batches, averaged, scaled, loss_scale)
        if wrong is not None and counts():
            raise WherryError(wrong)
        self.micro_batches, self.averaged, self.scaled = micro_batches, averaged, scaled
        return self._is_boundary(self.so_far + micro_batches)

    def _what_is_wrong(self, micro_batches: int, averaged: bool, scaled: bool, loss_scale: float) -> str | None:
        if self.layer_major and micro_batches < self.batch.accumulation and not self._forced:
            return (
                'backward: "wherry": {"accumulation": "layer_major"} runs all micro-batches of a window together, and '
                "this is the backward of one of them; call engine.train_batch(iterator) for whole windows, or leave "
                "the key out"
            )
        averaged_before, scaled_before = self._alike or (averaged, scaled)
        if averaged != averaged_before:
            return (
                "backward: scale_wrt_gas changed within an accumulation window; use one value for all its micro-batches"
            )
        if scaled != scaled_before and loss_scale != 1.0:
            return (
                "backward: some losses of this accumulation window carry the loss scale and some do not; use "
                "engine.backward(loss), or engine.scale(loss).backward(), for all of them"
            )
        return None

    def end_backward(self) -> None:
        """The gradients of the micro-batches have come."""
        self.backwards += self.micro_batches
        self._alike = self.averaged, self.scaled

    def scale_of(self, loss_scale: float, predivide: float) -> float:
        """What turns sums over ranks and micro-batches, of a scaled loss, into the mean gradient of the loss."""
        return predivide / (self._divisor(loss_scale) * (1 if self._summed else self.ranks))

    def own_scale_of(self, loss_scale: float) -> float:
        """The same of one rank's sums over micro-batches."""
        return 1.0 / self._divisor(loss_scale)

    def _divisor(self, loss_scale: float) -> float:
        return (loss_scale if self.scaled else 1.0) * (self.batch.accumulation if self.averaged else 1)

    def force(self, boundary: bool | None) -> bool | None:
        """Decide by hand whether the next backward is its last; None goes back to counting. Returns what was so."""
        before, self._forced = self._forced, boundary
        return before

    def begin_step(self) -> bool:
        """`step` was called. Returns whether it is to update."""
        self.steps += 1
        return self._is_boundary(self.so_far) or (not self.managed and self._forced is None)

    def ends_next(self) -> bool:
        """Whether the micro-batch at hand is the last, so that `step` will update."""
        return self._is_boundary(max(self.steps + 1, self.backwards))

    @property
    def complete(self) -> bool:
        """Whether all its backwards have run."""
        return self.backwards >= self.batch.accumulation or not self.managed

    def _is_boundary(self, micro_batch: int) -> bool:
        if self._forced is not None:
            return self._forced
        return self.managed and micro_batch >= self.batch.accumulation

    @property
    def samples(self) -> int:
        """How many samples, over all ranks, its update counts for."""
        return self.batch.train if self.managed else self.batch.micro * self._readers * self.backwards

    # Whole windows.

    @property
    def layer_major(self) -> bool:
        """Whether all its micro-batches go through a unit before the next unit."""
        return self._layer_major and self.batch.accumulation > 1

    def take(self, data: Iterator[Any]) -> list[Any]:
        """The micro-batches of a window. Of too few none is run: the window would go on with the data's next pass."""
        if not hasattr(data, "__next__"):
            raise WherryError(
                f"train_batch: expected an iterator, got {type(data).__name__}; make one before the loop, as with "
                "data = iter(loader), so that each call goes on where the last one ended"
            )
        count = self.batch.accumulation
        if not self.managed:
            raise WherryError(
                "train_batch: runs a window of gradient_accumulation_steps micro-batches, and "
                "managed_gradient_accumulation is false; call backward() and step(), or set it to true"
            )
        if self.layer_major:
            self._check_whole()
        batches = list(islice(data, count))
        if len(batches) < count:
            left_out = f" after {len(batches)} of a window's {count} micro-batches, which are left out"
            raise StopIteration(
                f"train_batch: the iterator has ended{left_out if batches else ''}; for another pass make a new one, "
                "as with data = iter(loader)"
            )
        return batches

    def _check_whole(self) -> None:
        if self.so_far:
            raise WherryError(
                f"train_batch: of this window's {self.batch.accumulation} micro-batches "
                f"{self.so_far} have run already, and "
                '"wherry": {"accumulation": "layer_major"} runs all of a window together; call train_batch for whole '
                "windows only, drop what has run with zero_grad(), or leave the key out"
            )
        if self._forced is not None:
            raise WherryError(
                "train_batch: the end of this window is decided by hand (no_sync, set_gradient_accumulation_boundary), "
                'and "wherry": {"accumulation": "layer_major"} runs all of a window together; leave one of the two out'
            )

    # Their number.

    def of_train_batch(self, train: int) -> BatchSizes:
        """The sizes where an update is of so many samples, with the micro-batch as it is."""
        micro, share = self.batch.micro, self.batch.micro * self._readers
        if train < share or train % share:
            raise WherryError(
                f"set_train_batch_size: expected a multiple of {share} (micro-batch {micro} x {self._readers} ranks), "
                f"got {train}"
            )
        return type(self.batch)(train, micro, train // share)

    def of_micro_batch(self, micro: int) -> BatchSizes:
        """The sizes where a micro-batch has so many samples, and a window as many of them as now."""
        if micro < 1:
            raise WherryError(f"set_train_micro_batch_size: expected 1 or more, got {micro}")
        accumulation = self.batch.accumulation
        return type(self.batch)(micro * accumulation * self._readers, micro, accumulation)

    def resize(self, batch: BatchSizes) -> None:
        self.batch = batch

    def check_between(self) -> None:
        """Raise within a window, whose size cannot change."""
        if self.so_far:
            raise WherryError(
                f"the batch size cannot change within an accumulation window, of which {self.so_far} of "
                f"{self.batch.accumulation} micro-batches have run; change it after the update"
            )
