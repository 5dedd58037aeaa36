"""From a model's parameters to units: flats are laid out, filled, made equal on all ranks, and cut into shards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from wherry.errors import WherryError
from wherry.parallel.comm import Comm, SoloComm
from wherry.parallel.partition import check_replicated, local, retype, slice_of
from wherry.placement import Placement
from wherry.sharding.grouping import UnitPlan
from wherry.sharding.layout import lay_out
from wherry.sharding.meta import Materialiser
from wherry.sharding.parts import own_parts, taken
from wherry.sharding.unit import Flat, Unit, Weights
from wherry.tiers.elastic import Frames, Heap
from wherry.tiers.homes import Home


class Original:
    """The values that a parameter was built with, while the parameter itself is given other memory."""

    def __init__(self, parameter: nn.Parameter) -> None:
        held = local(parameter)
        self.dtype = held.dtype
        self.nbytes = 0 if held.is_cuda else held.nbytes
        self.value = taken(parameter)


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
        # What units have gathered into is handed on among them.
        self._frames = Frames()
        self._heap = Heap()

    def build(self, plans: Sequence[UnitPlan], model: nn.Module) -> list[Unit]:
        check_same_model([item for plan in plans for item in plan.parameters], self.comm)
        own_parts(parameter for plan in plans for _, parameter in plan.parameters)
        units = []
        materialiser = Materialiser(model, self.device)
        for index, plan in enumerate(plans):
            materialiser.fill([parameter for _, parameter in plan.parameters], None if plan.root else plan.modules[0])
            flats = self._flats(plan)
            units.append(Unit(index, plan.name, plan.modules, flats, root=plan.root))
        materialiser.finish()
        return units

    def _flats(self, plan: UnitPlan) -> list[Flat]:
        kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in plan.parameters:
            if parameter.is_complex():
                raise WherryError(
                    f"{name}: complex parameters are not supported, got {parameter.dtype}; "
                    "hold real and imaginary parts in a real parameter and use torch.view_as_complex"
                )
            if not parameter.is_floating_point():
                parameter.data = parameter.data.to(self.device)  # integer weights are never trained: left as they are
                continue
            kinds.setdefault((self._dtype(parameter), parameter.requires_grad), []).append((name, parameter))
        flats = []
        for (dtype, trainable), members in kinds.items():
            suffix = (
                "" if len(kinds) == 1 else f" ({str(dtype).removeprefix('torch.')}{'' if trainable else ', frozen'})"
            )
            flats.append(self._flat(plan.name + suffix, dtype, trainable, members))
        return flats

    def _dtype(self, parameter: nn.Parameter) -> torch.dtype:
        return self.working_dtype or parameter.dtype

    def _flat(self, name: str, dtype: torch.dtype, trainable: bool, members: list[tuple[str, nn.Parameter]]) -> Flat:
        # A parameter that the optimizer was not given still gets gradients; it lies behind the groups.
        ungrouped = max(self.group_of.values(), default=-1) + 1
        parts = {n: part for n, p in members if (part := slice_of(n, p, self.tensor)) is not None}
        members = sorted(members, key=lambda item: (self.group_of.get(item[1], ungrouped), item[0] not in parts))
        cut = self.placement.parameters.partitioned or (trainable and self.placement.optimizer.partitioned)
        ranks = self.shards.size if cut else 1
        layout = lay_out([(n, local(p).shape, self.group_of.get(p, ungrouped)) for n, p in members], ranks, parts=parts)
        originals = [Original(parameter) for _, parameter in members]
        for _, parameter in members:
            retype(parameter, dtype, self.device)
            parameter.grad = None
        resident = not self.placement.parameters.partitioned
        if not resident and layout.numel <= min(self.persistence_threshold, self.persistence_left):
            resident = True
            self.persistence_left -= layout.numel
        home = None if resident else self.home_of(name, layout.shard_numel * dtype.itemsize)
        # A rank by itself has nothing to gather, unless from another tier.
        resident = resident or (ranks == 1 and home is None)
        flat = Flat(
            name,
            layout,
            [parameter for _, parameter in members],
            rank=self.shards.rank if ranks > 1 else 0,
            device=self.device,
            resident=resident,
            home=home,
            frames=self._frames,
        )
        self._fill(flat, originals)
        return flat

    def _fill(self, flat: Flat, originals: list[Original]) -> None:
        """Copy rank 0's values in, keep the fp32 master of the owned part, and let go of the rest."""
        needs_master = flat.trainable and flat.dtype.itemsize < torch.float32.itemsize
        precise = needs_master and any(o.dtype.itemsize > flat.dtype.itemsize for o in originals)
        target = torch.zeros(flat.layout.numel, dtype=torch.float32, device=self.device) if precise else flat.whole
        for slot, original in zip(flat.layout.slots, originals, strict=True):
            target[slot.start : slot.stop].view(slot.shape).copy_(original.value())
        freed = sum(original.nbytes for original in originals)
        originals.clear()
        self._heap.freed(freed)
        self.comm.broadcast(target).wait()
        alike = [(s.name, target[s.start : s.stop]) for s in flat.layout.slots if s.part is None]
        check_replicated(alike, self.tensor)
        start, stop = flat.layout.shard_range(flat.rank)
        if precise:
            flat.whole.copy_(target)
        if flat.resident:
            flat.show_whole()
            self._adopt(flat, target[start:stop] if needs_master else None)
            return
        if flat.home is not None:
            flat.home.blank()
        flat.shard_memory.copy_(flat.whole[start:stop])
        if flat.home is not None:
            flat.home.store().wait()
        self._adopt(flat, target[start:stop] if needs_master else None)
        if flat.home is not None:
            flat.home.leave()
        flat.show_blanks()
        flat.elastic.shrink()
        flat.elastic.trim()  # until the first step nobody wants it
        flat.weights = Weights.RELEASED

    def _adopt(self, flat: Flat, precise: torch.Tensor | None) -> None:
        if flat.trainable:
            self.adopt(flat, None if precise is None else precise.to(torch.float32))


def check_same_model(parameters: Sequence[tuple[str, nn.Parameter]], comm: Comm) -> None:
    """Ranks with different models would hang or sum unlike gradients; say which parameter differs."""
    if comm.size == 1:
        return
    mine = [f"{name} {tuple(local(p).shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}" for name, p in parameters]
    digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
    if len(set(comm.gather_objects(digest))) == 1:
        return
    everybody = comm.gather_objects(mine)
    first = everybody[0]
    for rank, theirs in enumerate(everybody[1:], 1):
        for position in range(max(len(first), len(theirs))):
            here = first[position] if position < len(first) else "nothing"
            there = theirs[position] if position < len(theirs) else "nothing"
            if here != there:
                raise WherryError(
                    f"the ranks hold different models: parameter {position} is [{here}] on rank 0 and [{there}] on "
                    f"rank {rank}; build the same model on every rank, whatever its weights (rank 0's are used)"
                )
    raise AssertionError("digests differ and parameters do not")


def move_buffers(model: nn.Module, device: torch.device, comm: Comm) -> None:
    """Buffers go to the device with their own dtype, and with rank 0's values."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    if comm.size > 1:
        for buffer in model.buffers():
            if buffer.layout is not torch.strided or not buffer.numel() or 0 in buffer.stride():
                continue  # sparse and expanded buffers stay as each rank's model has made them
            contiguous = buffer.contiguous()
            # As bytes: a backend need not know a buffer's dtype to copy it.
            comm.broadcast(contiguous.view(-1).view(torch.uint8)).wait()
            if contiguous is not buffer:
                buffer.copy_(contiguous)
