"""On a GPU: what the allocator holds and nobody uses, over a hundred steps of changing length."""

from __future__ import annotations

import pytest
import torch

from benchmarks import fragments
from wherry.train.model import GPTConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: run `pytest tests/gpu` on one"),
]


def test_what_is_held_and_unused_is_measured() -> None:
    config = GPTConfig(layers=8, hidden=512, heads=8, sequence=1024, vocabulary=512)
    found = {name: fragments.measure(name, config, 8, 100) for name in fragments.SYSTEMS}
    for one in found.values():
        assert len(one.unused) == 100 and 0 < one.highest < one.reserved
        # A hundred lengths do not make the allocator hold twice what is ever in use.
        assert one.excess < one.highest
    # The model of the allocator, which other machines have to do with, says about the same.
    for name, one in found.items():
        told = fragments.measure(name, config, 8, 100, device="simulated")
        assert told.reserved == pytest.approx(one.reserved, rel=0.25), name
