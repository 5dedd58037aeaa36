"""Rank 0's account of a run: in the run's folder, and on the screen."""

from __future__ import annotations

import itertools
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import wherry
from wherry.checkpoint.export import IN_RUN
from wherry.checkpoint.folder import LATEST
from wherry.errors import WherryError
from wherry.observe import stdout
from wherry.observe.log import logger
from wherry.observe.memory import device_memory, host_memory
from wherry.observe.metrics import Monitor, without_secrets
from wherry.observe.screen import Screen
from wherry.plan.rates import device_name
from wherry.train.data import Share, Text
from wherry.train.display import Display
from wherry.train.loop import Ending, Outcome, Plan, Record, Stop
from wherry.train.options import Options
from wherry.train.page import write_page
from wherry.train.presets import Shape, name_of
from wherry.train.resume import Start, changes, save_folder

COLUMNS = (
    *("loss", "validation_loss", "lr", "gradient_norm", "tokens", "tokens_per_second", "step_seconds"),
    *("skipped_steps", "resident_bytes", "device_bytes"),
)
Facts = list[tuple[str, str]]


class Reported(NamedTuple):
    """What a report is of. `then` says what can be done with what the run has left: a sentence, and a command or file.

    `activations`: bytes of a micro-batch; `about`: more for `run.json`.
    """

    title: str
    folder: Path
    steps: int
    # Steps between lines: what was asked for, and what is without.
    log_interval: int
    every: int
    facts: Facts
    activations: int
    about: Mapping[str, Any]
    then: Callable[[Outcome], Facts]


