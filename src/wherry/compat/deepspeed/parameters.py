"""An engine's parameters as scripts meet them: marked with `ds_id`, `ds_shape`, `ds_status` and the like.

Here shapes stay, and weights are reached with `wherry.gathered`; the marks exist because scripts decide by them.
"""

from __future__ import annotations

import enum
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from wherry.sharding.access import gathered

if TYPE_CHECKING:
    from wherry.engine import Engine

ENGINE = "_wherry_engine"


class ZeroParamStatus(enum.Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Status:
    """Whether a parameter's weights are there, as of the moment it is compared or shown."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = weakref.ref(parameter)

    @property
    def now(self) -> ZeroParamStatus:
        parameter = self._parameter()
        # A released parameter is one NaN seen at every place.
        released = parameter is not None and parameter.numel() > 1 and not any(parameter.stride())
        return ZeroParamStatus.NOT_AVAILABLE if released else ZeroParamStatus.AVAILABLE

    @property
    def name(self) -> str:
        return self.now.name

    def __eq__(self, other: object) -> bool:
        return self.now is (other.now if isinstance(other, Status) else other)

    def __repr__(self) -> str:
        return repr(self.now)


def _marks(number: int, parameter: nn.Parameter, persistent: bool) -> dict[str, Any]:
    """What stands on a partitioned parameter. Gathering by `all_gather` lasts until `partition`."""
    reference, held = weakref.ref(parameter), ExitStack()
    marks = {
        "ds_id": number,
        "ds_shape": parameter.shape,
        "ds_numel": parameter.numel(),
        "ds_persist": persistent,
        "ds_status": Status(parameter),
        "ds_active_sub_modules": set(),
    }

    def all_gather(param_list: Any = None, **_: Any) -> None:
        held.close()
        held.enter_context(gathered(param_list if param_list is not None else [reference()]))  # type: ignore[list-item]

    def partition(*_: Any, **__: Any) -> None:
        held.close()

    def summary() -> dict[str, Any]:
        return {name: marks["ds_" + name] for name in ("id", "status", "numel", "shape")}

    return {**marks, "ds_summary": summary, "all_gather": all_gather, "partition": partition}


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def live_engines() -> list[Engine]:
    """The engines of this process that have not been closed, for calls that name none."""
    return list(_engines)


def mark(engine: Engine) -> None:
    """Put the marks on an engine's parameters; those of sharding only where weights are partitioned."""
    _engines.add(engine)
    reference = weakref.ref(engine)
    partitioned = engine.placement.parameters.partitioned
    if partitioned:
        # What a backward reads of a parameter that autograd has saved is whole, and a tensor of its own without marks.
        torch.Tensor.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    persistent = {p for unit in engine.units for flat in unit.flats if flat.resident for p in flat.parameters}
    for number, parameter in enumerate(engine.module.parameters()):
        setattr(parameter, ENGINE, reference)
        if not partitioned:
            continue
        for name, value in _marks(number, parameter, parameter in persistent).items():
            setattr(parameter, name, value)
    if partitioned:
        for module in engine.module.modules():
            module.ds_external_parameters = list  # type: ignore[assignment]  # called, it says that there are none


_ON_PARAMETERS = {ENGINE, *_marks(0, nn.Parameter(torch.empty(0)), persistent=False)}


def unmark(engine: Engine) -> None:
    _engines.discard(engine)
    for parameter in engine.module.parameters():
        for name in [name for name in parameter.__dict__ if name in _ON_PARAMETERS]:
            delattr(parameter, name)
    for inner in engine.module.modules():
        inner.__dict__.pop("ds_external_parameters", None)


def engine_of(parameter: torch.Tensor) -> Engine | None:
    reference: weakref.ref[Engine] | None = getattr(parameter, ENGINE, None)
    return reference() if reference is not None else None


def is_zero_param(parameter: object) -> bool:
    """Whether a parameter is partitioned."""
    return hasattr(parameter, "ds_id")
