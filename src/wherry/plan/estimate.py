"""Will it fit, what limits it, how fast will it go: counts, a config and a machine come to one answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from wherry.config import Config
from wherry.placement import Placement, Tier
from wherry.plan.counts import STATES
from wherry.plan.grid import ALONE, Grid
from wherry.plan.machine import Machine
from wherry.plan.memory import STATE_WORDS, Cost, states
from wherry.plan.roofline import StepTime


@dataclass(frozen=True)
class Row:
    """Bytes of one category on one tier, on one rank."""

    category: str
    tier: str
    bytes: int


@dataclass(frozen=True)
class Use:
    """What a place must hold, and what of it training may have: a GPU, a node's memory, a node's disk."""

    place: str
    needed: int
    usable: int

    @property
    def fits(self) -> bool:
        return self.needed <= self.usable

    @property
    def share(self) -> float:
        return self.needed / self.usable if self.usable else float("inf")


@dataclass(frozen=True)
class Estimate:
    """The answer for one model, config and machine. Bytes are of one rank, but for `uses`."""

    model: str
    parameters: int
    machine: Machine
    placement: Placement
    ranks: int
    micro_batch: int
    accumulation: int
    # Tokens of a sample; 1 for a model of something else than text.
    sequence: int
    precision: str
    optimizer: str
    recompute: bool
    rows: tuple[Row, ...]
    uses: tuple[Use, ...]
    time: StepTime | None
    # Why something is not counted, or will not run as it stands.
    notes: tuple[str, ...] = ()
    # How ranks share the model, and whose part of it this is.
    grid: Grid = ALONE

    @property
    def fits(self) -> bool:
        return all(use.fits for use in self.uses)

    @property
    def tightest(self) -> Use:
        """The place with the least room to spare, in proportion."""
        return max(self.uses, key=lambda use: use.share)

    @property
    def samples(self) -> int:
        """Samples of one update."""
        return self.micro_batch * self.accumulation * self.data_ranks

    @property
    def data_ranks(self) -> int:
        return self.grid.data_ranks(self.ranks)

    @property
    def seconds(self) -> float | None:
        return None if self.time is None else self.time.total

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.time is None else self.samples * self.sequence / self.time.total

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it: bytes, seconds, and rates a second."""
        time = None
        if self.time is not None:
            time = {
                "seconds": self.time.total,
                "terms": self.time.terms,
                "limit": self.time.limit,
                "tokens_per_second": self.tokens_per_second,
            }
        return {
            "model": self.model,
            "parameters": self.parameters,
            "machine": asdict(self.machine),
            "placement": self.placement.name,
            "ranks": self.ranks,
            "grid": asdict(self.grid),
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "sequence": self.sequence,
            "precision": self.precision,
            "optimizer": self.optimizer,
            "recompute": self.recompute,
            "rows": [asdict(row) for row in self.rows],
            "uses": [{**asdict(use), "fits": use.fits} for use in self.uses],
            "fits": self.fits,
            "step": time,
            "notes": list(self.notes),
        }


