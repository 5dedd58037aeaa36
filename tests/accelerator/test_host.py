"""The host's side of a device: cores left for its launches, pinned memory, and a clear refusal."""

from __future__ import annotations

import pytest
import torch
from tests.engine.harness import engine_of, make_model, settings

from wherry import native
from wherry.errors import WherryError
from wherry.native import pool
from wherry.tiers.buffers import HostPool
from wherry.tiers.streams import TorchPin, link_to


@pytest.mark.parametrize(("cores", "left"), [(1, 1), (4, 3), (64, 62)])
def test_some_cores_are_left_to_the_threads_that_launch_kernels(
    cores: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "allowed_cpus", lambda: list(range(cores)))
    monkeypatch.setattr(pool, "physical_cores", list)
    monkeypatch.setattr(pool, "cpu_quota", lambda: None)
    chosen = native.Pool()
    assert chosen.threads == left and chosen.cores == tuple(range(cores))[cores - left :]


def test_pinned_memory_begins_as_zeros_at_a_page() -> None:
    with HostPool(pinning=TorchPin()) as host:
        for nbytes in (100, 1 << 20):
            memory = host.take_zeros(nbytes)
            assert memory.data_ptr() % 4096 == 0 and not memory.any() and memory.is_pinned()
            memory.fill_(7)
            host.give(memory)
            assert not host.take_zeros(nbytes).any()
    link = link_to(torch.device("emulated"))
    assert link.device == torch.device("emulated", 0) and not link.shared
    assert link.host is link.pool(True) is not link.pool(False)
    link.close()


def test_a_device_that_cannot_resize_storages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: torch.UntypedStorage, size: int) -> None:
        raise NotImplementedError("this storage cannot be resized")

    model = make_model()
    monkeypatch.setattr(torch.UntypedStorage, "resize_", refuse)
    with pytest.raises(WherryError, match=r"emulated:0: Wherry needs .* cannot be resized"):
        engine_of(model, settings(3))
