"""From a model's parameters to units: flats are laid out, filled, made equal on all ranks, and cut into shards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

import torch
from torch import nn

from wherry.errors import WherryError
from wherry.fake import is_fake
from wherry.parallel.comm import Comm, SoloComm
from wherry.parallel.partition import check_replicated, local, retype, slice_of
from wherry.placement import Placement
from wherry.sharding.fingerprint import same_everywhere
from wherry.sharding.given import forget, given, is_written, pieces, values_of, waiting_buffers
from wherry.sharding.grouping import UnitPlan
from wherry.sharding.layout import Slot, lay_out
from wherry.sharding.meta import Materialiser
from wherry.sharding.parts import own_parts, taken
from wherry.sharding.unit import Flat, Unit, Weights
from wherry.tiers.elastic import Heap
from wherry.tiers.homes import Home


class Original:
    """The values that a parameter was built with, while the parameter itself is given other memory."""

    def __init__(self, slot: Slot, parameter: nn.Parameter) -> None:
        held = local(parameter)
        source = given(parameter)
        self.nbytes = 0 if held.is_cuda or source is not None else held.nbytes
        self.value = taken(parameter) if source is None else partial(values_of, source, slot.shape, slot.part)


@dataclass
class LaidOut:
    """A flat that has no values yet, and memory for them, as precise as they are; None where a rank reads its own."""

    flat: Flat
    values: torch.Tensor | None
    # What is made in that memory.
    views: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)

    def open(self) -> None:
        """Parameters that have no memory are to be made here."""
        for slot, parameter in zip(self.flat.layout.slots, self.flat.parameters, strict=True):
            plain = type(parameter) is nn.Parameter and parameter.is_contiguous()
            if self.values is not None and plain and parameter.is_meta and parameter.dtype == self.values.dtype:
                self.views[parameter] = self.values[slot.start : slot.stop].view(slot.shape)


class Builder:
    """Turns unit plans into units, a unit at a time, so that one unit above the model is ever in memory."""

    def __init__(
        self,
        placement: Placement,
        comm: Comm,
        device: torch.device,
        *,
        working_dtype: torch.dtype | None,
        group_of: Mapping[nn.Parameter, int],
        persistence_threshold: int = 0,
        persistence_limit: int | None = None,
        tensor: Comm | None = None,
        shards: Comm | None = None,
        home_of: Callable[[str, int], Home | None] = lambda name, nbytes: None,
        adopt: Callable[[Flat, torch.Tensor | None], None] = lambda flat, master: None,
    ) -> None:
        self.placement = placement
        self.comm = comm
        # The ranks that share a flat out: all of `comm`, or groups of them that hold a copy each.
        self.shards = shards or comm
        # The ranks among which parameters may be cut, beside the data axis.
        self.tensor = tensor or SoloComm()
        self.device = device
        # Where the shard of a partitioned flat rests, by its name and size; None for the device.
        self.home_of = home_of
        self.working_dtype = working_dtype
        self.group_of = group_of
        # Flats up to the threshold stay whole, as long as all of them together keep within the limit.
        self.persistence_threshold = persistence_threshold
        self.persistence_left = float("inf") if persistence_limit is None else persistence_limit
        # Called with every flat that is trained, and with the fp32 shard it was made from, if that is more precise.
        self.adopt = adopt
        self._heap = Heap()
        # Whether what ranks have built may be the same on all of them.
        self._compare = comm.size > 1

    def build(self, plans: Sequence[UnitPlan], model: nn.Module) -> list[Unit]:
        check_same_model([item for plan in plans for item in plan.parameters], self.comm, model)
        own_parts(parameter for plan in plans for _, parameter in plan.parameters)
        units = []
        materialiser = Materialiser(model, self.device)
        for index, plan in enumerate(plans):
            flats = self._flats(plan, materialiser)
            units.append(Unit(index, plan.name, plan.modules, flats, root=plan.root))
        materialiser.finish()
        return units

    def _flats(self, plan: UnitPlan, materialiser: Materialiser) -> list[Flat]:
        kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in plan.parameters:
            if parameter.is_complex():
                raise WherryError(
                    f"{name}: complex parameters are not supported, got {parameter.dtype}; "
                    "hold real and imaginary parts in a real parameter and use torch.view_as_complex"
                )
            if parameter.is_floating_point():
                kinds.setdefault((self._dtype(parameter), parameter.requires_grad), []).append((name, parameter))
        parameters = [parameter for _, parameter in plan.parameters]
        materialiser.leave_to_files(parameters)
        # One after the other: no more is held twice than one has.
        laid_out: Iterable[LaidOut] = (
            self._lay_out(plan.name + _suffix(dtype, trainable, kinds), dtype, trainable, members)
            for (dtype, trainable), members in kinds.items()
        )
        if any(parameter.is_meta for parameter in parameters):
            laid_out = list(laid_out)
            for one in laid_out:
                one.open()
            memory = {parameter: view for one in laid_out for parameter, view in one.views.items()}
            materialiser.fill(parameters, None if plan.root else plan.modules[0], memory)
        flats = [self._filled(one) for one in laid_out]
        for parameter in parameters:
            if not parameter.is_floating_point():
                parameter.data = parameter.data.to(self.device)  # integer weights are never trained: left as they are
        return flats

    def _dtype(self, parameter: nn.Parameter) -> torch.dtype:
        return self.working_dtype or parameter.dtype

    def _lay_out(
        self, name: str, dtype: torch.dtype, trainable: bool, members: list[tuple[str, nn.Parameter]]
    ) -> LaidOut:
        # A parameter that the optimizer was not given still gets gradients; it lies behind the groups.
        ungrouped = max(self.group_of.values(), default=-1) + 1
        parts = {n: part for n, p in members if (part := slice_of(n, p, self.tensor)) is not None}
        members = sorted(members, key=lambda item: (self.group_of.get(item[1], ungrouped), item[0] not in parts))
        cut = self.placement.parameters.partitioned or (trainable and self.placement.optimizer.partitioned)
        ranks = self.shards.size if cut else 1
        layout = lay_out([(n, local(p).shape, self.group_of.get(p, ungrouped)) for n, p in members], ranks, parts=parts)
        resident = not self.placement.parameters.partitioned
        if not resident and layout.numel <= min(self.persistence_threshold, self.persistence_left):
            resident = True
            self.persistence_left -= layout.numel
        home = None if resident else self.home_of(name, layout.shard_numel * dtype.itemsize)
        # A rank by itself has nothing to gather, unless from another tier.
        resident = resident or (ranks == 1 and home is None)
        parameters = [parameter for _, parameter in members]
        flat = Flat(
            name,
            layout,
            parameters,
            dtype=dtype,
            rank=self.shards.rank if ranks > 1 else 0,
            device=self.device,
            resident=resident,
            home=home,
        )
        if all(given(parameter) is not None and not parameter.is_meta for parameter in parameters):
            return LaidOut(flat, None)
        # Files may be more precise than the model that they are read for.
        precise = any(p.dtype.itemsize > dtype.itemsize or given(p) is not None for p in parameters)
        finer = _needs_master(flat) and precise
        values = torch.zeros(layout.numel, dtype=torch.float32, device=self.device) if finer else flat.whole
        return LaidOut(flat, values)

    def _filled(self, laid_out: LaidOut) -> Flat:
        """Give a flat rank 0's values, keep the fp32 master of the owned part, and let go of the rest."""
        flat, values = laid_out.flat, laid_out.values
        if values is not None:
            self._take(laid_out, values)
        else:
            self._let_go(flat)
        if flat.home is not None:
            flat.home.blank()
        if values is None:
            master = self._read(flat)
        else:
            start, stop = flat.layout.shard_range(flat.rank)
            if not flat.resident:
                flat.shard_memory.copy_(flat.whole[start:stop])
            master = values[start:stop]
        if flat.home is not None:
            flat.home.store().wait()
        if flat.trainable:
            self.adopt(flat, master.to(torch.float32) if _needs_master(flat) else None)
        if flat.home is not None:
            flat.home.leave()
        if flat.resident:
            flat.show_whole()
            return flat
        flat.show_blanks()
        flat.shrink()
        flat.weights = Weights.RELEASED
        return flat

    def _take(self, laid_out: LaidOut, values: torch.Tensor) -> None:
        """The values of rank 0's parameters, which let go of their memory."""
        flat, made = laid_out.flat, laid_out.views
        slots = list(zip(flat.layout.slots, flat.parameters, strict=True))
        # What is made in its place and has values in a file was only drawn for the others.
        originals = [(slot, Original(slot, p)) for slot, p in slots if p not in made or given(p) is not None]
        self._let_go(flat)
        for slot, original in originals:
            values[slot.start : slot.stop].view(slot.shape).copy_(original.value())
        for parameter in flat.parameters:
            forget(parameter)
        freed = sum(original.nbytes for _, original in originals)
        originals.clear()
        made.clear()
        self._heap.freed(freed)
        self._agree(values)
        alike = [(s.name, values[s.start : s.stop]) for s in flat.layout.slots if s.part is None]
        check_replicated(alike, self.tensor)
        if values is not flat.whole:
            flat.whole.copy_(values)

    def _agree(self, values: torch.Tensor) -> None:
        """Rank 0's values on every rank. They are sent only if ranks have others, and from then on without asking."""
        if self._compare and not is_fake(values) and same_everywhere(values, self.comm):
            return
        self._compare = False
        self.comm.broadcast(values).wait()

    def _let_go(self, flat: Flat) -> None:
        for parameter in flat.parameters:
            retype(parameter, flat.dtype, self.device)
            parameter.grad = None

    def _read(self, flat: Flat) -> torch.Tensor:
        """This rank's shard of weights that files have, as precise as its master is to be."""
        shard = flat.shard_memory
        values = torch.zeros(shard.numel(), dtype=torch.float32, device=self.device) if _needs_master(flat) else shard
        sources = [(index, source) for index, p in enumerate(flat.parameters) if (source := given(p)) is not None]
        assert len(sources) == len(flat.parameters), flat
        for start, piece in pieces(flat.layout, flat.rank, sources):
            values[start : start + piece.numel()].copy_(piece)
        if values is not shard:
            shard.copy_(values)
        if flat.resident and flat.layout.ranks > 1:
            self.shards.all_gather(flat.whole, shard).wait()
        for parameter in flat.parameters:
            forget(parameter)
        return values


