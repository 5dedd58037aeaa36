"""The norm of a window's gradients, and what the ranks find out with it: mixed-up weights, and missing gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from wherry.errors import DivergenceError
from wherry.fake import host_value, is_fake
from wherry.parallel.comm import Comm
from wherry.parallel.topology import Topology
from wherry.sharding.flat_gradient import FlatGradient
from wherry.sharding.unit import Flat

SumSquares = Callable[[torch.Tensor], float | torch.Tensor]


class Norm:
    """Measures gradients, and adds up over the ranks.

    `replicas` are the ranks with the same part of the sums; `partitioned`: ranks share out what is measured.
    """

    def __init__(self, topology: Topology, replicas: Comm, sum_squares: SumSquares, *, partitioned: bool) -> None:
        self.comm = topology.data
        self._device = topology.device
        self._shards, self._replicas = topology.shards, replicas
        self._tensor, self._pipe = topology.tensor, topology.pipe
        self._sum_squares = sum_squares
        self._partitioned = partitioned
        # After `total`: whether all ranks ran the same units, and whether any rank misses any gradient.
        self.one_path = True
        self._any_absent = False
        # Above 0 where any rank misses any gradient, once the sums are there that have told; None where none do.
        self.missing: torch.Tensor | None = None

    def measure(self, gradient: FlatGradient, owned: torch.Tensor) -> float | torch.Tensor:
        """The sum of squares of what counts for the norm: all of it, or what tensor-parallel ranks have cut.

        Parameters that every tensor-parallel rank holds whole are counted by the first of them.
        """
        if self._tensor.rank == 0:
            return self._sum_squares(owned)
        layout = gradient.flat.layout
        return sum((self._sum_squares(owned[a:b]) for a, b in layout.cut_ranges(gradient.flat.rank)), start=0.0)

    def squares_of(self, gradient: FlatGradient) -> float | torch.Tensor:
        """The sum of squares of this rank's part, measured unless it has been."""
        if gradient.sum_squares is not None:
            return gradient.sum_squares
        gradient.landing.wait()
        gradient.sum_squares = self.measure(gradient, gradient.owned)
        return gradient.sum_squares

    def squares_of_all(self, gradient: FlatGradient) -> float | torch.Tensor:
        """As `squares_of`, with what counts for the norm on another tensor-parallel rank."""
        return self.squares_of(gradient) if self._tensor.rank == 0 else self._sum_squares(gradient.owned)

    def by_flat(self, gradients: Sequence[FlatGradient]) -> dict[Flat, float]:
        """The squared norm by flat, over the ranks that share it out."""
        for comm in (*((self._shards,) if self._partitioned else ()), self._tensor):
            comm.meet("gradient_norms()")
        squares = [float(self.squares_of(gradient)) for gradient in gradients]
        values = torch.tensor(squares, dtype=torch.float64, device=self._device)
        if self._partitioned:
            self._shards.all_reduce(values).wait()
        self._tensor.all_reduce(values).wait()
        return {gradient.flat: value for gradient, value in zip(gradients, values.tolist(), strict=True)}

    def total(self, gradients: Sequence[FlatGradient], journal: int = 0, path: int = 0) -> float | torch.Tensor:
        """The squared norm of the window's gradients as they are: not unscaled, not averaged.

        `journal` is a digest of what this rank has gathered; ranks whose digests differ have mixed up their weights.
        `path` is one of the units that it ran, which may differ: `one_path` says afterwards whether it did.
        """
        self.one_path = True
        total = self._here(gradients)
        partitioned = self._partitioned and self.comm.size > 1
        if not partitioned and self._tensor.size == self._pipe.size == 1:
            return total
        digests = (journal, path) if journal else ()
        powers = [power for value in digests for power in (float(value), float(value) ** 2)]
        # Replicas hold the same sums: those of the first of them count.
        counted = host_value(total) if self._replicas.rank == 0 else 0.0
        mine = [counted, float(self._any_absent), *powers]
        sums = torch.tensor(mine, dtype=torch.float64, device=self._device)
        if partitioned:
            self.comm.all_reduce(sums, label="the gradients' norm").wait()
        for axis in (self._tensor, self._pipe):
            axis.all_reduce(sums[:1], label="the gradients' norm").wait()
        if is_fake(sums):
            return sums[0]
        values = self.comm.read(sums)
        if journal and partitioned:
            # The squares sum to the square of the sum only if all ranks have the same.
            if values[2] ** 2 != values[3] * self.comm.size:
                raise DivergenceError(
                    f"the ranks gathered different units in this step (rank {self.comm.rank} has digest {journal}), so "
                    "their weights are mixed up and the step is not made. A rank may skip units that others run, but "
                    "not run them in another order, or oftener, or after many steps in which all ranks ran the same: "
                    'put what differs into a larger unit, by "wherry": {"unit_classes": [...]}'
                )
            self.one_path = values[4] ** 2 == values[5] * self.comm.size
        self._any_absent = values[1] > 0
        return values[0]

    def _here(self, gradients: Sequence[FlatGradient]) -> float | torch.Tensor:
        """This rank's part of the squared norm; it is noted whether a gradient is missing."""
        self._any_absent = False
        total: float | torch.Tensor = 0.0
        for gradient in gradients:
            self._any_absent = self._any_absent or bool(gradient.absent)
            total = total + self.squares_of(gradient)
        return total

    def to_tell(self, gradients: Sequence[FlatGradient], dtype: torch.dtype) -> torch.Tensor | None:
        """Whether this rank misses any gradient, to be summed with the window's last sums; None once that is told.

        What is missing now may come in another backward of the window, but nothing goes missing there.
        """
        if self.missing is not None:
            return None
        missing = any([gradient.absent for gradient in gradients])
        self.missing = torch.tensor([float(missing)], dtype=dtype, device=self._device)
        return self.missing

    def absent(self, gradients: Sequence[FlatGradient]) -> dict[Flat, list[int]]:
        """The parameters, by flat and place, that no rank has a gradient for in this window. After `total`."""
        if self.comm.size > 1 and not self._partitioned:
            told, self.missing = self.missing, None
            if told is None:  # the sums are those of a checkpoint
                told = torch.tensor([float(self._any_absent)], device=self._device)
                self.comm.all_reduce(told, "max", "missing gradients").wait()
            if not is_fake(told):
                self._any_absent = self.comm.read(told)[0] > 0
        if not self._any_absent:
            return {}
        there = torch.ones(sum(len(gradient.flat.parameters) for gradient in gradients))
        first = 0
        for gradient in gradients:
            for index in gradient.absent:
                there[first + index] = 0
            first += len(gradient.flat.parameters)
        there = there.to(self._device)
        self.comm.all_reduce(there, "max", "missing gradients").wait()
        flags, first = self.comm.read(there), 0
        missing: dict[Flat, list[int]] = {}
        for gradient in gradients:
            gone = [index for index in gradient.absent if not flags[first + index]]
            if gone:
                missing[gradient.flat] = gone
            first += len(gradient.flat.parameters)
        return missing
