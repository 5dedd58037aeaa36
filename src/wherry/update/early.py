"""Updates within the backward: what those of a window are made with, and of which batches all gradients have landed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from wherry.errors import WherryError
from wherry.update.rules import Groups, snapshot
from wherry.update.state import Batch

Terms = tuple[list[dict[str, Any]], float]


class Early:
    """The account of one window. Who is told of a landing, makes the update.

    Updates have begun before the step, and are not taken back: the step can only find that all of them were made, and
    with the options that it would have made them with.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches
        # What the updates are made with: options and multiplier. None outside of such a window.
        self._terms: Terms | None = None
        # How many flats of each batch have landed.
        self._landed: dict[Batch, int] = {}

    @property
    def expected(self) -> bool:
        """Whether a flat that lands now is one of such a window."""
        return self._terms is not None

    def expect(self, groups: Groups, multiplier: float) -> None:
        """The boundary's backward begins, and all updates before it are settled."""
        if self._terms is not None:
            raise WherryError(
                "backward: the weights of this accumulation window have been updated already, in the backward before "
                'this one; for several backwards before a step set "wherry": {"update_policy": "before_use"}'
            )
        self._terms = snapshot(groups), multiplier
        self._landed = dict.fromkeys(self._batches, 0)

    def retract(self) -> None:
        """The backward was none of weights: nothing has landed and nothing was updated."""
        if not any(self._landed.values()):
            self._terms = None

    def landed(self, batch: Batch) -> Terms | None:
        """One more flat of a batch has landed. If it is the last one: what the batch is to be updated with."""
        self._landed[batch] += 1
        return self._terms if self._complete(batch) else None

    def end(self, groups: Groups, multiplier: float) -> bool:
        """The step has come. False if its updates have yet to be made: its boundary was decided after its backward."""
        if self._terms is None:
            return False
        (used, used_multiplier), self._terms = self._terms, None
        if used_multiplier != multiplier or used != snapshot(groups):
            raise WherryError(
                "step: learning rate or other options changed between backward and step, and the weights have been "
                'updated with those before; set "wherry": {"update_policy": "before_use"} to change them there'
            )
        for batch in self._batches:
            assert self._complete(batch), batch.name
        return True

    def drop(self, left: Collection[Batch]) -> list[str]:
        """No step will end the window. What has been updated from its gradients already, by name."""
        if self._terms is None:
            return []
        self._terms = None
        return [batch.name for batch in self._batches if self._complete(batch) and batch not in left]

    def _complete(self, batch: Batch) -> bool:
        return self._landed[batch] == len(batch.states)

    def forget(self) -> None:
        """The batches are closed."""
        self._terms = None
        self._landed.clear()
