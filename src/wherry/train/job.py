"""One rank of `wherry train`, from flags to exit status."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.errors import NonFiniteError, WherryError
from wherry.observe.log import logger
from wherry.observe.memory import format_bytes
from wherry.observe.metrics import SERVICES
from wherry.train.config import build_config, layer_major_pays
from wherry.train.options import Options, grid_of, parse, shape_of
from wherry.train.presets import DEFAULT, PRESETS, Shape

if TYPE_CHECKING:
    from wherry.config import Config
    from wherry.engine import Engine
    from wherry.train.loop import Plan

# Of a checkpoint, for each parameter: its fp32 master and Adam's two moments.
ADAM_BYTES = 12
# The report writes to the config's sinks, and more than the engine would.
NO_SINKS = {**{f"{name}.enabled": False for name in (*SERVICES, "csv_monitor")}, "wherry.run_dir": None}
# What is recorded goes into the run's folder, which is not there yet when the engine is made.
NO_PROFILE = {"wherry.profile.steps": None, "wherry.profile.memory_step": None}


def main(argv: list[str]) -> int:
    """Train as this rank of the group that the environment describes. The process is the job's own."""
    from wherry.observe.log import show_unless_shown

    show_unless_shown()
    return train(parse(argv))


def check(options: Options) -> bool:
    """Raise what is wrong with the flags, the config, the text or the run's folder before any rank starts.

    Returns whether there is something to train.
    """
    from wherry.config import load
    from wherry.train.data import load_text
    from wherry.train.report import make_folder, refuse_used
    from wherry.train.resume import finished, keep_model, look

    start = look(options)
    options = keep_model(options, start)
    if finished(options, start, tells=True):
        return False
    shape = shape_of(options)
    config = build_config(options, shape.parameters, bf16=False, given=given_config(options), earlier=start.config)
    asked = load(config).wherry.profile
    first = start.step + 1 if options.resume != "auto" else 1  # the same command goes on behind them
    for step in (*asked.traced, asked.memory_step or first):
        if not first <= step <= options.steps:
            raise WherryError(
                f"wherry.profile (--profile): step {step} is to be recorded, and this run trains steps {first} to "
                f"{options.steps}"
            )
    grid = grid_of(options)
    shape.check_grid(grid)
    if options.nproc is not None and options.nproc % grid.size:
        raise WherryError(
            f"--nproc {options.nproc} is not a multiple of {grid.size}, the ranks that share one model "
            "(--tensor-parallel x --pipeline-parallel)"
        )
    load_text(options.data).check_length(shape.sequence)
    if options.run_dir is not None and options.resume is None:
        refuse_used(Path(options.run_dir))
    for flag, folder in (("--run-dir", options.run_dir), ("--save", options.save)):
        if folder is not None:
            make_folder(Path(folder), flag)
    return True


def given_config(options: Options) -> Mapping[str, Any] | None:
    """The user's file as it was written; its mistakes are told with their lines."""
    if options.config is None:
        return None
    from wherry.config import load

    path = Path(options.config)
    if path.is_dir():
        raise WherryError(f"--config {options.config}: this is a folder; name the file")
    if not path.exists():
        raise WherryError(f"--config {options.config}: there is no such file")
    return load(path).written


