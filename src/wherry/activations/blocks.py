"""Device memory for activations that are copied: allocated once, in one place, and used again."""

from __future__ import annotations

import torch

# torch's count of a storage that this module alone refers to, by one tensor.
_ALONE = torch._C._storage_Use_Count


class Blocks:
    """Buffers of one size that are lent, and lent again once nobody can see them.

    A block is not given back: autograd, a recomputation or the user's code may hold a view of it, and only torch knows
    when the last one has gone. What is larger than the blocks makes them all as large, from then on; as many as there
    were are then allocated next to each other.

    >>> blocks = Blocks(torch.device("cpu"))
    >>> blocks.take(1000).numel()
    1000
    """

    def __init__(self, device: torch.device, *, ahead: int = 1) -> None:
        self.device = device
        # So many are allocated at first, next to each other.
        self.ahead = ahead
        self.size = 0
        self._blocks: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor of `nbytes`, its contents undefined."""
        if nbytes > self.size:
            # Those still seen are freed when they no longer are.
            self.ahead = max(self.ahead, len(self._blocks))
            self._blocks.clear()
            self.size = -(-nbytes // 512) * 512
        for place, block in enumerate(self._blocks):
            if _alone(block):
                # The next search begins behind it.
                self._blocks.append(self._blocks.pop(place))
                return block[:nbytes]
        for _ in range(1 if self._blocks else self.ahead):
            self._blocks.append(torch.empty(self.size, dtype=torch.uint8, device=self.device))
        return self._blocks[-1][:nbytes]

    @property
    def nbytes(self) -> int:
        return self.size * len(self._blocks)

    def close(self) -> None:
        self._blocks.clear()
        self.size = 0


def _alone(block: torch.Tensor) -> bool:
    # The tensor is one; asking for its storage makes another.
    storage = block.untyped_storage()
    return _ALONE(storage._cdata) <= 2
