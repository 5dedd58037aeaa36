"""The emulated accelerator is late, strict about memory, and otherwise the CPU."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator import emulated
from torch.nn import functional as F

from wherry.train.model import GPT, GPTConfig

ROOT = Path(__file__).parents[2]
DEVICE = "emulated"


def late() -> None:
    """Nothing runs by chance in what follows."""
    emulated.lateness(1)


# ---- Memory


@pytest.mark.usefixtures("launched")
def test_the_host_cannot_read_device_memory() -> None:
    code = """
import ctypes, torch
from tests.accelerator import emulated
tensor = torch.ones(4, device="emulated")
torch.accelerator.synchronize()
assert emulated.host_view(tensor).tolist() == [1] * 4
print("before", flush=True)
ctypes.c_float.from_address(tensor.data_ptr()).value
print("after", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, timeout=60)
    assert done.stdout == b"before\n"
    assert done.returncode == -signal.SIGSEGV


def test_fresh_and_freed_memory_is_poisoned() -> None:
    fresh = torch.empty(8, device=DEVICE)
    assert fresh.isnan().all().item()
    fresh.fill_(1)
    view = emulated.host_view(fresh)
    torch.accelerator.synchronize()
    assert view.tolist() == [1] * 8
    del fresh
    torch.accelerator.synchronize()
    assert view.isnan().all()


def test_a_lifetime_that_no_stream_guards_is_seen() -> None:
    def result(*, record: bool) -> list[float]:
        late()
        side = torch.Stream(DEVICE)
        source = torch.ones(2000, device=DEVICE)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            target = source + 1
        if record:
            source.record_stream(side)
        del source
        torch.full((2000,), 7.0, device=DEVICE)
        torch.accelerator.current_stream().synchronize()
        side.synchronize()
        return emulated.host_view(target)[:2].tolist()

    assert result(record=True) == [2, 2]
    assert result(record=False) != [2, 2]


def test_memory_is_counted() -> None:
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    count = emulated.allocations()
    kept = torch.empty(1000, dtype=torch.uint8, device=DEVICE)
    torch.empty(5000, dtype=torch.uint8, device=DEVICE)
    assert torch.accelerator.memory_allocated() - before == 1024
    assert torch.accelerator.max_memory_allocated() - before == 1024 + 5120
    assert torch.accelerator.memory_reserved() >= torch.accelerator.max_memory_allocated()
    assert torch.emulated.memory_stats()["allocated_bytes.all.peak"] == torch.emulated.max_memory_allocated()
    assert emulated.allocations() - count == 2
    del kept
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_allocated() == before


