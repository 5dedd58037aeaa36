"""Will it fit, what limits it, how fast will it go: a profile, a config and a machine come to one answer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from wherry.config import Config
from wherry.placement import Placement, Tier
from wherry.plan.grid import ALONE, Grid
from wherry.plan.machine import Machine
from wherry.plan.memory import States
from wherry.plan.peaks import Setting, buffers, optimizer_of, peak, precision_of
from wherry.plan.profile import Profile
from wherry.plan.roofline import StepTime, step_time


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


@dataclass(frozen=True)
class Subject:
    """The model of an estimate: its name, its tokens a sample, and its parameters where a profile is of a part."""

    name: str
    sequence: int = 1
    parameters: int | None = None


def estimate(
    subject: Subject, profile: Profile, config: Config, machine: Machine, ranks: int, grid: Grid = ALONE
) -> Estimate:
    """The answer for a profile of the config's own micro-batch: of the part of the model that `grid` gives a rank."""
    setting = Setting.of(config, grid.data_ranks(ranks), gpu=machine.gpus > 0, grid=grid)
    rows = tuple(_rows(profile, setting))
    notes = [*config.beyond()]
    if setting.prefetch is None and setting.placement.parameters.partitioned:
        notes.append(
            'stage3_prefetch_bucket_size is "auto": gathered weights are counted at the furthest look ahead that the '
            "engine may come to"
        )
    if setting.accumulation < grid.pipe:
        notes.append(
            f"a pipeline of {grid.pipe} stages is full with {grid.pipe} micro-batches or more: raise "
            "gradient_accumulation_steps"
        )
    if not profile.moments:
        notes.append("activations and time are not counted: the model's inputs are not known")
    building = 4 * profile.parameters * machine.ranks_per_node(ranks)
    if building > machine.capacity(Tier.HOST, ranks) and machine.ranks_per_node(ranks) > 1:
        notes.append("build the model inside wherry.Init: whole on every rank it would not fit in the host's memory")
    return Estimate(
        model=subject.name,
        parameters=subject.parameters or profile.parameters,
        machine=machine,
        placement=setting.placement,
        ranks=ranks,
        micro_batch=config.batch(setting.ranks).micro,
        accumulation=setting.accumulation,
        sequence=subject.sequence,
        precision=precision_of(config),
        optimizer=optimizer_of(config) or "adamw",
        recompute=config.activation_checkpointing.resolved_policy() != "none",
        rows=rows,
        uses=uses(rows, machine, ranks),
        time=step_time(profile, setting, machine) if profile.moments else None,
        notes=tuple(notes),
        grid=grid,
    )


def estimate_count(
    subject: Subject, states: States, config: Config, machine: Machine, ranks: int, grid: Grid = ALONE
) -> Estimate:
    """The answer where only the number of parameters is known: states, by the formulas of the literature."""
    setting = Setting.of(config, grid.data_ranks(ranks), gpu=machine.gpus > 0, grid=grid)
    rows = tuple(_state_rows(states, setting.placement))
    return Estimate(
        model=subject.name,
        parameters=int(subject.name.replace(",", "").split()[0]),
        machine=machine,
        placement=setting.placement,
        ranks=ranks,
        micro_batch=config.batch(setting.ranks).micro,
        accumulation=setting.accumulation,
        sequence=subject.sequence,
        precision=precision_of(config),
        optimizer=optimizer_of(config) or "adamw",
        recompute=False,
        rows=rows,
        uses=uses(rows, machine, ranks),
        time=None,
        notes=("only states are counted: activations, gathered weights and time need a model",),
        grid=grid,
    )


def _state_rows(states: States, placement: Placement) -> list[Row]:
    return [
        Row("parameters", str(placement.parameters.tier), states.parameters),
        Row("gradients", str(placement.gradients.tier), states.gradients),
        Row("optimizer", str(placement.optimizer.tier), states.optimizer),
    ]


def _rows(profile: Profile, setting: Setting) -> list[Row]:
    highest = peak(profile, setting)
    return [
        *(Row(category, str(tier), nbytes) for category, tier, nbytes in setting.rows(profile)),
        Row("gathered", "device", highest.gathered),
        Row("activations", "device", highest.activations),
        Row("buffers", "device", buffers(profile, setting) + highest.merged + profile.buffers + profile.inputs),
    ]


def uses(rows: tuple[Row, ...], machine: Machine, ranks: int) -> tuple[Use, ...]:
    """The rows by the place that holds them. Without GPUs the host is the device."""

    def on(*tiers: Tier) -> int:
        return sum(row.bytes for row in rows if row.tier in map(str, tiers))

    together = machine.ranks_per_node(ranks)
    found = []
    if machine.gpus:
        found.append(Use("GPU", on(Tier.DEVICE), machine.capacity(Tier.DEVICE, ranks)))
        found.append(Use("host", together * on(Tier.HOST), machine.capacity(Tier.HOST, ranks)))
    else:
        found.append(Use("host", together * on(Tier.DEVICE, Tier.HOST), machine.capacity(Tier.HOST, ranks)))
    if on(Tier.DISK):
        found.append(Use("disk", together * on(Tier.DISK), machine.capacity(Tier.DISK, ranks)))
    return tuple(found)
