"""An engine's parameters as scripts meet them: marked with `ds_id`, `ds_shape`, `ds_status` and the like, and
reached with `deepspeed.utils.safe_*`.

Here shapes stay, and weights are reached with `wherry.gathered`; the marks exist because scripts decide by them.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from wherry.errors import WherryError
from wherry.sharding.access import gathered

if TYPE_CHECKING:
    from wherry.engine import Engine

ENGINE = "_wherry_engine"
_MARKS = (ENGINE, "ds_id", "ds_shape", "ds_numel", "ds_persist", "ds_status", "ds_active_sub_modules",
          "ds_summary", "all_gather", "partition")  # fmt: skip


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


class _Handle:
    """`param.all_gather()` and `param.partition()`: gathering that outlasts a `with` block."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = weakref.ref(parameter)
        self._held = ExitStack()

    def all_gather(self, param_list: Any = None, **_: Any) -> None:
        self.partition()
        self._held.enter_context(gathered(param_list if param_list is not None else [self._parameter()]))  # type: ignore[list-item]

    def partition(self, *_: Any, **__: Any) -> None:
        self._held.close()

    def summary(self) -> dict[str, Any]:
        parameter = self._parameter()
        assert parameter is not None
        return {name: getattr(parameter, "ds_" + name) for name in ("id", "status", "numel", "shape")}


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
        handle = _Handle(parameter)
        marks = {
            "ds_id": number,
            "ds_shape": parameter.shape,
            "ds_numel": parameter.numel(),
            "ds_persist": parameter in persistent,
            "ds_status": Status(parameter),
            "ds_active_sub_modules": set(),
            "ds_summary": handle.summary,
            "all_gather": handle.all_gather,
            "partition": handle.partition,
        }
        for name, value in marks.items():
            setattr(parameter, name, value)
    if partitioned:
        for module in engine.module.modules():
            module.ds_external_parameters = _no_external_parameters  # type: ignore[assignment]


def _no_external_parameters() -> list[tuple[str, torch.Tensor]]:
    return []


def unmark(engine: Engine) -> None:
    _engines.discard(engine)
    for parameter in engine.module.parameters():
        for name in _MARKS:
            if name in parameter.__dict__:
                delattr(parameter, name)
    for inner in engine.module.modules():
        inner.__dict__.pop("ds_external_parameters", None)


def engine_of(parameter: torch.Tensor) -> Engine | None:
    reference: weakref.ref[Engine] | None = getattr(parameter, ENGINE, None)
    return reference() if reference is not None else None


def is_zero_param(parameter: object) -> bool:
    """Whether a parameter is partitioned."""
    return hasattr(parameter, "ds_id")


# `safe_get_...` answers None for a parameter of no engine, `safe_set_...` refuses it. The fp32 parameter is the state
# "master". Of a whole state every rank must make the call; a local one is this rank's part, flat.

MASTER = "master"


def _named(parameter: torch.Tensor) -> tuple[Engine, str] | None:
    engine = engine_of(parameter)
    return (engine, engine.states.name_of(parameter)) if engine is not None else None


def _required(parameter: torch.Tensor) -> tuple[Engine, str]:
    found = _named(parameter)
    if found is None:
        raise WherryError(
            f"a parameter of shape {tuple(parameter.shape)} belongs to no engine; call deepspeed.initialize first"
        )
    return found


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    found = _named(param)
    return found[0].states.full(found[1], optim_state_key) if found else None


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    engine, name = _required(param)
    engine.states.set_full(name, optim_state_key, value)


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    return safe_get_full_optimizer_state(param, MASTER)


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    safe_set_full_optimizer_state(param, value, MASTER)


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    found = _named(param)
    return found[0].states.local(found[1], optim_state_key) if found else None


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    engine, name = _required(param)
    engine.states.set_local(name, optim_state_key, value)


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    return safe_get_local_optimizer_state(param, MASTER)


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    safe_set_local_optimizer_state(param, value, MASTER)


def _with_gradient(param: torch.Tensor) -> tuple[Engine, str] | None:
    found = _named(param)
    return found if found and param.requires_grad and found[0].has_gradients() else None


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The whole mean gradient, from the boundary's backward until the next window; None outside."""
    found = _with_gradient(param)
    return found[0].gradients(found[1]) if found else None


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    found = _with_gradient(param)
    return found[0].states.local_gradient(found[1]) if found else None


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    engine, name = _required(param)
    engine.states.set_gradient(name, value)


def safe_update_full_grad_vectorized(
    params: Sequence[torch.Tensor], update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """`update_func(gradient, parameter)` gives each parameter's new gradient."""
    for parameter in params:
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            safe_set_full_grad(parameter, update_func(gradient, parameter))


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    engine, name = _required(param)
    start, stop = engine.states.local_range(name)
    if value.numel() != stop - start:
        raise WherryError(
            f"safe_set_local_grad: {name}: expected {stop - start} elements, those that this rank updates, got "
            f"{tuple(value.shape)}"
        )
    whole = value.new_zeros(param.numel())  # of which this rank keeps its own part
    whole[start:stop] = value.flatten()
    engine.states.set_gradient_here(name, whole)
