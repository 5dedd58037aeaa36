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
from wherry.plan.machines import Machine, described, kept_free, known
from wherry.plan.quantities import parse_bytes, parse_count, seconds, size

if TYPE_CHECKING:
    from wherry.plan.choose import Tried
    from wherry.plan.dry_run import DryRun
    from wherry.plan.estimate import Estimate, Use
    from wherry.plan.forecaster import Forecaster
    from wherry.plan.grid import Grid
    from wherry.plan.model_source import ModelSource

WIDTH = 80
SIZES = ("gpu_memory", "host_memory", "disk", "pcie", "stream", "disk_bandwidth")
BAR = 40
COLOURS = {
    "parameters": "blue",
    "gradients": "green",
    "optimizer": "magenta",
    "gathered": "cyan",
    "activations": "yellow",
    "buffers": "red",
}


def main(arguments: argparse.Namespace) -> int:
    from wherry.sources import around

    _check_flags(arguments)
    with around(arguments.model, online=bool(arguments.online)):
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
    from wherry.plan.choose import CHOSEN, nearest_change

    now = forecaster.exact(config)
    if left := [key for key in CHOSEN if key in config.auto]:
        note = f'"auto" is counted at its default here, and --auto chooses it: {", ".join(left)}'
        now = replace(now, notes=(*now.notes, note))
    screen = _screen(arguments)
    _show(screen, now)  # the search for a change takes longer than the answer
    change = None
    if not now.fits or not now.machine.busy:
        with screen.status("looking for the nearest change that helps"):
            change = nearest_change(config, now, forecaster.quick, confirm=forecaster.exact)
    told = _change_line(now, change)
    screen.print(told, markup=False)
    if arguments.html:
        _write_page(arguments.html, now, told)
    if arguments.json:
        print(json.dumps(now.to_dict() | {"change": change and change.to_dict()}, indent=2))
    return 0 if now.fits else 1


def _auto(arguments: argparse.Namespace, config: Config, forecaster: Forecaster) -> int:
    from wherry.plan.choose import as_text, choose, free_keys

    screen = _screen(arguments)
    with screen.status("looking for the config that trains fastest"):
        choice = choose(
            config,
            forecaster.quick,
            forecaster.data_ranks,
            free=free_keys(config),
            disk=arguments.disk_path,
            confirm=forecaster.exact,
        )
    text, found = as_text(config, choice), choice.estimate
    if arguments.output:
        _write(arguments.output, text)
    if arguments.html:
        _write_page(arguments.html, found)
    if arguments.json:
        print(json.dumps(choice.to_dict(), indent=2))
        return 0
    _show(screen, found)
    if found.precision == "fp32" and found.machine.gpus:
        # Not chosen, as it is not the same training.
        screen.print(f"Weights are fp32, as the config has them; --set {found.machine.half}.enabled=true is faster.")
    print()
    if not arguments.output:
        print(text, end="")
        return 0
    print(f"Chosen among {choice.tried} configs, {choice.fitting} of which fit:")
    for key, value in choice.values.items():
        print(f"  {key} = {json.dumps(value)}")
    print(f"Written to {arguments.output}.")
    return 0


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


def _machine(arguments: argparse.Namespace, config: Config) -> Machine:
    """The machine that is asked about, with what is said of it in numbers."""
    from wherry.plan import probe

    sizes = {name: parse_bytes(text, flag(name)) for name in SIZES if (text := getattr(arguments, name)) is not None}
    if arguments.machine is not None:
        base = known(arguments.machine)
    elif arguments.gpus and len(sizes) == len(SIZES) and not probe.gpu_names():
        # All is said, and this machine has no GPU whose rates could be meant: nothing needs to be measured.
        base = replace(known("a100"), name="a machine of A100s")
    else:
        folder = probe.disk_folder(config, arguments.disk_path)
        base = probe.this_machine(folder, again=bool(arguments.again), every_gpu=True)
    machine = described(base, gpus=arguments.gpus, nodes=arguments.nodes, **sizes)
    if machine.gpus and not machine.gpu_memory:
        raise WherryError("--gpus: how large are they? add --gpu-memory, like 24GB, or name a --machine")
    return machine


# What is printed, and written as a page.


def _screen(arguments: argparse.Namespace) -> Screen:
    """For people; with --json nobody sees it."""
    screen = Screen(highlight=False, file=io.StringIO() if arguments.json else None)
    screen.width = min(screen.width, WIDTH)
    return screen


def _write_page(path: str, now: Estimate, change: str = "") -> None:
    page = Screen(highlight=False, file=io.StringIO(), record=True, width=WIDTH)
    _show(page, now)
    page.print(change, markup=False)
    _write(path, page.export_html(inline_styles=True))


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise WherryError(f"{path} cannot be written: {error.strerror}") from error


