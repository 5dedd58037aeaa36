"""Will it fit, what limits it, how fast will it go: counts, a config and a machine come to one answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from wherry.config import Config
from wherry.placement import Placement, Tier
from wherry.plan.counts import STATES
from wherry.plan.formulas import optimizer_of, precision_of, states_between_steps
from wherry.plan.grid import ALONE, Grid
from wherry.plan.machines import Machine
from wherry.plan.quantities import size
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
    usable: int
    # Bytes by category.
    parts: Mapping[str, int]

    @property
    def needed(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.needed <= self.usable

    @property
    def share(self) -> float:
        return self.needed / self.usable if self.usable else float("inf")

    @property
    def words(self) -> str:
        return f"{size(self.needed, self.usable)} of {size(self.usable, self.needed)} usable"


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
    # Ranks that share the sequence of the same samples.
    together: int = 1

    @property
    def fits(self) -> bool:
        return all(use.fits for use in self.uses)

    @property
    def crowded(self) -> list[str]:
        """The places that must hold more than they can."""
        return [use.place for use in self.uses if not use.fits]

    @property
    def tightest(self) -> Use:
        """The place with the least room to spare, in proportion."""
        return max(self.uses, key=lambda use: use.share)

    @property
    def samples(self) -> int:
        """Samples of one update."""
        return self.micro_batch * self.accumulation * self.data_ranks // self.together

    @property
    def data_ranks(self) -> int:
        return self.grid.data_ranks(self.ranks)

    @property
    def seconds(self) -> float | None:
        return None if self.time is None else self.time.total

    @property
    def samples_per_second(self) -> float:
        """0 where no time is known."""
        return 0.0 if self.time is None else self.samples / self.time.total

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.time is None else self.samples_per_second * self.sequence

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it: bytes, seconds, and rates a second."""
        told = asdict(self)
        time = told.pop("time")
        if self.time is not None:
            time = {
                "seconds": self.time.total,
                "terms": self.time.terms,
                "limit": self.time.limit,
                "tokens_per_second": self.tokens_per_second,
            }
        uses = [{"place": u.place, "needed": u.needed, "usable": u.usable, "fits": u.fits} for u in self.uses]
        told |= {"placement": self.placement.name, "rows": list(told["rows"]), "uses": uses, "fits": self.fits}
        return told | {"step": time, "notes": list(self.notes)}


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
    return Estimate(
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
        together=config.wherry.context_parallel,
    )


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
    states = states_between_steps(-(-count // grid.size), config, grid.data_ranks(ranks), gpu=machine.gpus > 0)
    rows = [Row(state, tier, nbytes) for (state, tier), nbytes in states.items()]
    name = name or f"{count:,} parameters"
    return answer(name, count, rows, None, config, machine, ranks, grid, notes=notes)


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

    def on(*tiers: Tier, ranks: int) -> dict[str, int]:
        found: Counter[str] = Counter()
        for row in rows:
            if row.tier in map(str, tiers) and row.bytes:
                found[row.category] += ranks * row.bytes
        return dict(found)

    together = machine.ranks_per_node(ranks)
    host = on(*((Tier.HOST,) if machine.gpus else (Tier.DEVICE, Tier.HOST)), ranks=together)
    usable = machine.capacity(Tier.HOST, ranks)
    if limit is not None:
        usable = min(usable, limit + sum(nbytes for category, nbytes in host.items() if category not in STATES))
    found = []
    if machine.gpus:
        found.append(Use("GPU", machine.capacity(Tier.DEVICE, ranks), on(Tier.DEVICE, ranks=1)))
    found.append(Use("host", usable, host))
    if disk := on(Tier.DISK, ranks=together):
        found.append(Use("disk", machine.capacity(Tier.DISK, ranks), disk))
    return tuple(found)
