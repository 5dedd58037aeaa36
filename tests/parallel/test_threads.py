"""Ranks as threads: what they leave behind where they meet."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator

import pytest
import torch

from wherry.parallel.comm import Comm
from wherry.parallel.threads import run_ranks


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_nobody_holds_what_a_rank_has_brought(hasty: None) -> None:
    """A rank that is slow to leave a collective does not keep the others' tensors."""

    def body(comm: Comm) -> int:
        held = 0
        for _ in range(200):
            tensor = torch.ones(4)
            storage = weakref.ref(tensor.untyped_storage())
            comm.all_reduce(tensor, "sum").wait()
            del tensor
            held += storage() is not None
        return held

    assert run_ranks(2, body) == [0, 0]
