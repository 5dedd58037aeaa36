"""Parameters as scripts meet them: with `ds_id`, `ds_shape`, `ds_status`, `ds_tensor` and the like.

A partitioned one is of a class that has these names beside its own, from the moment when `zero.Init` or an engine
takes it until the engine is closed. While it is released it is seen without elements.
"""

from __future__ import annotations

import enum
import functools
import itertools
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
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

ENGINE = "_wherry_engine"
_HELD = "_wherry_held"

partitioned_param_data_shape = [0]
"""The shape of a released parameter."""


class ZeroParamStatus(enum.Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(enum.Enum):
    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class PartitionedParamStatus(enum.Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_STATUS = {
    Weights.RELEASED: ZeroParamStatus.NOT_AVAILABLE,
    Weights.GATHERING: ZeroParamStatus.INFLIGHT,
    Weights.WHOLE: ZeroParamStatus.AVAILABLE,
}
_numbers = itertools.count()


class Marks:
    """The names of a partitioned parameter; all of them answer as of the moment when they are asked."""

    plain_parameter = True
    __dict__: dict[str, Any]
    ds_param_type = ZeroParamType.PARTITIONED

    @property
    def ds_shape(self) -> torch.Size:
        if (shard := shard_of(_tensor(self))) is not None:
            return shard.shape
        place = _place(self)
        return torch.Size(place[0].layout.slots[place[1]].shape) if place is not None else _tensor(self).shape

    @property
    def ds_numel(self) -> int:
        return self.ds_shape.numel()

    @property
    def ds_status(self) -> ZeroParamStatus:
        if (shard := shard_of(_tensor(self))) is not None:
            return ZeroParamStatus.AVAILABLE if shard.whole else ZeroParamStatus.NOT_AVAILABLE
        place = _place(self)
        return _STATUS[place[0].weights] if place is not None else ZeroParamStatus.AVAILABLE

    @property
    def ds_persist(self) -> bool:
        """Whether it stays whole on every rank."""
        place = _place(self)
        return place is not None and place[0].resident

    @property
    def ds_tensor(self) -> torch.Tensor:
        """This rank's part of the values. An engine cuts blocks, not parameters: a part may be of any size.

        It is the memory where they rest, or a copy if that is not the device's; without elements if it is the disk's.
        """
        part = self._part()
        part.status = PartitionedParamStatus.AVAILABLE if part.numel() else PartitionedParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]
        part.ds_numel = self.partition_numel()  # type: ignore[attr-defined]
        part.final_location = None  # type: ignore[attr-defined]
        return part

    def _part(self) -> torch.Tensor:
        if (shard := shard_of(_tensor(self))) is not None:
            if not shard.whole:
                return shard.shard.detach()
        elif (place := _place(self)) is not None:
            return _part_of_flat(*place)
        # Whole, and not shared out yet: what this rank would keep of it.
        rank, size = comm_of(self).rank, self.partition_numel()
        with torch._C.DisableTorchFunction():
            mine = _tensor(self).detach().flatten()[rank * size : (rank + 1) * size]
            return nn.functional.pad(mine, (0, size - mine.numel()))

    @property
    def ds_process_group(self) -> Any:
        group = getattr(comm_of(self), "group", None)
        return group if group is not None or not dist.is_initialized() else dist.group.WORLD

    def partition_numel(self) -> int:
        """The elements of one rank's share, rounded up."""
        return -(-self.ds_numel // comm_of(self).size)

    def ds_summary(self, use_debug_name: bool = False) -> dict[str, Any]:
        return {
            "id": self.__dict__["ds_id"],
            "status": self.ds_status.name,
            "numel": _tensor(self).numel(),
            "ds_numel": self.ds_numel,
            "shape": tuple(_tensor(self).shape),
            "ds_shape": tuple(self.ds_shape),
            "requires_grad": _tensor(self).requires_grad,
            "persist": self.ds_persist,
            "active_sub_modules": self.__dict__["ds_active_sub_modules"],
            "ds_tensor.shape": self.ds_tensor.shape,
        }

    def all_gather(self, param_list: Any = None, async_op: bool = False, hierarchy: int = 0) -> Any:
        """Whole from here until `partition`."""
        params = [self] if param_list is None else list(param_list)
        for parameter in params:
            if _HELD not in parameter.__dict__:
                held = parameter.__dict__[_HELD] = ExitStack()
                held.enter_context(gathered([_tensor(parameter)]))
        return Gathered(params) if async_op else None

    def all_gather_coalesced(self, params: Iterable[Any], *_: Any, **__: Any) -> Gathered:
        self.all_gather(params)
        return Gathered(())

    def partition(
        self, param_list: Any = None, hierarchy: int = 0, has_been_updated: bool = False, free_data: bool = True
    ) -> None:
        for parameter in [self] if param_list is None else param_list:
            held = parameter.__dict__.pop(_HELD, None)
            if held is not None:
                held.close()

    def convert_to_zero_parameters(self, param_list: Iterable[nn.Parameter]) -> None:
        """Parameters are partitioned as this one is."""
        from wherry.compat.deepspeed.zero import Init

        shard = shard_of(_tensor(self))
        holder = nn.Module()
        for number, parameter in enumerate(param_list):
            holder.register_parameter(str(number), parameter)
        Init(
            holder,
            mpu=DataGroup(comm_of(self)),
            dtype=shard.sharing.dtype if shard is not None else _tensor(self).dtype,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """An ordinary parameter."""
        parameter = _tensor(self)
        memo[id(self)] = copy = nn.Parameter(parameter.data.clone(), parameter.requires_grad)
        return copy

    def __repr__(self) -> str:
        return repr(nn.Parameter(_tensor(self).data, _tensor(self).requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        parameter = _tensor(self)
        return nn.Parameter(parameter.data, parameter.requires_grad).__reduce_ex__(protocol)


class Gathered:
    """What is waited for until parameters are whole: they are."""

    def __init__(self, params: Sequence[Any]) -> None:
        self.params = params

    def wait(self, *_: Any, **__: Any) -> None:
        return None


class MultipleAllGatherHandles:
    """Several that are waited for as one."""

    def __init__(self, handles: Iterable[Any]) -> None:
        self.handles = list(handles)

    def wait(self, handle_dependency: bool = True) -> None:
        for handle in self.handles:
            handle.wait(handle_dependency=handle_dependency)


class DataGroup:
    """A model-parallel unit of one axis, whose group this is."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def get_data_parallel_group(self) -> Any:
        return self._group


def _tensor(parameter: Marks) -> nn.Parameter:
    assert isinstance(parameter, nn.Parameter)
    return parameter


def _place(parameter: Marks) -> tuple[Flat, int] | None:
    """The flat of the engine that holds it, and where in that it lies."""
    engine = engine_of(_tensor(parameter))
    return engine.access.place_of.get(_tensor(parameter)) if engine is not None else None


def comm_of(parameter: Any) -> Comm:
    """Among which ranks a partitioned parameter is shared out."""
    if (shard := shard_of(parameter)) is not None:
        return shard.comm
    engine = engine_of(parameter)
    if engine is not None:
        return engine.topology.shards
    comm = parameter.__dict__["_wherry_comm"]
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
    """From now on the parameter answers to the names of a partitioned one; among the ranks of `comm`, unless it says.

    A DTensor stays what it is: it is partitioned along another axis.
    """
    if isinstance(parameter, Marks) or is_dtensor(parameter):
        return
    parameter.__dict__.update(
        ds_id=next(_numbers), ds_active_sub_modules=set(), is_external_param=False, _wherry_comm=comm
    )
    change_class(parameter, _marked)


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def live_engines() -> list[Engine]:
    """The engines of this process that have not been closed, for calls that name none."""
    return list(_engines)


def mark(engine: Engine) -> None:
    """Put the marks on an engine's parameters; those of sharding only where weights are partitioned."""
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
    # What a backward reads of a parameter that autograd has saved is whole, and a tensor of its own without marks.
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
    for name in ("ds_id", "ds_active_sub_modules", "is_external_param", "_wherry_comm", _HELD):
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
        for handle in module.__dict__.get("_external_handles", {}).values():
            handle.remove()
        for name in ("ds_external_parameters", "_external_params", "_external_handles"):
            module.__dict__.pop(name, None)


def engine_of(parameter: torch.Tensor) -> Engine | None:
    reference: Mark | None = getattr(parameter, ENGINE, None)
    engine: Engine | None = reference() if reference is not None else None
    return engine


def is_zero_param(parameter: object) -> bool:
    """Whether a parameter is partitioned."""
    return hasattr(parameter, "ds_id")


def show_shapes(model: nn.Module) -> None:
    """Released parameters have their shapes again, for who builds an engine of them."""
    for parameter in model.parameters():
        if (shard := shard_of(parameter)) is not None:
            shard.show(empty=False)


class UnusedParameters(WherryError, AssertionError):
    """Trained parameters got no gradient, which the config does not allow."""


def check_all_used(engine: Engine) -> None:
    """`ignore_unused_parameters: false`, which DeepSpeed heeds where whole weights' optimizer states are offloaded."""
    zero, placement = engine._config.written.get("zero_optimization"), engine.placement
    offloads = placement.optimizer.tier is not Tier.DEVICE and not placement.parameters.partitioned
    if not offloads or not isinstance(zero, dict) or zero.get("ignore_unused_parameters") is not False:
        return
    gradients = engine._gradients.all if engine._window.backwards else ()
    unused = [gradient.flat.layout.slots[index].name for gradient in gradients for index in gradient.absent]
    if unused:
        raise UnusedParameters(
            f"step {engine.global_steps + 1}: {', '.join(unused)} got no gradient in this step; let every trained "
            "parameter take part in the loss, or set zero_optimization.ignore_unused_parameters to true"
        )


# Parameters that a module uses and does not own. The lists are for scripts.


def _external(module: nn.Module) -> dict[int, nn.Parameter]:
    if "_external_params" not in module.__dict__:
        found: dict[int, nn.Parameter] = {}
        module.__dict__["_external_params"] = found
        module.__dict__["ds_external_parameters"] = found.items
    external: dict[int, nn.Parameter] = module.__dict__["_external_params"]
    return external


def register_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Gather a weight for each forward of a module that uses it and does not hold it."""
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")
    if id(parameter) not in _external(module):
        handles = module.__dict__.setdefault("_external_handles", {})
        handles[id(parameter)] = access.register_external_parameter(module, parameter)
    _external(module)[id(parameter)] = parameter
    parameter.__dict__["is_external_param"] = True


def unregister_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")
    if module.__dict__.get("_external_params", {}).pop(id(parameter), None) is None:
        raise RuntimeError("Parameter is not a registered external parameter of module.")
    module.__dict__["_external_handles"].pop(id(parameter)).remove()
