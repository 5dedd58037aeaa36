"""Memory of gathered weights: it goes and comes, views of it stay, and what one tensor lets go of another one gets."""

from __future__ import annotations

import copy
import ctypes
import errno
import mmap
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import adamw, make_model, settings, token_batch

import wherry
from wherry.parallel.comm import Comm
from wherry.parallel.threads import run_ranks
from wherry.tiers import elastic
from wherry.tiers.elastic import Area, Elastic, Frames, Mapped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux moves pages between mappings")

NUMEL = 3 << 18  # 3 MiB, which is no whole number of huge pages
CPU = torch.device("cpu")


def anonymous(begin: int = 0, end: int = sys.maxsize) -> int:
    """Bytes between two addresses that are in memory, and are no file's, as the system has it."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            inside = begin <= int(found[1], 16) and int(found[2], 16) <= end
        elif inside and line.startswith("Anonymous:"):
            total += int(line.split()[1]) << 10
    return total


def resident(elastic: Elastic) -> int:
    start = elastic.tensor.data_ptr()
    return anonymous(start, start + 4 * elastic.tensor.numel())


def mapped(frames: Frames, numel: int = NUMEL) -> Mapped:
    made = frames.elastic(numel, torch.float32, CPU)
    assert isinstance(made, Mapped)
    return made


def test_memory_is_handed_on_and_views_stay() -> None:
    frames = Frames()
    first = mapped(frames)
    assert resident(first) == first.nbytes == 4 * NUMEL
    view = first.tensor[10:20]
    first.shrink()
    # Another one made after it has its pages, cleared; grown again they are as they were left.
    second = mapped(frames)
    assert (first.nbytes, resident(second)) == (0, 4 * NUMEL)
    assert not second.tensor.any()
    second.tensor.fill_(1.0)
    second.shrink()
    first.grow()
    assert (first.nbytes, resident(first)) == (4 * NUMEL, 4 * NUMEL)
    assert first.tensor.eq(1.0).all()
    first.tensor.copy_(torch.arange(NUMEL))
    assert view.tolist() == list(range(10, 20))
    first.shrink()
    first.trim()
    first.grow()
    assert not first.tensor.any()


@pytest.mark.parametrize("numel", [1, 1000, NUMEL, (1 << 25) + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_memory_that_was_let_go_of_reads_as_nan_and_may_be_written_to(numel: int, dtype: torch.dtype) -> None:
    elastic = Frames().elastic(numel, dtype, CPU)
    view, array = elastic.tensor[:1], elastic.tensor.view(torch.uint8).numpy()
    for value in (1.0, 2.0):
        elastic.tensor.fill_(value)
        elastic.shrink()
        assert view.float().isnan().all() and elastic.tensor[::1000].float().isnan().all()
        assert array[-1] == 0xFF
        if value == 2.0:
            view.fill_(3.0)
        elastic.grow()
        assert view.float().tolist() == elastic.tensor[-1:].float().tolist() == [value]


def test_no_more_is_held_than_was_in_use_at_once() -> None:
    """Of units of several sizes, one whole at a time."""
    frames = Frames()
    parts = []
    before = anonymous()
    for times in (1, 3, 2):
        parts.append(frames.elastic(NUMEL * times, torch.float32, CPU))
        parts[-1].shrink()
    for part in (*parts, *parts):
        part.grow()
        part.tensor.zero_()
        assert anonymous() - before <= 4 * NUMEL * 3 + (1 << 20)
        part.shrink()


def one_with_idle_pages_and_one_without() -> tuple[Mapped, Mapped]:
    frames = Frames()
    first, second = mapped(frames), mapped(frames)
    second.shrink()
    second.trim()
    first.tensor.fill_(1.0)
    first.shrink()
    return first, second


def test_a_system_that_cannot_move_pages_gives_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = one_with_idle_pages_and_one_without()
    monkeypatch.setattr(elastic, "_STAYS_MAPPED", 1 << 30)  # no such flag
    second.grow()
    assert first.tensor.isnan().all() and not second.tensor.any()
    second.shrink()
    assert second.tensor.isnan().all()


class Refusing:
    """The system, but that it has no room to move pages, and has then let go of where they were to go already."""

    def __init__(self, system: ctypes.CDLL) -> None:
        self._system = system

    def __getattr__(self, name: str) -> Any:
        return getattr(self._system, name)

    def mremap(self, address: int, old: int, new: int, flags: int, target: int) -> int:
        # What is there now can neither be read nor written. A hole might be taken by another thread.
        with open(__file__, "rb") as file:
            shared_here = mmap.MAP_SHARED | elastic._AT_ITS_PLACE
            assert self._system.mmap(target, new, 0, shared_here, file.fileno(), 0) == target
        ctypes.set_errno(errno.ENOMEM)
        return -1


def test_a_mapping_that_was_let_go_of_for_pages_that_did_not_come_is_made_anew() -> None:
    first, second = one_with_idle_pages_and_one_without()
    second._area.system = Refusing(second._area.system)  # type: ignore[assignment]
    second.grow()
    assert first.tensor.isnan().all() and not second.tensor.any()
    second.tensor.fill_(2.0)
    first.grow()
    assert not first.tensor.any() and second.tensor.eq(2.0).all()


def test_memory_that_could_not_be_had_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    elastic = mapped(Frames())
    elastic.shrink()
    elastic.trim()

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(Area, "fill", fail)
        elastic.grow()
    assert elastic.nbytes == 0
    elastic.grow()
    assert not elastic.tensor.any()


def test_where_what_is_mapped_counts_as_used_nothing_is_kept_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "_counts_what_is_mapped", lambda: True)
    first = mapped(Frames())
    first.tensor.fill_(1.0)
    first.shrink()
    assert first.tensor.isnan().all()
    first.grow()
    assert not first.tensor.any()


@pytest.mark.parametrize("moves", [True, False])
def test_training_with_mapped_weights_gives_the_bits_of_allocated_ones(
    monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    model = make_model()

    def body(comm: Comm) -> tuple[list[float], dict[str, torch.Tensor], set[type]]:
        mine = copy.deepcopy(model)
        config = settings(3)
        config["zero_optimization"]["stage3_prefetch_bucket_size"] = 0
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=config, mesh=comm)
        flats = [flat for unit in engine.units for flat in unit.travelling]
        losses = []
        for step in range(3):
            loss = engine(*token_batch(step, 0, comm.rank))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        assert not sum(flat.elastic.nbytes for flat in flats)
        state = engine.module.state_dict()
        engine.close()
        return losses, state, {type(flat.elastic) for flat in flats}

    monkeypatch.setattr(elastic, "_counts_what_is_mapped", lambda: not moves)
    mapped = run_ranks(2, body)
    monkeypatch.setattr(elastic, "_system", lambda: None)
    plain = run_ranks(2, body)
    for (losses, state, kinds), (expected, weights, others) in zip(mapped, plain, strict=True):
        assert (kinds, others) == ({Mapped}, {Elastic})
        assert losses == expected
        assert all(torch.equal(value, weights[name]) for name, value in state.items())
