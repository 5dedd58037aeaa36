"""Sizes that are set for engines of tiny models."""

from __future__ import annotations

import pytest

from wherry.errors import WherryError
from wherry.testing import small_sizes
from wherry.update import optimizer_states


def test_sizes_are_set_and_restored_after_an_error() -> None:
    before = optimizer_states.BUCKET_NUMEL
    with pytest.raises(ZeroDivisionError), small_sizes(bucket=1):
        assert optimizer_states.BUCKET_NUMEL == 1 < before
        raise ZeroDivisionError
    assert before == optimizer_states.BUCKET_NUMEL


def test_an_unknown_size_is_refused() -> None:
    with (
        pytest.raises(WherryError, match=r"small_sizes: expected bucket, piece, .* got buckets"),
        small_sizes(buckets=1),
    ):
        pass
