"""The emulated accelerator is late, strict about memory, and otherwise the CPU."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator import emulated
from torch import Tensor
from torch.nn import functional as F

from wherry.train.model import GPT, GPTConfig

ROOT = Path(__file__).parents[2]
DEVICE = "emulated"


def late() -> None:
    """Nothing runs by chance in what follows."""
    emulated.lateness(1)


def run(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


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
    process = run(code)
    out, _ = process.communicate(timeout=60)
    assert out == "before\n"
    assert process.returncode == -signal.SIGSEGV


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


def test_freed_memory_is_used_again_at_once_by_the_same_stream_only() -> None:
    late()
    first = torch.empty(3000, device=DEVICE)
    address = first.data_ptr()
    del first
    other = torch.Stream(DEVICE)
    with other:
        elsewhere = torch.empty(3000, device=DEVICE)
    here = torch.empty(3000, device=DEVICE)
    assert here.data_ptr() == address != elsewhere.data_ptr()


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
    torch.empty(2_000_000, dtype=torch.uint8, device=DEVICE)


def test_an_allocation_fails_once_by_count() -> None:
    emulated.fail_after(2)
    torch.empty(1, device=DEVICE)
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


def test_copies_of_unpinned_memory_are_waited_for() -> None:
    late()
    tensor = torch.full((64,), 3.0, device=DEVICE)
    assert tensor.to("cpu", non_blocking=False).tolist() == [3] * 64
    source = torch.ones(64)
    target = torch.empty(64, device=DEVICE)
    target.copy_(source, non_blocking=True)
    source.zero_()
    assert emulated.queued() == 0
    assert target.tolist() == [1] * 64


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


def test_events_pass_for_those_who_poll() -> None:
    late()
    torch.ones(64, device=DEVICE).mul_(2)
    first, second = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    assert first.query()
    first.record()
    side = torch.Stream(DEVICE)
    side.wait_event(first)
    with side:
        torch.ones(64, device=DEVICE)
    second.record(side)
    for _ in range(1000):
        if second.query():
            break
    assert first.query() and second.query()
    assert first.elapsed_time(second) >= 0


def test_a_late_failure_is_raised_where_it_is_waited_for() -> None:
    late()
    table = torch.ones(4, 4, device=DEVICE)
    F.embedding(torch.tensor([9], device=DEVICE), table)
    with pytest.raises(RuntimeError, match="index out of range"):
        torch.accelerator.synchronize()
    with pytest.raises(RuntimeError, match="same device"):
        table + torch.ones(4, 4)


# ---- What torch runs on it


def compare(compute: Callable[[Callable[[Tensor], Tensor]], Any]) -> None:
    torch.manual_seed(0)
    expected = compute(lambda tensor: tensor.clone())
    torch.manual_seed(0)
    found = compute(lambda tensor: tensor.to(DEVICE))
    for left, right in zip(expected, found, strict=True):
        if isinstance(left, Tensor):
            assert right.device.type == DEVICE
            assert left.dtype == right.dtype and left.stride() == right.stride()
            assert torch.equal(left, right.cpu())
        else:
            assert left == right


def values(dtype: torch.dtype) -> Tensor:
    return (torch.randn(6, 8) * 10).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_operations_are_the_cpus(dtype: torch.dtype) -> None:
    def compute(on: Callable[[Tensor], Tensor]) -> list[Any]:
        a, b = on(values(dtype)), on(values(dtype))
        results = [a * b, a.t() + 1, a + b, a.clone(), a.t().contiguous(), a.to(torch.float64), torch.cat([a, b], 1)]
        results += [a[1], a[:, 2:5].clone(), a[on(torch.tensor([0, 3, 3]))], a[torch.tensor([0, 3])], a[a > 0]]
        results += [a.nonzero(), a.unique(), a.sum(), a.sum(1), a.max().item(), a.tolist(), torch.equal(a, b)]
        results += [*a.split(2), *a.unbind(1), a.max(0).values, a.sort(1).indices, a.float().argmax()]
        results += [torch.where(a > 0, a, b), torch.stack([a, b]), a.flip(0), a.expand(2, 6, 8), a.reshape(2, -1)]
        results += [
            a.gather(0, on(IDS)),
            *torch._foreach_add([a, b], [b, a]),
            a.index_select(0, on(torch.tensor([1, 1]))),
            a.any(),
        ]
        c = on(values(dtype))
        c[0] = 1
        c[on(torch.tensor([2, 4]))] = b[:2]
        c.masked_fill_(c > 3, 0)
        c.t().copy_(a.t())
        c[:, 1].zero_()
        results += [c, torch.zeros_like(a), torch.full_like(a, 1), torch.empty(0, device=a.device).resize_(3).zero_()]
        if dtype.is_floating_point:
            results += [a @ b.t(), torch.addmm(a[:, 0], a, b.t()), a.softmax(1), F.gelu(a), F.layer_norm(a, (8,))]
            mean = torch.native_layer_norm(a, (8,), b[0], b[1], 1e-5)
            norm_backward = torch.ops.aten.native_layer_norm_backward
            results += [*mean, *norm_backward(b, a, (8,), *mean[1:], b[0], b[1], [True] * 3)]
            results += [a.norm(), torch.linalg.vector_norm(a), *torch._foreach_norm([a, b]), a.float().std(), a.var(0)]
            results += [torch.nn.utils.clip_grads_with_norm_([a], 1.0, a.norm()) or a, F.silu(b), b.cumsum(0)]
        return results

    compare(compute)


IDS = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1]])


@pytest.mark.parametrize(("dtype", "masked"), [(torch.float32, False), (torch.bfloat16, True)])
def test_attention_is_the_cpus(dtype: torch.dtype, masked: bool) -> None:
    def compute(on: Callable[[Tensor], Tensor]) -> list[Any]:
        parts = [on(torch.randn(2, 16, 3, 8).to(dtype)).transpose(1, 2).requires_grad_() for _ in range(3)]
        mask = on(torch.randn(16, 16).to(dtype)) if masked else None
        mixed = F.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=not masked)
        grads = torch.autograd.grad(mixed.float().square().sum(), parts)
        return [mixed.detach(), *grads]

    compare(compute)


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
    generator = torch.Generator(DEVICE).manual_seed(3)
    assert torch.randn(8, device=DEVICE, generator=generator).tolist() == first
    with torch.random.fork_rng([0], device_type=DEVICE):
        torch.rand(4, device=DEVICE)


def test_autocast() -> None:
    layer = torch.nn.Linear(8, 8).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = layer(torch.ones(2, 8, device=DEVICE))
        assert found.dtype is torch.bfloat16 and found.softmax(1).dtype is torch.float32


def test_hooks_run_in_an_autograd_thread_of_the_devices() -> None:
    threads = []
    weight = torch.ones(4, device=DEVICE, requires_grad=True)
    side = torch.Stream(DEVICE)
    weight.register_post_accumulate_grad_hook(
        lambda _: threads.append((threading.get_ident(), torch.accelerator.current_stream()))
    )
    side.wait_event(torch.accelerator.current_stream().record_event())
    with side:
        loss = (weight * 2).sum()
    loss.backward()
    assert threads[0][0] != threading.get_ident()
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


@pytest.mark.usefixtures("launched")
def test_two_devices() -> None:
    code = """
import torch
from tests.accelerator import emulated
emulated.set_devices(2)
assert torch.accelerator.device_count() == torch.emulated.device_count() == 2
with torch.emulated.device(1):
    tensor = torch.ones(4, device="emulated")
assert tensor.device.index == 1
moved = (tensor * 3).to("emulated:0")
assert moved.device.index == 0 and moved.tolist() == [3] * 4
assert torch.accelerator.memory_allocated(1) == 512
weight = torch.ones(4, device="emulated:1", requires_grad=True)
(weight.to("emulated:0") * 2).sum().backward()
assert weight.grad.tolist() == [2] * 4
print("well")
"""
    out, error = run(code).communicate(timeout=60)
    assert out == "well\n", error
