"""The loader of micro-batches that an engine makes of a dataset: every rank its share, from any place on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from wherry.errors import WherryError
from wherry.observe.log import get_logger, warn
from wherry.tiers.streams import can_pin

if TYPE_CHECKING:
    from wherry.engine import Engine


class EpochSampler(DistributedSampler[Any]):
    """Shares the data out over the ranks, in another order each time it is gone through. A pass may begin in the
    middle: `resume` leaves out what an earlier run has had of an epoch."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # The epoch that was left in the middle, and how many samples this rank has had of it.
        self._left = (-1, 0)

    def resume(self, epoch: int, samples: int) -> None:
        self.set_epoch(epoch)
        self._left = (epoch, samples)

    @property
    def had(self) -> int:
        """Samples that the next pass leaves out. Of another epoch, as set by `set_epoch`, none are."""
        epoch, samples = self._left
        return samples if epoch == self.epoch else 0

    def __iter__(self) -> Iterator[Any]:
        order = islice(super().__iter__(), self.had, None)
        self._left = (-1, 0)
        self.set_epoch(self.epoch + 1)
        return order


class EpochLoader(DataLoader[Any]):
    """A DataLoader over an `EpochSampler` that knows its position: that of the batch it gave last, not of those that
    its workers have fetched ahead. The position holds for any number of ranks and any size of micro-batches.
    """

    sampler: EpochSampler

    def __init__(self, data: Dataset[Any], sampler: EpochSampler, **options: Any) -> None:
        # With a generator of its own, beginning a pass takes nothing from the one that the model draws from.
        super().__init__(data, sampler=sampler, generator=torch.Generator(), **options)
        self._seed = torch.initial_seed()
        # Of the pass under way, if there is one: the epoch, and the samples that this rank has had of it.
        self._position: tuple[int, int] | None = None
        self._pass = 0

    def __iter__(self) -> Any:
        sampler = self.sampler
        self._pass += 1
        number, epoch, had = self._pass, sampler.epoch, sampler.had
        seed = self._seed + epoch * sampler.num_replicas + sampler.rank
        self.generator.manual_seed(seed % 2**63)
        self._position = (epoch, had)
        return self._counted(super().__iter__(), number, epoch, had)

    def _counted(self, batches: Iterator[Any], number: int, epoch: int, had: int) -> Iterator[Any]:
        assert self.batch_size is not None
        for batch in batches:
            had += self.batch_size
            # Of several passes at once the last begun counts, and none that a loaded position has overtaken.
            if number == self._pass:
                self._position = None if self._ends(had) else (epoch, had)
            yield batch

    def _ends(self, had: int) -> bool:
        """Whether no batch is left of an epoch after so many samples."""
        assert self.batch_size is not None
        left = self.sampler.num_samples - had
        return left < self.batch_size if self.drop_last else left <= 0

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, of all ranks together."""
        sampler = self.sampler
        epoch, had = self._position or (sampler.epoch, sampler.had)
        return {
            "epoch": epoch,
            "samples": had * sampler.num_replicas,
            "order": sampler.seed,
            "seed": self._seed,
            "length": len(self.dataset),  # type: ignore[arg-type]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position: the next pass gives what is left of its epoch."""
        sampler, length = self.sampler, len(self.dataset)  # type: ignore[arg-type]
        epoch, samples = state["epoch"], state["samples"]
        if samples and state["length"] != length:
            get_logger(sampler.rank).warning(
                "training data: there are %d samples and there were %d when the checkpoint was written, so its place "
                "in epoch %d is not theirs: this epoch begins anew", length, state["length"], epoch,
            )  # fmt: skip
            samples = 0
        sampler.seed, self._seed = state["order"], state["seed"]
        # Where the ranks there are now cannot divide what has been had, the rest of it comes once more.
        had = samples // sampler.num_replicas
        self._pass += 1
        self._position = None
        sampler.resume(*((epoch + 1, 0) if self._ends(had) else (epoch, had)))


def make_dataloader(
    data: Dataset[Any],
    engine: Engine,
    *,
    collate_fn: Any = None,
    drop_last: bool = False,
    batch_size: int | None = None,
    sampler: Any = None,
    shuffle: bool = True,
    workers: int = 0,
) -> DataLoader[Any]:
    """Micro-batches of this rank's share of the data. A loader with a `sampler` of the caller's own has no position."""
    if batch_size is None:
        batch_size = engine.train_micro_batch_size_per_gpu()
        # Only a loader takes its batches' size from the config: what a loop brings has one of its own.
        if engine.config["train_batch_size"] is engine.config["train_micro_batch_size_per_gpu"] is None:
            warn("train_micro_batch_size_per_gpu: not given, so the loader's batches have size %d", batch_size)
    options = {
        "batch_size": batch_size,
        "collate_fn": collate_fn,
        "drop_last": drop_last,
        "num_workers": workers,
        "pin_memory": engine.device.type != "cpu" and can_pin(),
    }
    if sampler is not None:
        return DataLoader(data, sampler=sampler, **options)
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise WherryError(
            f"training_data: expected samples with a length and an index, to share them out over the ranks, got "
            f"{type(data).__name__}; iterate over a loader or a stream of your own instead, on each rank over its part"
        )
    rank, ranks = engine.topology.readers
    shares = EpochSampler(data, num_replicas=ranks, rank=rank, shuffle=shuffle, drop_last=drop_last)
    return EpochLoader(data, shares, **options)
