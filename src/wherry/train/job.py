"""One rank of `wherry train`, from flags to exit status."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from wherry.errors import NonFiniteError, WherryError
from wherry.observe import stdout
from wherry.observe.log import logger
from wherry.train.options import Options, build_config, check_axes, parse, shape_of
from wherry.train.presets import PRESETS, Shape

COLUMNS = (
    *("loss", "validation_loss", "lr", "gradient_norm", "tokens", "tokens_per_second", "step_seconds"),
    *("skipped_steps", "resident_bytes", "device_bytes"),
)


def main(argv: list[str]) -> int:
    """Train as this rank of the group that the environment describes. The process is the job's own."""
    from wherry.observe.log import show_unless_shown

    show_unless_shown()
    return train(parse(argv))


def check(options: Options) -> None:
    """Raise what is wrong with the flags, the config, the text or the run's folder before any rank starts."""
    from wherry.config import load
    from wherry.train.data import load_text

    base = PRESETS.get(options.preset, PRESETS["gpt2-10m"])
    shape = shape_of(options, base)
    load(build_config(options, shape.parameters, bf16=False, given=given_config(options)))
    check_axes(options, shape)
    load_text(options.data).check_length(shape.sequence)
    if options.run_dir is not None and options.resume is None:
        _refuse_used(Path(options.run_dir))
    for flag, folder in (("--run-dir", options.run_dir), ("--save", options.save)):
        if folder is not None:
            _make(Path(folder), flag)
    if options.resume == "auto" and options.save is None and options.run_dir is None:
        raise WherryError("--resume auto: give --save FOLDER or --run-dir FOLDER, so that there is a place to look in")


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
    return load(path).given


def train(options: Options) -> int:
    import torch

    import wherry
    from wherry.config import load
    from wherry.parallel import topology
    from wherry.train import parallel
    from wherry.train.data import Samples, Share, load_text
    from wherry.train.loop import Ending, Loop, Plan, Stop
    from wherry.train.model import GPT, GPTConfig
    from wherry.train.order import runs_together
    from wherry.train.resume import changes, choose_start, keep_batch, own_settings, save_folder, saver

    # Ranks of the whole run agree on what to train and when to stop; data is shared out along the data axis alone.
    world = topology.find()
    comm, device = world.data, world.device
    chief = comm.rank == 0
    given = given_config(options)
    shape, why = comm.gather_objects(_choose(options, comm.size, given) if chief else None)[0]
    start = choose_start(options, comm)
    config = build_config(options, shape.parameters, bf16=_has_bf16(device), given=given, earlier=start.config)
    place, mesh = parallel.lay_out(world, options.tensor_parallel, options.pipeline_parallel)
    keep_batch(config, start, place.data.size, options.sizes_the_batch, place.pipe.size)
    piped = options.pipeline_parallel > 1
    if not piped and all(comm.gather_objects(runs_together(config, place, shape, options.checkpoint_activations))):
        config["wherry"] = {**(config.get("wherry") or {}), "accumulation": "layer_major"}
    resolved = load(config)
    torch.manual_seed(options.seed)
    tied = not (piped or options.untied)
    alone = not piped and options.tensor_parallel == 1
    # Where parameters are partitioned the whole model need not be in any rank's memory.
    with wherry.Init(config=resolved, mesh=place, enabled=alone and resolved.placement().parameters.partitioned):
        whole = GPT(GPTConfig.of(shape, checkpoint_activations=options.checkpoint_activations, tied=tied))
    if options.tensor_parallel > 1:
        parallel.cut_blocks(whole, mesh)
    model = parallel.Stage(whole, place.pipe.rank, place.pipe.size) if piped else whole
    # The report writes to the config's sinks, and more than the engine would.
    engine, optimizer, _, _ = wherry.initialize(model=model, mesh=place, config=load(config, overrides=NO_SINKS))
    assert optimizer is not None, "the config always has an optimizer here"
    if start.checkpoint is not None:
        with own_settings(engine):
            engine.load_checkpoint(start.checkpoint.parent, tag=start.checkpoint.name)
    micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    text = load_text(options.data, rank=comm.rank)
    text.check_length(shape.sequence)
    plan = Plan(
        steps=options.steps,
        tokens_per_step=micro * accumulation * place.data.size * shape.sequence,
        log_interval=options.log_interval or (1 if device.type == "cpu" else 10),
        eval_interval=options.eval_interval,
        eval_batches=options.eval_batches,
        # All micro-batches that go through a pipeline are alike.
        eval_samples=micro * accumulation if piped else None,
        save_interval=options.save_interval,
    )
    batch = micro * accumulation * place.data.size
    report = None
    if chief:
        title = f"GPT-2 of {shape.size} parameters on {_count(comm.size, 'rank')}"
        facts: tuple[tuple[str, str], ...] = (
            ("model", _model_in_words(shape) + (f" ({why})" if why else "")),
            ("batch", _batch_in_words(micro, accumulation, place.data.size, shape, plan)),
            *_axes_in_words(place),
            ("text", f"{text.source}: {len(text.train):,} bytes to train on, {len(text.validation):,} to validate on"),
            ("device", _device_in_words(device)),
        )
        if start.checkpoint is not None:
            facts += (("resumed", f"{start.checkpoint}, step {start.step}"),)
            facts += tuple(("changed", line) for line in changes(start.config or {}, resolved.to_dict()))
        activations = shape.activation_bytes(
            micro, checkpointed=options.checkpoint_activations, itemsize=_itemsize(resolved.working_dtype())
        )
        report = Report(engine, plan, options, shape, resolved.to_dict(), title, facts, activations)
    run_dir = comm.gather_objects(report.run_dir if report is not None else None)[0]
    folder = save_folder(options, run_dir) if options.save_interval or options.save else None
    stop = Stop()
    trained: Any = parallel.Pipeline(engine) if piped else engine
    loop = Loop(
        trained,
        comm,
        plan,
        Samples(text.train, shape.sequence, options.seed),
        Samples(text.validation, shape.sequence, seed=0),
        Share(place.data.rank, place.data.size, micro, accumulation, start.samples - start.step * batch),
        lr=lambda: float(optimizer.param_groups[0]["lr"]),
        stop=stop,
        reporter=report,
        first=start.step,
        save=saver(engine, options, start, folder, batch) if folder is not None else None,
    )
    with stop:
        try:
            outcome = loop.run()
            engine.settle()
        except NonFiniteError as error:  # on every rank
            outcome = loop.outcome
            outcome.ending = Ending.DIVERGED
            if chief:
                logger.error("%s", error)
        except (KeyboardInterrupt, SystemExit):  # or nobody reads what is shown
            loop.outcome.ending = Ending.INTERRUPTED
            raise
        finally:
            if report is not None:
                report.end(loop.outcome)
    engine.close()
    comm.close()
    return stop.status if outcome.ending is Ending.INTERRUPTED else outcome.ending.status


