"""Every stage on any number of ranks trains as plain PyTorch does on one process."""

from __future__ import annotations

import functools

import pytest
from tests.covering import Case, name_of, pairs
from tests.engine.harness import Run, assert_close, assert_equal, make_model, train_engine, train_plain

STEPS = 4


@functools.cache
def ours(stage: int, ranks: int, accumulation: int, clip: float) -> Run:
    return train_engine(make_model(), stage=stage, ranks=ranks, accumulation=accumulation, clip=clip, steps=STEPS)


CASES = pairs(stage=(0, 1, 2, 3), ranks=(1, 2, 4), accumulation=(1, 3), clip=(0.0, 0.5))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_plain_pytorch(case: Case) -> None:
    stage, ranks, accumulation, clip = case.values()
    plain = train_plain(make_model(), ranks=ranks, accumulation=accumulation, clip=clip, steps=STEPS)
    assert_close(ours(stage, ranks, accumulation, clip), plain)
    assert min(plain.norms) > clip, "clipping clips"


@pytest.mark.parametrize(("ranks", "accumulation", "clip"), [(1, 3, 0.0), (2, 3, 0.5), (4, 1, 0.0)])
def test_stages_have_the_same_bits(ranks: int, accumulation: int, clip: float) -> None:
    """0 and 1 sum the window before the ranks, 2 and 3 after: with one micro-batch there is no difference."""
    runs = [ours(stage, ranks, accumulation, clip) for stage in range(4)]
    assert_equal(runs[1], runs[0])
    assert_equal(runs[3], runs[2])
    if accumulation == 1 or ranks == 1:
        assert_equal(runs[2], runs[0])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_plain_backward_is_the_same(stage: int) -> None:
    run = train_engine(make_model(), stage=stage, ranks=2, accumulation=3, clip=0.5, steps=STEPS, plain_backward=True)
    assert_equal(run, ours(stage, 2, 3, 0.5))
