"""From a model's parameters to units: flats are laid out, filled, made equal on all ranks, and cut into shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from wherry.errors import WherryError
from wherry.fake import faking
from wherry.observe.log import warn
from wherry.parallel.comm import Comm
from wherry.parallel.partition import check_replicated, inside, is_dtensor, part_of, retype, slice_of
from wherry.parallel.topology import Topology
from wherry.sharding import grouping
from wherry.sharding.grouping import UnitPlan
from wherry.sharding.layout import FlatLayout, lay_out
from wherry.sharding.meta import Materializer, pieces, source_of, write
from wherry.sharding.param_shard import own_values, shard_of, take
from wherry.sharding.quantized import flat_kind, prepare, quantize, scales
from wherry.sharding.safetensors_folder import TensorSource
from wherry.sharding.unit import Flat, Unit
from wherry.tiers.elastic import Heap
from wherry.tiers.storage import Storage

if TYPE_CHECKING:
    from wherry.config import Config


# Of what optimizers that update whole parameters have, the padding from which on it is told of.
TOLD_PADDING = 0.25


class Builder:
    """Turns unit plans into units, a unit at a time, so that one unit above the model is ever in memory."""

    def __init__(
        self,
        config: Config,
        topology: Topology,
        groups: Sequence[dict[str, Any]],
        whole: Collection[int],
        storage_of: Callable[[str, int], Storage | None],
        adopt: Callable[[Flat, torch.Tensor | None], None] | None,
    ) -> None:
        zero = config.zero_optimization
        self.placement = config.placement()
        self.comm = topology.data
        # The ranks that share a flat out: all of `comm`, or groups of them that hold a copy each.
        self.shards = topology.shards
        # The ranks among which parameters may be cut, beside the data axis.
        self.tensor = topology.tensor
        self.device = topology.device
        # Where the shard of a partitioned flat rests, by its name and size; None for the device.
        self.storage_of = storage_of
        self.working_dtype = config.working_dtype()
        # Whether masters begin at what the working type makes of the weights.
        self.rounds = config.wherry.round_masters
        # The optimizer's groups hold the very parameters, in the order that the user gave them.
        self.group_of: dict[nn.Parameter, int] = {p: i for i, group in enumerate(groups) for p in group["params"]}
        # The groups whose optimizer looks at a parameter as a whole, and the flats that have such.
        self.whole = whole
        self._uncut: list[FlatLayout] = []
        # Flats up to the threshold stay whole, as long as all of them together keep within the limit.
        self.persistence_threshold = zero.stage3_param_persistence_threshold
        limit = zero.stage3_model_persistence_threshold
        self.persistence_left = float("inf") if limit is None else limit
        # Called with every flat that is trained, and with the fp32 shard it was made from, if that is more precise.
        self.adopt = adopt
        self._heap = Heap()

    def build(self, plans: Sequence[UnitPlan], model: nn.Module) -> list[Unit]:
        own_values(parameter for plan in plans for _, parameter in plan.parameters)
        # A parameter may leave the meta device with the unit of another module that it is tied to.
        sources = {p: s for plan in plans for _, p in plan.parameters if (s := source_of(p)) is not None}
        units = []
        self._module_of = {
            weight: module
            for module in model.modules()
            if (weight := module._parameters.get("weight")) is not None and type(weight) is not nn.Parameter
        }
        materializer = Materializer(model, self.device)
        for index, plan in enumerate(plans):
            flats = self._flats(plan, materializer, sources)
            units.append(Unit(index, plan.name, plan.modules, flats, root=plan.root))
        materializer.finish()
        place_scales(model, self.device, self.comm)
        nbytes = Counter[nn.Parameter]()
        for scale in scales(model):
            nbytes[scale.parameter] += scale.tensor.nbytes
        for flat in (flat for unit in units for flat in unit.flats):
            flat.scales_nbytes = sum(nbytes[parameter] for parameter in flat.parameters)
        self._tell_of_padding()
        return units

    def split(self, unit: Unit, flat: Flat) -> list[Flat]:
        """Lay out a frozen flat's parameters, some of which are trained now, in new flats by their values."""
        kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
        for slot, parameter in zip(flat.layout.slots, flat.parameters, strict=True):
            kind = flat_kind(parameter, self.working_dtype)[0], parameter.requires_grad
            kinds.setdefault(kind, []).append((slot.name, parameter))
        flats = []
        for (dtype, trainable), members in kinds.items():
            name = f"{unit.name} (from {members[0][0]})" if trainable else flat.name
            laid_out = self._lay_out(name, dtype, trainable, members, (), resident=flat.resident)
            flats.append(self._filled(*laid_out, {}, ()))
        return flats

    def _tell_of_padding(self) -> None:
        """Few parameters over many ranks leave some with nothing: that costs all of them memory and time."""
        numel, payload = (sum(getattr(each, of) for each in self._uncut) for of in ("numel", "payload"))
        if numel - payload > max(payload * TOLD_PADDING, grouping.LARGE_LAYER) and not faking() and self.comm.rank == 0:
            warn(
                "optimizer: it updates whole parameters, and %d ranks cannot share them evenly: what each keeps, sends "
                "and receives of them is %.0f%% more than its part; fewer ranks share a copy with "
                '"zero_optimization": {"mics_shard_size": ...}, and larger units (wherry.unit_classes) divide better',
                self.shards.size, 100 * (numel / payload - 1),
            )  # fmt: skip

    def _flats(
        self, plan: UnitPlan, materializer: Materializer, sources: dict[nn.Parameter, TensorSource]
    ) -> list[Flat]:
        kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in plan.parameters:
            if parameter.is_complex():
                raise WherryError(
                    f"{name}: complex parameters are not supported, got {parameter.dtype}; "
                    "hold real and imaginary parts in a real parameter and use torch.view_as_complex"
                )
            if quantize(name, parameter, sources.get(parameter), self.device):
                del sources[parameter]  # it has been read
                self._heap.freed(8 * parameter.nbytes)  # its values, in several precisions
            self._prepare(name, parameter)
            kind = flat_kind(parameter, self.working_dtype)[0], parameter.requires_grad
            kinds.setdefault(kind, []).append((name, parameter))
        parameters = [parameter for _, parameter in plan.parameters]
        materializer.leave_to_files(parameters)
        # One after the other: no more is held twice than one has.
        laid_out: Iterable[tuple[Flat, torch.Tensor]] = (
            self._lay_out(plan.name + _suffix(dtype, trainable, kinds), dtype, trainable, members, sources)
            for (dtype, trainable), members in kinds.items()
        )
        memory: dict[nn.Parameter, torch.Tensor] = {}
        if any(parameter.is_meta for parameter in parameters):
            laid_out = list(laid_out)
            # What has no memory yet is made where it will lie.
            memory = {
                parameter: view
                for flat, values in laid_out
                for parameter, view in zip(flat.parameters, flat.layout.views(values), strict=True)
                if parameter.is_meta
                and not is_dtensor(parameter)
                and parameter.is_contiguous()
                and parameter.dtype == values.dtype
            }
            materializer.fill(parameters, None if plan.root else plan.modules[0], memory)
        return [self._filled(flat, values, sources, memory) for flat, values in laid_out]

    def _prepare(self, name: str, parameter: nn.Parameter) -> None:
        """A weight in few bits is where it is computed with, and its module has it as it is to be shown."""
        if parameter in self._module_of:
            prepare(self._module_of[parameter])
        if inside(parameter) is None or is_dtensor(parameter):
            return
        if parameter.requires_grad:
            raise WherryError(
                f"{name}: a {type(parameter).__name__} is made of other tensors, and cannot be trained here; freeze it "
                "(requires_grad_(False)), and train an adapter beside it"
            )
        if parameter.device != self.device:
            moved = nn.Parameter(parameter.to(self.device), requires_grad=False)
            torch.utils.swap_tensors(parameter, moved)

    def _lay_out(
        self,
        name: str,
        dtype: torch.dtype,
        trainable: bool,
        members: list[tuple[str, nn.Parameter]],
        sources: Container[nn.Parameter],
        *,
        resident: bool = False,
    ) -> tuple[Flat, torch.Tensor]:
        """A flat that has no values yet, and memory for what is drawn, as precise as the parameters are."""
        # A parameter that the optimizer was not given still gets gradients; it lies behind the groups.
        ungrouped = max(self.group_of.values(), default=-1) + 1
        parts = {n: part for n, p in members if (part := slice_of(n, p, self.tensor)) is not None}
        cut = self.placement.parameters.partitioned or (trainable and self.placement.optimizer.partitioned)
        ranks = self.shards.size if cut else 1
        described = [(n, part_of(p).shape, self.group_of.get(p, ungrouped)) for n, p in members]
        whole = self.whole if trainable else ()
        for part_name, _, group in described:
            if part_name in parts and group in whole:
                raise WherryError(
                    f"{part_name}: tensor-parallel ranks have cut it, and its optimizer updates whole parameters; put "
                    "it in a group that AdamW updates (param.use_muon = False for Muon), or train without a tp axis"
                )
        layout = lay_out(described, ranks, parts=parts, whole=whole)
        if any(group in whole for _, _, group in described):
            self._uncut.append(layout)
        resident = resident or not self.placement.parameters.partitioned
        if not resident and layout.numel <= min(self.persistence_threshold, self.persistence_left):
            resident = True
            self.persistence_left -= layout.numel
        storage = None if resident else self.storage_of(name, layout.shard_numel * dtype.itemsize)
        # A rank by itself has nothing to gather, unless from another tier.
        resident = resident or (ranks == 1 and storage is None)
        parameter_of = dict(members)
        parameters = [parameter_of[slot.name] for slot in layout.slots]
        flat = Flat(
            name,
            layout,
            parameters,
            dtype=dtype,
            rank=self.shards.rank if ranks > 1 else 0,
            device=self.device,
            resident=resident,
            storage=storage,
            held_by=self._module_of,
        )
        drawn = any(parameter not in sources for parameter in parameters)
        exact = drawn and not self.rounds and _needs_master(flat)
        if exact and any(p.dtype.itemsize > dtype.itemsize for p in parameters):
            return flat, torch.zeros(layout.numel, dtype=torch.float32, device=self.device)
        return flat, flat.whole

    def _filled(
        self,
        flat: Flat,
        values: torch.Tensor,
        sources: Mapping[nn.Parameter, TensorSource],
        made_there: Container[nn.Parameter],
    ) -> Flat:
        """Give a flat rank 0's values, or those of files, and let go of what is not this rank's."""
        in_files = {index: sources[p] for index, p in enumerate(flat.parameters) if p in sources}
        drawn = len(in_files) < len(flat.parameters)
        shared_out = all(shard_of(parameter) is not None for parameter in flat.parameters)
        for parameter, view in zip(flat.parameters, flat.layout.views(values), strict=True):
            if drawn and parameter not in made_there:
                view.copy_(take(parameter))
            retype(parameter, flat.dtype, self.device)
            parameter.grad = None
            self._heap.freed(view.nbytes)
        if drawn:
            if not shared_out:  # what `Init` has shared out is rank 0's
                self.comm.broadcast(values).wait()
            alike = [(s.name, values[s.start : s.stop]) for s in flat.layout.slots if s.part is None]
            check_replicated(alike, self.tensor)
            if values is not flat.whole:
                flat.whole.copy_(values)
        self._keep(flat, values, in_files, drawn=drawn)
        if flat.resident:
            flat.show_whole()
            return flat
        flat.release()
        return flat

    def _keep(self, flat: Flat, values: torch.Tensor, in_files: Mapping[int, TensorSource], *, drawn: bool) -> None:
        """This rank's shard goes where it rests, and a master of it to the optimizer's state."""
        if flat.storage is not None:
            flat.storage.blank()
        own, shard = flat.own, flat.shard_memory
        master: torch.Tensor | None = None
        if _needs_master(flat):
            master = values[own].to(torch.float32) if drawn else torch.zeros_like(values[own], dtype=torch.float32)
        if not drawn:
            shard.zero_()
        elif not flat.resident:
            shard.copy_(flat.whole[own])
        for start, piece in pieces(flat.layout, flat.rank, in_files):
            write(start, piece, shard)
            if master is not None and not self.rounds:  # as precise as the files are
                write(start, piece, master)
        if master is not None and self.rounds and in_files:
            master.copy_(shard)
        if in_files and flat.resident and flat.layout.ranks > 1:
            self.shards.all_gather(flat.whole, shard).wait()
        if flat.storage is not None:
            flat.storage.store().wait()
        if flat.trainable and self.adopt is not None:
            self.adopt(flat, master)
        if flat.storage is not None:
            flat.storage.release()