NO_SINKS = {"tensorboard.enabled": False, "wandb.enabled": False, "csv_monitor.enabled": False, "wherry.run_dir": None}


class Report:
    """Rank 0's account of a run: on the screen, and in the run's folder."""

    def __init__(
        self,
        engine: Any,
        plan: Any,
        options: Options,
        shape: Shape,
        config: dict[str, Any],
        title: str,
        facts: tuple[tuple[str, str], ...],
        activations: int,
    ) -> None:
        from wherry.observe.metrics import sinks_of
        from wherry.observe.screen import Screen
        from wherry.train.display import Display, Header

        self.engine = engine
        self.run_dir = _run_dir(options)
        self.sinks = sinks_of(config, COLUMNS)
        try:
            self.sinks.open(self.run_dir, config)
            _write_json(self.run_dir / "config.json", config)
            _write_json(self.run_dir / "run.json", _about(options, shape, engine))
        except OSError as error:
            raise WherryError(
                f"{error.filename or self.run_dir}: cannot be written ({error.strerror}); make room there, or give "
                "another folder"
            ) from error
        gpu = engine.device.type != "cpu"
        # Some fifty lines, where nobody has said how many.
        thin = 1 if options.log_interval else max(1, plan.steps // plan.log_interval // 50)
        self.display = Display(Screen(), plan.steps, engine.memory, gpu=gpu, line_every=thin)
        header = Header(
            title=title,
            facts=facts,
            placement_name=engine.placement.name,
            placement=tuple(engine.placement.rows()),
            memory=tuple(engine.memory()),
            activations=activations,
            run_dir=self.run_dir,
        )
        try:
            self.display.begin(header)
        except OSError as error:
            stdout.give_up()
            raise WherryError(
                f"standard output cannot be written ({error.strerror}); make room there, or send it elsewhere"
            ) from error

    def step(self, record: Any) -> None:
        from wherry.observe.memory import device_memory, host_memory

        values = {key: value for key, value in asdict(record).items() if value is not None and key != "step"}
        values["resident_bytes"] = host_memory().resident
        device = device_memory(self.engine.device)
        if device is not None:
            values["device_bytes"] = device.allocated
        self.sinks.log(record.step, values)
        self._show(self.display.step, record)

    def non_finite(self, step: int, loss: float, *, ended: bool) -> None:
        self._show(partial(self.display.non_finite, ended=ended), step, loss)

    def end(self, outcome: Any) -> None:
        self.sinks.close()
        summary = asdict(outcome) | {"ending": outcome.ending.value, "last_loss": outcome.last_loss}
        del summary["last_losses"]
        try:
            _write_json(self.run_dir / "summary.json", {k: None if v != v else v for k, v in summary.items()})
        except OSError as error:
            logger.warning("summary.json is not written: %s", error.strerror)
        self._show(self.display.end, outcome, self.run_dir)

    @staticmethod
    def _show(show: Callable[..., None], *what: object) -> None:
        """No training ends because a line of it has no room any more."""
        try:
            show(*what)
        except OSError as error:
            stdout.give_up()
            logger.warning("nothing more is shown: standard output cannot be written (%s)", error.strerror)


def _choose(options: Options, ranks: int, given: Mapping[str, Any] | None) -> tuple[Shape, str]:
    from wherry.config import load
    from wherry.train.presets import choose, measure_machine

    if options.preset != "auto":
        return shape_of(options, PRESETS[options.preset]), ""
    import torch

    itemsize = 2 if torch.cuda.is_available() else 4
    config = load(build_config(options, PRESETS["gpt2-10m"].parameters, bf16=False, given=given))
    copies = ranks // (options.tensor_parallel * options.pipeline_parallel)
    shape, why = choose(measure_machine(ranks), config.batch(copies).micro * ranks, itemsize=itemsize)
    return shape_of(options, shape), why


def _has_bf16(device: Any) -> bool:
    import torch

    return bool(device.type == "cuda" and torch.cuda.is_bf16_supported())


def _itemsize(dtype: Any) -> int:
    return 4 if dtype is None else int(dtype.itemsize)


def _model_in_words(shape: Shape) -> str:
    return f"{_count(shape.layers, 'block')}, {shape.hidden} wide, {_count(shape.heads, 'head')}"


def _batch_in_words(micro: int, accumulation: int, ranks: int, shape: Shape, plan: Any) -> str:
    parts = [_count(micro, "sample")]
    parts += [_count(accumulation, "micro-batch", "es")] if accumulation > 1 else []
    parts += [_count(ranks, "rank")] if ranks > 1 else []
    return f"{' x '.join(parts)}, {shape.sequence} tokens each: {plan.tokens_per_step:,} tokens a step"


def _axes_in_words(place: Any) -> tuple[tuple[str, str], ...]:
    if place.tensor.size == place.pipe.size == 1:
        return ()
    return (("ranks", f"{place.pipe.size} stages x {place.data.size} data x {place.tensor.size} tensor"),)


def _count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{plural if number != 1 else ''}"


def _device_in_words(device: Any) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {_count(torch.get_num_threads(), 'thread')} a rank"


def _run_dir(options: Options) -> Path:
    if options.run_dir is not None:
        folder = Path(options.run_dir)
        if options.resume is None:
            _refuse_used(folder)
        else:
            _set_aside(folder)
    else:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{options.preset}"
        folder, number = Path("runs") / name, 1
        while folder.exists():
            number += 1
            folder = Path("runs") / f"{name}-{number}"
    _make(folder, "--run-dir")
    return folder


def _make(folder: Path, flag: str) -> None:
    """Make a folder where there is none, so that it is told now and not hours later if files cannot be put there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        may_write = os.access(folder, os.W_OK | os.X_OK)
    except FileExistsError:
        raise WherryError(f"{flag} {folder}: this is a file, and a folder is needed; give another name") from None
    except OSError as error:
        raise WherryError(f"{flag} {folder}: the folder cannot be made ({error.strerror}); give another") from None
    if not may_write:
        raise WherryError(f"{flag} {folder}: nothing can be written there; give another folder, or change its mode")


def _set_aside(folder: Path) -> None:
    """The metrics of the part of a run that came before it was resumed keep their lines, under another name."""
    for path in (folder / "metrics.jsonl", folder / "metrics.csv"):
        if path.exists():
            number = 1
            while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
                number += 1
            path.rename(aside)


def _refuse_used(folder: Path) -> None:
    if (folder / "metrics.jsonl").exists():
        raise WherryError(f"--run-dir {folder}: it holds the metrics of another run; give another folder")


def _about(options: Options, shape: Shape, engine: Any) -> dict[str, Any]:
    import torch

    import wherry

    return {
        "options": asdict(options),
        "shape": asdict(shape) | {"parameters": shape.parameters},
        "placement": [list(row) for row in engine.placement.rows()],
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "wherry": wherry.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
