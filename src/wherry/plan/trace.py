"""Profiles of models, made by running them: one micro-batch forward and backward on fake tensors, without memory.

What a placement then adds (gathered weights, states, buffers, traffic) is arithmetic on what is recorded here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from wherry.activations.build import SMALLEST_PARTITIONED
from wherry.activations.partition import CheckpointPartition
from wherry.activations.recompute import operations, recomputed, selective
from wherry.activations.saving import Saver
from wherry.activations.stores import DiskActivations, HostStore, Store
from wherry.errors import WherryError
from wherry.fake import is_fake
from wherry.observe.footprint import WORKING, Footprint
from wherry.observe.log import logger
from wherry.placement import Tier
from wherry.plan.blocks import Differs, Gap, filled, thinned
from wherry.plan.cut import CutLinear, joined_bytes
from wherry.plan.imagined import FakeComm, FakeLink, FakePool, FakeStore
from wherry.plan.profile import (
    ATTENTION,
    PLAIN,
    TANH,
    Interval,
    Moment,
    Operation,
    Operations,
    Profile,
    PutAway,
    Recompute,
)
from wherry.plan.units import sizes_of
from wherry.sharding.autograd import NO_TASK, backward_task, tensors_in
from wherry.sharding.grouping import UnitPlan, plan_units
from wherry.tiers.tickets import DONE, Ticket

aten = torch.ops.aten

Build = Callable[[int], tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]]
"""From a micro-batch to the model and what its forward is called with."""

Few = AbstractContextManager[tuple[list[UnitPlan], list[Gap]]]


@contextmanager
def _installed(recompute: Recompute, plans: Sequence[UnitPlan], saver: Saver | None) -> Iterator[None]:
    """Units that compute their activations again, or put them away, as the engine's do."""
    whole = isinstance(recompute, PutAway) and recompute.whole
    saved = operations(recompute.save_operations)
    units = [plan for plan in plans if not plan.root]
    with ExitStack() as undone:
        for place, plan in enumerate(units):
            if place % recompute.every == 0:
                for module in plan.modules:
                    undone.callback(_put_back, module, vars(module).get("forward"))
                    module.forward = partial(_forward, module.forward, saved, saver, whole)
        yield


