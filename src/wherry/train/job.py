"""One rank of `wherry train`, from flags to exit status."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wherry.errors import NonFiniteError, WherryError
from wherry.observe.log import logger
from wherry.train.config import build_config, layer_major_pays
from wherry.train.options import Options, grid_of, parse, shape_of
from wherry.train.presets import PRESETS, Shape

# The report writes to the config's sinks, and more than the engine would.
NO_SINKS = {"tensorboard.enabled": False, "wandb.enabled": False, "csv_monitor.enabled": False, "wherry.run_dir": None}


def main(argv: list[str]) -> int:
    """Train as this rank of the group that the environment describes. The process is the job's own."""
    from wherry.observe.log import show_unless_shown

    show_unless_shown()
    return train(parse(argv))


def check(options: Options) -> None:
    """Raise what is wrong with the flags, the config, the text or the run's folder before any rank starts."""
    from wherry.config import load
    from wherry.train.data import load_text
    from wherry.train.report import make_folder, refuse_used

    shape = shape_of(options, PRESETS.get(options.preset, PRESETS["gpt2-10m"]))
    load(build_config(options, shape.parameters, bf16=False, given=given_config(options)))
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
    from wherry.train.report import Report, facts_of
    from wherry.train.resume import choose_start, keep_batch, own_settings, save_folder

    # Who we are. Ranks of the whole run agree on what to train and when to stop; along the data axis they share the
    # samples out.
    world = topology.find()
    comm, device = world.data, world.device
    chief = comm.rank == 0
    grid = grid_of(options)
    place, mesh = parallel.lay_out(world, grid)
    piped = grid.pipe > 1

    # What to train, and from where on.
    given = given_config(options)
    shape, why = comm.gather_objects(_choose(options, comm.size, given) if chief else None)[0]
    shape.check_grid(grid)
    start = choose_start(options, comm)
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
    engine, *_ = wherry.initialize(model=model, mesh=place, config=load(config, overrides=NO_SINKS))
    if start.checkpoint is not None:
        with own_settings(engine):
            engine.load_checkpoint(start.checkpoint.parent, tag=start.checkpoint.name)

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
    report = None
    if chief:
        facts = facts_of(engine, shape, why, share, text, start)
        report = Report(engine, plan, options, shape, resolved.to_dict(), facts)
    run_dir: Any = comm.gather_objects(report.run_dir if report is not None else None)[0]
    folder = save_folder(options, run_dir)

    def save(step: int) -> None:
        """With what a resumed run needs to know."""
        samples = start.samples + (step - start.step) * batch
        engine.save_checkpoint(folder, client_state={"samples": samples, "samples_per_step": batch})

    # Train.
    stop = Stop()
    loop = Loop(
        parallel.Pipeline(engine) if piped else engine,
        comm,
        plan,
        Samples(text.train, shape.sequence, options.seed),
        Samples(text.validation, shape.sequence, seed=0),
        share,
        stop,
        report,
        save=save if options.save_interval or options.save else None,
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


def _choose(options: Options, ranks: int, given: Mapping[str, Any] | None) -> tuple[Shape, str]:
    """The shape of the model, and why it is that one if this machine was measured for it."""
    from wherry.config import load
    from wherry.plan.probe import this_machine_roughly
    from wherry.tiers.streams import accelerator
    from wherry.train.presets import choose

    if options.preset != "auto":
        return shape_of(options, PRESETS[options.preset]), ""
    config = load(build_config(options, PRESETS["gpt2-10m"].parameters, bf16=False, given=given))
    micro = config.batch(grid_of(options).data_ranks(ranks)).micro
    itemsize = 4 if accelerator() is None else 2
    shape, why = choose(this_machine_roughly(), ranks, micro, itemsize=itemsize)
    return shape_of(options, shape), why
