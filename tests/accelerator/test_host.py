"""The host's side of a device: cores left for its launches, memory of all nodes, and a clear refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import adamw, make_model, settings

import wherry
from wherry import native
from wherry.errors import WherryError
from wherry.native import pool
from wherry.tiers import streams
from wherry.tiers.buffers import HostPool, Pinning, spread
from wherry.tiers.streams import TorchPin, accelerator, check_device, link_to


def test_it_is_the_accelerator() -> None:
    found = accelerator()
    assert found is not None and found.type == "emulated"


@pytest.mark.parametrize(("cores", "left"), [(1, 1), (2, 2), (4, 3), (8, 6), (64, 62)])
def test_some_cores_are_left_to_the_threads_that_launch_kernels(
    cores: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "allowed_cpus", lambda: list(range(cores)))
    monkeypatch.setattr(pool, "physical_cores", list)
    monkeypatch.setattr(pool, "cpu_quota", lambda: None)
    chosen = native.Pool()
    assert chosen.threads == left and chosen.cores == tuple(range(cores))[cores - left :]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert native.Pool().threads == cores


def test_a_thread_that_waits_for_cuda_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: asked.append(options))
    streams.new_event(torch.device("cuda", 0))
    assert asked == [{"blocking": True}]


def test_pinned_memory_begins_as_zeros_at_a_page() -> None:
    with HostPool(pinning=TorchPin()) as host:
        for nbytes in (100, 5000, 1 << 20):
            memory = host.take_zeros(nbytes)
            assert memory.data_ptr() % 4096 == 0 and not memory.any() and memory.is_pinned()
            memory.fill_(7)
            host.give(memory)
            assert not host.take_zeros(nbytes).any()


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="this system tells of no NUMA nodes")
def test_memory_comes_from_all_nodes_in_turn() -> None:
    memory = Pinning().allocate(1 << 21)
    assert spread(memory, native.nodes())
    memory.fill_(1)
    place = f"{memory.data_ptr():x} interleave"
    assert any(line.startswith(place) for line in Path("/proc/self/numa_maps").read_text().splitlines())
    assert not spread(memory, [])
    assert not spread(memory, [1000]), "a node that is not there"


def test_a_device_that_cannot_resize_storages_is_refused_when_an_engine_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: torch.UntypedStorage, size: int) -> None:
        raise NotImplementedError("this storage cannot be resized")

    model = make_model()
    monkeypatch.setattr(torch.UntypedStorage, "resize_", refuse)
    with pytest.raises(WherryError, match=r"emulated:0: Wherry needs .* cannot be resized"):
        wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=settings(3))
    monkeypatch.undo()
    check_device(torch.device("emulated", 0))


def test_a_link_is_of_the_device_it_was_made_for() -> None:
    link = link_to(torch.device("emulated"))
    assert link.device == torch.device("emulated", 0) and not link.shared
    assert link.host is link.pool(True) is not link.pool(False)
    link.close()
