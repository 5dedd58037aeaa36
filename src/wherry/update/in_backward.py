"""Updates within the backward: what those of a window are made with, and of which buckets all gradients have landed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wherry.errors import WherryError
from wherry.update.optimizer_states import UpdateBucket
from wherry.update.rules import Groups, snapshot

Terms = tuple[list[dict[str, Any]], float]


class InBackward:
    """The account of one window. Who is told of a landing, makes the update.

    Updates have begun before the step, and are not taken back: the step can only find that all of them were made, and
    with the options that it would have made them with.
    """

    def __init__(self, buckets: Sequence[UpdateBucket]) -> None:
        self._buckets = buckets
        # What the updates are made with: options and multiplier. None outside of such a window.
        self._terms: Terms | None = None
        # How many flats of each bucket have landed.
        self._landed: dict[UpdateBucket, int] = {}
        # Those of which this rank misses gradients: the step tells whether another rank has them.
        self.deferred: list[UpdateBucket] = []
        # Those that are left as they were, as their gradients are not finite: the step is not taken.
        self.not_finite: set[UpdateBucket] = set()

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
        self._landed = dict.fromkeys(self._buckets, 0)

    def cancel(self) -> None:
        """The backward was none of weights: nothing has landed and nothing was updated."""
        if not any(self._landed.values()):
            self._terms = None

    def landed(self, bucket: UpdateBucket) -> Terms | None:
        """One more flat of a bucket has landed. If it is the last one: what the bucket is to be updated with."""
        self._landed[bucket] += 1
        return self._terms if self._complete(bucket) else None

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
        for bucket in self._buckets:
            assert self._complete(bucket), bucket.name
        return True

    def drop(self) -> list[str]:
        """No step will end the window. What has been updated from its gradients already, by name."""
        found = [bucket.name for bucket in self.begun() if self._complete(bucket)] if self._terms is not None else []
        self.clear()
        return found

    def begun(self) -> list[UpdateBucket]:
        """The buckets that were not left for the step, or as they were."""
        return [b for b in self._buckets if b not in self.deferred and b not in self.not_finite]

    def clear(self) -> None:
        self._terms = None
        self._landed.clear()
        self.deferred.clear()
        self.not_finite.clear()

    def _complete(self, bucket: UpdateBucket) -> bool:
        return self._landed[bucket] == len(bucket.states)
