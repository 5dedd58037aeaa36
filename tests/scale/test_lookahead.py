"""How far gathers look ahead, where that is left to be found."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from tests.engine.harness import adamw, make_model, settings
from torch import nn

import wherry
from wherry.parallel.comm import Comm
from wherry.parallel.threads import ThreadComm, run_ranks
from wherry.sharding import lookahead
from wherry.sharding.lookahead import LEARNING, TIMED, LookAhead
from wherry.sharding.reach import furthest
from wherry.sharding.unit import Weights
from wherry.tiers.tickets import CallbackTicket, Ticket

UNITS, WIDTH = 8, 16
COMPUTES, TRAVELS = 0.001, 0.004
NUMEL = WIDTH * WIDTH + 32 + 224  # padded


class Clock(threading.local):
    """A rank's own time, which moves when a unit computes and when it waits for what is on its way."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


class Slow(nn.Module):
    """A unit whose forward takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CLOCK.now += COMPUTES
        return torch.tanh(self.linear(x))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Slow() for _ in range(UNITS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Distant(ThreadComm):
    """Gathers that are there at once for nobody: they take a while, all of them at the same time."""

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Ticket:
        super()._all_gather(whole, shard)
        there = CLOCK.now + TRAVELS

        def wait() -> None:
            CLOCK.now = max(CLOCK.now, there)

        return CallbackTicket(wait, lambda: False)


def test_a_search_ends_at_the_furthest_that_it_may_come_to() -> None:
    for step, most in ((100, 1000), (100, 800), (100, 100), (7, 10**6)):
        search = LookAhead(0, step=step, most=most)
        waits = 1.0
        while search.searching:
            waits /= 2  # every longer look halves the waiting, and none ends it
            search._decide(waits, 0.0)
        assert search.limit == furthest(step, most) <= most


def train(ahead: Any, windows: int) -> list[tuple[int, bool, list[float], float]]:
    model = make_model(Chain)

    def body(comm: Comm) -> Any:
        comm.__class__ = Distant
        mine = copy.deepcopy(model)
        more = {"zero_optimization": {"stage3_prefetch_bucket_size": ahead}}
        engine, *_ = wherry.initialize(
            model=mine, optimizer=adamw(mine.parameters()), config=settings(3, more=more), mesh=comm
        )
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(comm.rank))
        losses, times = [], []
        for _ in range(windows):
            begun = CLOCK.now
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            times.append(CLOCK.now - begun)
            losses.append(float(loss.detach()))
        found = engine._gatherer.look_ahead
        answer = found.limit, found.searching, losses, min(times[-2:])
        engine.close()
        return answer

    return run_ranks(2, body)


def test_steps_that_wait_look_further_on_all_ranks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "time", CLOCK)
    windows = LEARNING + 5 * TIMED + 1
    found, given = train("auto", windows), train(0, 4)
    # Three to four units compute while one travels.
    assert found[0][0] == found[1][0] >= 2 * NUMEL
    assert not found[0][1]
    assert found[0][3] < 0.8 * given[0][3]
    assert given[0][0] == 0
    assert found[0][2][:4] == given[0][2]


def told(look: LookAhead, waits: float, window: float = 1.0, windows: int = TIMED) -> None:
    """So many windows in which the other rank waits this long."""
    for _ in range(windows):
        look.settle(lambda mine: [mine, (waits, window)])


@pytest.mark.parametrize(
    ("waits", "limits"),
    [
        ([0.01], [0]),  # nothing to win
        ([0.5, 0.3, 0.01], [200, 400, 400]),
        ([0.5, 0.48], [200, 0]),  # no better further ahead
        ([0.5, 0.3, 0.29], [200, 400, 200]),
        ([0.5, 0.4, 0.3, 0.2, 0.1], [200, 400, 800, 800]),  # as far as weights may live
    ],
)
def test_the_distance_that_is_found(waits: list[float], limits: list[int]) -> None:
    look = LookAhead(5, step=100, most=1000)
    told(look, 0.0, windows=LEARNING)
    for wait, limit in zip(waits, limits, strict=False):
        assert look.searching
        told(look, wait)
        assert look.limit == limit
    assert not look.searching


def test_a_distance_that_is_given_is_kept() -> None:
    look = LookAhead(77)
    told(look, 1.0, windows=10)
    assert look.limit == 77 and not look.searching


class Unlike(nn.Module):
    """Large units with small ones between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(n, n), nn.Tanh()) for n in (32, 4, 32, 4, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x.repeat(1, 8)[:, : block[0].in_features])
        return x.square().mean()


def test_a_small_unit_does_not_take_the_place_of_the_large_one_behind_it() -> None:
    model = make_model(Unlike)

    def body(comm: Comm) -> list[set[str]]:
        mine = copy.deepcopy(model)
        zero = {"stage3_prefetch_bucket_size": 1100, "allgather_bucket_size": 500}
        engine, *_ = wherry.initialize(
            model=mine, optimizer=adamw(mine.parameters()), config=settings(3, more={"zero_optimization": zero}),
            mesh=comm,
        )  # fmt: skip
        on_the_way: list[set[str]] = []

        def note(*_: Any) -> None:
            flats = [flat for unit in engine.units for flat in unit.travelling]
            on_the_way.append({flat.name for flat in flats if flat.weights is Weights.GATHERING})

        mine.blocks[0][0].register_forward_pre_hook(note)
        mine.blocks[4][1].register_full_backward_hook(note)
        for _ in range(3):
            on_the_way.clear()
            engine.backward(engine(torch.ones(2, 32)))
            engine.step()
        engine.close()
        return on_the_way

    forward, backward = run_ranks(2, body)[0]
    assert "blocks.2" in forward and "blocks.2" in backward
