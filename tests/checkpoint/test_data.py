"""The place in the engine's own data is saved, and what is left of it comes after a load: each sample once."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import make_model, settings

import wherry
from wherry.dataloader import make_dataloader
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks

SAMPLES = 37


class Numbers(torch.utils.data.Dataset):
    """Each sample is its number, and a draw from the generator of the worker that fetches it."""

    def __init__(self, length: int = SAMPLES, draws: bool = False) -> None:
        self.length = length
        self.draws = draws

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> tuple[int, float]:
        return number, float(torch.rand(())) if self.draws else 0.0


def engine_of(comm: Comm | None = None, *, size: int = 2, drop_last: bool = False, data: Any = None) -> Any:
    more = {"train_micro_batch_size_per_gpu": size, "dataloader_drop_last": drop_last}
    engine, *_ = wherry.initialize(
        model=make_model(), config=settings(0, more=more), mesh=comm, training_data=data or Numbers()
    )
    return engine


def numbers(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def flat(lists: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def endless(loader: Any) -> Any:
    while True:
        yield from loader


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("taken", [0, 1, 7, 9, 10, 13, 19, 20, 31])
def test_what_follows_is_the_same(tmp_path: Path, taken: int, drop_last: bool) -> None:
    """Ten batches of two ranks an epoch, or nine: in the middle of any epoch, at its end, and before the first."""

    def rank(comm: Comm) -> None:
        one = engine_of(comm, drop_last=drop_last)
        batches = endless(one.training_dataloader)
        numbers(islice(batches, taken))
        one.save_checkpoint(tmp_path)
        expected = numbers(islice(batches, 25))
        other = engine_of(comm, drop_last=drop_last)
        other.load_checkpoint(tmp_path)
        assert numbers(islice(endless(other.training_dataloader), 25)) == expected
        # An engine in the middle of a pass of its own goes back as well.
        one.load_checkpoint(tmp_path)
        assert numbers(islice(endless(one.training_dataloader), 25)) == expected

    run_ranks(2, rank)


@pytest.mark.parametrize(("before", "after", "size"), [(1, 4, 1), (4, 1, 3), (2, 3, 2), (3, 2, 2)])
def test_on_other_ranks_every_sample_comes(tmp_path: Path, before: int, after: int, size: int) -> None:
    """What the first ranks had, and the next ones get, is the data: of some ranks' remainder a few come twice."""

    def begin(comm: Comm) -> list[int]:
        engine = engine_of(comm)
        had = numbers(islice(endless(engine.training_dataloader), 4))
        engine.save_checkpoint(tmp_path)
        return flat(had)

    def go_on(comm: Comm) -> list[int]:
        engine = engine_of(comm, size=size)
        engine.load_checkpoint(tmp_path)
        return flat(numbers(engine.training_dataloader))

    had = flat(run_ranks(before, begin))
    rest = flat(run_ranks(after, go_on))
    assert len(set(had)) == len(had) == 8 * before
    assert set(had) | set(rest) == set(range(SAMPLES))
    # Padding that divides the data among the ranks, and what these could not divide of those that were had.
    assert len(had) + len(rest) - SAMPLES <= (-SAMPLES % after) + len(had) % after


def test_batches_fetched_ahead_are_not_had(tmp_path: Path) -> None:
    """Workers are some batches ahead of training; the generator that the model draws from is left alone."""
    one = engine_of()
    loader = make_dataloader(Numbers(), one, workers=2)
    state = torch.get_rng_state()
    batches = iter(loader)
    numbers(islice(batches, 3))
    assert torch.equal(state, torch.get_rng_state())
    position = loader.state_dict()
    assert position["samples"] == 6
    expected = numbers(batches)
    again = make_dataloader(Numbers(), one, workers=2)
    again.load_state_dict(position)
    assert numbers(again) == expected


def test_workers_draw_the_same_in_a_later_epoch() -> None:
    one = engine_of()
    data = Numbers(draws=True)
    loader = make_dataloader(data, one, workers=1)
    first = [batch[1] for batch in loader]
    position = loader.state_dict()
    second = [batch[1] for batch in loader]
    assert not torch.equal(torch.cat(first), torch.cat(second))
    with torch.random.fork_rng():
        torch.manual_seed(99)
        again = make_dataloader(data, one, workers=1)
    again.load_state_dict(position)
    assert torch.equal(torch.cat([batch[1] for batch in again]), torch.cat(second))


def test_an_epoch_that_a_script_sets(tmp_path: Path) -> None:
    """A script may call `set_epoch`: of the epoch that was left the rest comes, of another all of it."""
    one = engine_of()
    loader = one.training_dataloader
    loader.sampler.set_epoch(5)
    batches = iter(loader)
    numbers(islice(batches, 4))
    one.save_checkpoint(tmp_path)
    expected = numbers(batches)
    for epoch, length in ((5, len(expected)), (6, len(loader))):
        other = engine_of()
        other.load_checkpoint(tmp_path)
        other.training_dataloader.sampler.set_epoch(epoch)
        found = numbers(other.training_dataloader)
        assert len(found) == length and (found == expected) == (epoch == 5)


def test_other_data_begin_anew_and_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = engine_of()
    numbers(islice(one.training_dataloader, 4))
    one.save_checkpoint(tmp_path)
    other = engine_of(data=Numbers(SAMPLES + 1))
    other.load_checkpoint(tmp_path)
    assert sorted(flat(numbers(other.training_dataloader))) == list(range(SAMPLES + 1))
    assert "there are 38 samples and there were 37 when the checkpoint was written" in caplog.text
