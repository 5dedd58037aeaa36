"""Buffer pools: aligned, counted, and nothing allocated in the steady state."""

from __future__ import annotations

import gc
import re
from types import SimpleNamespace

import pytest
import torch

from wherry.tiers.buffers import (
    DevicePool,
    FallbackPinning,
    HostPool,
    PinError,
    Pinning,
    PoolError,
    untouched,
    untouched_zeros,
)


class Recorder(Pinning):
    """Record pinned memory, and reject what CUDA would reject."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def pin(self, address: int, nbytes: int) -> None:
        assert address not in self.pinned
        self.pinned[address] = nbytes

    def unpin(self, address: int, nbytes: int) -> None:
        assert self.pinned.pop(address) == nbytes


@pytest.mark.parametrize(("nbytes", "grain"), [(1, 4096), (5000, 4096), (100_000, 4096), (3 << 20, 2 << 20)])
def test_alignment_and_size(nbytes, grain):
    with HostPool() as pool:
        buffer = pool.take(nbytes)
        assert (buffer.dtype, buffer.numel(), buffer.data_ptr() % grain) == (torch.uint8, nbytes, 0)
        buffer.fill_(3)
        assert int(buffer.to(torch.int64).sum()) == 3 * nbytes


def test_the_steady_state_allocates_nothing():
    with HostPool() as pool:
        sizes = [1000, 5000, 3 << 20, 5000]
        for _ in range(10):
            for buffer in [pool.take(size) for size in sizes]:
                pool.give(buffer.view(torch.int8))
        counters = pool.counters
        assert (counters.misses, counters.in_use) == (4, 0)
        assert counters.allocated == counters.peak_in_use == 4096 + 2 * 8192 + (3 << 20)
        kept = pool.take(1000)
        pool.trim()
        assert (pool.counters.allocated, pool.counters.in_use) == (4096, 4096)
        pool.give(kept)


def mapping(address: int) -> dict[str, str]:
    """Read the system's record of the mapping that holds an address; empty if there is none."""
    found: dict[str, str] = {}
    inside = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(span[1], 16) <= address < int(span[2], 16)
            elif inside:
                name, _, value = line.partition(":")
                found[name] = value.strip()
    return found


def test_memory_really_goes_back():
    def resident(address: int) -> int:
        return int(mapping(address).get("Rss", "0 kB").split()[0]) << 10

    with HostPool() as pool:
        buffer = pool.take(32 << 20).fill_(1)
        address = buffer.data_ptr()
        assert resident(address) >= 32 << 20
        pool.give(buffer)
    del buffer
    assert resident(address) == 0


def test_a_fork_does_not_inherit_pinned_memory():
    """A fork, such as a worker of a loader, inherits the memory that no device reads."""
    for pinning in (Recorder(), None):
        with HostPool(pinning=pinning) as pool:
            for buffer in [pool.take(nbytes) for nbytes in (5000, 3 << 20)]:
                flags = mapping(buffer.data_ptr()).get("VmFlags")
                if flags is None:
                    pytest.skip("this kernel does not tell the flags of mappings")
                assert ("dc" in flags.split()) is (pinning is not None)


def test_zeros_take_no_memory_before_they_are_written_to():
    before = untouched()
    alone = untouched_zeros(5 << 20, torch.uint8, torch.device("cpu"))
    assert untouched() - before == 5 << 20
    alone[-1] = 1
    assert untouched() - before < 5 << 20 and int(alone.sum()) == 1
    with HostPool() as pool:
        buffer = pool.take(8192)
        pool.give(buffer.fill_(1))
        assert not pool.take_zeros(8192).any()


def test_memory_that_cannot_be_had_is_an_error_of_ours():
    with HostPool() as pool, pytest.raises(PoolError, match=r"a host buffer of \d+ bytes could not be had: .*ulimit"):
        pool.take(1 << 50)


@pytest.mark.parametrize("closed", [True, False])
def test_every_pin_is_undone(closed):
    recorder = Recorder()
    pool = HostPool(pinning=recorder)
    kept, given = pool.take(4096), pool.take(3 << 20)
    assert recorder.pinned == {kept.data_ptr(): 4096, given.data_ptr(): 3 << 20}
    pool.give(given)
    kept.fill_(9)
    if closed:
        pool.close()
        assert list(recorder.pinned) == [kept.data_ptr()] and pool.counters.allocated == 4096
        assert (kept == 9).all()
        pool.give(kept)
        assert pool.counters.allocated == 0
    else:
        del pool
        gc.collect()
    assert recorder.pinned == {}
    assert kept.numel() == 4096


class Limited(Recorder):
    """Pin so many buffers, then fail."""

    def __init__(self, name: str, most: int) -> None:
        super().__init__()
        self.name, self.cost = name, f"pinned by {name}"
        self.most = most
        self.tries = 0

    def pin(self, address: int, nbytes: int) -> None:
        self.tries += 1
        if self.tries > self.most:
            raise PinError("CUDA error 2")
        super().pin(address, nbytes)