def _forward(
    forward: Callable[..., Any], saved: frozenset[Any], saver: Saver | None, whole: bool, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    saving = None if saver is None else saver.hooks()
    if whole:
        with saving or nullcontext():
            return forward(*args, **kwargs)
    contexts = partial(selective, saved) if saved else None
    return recomputed(forward, args, kwargs, contexts=contexts, saving=saving)


class _AsItIs:
    """Of what autograd saves only the engine's own weights need more."""

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def unpack(self, saved: torch.Tensor) -> torch.Tensor:
        return saved


class _Way(FakeLink):
    """Copies that go on beside what is computed: they are none of its operations."""

    def up(self, target: torch.Tensor, source: torch.Tensor, *, after: Ticket = DONE) -> Ticket:
        return DONE

    def down(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        return DONE


class _Away:
    """Where activations are put: the engine's own stores, on a host and a disk that are imagined."""

    def __init__(self, how: PutAway, model: nn.Module, mode: FakeTensorMode, footprint: Footprint) -> None:
        self._pool, self._disk = FakePool(mode, footprint), FakeStore(())
        link = _Way(self._pool, shared=False)
        disk: Any = self._disk
        stores: dict[Tier, Store | None] = {
            Tier.DEVICE: None,
            Tier.HOST: HostStore(link),
            Tier.DISK: DiskActivations(disk, link),
        }
        # The ranks with the other parts of what is kept.
        self._others = FakeComm(0, how.parts)
        self._stays = how.tier is Tier.DEVICE
        self.saver = Saver(
            stores[how.tier],
            _AsItIs(),
            smallest=how.smallest,
            partition=CheckpointPartition(self._others, smallest=SMALLEST_PARTITIONED) if how.parts > 1 else None,
            weights=lambda: (*model.parameters(), *model.buffers()),
        )
        self.saver.begin()

    def figures(self) -> dict[str, int]:
        """By the profile's names."""
        sent = 0 if self._stays else self.saver.nbytes
        return {"on_host": self._pool.counters.allocated, "on_disk": self._disk.reserved, "sent": sent}

    def joined(self) -> int:
        """Bytes of which ranks gather the parts, as those of a sum, which sends them twice."""
        return self._others.traffic.bytes["all_gather"] // 2


def _put_back(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    """The forward that the module had of its own, or that of its class."""
    del module.forward
    if forward is not None:
        module.forward = forward


# Element-wise functions that a processor computes more slowly than it reads their operands.
_SLOW = (
    *(aten.gelu, aten.gelu_backward, aten.silu, aten.silu_backward, aten.exp, aten.tanh, aten.sigmoid, aten.erf),
    *(aten._softmax, aten._softmax_backward_data, aten._log_softmax, aten._log_softmax_backward_data, aten.pow),
    *(aten.sin, aten.cos, aten.native_dropout, aten.softplus, aten.mish),
)


def _attention_flops(args: Any, *, backward: bool) -> float:
    query, key, value = args[1:4] if backward else args[:3]
    batch, heads, length, width = query.shape
    scores = 2.0 * batch * heads * length * key.shape[-2] * width
    mix = 2.0 * batch * heads * length * key.shape[-2] * value.shape[-1]
    return 2.5 * (scores + mix) if backward else scores + mix


def _tensor_bytes(values: Any) -> int:
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, tuple | list):
            total += _tensor_bytes(value)
    return total


class _Recorder(Footprint):
    """A footprint that also counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # autograd asks it of every tensor, and it makes nothing
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._see(result)
        packet = func._overloadpacket
        if not func.is_view and packet is not aten.detach:
            out = result if isinstance(result, tuple | list) else (result,)
            nbytes = _tensor_bytes(out)
            if packet not in (aten.empty, aten.empty_like, aten.new_empty):
                nbytes += _tensor_bytes(args)
            slow = _numel(out) if packet in _SLOW else 0
            flops, backward = _flops(packet, args, kwargs, result), backward_task() != NO_TASK
            self.rows.append((flops, nbytes, slow, backward, _kind(packet, kwargs)))
        return result

    def taken(self) -> tuple[Operation, ...]:
        """The operations since this was last asked."""
        rows, self.rows = tuple(self.rows), []
        return rows


def _numel(values: Any) -> int:
    return max((value.numel() for value in values if isinstance(value, torch.Tensor)), default=0)


_GELU = (aten.gelu, aten.gelu_backward)
_ATTENTION = frozenset(
    getattr(aten, f"_scaled_dot_product_{kind}{way}")
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    for way in ("", "_backward")
)


def _kind(packet: Any, kwargs: Any) -> int:
    if packet in _ATTENTION:
        return ATTENTION
    return TANH if packet in _GELU and kwargs.get("approximate") == "tanh" else PLAIN


def _flops(packet: Any, args: Any, kwargs: Any, result: Any) -> float:
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return _attention_flops(args, backward=False)
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return _attention_flops(args, backward=True)
    count = flop_registry.get(packet)
    return float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0


class _Watch:
    """Hooks that follow units through a forward and backward, as the engine's own do, until they are removed."""

    def __init__(self, model: nn.Module, plans: list[UnitPlan], recorder: _Recorder) -> None:
        self.recorder = recorder
        self.intervals: list[Interval] = []
        # Bytes that tensor-parallel ranks sum, since the last event.
        self.joined = 0
        self._last = ("begin", 0)
        self._depth = [0] * len(plans)
        self._wanted: set[int] = set()
        self._awaited: list[int] = []
        self._handles: list[RemovableHandle] = []
        for index, plan in enumerate(plans):
            if not plan.root:
                for module in plan.modules:
                    self._handles += [
                        module.register_forward_pre_hook(partial(self._enter, index), prepend=True),
                        module.register_forward_hook(partial(self._exit, index)),
                    ]
            trained = [p for _, p in plan.parameters if p.requires_grad and p.is_floating_point()]
            self._awaited.append(len(trained))
            came = partial(self._came, index, trained)
            self._handles += [parameter.register_post_accumulate_grad_hook(came) for parameter in trained]
        for module in model.modules():
            if isinstance(module, CutLinear) and module.joins:
                self._handles.append(module.register_forward_hook(self._join))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def mark(self, kind: str, unit: int = 0) -> None:
        """An event: what was highest since the last one, and ran, belongs to that."""
        highest = self.recorder.peaks.get(WORKING, 0)
        self.intervals.append(Interval(*self._last, highest, self.recorder.taken(), self.joined))
        self._last, self.joined = (kind, unit), 0
        self.recorder.reset()

    def _enter(self, index: int, *_: Any) -> None:
        self._depth[index] += 1
        if self._depth[index] == 1 and backward_task() == NO_TASK:
            self.mark("enter", index)

    def _exit(self, index: int, _module: nn.Module, _args: Any, output: Any) -> None:
        self._depth[index] -= 1
        if self._depth[index] or backward_task() != NO_TASK:
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._want(index))
        self.mark("exit", index)

    def _want(self, index: int) -> None:
        if index not in self._wanted:
            self._wanted.add(index)
            self.mark("want", index)

    def _came(self, index: int, parameters: list[nn.Parameter], _: nn.Parameter) -> None:
        self._awaited[index] -= 1
        if self._awaited[index] == 0:
            # The engine copies them to its own buffer and lets go of autograd's, a whole unit at a time.
            for parameter in parameters:
                parameter.grad = None
            self.mark("done", index)

    def _join(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        self.joined += joined_bytes(output)


def profile(
    build: Build,
    micro_batch: int,
    dtype: torch.dtype | None,
    unit_classes: tuple[str, ...] = (),
    recompute: Recompute | None = None,
    *,
    whole: bool = False,
    mode: FakeTensorMode | None = None,
) -> Profile:
    """Run one micro-batch of the model that `build` makes, with its weights in `dtype`, and leave it as it was.

    Of many equal blocks in a row only the first and the last few run, unless `whole`: the answer is the same. But how
    much comes back ahead of its use depends on all that was put away. `mode` is that of a model which `build` has made
    before.
    """
    whole = whole or isinstance(recompute, PutAway)
    try:
        with mode or FakeTensorMode(allow_non_fake_inputs=True) as mode:
            found = None if whole else _profile(mode, build, micro_batch, dtype, unit_classes, recompute, whole=False)
            if found is None:
                found = _profile(mode, build, micro_batch, dtype, unit_classes, recompute, whole=True)
            assert found is not None
            return found
    except (DataDependentOutputException, UnsupportedFakeTensorException) as error:
        raise WherryError(
            f"the model's forward asks for the value of a tensor, and a plan has none ({error}); keep such decisions "
            "out of the forward"
        ) from error


class Profiler:
    """Makes profiles of one model, of few of its blocks if they tell of all.

    A forward of somebody's own may do more after a block in the middle. Unless the model is `known` not to, the first
    profile is therefore made both ways, and where the two are not the same, so is every other: of the whole.
    """

    def __init__(self, known: bool, mode: FakeTensorMode | None = None) -> None:
        self._few: bool | None = True if known else None
        self._mode = mode

    def make(self, build: Build, *settings: Any) -> Profile:
        """As `profile` of these settings."""
        if self._few is not None or any(isinstance(setting, PutAway) for setting in settings):
            return profile(build, *settings, whole=not self._few, mode=self._mode)
        whole = profile(build, *settings, whole=True, mode=self._mode)
        self._few = whole.same(profile(build, *settings, mode=self._mode))
        return whole


def _profile(
    mode: FakeTensorMode,
    build: Build,
    micro_batch: int,
    dtype: torch.dtype | None,
    unit_classes: tuple[str, ...],
    recompute: Recompute | None,
    *,
    whole: bool,
) -> Profile | None:
    """None where it must be `whole`."""
    model, args, kwargs = build(micro_batch)
    model = without_values(mode, model)
    args = tuple(faked(mode, value) for value in args)
    kwargs = {name: faked(mode, value) for name, value in kwargs.items()}
    plans = plan_units(model, unit_classes)
    units, buffers = sizes_of(plans), _tensor_bytes(list(model.buffers()))
    inputs = list({id(t): t for t in (*tensors_in(args), *tensors_in(kwargs))}.values())
    every = recompute.every if recompute is not None else 1
    recorder = _Recorder()
    few: Few = nullcontext((plans, [])) if whole else thinned(model, plans, every)
    with few as (kept_plans, gaps):
        try:
            away = _Away(recompute, model, mode, recorder) if isinstance(recompute, PutAway) else None
            intervals, kept = _run(model, kept_plans, args, kwargs, inputs, dtype, recompute, recorder, away)
        except Exception as error:
            if not gaps:
                raise
            # Whatever a forward raises that counts its blocks: whole it may run, or it raises again.
            logger.debug("the model does not run with few of its blocks, so all run: %r", error)
            return None
        try:
            for gap in gaps:
                intervals, grown = filled(intervals, gap)
                kept += grown
        except Differs:
            return None
    return Profile(
        units=tuple(units),
        buffers=buffers,
        inputs=_tensor_bytes(inputs),
        moments=tuple(Moment(each.kind, each.unit, each.activations) for each in intervals),
        operations=Operations.of(intervals),
        micro_batch=micro_batch,
        kept=kept,
        joined=sum(each.joined for each in intervals) + (away.joined() if away is not None else 0),
        **(away.figures() if away is not None else {}),
    )


def _run(
    model: nn.Module,
    plans: list[UnitPlan],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    inputs: Sequence[torch.Tensor],
    dtype: torch.dtype | None,
    recompute: Recompute | None,
    recorder: _Recorder,
    away: _Away | None,
) -> tuple[list[Interval], int]:
    """A forward and backward, event by event, and the bytes of activations that are kept between the two."""
    watch = _Watch(model, plans, recorder)
    with ExitStack() as undone:
        undone.callback(watch.remove)
        undone.callback(model.zero_grad)
        for parameter in model.parameters():
            if dtype is not None and parameter.is_floating_point():
                undone.callback(setattr, parameter, "data", parameter.data)
                parameter.data = parameter.data.to(dtype)
        if recompute is not None:
            undone.enter_context(_installed(recompute, plans, away.saver if away is not None else None))
        undone.enter_context(recorder)
        recorder.label("weights", model.parameters())
        recorder.label("buffers", (*model.buffers(), *inputs))
        recorder.reset()
        recorder.taken()
        output = model(*args, **kwargs)
        loss = loss_of(output)
        watch.mark("turn")
        del output
        kept = recorder.now()[WORKING]
        loss.backward()
        watch.mark("end")
        del loss
    return watch.intervals, kept


def without_values(mode: FakeTensorMode, model: nn.Module) -> nn.Module:
    """The model itself if it was made in the mode; else a copy of it: the user's own weights are left alone.

    One on the meta device comes to the CPU, as all fake tensors are there.
    """
    if not all(map(is_fake, (*model.parameters(), *model.buffers()))):
        with FakeCopyMode(mode):
            model = copy.deepcopy(model)
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in moved:
                    here = torch.empty_like(parameter, device="cpu")
                    moved[parameter] = nn.Parameter(here, requires_grad=parameter.requires_grad)
                module._parameters[name] = moved[parameter]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = moved.setdefault(buffer, torch.empty_like(buffer, device="cpu"))
    return model


def faked(mode: FakeTensorMode, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value if is_fake(value) else mode.from_tensor(value)
    return torch.empty_like(value, device="cpu") if value.is_meta else value


def loss_of(output: Any) -> torch.Tensor:
    """A loss for whatever a forward returned: its own if it has one, else the mean of its first float tensor."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    first = next((t for t in tensors_in(output) if t.is_floating_point()), None)
    if first is None:
        raise WherryError("the model's forward returned no tensor of floats, so there is no loss to go back from")
    return first if first.numel() == 1 else first.float().mean()
