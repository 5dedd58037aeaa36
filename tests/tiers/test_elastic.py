"""Memory of gathered weights: it goes and comes, views of it stay, and what one tensor lets go of another one gets."""

from __future__ import annotations

import copy
import ctypes
import errno
import mmap
import sys
from typing import Any

import pytest
import torch
from tests.engine.harness import adamw, make_model, settings, token_batch

import wherry
from wherry.parallel.comm import Comm
from wherry.parallel.threads import run_ranks
from wherry.tiers import elastic
from wherry.tiers.buffers import PAGE
from wherry.tiers.elastic import Elastic, Frames, Mapped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux moves pages between mappings")

NUMEL = 3 << 18  # 3 MiB, which is no whole number of huge pages
CPU = torch.device("cpu")


def resident(elastic: Elastic) -> int:
    """Bytes of its mapping that are in memory, as the system has it."""
    nbytes = 4 * elastic.tensor.numel()
    found = (ctypes.c_ubyte * (nbytes // PAGE))()
    address = ctypes.c_void_p(elastic.tensor.data_ptr())
    assert not ctypes.CDLL(None).mincore(address, ctypes.c_size_t(nbytes), found)
    return PAGE * sum(page & 1 for page in found)


def test_memory_is_handed_on_and_views_stay() -> None:
    frames = Frames()
    first = frames.elastic(NUMEL, torch.float32, CPU)
    assert isinstance(first, Mapped) and resident(first) == first.nbytes == 4 * NUMEL
    view = first.tensor[10:20]
    first.shrink()
    # Another one made after it has its pages, cleared; grown again they are as they were left.
    second = frames.elastic(NUMEL, torch.float32, CPU)
    assert (first.nbytes, resident(first), resident(second)) == (0, 0, 4 * NUMEL)
    assert not second.tensor.any()
    first.grow()
    first.tensor.fill_(1.0)
    second.shrink()
    second.trim()
    first.shrink()
    second.grow()
    assert (second.nbytes, resident(first), resident(second)) == (4 * NUMEL, 0, 4 * NUMEL)
    assert second.tensor.eq(1.0).all()
    first.grow()
    first.tensor.copy_(torch.arange(NUMEL))
    assert view.tolist() == list(range(10, 20))
    first.shrink()
    first.trim()
    assert resident(first) == 0


def test_memory_comes_back_to_where_it_was() -> None:
    frames = Frames()
    mapped = frames.elastic(NUMEL, torch.float32, CPU)
    mapped.tensor.fill_(2.0)
    mapped.shrink()
    mapped.grow()
    assert mapped.tensor.eq(2.0).all()


def test_no_more_is_held_than_was_in_use_at_once() -> None:
    """Of units of several sizes, one whole at a time."""
    frames = Frames()
    parts = []
    for times in (1, 3, 2):
        parts.append(frames.elastic(NUMEL * times, torch.float32, CPU))
        parts[-1].shrink()
    for part in (*parts, *parts):
        part.grow()
        part.tensor.zero_()
        assert sum(map(resident, parts)) <= 4 * NUMEL * 3
        part.shrink()


def one_with_idle_pages_and_one_without() -> tuple[Mapped, Mapped]:
    frames = Frames()
    first, second = (frames.elastic(NUMEL, torch.float32, CPU) for _ in range(2))
    assert isinstance(first, Mapped) and isinstance(second, Mapped)
    second.shrink()
    second.trim()
    first.tensor.fill_(1.0)
    first.shrink()
    return first, second


def test_a_system_that_cannot_move_pages_gives_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = one_with_idle_pages_and_one_without()
    monkeypatch.setattr(elastic, "_FIXED", 1 << 30)  # no such flag
    second.grow()
    assert resident(first) == 0 and not second.tensor.any()


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
    frames = Frames()
    first, second = (frames.elastic(NUMEL, torch.float32, CPU) for _ in range(2))
    assert isinstance(first, Mapped) and isinstance(second, Mapped)
    second.shrink()
    second.trim()
    first.tensor.fill_(1.0)
    first.shrink()
    second._system = first._system = Refusing(first._system)  # type: ignore[assignment]
    second.grow()
    assert resident(first) == 0 and not second.tensor.any()
    second.tensor.fill_(2.0)
    second._system = first._system = first._system._system  # type: ignore[attr-defined]
    second.shrink()
    first.grow()
    assert first.tensor.eq(2.0).all() and resident(second) == 0


def test_pages_that_could_not_be_moved_are_still_there_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = one_with_idle_pages_and_one_without()

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(Mapped, "move_to", fail)
        second.grow()
    second.grow()
    assert second.tensor.eq(1.0).all() and resident(first) == 0


def test_where_what_is_mapped_counts_as_used_memory_is_as_torch_allocates_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mappings that lie empty would add up to the whole model."""
    monkeypatch.setattr(elastic, "_counts_what_is_mapped", lambda: True)
    assert type(Frames().elastic(NUMEL, torch.float32, CPU)) is Elastic


def kept(flats: list[Any]) -> int:
    """How many flats have memory that they do not use."""
    mapped = [flat.elastic for flat in flats if isinstance(flat.elastic, Mapped)]
    return sum(elastic in elastic._frames._idle[elastic.span] for elastic in mapped)


def test_training_with_mapped_weights_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()

    def body(comm: Comm) -> tuple[list[float], dict[str, torch.Tensor], int]:
        mine = copy.deepcopy(model)
        config = settings(3)
        config["zero_optimization"]["stage3_prefetch_bucket_size"] = 0
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), config=config, mesh=comm)
        flats = [flat for unit in engine.units for flat in unit.travelling]
        assert not kept(flats)
        losses = []
        for step in range(3):
            loss = engine(*token_batch(step, 0, comm.rank))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        assert not sum(flat.elastic.nbytes for flat in flats)
        state = engine.module.state_dict()
        mapped = kept(flats)
        engine.close()
        assert not kept(flats)
        return losses, state, mapped

    plain = run_ranks(2, body)
    monkeypatch.setattr(elastic, "HUGE_PAGE", 4096)
    mapped = run_ranks(2, body)
    assert (plain[0][2], mapped[0][2] > 0) == (0, True)
    for (losses, state, _), (expected, weights, _) in zip(mapped, plain, strict=True):
        assert losses == expected
        assert all(torch.equal(value, weights[name]) for name, value in state.items())
