"""What the engine asks of tensors besides their shapes, so that a dry run can answer where there are no values.

The tensors of a dry run are torch's fake tensors: they have shape, dtype and storage, and no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# How many of its like what a dry run does now stands for.
standing_for: ContextVar[int] = ContextVar("wherry_standing_for", default=1)


def alike(parts: Sequence[T]) -> Iterator[T]:
    """All of them. In a dry run, of many, the first two and the last, the second one in place of those between."""
    if len(parts) < 5 or not faking():
        yield from parts
        return
    yield parts[0]
    token = standing_for.set(standing_for.get() * (len(parts) - 2))
    try:
        yield parts[1]
    finally:
        standing_for.reset(token)
    yield parts[-1]


def is_fake(tensor: object) -> bool:
    # By name: the class itself would import torch here, which much of the ground does without.
    return type(tensor).__name__ == "FakeTensor"


def faking() -> bool:
    """Whether this thread is in a dry run: what it makes now has no memory."""
    import torch

    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def address_of(tensor: torch.Tensor) -> int:
    """What is the same for two tensors if they begin at the same memory: its address, if there is memory."""
    if type(tensor).__name__ == "FakeTensor":  # as `is_fake`, and without a call: this is asked often
        return (tensor.untyped_storage()._cdata << 64) + tensor.storage_offset() * tensor.element_size()
    return tensor.data_ptr()


def host_value(value: float | torch.Tensor, stand_in: float = 1.0) -> float:
    """A scalar on the host; `stand_in` where a dry run has none."""
    return stand_in if is_fake(value) else float(value)
