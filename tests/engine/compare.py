"""Compare trainings, and tensors by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    extra: Any = None


def assert_close(one: Run, other: Run, tolerance: float = 1e-5) -> None:
    for name in ("losses", "norms"):
        ours, theirs = torch.tensor(getattr(one, name)), torch.tensor(getattr(other, name))
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0, msg=lambda m, name=name: f"{name}: {m}")
    assert_near(one.weights, other.weights, tolerance)


def assert_equal(one: Run, other: Run) -> None:
    """Compare bits; of norms the value, as the order of their float64 sum follows the shards."""
    assert one.losses == other.losses
    assert one.norms == pytest.approx(other.norms, rel=1e-13, nan_ok=True)
    for name, weight in other.weights.items():
        assert torch.equal(one.weights[name], weight), name


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Compare the bits of two state_dicts."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def assert_near(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """Compare the tensors that `other` has."""
    for name, value in other.items():
        torch.testing.assert_close(
            one[name], value, rtol=0, atol=tolerance, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
