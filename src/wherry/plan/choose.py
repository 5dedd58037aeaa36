"""Which config for this model and this machine: the search behind `--auto`, and the nearest change to a config."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wherry import config as configs
from wherry.config import Config
from wherry.errors import ConfigError, WherryError
from wherry.plan.estimate import Estimate
from wherry.plan.formulas import optimizer_of
from wherry.plan.model_states import STATE_WORDS
from wherry.plan.quantities import seconds, size

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
TILES = "wherry.sequence_tiles"
CHECKPOINTS = "activation_checkpointing.cpu_checkpointing"

# What may be left to the planner in a config, as "auto".
CHOSEN = (STAGE, OPTIMIZER, PARAM, RATIO, MICRO, ACCUMULATION, TRAIN)

MICRO_BATCHES = tuple(2**power for power in range(11))
# Shares of the optimizer state to offload, beside all of it; they are tried of so many configs, the fastest.
RATIOS = (0.9, 0.75, 0.5, 0.25)
FASTEST = 3
# A faster change is named only if it is faster by this factor: estimates are not finer.
WORTH = 1.05
CLEARLY = 1.02

Answer = Callable[[Config], Estimate]


class NothingFits(WherryError):
    """No config does, and of them the smallest needs what is told."""

    def __init__(self, smallest: Estimate, tried: int) -> None:
        use = smallest.tightest
        super().__init__(
            f"plan: nothing fits. The smallest is {smallest.placement.name} with a micro-batch of "
            f"{smallest.micro_batch}: it needs {use.words} on the {use.place}. Use "
            f"{'weights in ' + smallest.machine.half + ', ' if smallest.precision == 'fp32' else ''}"
            "more ranks, more memory, a shorter sequence, or allow the disk (--disk-path)"
        )
        self.smallest, self.tried = smallest, tried


@dataclass(frozen=True)
class Tried:
    """A config with other values of some keys, by dotted path, and what it comes to."""

    values: dict[str, Any]
    config: Config
    estimate: Estimate
    # The change as a person would tell it.
    words: str = ""

    @property
    def rate(self) -> float:
        return self.estimate.samples_per_second

    def to_dict(self) -> dict[str, Any]:
        found = self.estimate
        return {
            "words": self.words,
            "values": self.values,
            "fits": found.fits,
            "seconds": found.seconds,
            "tokens_per_second": found.tokens_per_second,
        }


@dataclass(frozen=True)
class Choice:
    """What was chosen, its estimate, and why, by key."""

    values: dict[str, Any]
    estimate: Estimate
    reasons: dict[str, str]
    # How many configs were looked at.
    tried: int
    # Those that fit, by the quick answer.
    fits: tuple[Tried, ...] = ()

    @property
    def fitting(self) -> int:
        return len(self.fits)

    def to_dict(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in ("values", "reasons", "tried", "fitting")}
        return given | {"estimate": self.estimate.to_dict()}


def _try(config: Config, values: dict[str, Any], ranks: int, answer: Answer, words: str = "") -> Tried | None:
    """None where these values contradict each other, on so many ranks."""
    try:
        changed = configs.load(config, overrides=values) if values else config
        changed.batch(ranks)
        return Tried(values, changed, answer(changed), words)
    except ConfigError:
        return None


def free_keys(config: Config) -> frozenset[str]:
    """The keys that a choice may set: those that the config says nothing of, or "auto".

    Activations are left open by "auto" too, although an engine measures for itself what becomes of them then.
    """
    free = {key for key in (*CHOSEN, ORDER) if not _is_given(config, key)}
    if config.wherry.accumulation == "auto":
        free.add(ORDER)
    block = config.activation_checkpointing
    if not block.model_fields_set or block.policy == "auto":
        free.add(RECOMPUTE)
    free |= {key for key in (TILES, CHECKPOINTS) if not _is_given(config, key)}
    return frozenset(free)


def _is_given(config: Config, key: str) -> bool:
    *blocks, name = key.split(".")
    block: Any = config
    for each in blocks:
        block = getattr(block, each)
    return name in block.model_fields_set


def choose(
    config: Config, answer: Answer, ranks: int, *, free: frozenset[str], confirm: Answer, disk: str | None = None
) -> Choice:
    """The config that fits and trains the most samples a second, with the values of `free` keys chosen.

    `disk` is the folder for what may rest on disk and has none in the config; without one it does not. `confirm`
    answers once more, exactly, for what is about to be chosen. Raises if nothing fits.
    """
    tried: list[Tried] = []
    for saving in _savings(config, free, tried):
        for group in _groups(config, ranks, free, disk, saving):
            for values in group:
                if (found := _try(config, values, ranks, answer)) is None:
                    continue
                tried.append(found)
                if not found.estimate.fits and (values.get(ACCUMULATION, 1) == 1 or _is_hopeless(found.estimate)):
                    break  # a larger micro-batch needs more still; less only where it saves an accumulation
        if any(each.estimate.fits for each in tried):
            break  # what saves more costs time
    for values in list(_variants(tried, free)):
        if (found := _try(config, values, ranks, answer)) is not None:
            tried.append(found)
    fitting = [each for each in tried if each.estimate.fits]
    left, last = fitting, False
    while fitting:
        best = fitting[0]
        for other in fitting:
            # What came first is simpler: something else must be clearly faster.
            if other.rate > best.rate * CLEARLY:
                best = other
        exact = confirm(best.config)
        if exact.fits:
            whole = {RATIO: 1.0} if RATIO in free and RATIO in config.auto else {}
            return Choice(whole | best.values, exact, reasons(best.values, exact), len(tried), tuple(fitting))
        # The run has told what the quick answers did not know. Of another placement it may have told too much, so that
        # the smallest is run before nothing fits.
        left = [replace(each, estimate=answer(each.config)) for each in left if each.config is not best.config]
        fitting = [each for each in left if each.estimate.fits]
        if not fitting and left and not last:
            fitting, last = [min(left, key=lambda each: each.estimate.tightest.share)], True
    if not tried:
        raise WherryError("plan: no placement is left to choose from; leave the stage or the offload devices free")
    raise NothingFits(min((each.estimate for each in tried), key=lambda found: found.tightest.share), len(tried))


def _is_hopeless(found: Estimate) -> bool:
    """Whether its activations alone are too many."""
    return found.tightest.parts.get("activations", 0) > found.tightest.usable


def _savings(config: Config, free: frozenset[str], tried: Sequence[Tried]) -> Iterator[tuple[dict[str, Any], ...]]:
    """What becomes of activations, in rounds: the next is for what does not fit otherwise, as long sequences."""
    if RECOMPUTE not in free:
        yield ({},)
        return
    kept = {RECOMPUTE: "none"} if config.activation_checkpointing.policy == "auto" else {}
    again: dict[str, Any] = {RECOMPUTE: "recompute"}
    yield kept, again
    tiles: dict[str, Any] = {TILES: "auto"} if TILES in free else {}
    apart = any(each.estimate.machine.gpus for each in tried)
    away: dict[str, Any] = {CHECKPOINTS: True} if CHECKPOINTS in free and apart else {}
    ways = (tiles, away, tiles | away) if tiles and away else (tiles | away,)
    yield tuple(again | each for each in ways if each)


def _groups(
    config: Config, ranks: int, free: frozenset[str], disk: str | None, saving: Sequence[dict[str, Any]]
) -> Iterator[list[dict[str, Any]]]:
    """Values to try, in groups that are the same but for the micro-batch, the smallest first."""
    sizes = [_batch(config, ranks, micro, free) for micro in MICRO_BATCHES] if MICRO in free else [{}]
    for placed in _placements(config, ranks, free, disk):
        for activations in saving:
            yield [placed | activations | batch for batch in sizes]


def _variants(tried: Sequence[Tried], free: frozenset[str]) -> Iterator[dict[str, Any]]:
    """The fastest with a share of the optimizer state left on the device; and with micro-batches layer by layer."""

    def fastest(found: Iterable[Tried]) -> list[Tried]:
        return sorted(found, key=lambda each: each.rate)[-FASTEST:]

    fitting = [each for each in tried if each.estimate.fits]
    # What would fit if the host had less to hold.
    crowded = [each for each in tried if each.estimate.machine.gpus and each.estimate.crowded == ["host"]]
    for found in (fitting, crowded) if RATIO in free else ():
        for each in fastest(t for t in found if t.config.zero_optimization.offload_optimizer.device != "none"):
            if each.config.wherry.update_policy != "delayed":  # it is of all the state
                yield from (each.values | {RATIO: ratio} for ratio in RATIOS)
    if ORDER in free:
        for each in fastest(t for t in fitting if _may_run_together(t.estimate)):
            yield each.values | {ORDER: "layer_major"}


def _may_run_together(found: Estimate) -> bool:
    """Whether the micro-batches of a window can go through a unit together: torch before 2.10 has no sums in fp32."""
    import torch

    sums = found.precision == "fp32" or hasattr(torch.Tensor, "grad_dtype")
    return found.accumulation > 1 and found.grid.pipe == 1 and sums


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


def _batch(config: Config, ranks: int, micro: int, free: frozenset[str]) -> dict[str, Any]:
    """The micro-batch, and the accumulation that keeps the samples of an update as they were asked for."""
    if ACCUMULATION not in free and config.gradient_accumulation_steps is not None:
        return {MICRO: micro}
    if config.train_batch_size is None or TRAIN in free:
        return {MICRO: micro, ACCUMULATION: 1}
    return {MICRO: micro, ACCUMULATION: max(1, config.train_batch_size // (micro * config.readers(ranks)))}


def reasons(values: Mapping[str, Any], found: Estimate) -> dict[str, str]:
    """Why each value was chosen, in a line."""
    use = found.tightest
    limit = f"limited by {found.time.limited_by}" if found.time else "not timed"
    told = {
        RATIO: f"the other {1 - values.get(RATIO, 1.0):.0%} of the state is updated on the device, at the same time",
        OPTIMIZER: f"optimizer state rests {_where(values.get(OPTIMIZER), found)}: {_bytes_of(found, 'optimizer')}",
        PARAM: f"weights rest {_where(values.get(PARAM), found)}: {_bytes_of(found, 'parameters')}",
        RECOMPUTE: (
            "units compute their activations again in backward"
            if found.recompute
            else "activations are kept for backward"
        ),
        TILES: "MLPs and norms run over pieces of the sequence",
        CHECKPOINTS: "what units are computed again from waits in host memory",
        MICRO: f"{limit}; {use.words} on the {use.place}",
        ORDER: "engine.train_batch gathers and reduces each unit once for all micro-batches of a window",
        ACCUMULATION: f"{found.samples} samples in an update on {found.ranks} rank{'s' * (found.ranks > 1)}",
        STAGE: _why_stage(values.get(STAGE, 0), found),
    }
    told[RECOMPUTE] += f": {_bytes_of(found, 'activations')}"
    return {key: told[key] for key in values if key in told}


def _where(device: str | None, found: Estimate) -> str:
    if device == "none" and found.machine.gpus:
        return "on the device"
    return "on disk" if device == "nvme" else "in host memory"


def _bytes_of(found: Estimate, category: str) -> str:
    return f"{size(sum(row.bytes for row in found.rows if row.category == category))} a rank"


def _why_stage(stage: int, found: Estimate) -> str:
    if found.data_ranks == 1:
        return "one rank has nothing to share out" + (", but offloaded weights need it" if stage == 3 else "")
    return (
        "everything fits whole, and gathering would cost time",
        "optimizer state is shared out over the ranks; gradients and weights fit whole",
        "optimizer state and gradients are shared out over the ranks; weights fit whole",
        "weights, gradients and optimizer state are shared out over the ranks",
    )[stage]


# A choice as text: JSON with the reasons in comments, which `wherry.config.load` reads.


def as_text(config: Config, choice: Choice) -> str:
    """What the user gave, with the chosen values in it and the reason above each."""
    tree = configs.load(config, overrides=choice.values).written
    lines = [f"// {line}" for line in _preamble(choice)]
    return "\n".join([*lines, "{", *_members(tree, choice.reasons, "", 1), "}"]) + "\n"


def _preamble(choice: Choice) -> Iterator[str]:
    found = choice.estimate
    yield f"Chosen by `wherry plan --auto` among {choice.tried} configs, {choice.fitting} of which fit:"
    yield f"{found.model}, {found.parameters:,} parameters, {found.ranks} rank{'s' * (found.ranks > 1)}"
    yield f"on {found.machine.name}."
    for use in filter(lambda use: use.needed, found.uses):
        yield f"{use.place}: {use.words}."
    if found.time is not None:
        yield f"A step takes about {seconds(found.time.total)}, limited by {found.time.limited_by}."


def _members(tree: Mapping[str, Any], reasons: Mapping[str, str], prefix: str, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for position, (name, value) in enumerate(tree.items()):
        path = f"{prefix}{name}"
        comma = "," if position < len(tree) - 1 else ""
        if path in reasons:
            yield f"{indent}// {reasons[path]}"
        if isinstance(value, dict) and value:
            yield f"{indent}{json.dumps(name)}: {{"
            yield from _members(value, reasons, f"{path}.", depth + 1)
            yield f"{indent}}}{comma}"
        else:
            yield f"{indent}{json.dumps(name)}: {json.dumps(value)}{comma}"


# The nearest change.


def nearest_change(config: Config, now: Estimate, answer: Answer, confirm: Answer) -> Tried | None:
    """The smallest change that would make `now` fit, or, if it fits, the one that would make it faster.

    `confirm` answers once more, exactly, for what is about to be named; what does not hold then is passed over.
    """
    single = list(_changes(config, now))
    pairs = [
        (values | others, f"{words} and {more}")
        for i, (values, words) in enumerate(single)
        for others, more in single[i + 1 :]
        if not values.keys() & others.keys()
    ]
    least = WORTH * now.samples_per_second if now.fits else -1.0
    for group in (single,) if now.fits else (single, pairs):
        tried = [_try(config, values, now.data_ranks, answer, words) for values, words in group]
        found = [each for each in tried if each is not None and each.estimate.fits and each.rate > least]
        for change in sorted(found, key=lambda each: each.rate, reverse=True):
            exact = replace(change, estimate=confirm(change.config))
            if exact.estimate.fits and exact.rate > least:
                return exact
    return None


def _changes(config: Config, now: Estimate) -> Iterator[tuple[dict[str, Any], str]]:
    """Single changes, each as a person would tell it."""
    zero = config.zero_optimization
    if now.data_ranks > 1:
        for stage in range(4):
            if stage != zero.stage:
                shared = ("nothing", "optimizer state", "optimizer state and gradients", "all states")[stage]
                yield {STAGE: stage}, f"{shared} shared out over the ranks"
    for key, words, device in (
        (OPTIMIZER, "optimizer state", zero.offload_optimizer.device),
        (PARAM, "weights", zero.offload_param.device),
    ):
        for other in ("none", "cpu"):
            if other != device:
                also: dict[str, Any] = {STAGE: 3} if key == PARAM and other == "cpu" and zero.stage < 3 else {}
                yield {key: other} | also, f"{words} {_where(other, now)}"
    if now.recompute:
        yield {RECOMPUTE: "none"}, "activations kept for backward"
    else:
        yield {RECOMPUTE: "recompute"}, "activations computed again in backward"
    if not config.wherry.sequence_tiles and not now.fits:
        yield {TILES: "auto"}, "MLPs and norms in pieces of the sequence"
    if now.recompute and now.machine.gpus and not config.activation_checkpointing.cpu_checkpointing and not now.fits:
        yield {CHECKPOINTS: True}, "checkpoints of activations in host memory"
    if _may_run_together(now) and config.wherry.accumulation != "layer_major":
        yield {ORDER: "layer_major"}, "all micro-batches of a window going through a layer before the next"
    if now.precision == "fp32":
        half = now.machine.half
        yield {f"{half}.enabled": True}, f"weights in {half}"
    for micro in (now.micro_batch // 2, now.micro_batch * 2):
        if micro:
            sizes = {MICRO: micro}
            if config.train_batch_size is not None:
                sizes[ACCUMULATION] = max(1, config.train_batch_size // (micro * now.data_ranks // now.together))
            yield sizes, f"a micro-batch of {micro}"