def test_a_limit_frees_the_cache_and_then_refuses() -> None:
    torch.accelerator.empty_cache()
    room = torch.accelerator.memory_reserved() + (1 << 20)
    emulated.limit(room)
    assert torch.emulated.mem_get_info() == (1 << 20, room)
    for size in (500_000, 700_000, 900_000):
        torch.empty(size, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2000000 bytes"):
        torch.empty(2_000_000, dtype=torch.uint8, device=DEVICE)
    emulated.limit(None)
    emulated.fail_after(2)
    torch.empty(2_000_000, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device=DEVICE)
    torch.empty(1, device=DEVICE)


def test_storages_shrink_to_nothing_and_grow_again() -> None:
    before = torch.accelerator.memory_allocated()
    tensor = torch.arange(1024.0, device=DEVICE)
    storage = tensor.untyped_storage()
    storage.resize_(8192)
    assert storage.size() == 8192
    assert tensor.sum().item() == 1024 * 1023 / 2
    storage.resize_(0)
    assert storage.size() == 0 and torch.accelerator.memory_allocated() == before
    storage.resize_(4096)
    assert tensor.isnan().all().item()
    tensor.copy_(torch.arange(1024.0))
    assert tensor[1000].item() == 1000


# ---- Lateness


def test_a_copy_down_that_nobody_waits_for_is_not_there_yet() -> None:
    late()
    target = torch.zeros(64, pin_memory=True)
    assert target.is_pinned()
    target.copy_(torch.full((64,), 3.0, device=DEVICE), non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    assert target.isnan().all()
    event.synchronize()
    assert (target == 3).all()


def test_copies_that_are_held_back_begin_when_they_are_let_go() -> None:
    emulated.lateness(0)
    target, side = torch.zeros(64, pin_memory=True), torch.Stream(DEVICE)
    source = torch.ones(64, device=DEVICE)
    with emulated.held("down"):
        with side:
            target.copy_(source, non_blocking=True)
        event = side.record_event()
        other = threading.Thread(target=event.synchronize)
        other.start()
        with pytest.raises(RuntimeError, match="waits for a copy down that it holds back"):
            event.synchronize()
        assert emulated.queued() == 2
    other.join()
    assert (target == 1).all()


def test_pinned_memory_outlives_its_copy_and_foreign_memory_does_not() -> None:
    late()
    source = torch.full((5000,), 5.0, pin_memory=True)
    target = torch.empty(5000, device=DEVICE)
    target.copy_(source, non_blocking=True)
    address = source.data_ptr()
    del source
    assert torch.empty(5000, pin_memory=True).data_ptr() != address
    assert (target == 5).all().item()

    foreign = torch.full((5000,), 6.0)
    emulated.register_pinned(foreign.data_ptr(), foreign.nbytes)
    assert foreign.is_pinned()
    target.copy_(foreign, non_blocking=True)
    emulated.unregister_pinned(foreign.data_ptr())
    assert not foreign.is_pinned()
    with pytest.raises(RuntimeError, match="unregistered while a queued copy uses it"):
        torch.accelerator.synchronize()
    assert target.isnan().any() or (target == 5).all()


def test_a_kernel_of_another_stream_sees_poison_unless_it_waits() -> None:
    late()
    side = torch.Stream(DEVICE)
    source = torch.ones(64, device=DEVICE) * 4
    with side:
        early = source + 1
        side.wait_event(torch.accelerator.current_stream().record_event())
    side.synchronize()
    assert emulated.host_view(early).isnan().all()
    side.wait_event(torch.emulated.default_stream().record_event())
    with side:
        assert (source + 1).tolist() == [5] * 64


def test_a_late_failure_is_raised_where_it_is_waited_for() -> None:
    late()
    table = torch.ones(4, 4, device=DEVICE)
    F.embedding(torch.tensor([9], device=DEVICE), table)
    with pytest.raises(RuntimeError, match="index out of range"):
        torch.accelerator.synchronize()
    with pytest.raises(RuntimeError, match="same device"):
        table + torch.ones(4, 4)


# ---- What torch runs on it


def test_random_numbers_have_a_state_of_their_own() -> None:
    torch.manual_seed(3)
    state = torch.emulated.get_rng_state()
    first = torch.randn(8, device=DEVICE).tolist()
    cpu = torch.get_rng_state()
    dropped = F.dropout(torch.ones(64, device=DEVICE), 0.5).tolist()
    assert torch.equal(torch.get_rng_state(), cpu)
    torch.emulated.set_rng_state(state)
    assert torch.randn(8, device=DEVICE).tolist() == first
    assert F.dropout(torch.ones(64, device=DEVICE), 0.5).tolist() == dropped
    torch.manual_seed(3)
    assert torch.randn(8).tolist() == first


def test_hooks_run_in_an_autograd_thread_of_the_devices() -> None:
    threads = []
    weight = torch.ones(4, device=DEVICE, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: threads.append(threading.get_ident()))
    (weight * 2).sum().backward()
    assert threads[0] != threading.get_ident()
    assert weight.grad.tolist() == [2] * 4


def train(device: str, optimizer: str = "AdamW", steps: int = 4, **options: Any) -> list[Any]:
    torch.manual_seed(1)
    config = GPTConfig(layers=2, hidden=32, heads=2, sequence=16, vocabulary=64, checkpoint_activations=True)
    model = GPT(config).to(device)
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2, **options)
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 64, (2, 16)).to(device)
        loss = model(ids, ids)
        loss.backward()
        made.step()
        made.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses] + [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"optimizer": "SGD", "foreach": True, "momentum": 0.9}])
def test_training_is_the_cpus_bit_for_bit(options: dict[str, Any]) -> None:
    expected = train("cpu", **options)
    for lateness in (0.3, 0.9):
        emulated.lateness(lateness)
        assert train(DEVICE, **options) == expected
    assert emulated.device_lib.shape_mismatches() == []
