"""Counts of a step equal those of expected.json, or are lower. They are counts and no times.

A count that is meant to change: `python -m tests.guard.counts --update`, and say why in the commit.
"""

from __future__ import annotations

import json
import platform
from typing import Any

import pytest
import torch
from tests.guard import counts

from wherry.native import loading

EXPECTED: dict[str, Any] = json.loads(counts.EXPECTED.read_text())
HOW = "if that is meant: python -m tests.guard.counts --update"
SAME_TORCH = EXPECTED["torch"] == torch.__version__.partition("+")[0]
SAME_PYTHON = EXPECTED["python"] == ".".join(platform.python_version_tuple()[:2])
NO_INSTRUCTIONS = counts.cannot_count_instructions()


@pytest.mark.parametrize("name", counts.STEPS)
def test_calls_of_python(name: str) -> None:
    seen, stored = counts.python_calls(*counts.STEPS[name]), EXPECTED["python_calls"][name]
    slack = 1.01 if SAME_PYTHON and SAME_TORCH else 1.1
    assert 0 < seen <= slack * stored, f"{seen} calls in a step, {stored} before; {HOW}"


@pytest.mark.parametrize("name", counts.STEPS)
def test_tensors_allocated(name: str) -> None:
    seen, stored = counts.allocations(*counts.STEPS[name]), EXPECTED["allocations"][name]
    slack = 0 if SAME_TORCH else 5
    assert seen <= stored + slack, f"{seen} tensors more than the model's own in a step, {stored} before; {HOW}"


@pytest.mark.skipif(NO_INSTRUCTIONS is not None, reason=str(NO_INSTRUCTIONS))
@pytest.mark.parametrize("isa", counts.COUNTED_ISAS)
def test_instructions_of_the_kernels(isa: str, launched: Any) -> None:
    if isa not in loading.available_isas():
        pytest.skip(f"this processor has no {isa}")
    seen, stored = counts.instructions(isa), EXPECTED["instructions"][isa]
    assert set(seen) == set(stored)
    slack = 1.01 if counts.compiler() == EXPECTED["compiler"] else 1.25
    grown = {name: (stored[name], count) for name, count in seen.items() if count > slack * stored[name]}
    assert not grown, f"instructions for an element, before and now: {grown}; {HOW}"