def _needs_master(flat: Flat) -> bool:
    return flat.trainable and flat.dtype.itemsize < torch.float32.itemsize


def _suffix(dtype: torch.dtype, trainable: bool, kinds: Collection[object]) -> str:
    """Of a flat's name, where the unit has several."""
    return "" if len(kinds) == 1 else f" ({str(dtype).removeprefix('torch.')}{'' if trainable else ', frozen'})"


def move_buffers(model: nn.Module, device: torch.device, comm: Comm, dtype: torch.dtype | None) -> None:
    """Buffers go to the device with rank 0's values: in their own dtype, or floating-point ones in a given one."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device, dtype if buffer.is_floating_point() else None)
    for buffer in model.buffers() if comm.size > 1 else ():
        _make_equal(buffer, comm)


def place_scales(model: nn.Module, device: torch.device, comm: Comm) -> None:
    """What weights in few bits have beside their codes goes to the device, with rank 0's values, as the codes do."""
    for scale in scales(model):
        setattr(scale.holder, scale.attribute, scale.tensor.to(device))
        if comm.size > 1:
            _make_equal(scale.tensor, comm)


def _make_equal(tensor: torch.Tensor, comm: Comm) -> None:
    if tensor.layout is not torch.strided or not tensor.numel() or 0 in tensor.stride():
        return  # sparse and expanded buffers stay as each rank's model has made them
    contiguous = tensor.contiguous()
    # As bytes: a backend need not know a buffer's dtype to copy it.
    comm.broadcast(contiguous.view(-1).view(torch.uint8)).wait()
    if contiguous is not tensor:
        tensor.copy_(contiguous)
