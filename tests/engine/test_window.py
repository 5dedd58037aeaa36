"""The accumulation window by itself: where it ends, what its gradients are multiplied by, and what it refuses."""

from __future__ import annotations

import pytest

from wherry.config import BatchSizes
from wherry.errors import WherryError
from wherry.window import Window

RANKS, MICRO = 2, 4


def window(accumulation: int, *, layer_major: bool = False) -> Window:
    return Window(BatchSizes(MICRO * accumulation * RANKS, MICRO, accumulation), RANKS, layer_major=layer_major)


def backward(of: Window, micro_batches: int = 1, *, averaged: bool = True, scaled: bool = True, scale: float = 1.0):
    boundary = of.begin_backward(micro_batches, averaged=averaged, scaled=scaled, loss_scale=scale)
    of.end_backward(of.scale_of(scale, predivide=1.0))
    return boundary


@pytest.mark.parametrize("steps_first", [False, True])
def test_it_ends_with_its_last_micro_batch(steps_first: bool) -> None:
    of, ends = window(3), []
    for _ in range(3):
        if steps_first:
            ends.append((of.begin_step(), backward(of)))
        else:
            ends.append((backward(of), of.begin_step()))
    assert [end for end, _ in ends] == [False, False, True] and of.complete and of.so_far == 3
    of.reset()
    assert of.so_far == 0 and not of.complete and of.scale == pytest.approx(1 / (RANKS * 3))


def test_the_end_is_decided_by_hand() -> None:
    of = window(2)
    of.forced_boundary = True
    assert backward(of) and of.begin_step()
    of.forced_boundary = False
    assert not backward(of) and not of.ends_next()
    of.reset()
    assert of.forced_boundary is False


@pytest.mark.parametrize(
    ("averaged", "scaled", "scale"), [(True, True, 1 / 24), (False, True, 1 / 8), (True, False, 1 / 6)]
)
def test_what_sums_are_multiplied_by(averaged: bool, scaled: bool, scale: float) -> None:
    of = window(3)
    backward(of, averaged=averaged, scaled=scaled, scale=4.0)
    assert of.scale == pytest.approx(scale)


def test_micro_batches_of_one_window_are_alike() -> None:
    of = window(3)
    backward(of, scale=2.0)
    with pytest.raises(WherryError, match="scale_wrt_gas changed"):
        backward(of, averaged=False, scale=2.0)
    with pytest.raises(WherryError, match="carry the loss scale and some do not"):
        backward(of, scaled=False, scale=2.0)
    backward(of, scaled=False)  # a scale of 1 is none


def test_a_backward_for_inputs_is_no_micro_batch() -> None:
    of = window(2)
    of.begin_backward(1, averaged=True, scaled=False, loss_scale=2.0)
    of.cancel_backward()
    assert not backward(of, averaged=False, scale=2.0) and of.so_far == 1


def test_micro_batches_that_run_together_are_a_whole_window() -> None:
    of = window(2, layer_major=True)
    assert of.together and backward(of, 2) and of.begin_step()
    of.reset()
    with pytest.raises(WherryError, match="this is the backward of one of them"):
        backward(of)
    of.begin_step()
    with pytest.raises(WherryError, match="window's 2 micro-batches 1 have run already"):
        of.take(iter([1, 2]))
    assert not window(1, layer_major=True).together


def test_its_size_changes_between_windows() -> None:
    of = window(2)
    assert of.of_train_batch(24) == (24, MICRO, 3) and of.of_micro_batch(1) == (4, 1, 2)
    for wrong in (0, 12):
        with pytest.raises(WherryError, match=rf"multiple of 8 \(micro-batch 4 x 2 ranks\), got {wrong}"):
            of.of_train_batch(wrong)
    backward(of)
    with pytest.raises(WherryError, match="of which 1 of 2 micro-batches have run"):
        of.check_between()
