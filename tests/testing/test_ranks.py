"""Ranks as threads: the others name a rank that fails, stalls or diverges; and collectives keep no tensors."""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.harness import make_model, settings, token_batch

import wherry
from wherry.errors import DivergenceError, PeerError, WherryError
from wherry.parallel.comm import Comm
from wherry.testing import ranks, run_ranks


def outcomes(size: int, body: Callable[[Comm], Any], timeout: float = 60.0) -> list[Any]:
    """Collect the result or the exception of each rank."""

    def caught(comm: Comm) -> Any:
        try:
            return body(comm)
        except Exception as error:
            comm.tell(error)
            return error

    return run_ranks(size, caught, timeout=timeout)


def all_reduce(comm: Comm, label: str = "") -> float:
    tensor = torch.ones(2)
    comm.all_reduce(tensor, label=label).wait()
    return float(tensor[0])


def test_a_failure_reaches_the_ranks_that_wait() -> None:
    def body(comm: Comm) -> float:
        if comm.rank == 1:
            raise OSError("no space left")
        return all_reduce(comm, "blocks.3")

    first, failed, third = outcomes(3, body)
    assert isinstance(failed, OSError)
    for error in (first, third):
        assert isinstance(error, PeerError)
        assert "rank 1 has failed" in str(error)
        assert "all_reduce of blocks.3" in str(error)
        assert "OSError: no space left" in str(error)


def test_ranks_that_fail_alike_and_go_on_are_healthy() -> None:
    def body(comm: Comm) -> list[float]:
        sums = []
        for _ in range(20):
            comm.fail("a bad batch, on every rank")
            sums.append(all_reduce(comm))
        return sums

    assert outcomes(3, body) == [[3.0] * 20] * 3


def test_ranks_that_call_different_collectives() -> None:
    def body(comm: Comm) -> None:
        if comm.rank == 0:
            comm.all_gather(torch.empty(4), torch.ones(2), "blocks.0").wait()
        else:
            comm.reduce_scatter(torch.empty(2), torch.ones(4), "blocks.1").wait()

    errors = outcomes(2, body)
    told = next(error for error in errors if isinstance(error, DivergenceError))
    assert "rank 0 wants all_gather of blocks.0" in str(told)
    assert "rank 1 reduce_scatter of blocks.1" in str(told)


def test_a_rank_that_does_not_arrive() -> None:
    def body(comm: Comm) -> Any:
        return all_reduce(comm, "blocks.2") if comm.rank else None

    errors = outcomes(3, body, timeout=0.2)
    assert errors[0] is None
    assert any("all_reduce of blocks.2" in str(error) and "rank 0 did not arrive" in str(error) for error in errors[1:])


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_collectives_wait_for_streams(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a stream of one rank may still copy a tensor that other ranks read on theirs."""
    late: dict[int, Callable[[], Any]] = {}
    seen: dict[int, torch.Tensor] = {}

    def complete(value: Any) -> None:
        late.pop(threading.get_ident(), lambda: None)()
        if isinstance(value, torch.Tensor):
            seen[threading.get_ident()] = value.clone()

    monkeypatch.setattr(ranks, "_complete", complete)

    def body(comm: Comm) -> tuple[torch.Tensor, torch.Tensor]:
        brought = torch.full((2 if operation == "all_gather" else 4,), float("nan"))
        late[threading.get_ident()] = lambda: brought.fill_(comm.rank + 1.0)
        taken = {"reduce_scatter": torch.empty(2), "all_gather": torch.empty(4)}.get(operation, brought)
        given = (taken,) if taken is brought else (taken, brought)
        getattr(comm, operation)(*given).wait()
        return taken, seen[threading.get_ident()]

    sums = {"all_reduce": [3.0] * 4, "reduce_scatter": [3.0] * 2}
    expected = sums | {"all_gather": [1.0, 1, 2, 2], "broadcast": [1.0] * 4}
    for taken, when_complete in run_ranks(2, body):
        assert taken.tolist() == expected[operation]
        assert torch.equal(taken, when_complete)  # nothing was done after that


def test_groups_of_ranks() -> None:
    def body(comm: Comm) -> tuple[float, ...]:
        inside, across = comm.within(2), comm.across(2)
        rows = []
        for group in (inside, across, comm.within(4), comm.within(1)):
            tensor = torch.tensor([float(comm.rank)])
            group.all_reduce(tensor).wait()
            rows.append(float(tensor))
        return (inside.rank, across.rank, *rows)

    assert run_ranks(4, body) == [(0, 0, 1, 2, 6, 0), (1, 0, 1, 4, 6, 1), (0, 1, 5, 2, 6, 2), (1, 1, 5, 4, 6, 3)]


def test_a_failure_reaches_groups_of_ranks() -> None:
    def body(comm: Comm) -> float:
        group = comm.across(2)
        if comm.rank == 3:
            comm.fail("full disk")
            return 0.0
        return all_reduce(group)

    first, second, third, _ = outcomes(4, body)
    assert first == third == 2.0
    assert "rank 3 has failed, while rank 1 waited" in str(second)


BROKEN = 0.125


class Stumbling(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["lr"] == BROKEN:
            raise OSError("the disk is gone")
        return super().step(closure)


@pytest.mark.parametrize(("where", "stage"), [("forward", 3), ("backward", 2), ("update", 2), ("update", 3)])
def test_an_engine_whose_peer_fails(where: str, stage: int) -> None:
    def stumble(*_: Any) -> None:
        raise OSError("the disk is gone")

    def body(comm: Comm) -> None:
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(
            model=mine, optimizer=Stumbling(mine.parameters(), lr=1e-3), config=config, mesh=comm
        )
        for step in range(3):
            if step == 1 and comm.rank == 1:
                if where == "forward":
                    mine.blocks[1].register_forward_pre_hook(stumble)
                elif where == "backward":
                    mine.blocks[1].register_full_backward_hook(stumble)
                else:
                    engine.optimizer.param_groups[0]["lr"] = BROKEN
            engine.backward(engine(*token_batch(step, 0, comm.rank)))
            engine.step()

    model, config = make_model(), settings(stage, more={"zero_allow_untested_optimizer": True})
    errors = outcomes(3, body)
    assert isinstance(errors[1], WherryError if where == "update" else OSError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerError), error
        assert "rank 1 has failed" in str(error)
        assert "the disk is gone" in str(error)


def test_a_collective_keeps_no_tensor() -> None:
    """A rank that leaves a collective late does not keep the others' tensors."""

    def body(comm: Comm) -> int:
        held = 0
        for _ in range(200):
            tensor = torch.ones(4)
            storage = weakref.ref(tensor.untyped_storage())
            comm.all_reduce(tensor, "sum").wait()
            del tensor
            held += storage() is not None
        return held

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can
    try:
        assert run_ranks(2, body) == [0, 0]
    finally:
        sys.setswitchinterval(before)


def test_a_rank_that_has_ended_is_missed_in_groups_that_are_made_later() -> None:
    def body(comm: Comm) -> str:
        if comm.rank == 1:
            raise OSError("it fell over")
        if comm.rank > 1:
            return ""
        with pytest.raises(PeerError):
            comm.barrier()
        with pytest.raises(PeerError) as told:
            comm.within(2).barrier()
        errors_of_rank_0.append(str(told.value))
        return ""

    errors_of_rank_0: list[str] = []
    with pytest.raises(OSError, match="it fell over"):
        run_ranks(4, body, timeout=5.0)
    assert "rank 1 has failed" in errors_of_rank_0[0] and "it fell over" in errors_of_rank_0[0]
