"""Memory of gathered weights: it is released and taken again, views stay, and a view without memory is NaN."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from wherry.tiers.elastic import Elastic

NUMEL = 3 << 18  # 3 MiB, which is no whole number of huge pages
CPU = torch.device("cpu")
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a view of what was let go of has no memory")


def resident(elastic: Elastic) -> int:
    """Bytes of it that are in memory and no file's, as the system has it."""
    begin = elastic.tensor.data_ptr()
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            inside = begin <= int(found[1], 16) and int(found[2], 16) <= begin + 4 * elastic.tensor.numel()
        elif inside and line.startswith("Anonymous:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.parametrize("mapped", [True, False])
def test_memory_goes_and_comes_and_views_stay(mapped: bool) -> None:
    tensor = Elastic(NUMEL, torch.float32, CPU, mapped=mapped)
    assert tensor.nbytes == 4 * NUMEL and not tensor.tensor.any()
    view = tensor.tensor[10:20]
    for _ in range(2):
        tensor.tensor.fill_(1.0)
        assert not mapped or sys.platform != "linux" or resident(tensor) == 4 * NUMEL
        tensor.shrink()
        assert tensor.nbytes == 0
        assert not mapped or sys.platform != "linux" or resident(tensor) == 0
        tensor.grow()
        tensor.tensor.copy_(torch.arange(NUMEL))
        tensor.grow()  # as it is whole, nothing is lost
        assert view.tolist() == list(range(10, 20))


@linux
@pytest.mark.parametrize(
    ("numel", "dtype"),
    [(1, torch.float32), (1000, torch.float8_e4m3fn), (NUMEL, torch.float16), ((1 << 25) + 1, torch.bfloat16)],
)
def test_memory_that_was_let_go_of_reads_as_nan_and_may_be_written_to(numel: int, dtype: torch.dtype) -> None:
    tensor = Elastic(numel, dtype, CPU)
    view, array = tensor.tensor[:1], tensor.tensor.view(torch.uint8).numpy()
    tensor.tensor.fill_(1.0)
    for _ in range(2):
        tensor.shrink()
        assert view.float().isnan().all() and tensor.tensor[::1000].float().isnan().all()
        assert array[-1] == 0xFF
        tensor.grow()
        tensor.tensor.fill_(2.0)
        assert view.float().tolist() == tensor.tensor[-1:].float().tolist() == [2.0]
    tensor.shrink()
    view.view(torch.uint8).fill_(0xFF)
