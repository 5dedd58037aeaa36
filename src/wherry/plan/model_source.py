"""A model that a plan may build and run, and the errors of its own code."""

from __future__ import annotations

import dataclasses
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.errors import WherryError
from wherry.plan.grid import Grid

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What one forward is called with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, batch: Any) -> Inputs:
        """A micro-batch as loaders give it: a mapping is of keywords, a list or tuple of arguments."""
        if isinstance(batch, Mapping):
            return cls((), dict(batch))
        return cls(tuple(batch) if isinstance(batch, list | tuple) else (batch,))


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model that can be built, on whatever device is the default, and the inputs of its forward.

    `make(micro_batch, sequence)` returns the model and one micro-batch, or None for the micro-batch if nobody knows
    what the model is called with.
    """

    name: str
    make: Callable[[int, int], tuple[nn.Module, Inputs | None]]
    # Tokens of a sample, where nothing else is asked for.
    sequence: int = 1
    # Whether `make` follows the micro-batch.
    scales: bool = True
    # The source of the part that one rank of a grid has, with activations of the given dtype, where that is known.
    part: Callable[[Grid, torch.dtype], ModelSource] | None = None

    def share(self, grid: Grid, dtype: torch.dtype | None) -> ModelSource:
        """One rank's part, where ranks share the model."""
        if grid.size == 1:
            return self
        if self.part is None:
            raise WherryError(
                f"{self.name}: how ranks would share it is not known; let module:callable return one rank's part of "
                "the model, and give --ranks as the number of data-parallel ranks"
            )
        if dtype is None:
            import torch

            dtype = torch.float32
        return self.part(grid, dtype)


@contextmanager
def told_by(what: str) -> Iterator[None]:
    """What a model's own code raises is told as that, with its line. Any other error stays what it is."""
    try:
        yield
    except WherryError:
        raise
    except Exception as error:
        if (line := _line_of(error)) is None:
            raise
        raise WherryError(f"{what}: {type(error).__name__}: {error} ({line})") from error


def _line_of(error: Exception) -> str | None:
    """The innermost line on the way to an error that is neither Wherry's nor torch's nor Python's own."""
    import torch

    # Models that come with Wherry are its own code as well.
    others = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))
    library = sysconfig.get_path("stdlib")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        of_python = frame.filename.startswith((library, "<")) and "site-packages" not in frame.filename
        if not of_python and not frame.filename.startswith(others):
            return f"{frame.filename}:{frame.lineno}"
    return None
