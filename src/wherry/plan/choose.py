"""Which config for this model and this machine: the search behind `--auto`, and the nearest change to a config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wherry import config as configs
from wherry.config import Config
from wherry.errors import ConfigError, WherryError
from wherry.plan.estimate import Estimate, optimizer_of
from wherry.plan.memory import STATE_WORDS

STAGE = "zero_optimization.stage"
OPTIMIZER = "zero_optimization.offload_optimizer.device"
OPTIMIZER_PATH = "zero_optimization.offload_optimizer.nvme_path"
RATIO = "zero_optimization.offload_optimizer.ratio"
PARAM = "zero_optimization.offload_param.device"
PARAM_PATH = "zero_optimization.offload_param.nvme_path"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
TRAIN = "train_batch_size"
RECOMPUTE = "activation_checkpointing.policy"
ORDER = "wherry.accumulation"

# What may be left to the planner in a config, as "auto".
CHOSEN = (STAGE, OPTIMIZER, PARAM, RATIO, MICRO, ACCUMULATION, TRAIN)

LARGEST_MICRO = 1024
# Shares of the optimizer state to offload, beside all of it; they are tried of so many configs, the fastest.
RATIOS = (0.9, 0.75, 0.5, 0.25)
FASTEST = 3
# A faster change is named only if it is faster by this factor: estimates are not finer.
WORTH = 1.05
CLEARLY = 1.02

Answer = Callable[[Config], Estimate]


@dataclass(frozen=True)
class Candidate:
    """Values for some keys, by dotted path."""

    values: dict[str, Any]
    words: str = ""


@dataclass(frozen=True)
class Choice:
    """What was chosen, its estimate, and why, by key."""

    values: dict[str, Any]
    estimate: Estimate
    reasons: dict[str, str] = field(default_factory=dict)
    # How many configs were looked at, and how many of them fit.
    tried: int = 0
    fitting: int = 0


def with_values(config: Config, values: Mapping[str, Any]) -> Config | None:
    """The config with these values, or None if it contradicts itself."""
    try:
        return configs.load(config, overrides=dict(values)) if values else config
    except ConfigError:
        return None


def free_keys(config: Config) -> frozenset[str]:
    """The keys that a choice may set: those that the config says nothing of, or "auto".

    Activations are left open by "auto" too, although an engine measures for itself what becomes of them then.
    """
    zero = config.zero_optimization
    places: dict[str, tuple[Any, str]] = {
        STAGE: (zero, "stage"),
        OPTIMIZER: (zero.offload_optimizer, "device"),
        PARAM: (zero.offload_param, "device"),
        RATIO: (zero.offload_optimizer, "ratio"),
        MICRO: (config, MICRO),
        ACCUMULATION: (config, ACCUMULATION),
        TRAIN: (config, TRAIN),
    }
    free = {key for key, (given, name) in places.items() if name not in given.model_fields_set}
    block = config.activation_checkpointing
    if not block.model_fields_set or block.policy == "auto":
        free.add(RECOMPUTE)
    if "accumulation" not in config.wherry.model_fields_set or config.wherry.accumulation == "auto":
        free.add(ORDER)
    return frozenset(free)


@dataclass(frozen=True)
class _Tried:
    candidate: Candidate
    config: Config
    estimate: Estimate

    @property
    def rate(self) -> float:
        return _rate(self.estimate)


def choose(
    config: Config,
    answer: Answer,
    ranks: int,
    *,
    free: frozenset[str],
    disk: str | None = None,
    confirm: Answer | None = None,
) -> Choice:
    """The config that fits and trains the most samples a second, with the values of `free` keys chosen.

    `disk` is the folder for what may rest on disk and has none in the config; without one it does not. `confirm`
    answers once more, exactly, for what is about to be chosen. Raises if nothing fits.
    """
    fitting: list[_Tried] = []
    crowded: list[_Tried] = []  # what would fit if the host had less to hold
    smallest: Estimate | None = None
    tried = 0
    for group in _candidates(config, ranks, free, disk):
        for candidate, changed in group:
            found = answer(changed)
            tried += 1
            if smallest is None or found.tightest.share < smallest.tightest.share:
                smallest = found
            if found.fits:
                fitting.append(_Tried(candidate, changed, found))
                continue
            if found.machine.gpus and all(use.fits for use in found.uses if use.place != "host"):
                crowded.append(_Tried(candidate, changed, found))
            if candidate.values.get(ACCUMULATION, 1) == 1:
                break  # a larger micro-batch needs more still; less only where it saves an accumulation
    for candidate, changed in [*_shares(fitting, free), *_shares(crowded, free), *_together(fitting, free)]:
        found = answer(changed)
        tried += 1
        if found.fits:
            fitting.append(_Tried(candidate, changed, found))
    count = len(fitting)
    while fitting:
        best = fitting[0]
        for other in fitting:
            # What came first is simpler: something else must be clearly faster.
            if other.rate > best.rate * CLEARLY:
                best = other
        exact = confirm(best.config) if confirm is not None else best.estimate
        if exact.fits:
            whole = {RATIO: 1.0} if RATIO in free and RATIO in config.auto else {}
            told, values = reasons(best.candidate, exact), whole | best.candidate.values
            return Choice(values, exact, told, tried=tried, fitting=count)
        fitting.remove(best)
    raise _nothing_fits(smallest)


def _candidates(
    config: Config, ranks: int, free: frozenset[str], disk: str | None
) -> Iterator[Iterator[tuple[Candidate, Config]]]:
    """In groups that are the same but for the micro-batch, the smallest first."""
    recomputes: tuple[dict[str, Any], ...] = ({},)
    if RECOMPUTE in free:
        kept = {RECOMPUTE: "none"} if config.activation_checkpointing.policy == "auto" else {}
        recomputes = (kept, {RECOMPUTE: "recompute"})
    for placed in _placements(config, ranks, free, disk):
        for recompute in recomputes:
            yield _of_each_size(config, ranks, free, placed | recompute)


def _shares(found: Sequence[_Tried], free: frozenset[str]) -> list[tuple[Candidate, Config]]:
    """The fastest of these configs that offload the optimizer state, with a share of it left on the device."""
    if RATIO not in free:
        return []
    away = [tried for tried in found if tried.config.zero_optimization.offload_optimizer.device != "none"]
    shares = []
    for tried in sorted(away, key=lambda tried: tried.rate)[-FASTEST:]:
        if tried.config.wherry.update_policy == "delayed":
            continue  # it is of all the state
        for ratio in RATIOS:
            values = tried.candidate.values | {RATIO: ratio}
            changed = with_values(tried.config, {RATIO: ratio})
            if changed is not None:
                shares.append((Candidate(values), changed))
    return shares


def _together(found: Sequence[_Tried], free: frozenset[str]) -> list[tuple[Candidate, Config]]:
    """The fastest of these configs that accumulate gradients, with all micro-batches through a unit before the next."""
    windows = [tried for tried in found if _may_run_together(tried.estimate)]
    together = []
    for tried in sorted(windows, key=lambda tried: tried.rate)[-FASTEST:] if ORDER in free else ():
        changed = with_values(tried.config, {ORDER: "layer_major"})
        if changed is not None:
            together.append((Candidate(tried.candidate.values | {ORDER: "layer_major"}), changed))
    return together


def _may_run_together(found: Estimate) -> bool:
    """Whether the micro-batches of a window can go through a unit together: torch before 2.10 has no sums in fp32."""
    import torch

    sums = found.precision == "fp32" or hasattr(torch.Tensor, "grad_dtype")
    return found.accumulation > 1 and found.grid.pipe == 1 and sums


def _of_each_size(
    config: Config, ranks: int, free: frozenset[str], given: dict[str, Any]
) -> Iterator[tuple[Candidate, Config]]:
    for micro in _micro_batches(config, free):
        values = given | _batch(config, ranks, micro, free)
        changed = with_values(config, values)
        if changed is not None and _batch_holds(changed, ranks):
            yield Candidate(values), changed


def _batch_holds(config: Config, ranks: int) -> bool:
    try:
        config.batch(ranks)
    except ConfigError:
        return False
    return True


def _nothing_fits(smallest: Estimate | None) -> WherryError:
    if smallest is None:
        return WherryError("plan: no placement is left to choose from; leave the stage or the offload devices free")
    use = smallest.tightest
    return WherryError(
        f"plan: nothing fits. The smallest is {smallest.placement.name} with a micro-batch of {smallest.micro_batch}: "
        f"it needs {use.needed / 1e9:.1f} GB of {use.usable / 1e9:.1f} GB usable on the {use.place}. Use more ranks, "
        "more memory, a shorter sequence, or allow the disk (--disk-path)"
    )


def _placements(config: Config, ranks: int, free: frozenset[str], disk: str | None) -> Iterator[dict[str, Any]]:
    """Values for stage and devices, the simplest first."""
    zero = config.zero_optimization
    stages = (0, 1, 2, 3) if STAGE in free else (zero.stage,)
    folders = {OPTIMIZER: zero.offload_optimizer.nvme_path or disk, PARAM: zero.offload_param.nvme_path or disk}
    if optimizer_of(config) not in (None, *STATE_WORDS):
        folders[OPTIMIZER] = None  # state on disk is for optimizers that the host's kernels know
    devices = {key: ("none", "cpu", *(("nvme",) if folder else ())) for key, folder in folders.items()}
    for optimizer in devices[OPTIMIZER] if OPTIMIZER in free else (zero.offload_optimizer.device,):
        for param in devices[PARAM] if PARAM in free else (zero.offload_param.device,):
            for stage in stages:
                # One rank partitions nothing: a stage is only a name then, which offloaded parameters need.
                if STAGE in free and ranks == 1 and stage != (3 if param != "none" else 0):
                    continue
                if param != "none" and stage != 3:
                    continue
                values: dict[str, Any] = {STAGE: stage} if STAGE in free else {}
                if OPTIMIZER in free:
                    values[OPTIMIZER] = optimizer
                    if optimizer == "nvme":
                        values[OPTIMIZER_PATH] = folders[OPTIMIZER]
                if PARAM in free:
                    values[PARAM] = param
                    if param == "nvme":
                        values[PARAM_PATH] = folders[PARAM]
                yield values


def _micro_batches(config: Config, free: frozenset[str]) -> Iterator[int | None]:
    if MICRO not in free:
        yield None
        return
    micro = 1
    while micro <= LARGEST_MICRO:
        yield micro
        micro *= 2


def _batch(config: Config, ranks: int, micro: int | None, free: frozenset[str]) -> dict[str, Any]:
    """The micro-batch, and the accumulation that keeps the samples of an update as they were asked for."""
    if micro is None:
        return {}
    if config.train_batch_size is None or TRAIN in free:
        accumulation = 1 if ACCUMULATION in free or config.gradient_accumulation_steps is None else None
        return {MICRO: micro} | ({ACCUMULATION: accumulation} if accumulation else {})
    if ACCUMULATION not in free and config.gradient_accumulation_steps is not None:
        return {MICRO: micro}
    return {MICRO: micro, ACCUMULATION: max(1, config.train_batch_size // (micro * ranks))}


def reasons(candidate: Candidate, found: Estimate) -> dict[str, str]:
    """Why each value was chosen, in a line."""
    told = {}
    use = found.tightest
    room = f"{use.needed / 1e9:.1f} GB of {use.usable / 1e9:.1f} GB usable on the {use.place}"
    limit = f"limited by {found.time.limited_by}" if found.time else "not timed"
    for key, value in candidate.values.items():
        if key == STAGE:
            told[key] = _why_stage(value, found)
        elif key == OPTIMIZER:
            where = _where(value, found)
            told[key] = f"optimizer state rests {where}: {_bytes_of(found, 'optimizer')} a rank"
        elif key == RATIO:
            told[key] = f"the other {1 - value:.0%} of the state is updated on the device, at the same time"
        elif key == PARAM:
            where = _where(value, found)
            told[key] = f"weights rest {where}: {_bytes_of(found, 'parameters')} a rank"
        elif key == RECOMPUTE:
            how = "units compute their activations again in" if value == "recompute" else "activations are kept for"
            told[key] = f"{how} backward: {_bytes_of(found, 'activations')} at most"
        elif key == MICRO:
            told[key] = f"{limit}; {room}"
        elif key == ORDER:
            told[key] = "engine.train_batch gathers and reduces each unit once for all micro-batches of a window"
        elif key == ACCUMULATION:
            told[key] = f"{found.samples} samples in an update on {found.ranks} rank{'s' * (found.ranks > 1)}"
    return told


def _where(device: str, found: Estimate) -> str:
    if device == "none" and found.machine.gpus:
        return "on the device"
    return "on disk" if device == "nvme" else "in host memory"


def _bytes_of(found: Estimate, category: str) -> str:
    return f"{sum(row.bytes for row in found.rows if row.category == category) / 1e9:.2f} GB"


def _why_stage(stage: int, found: Estimate) -> str:
    if found.data_ranks == 1:
        return "one rank has nothing to share out" + (", but offloaded weights need it" if stage == 3 else "")
    return (
        "everything fits whole, and gathering would cost time",
        "optimizer state is shared out over the ranks; gradients and weights fit whole",
        "optimizer state and gradients are shared out over the ranks; weights fit whole",
        "weights, gradients and optimizer state are shared out over the ranks",
    )[stage]


# The nearest change.


@dataclass(frozen=True)
class Change:
    """A change to a config in words, and what it would come to."""

    words: str
    values: dict[str, Any]
    estimate: Estimate


def nearest_change(config: Config, now: Estimate, answer: Answer, confirm: Answer | None = None) -> Change | None:
    """The smallest change that would make `now` fit, or, if it fits, the one that would make it faster.

    `confirm` answers once more, exactly, for what is about to be named; what does not hold then is passed over.
    """
    single = list(_changes(config, now))
    if now.fits:
        found = [change for change in _answered(config, now.data_ranks, single, answer) if change.estimate.fits]
        faster = [change for change in found if _rate(change.estimate) > WORTH * _rate(now)]
        return _confirmed(config, faster, confirm, more_than=WORTH * _rate(now))
    pairs = [
        Candidate(a.values | b.values, f"{a.words}, and {b.words}")
        for i, a in enumerate(single)
        for b in single[i + 1 :]
        if not a.values.keys() & b.values.keys()
    ]
    for group in (single, pairs):
        found = [change for change in _answered(config, now.data_ranks, group, answer) if change.estimate.fits]
        if change := _confirmed(config, found, confirm):
            return change
    return None


def _confirmed(
    config: Config, found: Sequence[Change], confirm: Answer | None, *, more_than: float = -1.0
) -> Change | None:
    """The fastest of these that fits, and trains so many samples a second, by the exact answer as well."""
    for change in sorted(found, key=lambda change: _rate(change.estimate), reverse=True):
        if confirm is None:
            return change
        changed = with_values(config, change.values)
        assert changed is not None, change.values
        exact = confirm(changed)
        if exact.fits and _rate(exact) > more_than:
            return replace(change, estimate=exact)
    return None


def _rate(estimate: Estimate) -> float:
    return estimate.samples / estimate.seconds if estimate.seconds else 0.0


def _answered(config: Config, ranks: int, candidates: list[Candidate], answer: Answer) -> Iterator[Change]:
    for candidate in candidates:
        changed = with_values(config, candidate.values)
        if changed is not None and _batch_holds(changed, ranks):
            found = answer(changed)
            yield Change(candidate.words, candidate.values, found)


def _changes(config: Config, now: Estimate) -> Iterator[Candidate]:
    """Single changes, each as a person would make it."""
    zero = config.zero_optimization
    if now.data_ranks > 1:
        for stage in range(4):
            if stage != zero.stage:
                yield Candidate({STAGE: stage}, f'"stage": {stage}')
    for key, device in ((OPTIMIZER, zero.offload_optimizer.device), (PARAM, zero.offload_param.device)):
        for other in ("none", "cpu"):
            if other != device:
                values: dict[str, Any] = {key: other}
                words = f'"{key.split(".")[1]}": {{"device": "{other}"}}'
                if key == PARAM and other == "cpu" and zero.stage < 3:
                    values[STAGE] = 3
                    words += ' with "stage": 3'
                yield Candidate(values, words)
    other = "none" if now.recompute else "recompute"
    yield Candidate({RECOMPUTE: other}, f'"activation_checkpointing": {{"policy": "{other}"}}')
    if _may_run_together(now) and config.wherry.accumulation != "layer_major":
        yield Candidate({ORDER: "layer_major"}, '"wherry": {"accumulation": "layer_major"}')
    if now.precision == "fp32":
        half = now.machine.half
        yield Candidate({f"{half}.enabled": True}, f'"{half}": {{"enabled": true}}')
    for micro in (now.micro_batch // 2, now.micro_batch * 2):
        if micro:
            sizes = {MICRO: micro}
            if config.train_batch_size is not None:
                sizes[ACCUMULATION] = max(1, config.train_batch_size // (micro * now.data_ranks))
            yield Candidate(sizes, f'"{MICRO}": {micro}')
