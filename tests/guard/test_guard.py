"""What a step costs does not grow unnoticed. None of this is a time: it is counted, and compared with expected.json.

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
# Other releases of Python and torch call and allocate a little differently: slack for those.
SLACK = 1.1
SAME_PYTHON = EXPECTED["python"] == ".".join(platform.python_version_tuple()[:2])
SAME_TORCH = EXPECTED["torch"] == torch.__version__.partition("+")[0]
NO_INSTRUCTIONS = counts.cannot_count_instructions()


@pytest.mark.parametrize("stage", counts.STAGES)
def test_collectives_and_bytes(stage: int) -> None:
    assert counts.collectives(stage) == EXPECTED["collectives"][str(stage)], HOW


@pytest.mark.parametrize("stage", counts.OFFLOADED_STAGES)
def test_collectives_and_bytes_of_a_window_with_states_on_the_host(stage: int) -> None:
    assert counts.collectives(stage, offloaded=True) == EXPECTED["collectives_offloaded"][str(stage)], HOW


@pytest.mark.parametrize(("ranks", "key"), [(counts.RANKS, "python_calls"), (1, "python_calls_alone")])
@pytest.mark.parametrize("stage", counts.STAGES)
def test_calls_of_python(stage: int, ranks: int, key: str) -> None:
    _no_more_calls(counts.python_calls(stage, ranks), EXPECTED[key][str(stage)])


@pytest.mark.parametrize("stage", counts.OFFLOADED_STAGES)
def test_calls_of_python_in_a_window_with_states_on_the_host(stage: int) -> None:
    _no_more_calls(counts.python_calls(stage, offloaded=True), EXPECTED["python_calls_offloaded"][str(stage)])


def _no_more_calls(seen: int, stored: int) -> None:
    # A few calls depend on which rank comes first to a collective.
    slack = 1.01 if SAME_PYTHON and SAME_TORCH else SLACK
    assert 0 < seen <= slack * stored, f"{seen} calls in a step, {stored} before; {HOW}"


@pytest.mark.parametrize("stage", counts.STAGES)
def test_tensors_allocated(stage: int) -> None:
    seen, stored = counts.allocations(stage), EXPECTED["allocations"][str(stage)]
    slack = 0 if SAME_TORCH else 5
    assert seen <= stored + slack, f"{seen} tensors more than plain PyTorch in a step, {stored} before; {HOW}"


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
