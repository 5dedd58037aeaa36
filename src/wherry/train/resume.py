"""Where a run goes on: the checkpoint it resumes from, and what of the run before it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from wherry.checkpoint import folder as folders
from wherry.checkpoint.checks import read_manifest
from wherry.checkpoint.errors import on_first
from wherry.checkpoint.export import IN_RUN, find
from wherry.errors import WherryError
from wherry.observe.log import logger
from wherry.parallel.comm import Comm
from wherry.train.options import SHAPE_FLAGS, Options, shape_of

DEFAULT_SEED = 1234
DEFAULT_STEPS = 150
_OF_UPDATES = ("optimizer", "scheduler", "gradient_clipping")


@dataclass(frozen=True)
class Start:
    """Where a run begins. `samples` have been trained on before it, `batch` in each step, by this config.

    `shape`: what the checkpoint tells of its model, by the names of `Shape`; one of an earlier version leaves out the
    heads, and whose text it was, in which order, and for how many `steps` in all.
    """

    checkpoint: Path | None = None
    step: int = 0
    samples: int = 0
    batch: int | None = None
    config: Mapping[str, Any] | None = None
    shape: Mapping[str, int] = field(default_factory=dict)
    tied: bool = True
    data: str | None = None
    seed: int | None = None
    steps: int | None = None


def save_folder(options: Options, run_dir: Path) -> Path:
    """Where checkpoints go: --save, else inside the run's folder."""
    return Path(options.save) if options.save is not None else run_dir / IN_RUN


def choose_start(options: Options, comm: Comm) -> Start:
    """The checkpoint that --resume means; every rank calls it. `auto` takes the newest whole one, or none."""
    if options.resume is None:
        return Start()
    return on_first(comm, f"--resume {options.resume}", lambda: _start(options))


def look(options: Options) -> Start:
    """The same before any rank starts. A newest checkpoint that has steps left is not read: `auto` may mean another."""
    start = _start(options, reads=False)
    return _start(options) if start.step >= _steps(options, start) else start


def _start(options: Options, *, reads: bool = True) -> Start:
    if options.resume is None:
        return Start()
    if options.resume != "auto":
        path = Path(str(options.resume))
        try:
            return _of(find(path))
        except WherryError as error:
            beside = path if path.name == IN_RUN else path / IN_RUN if (path / IN_RUN).is_dir() else path.parent
            there = [str(beside / tag) for tag in folders.newest_first(beside) if beside / tag != path]
            there = [each for each in there if f'"{each}"' not in str(error)]  # one is proposed already
            others = f"; there are {', '.join(there[:3])}" if there else ""
            raise WherryError(f"--resume: {error}{others}") from error
    folder = save_folder(options, Path(options.run_dir or ""))
    if reads and folder.is_dir():
        folders.clean(folder)
    tag = folders.newest_whole(folder) if reads else next(iter(folders.newest_first(folder)), None)
    if tag is None:
        return Start()
    listed = folders.newest_first(folder)
    newer = listed[: listed.index(tag)] if tag in listed and tag != folders.read_latest(folder) else []
    if newer:
        logger.warning("%s: damaged, so %s is resumed", ", ".join(newer), tag)
    return _of(folder / tag)


def _steps(options: Options, start: Start) -> int:
    return int(options.steps or start.steps or DEFAULT_STEPS)


def finished(options: Options, start: Start, *, tells: bool) -> bool:
    """Whether nothing is left to train: an error, unless `auto` leaves it to the run whether there is."""
    if start.step < options.steps:
        return False
    auto = options.resume == "auto"
    told = (
        f"{start.checkpoint} is at step {start.step} of {options.steps} already; give more with --steps to go on"
        f"{', or another --run-dir to begin anew' if auto else ''}. `wherry generate {start.checkpoint}` shows what it "
        "has learned"
    )
    if not auto:
        raise WherryError(told)
    if tells:
        print(told)
    return True


def _of(path: Path) -> Start:
    from wherry.train.gpt2 import is_tied, shape_in

    manifest = read_manifest(path)
    told = manifest.engine.get("client_state", {})
    if "samples_per_step" not in told:
        raise WherryError(f"{path} was not written by `wherry train`")
    return Start(
        path,
        manifest.step,
        int(told["samples"]),
        int(told["samples_per_step"]),
        manifest.config,
        shape=shape_in(manifest),
        tied=is_tied(manifest),
        data=told.get("data"),
        seed=told.get("seed"),
        steps=told.get("steps"),
    )


