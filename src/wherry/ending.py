"""The end of an engine: everything is given back, and the model is an ordinary module again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from wherry.errors import WherryError

if TYPE_CHECKING:
    from wherry.engine import Engine


def close(engine: Engine) -> None:
    """Give everything back in this order, whatever of it fails; then the last error is raised, with the others."""
    with ExitStack() as end:
        for part in reversed(_parts(engine)):
            end.callback(part)


def _parts(engine: Engine) -> list[Callable[[], object]]:
    return [
        partial(_settle, engine),
        engine._checkpoints.close,
        engine._gatherer.give_up,
        engine._abandon_window,
        engine._reporter.close,
        engine._hooks.remove,
        engine._roster.close,
        engine._activations.close,
        engine._access.close,
        engine._offstage.close,
        *([engine._updater.close] if engine._updater is not None else []),
        *([engine.optimizer.close] if engine.optimizer is not None else []),
        engine._gradients.close,
        *(flat.close for unit in engine.units for flat in unit.travelling),
        engine.units.clear,
        engine._tiering.close,
        engine.topology.close,
    ]


def _settle(engine: Engine) -> None:
    if engine._updater is not None and engine.comm.size == 1:
        with suppress(WherryError):  # an update that failed was told of before, or is lost with the rest
            engine._updater.settle()


def unwrap(engine: Engine) -> nn.Module:
    """Close, and give the model back whole, on every rank's host."""
    engine.settle()
    module = engine.module
    whole: dict[nn.Parameter, torch.Tensor] = {}
    for unit in engine.units:
        with engine._access.gathered(unit.travelling, None, "unwrap()"):
            for flat in unit.travelling:
                whole.update({p: p.detach().to("cpu", copy=True) for p in flat.parameters})
    engine.close()
    for parameter, value in whole.items():
        parameter.data = value
    return module
