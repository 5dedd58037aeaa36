"""One rank's part of a model that several ranks share: its matrices cut among some, its layers spread over others."""

from __future__ import annotations

from dataclasses import dataclass

from wherry.errors import WherryError


@dataclass(frozen=True)
class Grid:
    """How ranks share a model: `tensor` of them cut each matrix, `pipe` stages have its layers, and this is one stage.

    >>> Grid(tensor=8, pipe=4).data_ranks(1024)
    32
    """

    tensor: int = 1
    pipe: int = 1
    stage: int = 0

    def __post_init__(self) -> None:
        for name, value in (("tensor-parallel", self.tensor), ("pipeline-parallel", self.pipe)):
            if value < 1:
                raise WherryError(f"{name}: expected 1 or more, got {value}")
        if not 0 <= self.stage < self.pipe:
            raise WherryError(f"stage: expected 0 to {self.pipe - 1}, got {self.stage}")

    @property
    def size(self) -> int:
        """Ranks that hold the model together."""
        return self.tensor * self.pipe

    def data_ranks(self, ranks: int) -> int:
        if ranks % self.size:
            raise WherryError(
                f"tensor-parallel {self.tensor} x pipeline-parallel {self.pipe}: {ranks} ranks do not divide by "
                f"{self.size}; give a multiple of it"
            )
        return ranks // self.size

    def in_flight(self, accumulation: int) -> int:
        """Micro-batches whose activations a stage keeps at a time, as one forward and one backward take turns."""
        return max(1, min(accumulation, self.pipe - self.stage))


ALONE = Grid()
