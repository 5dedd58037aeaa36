"""The norm of a window's gradients, and what the ranks find out with it: mixed-up weights, and missing gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from wherry.errors import DivergenceError
from wherry.fake import host_value, is_fake
from wherry.parallel.comm import Comm
from wherry.parallel.topology import Topology
from wherry.sharding.flat_gradient import FlatGradient, Squares
from wherry.sharding.unit import Flat


class Norm:
    """Adds up over the ranks what gradients have measured of themselves.

    `replicas` are the ranks with the same part of the sums; `partitioned`: ranks share out what is measured.
    """

    def __init__(self, topology: Topology, replicas: Comm, *, partitioned: bool) -> None:
        self.comm = topology.data
        self._device = topology.device
        self._shards, self._replicas = topology.shards, replicas
        self._tensor, self._pipe = topology.tensor, topology.pipe
        self._partitioned = partitioned
        # After `total`: whether all ranks ran the same units, and whether any rank misses any gradient.
        self.one_path = True
        self._any_absent = False

    def by_flat(self, gradients: Sequence[FlatGradient]) -> dict[Flat, float]:
        """The squared norm by flat, over the ranks that share it out. Every rank calls it."""
        sharing = (*((self._shards,) if self._partitioned else ()), self._tensor)
        for comm in sharing:
            comm.meet("gradient_norms()")
        values = self._sent([gradient.squares() for gradient in gradients], torch.float64)
        for comm in sharing:
            comm.all_reduce(values).wait()
        return {gradient.flat: value for gradient, value in zip(gradients, self._read(values), strict=True)}

    def total(self, gradients: Sequence[FlatGradient], gather_digest: int = 0, path: int = 0) -> float:
        """The squared norm of the window's gradients as they are: not unscaled, not averaged.

        `gather_digest` is of what this rank has gathered; ranks whose digests differ have mixed up their weights.
        `path` is one of the units that it ran, which may differ: `one_path` says afterwards whether it did.

        The sums are made on the device, and the host waits for it once: with the watch that finds peers who are gone.
        """
        self.one_path = True
        total = self._here(gradients)
        if self.comm.size == self._tensor.size == self._pipe.size == 1:
            return host_value(total)
        partitioned = self._partitioned and self.comm.size > 1
        digests = (gather_digest, path) if gather_digest and partitioned else ()
        powers = [power for value in digests for power in (float(value), float(value) ** 2)]
        # Replicas hold the same sums: those of the first of them count.
        counted = total if self._replicas.rank == 0 else 0.0
        sums = self._sent([counted, float(self._any_absent), *powers], torch.float64)
        if partitioned:
            self.comm.all_reduce(sums, label="the gradients' norm").wait()
        elif self.comm.size > 1:
            missing = self._sent([float(self._any_absent)], torch.float32)
            self.comm.all_reduce(missing, "max", "missing gradients").wait()
            sums[1:2].copy_(missing)
        for axis in (self._tensor, self._pipe):
            axis.all_reduce(sums[:1], label="the gradients' norm").wait()
        if is_fake(sums):
            return host_value(sums[0])
        values = self._read(sums)
        if digests:
            # The squares sum to the square of the sum only if all ranks have the same.
            if values[2] ** 2 != values[3] * self.comm.size:
                raise DivergenceError(
                    f"the ranks gathered different units in this step (rank {self.comm.rank} has digest "
                    f"{gather_digest}), so their weights are mixed up and the step is not made. A rank may skip units "
                    "that others run, but not run them in another order, or oftener, or after many steps in which all "
                    'ranks ran the same: put what differs into a larger unit, by "wherry": {"unit_classes": [...]}'
                )
            self.one_path = values[4] ** 2 == values[5] * self.comm.size
        self._any_absent = values[1] > 0
        return values[0]

    def _sent(self, values: Sequence[Squares], dtype: torch.dtype) -> torch.Tensor:
        """On the device, some of them from there; the host does not wait for what it is doing."""
        numbers = [0.0 if isinstance(value, torch.Tensor) else value for value in values]
        host = torch.tensor(numbers, dtype=dtype)
        if self._device.type != "cpu":
            with suppress(RuntimeError):  # a few pageable bytes, where no more can be pinned, block the host briefly
                host = host.pin_memory()
        sent = host.to(self._device, non_blocking=True)
        for place, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                sent[place].copy_(value)
        return sent

    def _read(self, values: torch.Tensor) -> list[float]:
        """On the host, watched by a group that has peers."""
        return max(self.comm, self._tensor, self._pipe, key=lambda comm: comm.size).read(values)

    def _here(self, gradients: Sequence[FlatGradient]) -> Squares:
        """This rank's part of the squared norm; it is noted whether a gradient is missing."""
        self._any_absent = False
        total: Squares = 0.0
        for gradient in gradients:
            self._any_absent = self._any_absent or bool(gradient.absent)
            squares = gradient.sum_squares
            total = total + (gradient.squares() if squares is None else squares)
        return total

    def absent(self, gradients: Sequence[FlatGradient]) -> dict[Flat, list[int]]:
        """The parameters, by flat and place, that no rank has a gradient for in this window. After `total`."""
        if not self._any_absent:
            return {}
        there = [1.0] * sum(len(gradient.flat.parameters) for gradient in gradients)
        first = 0
        for gradient in gradients:
            for index in gradient.absent:
                there[first + index] = 0.0
            first += len(gradient.flat.parameters)
        found = self._sent(there, torch.float32)
        self.comm.all_reduce(found, "max", "missing gradients").wait()
        flags, first = self.comm.read(found), 0
        missing: dict[Flat, list[int]] = {}
        for gradient in gradients:
            gone = [index for index in gradient.absent if not flags[first + index]]
            if gone:
                missing[gradient.flat] = gone
            first += len(gradient.flat.parameters)
        return missing
