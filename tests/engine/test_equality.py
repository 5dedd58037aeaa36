"""Every stage on any number of ranks trains as plain PyTorch does on one process."""

from __future__ import annotations

import functools
import itertools

import pytest
from tests.engine.harness import Run, assert_close, assert_equal, make_model, train_engine, train_plain


@functools.cache
def oracle(ranks: int, accumulation: int, clip: float) -> Run:
    return train_plain(make_model(), ranks=ranks, accumulation=accumulation, clip=clip)


@functools.cache
def ours(stage: int, ranks: int, accumulation: int, clip: float) -> Run:
    return train_engine(make_model(), stage=stage, ranks=ranks, accumulation=accumulation, clip=clip)


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_equals_plain_pytorch(stage: int, ranks: int, accumulation: int, clip: float) -> None:
    assert_close(ours(stage, ranks, accumulation, clip), oracle(ranks, accumulation, clip))


@pytest.mark.parametrize(("ranks", "accumulation", "clip"), list(itertools.product([1, 2, 4], [1, 3], [0.0, 0.5])))
def test_stages_have_the_same_bits(ranks: int, accumulation: int, clip: float) -> None:
    """0 and 1 sum the window before the ranks, 2 and 3 after: with one micro-batch there is no difference."""
    runs = [ours(stage, ranks, accumulation, clip) for stage in range(4)]
    assert_equal(runs[1], runs[0])
    assert_equal(runs[3], runs[2])
    if accumulation == 1 or ranks == 1:
        assert_equal(runs[2], runs[0])


def test_clipping_did_clip() -> None:
    assert min(oracle(1, 1, 0.5).norms) > 0.5
    assert ours(2, 1, 1, 0.5).losses != ours(2, 1, 1, 0.0).losses


def test_a_plain_backward_is_the_same() -> None:
    for stage in (0, 3):
        plain = train_engine(make_model(), stage=stage, ranks=2, accumulation=3, clip=0.5, plain_backward=True)
        assert_equal(plain, ours(stage, 2, 3, 0.5))
