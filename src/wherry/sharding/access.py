"""Reading and editing weights from outside a forward, whatever they rest as."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from wherry.errors import WherryError
from wherry.fake import address_of
from wherry.parallel.comm import Comm
from wherry.parallel.partition import is_dtensor, local
from wherry.sharding.init import entered
from wherry.sharding.layout import SegmentSpan, tile_places
from wherry.sharding.param_shard import own_values, shard_of, shards_gathered
from wherry.sharding.unit import Flat, Unit, Weights
from wherry.sharding.watched_params import HANDLE, Hook, Mark, nothing
from wherry.sharding.weights import Gatherer


class OptimizerState(Protocol):
    """What the optimizer keeps for a flat."""

    segments: list[SegmentSpan]

    def opened(self, *, write: bool = False) -> AbstractContextManager[list[dict[str, Any]]]: ...


class Access:
    """Whole weights of one model, for reading and for editing."""

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        gatherer: Gatherer,
        comm: Comm,
        state_of: Mapping[Flat, OptimizerState],
        settle: Callable[[], None],
    ) -> None:
        self.model = model
        self.units = units
        self.gatherer = gatherer
        self.comm = comm
        self.state_of = state_of
        self.settle = settle
        self.take_stock()
        # Of every module, for `engine.module.encoder.state_dict()`. torch calls the hooks of the modules below as well.
        self._handles = []
        for module in model.modules():
            self._handles += [
                module.register_state_dict_pre_hook(Hook(self._before_state_dict)),
                module.register_state_dict_post_hook(Hook(self._fill_state_dict)),
                module.register_load_state_dict_pre_hook(Hook(self._before_load)),
                module.register_load_state_dict_post_hook(Hook(self._after_load)),
            ]
        self._reading, self._writing = _Outermost(), _Outermost()
        self._loading = ExitStack()
        self.closed = False

    def take_stock(self) -> None:
        """Note the flats that units have now."""
        self.unit_of = {flat: unit for unit in self.units for flat in unit.flats}
        self.place_of = {p: (flat, i) for flat in self.unit_of for i, p in enumerate(flat.parameters)}
        for parameter in self.place_of:
            setattr(parameter, HANDLE, Mark(self))

    def close(self) -> None:
        """Whoever is inside `gathered` has whole weights no longer; what was edited there is not kept."""
        self.closed = True
        for flat in self.unit_of:
            flat.unpin()
            self.gatherer.release_flat(flat)
        for handle in self._handles:
            handle.remove()
        for parameter in self.place_of:
            if hasattr(parameter, HANDLE):
                delattr(parameter, HANDLE)
        self.place_of.clear()
        self.unit_of.clear()

    @contextmanager
    def gathered(self, flats: Iterable[Flat], modifier_rank: int | None, what: str = "gathered()") -> Iterator[None]:
        """The flats whole; what was edited is written back to shards and masters at the end."""
        flats = list(flats)
        if modifier_rank is None:
            self.meet(what, flats)
        elif flats:
            self.comm.meet(what)  # what was edited travels, of weights that every rank holds as well
        self.settle()
        with self._gathered(flats, modifier_rank):
            yield

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """Return a parameter's name in the model; None after `close`."""
        place = self.place_of.get(parameter)
        return None if place is None else place[0].layout.slots[place[1]].name

    def keep_whole(self, parameter: nn.Parameter) -> None:
        """Gather a parameter's unit here, until the end of the backward."""
        unit = self.unit_of[self.place_of[parameter][0]]
        unit.share()
        self.gatherer.gather(unit)

    @contextmanager
    def held_whole(self, what: str) -> Iterator[None]:
        """All weights whole through whatever runs inside, for reading; edits are lost."""
        flats = [flat for unit in self.units for flat in unit.travelling]
        self.meet(what, flats)
        self.settle()
        with ExitStack() as stack:
            for flat in flats:
                stack.enter_context(self._whole(flat, releases=True))
            yield

    def on_host(self, what: str) -> list[Callable[[], None]]:
        """Copies of all weights that travel, whole, on every rank's host; a unit at a time is gathered.

        Each is what gives a parameter its copy.
        """
        whole: list[Callable[[], None]] = []
        for unit in self.units:
            with self.gathered(unit.travelling, None, what):
                for flat in unit.travelling:
                    for parameter, places in zip(flat.parameters, flat.places, strict=True):
                        copied = (parameter if is_dtensor(parameter) else local(parameter)).detach()
                        copied = copied.to("cpu", copy=True)
                        places = [(parameter, "data")] if is_dtensor(parameter) else places
                        whole += [partial(setattr, *place, copied) for place in places]
        return whole

    def meet(self, what: str, flats: Iterable[Flat]) -> None:
        """Before flats are gathered: all ranks have come here to do so, or whoever is here alone is told."""
        if any(flat.weights is Weights.RELEASED for flat in flats):
            self.gatherer.comm.meet(what)

    @contextmanager
    def _gathered(self, flats: Sequence[Flat], modifier_rank: int | None) -> Iterator[None]:
        with ExitStack() as stack:
            for flat in flats:
                stack.enter_context(self._whole(flat))
            before = {flat: flat.whole[flat.own].clone() for flat in flats}
            yield
            if self.closed:
                return
            for flat in flats:
                self._take(flat)
                if modifier_rank is not None:
                    self.comm.broadcast(flat.whole, modifier_rank).wait()
                self._write_back(flat, before[flat])

    @contextmanager
    def _whole(self, flat: Flat, *, releases: bool = False) -> Iterator[None]:
        """One flat kept whole; released by the last reader if it was before the first, or if that is asked for."""
        releases = releases or flat.weights is Weights.RELEASED or flat.lent
        self.gatherer.gather_for_readers(flat)
        try:
            with flat.pinned():
                yield
        finally:
            if releases and not self.closed:
                self.gatherer.release_flat(flat)

    @torch.no_grad()
    def _take(self, flat: Flat) -> None:
        """What was assigned to a parameter's data is an edit like any other."""
        for parameter, view in zip(flat.parameters, flat.views, strict=True):
            if address_of(now := local(parameter)) != address_of(view):
                view.copy_(now)
        flat.show_whole()

    @torch.no_grad()
    def _write_back(self, flat: Flat, before: torch.Tensor) -> None:
        """What changed goes to the shard, and to the fp32 master; what did not keeps its master's precision."""
        now = flat.whole[flat.own]
        flat.forget_secondary()
        if torch.equal(now.view(torch.uint8), before.view(torch.uint8)):
            return
        if not flat.resident:
            with flat.opened(write=True) as shard:
                shard.copy_(now)
        state = self.state_of.get(flat)
        if state is None:
            return
        with state.opened(write=True) as segments:
            for segment, span in zip(segments, state.segments, strict=True):
                master, part = segment["master"], slice(span.start, span.stop)
                assert isinstance(master, torch.Tensor)
                changed = (now[part] != before[part]).to(master.device)
                master.copy_(torch.where(changed, now[part].to(master), master))

    # The module's own state_dict and load_state_dict.

    def _before_state_dict(self, module: nn.Module, *_: Any) -> None:
        if self._reading.enter(module):
            inside = set(module.parameters())
            self.meet("state_dict()", (flat for flat in self.unit_of if not inside.isdisjoint(flat.parameters)))
            self.settle()

    def _fill_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Put whole weights, on the host, in the place of released ones; a unit at a time is gathered."""
        if not self._reading.leave(module):
            return
        names: dict[nn.Parameter, list[str]] = {}
        tiles = {prefix + name: place for name, place in tile_places(module).items()}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(prefix + name)
        for unit in self.units:
            wanted = [flat for flat in unit.travelling if any(p in names for p in flat.parameters)]
            with self._gathered(wanted, None):
                for flat in wanted:
                    for parameter in flat.parameters:
                        if parameter not in names:
                            continue
                        whole = parameter.detach().to("cpu", copy=True)
                        for name in names[parameter]:
                            if name in state:
                                state[name] = whole
                            if name in tiles and prefix + tiles[name].whole in state:
                                tiles[name].of(state[prefix + tiles[name].whole]).copy_(whole)

    def _before_load(self, module: nn.Module, *_: Any) -> None:
        if self._writing.enter(module):
            self._loading.close()
            inside = set(module.parameters())
            flats = [flat for flat in self.unit_of if not inside.isdisjoint(flat.parameters)]
            self.meet("load_state_dict()", flats)
            self.settle()
            self._loading.enter_context(self._gathered(flats, None))

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        if self._writing.leave(module):
            self._loading.close()


class _Outermost:
    """Which module a call began with that torch then makes for every module below it as well."""

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._inside: set[nn.Module] = set()

    def enter(self, module: nn.Module) -> bool:
        # A call that raised has left its module here: it is not below itself, and another call does not begin below it.
        if module is not self._module and module in self._inside:
            return False
        self._module, self._inside = module, set(module.modules())
        return True

    def leave(self, module: nn.Module) -> bool:
        if module is not self._module:
            return False
        self._module, self._inside = None, set()
        return True


@contextmanager
def gathered(
    params: nn.Parameter | torch.Tensor | Iterable[torch.Tensor] | nn.Module,
    modifier_rank: int | None = None,
) -> Iterator[None]:
    """Give parameters their full weights, for reading or for editing.

    Every rank must enter. With `modifier_rank`, that rank's edits become everybody's; without it, edits must be the
    same on every rank. Tensors that no engine holds are left as they are. What is kept of partitioned weights, by
    `detach()` or `numpy()`, takes memory until it goes, and has their values of then.

        with wherry.gathered(model.head.weight, modifier_rank=0):
            if rank == 0:
                model.head.weight.data.zero_()
    """
    if isinstance(params, nn.Module):
        params = list(params.parameters())
    tensors = [params] if isinstance(params, torch.Tensor) else list(params)
    chosen: dict[Access, dict[Flat, None]] = {}
    for building in entered():
        building.finish()
    own_values(tensors)
    shards = [shard for tensor in dict.fromkeys(tensors) if (shard := shard_of(tensor)) is not None]
    for tensor in tensors:
        reference = getattr(tensor, HANDLE, None)
        access = reference() if reference is not None else None
        if access is not None and tensor in access.place_of:
            chosen.setdefault(access, {})[access.place_of[tensor][0]] = None
    for size in {comm.size for comm in (*(access.comm for access in chosen), *(shard.comm for shard in shards))}:
        if modifier_rank is not None and not 0 <= modifier_rank < size:
            raise WherryError(f"gathered: modifier_rank {modifier_rank} is not a rank of 0 to {size - 1}")
    with ExitStack() as stack:
        for access, flats in chosen.items():
            # One order on every rank, whatever order the parameters were given in.
            ordered = sorted(flats, key=lambda flat: (access.unit_of[flat].index, flat.name))
            stack.enter_context(access.gathered(ordered, modifier_rank))
        for comm in dict.fromkeys(shard.comm for shard in shards if modifier_rank is not None or not shard.whole):
            comm.meet("gathered()")
        stack.enter_context(shards_gathered(shards, modifier_rank))
        if chosen and torch.is_grad_enabled():
            # A backward after the end reads what autograd has saved. It saves a parameter as an object, which is
            # released by then, and of a detached one the memory, which stays.
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _same))
        yield


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> RemovableHandle:
    """Gather `parameter` before each forward of `module`, and keep it whole to the end of the backward.

    For a weight that the module, or a loss after it, uses and the module does not hold. A weight that a forward reads
    from another module, as `self.embed.weight`, is gathered without it. Every rank must call it, before or after
    `wherry.initialize`; the handle's `remove()` ends it.

        wherry.register_external_parameter(model, model.embed.weight)
        loss = loss_of(engine(inputs) @ model.embed.weight.t(), targets)
    """
    if not isinstance(parameter, nn.Parameter):
        raise WherryError(
            f"register_external_parameter: expected a torch.nn.Parameter, got {type(parameter).__name__}; give it a "
            "weight of the model, as in register_external_parameter(module, model.embed.weight)"
        )
    return module.register_forward_pre_hook(_GatherExternal(parameter))


class _GatherExternal(Hook):
    """The hook of a module that uses a parameter of another. A copy of the module is one that uses the copy's."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__(self._gather)
        self.parameter = parameter

    def _gather(self, module: nn.Module, args: Any) -> None:
        access = getattr(self.parameter, HANDLE, nothing)()
        if access is not None:
            access.keep_whole(self.parameter)

    def __reduce__(self) -> Any:
        return _GatherExternal, (self.parameter,)
