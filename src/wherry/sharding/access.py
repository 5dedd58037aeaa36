"""Reading and editing weights from outside a forward, whatever they rest as."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from wherry.errors import WherryError
from wherry.fake import address_of
from wherry.parallel.comm import Comm
from wherry.sharding.init import innermost
from wherry.sharding.parts import part_of, parts_gathered
from wherry.sharding.unit import Flat, Unit, Weights
from wherry.sharding.weights import Gatherer

HANDLE = "_wherry"


def _no_context(*_: Any) -> AbstractContextManager[None]:
    return nullcontext()


class Access:
    """Whole weights of one model, for reading and for editing."""

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        gatherer: Gatherer,
        comm: Comm,
        masters: Callable[[Flat], torch.Tensor | None],
    ) -> None:
        self.model = model
        self.units = units
        self.gatherer = gatherer
        self.comm = comm
        self.masters = masters
        self.unit_of = {flat: unit for unit in units for flat in unit.flats}
        self.place_of = {p: (flat, i) for flat in self.unit_of for i, p in enumerate(flat.parameters)}
        reference = weakref.ref(self)
        for parameter in self.place_of:
            setattr(parameter, HANDLE, reference)
        # torch marks a hook by setting an attribute on it, which a bound method does not take: hence the partials.
        self._handles = [
            model.register_state_dict_post_hook(partial(self._fill_state_dict)),
            model.register_load_state_dict_pre_hook(partial(self._before_load)),
            model.register_load_state_dict_post_hook(partial(self._after_load)),
        ]
        self._loading = ExitStack()

    def __deepcopy__(self, memo: dict[int, Any]) -> Access:
        """A copy of the model has weights of its own; what its hooks call does nothing."""
        copy = object.__new__(Access)
        copy.units = []
        copy.unit_of = {}
        copy.gathered = _no_context  # type: ignore[method-assign, assignment]
        copy._loading = ExitStack()
        return copy

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        for parameter in self.place_of:
            if hasattr(parameter, HANDLE):
                delattr(parameter, HANDLE)
        self.place_of.clear()
        self.unit_of.clear()

    @contextmanager
    def gathered(self, flats: Iterable[Flat], modifier_rank: int | None) -> Iterator[None]:
        """The flats whole; what was edited is written back to shards and masters at the end."""
        flats = list(flats)
        gathered_here = [flat for flat in flats if flat.weights is Weights.RELEASED]
        for flat in flats:
            self.gatherer.gather_flat(flat)
            flat.pins += 1
        before = {flat: flat.whole[slice(*flat.layout.shard_range(flat.rank))].clone() for flat in flats}
        try:
            yield
            for flat in flats:
                if modifier_rank is not None:
                    self.comm.broadcast(flat.whole, modifier_rank).wait()
                self._write_back(flat, before[flat])
        finally:
            for flat in flats:
                flat.pins -= 1
            for flat in gathered_here:
                self.gatherer.release_flat(flat)

    @torch.no_grad()
    def _write_back(self, flat: Flat, before: torch.Tensor) -> None:
        """What changed goes to the shard, and to the fp32 master; what did not keeps its master's precision."""
        now = flat.whole[slice(*flat.layout.shard_range(flat.rank))]
        if not flat.resident:
            flat.shard.copy_(now)
        master = self.masters(flat)
        if master is not None and address_of(master) != address_of(flat.shard):
            master.copy_(torch.where(now == before, master, now.to(master.dtype)))

    # The module's own state_dict and load_state_dict.

    def _fill_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Put whole weights, on the host, in the place of released ones; a unit at a time is gathered."""
        if not any(unit.travelling for unit in self.units):
            return
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(prefix + name)
        for unit in self.units:
            with self.gathered(unit.travelling, None):
                for flat in unit.travelling:
                    for parameter in flat.parameters:
                        whole = parameter.detach().to("cpu", copy=True)
                        state.update({name: whole for name in names[parameter] if name in state})

    def _before_load(self, module: nn.Module, *args: Any) -> None:
        self._loading.close()
        self._loading.enter_context(self.gathered(list(self.unit_of), None))

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        self._loading.close()


def refuse_taken(model: nn.Module) -> None:
    """A parameter has one engine at a time."""
    for name, parameter in model.named_parameters():
        reference = getattr(parameter, HANDLE, None)
        if reference is not None and reference() is not None:
            raise WherryError(
                f"{name}: this parameter belongs to another engine already; call that engine's close() first, or give "
                "wherry.initialize a copy of the model"
            )


@contextmanager
def gathered(
    params: nn.Parameter | torch.Tensor | Iterable[torch.Tensor] | nn.Module,
    modifier_rank: int | None = None,
) -> Iterator[None]:
    """Give parameters their full weights, for reading or for editing.

    Every rank must enter. With `modifier_rank`, that rank's edits become everybody's; without it, edits must be the
    same on every rank. Tensors that no engine holds are left as they are.

        with wherry.gathered(model.head.weight, modifier_rank=0):
            if rank == 0:
                model.head.weight.data.zero_()
    """
    if isinstance(params, nn.Module):
        params = list(params.parameters())
    tensors = [params] if isinstance(params, torch.Tensor) else list(params)
    chosen: dict[Access, dict[Flat, None]] = {}
    building = innermost()
    if building is not None:
        building.finish()
    parts = [part for tensor in dict.fromkeys(tensors) if (part := part_of(tensor)) is not None]
    for tensor in tensors:
        reference = getattr(tensor, HANDLE, None)
        access = reference() if reference is not None else None
        if access is not None and tensor in access.place_of:
            chosen.setdefault(access, {})[access.place_of[tensor][0]] = None  # type: ignore[index]
    for access in chosen:
        if modifier_rank is not None and not 0 <= modifier_rank < access.comm.size:
            raise WherryError(f"gathered: modifier_rank {modifier_rank} is not a rank of 0 to {access.comm.size - 1}")
    with ExitStack() as stack:
        for access, flats in chosen.items():
            # One order on every rank, whatever order the parameters were given in.
            ordered = sorted(flats, key=lambda flat: (access.unit_of[flat].index, flat.name))
            stack.enter_context(access.gathered(ordered, modifier_rank))
        stack.enter_context(parts_gathered(parts, modifier_rank))
        yield
