"""The host's side of a device: cores left for its launches, pinned memory, and a clear refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.covering import Case
from tests.engine.harness import Run, assert_equal, engine_of, make_model, settings
from tests.life import BASE, Leg, at, subject

import wherry
from wherry import native
from wherry.errors import WherryError
from wherry.native import pool
from wherry.tiers.buffers import HostPool, PinError
from wherry.tiers.streams import TorchPin, can_pin, link_to


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


def trained(case: Case, folder: Path) -> Run:
    leg = Leg(case, folder, None, (0, 1), subject(case))
    leg.train((0, 1, 2))
    leg.run.extra = leg.states()
    return leg.end()


@pytest.mark.parametrize("row", ["offload-3-parameters", "disk-3-parameters"])
@pytest.mark.parametrize("pinned", [0, 3])
def test_training_has_the_same_bits_where_pinning_fails(
    pinned: int, row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the first buffer, or at a later one; numbers and batches cannot be pinned from then on either."""
    case = BASE | at(row) | {"activations": "host", "clip": 0.5}
    allocate, left = TorchPin.allocate, [1 << 30]

    def limited(self: TorchPin, nbytes: int) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise PinError("CUDA error: out of memory")
        return allocate(self, nbytes)

    def refuse(self: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(TorchPin, "allocate", limited)
    want = trained(case, tmp_path)
    assert not caplog.messages
    left[0] = pinned
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    assert_equal(trained(case, tmp_path), want)
    assert "pinning a host buffer of" in caplog.text and "by torch failed (CUDA error: out of memory)" in caplog.text


@pytest.mark.parametrize("pins", [True, False])
def test_a_loader_pins_batches_only_where_torch_can_pin(
    pins: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    zeros = torch.zeros

    def limited(*size: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        if pin_memory and not pins:
            raise RuntimeError("CUDA error: operation not supported")
        return zeros(*size, pin_memory=pin_memory, **how)

    can_pin.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", limited)
        config = settings(2) | {"train_micro_batch_size_per_gpu": 1}
        for _ in range(2):
            engine, _, loader, _ = wherry.initialize(model=make_model(), training_data=[1, 2], config=config)
            assert loader.pin_memory is pins
            engine.close()
    can_pin.cache_clear()
    assert (
        len([line for line in caplog.messages if "torch cannot pin host memory here (CUDA error" in line]) == 1 - pins
    )


def test_a_device_that_cannot_resize_storages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: torch.UntypedStorage, size: int) -> None:
        raise NotImplementedError("this storage cannot be resized")

    model = make_model()
    monkeypatch.setattr(torch.UntypedStorage, "resize_", refuse)
    with pytest.raises(WherryError, match=r"emulated:0: Wherry needs .* cannot be resized"):
        engine_of(model, settings(3))
