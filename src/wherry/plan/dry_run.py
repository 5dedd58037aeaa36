"""A dry run: the real engine's step for one rank of many, on tensors without values and a cluster without machines.

What it reports was counted while the engine ran: collectives, bytes, operations, and the highest sum of all tensors'
bytes. What it cannot know is what lies below tensors: the allocator's fragments, a kernel's workspace, the time.
"""

from __future__ import annotations

import copy
import sys
import time
from collections import Counter, UserDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeCopyMode,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_map_only

import wherry
from wherry import config as configs
from wherry.config import Config
from wherry.errors import WherryError
from wherry.fake import is_fake
from wherry.observe.log import logger
from wherry.parallel.topology import Topology
from wherry.plan.choose import ACCUMULATION, MICRO, TRAIN
from wherry.plan.counts import GATHERED, HOST, STATES, TENSOR, Counts, Line
from wherry.plan.imagined import FakeComm, FakeLink, FakePool, FakeStore
from wherry.plan.model_source import Inputs, ModelSource, told_by
from wherry.plan.operations import Recorder
from wherry.plan.parts import CutLinear, Outline, ends, longest_run
from wherry.sharding.autograd import NO_TASK, backward_task, tensors_in

# Micro-batches of the longest window that is run. The ones between the first and the last do the same.
WINDOW = 3


@dataclass(frozen=True)
class DryRun:
    """What one rank does in a step, and keeps."""

    model: str
    placement: str
    parameters: int
    rank: int
    ranks: int
    micro_batch: int
    accumulation: int
    # Calls and bytes of whole tensors, of one step.
    calls: dict[str, int]
    bytes: dict[str, int]
    memory: tuple[Line, ...]
    seconds: float

    def peak(self, tier: str) -> int:
        """The highest sum of all tensors' bytes on a tier."""
        return sum(line.at_peak for line in self.memory if line.tier == tier)


def dry_run(
    source: ModelSource,
    config: Config | dict[str, Any] | str | None,
    *,
    ranks: int,
    rank: int = 0,
    sequence: int | None = None,
    tensor: int = 1,
    gpu: bool = False,
) -> DryRun:
    """Build the engine for `rank` of `ranks` and make two steps; the second, with the order known, is reported.

    The model is what one of `tensor` ranks has of it. `gpu` says that the device has memory of its own, so that the
    host is another tier.
    """
    if not 0 <= rank < ranks:
        raise WherryError(f"rank: expected 0 to {ranks - 1}, got {rank}")
    resolved = config if isinstance(config, Config) else configs.load(config)
    begun = time.perf_counter()
    sizes = resolved.batch(ranks)
    where = {"ranks": ranks, "rank": rank, "sequence": sequence, "tensor": tensor, "gpu": gpu}
    counts = count_by_blocks(source, resolved, outline(source, sequence), **where)
    return DryRun(
        model=source.name,
        placement=resolved.placement().name,
        parameters=round(counts.parameters),
        rank=rank,
        ranks=ranks,
        micro_batch=sizes.micro,
        accumulation=sizes.accumulation,
        calls={name: round(calls) for name, calls in counts.calls.items()},
        bytes={name: round(nbytes) for name, nbytes in counts.bytes.items()},
        memory=tuple(counts.lines(gpu=gpu)),
        seconds=time.perf_counter() - begun,
    )


class UnknownInputs(WherryError):
    """Nobody knows what a model's forward is called with."""


def outline(source: ModelSource, sequence: int | None = None) -> Outline:
    with told_by(f"{source.name}: it fails"):
        model, _ = _made(source, 1, sequence, FakeTensorMode(allow_non_fake_inputs=True))
        return Outline.of(model)


