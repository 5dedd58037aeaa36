"""Memory of gathered weights: it goes and comes, views of it stay, and one that is read while it is gone is NaN."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from wherry.tiers import elastic
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
@pytest.mark.parametrize("numel", [1, 1000, NUMEL, (1 << 25) + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
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


@linux
def test_memory_that_could_not_be_had_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = Elastic(NUMEL, torch.float32, CPU)
    tensor.shrink()

    system = elastic._system()
    assert system is not None

    class Full:
        """The system, but that it has no memory, and has let go of what was there already."""

        def mmap(self, address: int, nbytes: int, access: int, flags: int, *file: int) -> Any:
            if flags & mmap.MAP_ANONYMOUS:
                assert system.mmap(address, nbytes, 0, flags, *file) == address
                return -1
            return system.mmap(address, nbytes, access, flags, *file)

    with monkeypatch.context() as patched:
        patched.setattr(elastic, "_system", Full)
        with pytest.raises(MemoryError, match="no memory is left to gather weights in"):
            tensor.grow()
    assert tensor.nbytes == 0 and tensor.tensor.isnan().all()
    tensor.grow()
    assert not tensor.tensor.any()
