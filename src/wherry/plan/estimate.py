"""Will it fit, what limits it, how fast will it go: a profile, a config and a machine come to one answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from wherry.config import Config
from wherry.placement import Placement, Tier
from wherry.plan.grid import ALONE, Grid
from wherry.plan.machine import Machine
from wherry.plan.memory import states
from wherry.plan.peaks import buffers, peak
from wherry.plan.profile import Profile
from wherry.plan.quantities import seconds
from wherry.plan.roofline import StepTime, step_time
from wherry.plan.setting import Setting, optimizer_of, precision_of

# Of what is free, micro-batches that run together may take as much: what `wherry.activations.build` leaves them.
SHARE_OF_FREE = 0.8


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
    subject: Subject,
    profile: Profile,
    config: Config,
    machine: Machine,
    ranks: int,
    grid: Grid = ALONE,
    *,
    searching: bool = False,
) -> Estimate:
    """The answer for a profile of the config's own micro-batch: of the part of the model that `grid` gives a rank.

    A search through many configs leaves out what another order of a window would come to.
    """
    setting = Setting.of(config, grid.data_ranks(ranks), gpu=machine.gpus > 0, grid=grid)
    rows = tuple(_rows(profile, setting))
    notes = [*_of_activations(config, machine)]
    if config.activation_checkpointing.policy == "auto":
        notes.append(
            'activation_checkpointing.policy "auto" is counted as if every unit were recomputed: an engine measures '
            "its first steps, and recomputes no more than it has to; wherry plan --auto chooses between all and nothing"
        )
    if setting.accumulation < grid.pipe:
        notes.append(
            f"a pipeline of {grid.pipe} stages is full with {grid.pipe} micro-batches or more: raise "
            "gradient_accumulation_steps"
        )
    if machine.gpus and precision_of(config) == "bf16" != machine.half:
        half = machine.half
        notes.append(f"these GPUs compute bf16 slowly, and the time is that of {half}: use {half}, or fp32")
    if not profile.moments:
        notes.append("activations and time are not counted: the model's inputs are not known")
    limit = config.wherry.host_memory
    building = 4 * profile.parameters * machine.ranks_per_node(ranks)
    if building > machine.capacity(Tier.HOST, ranks) and machine.ranks_per_node(ranks) > 1:
        notes.append("build the model inside wherry.Init: whole on every rank it would not fit in the host's memory")
    uses = _uses(rows, machine, ranks, limit, setting.host_needs(profile) if limit is not None else None)
    if not searching:
        notes += _order_notes(profile, setting, config, machine, uses[0].usable - uses[0].needed, ranks)
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
        recompute=config.activation_checkpointing.resolved_policy() in ("recompute", "auto"),
        rows=rows,
        uses=uses,
        time=step_time(profile, setting, machine) if profile.moments else None,
        notes=tuple(notes),
        grid=grid,
    )


def _order_notes(
    profile: Profile, setting: Setting, config: Config, machine: Machine, spare: int, ranks: int
) -> Iterator[str]:
    """In which order the micro-batches of a window are counted, where another one may run.

    `spare` bytes are left of where activations are: of a GPU, or of a node's memory for all its ranks.
    """
    if setting.together > 1:
        yield (
            'wherry.accumulation "layer_major" is counted as engine.train_batch runs it; with backward and step of '
            "one's own a micro-batch runs after another, and a step sends more and keeps less"
        )
    elif config.wherry.accumulation == "auto" and setting.accumulation > 1 and setting.grid.pipe == 1 and profile.kept:
        room = spare if machine.gpus else spare // machine.ranks_per_node(ranks)
        fitting = 1 + max(0, int(SHARE_OF_FREE * room)) // profile.kept
        groups = -(-setting.accumulation // fitting)
        size = -(-setting.accumulation // groups)
        if size > 1 and setting.sends_each(profile):
            took = step_time(profile, replace(setting, together=size), machine).total
            yield (
                f"micro-batches are counted one after another; engine.train_batch runs {size} together where there is "
                f"as much room as here, and a step then takes about {seconds(took)}"
            )


def estimate_count(count: int, config: Config, machine: Machine, ranks: int, grid: Grid = ALONE) -> Estimate:
    """The answer where only the number of parameters is known: states, by the formulas of the literature."""
    setting = Setting.of(config, grid.data_ranks(ranks), gpu=machine.gpus > 0, grid=grid)
    rows = tuple(_state_rows(-(-count // grid.size), setting))
    return Estimate(
        model=f"{count:,} parameters",
        parameters=count,
        machine=machine,
        placement=setting.placement,
        ranks=ranks,
        micro_batch=config.batch(setting.ranks).micro,
        accumulation=setting.accumulation,
        sequence=1,
        precision=precision_of(config),
        optimizer=optimizer_of(config) or "adamw",
        recompute=False,
        rows=rows,
        uses=_uses(rows, machine, ranks, config.wherry.host_memory),
        time=None,
        notes=("only states are counted: activations, gathered weights and time need a model",),
        grid=grid,
    )


def _state_rows(count: int, setting: Setting) -> list[Row]:
    """The states of so many parameters, of which a share may keep its optimizer state on the device."""
    placement = setting.placement
    staying = round(setting.stays * count)
    found: Counter[tuple[str, Tier]] = Counter()
    for numel, resting, cost, stays in (
        (count - staying, setting.resting, setting.cost, False),
        (staying, setting.staying, setting.staying_cost, True),
    ):
        if not numel:
            continue
        held = states(numel, placement, setting.shards, cost)
        owned = -(-numel // setting.shards) if placement.optimizer.partitioned else numel
        record = cost.record(owned, apart=resting.apart(at_home=resting.homes))
        found["parameters", placement.parameters.tier] += held.parameters
        found["gradients", Tier.DEVICE if stays else placement.gradients.tier] += held.gradients
        found["optimizer", Tier.DEVICE if stays else placement.optimizer.tier] += record
    return [Row(state, str(tier), nbytes) for (state, tier), nbytes in found.items()]


def _rows(profile: Profile, setting: Setting) -> list[Row]:
    highest = peak(profile, setting)
    times = max(setting.in_flight, setting.together)
    away = (("host", times * profile.on_host), ("disk", times * profile.on_disk))
    states = {(category, tier): nbytes for category, tier, nbytes in setting.rows(profile)}
    if setting.loose:
        states["gradients", Tier.DEVICE] = highest.loose
    return [
        *(Row(category, str(tier), nbytes) for (category, tier), nbytes in states.items()),
        Row("gathered", "device", highest.gathered),
        Row("activations", "device", highest.activations),
        *(Row("activations", tier, nbytes) for tier, nbytes in away if nbytes),
        Row("buffers", "device", buffers(profile, setting) + highest.merged + profile.buffers + profile.inputs),
    ]


def _of_activations(config: Config, machine: Machine) -> Iterator[str]:
    """How activations are counted where a step may have them otherwise."""
    block = config.activation_checkpointing
    policy, away = block.resolved_policy(), block.cpu_checkpointing or block.nvme_path is not None
    if policy == "auto":
        yield "activations are counted as in a first step, which recomputes all of them: later ones keep what is free"
    if policy == "none" and away:
        yield "checkpoints that the model's own code asks for are counted on the device"
    if policy == "offload" and not (machine.gpus or block.nvme_path):
        yield "activations stay where they are, as the host, where they would be put, is the device"


def _uses(
    rows: tuple[Row, ...], machine: Machine, ranks: int, limit: int | None, states: int | None = None
) -> tuple[Use, ...]:
    """The rows by the place that holds them. Without GPUs the host is the device.

    `limit` is what the config allows the `states` of all a node's ranks to need of its memory; by default they are all
    that is there.
    """

    def on(*tiers: Tier) -> int:
        return sum(row.bytes for row in rows if row.tier in map(str, tiers))

    together = machine.ranks_per_node(ranks)
    on_host = on(Tier.HOST) if machine.gpus else on(Tier.DEVICE, Tier.HOST)
    usable = machine.capacity(Tier.HOST, ranks)
    if limit is not None:
        others = 0 if states is None else on_host - states
        usable = min(usable, limit + together * others)
    found = []
    if machine.gpus:
        found.append(Use("GPU", on(Tier.DEVICE), machine.capacity(Tier.DEVICE, ranks)))
    found.append(Use("host", together * on_host, usable))
    if on(Tier.DISK):
        found.append(Use("disk", together * on(Tier.DISK), machine.capacity(Tier.DISK, ranks)))
    return tuple(found)