def _show(screen: Screen, now: Estimate) -> None:
    for line in _headings(now):
        screen.print(line, markup=False)
    screen.print()
    rows = table("bytes of a rank", "rest on", ">", min_width=14)
    for row in now.rows:
        if row.bytes:
            category = f"[{COLOURS[row.category]}]■[/] {row.category}"
            rows.add_row(category, place_name(row.tier, gpu=now.machine.gpus > 0), size(row.bytes))
    screen.print(rows)
    screen.print()
    for use in now.uses:
        if use.needed:
            screen.print(_use_line(use, now))
    screen.print(kept_free(now.machine), style="dim")
    screen.print()
    for line in _time_lines(now):
        screen.print(line, markup=False)
    for note in now.notes:
        screen.print(f"Note: {note}", style="dim", markup=False)


def _headings(now: Estimate) -> Iterator[str]:
    tokens = f" of {now.sequence:,} tokens" if now.sequence > 1 else ""
    how = ", activations recomputed" if now.recompute else ""
    yield f"{now.model}: {now.parameters:,} parameters"
    yield f"{now.placement.name}, {now.precision}, {now.optimizer}{how}"
    grid = now.grid
    if grid.size > 1:
        stage = f"; bytes of stage {grid.stage}" if grid.pipe > 1 else ""
        stages = f"{grid.pipe} stage{'s' * (grid.pipe > 1)}"
        yield f"{grid.tensor} tensor-parallel x {stages} x {now.data_ranks:,} data-parallel ranks{stage}"
    ranks = f"{now.data_ranks:,} rank{'s' * (now.data_ranks > 1)}"
    yield (
        f"{ranks} x micro-batch {now.micro_batch} x accumulation {now.accumulation}"
        f" = {now.samples:,} sample{'s' * (now.samples > 1)}{tokens}"
    )
    machine = now.machine
    measured = " (measured)" if machine.measured else ""
    nodes = f"{machine.nodes} nodes, each " if machine.nodes > 1 else ""
    gpus = f"{machine.gpus} x {machine.gpu_memory / 1e9:.0f} GB GPU, " if machine.gpus else ""
    yield f"on {machine.name}{measured}: {nodes}{gpus}{machine.host_memory / 1e9:.0f} GB host memory"


def _use_line(use: Use, now: Estimate) -> str:
    """A bar of the categories in a place, and whether they fit in it."""
    whose = "each GPU" if use.place == "GPU" else f"the {use.place}" + (" of a node" if now.machine.nodes > 1 else "")
    bar, drawn, reached = "", 0, 0
    for category, nbytes in use.parts.items():
        reached += nbytes
        end = round(BAR * reached / max(use.needed, use.usable))
        bar += f"[{COLOURS[category]}]{'█' * (end - drawn)}[/]"
        drawn = end
    bar += f"[dim]{'░' * (BAR - drawn)}[/]"
    spare = use.usable - use.needed
    verdict = f"[green]fits[/], {size(spare)} to spare" if use.fits else f"[bold red]{size(-spare)} too much[/]"
    return f"{bar} {verdict}\n{whose}: {size(use.needed)} of {size(use.usable)} usable"


def _time_lines(now: Estimate) -> Iterator[str]:
    from wherry.plan.roofline import WORDS

    if now.time is None:
        return
    what = "tokens" if now.sequence > 1 else "samples"
    yield f"A step takes about {seconds(now.time.total)}: {now.tokens_per_second:,.0f} {what} a second."
    yield f"It is limited by {now.time.limited_by}. By itself each would take:"
    for name, value in sorted(now.time.terms.items(), key=lambda item: -item[1]):
        if value > 0:
            yield f"  {WORDS[name]:<22}{seconds(value):>10}"


def _change_line(now: Estimate, change: Tried | None) -> str:
    if now.fits and now.machine.busy:
        return "What would be faster is not told: the machine was busy when it was measured."
    if change is None:
        return "No nearby change would be faster." if now.fits else "No nearby change would fit; try --auto."
    found = change.estimate
    if not now.fits:
        took = f", a step about {seconds(found.seconds)}" if found.seconds else ""
        return f"It would fit with {change.words}{took}."
    return f"Faster by {100 * (found.samples_per_second / now.samples_per_second - 1):.0f} %: {change.words}."


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
        held.add_row(category, place, size(nbytes), size(highest[category, place]))
    for place, peak in peaks.items():
        held.add_row("[bold]peak[/]", place, f"[bold]{size(peak)}[/]", "")
    screen.print(held)