def _needs_master(flat: Flat) -> bool:
    return flat.trainable and flat.dtype.itemsize < torch.float32.itemsize


def _suffix(dtype: torch.dtype, trainable: bool, kinds: Collection[object]) -> str:
    """Of a flat's name, where the unit has several."""
    return "" if len(kinds) == 1 else f" ({str(dtype).removeprefix('torch.')}{'' if trainable else ', frozen'})"


def check_same_model(parameters: Sequence[tuple[str, nn.Parameter]], comm: Comm, model: nn.Module) -> None:
    """Ranks with different models would hang or sum unlike gradients; say which parameter differs."""
    if comm.size == 1:
        return
    mine = [
        f"{name} {tuple(local(p).shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
        f"{'' if given(p) is None else ', to be read from a file'}{', written to since' if is_written(p) else ''}"
        for name, p in parameters
    ]
    # Whether a unit is drawn or read depends on its modules' buffers too.
    mine += [
        f"buffer {name}, {'to be drawn' if given(buffer) is None else 'to be read from a file'}"
        for name, buffer in waiting_buffers(model)
    ]
    digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
    if len(set(comm.gather_objects(digest))) == 1:
        return
    everybody = comm.gather_objects(mine)
    first = everybody[0]
    for rank, theirs in enumerate(everybody[1:], 1):
        for here, there in zip_longest(first, theirs, fillvalue="nothing"):
            if here != there:
                raise WherryError(
                    f"the ranks hold different models: [{here}] on rank 0 and [{there}] on "
                    f"rank {rank}; build the same model on every rank, whatever its weights (rank 0's are used)"
                )
    raise AssertionError("digests differ and parameters do not")


def move_buffers(model: nn.Module, device: torch.device, comm: Comm, dtype: torch.dtype | None) -> None:
    """Buffers go to the device with rank 0's values: in their own dtype, or floating-point ones in a given one."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device, dtype if buffer.is_floating_point() else None)
    if comm.size > 1:
        for buffer in model.buffers():
            if buffer.layout is not torch.strided or not buffer.numel() or 0 in buffer.stride():
                continue  # sparse and expanded buffers stay as each rank's model has made them
            contiguous = buffer.contiguous()
            # As bytes: a backend need not know a buffer's dtype to copy it.
            comm.broadcast(contiguous.view(-1).view(torch.uint8)).wait()
            if contiguous is not buffer:
                buffer.copy_(contiguous)
