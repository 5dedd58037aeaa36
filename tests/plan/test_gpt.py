"""Memory and bandwidth by shape, against the published table and the published thresholds."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wherry.errors import WherryError
from wherry.plan.gpt import (
    PUBLISHED,
    GptShape,
    Work,
    bandwidth_for,
    checkpoint_intensity,
    demand,
    optimizer_intensity,
    weight_intensity,
)
from wherry.plan.quantities import rounded


def test_working_states_are_sixteen_bytes_a_square_of_hidden() -> None:
    found = [rounded(Fraction(shape.working_states(), 2**30), 2) for shape in PUBLISHED]
    assert found == ["1.56", "6.25", "9.77", "64.00", "400.00"]
    assert all(shape.working_states() == 4 * shape.hidden * 4 * shape.hidden for shape in PUBLISHED)


shapes = st.builds(GptShape, layers=st.integers(1, 200), hidden=st.integers(1, 10**5), heads=st.integers(1, 500))
small = st.integers(1, 64)


@given(shapes, small, st.integers(1, 5000), small)
def test_activations_agree_with_each_other(shape: GptShape, samples: int, sequence: int, interval: int) -> None:
    full = shape.activations(samples, sequence)
    assert shape.working_activations(samples, sequence, shape.layers) == full
    assert full == samples * shape.activations(1, sequence)
    kept = shape.checkpoints(samples, sequence, interval)
    # A checkpoint is below a sixteenth of its layer's activations, and fewer of them take less.
    assert 16 * shape.checkpoints(samples, sequence) < full
    assert kept <= shape.checkpoints(samples, sequence)
    assert kept * interval >= shape.checkpoints(samples, sequence)
    # What a node keeps is what its GPUs keep.
    work = Work(batch=samples * interval, sequence=sequence, gpus_per_node=interval)
    assert demand(shape, work)["node_activations"] == interval * shape.activations(work.samples_per_gpu, sequence)


@given(small, st.integers(1, 10**5), st.integers(1, 10**5), small)
def test_intensities_are_the_published_ones(samples: int, sequence: int, hidden: int, interval: int) -> None:
    assert weight_intensity(samples, sequence) == sequence * samples
    assert optimizer_intensity(samples, sequence) == Fraction(sequence * samples, 4)
    assert checkpoint_intensity(hidden, interval) == 24 * hidden * interval


def test_published_thresholds() -> None:
    """On GPUs of 70 TFLOP/s, sequence 1024."""
    # Over 70 GB/s for weights and gradients: above half of the peak with a single sample.
    assert bandwidth_for(weight_intensity(1, 1024), 0.5, 70e12) < 72e9
    # Near 1.5 TB/s for optimizer state: 90% with two samples.
    assert bandwidth_for(optimizer_intensity(2, 1024), 0.9, 70e12) == pytest.approx(1.23e12, rel=0.01)
    # 2 GB/s for checkpoints: above half from hidden 2K; below 1 GB/s does from hidden 8K.
    assert bandwidth_for(checkpoint_intensity(2048), 0.5, 70e12) < 2e9
    assert bandwidth_for(checkpoint_intensity(8192), 0.5, 70e12) < 1e9


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(WherryError, match="layers: expected 1 or more, got 0"):
        GptShape(0, 1, 1)
    with pytest.raises(WherryError, match="the 33 samples of a node do not divide by its 16 GPUs"):
        Work(batch=33)
    with pytest.raises(WherryError, match="interval: expected 1 or more, got 0"):
        PUBLISHED[0].checkpoints(1, 1, 0)
    for target in (0.0, 1.0, float("nan")):
        with pytest.raises(WherryError, match="efficiency: expected a number between 0 and 1"):
            bandwidth_for(Fraction(1), target, 1.0)
    with pytest.raises(WherryError, match="peak: expected more than 0"):
        bandwidth_for(Fraction(1), 0.5, 0.0)
