"""Count the allocations of a step: tensors by the code that makes them, flats that grow."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import wherry
from wherry.tiers.elastic import Elastic

WHERRY = str(Path(wherry.__file__).parent)
# Frames of these are skipped: their caller made the allocation.
BETWEEN = (str(Path(torch.__file__).parent), sys.prefix, sys.base_prefix, "<")
# The only frame of gradients that autograd computes itself.
AUTOGRAD = "_engine_run_backward"


# By thread, as ranks are threads that share the patched class.
SEES: dict[int, Allocations] = {}


def watch_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count every growth of an Elastic for its thread."""
    grow = Elastic.grow

    def counted(elastic: Elastic) -> None:
        seen = SEES.get(threading.get_ident())
        if seen is not None:
            seen.grown += not elastic.nbytes
        grow(elastic)

    monkeypatch.setattr(Elastic, "grow", counted)


class Allocations(TorchDispatchMode):
    """Count the tensors with new memory that operations of this thread make, and the flats that grow.

    `engine` counts those of the engine's code by file and line, `engine_bytes` their bytes, `model` those of the
    model's code and of autograd. `grown` counts gathers, which grow memory again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.engine: Counter[str] = Counter()
        self.engine_bytes: Counter[str] = Counter()
        self.model = 0
        self.grown = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor) or tensor.untyped_storage()._cdata in given or not tensor.nbytes:
                continue
            where = asker(sys._getframe(1))
            if where is None:
                self.model += 1
            else:
                self.engine[f"{where} {func.__name__}"] += 1
                self.engine_bytes[f"{where} {func.__name__}"] += tensor.nbytes
        return result

    @contextmanager
    def counting(self) -> Iterator[Allocations]:
        SEES[threading.get_ident()] = self
        try:
            with self:
                yield self
        finally:
            del SEES[threading.get_ident()]

    def __str__(self) -> str:
        lines = [f"{count:4d} {self.engine_bytes[where]:8d} B  {where}" for where, count in self.engine.most_common()]
        return "\n".join([*lines, f"model {self.model}, grown {self.grown}"])


def asker(frame: FrameType | None) -> str | None:
    """Return the engine's line that called an operation; None for one of the model or of autograd."""
    while frame is not None:
        path = frame.f_code.co_filename
        if frame.f_code.co_name == AUTOGRAD:
            return None
        if path.startswith(WHERRY):
            return f"{path[len(WHERRY) + 1 :]}:{frame.f_lineno}"
        if not path.startswith(BETWEEN):
            return None
        frame = frame.f_back
    return None
