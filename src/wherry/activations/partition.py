"""Checkpoints that tensor-parallel ranks share out: each keeps its part, and all gather before recomputing."""

from __future__ import annotations

import torch

from wherry.errors import WherryError
from wherry.fake import is_fake
from wherry.parallel.comm import Comm
from wherry.parallel.partition import is_dtensor


class CheckpointPartition:
    """Divides tensors that all ranks of `comm` hold alike into equal parts, and gathers them again."""

    def __init__(self, comm: Comm, *, smallest: int) -> None:
        self.comm = comm
        self.smallest = smallest
        self._checked: set[str] = set()

    def divides(self, tensor: torch.Tensor, given: torch.Tensor) -> bool:
        """Whether a tensor is divided. It depends on what all ranks have in common, as all must gather it or none."""
        if not tensor.is_floating_point() or tensor.numel() * tensor.element_size() < self.smallest:
            return False
        return not is_dtensor(given) or all(p.is_replicate() for p in given.placements)  # type: ignore[attr-defined]

    def part_of(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        """A copy of this rank's part, padded as all are to equal length."""
        flat = tensor.reshape(-1)
        if where not in self._checked:
            self._checked.add(where)
            self._check(flat, where)
        numel = -(-flat.numel() // self.comm.size)
        part = flat.new_empty(numel)
        start = self.comm.rank * numel
        there = flat[start : start + numel]
        part[: there.numel()].copy_(there)
        if there.numel() < numel:
            part[there.numel() :].zero_()
        return part

    def gather(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        whole = part.new_empty(part.numel() * self.comm.size)
        self.comm.all_gather(whole, part).wait()
        return whole[: shape.numel()].view(shape)

    def _check(self, flat: torch.Tensor, where: str) -> None:
        """The first time, see that the ranks do hold the same."""
        if is_fake(flat):
            return
        sums = torch.stack([flat.double().sum(), flat.double().abs().sum()]).nan_to_num()
        extremes = torch.cat([sums, -sums])
        self.comm.all_reduce(extremes, "max").wait()
        highest, lowest = extremes.chunk(2)
        if (highest != -lowest).any():
            raise WherryError(
                f"activation_checkpointing.partition_activations: {where} of the checkpoint differs between "
                "tensor-parallel ranks, so that they cannot share it out. It must be the same on all, as inputs "
                "of tensor-parallel blocks are; with sequence parallelism it is cut already: set the key to false"
            )
