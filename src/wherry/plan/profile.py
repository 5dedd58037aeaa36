"""What one micro-batch of a model costs, whatever its placement: bytes by unit as they come and go, and operations.

These are the figures alone, which `trace` makes: who has them needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wherry.placement import Tier
from wherry.plan.memory import UnitSizes

if TYPE_CHECKING:
    from wherry.config import Config

Operation = tuple[float, int, int, bool, int]
"""Floating-point operations, bytes read and written, elements through slow functions; in the backward; its kind."""

PLAIN, ATTENTION, TANH = range(3)
"""Kinds of operations that have rates of their own: attention, and GELU by tanh."""


class Interval(NamedTuple):
    """From one event of a unit to the next: the most bytes of activations, and the operations that ran."""

    kind: str
    unit: int
    activations: int
    operations: tuple[Operation, ...] = ()
    # Bytes that tensor-parallel ranks sum.
    joined: int = 0

    def moved(self, units: int, nbytes: int) -> Interval:
        return self._replace(unit=self.unit + units, activations=self.activations + nbytes)


class Moment(NamedTuple):
    """From one event of a unit to the next: the most bytes of activations that there were."""

    kind: str  # begin, enter, exit, turn (backward begins), want (its backward), done (its gradients), end
    unit: int
    activations: int


@dataclass(frozen=True)
class Recompute:
    """Which units compute their activations again, and the results of which operations they keep."""

    every: int = 1
    save_operations: tuple[str, ...] = ()

    @staticmethod
    def of(config: Config, *, gpu: bool = False, tensor: int = 1) -> Recompute | None:
        """What a config asks for; `gpu` says that the device is not the host, where all else is kept anyway.

        `tensor` ranks may share out checkpoints. With the policy "auto" a first step recomputes everything.
        """
        block = config.activation_checkpointing
        policy = block.resolved_policy()
        tier = Tier.DISK if block.nvme_path else Tier.HOST if block.cpu_checkpointing and gpu else None
        if policy == "none" or (policy == "offload" and tier is None):
            return None
        every, saved = block.every if policy == "recompute" else 1, tuple(block.save_operations)
        parts = tensor if block.partition_activations and policy != "offload" else 1
        if tier is None and parts == 1:
            return Recompute(every, saved)
        smallest = 1 if tier is None else block.offload_min_bytes
        return PutAway(every, saved, tier or Tier.DEVICE, smallest, policy == "offload", parts)


@dataclass(frozen=True)
class PutAway(Recompute):
    """Units that put what they save away to a tier until the backward: their inputs, or, if `whole`, everything.

    Then nothing is computed again. What is smaller than `smallest` bytes stays. Of what is computed again from a
    rank may keep one of `parts` of its inputs, perhaps where they are: on the device.
    """

    tier: Tier = Tier.HOST
    smallest: int = 1
    whole: bool = False
    parts: int = 1


@dataclass(frozen=True)
class Operations:
    """Each operation's floating-point operations, bytes read and written, and elements through slow functions."""

    flops: np.ndarray
    bytes: np.ndarray
    slow: np.ndarray
    backward: np.ndarray
    kind: np.ndarray

    @classmethod
    def of(cls, intervals: Iterable[Interval]) -> Operations:
        rows = [row for interval in intervals for row in interval.operations] or [(0.0, 0, 0, False, PLAIN)]
        flops, nbytes, slow, backward, kind = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
        return cls(flops, nbytes, slow, backward.astype(bool), kind)

    def same(self, other: Operations) -> bool:
        return all(np.array_equal(value, getattr(other, name)) for name, value in vars(self).items())

    def line(self, other: Operations, steps: float) -> Operations:
        """On the straight line from this one through `other`, that many steps from here."""
        if len(self.flops) != len(other.flops):
            # Another path for another batch: only the sums can be compared, so they scale together.
            ratio = 1 + steps * (float(other.bytes.sum()) / max(1.0, float(self.bytes.sum())) - 1)
            flops, nbytes, slow = (values * ratio for values in (self.flops, self.bytes, self.slow))
            return Operations(flops, nbytes, slow, self.backward, self.kind)
        return Operations(
            self.flops + steps * (other.flops - self.flops),
            self.bytes + steps * (other.bytes - self.bytes),
            self.slow + steps * (other.slow - self.slow),
            self.backward,
            self.kind,
        )


@dataclass(frozen=True)
class Profile:
    """One micro-batch of a model."""

    units: tuple[UnitSizes, ...]
    buffers: int
    inputs: int
    moments: tuple[Moment, ...]
    operations: Operations
    micro_batch: int
    # Bytes of activations that are kept between forward and backward, and those that tensor-parallel ranks sum.
    kept: int = 0
    joined: int = 0
    # What is put away: the most on the host and on disk, and the bytes that go there and come back.
    on_host: int = 0
    on_disk: int = 0
    sent: int = 0

    def same(self, other: Profile) -> bool:
        return replace(self, operations=other.operations) == other and self.operations.same(other.operations)

    @property
    def parameters(self) -> int:
        return sum(sum(unit.trained) + sum(unit.frozen) for unit in self.units)

    @classmethod
    def of_sizes(cls, units: Sequence[UnitSizes], micro_batch: int) -> Profile:
        """A model of which only the weights are known."""
        nothing = np.zeros(0)
        return cls(
            tuple(units), 0, 0, (), Operations(nothing, nothing, nothing, nothing.astype(bool), nothing), micro_batch
        )

    @property
    def activations(self) -> int:
        """The most bytes of activations at a time, with what autograd makes beside them."""
        return max((moment.activations for moment in self.moments), default=0)

    @property
    def flops(self) -> float:
        return float(self.operations.flops.sum())


@dataclass(frozen=True)
class Line:
    """Profiles of two micro-batches, and with them of any: bytes and operations grow in proportion to the batch.

    The larger the two, the better: in a small batch what is highest may be the weights' gradients, which do not grow.
    """

    one: Profile
    two: Profile | None = None

    def at(self, micro_batch: int) -> Profile:
        """The profile of this micro-batch.

        A model whose inputs cannot be made larger has one profile only.
        """
        one, two = self.one, self.two
        if two is None or micro_batch == one.micro_batch:
            return one
        if micro_batch == two.micro_batch:
            return two
        steps = (micro_batch - one.micro_batch) / (two.micro_batch - one.micro_batch)

        def line(a: float, b: float) -> int:
            return round(a + steps * (b - a))

        same = [m[:2] for m in one.moments] == [m[:2] for m in two.moments]
        later = two.moments if same else one.moments
        moments = (
            Moment(a.kind, a.unit, line(a.activations, b.activations)) for a, b in zip(one.moments, later, strict=True)
        )
        return Profile(
            one.units,
            one.buffers,
            line(one.inputs, two.inputs),
            tuple(moments),
            one.operations.line(two.operations, steps),
            micro_batch,
            line(one.kept, two.kept),
            line(one.joined, two.joined),
            line(one.on_host, two.on_host),
            line(one.on_disk, two.on_disk),
            line(one.sent, two.sent),
        )
