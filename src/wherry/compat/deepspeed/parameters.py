"""Parameters with the names that scripts read on partitioned ones: `ds_id`, `ds_shape`, `ds_status` and the like.

A partitioned parameter's class has these names from `zero.Init`, or from the engine's construction, until the engine
is closed. A released parameter shows no elements.
"""

from __future__ import annotations

import enum
import functools
import itertools
import weakref
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.parallel.partition import is_dtensor
from wherry.placement import Tier
from wherry.sharding import access
from wherry.sharding.access import gathered
from wherry.sharding.param_shard import shard_of
from wherry.sharding.released import change_class
from wherry.sharding.unit import Flat, Weights
from wherry.sharding.watched_params import Mark

if TYPE_CHECKING:
    from wherry.engine import Engine

    Base = nn.Parameter
else:
    Base = object

ENGINE = "_wherry_engine"
_HELD = "_wherry_held"
_OWN = ("ds_id", "ds_active_sub_modules", "_wherry_comm", _HELD)


class ZeroParamStatus(enum.Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_STATUS = dict(zip((Weights.WHOLE, Weights.RELEASED, Weights.GATHERING), ZeroParamStatus, strict=True))
_numbers = itertools.count()


class Marks(Base):
    """The names of a partitioned parameter, mixed into its class."""

    plain_parameter = True
    __dict__: dict[str, Any]

    @property
    def ds_shape(self) -> torch.Size:
        if (shard := shard_of(self)) is not None:
            return shard.shape
        place = _place(self)
        return torch.Size(place[0].layout.slots[place[1]].shape) if place is not None else self.shape

    @property
    def ds_numel(self) -> int:
        return self.ds_shape.numel()

    @property
    def ds_status(self) -> ZeroParamStatus:
        if (shard := shard_of(self)) is not None:
            return ZeroParamStatus.AVAILABLE if shard.whole else ZeroParamStatus.NOT_AVAILABLE
        place = _place(self)
        return _STATUS[place[0].weights] if place is not None else ZeroParamStatus.AVAILABLE

    @property
    def ds_tensor(self) -> torch.Tensor:
        """This rank's part of the values, of any size, since an engine cuts blocks and not parameters.

        It is the memory where the part rests, a copy if that is not the device's, or empty if that is the disk's.
        """
        if (shard := shard_of(self)) is not None:
            if not shard.whole:
                return shard.shard.detach()
        elif (place := _place(self)) is not None:
            return _part_of_flat(*place)
        # A parameter that is not partitioned yet has the part that this rank would keep.
        rank, size = comm_of(self).rank, self.partition_numel()
        with torch._C.DisableTorchFunction():
            part = self.detach().flatten()[rank * size : (rank + 1) * size]
            return nn.functional.pad(part, (0, size - part.numel()))

    def partition_numel(self) -> int:
        """Count the elements of one rank's share, rounded up."""
        return -(-self.ds_numel // comm_of(self).size)

    def all_gather(self, param_list: Iterable[Any] | None = None) -> None:
        """Gather this parameter, or those of the list, until `partition`."""
        for parameter in [self] if param_list is None else param_list:
            if _HELD not in parameter.__dict__:
                held = parameter.__dict__[_HELD] = ExitStack()
                held.enter_context(gathered([parameter]))

    def partition(self, param_list: Iterable[Any] | None = None, has_been_updated: bool = False) -> None:
        """Release the weights that `all_gather` holds; edits are kept either way."""
        for parameter in [self] if param_list is None else param_list:
            if (held := parameter.__dict__.pop(_HELD, None)) is not None:
                held.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy into an ordinary parameter."""
        memo[id(self)] = copy = nn.Parameter(self.data.clone(), self.requires_grad)
        return copy

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.data, self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


def _place(parameter: nn.Parameter) -> tuple[Flat, int] | None:
    """Find the flat of the engine that holds a parameter, and its slot there."""
    engine = engine_of(parameter)
    return engine.access.place_of.get(parameter) if engine is not None else None


def comm_of(parameter: Any) -> Comm:
    """Find the ranks among which a parameter is partitioned."""
    if (shard := shard_of(parameter)) is not None:
        return shard.comm
    engine = engine_of(parameter)
    comm = engine.topology.shards if engine is not None else parameter.__dict__["_wherry_comm"]
    assert isinstance(comm, Comm)
    return comm


def _part_of_flat(flat: Flat, index: int) -> torch.Tensor:
    overlap = flat.layout.overlap(flat.layout.slots[index], flat.rank)
    if overlap is None or flat.at_rest_on_disk:
        return torch.empty(0, dtype=flat.dtype, device=flat.whole.device)
    first, last, start = overlap
    with flat.opened() as shard:
        part = shard[start : start + last - first]
        return part if flat.storage is None else part.clone()


@functools.cache
def _marked(kind: type) -> type:
    return type(kind.__name__, (Marks, kind), {"__module__": kind.__module__})


def mark_parameter(parameter: nn.Parameter, comm: Comm) -> None:
    """Mix the names of a partitioned parameter into the class of one that the ranks of `comm` share.

    A DTensor keeps its class: it is partitioned along another axis.
    """
    if isinstance(parameter, Marks) or is_dtensor(parameter):
        return
    parameter.__dict__.update(ds_id=next(_numbers), ds_active_sub_modules=set(), _wherry_comm=comm)
    change_class(parameter, _marked)


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def live_engines() -> list[Engine]:
    """List the open engines of this process, for calls that name none."""
    return list(_engines)


def mark(engine: Engine) -> None:
    """Mark an engine's parameters; partitioned ones with the names above."""
    _engines.add(engine)
    reference = Mark(engine)
    partitioned = engine.placement.parameters.partitioned
    for parameter in engine.module.parameters():
        setattr(parameter, ENGINE, reference)
        if partitioned:
            mark_parameter(parameter, engine.topology.shards)
        else:
            _unmark(parameter)
    if not partitioned:
        return
    # A backward gets a whole parameter from autograd as another tensor, whose class has no marks.
    torch.Tensor.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    for module in engine.module.modules():
        _external(module)
    for flat in (flat for unit in engine.units for flat in unit.flats):
        flat.note_classes()
    for unit in engine.units:
        for flat in unit.travelling:
            if not flat.distributed:
                flat.blanks = [blank.new_empty(0) for blank in flat.blanks]
                if flat.weights is Weights.RELEASED:
                    flat.show_blanks()


def _unmark(parameter: nn.Parameter) -> None:
    if isinstance(parameter, Marks):
        change_class(parameter, lambda marked: marked.__mro__[2])
    for name in _OWN:
        parameter.__dict__.pop(name, None)


def unmark(engine: Engine) -> None:
    _engines.discard(engine)
    if not any(each.placement.parameters.partitioned for each in list(_engines)):
        with suppress(AttributeError):  # where ranks are threads, another has been here
            del torch.Tensor.ds_status  # type: ignore[attr-defined]
    for parameter in engine.module.parameters():
        parameter.__dict__.pop(ENGINE, None)
        _unmark(parameter)
    for module in engine.module.modules():
        module.__dict__.pop("ds_external_parameters", None)
        for handle in module.__dict__.pop("_external", ((), {}))[1].values():
            handle.remove()


def engine_of(parameter: torch.Tensor) -> Engine | None:
    reference: Mark | None = getattr(parameter, ENGINE, None)
    engine: Engine | None = reference() if reference is not None else None
    return engine


def is_zero_param(parameter: object) -> bool:
    """Check whether a parameter is partitioned."""
    return hasattr(parameter, "ds_id")


def show_shapes(model: nn.Module) -> None:
    """Show the shapes of released parameters, which the construction of an engine reads."""
    for parameter in model.parameters():
        if (shard := shard_of(parameter)) is not None:
            shard.show(empty=False)


class UnusedParameters(WherryError, AssertionError):
    """Trained parameters got no gradient, which the config forbids."""


def check_all_used(engine: Engine) -> None:
    """Raise on `ignore_unused_parameters: false`, which DeepSpeed obeys if whole weights' states are offloaded."""
    zero, placement = engine.settings.written.get("zero_optimization"), engine.placement
    offloads = placement.optimizer.tier is not Tier.DEVICE and not placement.parameters.partitioned
    if not offloads or not isinstance(zero, dict) or zero.get("ignore_unused_parameters") is not False:
        return
    gradients = engine.flat_gradients.all if engine.window.backwards else ()
    unused = [gradient.flat.layout.slots[index].name for gradient in gradients for index in gradient.absent]
    if unused:
        raise UnusedParameters(
            f"step {engine.global_steps + 1}: {', '.join(unused)} got no gradient in this step; let every trained "
            "parameter take part in the loss, or set zero_optimization.ignore_unused_parameters to true"
        )


# Parameters that a module uses and does not own; TRL reads `ds_external_parameters`.


def _external(module: nn.Module) -> tuple[dict[int, nn.Parameter], dict[int, Any]]:
    """Get the external parameters of a module, and the handles that end their registration."""
    if "_external" not in module.__dict__:
        params: dict[int, nn.Parameter] = {}
        module.__dict__.update(ds_external_parameters=params.items, _external=(params, {}))
    pair: tuple[dict[int, nn.Parameter], dict[int, Any]] = module.__dict__["_external"]
    return pair


def register_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Gather a weight for each forward of a module that uses it and does not hold it."""
    params, handles = _external(module)
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")
    if id(parameter) not in params:
        handles[id(parameter)] = access.register_external_parameter(module, parameter)
        params[id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    params, handles = _external(module)
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")
    if params.pop(id(parameter), None) is None:
        raise RuntimeError("Parameter is not a registered external parameter of module.")
    handles.pop(id(parameter)).remove()