def answer(
    name: str,
    parameters: int,
    rows: Sequence[Row],
    time: StepTime | None,
    config: Config,
    machine: Machine,
    ranks: int,
    grid: Grid = ALONE,
    *,
    sequence: int = 1,
    notes: Sequence[str] = (),
) -> Estimate:
    """The answer for a model of so many parameters: `rows` are bytes of the part of it that `grid` gives a rank."""
    sizes = config.batch(grid.data_ranks(ranks))
    found = Estimate(
        model=name,
        parameters=parameters,
        machine=machine,
        placement=config.placement(),
        ranks=ranks,
        micro_batch=sizes.micro,
        accumulation=sizes.accumulation,
        sequence=sequence,
        precision=precision_of(config),
        optimizer=optimizer_of(config) or "adamw",
        recompute=config.activation_checkpointing.resolved_policy() in ("recompute", "auto"),
        rows=tuple(rows),
        uses=_uses(rows, machine, ranks, config.wherry.host_memory),
        time=time,
        notes=(*notes, *_notes(config, machine, ranks, grid, parameters // grid.size)),
        grid=grid,
    )
    return found


def answer_of_count(
    count: int,
    config: Config,
    machine: Machine,
    ranks: int,
    grid: Grid = ALONE,
    *,
    name: str | None = None,
    notes: Sequence[str] = ("only states are counted: activations, gathered weights and time need a model",),
) -> Estimate:
    """The answer where only the number of parameters is known: states, by the formulas of the literature."""
    rows = _state_rows(-(-count // grid.size), config, grid.data_ranks(ranks), gpu=machine.gpus > 0)
    name = name or f"{count:,} parameters"
    return answer(name, count, rows, None, config, machine, ranks, grid, notes=notes)


def _state_rows(count: int, config: Config, ranks: int, *, gpu: bool) -> list[Row]:
    """The states of so many parameters, of which a share may keep its optimizer state on the device."""
    placement, offload = config.placement(), config.zero_optimization.offload_optimizer
    optimizer, shards = optimizer_of(config), config.shard_ranks(ranks)
    # Of an optimizer that the host's kernels do not know, as many moments are counted as most have.
    counted = optimizer if optimizer in STATE_WORDS else "adamw"

    def effective(tier: Tier) -> Tier:
        return Tier.DEVICE if tier is Tier.HOST and not gpu else tier

    away = count if offload.device == "none" else round(offload.ratio * count)
    found: Counter[tuple[str, Tier]] = Counter()
    for numel, gradients, tier in (
        (away, placement.gradients.tier, placement.optimizer.tier),
        (count - away, Tier.DEVICE, Tier.DEVICE),
    ):
        if numel:
            on_host = effective(tier) is not Tier.DEVICE or not gpu
            split = on_host and precision_of(config) == "bf16" and config.wherry.master != "whole"
            cost = Cost.of(
                precision_of(config),
                counted,
                config.data_types.grad_accum_dtype,
                state_dtype=config.state_dtype(),
                split=split and optimizer in (None, *STATE_WORDS),
            )
            held = states(numel, placement, shards, cost)
            found["parameters", effective(placement.parameters.tier)] += held.parameters
            found["gradients", effective(gradients)] += held.gradients
            found["optimizer", effective(tier)] += held.optimizer
    return [Row(state, str(tier), nbytes) for (state, tier), nbytes in found.items()]


def _notes(config: Config, machine: Machine, ranks: int, grid: Grid, parameters: int) -> Iterator[str]:
    """Why something is counted otherwise than a step may have it, or will not run as it stands."""
    block = config.activation_checkpointing
    policy, away = block.resolved_policy(), block.cpu_checkpointing or block.nvme_path is not None
    if policy == "auto":
        yield (
            'activation_checkpointing.policy "auto" is counted as if every unit were recomputed: an engine measures '
            "its first steps, and recomputes no more than it has to; wherry plan --auto chooses between all and nothing"
        )
    if policy == "none" and away:
        yield "checkpoints that the model's own code asks for are counted on the device"
    if policy == "offload" and not (machine.gpus or block.nvme_path):
        yield "activations stay where they are, as the host, where they would be put, is the device"
    accumulation = config.batch(grid.data_ranks(ranks)).accumulation
    if accumulation < grid.pipe:
        yield (
            f"a pipeline of {grid.pipe} stages is full with {grid.pipe} micro-batches or more: raise "
            "gradient_accumulation_steps"
        )
    if machine.gpus and precision_of(config) == "bf16" != machine.half:
        half = machine.half
        yield f"these GPUs compute bf16 slowly, and the time is that of {half}: use {half}, or fp32"
    if accumulation > 1 and config.wherry.accumulation == "layer_major":
        yield (
            'wherry.accumulation "layer_major" is counted as engine.train_batch runs it; with backward and step of '
            "one's own a micro-batch runs after another, and a step sends more and keeps less"
        )
    together = machine.ranks_per_node(ranks)
    if together > 1 and 4 * parameters * together > machine.capacity(Tier.HOST, ranks):
        yield "build the model inside wherry.Init: whole on every rank it would not fit in the host's memory"


def _uses(rows: Sequence[Row], machine: Machine, ranks: int, limit: int | None) -> tuple[Use, ...]:
    """The rows by the place that holds them. Without GPUs the host is the device.

    `limit` is what the config allows the states of all a node's ranks to need of its memory; by default they are all
    that is there.
    """

    def on(*tiers: Tier, categories: Sequence[str] | None = None) -> int:
        places = set(map(str, tiers))
        return sum(r.bytes for r in rows if r.tier in places and (categories is None or r.category in categories))

    together = machine.ranks_per_node(ranks)
    host = (Tier.HOST,) if machine.gpus else (Tier.DEVICE, Tier.HOST)
    usable = machine.capacity(Tier.HOST, ranks)
    if limit is not None:
        usable = min(usable, limit + together * (on(*host) - on(*host, categories=STATES)))
    found = []
    if machine.gpus:
        found.append(Use("GPU", on(Tier.DEVICE), machine.capacity(Tier.DEVICE, ranks)))
    found.append(Use("host", together * on(*host), usable))
    if on(Tier.DISK):
        found.append(Use("disk", together * on(Tier.DISK), machine.capacity(Tier.DISK, ranks)))
    return tuple(found)


def precision_of(config: Config) -> str:
    return config.working_precision() or "fp32"


def optimizer_of(config: Config) -> str | None:
    """The optimizer of a config, as `STATE_WORDS` knows it."""
    if config.optimizer is None or config.optimizer.type is None:
        return None
    name = config.optimizer.type.lower()
    if name == "sgd" and (config.optimizer.params or {}).get("momentum"):
        return "sgd-momentum"
    return name
