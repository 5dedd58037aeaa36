"""`wherry plan MODEL`: a model, a config and a machine, in one answer that a person can read."""

from __future__ import annotations

import argparse
import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from wherry import config as configs
from wherry.cli.plan import flag
from wherry.config import Config
from wherry.errors import WherryError
from wherry.observe.screen import Screen, table
from wherry.placement import place_name
from wherry.plan.machines import Machine, described, known
from wherry.plan.quantities import TB, parse_bytes, parse_count, seconds, size

if TYPE_CHECKING:
    from wherry.plan.choose import Choice, Tried
    from wherry.plan.dry_run import DryRun
    from wherry.plan.estimate import Estimate
    from wherry.plan.forecaster import Forecaster
    from wherry.plan.grid import Grid
    from wherry.plan.model_source import ModelSource

WIDTH = 80
# The most of each that may be meant.
SIZES = {
    "gpu_memory": 10 * TB,
    "host_memory": 1000 * TB,
    "disk": 10**6 * TB,
    "pcie": 10 * TB,
    "stream": 100 * TB,
    "disk_bandwidth": 100 * TB,
}


def main(arguments: argparse.Namespace) -> int:
    from wherry.sources import around, located

    _check_flags(arguments)
    named, arguments.model = arguments.model, located(arguments.model, online=bool(arguments.online))
    # Of a model that the hub's name is given for, its config is all that is fetched.
    with around(arguments.model, online=bool(arguments.online) and arguments.model == named):
        return _plan(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    from wherry.plan.grid import Grid
    from wherry.sources import find

    overrides = configs.parse_overrides(arguments.set or ())
    if arguments.recompute:
        overrides["activation_checkpointing.policy"] = "recompute"
    config = configs.load(arguments.config, overrides=overrides)
    source = find(arguments.model)
    grid = Grid(arguments.tensor_parallel or 1, arguments.pipeline_parallel or 1, arguments.stage or 0)
    ranks = parse_count(arguments.ranks, "--ranks") if arguments.ranks is not None else None
    if ranks is not None:
        config.batch(grid.data_ranks(ranks))  # raises where they contradict, before anything takes long
    if arguments.dry_run:
        return _dry_run(arguments, source, config, grid, ranks)
    from wherry.plan.forecaster import Forecaster

    machine = _machine(arguments, config)
    ranks = ranks or machine.ranks()
    if arguments.nodes is not None and machine.gpus and ranks > machine.ranks():
        raise WherryError(
            f"--ranks: {ranks:,} ranks need a GPU each, and {machine.nodes} x {machine.gpus} GPUs are "
            f"{machine.ranks()}; give more --nodes or --gpus, or leave --nodes out"
        )
    forecaster = Forecaster(source, machine.holding(ranks), ranks, arguments.sequence, grid)
    return _auto(arguments, config, forecaster) if arguments.auto else _judge(arguments, config, forecaster)


def _judge(arguments: argparse.Namespace, config: Config, forecaster: Forecaster) -> int:
    """The config as it is, and the nearest change that helps."""
    from wherry.cli.plan_answer import page, show
    from wherry.plan.choose import CHOSEN, nearest_change

    now = forecaster.exact(config)
    if left := [key for key in CHOSEN if key in config.auto]:
        note = f'"auto" is counted at its default here, and --auto chooses it: {", ".join(left)}'
        now = replace(now, notes=(*now.notes, note))
    screen = _screen(arguments)
    show(screen, now)  # the search for a change takes longer than the answer
    change = None
    if not now.fits or not now.machine.busy:
        with screen.status("looking for the nearest change that helps"):
            change = nearest_change(config, now, forecaster.quick, confirm=forecaster.exact)
    said = list(_change_lines(now, change))
    for line in said:
        screen.print(line, markup=False)
    if arguments.html:
        _write(arguments.html, page(now, said))
    if arguments.json:
        print(json.dumps(now.to_dict() | {"change": change and change.to_dict()}, indent=2))
    return 0 if now.fits else 1


def _auto(arguments: argparse.Namespace, config: Config, forecaster: Forecaster) -> int:
    from wherry.cli.plan_answer import page, show
    from wherry.plan.choose import NothingFits, as_text, choose, free_keys

    screen = _screen(arguments)
    choice, text = None, ""
    try:
        with screen.status("looking for the config that trains fastest"):
            choice = choose(
                config,
                forecaster.quick,
                forecaster.data_ranks,
                free=free_keys(config),
                disk=arguments.disk_path,
                confirm=forecaster.exact,
            )
        found, text = choice.estimate, as_text(config, choice)
        told, said = choice.to_dict(), list(_choice_lines(choice))
    except NothingFits as nothing:
        found, said = nothing.smallest, [f"N{str(nothing).removeprefix('plan: n')}"]
        told = {"values": None, "reasons": {}, "tried": nothing.tried, "fitting": 0, "estimate": found.to_dict()}
    if arguments.output and text:
        _write(arguments.output, text)
        said.append(f"Written to {arguments.output}.")
    if arguments.html:
        _write(arguments.html, page(found, said, text))
    if arguments.json:
        print(json.dumps(told, indent=2))
    show(screen, found)
    screen.print()
    for line in said:
        screen.print(line, markup=False)
    if text and not arguments.output and not arguments.json:
        print(f"\n{text}", end="")
    return 0 if choice is not None else 1


def _choice_lines(choice: Choice) -> Iterator[str]:
    found = choice.estimate
    if found.precision == "fp32" and found.machine.gpus:
        # Not chosen, as it is not the same training.
        yield f"Weights are fp32, as the config has them; --set {found.machine.half}.enabled=true is faster."
    yield f"Chosen among {choice.tried} configs, {choice.fitting} of which fit:"
    for key, value in choice.values.items():
        yield f"  {key} = {json.dumps(value)}"


def _check_flags(arguments: argparse.Namespace) -> None:
    given = {name for name, value in vars(arguments).items() if value is not None and value is not False}
    if "dry_run" in given:
        for name, why in (
            ("auto", "--dry-run: runs one config; give --auto -o FILE first, then --config FILE --dry-run"),
            ("html", "--html: shows an estimate; leave --dry-run out"),
            *((each, f"{flag(each)}: a dry run asks nobody for room or rates; leave it out") for each in SIZES),
        ):
            if name in given:
                raise WherryError(why)
    _sizes(arguments)
    if "machine" in given:
        known(arguments.machine)
    if arguments.gpus == 0:
        for name in ("gpu_memory", "pcie"):
            if name in given:
                raise WherryError(f"{flag(name)}: with --gpus 0 there is no GPU; leave one of them out")
    for name, least in (("gpus", 0), ("nodes", 1), ("sequence", 1), ("tensor_parallel", 1), ("pipeline_parallel", 1)):
        if name in given and getattr(arguments, name) < least:
            raise WherryError(f"{flag(name)}: expected {least} or more, got {getattr(arguments, name)}")
    for other in ("machine", "dry_run"):
        if {"again", other} <= given:
            raise WherryError(
                f"--again: measures this machine, which {flag(other)} does not ask about; leave one of them out"
            )
    for name in {"html", "output"} & given:
        path = Path(getattr(arguments, name))
        if not path.parent.is_dir():
            raise WherryError(f"{flag(name)}: there is no folder {path.parent}; make it first")
        if path.is_dir():
            raise WherryError(f"{flag(name)}: {path} is a folder; name a file")


def _sizes(arguments: argparse.Namespace) -> dict[str, int]:
    given = ((name, getattr(arguments, name), most) for name, most in SIZES.items())
    return {name: parse_bytes(text, flag(name), most) for name, text, most in given if text is not None}


def _machine(arguments: argparse.Namespace, config: Config) -> Machine:
    """The machine that is asked about, with what is said of it in numbers."""
    from wherry.plan import probe

    sizes = _sizes(arguments)
    if arguments.machine is not None:
        base = known(arguments.machine)
    elif arguments.gpus and len(sizes) == len(SIZES) and not probe.gpu_names():
        # All is said, and this machine has no GPU whose rates could be meant: nothing needs to be measured.
        base = replace(known("a100"), name="a machine of A100s")
    else:
        folder = probe.disk_folder(config, arguments.disk_path)
        base = probe.this_machine(folder, again=bool(arguments.again), every_gpu=True)
        base = base.with_host_memory(config.wherry.host_memory)
        for name in ("gpu_memory", "pcie") if arguments.gpus is None and not base.gpus else ():
            if name in sizes:
                raise WherryError(f"{flag(name)}: this machine has no GPU; add --gpus 1, or name a --machine")
    machine = described(base, gpus=arguments.gpus, nodes=arguments.nodes, **sizes)
    if machine.gpus and not machine.gpu_memory:
        raise WherryError("--gpus: how large are they? add --gpu-memory, like 24GB, or name a --machine")
    return machine


# What is said, and written.


def _screen(arguments: argparse.Namespace) -> Screen:
    """For people; with --json nobody sees it."""
    screen = Screen(highlight=False, file=io.StringIO() if arguments.json else None)
    screen.width = min(screen.width, WIDTH)
    return screen


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise WherryError(f"{path} cannot be written: {error.strerror}") from error


def _change_lines(now: Estimate, change: Tried | None) -> Iterator[str]:
    """The nearest change, and the flags that make it."""
    if now.fits and now.machine.busy:
        yield "What would be faster is not told: the machine was busy when it was measured."
    elif change is None:
        yield "No nearby change would be faster." if now.fits else "No nearby change would fit; try --auto."
    elif now.fits:
        faster = change.estimate.samples_per_second / now.samples_per_second - 1
        yield f"Faster by {faster:.0%} with {change.words}:"
    else:
        took = f", and take about {seconds(change.estimate.seconds)} a step" if change.estimate.seconds else ""
        yield f"It would fit with {change.words}{took}:"
    for key, value in (change.values if change is not None else {}).items():
        yield f"  --set {key}={value if isinstance(value, str) else json.dumps(value)}"


# A dry run.


def _dry_run(arguments: argparse.Namespace, source: ModelSource, config: Config, grid: Grid, ranks: int | None) -> int:
    """On the machine that is meant; where none is, on as few ranks as hold the model together."""
    from wherry.plan.dry_run import dry_run
    from wherry.tiers.streams import accelerator

    gpus = arguments.gpus
    if gpus is None and arguments.machine is not None:
        gpus = known(arguments.machine).gpus
    gpu = accelerator() is not None if gpus is None else gpus > 0
    found = dry_run(
        source.share(grid, config.working_dtype()),
        config,
        ranks=grid.data_ranks(ranks or max(grid.size, max(1, gpus or 0) * (arguments.nodes or 1))),
        rank=arguments.rank or 0,
        sequence=arguments.sequence,
        tensor=grid.tensor,
        gpu=gpu,
    )
    if arguments.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        _show_dry_run(_screen(arguments), found, gpu=gpu)
    return 0


def _show_dry_run(screen: Screen, found: DryRun, *, gpu: bool) -> None:
    screen.print(
        f"{found.model}: {found.parameters:,} parameters, {found.placement}\n"
        f"rank {found.rank:,} of {found.ranks:,}, micro-batch {found.micro_batch} x accumulation {found.accumulation}; "
        f"dry run in {found.seconds:.1f} s\n",
        markup=False,
    )
    if found.calls:
        sent = table("collectives of a step", ">calls", ">whole tensors", min_width=14)
        for name, calls in sorted(found.calls.items()):
            sent.add_row(name, f"{calls:,}", size(found.bytes[name]))
        screen.print(sent)
        screen.print()
    held = table("bytes of the rank", "on", ">at the peak", ">highest")
    # Without a GPU, what rests on the device and on the host is in one memory.
    at_peak, highest, peaks = Counter[tuple[str, str]](), Counter[tuple[str, str]](), Counter[str]()
    for line in found.memory:
        place = place_name(line.tier, gpu=gpu)
        at_peak[line.category, place] += line.at_peak
        highest[line.category, place] += line.highest
        peaks[place] += line.at_peak
    for (category, place), nbytes in at_peak.items():
        if highest[category, place]:
            held.add_row(category, place, size(nbytes), size(highest[category, place]))
    for place, peak in peaks.items():
        held.add_row("[bold]peak[/]", place, f"[bold]{size(peak)}[/]", "")
    screen.print(held)