def test_pinning_that_fails_falls_back_once_and_buffers_are_unpinned_the_way_they_were_pinned(caplog):
    first, second = Limited("first", 2), Limited("second", 1)
    kinds, lines = [], []
    with HostPool(pinning=FallbackPinning(first, second)) as pool:
        buffers = []
        for _ in range(5):
            buffers.append(pool.take(5000).fill_(1))
            kinds.append(pool.kind)
            lines.append(len(caplog.messages))
        addresses = [buffer.data_ptr() for buffer in buffers]
        assert [list(way.pinned) for way in (first, second)] == [addresses[:2], addresses[2:3]]
        for buffer in buffers:
            pool.give(buffer)
    assert kinds == ["first", "first", "second", "pageable", "pageable"]
    assert lines == [0, 0, 1, 2, 2] and (first.tries, second.tries) == (3, 2)
    assert "pinning a host buffer of 8.0 KiB by first failed (CUDA error 2)" in caplog.messages[0]
    assert "by second" in caplog.messages[1] and "staged and block the host" in caplog.messages[1]
    assert first.pinned == second.pinned == {} and HostPool().kind == "pageable"


def test_memory_that_is_not_there_is_no_failure_to_pin(caplog):
    with HostPool(pinning=FallbackPinning(Recorder())) as pool, pytest.raises(PoolError, match="could not be had"):
        pool.take(1 << 50)
    assert not caplog.messages


@pytest.mark.parametrize("torch_pins", [True, False])
def test_cuda_memory_that_cannot_be_registered(torch_pins, monkeypatch, caplog):
    """torch pins the memory, or it is pageable; and no error is left to the next kernel."""
    from wherry.tiers.streams import CudaPin, TorchPin

    zeros, launches, pinned = torch.zeros, [], []

    def pin(*size, pin_memory=False, **how):
        pinned.append(pin_memory)
        if pin_memory and not torch_pins:
            raise RuntimeError("CUDA error: out of memory\nCompile with ...")
        return zeros(*size, **how)

    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 801, cudaHostUnregister=lambda *_: 1 / 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: launches.append(1))
    monkeypatch.setattr(torch, "zeros", pin)
    with HostPool(pinning=FallbackPinning(CudaPin(), TorchPin())) as pool:
        buffer = pool.take_zeros(5000)
        assert buffer.data_ptr() % 4096 == 0 and not buffer.any() and pinned[0]
        assert pool.kind == ("torch" if torch_pins else "pageable") and launches == [1]
        pool.give(buffer)
    reasons = ["by cudaHostRegister failed (CUDA error 801)", "by torch failed (CUDA error: out of memory)"]
    assert len(caplog.messages) == 2 - torch_pins
    assert all(reason in line for reason, line in zip(reasons, caplog.messages, strict=False))


def test_watchers_see_memory_come_and_go():
    seen: list[tuple[str, int]] = []
    with HostPool() as pool:
        first = pool.take(4096)
        end = pool.watch(lambda a, n: seen.append(("+", n)), lambda a, n: seen.append(("-", n)))
        second = pool.take(8192)
        pool.give(first)
        pool.trim()
        end()
        pool.give(second)
    assert seen == [("+", 4096), ("+", 8192), ("-", 4096)]


def test_device_pool():
    pool = DevicePool("cpu")
    flat = pool.take(1000, torch.bfloat16)
    assert (flat.dtype, flat.numel(), flat.device.type) == (torch.bfloat16, 1000, "cpu")
    pool.give(flat)
    again = pool.take(500, torch.float32)
    assert again.data_ptr() == flat.data_ptr()
    assert (pool.counters.misses, pool.counters.allocated) == (1, 2048)
    pool.give(again)
    pool.close()
    assert pool.counters.allocated == 0


def test_a_failure_to_pin_is_no_error_of_the_next_kernel(monkeypatch):
    """CUDA's runtime keeps an error until the next call that reads it, as torch's launch of a kernel does."""
    from wherry.tiers.streams import CudaPin

    kept: list[int] = []

    def fail(code):
        kept.append(code)
        return code

    def launch(*_, **__):
        if kept:
            raise RuntimeError(f"CUDA error {kept.pop()}")

    runtime = SimpleNamespace(cudaHostRegister=lambda *_: fail(2), cudaHostUnregister=lambda *_: fail(713))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", launch)
    with pytest.raises(PoolError, match="CUDA error 2"):
        HostPool(pinning=CudaPin()).take(1)
    launch()
    with pytest.raises(RuntimeError, match="unpinning a host buffer failed with CUDA error 713"):
        CudaPin().unpin(0, 4096)
    launch()
