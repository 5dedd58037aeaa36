"""Where everything rests in a fine-tuning, and how large a micro-batch is: by the plan, before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from wherry import config as configs
from wherry.config import Config
from wherry.errors import WherryError
from wherry.observe.log import logger
from wherry.observe.screen import table
from wherry.placement import place_name
from wherry.plan.choose import Choice, NothingFits, Tried, choose, free_keys, nearest_change
from wherry.plan.estimate import Estimate
from wherry.plan.forecaster import Forecaster
from wherry.plan.machines import Machine
from wherry.plan.model_source import Inputs, ModelSource
from wherry.plan.quantities import seconds, size
from wherry.sharding.quantized import flat_kind
from wherry.update.policy import update_policy

_SHOWN = 6
# Tokens below which a shorter sequence is no help.
_SHORTEST = 128
Adapt = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Placed:
    """The config with what was chosen, by key, and the estimate of it."""

    config: Config
    values: Mapping[str, Any]
    estimate: Estimate
    others: tuple[Tried, ...] = ()

    @property
    def activations(self) -> int:
        return sum(row.bytes for row in self.estimate.rows if row.category == "activations")


def place(
    config: Config, source: ModelSource, machine: Machine, ranks: int, sequence: int, disk: str | None,
    lighter: Mapping[str, ModelSource] | None = None,
) -> Placed:  # fmt: skip
    """What trains fastest of all that fits, with what the config says as it is.

    An error, with the nearest changes, where nothing fits; `lighter` ways to train are told of by their flags. A config
    that leaves nothing open is taken at its word.
    """
    forecaster = Forecaster(source, machine.holding(ranks), ranks, sequence)
    free = free_keys(config)
    try:
        choice = choose(config, forecaster.quick, ranks, free=free, disk=disk, confirm=forecaster.exact)
    except NothingFits as nothing:
        if not free & {"zero_optimization.stage", "train_micro_batch_size_per_gpu"}:
            logger.warning("%s; it is tried all the same, as the config leaves nothing open", nothing)
            return Placed(config, {}, nothing.smallest)
        raise WherryError("\n".join(_refusal(config, nothing, forecaster, disk, lighter or {}))) from None
    placed = configs.load(config, overrides=choice.values)
    return Placed(placed, choice.values, choice.estimate, _others(choice))


def _refusal(
    config: Config, nothing: NothingFits, forecaster: Forecaster, disk: str | None, lighter: Mapping[str, ModelSource]
) -> Iterator[str]:
    """What the smallest needs, and the changes that would help, the nearest first."""
    smallest, ranks, machine = nothing.smallest, forecaster.ranks, forecaster.machine
    yield f"finetune: {str(nothing).removeprefix('plan: ').partition(' Use ')[0]}"
    change = nearest_change(config, smallest, forecaster.quick, confirm=forecaster.exact)
    if change is not None:
        sets = " ".join(f"--set {key}={value}" for key, value in change.values.items())
        yield f"It would fit with {change.words}: {sets}"

    def fitting(source: ModelSource, sequence: int) -> Estimate | None:
        cast = Forecaster(source, machine, ranks, sequence)
        try:
            return choose(config, cast.quick, ranks, free=free_keys(config), disk=disk, confirm=cast.exact).estimate
        except WherryError:  # nothing fits, or this model cannot be had so
            return None

    for flag, source in lighter.items():
        if (found := fitting(source, smallest.sequence)) is not None:
            needs = " and ".join(f"{use.words} on the {use.place}" for use in found.uses if use.needed)
            yield f"It would fit with {flag}, which needs {needs}"
            return
    shorter = smallest.sequence // 2
    while change is None and shorter >= _SHORTEST:
        if fitting(forecaster.source, shorter) is not None:
            yield f"It would fit with --seq-length {shorter}"
            return
        shorter //= 2
    if disk is None and smallest.tightest.place == "host":
        yield "States may rest on disk too: --nvme-path FOLDER"


def _others(choice: Choice) -> tuple[Tried, ...]:
    """The fastest of every other placement that fits."""
    best: dict[tuple[Any, ...], Tried] = {}
    for each in choice.fits:
        found = each.estimate
        key = found.placement.name, found.recompute
        if key not in best or each.rate > best[key].rate:
            best[key] = each
    rest = [each for each in best.values() if each.values != choice.values]
    return tuple(sorted(rest, key=lambda each: -each.rate))


# What is said of it.


def as_table(placed: Placed) -> Table:
    """What was chosen, and what else would have fitted."""
    gpu = placed.estimate.machine.gpus > 0
    names = [use.place for use in placed.estimate.uses if use.needed or use.place != "disk"]
    sizes = (f">{name}" for name in names)
    found = table("weights", "optimizer state", ">rows", "activations", *sizes, ">a step")
    shown: set[tuple[str, ...]] = set()
    chosen = placed.config, placed.estimate
    for config, estimate in (chosen, *((each.config, each.estimate) for each in placed.others)):
        resting = {state: place_name(tier, gpu=gpu) for state, _, tier in estimate.placement.rows()}
        needed = {use.place: size(use.needed) for use in estimate.uses}
        cells = (
            resting["parameters"],
            resting["optimizer"],
            f"{estimate.micro_batch} x {estimate.accumulation}",
            _activations(config, estimate),
            *(needed.get(name, "") for name in names),
            seconds(estimate.seconds) if estimate.seconds else "",
        )
        if cells[:4] not in shown and len(shown) < _SHOWN:  # on a CPU placements differ in name alone
            found.add_row(*cells, style="dim" if shown else "bold")
        shown.add(cells[:4])
    return found


_UPDATED = {
    "at_step": "at the step",
    "before_use": "before their next use",
    "in_backward": "in the backward",
    "delayed": "a step late",
}


def order_of(placed: Placed) -> str:
    """In which order a step of it goes."""
    config, estimate = placed.config, placed.estimate
    policy = update_policy(config, config.placement(), shared=not estimate.machine.gpus)
    told = f"weights are updated {_UPDATED[policy.when]}"
    if config.wherry.accumulation == "layer_major" and estimate.accumulation > 1:
        told += f"; the {estimate.accumulation} micro-batches of a step go through a block together"
    return told


def _activations(config: Config, estimate: Estimate) -> str:
    words = ["recomputed" if estimate.recompute else "kept"]
    words += ["in tiles"] if config.wherry.sequence_tiles else []
    block = config.activation_checkpointing
    words += ["on the host"] if block.cpu_checkpointing or block.policy == "offload" else []
    return ", ".join(words)


# The model as a plan runs it.


class _WithReference(nn.Module):
    """A model and a frozen copy of it, which goes first over what the model learns from."""

    def __init__(self, model: nn.Module, reference: nn.Module) -> None:
        super().__init__()
        self.model, self.reference = model, reference.requires_grad_(False)

    def forward(self, **inputs: Any) -> Any:
        with torch.no_grad():
            self.reference(**inputs)
        return self.model(**inputs)


def source_for(base: ModelSource, adapt: Adapt | None, rows: int, *, with_reference: bool = False) -> ModelSource:
    """The model of a folder with its adapters; a row of the data is `rows` sequences, as of pairs."""

    def make(micro_batch: int, sequence: int) -> tuple[nn.Module, Inputs | None]:
        if adapt is None:
            model, inputs = base.make(micro_batch * rows, sequence)
            return (_WithReference(model, base.make(1, 1)[0]) if with_reference else model), inputs
        # PEFT moves what it makes, which tensors without memory do not take.
        with unset_fake_temporarily(), torch.device("meta"):
            model = adapt(base.make(1, 1)[0])
        model = _faked(_with_stand_ins(model))
        ids = torch.zeros(micro_batch * rows, sequence, dtype=torch.int64)
        return model, Inputs((), {"input_ids": ids, "labels": ids})

    return dataclasses.replace(base, make=make, part=None)


class _Coded(nn.Module):
    """A layer of bitsandbytes without values: what it holds, and what comes and goes while it computes."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        weight = layer.weight
        dtype, count = flat_kind(weight, None)
        codes = torch.empty(count * dtype.itemsize, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.bias, self.shape, self.in_8_bits = layer.bias, weight.shape, dtype is torch.int8
        scales = 4 * len(weight)
        if not self.in_8_bits:
            blocks = weight.numel() // weight.blocksize
            scales = blocks + blocks // 64 if weight.compress_statistics else 4 * blocks
        self.scales = nn.Buffer(torch.empty(scales, dtype=torch.uint8, device="meta"))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _ByCodes.apply(hidden, self.weight, self.shape, self.in_8_bits)
        return out if self.bias is None else out + self.bias


class _ByCodes(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, codes: torch.Tensor, shape: torch.Size, keeps: bool
    ) -> torch.Tensor:  # fmt: skip
        ctx.codes, ctx.shape = codes, shape
        ctx.hidden = hidden if keeps else None
        return nn.functional.linear(hidden, hidden.new_empty(shape))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] @ gradients[0].new_empty(ctx.shape), None, None, None


def _with_stand_ins(model: nn.Module) -> nn.Module:
    """Operations of bitsandbytes read values, which tensors of a plan lack."""
    for path, layer in list(model.named_modules()):
        weight = layer._parameters.get("weight")
        if weight is not None and flat_kind(weight, None) != (weight.dtype, weight.numel()):
            model.set_submodule(path, _Coded(layer))
    return model


def _faked(model: nn.Module) -> nn.Module:
    """On the default device, with tensors that are tied as before."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or isinstance(tensor, FakeTensor):
                    continue
                if tensor not in made:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                held[name] = made[tensor]  # type: ignore[assignment]
    return model