def count_by_blocks(
    source: ModelSource, config: Config, of: Outline, *, apart: int | None = None, **where: Any
) -> Counts:
    """As `count`, of a model of many equal blocks by runs of few of them, and of a long window by short ones: each
    block and each micro-batch more adds what the last one added.

    `apart` blocks at each end are told apart from those between them: by default as many as the config makes differ.
    """
    accumulation = config.batch(where["ranks"]).accumulation
    if accumulation > WINDOW:
        windows = (with_window(config, where["ranks"], length) for length in (WINDOW - 1, WINDOW))
        shorter, longer = (count_by_blocks(source, window, of, apart=apart, **where) for window in windows)
        return shorter.toward(longer, accumulation - (WINDOW - 1))
    if apart is None:
        rows = config.batch(where["ranks"]).micro * (where.get("sequence") or source.sequence)
        apart = ends(config, of, rows // config.wherry.context_parallel)
    if not of.blocks or apart is None or 4 * apart + 2 >= of.blocks:
        return count(source, config, **where)
    few, more = 2 * apart, 2 * apart + 2
    try:
        one, two = (count(source, config, **where, blocks=blocks, apart=apart) for blocks in (few, more))
    except UnknownInputs:
        raise
    except Exception as error:
        # Whatever a forward raises that counts its blocks: whole it may run, or it raises again.
        logger.debug("%s does not run with few of its blocks, so all run: %r", source.name, error)
        return count(source, config, **where)
    return one.toward(two, (of.blocks - few) / (more - few))


def with_window(config: Config, ranks: int, accumulation: int, micro: int | None = None) -> Config:
    """The config with so many micro-batches in a window."""
    micro = micro or config.batch(ranks).micro
    sizes = {MICRO: micro, ACCUMULATION: accumulation, TRAIN: micro * accumulation * config.readers(ranks)}
    return configs.load(config, overrides=sizes)


def count(
    source: ModelSource,
    config: Config,
    *,
    ranks: int,
    rank: int = 0,
    sequence: int | None = None,
    tensor: int = 1,
    gpu: bool = False,
    blocks: int | None = None,
    apart: int = 0,
    updates: bool = True,
) -> Counts:
    """What `rank` does in a window and its update, once the order of the model's units is known; or, without `updates`,
    in forwards and backwards alone.

    Of a run of equal blocks only so many `blocks` are left in the model, if that is given; as many as are to be told
    `apart` at both ends are phases of their own.
    """
    failing, fake = told_by(f"{source.name}: a step of it fails"), FakeTensorMode(allow_non_fake_inputs=True)
    recorder, moved = Recorder(elsewhere={HOST} if gpu else ()), Counter[str]()
    with failing, _understood(source.name), fake, ExitStack() as end:
        model, inputs = _made(source, config.batch(ranks).micro, sequence, fake)
        if inputs is None:
            raise UnknownInputs(
                f"{source.name}: a dry run needs the inputs of a micro-batch; let the callable return the model and "
                "its inputs, as a tuple"
            )
        end.enter_context(_as_values_would_have_it())
        run = longest_run(model)
        if blocks is not None and run is not None:
            run.keep(blocks)
            left = list(run.container.children())[run.start : run.start + blocks]
            end.enter_context(_told_apart(left, apart, recorder))
        end.enter_context(recorder)  # what made the model is none of an engine's operations
        batch = faked(fake, (tuple(inputs.args), dict(inputs.kwargs)))
        recorder.label("resting", tensors_in(batch))
        others = FakeComm(0, tensor)
        topology = Topology(
            FakeComm(rank, ranks, over_gloo=not gpu),
            torch.device("cpu"),
            rank,
            rank,
            ranks,
            tensor=others,
            link=lambda pin: FakeLink(FakePool(fake, recorder), moved, shared=not gpu),
            open_store=partial(FakeStore, moved),  # type: ignore[arg-type]
        )
        _count_sums(model, others)
        engine, *_ = wherry.initialize(
            model=WithLoss(model),
            config=config,
            mesh=topology,
            optimizer=None if config.optimizer else torch.optim.AdamW,
        )
        end.callback(engine.close)
        step = Step(engine, batch, config, recorder, moved, others, updates=updates)
        if updates:  # the order of units, and what an update makes of its own, a first step tells
            step.make()
        step.begin_counting()
        step.make()
        return step.counts()


def states_of(engine: wherry.Engine) -> dict[tuple[str, str], float]:
    """Bytes of each state on each tier, as the engine tells them."""
    found: Counter[tuple[str, str]] = Counter()
    for row in engine.memory():
        if row.state in STATES:
            found[row.state, row.tier] += row.bytes_actual
    return dict(found)


WAYS = ("up", "down", "streamed", "read", "written")


class Step:
    """Windows of an engine, one like the other, and what of them is counted."""

    def __init__(
        self,
        engine: wherry.Engine,
        batch: tuple[tuple[Any, ...], Mapping[str, Any]],
        config: Config,
        recorder: Recorder,
        moved: Counter[str],
        tensor: FakeComm | None = None,
        *,
        updates: bool = True,
    ) -> None:
        self.engine = engine
        self._updates = updates
        # Bytes of activations between a forward and its backward.
        self._kept = 0
        parameters = list(engine.module.parameters())
        self._parameters = sum(p.numel() for p in parameters)
        self._trained = sum(p.numel() for p in parameters if p.requires_grad)
        self._batch = batch
        self._together = config.wherry.accumulation == "layer_major"
        self._recorder = recorder
        self._moved = moved
        self._tensor = tensor

    def begin_counting(self) -> None:
        """What there is now rests through the next step."""
        recorder = self._recorder
        recorder.follow_resized(GATHERED)
        recorder.label("resting", self.engine.module.buffers())
        recorder.label_rest("resting")
        recorder.clear()
        for way in WAYS:
            self._moved[way] = 0
        for _, traffic in self._traffic():
            traffic.clear()

    def make(self) -> None:
        """One accumulation window and its update."""
        engine, recorder = self.engine, self._recorder
        accumulation = engine.gradient_accumulation_steps()
        if self._together and accumulation > 1:
            recorder.begin("forward")
            engine.train_batch(iter([self._batch] * accumulation))
            engine.settle()
            recorder.begin(None)
            return
        for micro in range(accumulation):
            last = micro == accumulation - 1
            engine.set_gradient_accumulation_boundary(self._updates and last)
            recorder.begin("forward")
            loss = engine(*self._batch)
            self._kept = recorder.working
            recorder.begin("backward")
            engine.backward(loss)
            del loss
            recorder.begin("step")
            recorder.updating = True
            engine.step()
            if last:
                engine.settle()
            recorder.updating = False
        recorder.begin(None)
        engine.set_gradient_accumulation_boundary(None)

    def counts(self) -> Counts:
        """Of the windows since counting began."""
        calls: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        for among, traffic in self._traffic():
            for operation in traffic.calls:
                calls[operation + among] += traffic.calls[operation]
                nbytes[operation + among] += traffic.bytes[operation]
        return Counts(
            parameters=self._parameters,
            trained=self._trained,
            states=states_of(self.engine),
            on_disk=self._moved["reserved"],
            peaks=dict(self._recorder.phases),
            highest=dict(self._recorder.highest),
            kept=self._kept,
            calls=calls,
            bytes=nbytes,
            moved={way: self._moved[way] for way in WAYS},
            operations=dict(self._recorder.operations),
        )

    def _traffic(self) -> Iterator[tuple[str, Any]]:
        yield from self.engine.topology.traffic()
        if self._tensor is not None and self._tensor.size > 1:
            yield TENSOR, self._tensor.traffic


@contextmanager
def _understood(name: str) -> Iterator[None]:
    try:
        yield
    except (DataDependentOutputException, UnsupportedFakeTensorException) as error:
        raise WherryError(
            f"{name}: its forward asks for the value of a tensor, and a dry run has none ({error}); keep such "
            "decisions out of the forward"
        ) from error


@contextmanager
def _as_values_would_have_it() -> Iterator[None]:
    """What transformers decides by values, as it decides of plain rows.

    It looks into a row's positions for where another sequence begins, and without values has to take it that one may: a
    mask as large as the sequence squared. Experts' products it gives to a kernel of torch's that takes fp32 on a CPU,
    and without values bf16 alone.
    """
    ours: dict[tuple[str, str], Any] = {
        ("transformers.masking_utils", "find_packed_sequence_indices"): lambda *_, **__: None,
        ("transformers.integrations.moe", "_can_use_grouped_mm"): lambda _, weight, __: weight.dtype is torch.bfloat16,
    }
    with ExitStack() as end:
        for (module, name), function in ours.items():
            if hasattr(found := sys.modules.get(module), name):
                end.callback(setattr, found, name, getattr(found, name))
                setattr(found, name, function)
        yield


class WithLoss(nn.Module):
    """A model whose forward returns its loss, whatever it is called with."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        return loss_of(self.model(*args, **kwargs))


def _count_sums(model: nn.Module, tensor: FakeComm) -> None:
    """Linear layers whose outputs tensor-parallel ranks sum up: in the forward, and gradients like them after it."""

    def join(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        for _ in range(2):
            tensor.all_reduce(output.detach()).wait()

    for module in model.modules():
        if isinstance(module, CutLinear) and module.joins:
            module.register_forward_hook(join)


@contextmanager
def _told_apart(blocks: list[nn.Module], apart: int, recorder: Recorder) -> Iterator[None]:
    """Blocks at either end are phases of the forward and of the backward, named by their places from that end."""
    ends = [*enumerate(blocks[:apart]), *enumerate(blocks[-apart:], -apart)]
    names = {block: place for place, block in ends}

    def enter(block: nn.Module, *_: Any) -> None:
        if block in names and backward_task() == NO_TASK:
            recorder.begin(f"forward {names[block]}")

    def leave(block: nn.Module, _args: Any, output: Any) -> None:
        if block in names and backward_task() == NO_TASK:
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: recorder.begin(f"backward {names[block]}"))

    hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _made(
    source: ModelSource, micro: int, sequence: int | None, fake: FakeTensorMode
) -> tuple[nn.Module, Inputs | None]:
    with fake:
        try:
            model, inputs = source.make(micro, sequence or source.sequence)
        except RuntimeError as error:
            if "overflowed" not in str(error):
                raise
            raise WherryError(
                f"{source.name}: no tensor can be as large as a micro-batch of {micro:,} samples of "
                f"{sequence or source.sequence:,} tokens makes it; give a smaller one"
            ) from error
        return without_values(fake, model), inputs


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
    """The same lists, tuples and mappings, of tensors without values on the CPU."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        fake = tensor if is_fake(tensor) else mode.from_tensor(tensor)
        return torch.empty_like(fake, device="cpu") if fake.is_meta else fake

    def any_of(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return one(part)
        # A mapping that torch does not know as one; some have attributes too, as what tokenizers return.
        same = copy.copy(part) if isinstance(part, UserDict) else dict(part)
        same.update({key: faked(mode, each) for key, each in part.items()})
        return same

    return tree_map_only((torch.Tensor, Mapping), any_of, value)


def loss_of(output: Any) -> torch.Tensor:
    """A loss for whatever a forward returned: its own if it has one, else the mean of its first float tensor."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    first = next((t for t in tensors_in(output) if t.is_floating_point()), None)
    if first is None:
        raise WherryError("the model's forward returned no tensor of floats, so there is no loss to go back from")
    return first if first.numel() == 1 else first.float().mean()