def train(options: Options) -> int:
    import torch

    import wherry
    from wherry.config import load
    from wherry.parallel import topology
    from wherry.train import parallel
    from wherry.train.data import Samples, Share, load_text
    from wherry.train.loop import Ending, Loop, Plan, Stop
    from wherry.train.model import GPT, GPTConfig
    from wherry.train.report import Report, facts_of, run_of
    from wherry.train.resume import (
        choose_start,
        finished,
        has_other_states,
        keep_batch,
        keep_model,
        own_settings,
        save_folder,
    )

    # Who we are. Ranks of the whole run agree on what to train and when to stop; along the data axis they share the
    # samples out.
    world = topology.find()
    comm, device = world.data, world.device
    chief = comm.rank == 0
    grid = grid_of(options)
    place, mesh = parallel.lay_out(world, grid)
    piped = grid.pipe > 1

    # What to train, and from where on.
    start = choose_start(options, comm)
    options = keep_model(options, start)
    if finished(options, start, tells=chief):
        comm.close()
        return 0
    given = given_config(options)
    shape, why = comm.gather_objects(_choose(options, comm.size, given) if chief else None)[0]
    shape.check_grid(grid)
    has_bf16 = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    bf16 = bool(device.type != "cpu" and has_bf16 and has_bf16())
    config = build_config(options, shape.parameters, bf16=bf16, given=given, earlier=start.config)
    sized = any(size is not None for size in (options.batch_size, options.global_batch_size, options.accumulation))
    keep_batch(config, start, place.data.size, sized, place.pipe.size)
    if not piped and all(comm.gather_objects(layer_major_pays(config, place, shape, options.checkpoint_activations))):
        config["wherry"] = {**(config.get("wherry") or {}), "accumulation": "layer_major"}
    resolved = load(config)
    text = load_text(options.data)
    text.check_length(shape.sequence)

    # The model, in an engine. Where parameters are partitioned the whole of it need not be in any rank's memory.
    torch.manual_seed(options.seed)
    described = GPTConfig.of(
        shape, checkpoint_activations=options.checkpoint_activations, tied=not (piped or options.untied)
    )
    with wherry.Init(
        config=resolved, mesh=place, enabled=grid.size == 1 and resolved.placement().parameters.partitioned
    ):
        whole = GPT(described)
    if grid.tensor > 1:
        parallel.cut_blocks(whole, mesh)
    model = parallel.Stage(whole, place.pipe.rank, place.pipe.size) if piped else whole
    engine, *_ = wherry.initialize(model=model, mesh=place, config=load(config, overrides=NO_SINKS | NO_PROFILE))
    if start.checkpoint is not None:
        anew = has_other_states(start.config or {}, resolved.to_dict())
        if anew and chief:
            logger.warning("--resume: another optimizer begins without the states of the one before it")
        with own_settings(engine):
            engine.load_checkpoint(start.checkpoint.parent, tag=start.checkpoint.name, load_optimizer_states=not anew)

    # How long, and what a step reads.
    micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    batch = micro * accumulation * place.data.size
    plan = Plan(
        steps=options.steps,
        tokens_per_step=batch * shape.sequence,
        first=start.step,
        log_interval=options.log_interval or (1 if device.type == "cpu" else 10),
        eval_interval=options.eval_interval,
        eval_batches=options.eval_batches,
        # All micro-batches that go through a pipeline are alike.
        eval_samples=micro * accumulation if piped else micro,
        save_interval=options.save_interval,
    )
    share = Share(place.data.rank, place.data.size, micro, accumulation, start.samples - start.step * batch)

    # Tell what is about to happen.
    report, stop = None, Stop()
    if chief:
        facts = facts_of(engine, shape, why, share, text, start) + _what_stays(options, shape)
        report = Report(engine, run_of(engine, plan, options, shape, facts), resolved.to_dict(), stop)
    run_dir: Any = comm.gather_objects(report.run_dir if report is not None else None)[0]
    recorded = _record(engine, resolved, plan, run_dir)
    if report is not None:
        report.display.recorded_step = recorded
    folder = save_folder(options, run_dir)
    if chief and not options.no_save:
        _tell_of_room(folder, ADAM_BYTES * shape.parameters)

    def save(step: int) -> None:
        """With what a resumed run needs to know."""
        samples = start.samples + (step - start.step) * batch
        told = {"samples": samples, "samples_per_step": batch, "heads": shape.heads, "seed": options.seed}
        told["steps"] = options.steps
        data = None if options.data is None else str(Path(options.data).expanduser().absolute())
        engine.save_checkpoint(folder, client_state=told | {"data": data})

    # Train.
    loop = Loop(
        parallel.Pipeline(engine) if piped else engine,
        comm,
        plan,
        Samples(text.train, shape.sequence, options.seed),
        Samples(text.validation, shape.sequence, seed=0),
        share,
        stop,
        report,
        save=None if options.no_save else save,
    )
    outcome = loop.outcome
    with stop:
        try:
            loop.run()
            engine.settle()
        except NonFiniteError as error:  # on every rank
            outcome.ending = Ending.DIVERGED
            if chief:
                logger.error("%s", error)
        except (KeyboardInterrupt, SystemExit):  # or nobody reads what is shown
            outcome.ending = Ending.INTERRUPTED
            raise
        finally:
            if report is not None:
                report.end(outcome)
    engine.close()
    comm.close()
    if outcome.ending is Ending.INTERRUPTED:
        return stop.status
    return 0 if outcome.ending is Ending.FINISHED else 1


def _record(engine: Engine, config: Config, plan: Plan, run_dir: str | Path) -> int | None:
    """What was asked for; by default, for rank 0's report, memory over an early step, with all that lasts there.

    The step whose memory is recorded is returned.
    """
    asked = config.wherry.profile
    if asked.recorded is None and engine.global_rank != 0:
        return None
    early = min(plan.first + 3, plan.steps)
    step = asked.recorded if asked.recorded is not None and asked.recorded <= plan.steps else early
    folder = asked.folder or Path(run_dir) / "profile"
    engine.record_profile(folder, asked.traced, step, told=asked.recorded is not None)
    return step


def _what_stays(options: Options, shape: Shape) -> list[tuple[str, str]]:
    """What the run will leave, for its first lines."""
    found = []
    if options.fixed_run_dir:
        found.append(("folder", f"{options.run_dir}: the same command goes on there"))
    if options.branches:
        found.append(("folder", "a new one, as the checkpoint is not the newest of its own"))
    if not options.no_save:
        often = f"every {options.save_interval} steps and " if options.save_interval else ""
        size = format_bytes(ADAM_BYTES * shape.parameters)
        found.append(("saved", f"{often}at the end, about {size}"))
    return found


def _tell_of_room(folder: Path, nbytes: int) -> None:
    """A disk that is too small for a checkpoint is told of now, and not when the training is done."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < nbytes:
        logger.warning(
            "a checkpoint takes about %s, and where %s will be %s are free: make room before the first one, or end the "
            "run and give --save FOLDER on another disk, or --no-save",
            format_bytes(nbytes), folder, format_bytes(free),
        )  # fmt: skip


def _choose(options: Options, ranks: int, given: Mapping[str, Any] | None) -> tuple[Shape, str]:
    """The shape of the model, and why it is that one if this machine was measured for it."""
    from wherry.config import load
    from wherry.plan.probe import this_machine_roughly
    from wherry.tiers.streams import accelerator
    from wherry.train.presets import choose

    if options.preset != "auto":
        return shape_of(options), ""
    config = load(build_config(options, PRESETS[DEFAULT].parameters, bf16=False, given=given))
    micro = config.batch(grid_of(options).data_ranks(ranks)).micro
    itemsize = 4 if accelerator() is None else 2
    machine = this_machine_roughly().with_host_memory(config.wherry.host_memory)
    shape, why = choose(machine, ranks, micro, itemsize=itemsize)
    return shape_of(options, shape), why
