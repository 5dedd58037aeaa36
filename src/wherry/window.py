"""The accumulation window: the micro-batches of one update, and what its gradients are multiplied by."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from wherry.errors import WherryError

if TYPE_CHECKING:
    from wherry.config import BatchSizes


class Window:
    """How far the window under way has come. One for the life of an engine: `reset` begins the next.

    Micro-batches are counted twice: by their backwards, and by the calls of `step`. A loop may call `step` once for
    several backwards, or learn of the boundary before the backward of its last micro-batch.
    """

    def __init__(self, batch: BatchSizes, ranks: int, *, layer_major: bool = False) -> None:
        self.batch = batch
        self.ranks = ranks
        # Whether all micro-batches of a window go through a unit before the next unit.
        self._layer_major = layer_major
        # Whether the next backward is the window's last, decided by hand; None to count micro-batches.
        self.forced_boundary: bool | None = None
        # Whether the last call of `step` has updated the weights.
        self.applied = False
        # What sums over ranks and micro-batches were multiplied by, clipping aside. It stays for who asks after a step.
        self.scale = 1.0
        self.reset()

    def reset(self) -> None:
        """No micro-batch has run."""
        self.backwards = 0
        self.steps = 0
        # How many micro-batches the backward under way is of.
        self.micro_batches = 1
        # Whether its gradients are to be divided by the number of micro-batches; None before the first backward.
        self.averaged: bool | None = None
        # Whether its losses carry the loss scale; None before the first backward.
        self.scaled: bool | None = None

    @property
    def so_far(self) -> int:
        """How many micro-batches of it have run. A checkpoint is of the last update, without them."""
        return max(self.backwards, self.steps)

    # The micro-batches of a window.

    def begin_backward(self, micro_batches: int, *, averaged: bool, scaled: bool, loss_scale: float) -> bool:
        """A backward of so many micro-batches begins. Returns whether it is the window's last."""
        if self.averaged is not None and averaged != self.averaged:
            raise WherryError(
                "backward: scale_wrt_gas changed within an accumulation window; use one value for all its micro-batches"
            )
        if self.scaled is not None and scaled != self.scaled and loss_scale != 1.0:
            raise WherryError(
                "backward: some losses of this accumulation window carry the loss scale and some do not; use "
                "engine.backward(loss), or engine.scale(loss).backward(), for all of them"
            )
        self.averaged, self.scaled, self.micro_batches = averaged, scaled, micro_batches
        return self._is_boundary(self.so_far + micro_batches)

    def end_backward(self, scale: float) -> None:
        """The gradients of the micro-batches have come; their sum is to be multiplied by `scale`."""
        if self.together and self.micro_batches < self.batch.accumulation:
            raise WherryError(
                'backward: "wherry": {"accumulation": "layer_major"} runs all micro-batches of a window together, and '
                "this is the backward of one of them; call engine.train_batch(iterator) for whole windows, or leave "
                "the key out"
            )
        self.backwards += self.micro_batches
        self.scale = scale

    def cancel_backward(self) -> None:
        """It was for inputs only, as of torch.autograd.grad: no micro-batch of the window."""
        if not self.backwards:
            self.averaged = self.scaled = None

    def scale_of(self, loss_scale: float, predivide: float) -> float:
        """What turns sums over ranks and micro-batches, of a scaled loss, into the mean gradient of the loss."""
        micro_batches = self.batch.accumulation if self.averaged is not False else 1
        return predivide / ((loss_scale if self.scaled else 1.0) * self.ranks * micro_batches)

    def begin_step(self) -> bool:
        """`step` was called. Returns whether it is to update."""
        self.steps += 1
        return self._is_boundary(self.so_far)

    def ends_next(self) -> bool:
        """Whether the micro-batch at hand is the last, so that `step` will update."""
        return self._is_boundary(max(self.steps + 1, self.backwards))

    @property
    def complete(self) -> bool:
        """Whether all its backwards have run."""
        return self.backwards >= self.batch.accumulation

    def _is_boundary(self, micro_batch: int) -> bool:
        if self.forced_boundary is not None:
            return self.forced_boundary
        return micro_batch >= self.batch.accumulation

    # Whole windows.

    @property
    def together(self) -> bool:
        """Whether its micro-batches run together."""
        return self._layer_major and self.batch.accumulation > 1

    def take(self, data: Iterator[Any]) -> list[Any]:
        """The micro-batches of a window. Of too few none is run: the window would go on with the data's next pass."""
        count = self.batch.accumulation
        if self.together:
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
                "windows only, or leave the key out"
            )
        if self.forced_boundary is not None:
            raise WherryError(
                "train_batch: the end of this window is decided by hand (no_sync, set_gradient_accumulation_boundary), "
                'and "wherry": {"accumulation": "layer_major"} runs all of a window together; leave one of the two out'
            )

    # Their number.

    def of_train_batch(self, train: int) -> BatchSizes:
        """The sizes where an update is of so many samples, with the micro-batch as it is."""
        micro, share = self.batch.micro, self.batch.micro * self.ranks
        if train < share or train % share:
            raise WherryError(
                f"set_train_batch_size: expected a multiple of {share} (micro-batch {micro} x {self.ranks} ranks), got "
                f"{train}"
            )
        return type(self.batch)(train, micro, train // share)

    def of_micro_batch(self, micro: int) -> BatchSizes:
        """The sizes where a micro-batch has so many samples, and a window as many of them as now."""
        if micro < 1:
            raise WherryError(f"set_train_micro_batch_size: expected 1 or more, got {micro}")
        accumulation = self.batch.accumulation
        return type(self.batch)(micro * accumulation * self.ranks, micro, accumulation)

    def check_between(self) -> None:
        """Raise within a window, whose size cannot change."""
        if self.so_far:
            raise WherryError(
                f"the batch size cannot change within an accumulation window, of which {self.backwards} of "
                f"{self.batch.accumulation} micro-batches have run; change it after the update"
            )