class Report:
    """Writes metrics and what was run into the folder, and shows it. No training ends because either has no room."""

    def __init__(self, engine: Any, run: Reported, config: Mapping[str, Any], stop: Stop) -> None:
        self.engine = engine
        self.run_dir = run.folder
        self._then = run.then
        self.sinks = Monitor(config, columns=COLUMNS, folder=self.run_dir)
        about = {
            **run.about,
            "title": run.title,
            "activations": run.activations,
            "facts": run.facts,
            "placement": [list(row) for row in engine.placement.rows()],
            "ranks": engine.world_size,
            "wherry": wherry.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "command": sys.argv,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        try:
            self.sinks.open()
            _write_json(self.run_dir / "config.json", without_secrets(config))
            _write_json(self.run_dir / "run.json", about)
        except OSError as error:
            raise WherryError(
                f"{error.filename or self.run_dir}: cannot be written ({error.strerror}); make room there, or give "
                "another folder"
            ) from error
        # Some fifty lines, where nobody has said how many.
        thin = 1 if run.log_interval else max(1, run.steps // run.every // 50)
        self.display = Display(Screen(), run.steps, engine.memory, line_every=thin, ending=lambda: stop.asked)
        try:
            self.display.begin(run.title, run.facts, engine.placement, run.activations)
        except OSError as error:
            stdout.give_up()
            raise WherryError(
                f"standard output cannot be written ({error.strerror}); make room there, or send it elsewhere"
            ) from error

    def step(self, record: Record) -> None:
        values = {key: value for key, value in asdict(record).items() if value is not None and key != "step"}
        values["resident_bytes"] = host_memory().resident
        device = device_memory(self.engine.device)
        if device is not None:
            values["device_bytes"] = device.allocated
        self.sinks.log(record.step, values)
        self._show(self.display.step, record)

    def non_finite(self, step: int, loss: float, *, ended: bool) -> None:
        self._show(partial(self.display.non_finite, ended=ended), step, loss)

    def said(self, step: int, answers: Sequence[tuple[str, str]]) -> None:
        self._show(self.display.said, step, answers)

    def end(self, outcome: Outcome) -> None:
        self.sinks.close()
        summary = asdict(outcome) | {"ending": outcome.ending.value, "last_loss": outcome.last_loss}
        del summary["last_losses"]
        try:
            _write_json(self.run_dir / "summary.json", {k: None if v != v else v for k, v in summary.items()})
        except OSError as error:
            logger.warning("summary.json is not written: %s", error.strerror)
        else:
            self._write_page()
        then = self._then(outcome)
        if (page := self.run_dir / "report.html").exists():
            then.append(("its curves and its memory, in a browser", str(page)))
        self._show(self.display.end, outcome, self.run_dir, then)

    def _write_page(self) -> None:
        try:
            write_page(self.run_dir)
        except OSError as error:
            logger.warning("report.html is not written: %s", error.strerror)

    @staticmethod
    def _show(show: Callable[..., None], *what: object) -> None:
        try:
            show(*what)
        except OSError as error:
            stdout.give_up()
            logger.warning("nothing more is shown: standard output cannot be written (%s)", error.strerror)


def run_of(engine: Any, plan: Plan, options: Options, shape: Shape, facts: Facts) -> Reported:
    """A run of `wherry train`, whose folder is made."""
    folder = _run_dir(options, shape)

    def then(outcome: Outcome) -> Facts:
        if options.no_save or outcome.ending is Ending.DIVERGED or not (save_folder(options, folder) / LATEST).exists():
            return []
        saved = shlex.quote(str(options.save or folder))
        prompt = "def " if options.data is None else "The "
        steps = f" --steps {2 * options.steps}" if outcome.ending is Ending.FINISHED else ""
        return [
            ("see what it has learned", f'wherry generate {saved} "{prompt}"'),
            ("go on with the training", f"wherry train --resume {saved}{steps}"),
        ]

    activations = shape.activation_bytes(
        engine.train_micro_batch_size_per_gpu(),
        checkpointed=options.checkpoint_activations,
        itemsize=(engine.working_dtype or torch.float32).itemsize,
    )
    title = f"GPT-2 of {shape.size} parameters on {count(engine.world_size, 'rank')}"
    about = {"options": vars(options), "shape": asdict(shape) | {"parameters": shape.parameters}}
    return Reported(title, folder, plan.steps, options.log_interval, plan.log_interval, facts, activations, about, then)


def facts_of(engine: Any, shape: Shape, why: str, share: Share, text: Text, start: Start) -> Facts:
    """What a person should know of the run before its first step, a line each."""
    place, config = engine.topology, engine.config
    batch = [count(share.micro, "sample")]
    batch += [count(share.accumulation, "micro-batch", "es")] if share.accumulation > 1 else []
    batch += [count(share.ranks, "rank")] if share.ranks > 1 else []
    tokens = share.micro * share.accumulation * share.ranks * shape.sequence
    model = f"{count(shape.layers, 'block')}, {shape.hidden} wide, {count(shape.heads, 'head')}"
    facts = [
        ("model", f"{model} ({why})" if why else model),
        ("batch", f"{' x '.join(batch)}, {shape.sequence} tokens each: {tokens:,} tokens a step"),
    ]
    if place.tensor.size > 1 or place.pipe.size > 1:
        facts.append(("ranks", f"{place.pipe.size} stages x {place.data.size} data x {place.tensor.size} tensor"))
    sizes = f"{len(text.train):,} bytes to train on, {len(text.validation):,} to validate on"
    facts.append(("text", f"{text.source}: {sizes}"))
    if config["wherry"]["accumulation"] == "layer_major" and share.accumulation > 1:
        facts.append(("order", "layer_major: all micro-batches of a step go through a block before the next block"))
    threads = f"CPU, {count(torch.get_num_threads(), 'thread')} a rank; its memory is the host's"
    facts.append(("device", threads if engine.device.type == "cpu" else device_name(engine.device)))
    if start.checkpoint is not None:
        facts.append(("resumed", f"{start.checkpoint}, step {start.step}"))
        facts += [("changed", line) for line in changes(start.config or {}, config)]
    return facts


def count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{plural if number != 1 else ''}"


def _run_dir(options: Options, shape: Shape) -> Path:
    return make_run_dir(options.run_dir, name_of(shape), resumes=options.resume is not None)


def make_run_dir(given: str | None, name: str, *, resumes: bool) -> Path:
    """The folder of a run, made. What the part of a run before it was resumed has written there keeps its lines."""
    if given is None:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
        names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
        folder = next(free for name in names if not (free := Path("runs") / name).exists())
    else:
        folder = Path(given)
        if not resumes:
            refuse_used(folder)
        for path in (folder / "metrics.jsonl", folder / "metrics.csv") if _has_metrics(folder) else ():
            asides = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
            if path.exists():
                path.rename(next(aside for aside in asides if not aside.exists()))
    make_folder(folder, "--run-dir")
    return folder


def make_folder(folder: Path, flag: str) -> None:
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


def refuse_used(folder: Path) -> None:
    if not _has_metrics(folder):
        return
    further = f", or --resume {folder} to go on with it" if (folder / IN_RUN / LATEST).exists() else ""
    raise WherryError(f"--run-dir {folder}: it holds the metrics of another run; give another folder{further}")


def _has_metrics(folder: Path) -> bool:
    """A run that was ended before its first step has none."""
    path = folder / "metrics.jsonl"
    return path.exists() and path.stat().st_size > 0


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