def keep_model(options: Options, start: Start) -> Options:
    """The flags of a run with its length, model, text and their order as the checkpoint has them, where none says so.

    A flag that contradicts the checkpoint's shape is an error, with all others that do.
    """
    options = Options(**vars(options))
    options.steps = _steps(options, start)
    _keep_place(options, start)
    options.seed = next(seed for seed in (options.seed, start.seed, DEFAULT_SEED) if seed is not None)
    options.data = options.data if options.data is not None else start.data
    options.untied = options.untied or not start.tied
    dests = {name: flag[2:].replace("-", "_") for name, flag in SHAPE_FLAGS.items()}
    has, whole = start.shape, "heads" in start.shape
    wanted = {name: getattr(options, dest) for name, dest in dests.items()}
    if options.preset not in (None, "auto") or not (whole or options.preset):
        wanted = asdict(shape_of(options))
    differ = {
        flag: (wanted[n], has[n]) for n, flag in SHAPE_FLAGS.items() if n in has and wanted[n] not in (None, has[n])
    }
    if differ:
        told = "; ".join(f"{flag} {given}: the checkpoint has {own}" for flag, (given, own) in differ.items())
        preset = f"--preset {options.preset} means " if options.preset else ""
        right = " ".join(f"{flag} {own}" for flag, (_, own) in differ.items())
        cure = "leave these flags out: the checkpoint brings its shape along" if whole else f"give {right}"
        raise WherryError(f"--resume: {start.checkpoint} is of another shape: {preset}{told}; {cure}")
    if whole:
        options.preset = None
        vars(options).update({dest: has[name] for name, dest in dests.items()})
    return options


def _keep_place(options: Options, start: Start) -> None:
    """A run goes on in its own folders, unless others are given, or what came behind a checkpoint is to stay."""
    options.branches = False
    if start.checkpoint is None or options.resume == "auto" or options.run_dir is not None or options.save is not None:
        return
    folder = start.checkpoint.parent
    named = Path(options.resume) == start.checkpoint
    if named and folders.newest_first(folder)[:1] != [start.checkpoint.name]:
        options.branches = True
        return
    if folder.name == IN_RUN and (folder.parent / "run.json").exists():
        options.run_dir = str(folder.parent)
    elif not options.no_save:
        options.save = str(folder)


def keep_batch(config: dict[str, Any], start: Start, ranks: int, given: bool, stages: int = 1) -> None:
    """Let a step have as many samples as before, whatever the number of ranks, unless the flags say otherwise.

    `stages` of a pipeline want a micro-batch each, at least.
    """
    if start.batch is None or given:
        return
    if start.batch % ranks:
        logger.warning("steps of %d samples do not divide by %d ranks: they have another size now", start.batch, ranks)
        return
    share = start.batch // ranks
    wanted = int(config.get("train_micro_batch_size_per_gpu") or share)
    micro = max(size for size in range(1, max(1, min(wanted, share // stages)) + 1) if share % size == 0)
    config["train_batch_size"] = start.batch
    config["train_micro_batch_size_per_gpu"] = micro
    config["gradient_accumulation_steps"] = share // micro


@contextmanager
def own_settings(engine: Any) -> Iterator[None]:
    """Around a load: learning rates, other options and the form of the schedule stay those of this run's config."""
    groups, schedule = engine.optimizer.param_groups, engine.lr_scheduler
    options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    # Of a schedule `last_epoch` and the like say how far it is; all else is its form.
    progress = ("last_epoch", "_step_count", "_last_lr")
    form = {name: value for name, value in getattr(schedule, "__dict__", {}).items() if name not in progress}
    yield
    for group, own in zip(groups, options, strict=True):
        group.update(own)
    if schedule is not None:
        vars(schedule).update(form)
        schedule._last_lr = list(schedule.get_lr())
        for group, rate in zip(groups, schedule._last_lr, strict=True):
            group["lr"] = rate


def has_other_states(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has the states of another kind of optimizer; those of AdamW are Adam's."""
    before, after = (
        str((config.get("optimizer") or {}).get("type")).lower().removesuffix("w") for config in (earlier, now)
    )
    return before != after


def changes(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What a resumed run's config says otherwise of how weights are updated, a line for each key."""
    before, after = (
        {name: leaf for block in _OF_UPDATES for name, leaf in _flat(config.get(block), block)}
        for config in (earlier, now)
    )
    names = [name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name)]
    if "optimizer.type" in names:  # all of its parameters are others
        names = [name for name in names if not name.startswith("optimizer.params.")]
    return [f"{name} {before.get(name)} -> {after.get(name)}" for name in names]


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}")
    else:
        yield name, value
