"""The position in the engine's data is saved; after a load the rest of the data follows, each sample once."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import settings

import wherry
from wherry.dataloader import make_dataloader
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks

SAMPLES = 37


class Numbers(torch.utils.data.Dataset):
    """Samples that are their number, and a draw from the generator of the worker that fetches them."""

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
        model=torch.nn.Linear(1, 1), config=settings(0, more=more), mesh=comm, training_data=data or Numbers()
    )
    return engine


def numbers(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def flat(lists: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def endless(loader: Any) -> Any:
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        assert not is_empty, "a pass without a batch"


@pytest.mark.parametrize(
    ("taken", "drop_last"), [(0, False), (7, False), (10, False), (13, True), (9, True), (31, False)]
)
def test_the_same_batches_follow(tmp_path: Path, taken: int, drop_last: bool) -> None:
    """An epoch has ten batches of each of two ranks, or nine: save before the first, inside of one, and at its end."""
    data = Numbers(39) if drop_last else None  # a rank's samples are no whole number of batches

    def rank(comm: Comm) -> None:
        one = engine_of(comm, drop_last=drop_last, data=data)
        batches = endless(one.training_dataloader)
        numbers(islice(batches, taken))
        one.save_checkpoint(tmp_path)
        expected = numbers(islice(batches, 25))
        other = engine_of(comm, drop_last=drop_last, data=data)
        other.load_checkpoint(tmp_path)
        assert numbers(islice(endless(other.training_dataloader), 25)) == expected
        # An engine in the middle of a pass of its own goes back as well.
        one.load_checkpoint(tmp_path)
        assert numbers(islice(endless(one.training_dataloader), 25)) == expected

    run_ranks(2, rank)


@pytest.mark.parametrize(("before", "after", "size"), [(1, 4, 1), (4, 1, 3), (3, 2, 2)])
def test_every_sample_comes_on_other_ranks(tmp_path: Path, before: int, after: int, size: int) -> None:
    """The first ranks and the next ones together take all samples; a few of a remainder come twice."""

    def begin(comm: Comm) -> list[int]:
        engine = engine_of(comm)
        had = numbers(islice(endless(engine.training_dataloader), 4))
        engine.save_checkpoint(tmp_path)
        return flat(had)

    def resume(comm: Comm) -> list[int]:
        engine = engine_of(comm, size=size)
        engine.load_checkpoint(tmp_path)
        return flat(numbers(engine.training_dataloader))

    had = flat(run_ranks(before, begin))
    rest = flat(run_ranks(after, resume))
    assert len(set(had)) == len(had) == 8 * before
    assert set(had) | set(rest) == set(range(SAMPLES))
    # Padding divides the data among the ranks, before and after.
    assert len(had) + len(rest) - SAMPLES <= (-SAMPLES % after) + len(had) % after


def test_workers_that_are_ahead_of_training(launched: Any) -> None:
    """Batches fetched ahead do not count; workers draw the same in a later epoch, and leave the model's generator."""
    one = engine_of()
    data = Numbers(draws=True)

    def resumed(position: Any) -> list[Any]:
        with torch.random.fork_rng():
            torch.manual_seed(99)
            again = make_dataloader(data, one, workers=2)
        again.load_state_dict(position)
        return list(again)

    loader = make_dataloader(data, one, workers=2)
    state = torch.get_rng_state()
    first, ended = list(loader), loader.state_dict()
    batches = iter(loader)
    second = list(islice(batches, 3))
    assert torch.equal(state, torch.get_rng_state())
    middle = loader.state_dict()
    assert middle["samples"] == 6
    second += batches
    assert numbers(resumed(middle)) == numbers(second[3:])
    draws = [torch.cat([batch[1] for batch in epoch]) for epoch in (first, second, resumed(ended))]
    assert torch.equal(draws[2], draws[1]) and not torch.equal(draws[0], draws[1])


def test_an_epoch_that_a_script_sets(tmp_path: Path) -> None:
    """After `set_epoch`, the rest of the epoch that was left follows, and all of another."""
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


def test_other_data_begin_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = engine_of()
    numbers(islice(one.training_dataloader, 4))
    one.save_checkpoint(tmp_path)
    other = engine_of(data=Numbers(SAMPLES + 1))
    other.load_checkpoint(tmp_path)
    assert sorted(flat(numbers(other.training_dataloader))) == list(range(SAMPLES + 1))
    assert "there are 38 samples and there were 37 when the checkpoint was written" in caplog.text
