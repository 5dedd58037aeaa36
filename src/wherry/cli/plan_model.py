"""`wherry plan MODEL`: a model, a config and a machine, in one answer that a person can read."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry import config as configs
from wherry.config import Config
from wherry.errors import WherryError
from wherry.placement import place_name
from wherry.plan.machine import Machine, described, kept_free, known
from wherry.plan.quantities import parse_bytes, parse_count, seconds, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from wherry.plan.choose import Change, Choice
    from wherry.plan.dry_run import DryRun
    from wherry.plan.estimate import Estimate, Use
    from wherry.plan.forecaster import Forecaster
    from wherry.plan.grid import Grid
    from wherry.plan.source import Source

WIDTH = 80
STATES = ("parameters", "gradients", "optimizer")
SIZES = ("gpu_memory", "host_memory", "disk", "pcie", "stream", "disk_bandwidth")
BAR = 24


def main(arguments: argparse.Namespace) -> int:
    _check_flags(arguments)
    overrides = configs.parse_overrides(arguments.set or ())
    if arguments.recompute:
        overrides["activation_checkpointing.policy"] = "recompute"
    config = configs.load(arguments.config, overrides=overrides)
    from wherry.sources import find

    source = find(arguments.model)
    grid = _grid(arguments)
    if arguments.dry_run:
        return _dry_run(arguments, source, config, grid)
    from wherry.plan.forecaster import Forecaster

    machine = _machine(arguments, config)
    ranks = _ranks(arguments) or machine.ranks()
    if arguments.nodes is not None and machine.gpus and ranks > machine.ranks():
        raise WherryError(
            f"--ranks: {ranks:,} ranks need a GPU each, and {machine.nodes} x {machine.gpus} GPUs are "
            f"{machine.ranks()}; give more --nodes or --gpus, or leave --nodes out"
        )
    machine = machine.holding(ranks)
    forecaster = Forecaster(source, machine, ranks, arguments.sequence, grid)
    if arguments.auto:
        return _auto(arguments, config, forecaster)
    now = forecaster.exact(config)
    now = replace(now, notes=(*now.notes, *_left_open(config)))
    if not arguments.json:
        _show(now)  # the search for a change takes longer than the answer
    change = _change(config, now, forecaster)
    if arguments.html:
        _write_page(arguments.html, now, change.words if change else None)
    if arguments.json:
        print(json.dumps(now.to_dict() | {"change": _change_as_json(change)}, indent=2))
    else:
        _console().print(_change_line(now, change), markup=False)
    return 0 if now.fits else 1


def _left_open(config: Config) -> Iterator[str]:
    """What a plan without --auto counts as if nobody had left it to the planner."""
    from wherry.plan.choose import CHOSEN

    if left := [key for key in CHOSEN if key in config.auto]:
        yield f'"auto" is counted at its default here, and --auto chooses it: {", ".join(left)}'


def _check_flags(arguments: argparse.Namespace) -> None:
    for flag, needs in (
        ("output", "auto"), ("disk_path", "auto"), ("rank", "dry_run"), ("stage", "dry_run")
    ):  # fmt: skip
        if getattr(arguments, flag) is not None and not getattr(arguments, needs):
            name = "-o" if flag == "output" else f"--{flag.replace('_', '-')}"
            raise WherryError(f"{name}: goes with --{needs.replace('_', '-')}")
    if arguments.auto and arguments.dry_run:
        raise WherryError("--dry-run: runs one config; give --auto -o FILE first, then --config FILE --dry-run")
    if arguments.html and arguments.dry_run:
        raise WherryError("--html: shows an estimate; leave --dry-run out")
    for name in SIZES:
        if arguments.dry_run and getattr(arguments, name) is not None:
            raise WherryError(f"--{name.replace('_', '-')}: a dry run asks nobody for room or rates; leave it out")
    for flag, value, least in (("--gpus", arguments.gpus, 0), ("--nodes", arguments.nodes, 1)):
        if value is not None and value < least:
            raise WherryError(f"{flag}: expected {least} or more, got {value}")
    if arguments.again and (arguments.machine is not None or arguments.dry_run):
        other = "--machine" if arguments.machine is not None else "--dry-run"
        raise WherryError(f"--again: measures this machine, which {other} does not ask about; leave one of them out")
    for flag, path in (("--html", arguments.html), ("-o", arguments.output)):
        if path is not None and not Path(path).parent.is_dir():
            raise WherryError(f"{flag}: there is no folder {Path(path).parent}; make it first")
        if path is not None and Path(path).is_dir():
            raise WherryError(f"{flag}: {path} is a folder; name a file")
    if arguments.sequence is not None and arguments.sequence < 1:
        raise WherryError(f"--sequence: expected 1 or more, got {arguments.sequence}")


def _ranks(arguments: argparse.Namespace) -> int | None:
    return parse_count(arguments.ranks, "--ranks") if arguments.ranks is not None else None


def _grid(arguments: argparse.Namespace) -> Grid:
    from wherry.plan.grid import Grid

    given = {"tensor": arguments.tensor_parallel, "pipe": arguments.pipeline_parallel, "stage": arguments.stage}
    try:
        return Grid(**{name: value for name, value in given.items() if value is not None})
    except WherryError as error:
        raise WherryError(f"--{error}") from error


def _base(arguments: argparse.Namespace, config: Config) -> Machine:
    """The machine that is asked about, without what is said of it in numbers."""
    if arguments.machine is not None:
        return known(arguments.machine)
    from wherry.plan import probe

    if arguments.gpus and all(getattr(arguments, name) is not None for name in SIZES) and not probe.gpu_names():
        # All is said, and this machine has no GPU whose rates could be meant: nothing needs to be measured.
        return replace(known("a100"), name="a machine of A100s")
    folder = probe.disk_folder(config, arguments.disk_path)
    return probe.this_machine(folder, again=bool(arguments.again), every_gpu=True)


def _machine(arguments: argparse.Namespace, config: Config) -> Machine:
    base = _base(arguments, config)
    sizes = {
        name: parse_bytes(text, f"--{name.replace('_', '-')}")
        for name in SIZES
        if (text := getattr(arguments, name)) is not None
    }
    machine = described(base, gpus=arguments.gpus, nodes=arguments.nodes, **sizes)
    if machine.gpus and not machine.gpu_memory:
        raise WherryError("--gpus: how large are they? add --gpu-memory, like 24GB, or name a --machine")
    return machine


# The nearest change.


def _change(config: Config, now: Estimate, forecaster: Forecaster) -> Change | None:
    from wherry.plan.choose import nearest_change

    # The search goes by straight lines between two profiles; what is said is of the very micro-batch.
    return nearest_change(config, now, forecaster.quick, confirm=forecaster.exact)


def _change_as_json(change: Change | None) -> dict[str, Any] | None:
    if change is None:
        return None
    found = change.estimate
    return {
        "words": change.words,
        "values": change.values,
        "fits": found.fits,
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_per_second,
    }


# For people.


def _console() -> Console:
    from wherry.observe.screen import Screen

    console = Screen(highlight=False)
    console.width = min(console.width, WIDTH)
    return console


def _plain_table() -> Table:
    from rich.table import Table

    return Table(box=None, pad_edge=False, header_style="dim")


def _show(now: Estimate) -> None:
    console = _console()
    for line in headings(now):
        console.print(line, markup=False)
    console.print()
    table = _plain_table()
    for header, justify in (("bytes of a rank", "left"), ("rest on", "left"), ("", "right")):
        table.add_column(header, justify=justify, no_wrap=True, min_width=14)  # type: ignore[arg-type]
    resting = {row.category for row in now.rows if row.bytes}
    for row in now.rows:
        # A state of which nothing rests anywhere is told too.
        if row.bytes or (row.category in STATES and row.category not in resting):
            table.add_row(row.category, place_name(row.tier, gpu=now.machine.gpus > 0), size(row.bytes))
    console.print(table)
    console.print()
    for use in now.uses:
        if use.needed:
            console.print(_use_line(use, now))
    console.print(kept_free(now.machine), style="dim")
    console.print()
    for line in _time_lines(now):
        console.print(line, markup=False)
    for note in now.notes:
        console.print(f"Note: {note}", style="dim", markup=False)


def headings(now: Estimate) -> Iterator[str]:
    tokens = f" of {now.sequence:,} tokens" if now.sequence > 1 else ""
    how = ", activations recomputed" if now.recompute else ""
    yield f"{now.model}: {now.parameters:,} parameters"
    yield f"{now.placement.name}, {now.precision}, {now.optimizer}{how}"
    grid = now.grid
    ranks = f"{now.data_ranks:,} rank{'s' * (now.data_ranks > 1)}"
    if grid.size > 1:
        stage = f"; bytes of stage {grid.stage}" if grid.pipe > 1 else ""
        stages = f"{grid.pipe} stage{'s' * (grid.pipe > 1)}"
        yield f"{grid.tensor} tensor-parallel x {stages} x {now.data_ranks:,} data-parallel ranks{stage}"
    yield (
        f"{ranks} x micro-batch {now.micro_batch} x accumulation {now.accumulation}"
        f" = {now.samples:,} sample{'s' * (now.samples > 1)}{tokens}"
    )
    yield f"on {machine_line(now.machine)}"


def machine_line(machine: Machine) -> str:
    nodes = f"{machine.nodes} nodes, each " if machine.nodes > 1 else ""
    gpus = f"{machine.gpus} x {machine.gpu_memory / 1e9:.0f} GB GPU, " if machine.gpus else ""
    measured = " (measured)" if machine.measured else ""
    return f"{machine.name}{measured}: {nodes}{gpus}{machine.host_memory / 1e9:.0f} GB host memory"


def _use_line(use: Use, now: Estimate) -> str:
    whose = "each GPU" if use.place == "GPU" else f"the {use.place}" + (" of a node" if now.machine.nodes > 1 else "")
    filled = min(BAR, round(BAR * use.share)) if use.share != float("inf") else BAR
    colour = "green" if use.fits else "red"
    bar = f"[{colour}]{'█' * filled}[/][dim]{'░' * (BAR - filled)}[/]"
    spare = use.usable - use.needed
    verdict = f"fits, {size(spare)} to spare" if use.fits else f"[bold red]{size(-spare)} too much[/]"
    return f"{bar} {whose}: {size(use.needed)} of {size(use.usable)} usable\n{' ' * BAR} {verdict}"


def _time_lines(now: Estimate) -> Iterator[str]:
    if now.time is None:
        return
    rate = now.tokens_per_second or 0.0
    what = "tokens" if now.sequence > 1 else "samples"
    yield f"A step takes about {seconds(now.time.total)}: {rate:,.0f} {what} a second."
    yield f"It is limited by {now.time.limited_by}. By itself each would take:"
    from wherry.plan.roofline import WORDS

    for name, value in sorted(now.time.terms.items(), key=lambda item: -item[1]):
        if value > 0:
            yield f"  {WORDS[name]:<22}{seconds(value):>10}"


def _change_line(now: Estimate, change: Change | None) -> str:
    if change is None:
        return "No nearby change would be faster." if now.fits else "No nearby change would fit; try --auto."
    found = change.estimate
    if not now.fits:
        took = f", a step about {seconds(found.seconds)}" if found.seconds else ""
        return f"It would fit with {change.words}{took}."
    gain = (found.samples / (found.seconds or 1)) / (now.samples / (now.seconds or 1)) - 1
    return f"Faster by {100 * gain:.0f} %: {change.words}."


# A dry run.


def _dry_run(arguments: argparse.Namespace, source: Source, config: Config, grid: Grid) -> int:
    from wherry.plan.dry_run import dry_run

    gpu = _has_gpus(arguments)
    found = dry_run(
        source.share(grid, config.working_dtype()),
        config,
        ranks=grid.data_ranks(_ranks(arguments) or _ranks_to_run(arguments, grid)),
        rank=arguments.rank or 0,
        sequence=arguments.sequence,
        tensor=grid.tensor,
        gpu=gpu,
    )
    if arguments.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        _show_dry_run(found, gpu=gpu)
    return 0


def _ranks_to_run(arguments: argparse.Namespace, grid: Grid) -> int:
    """Those of the machine that is meant; where none is, as few as hold the model together."""
    gpus = known(arguments.machine).gpus if arguments.machine is not None else 0
    gpus = gpus if arguments.gpus is None else arguments.gpus
    return max(grid.size, max(1, gpus) * (arguments.nodes or 1))


def _has_gpus(arguments: argparse.Namespace) -> bool:
    """Whether the machine that is meant has a device apart from the host."""
    if arguments.gpus is not None:
        return bool(arguments.gpus)
    if arguments.machine is not None:
        return known(arguments.machine).gpus > 0
    import torch

    return torch.cuda.is_available()


def _show_dry_run(found: DryRun, *, gpu: bool) -> None:
    console = _console()
    console.print(
        f"{found.model}: {found.parameters:,} parameters, {found.placement}\n"
        f"rank {found.rank:,} of {found.ranks:,}, micro-batch {found.micro_batch} x accumulation {found.accumulation}; "
        f"dry run in {found.seconds:.1f} s\n",
        markup=False,
    )
    table = _plain_table()
    for header in ("collectives of a step", "calls", "whole tensors"):
        table.add_column(header, justify="left" if header.startswith("coll") else "right", no_wrap=True, min_width=14)
    for name, calls in sorted(found.calls.items()):
        table.add_row(name, f"{calls:,}", size(found.bytes[name]))
    if not found.calls:
        table.add_row("none", "0", size(0))
    console.print(table)
    console.print()
    table = _plain_table()
    for header in ("bytes of the rank", "on", "at the peak", "highest"):
        table.add_column(header, justify="left" if header in ("bytes of the rank", "on") else "right", no_wrap=True)
    for (category, place), (at_peak, highest) in _by_place(found, gpu).items():
        table.add_row(category, place, size(at_peak), size(highest))
    for place, peak in _peaks(found, gpu).items():
        table.add_row("[bold]peak[/]", place, f"[bold]{size(peak)}[/]", "")
    console.print(table)


def _by_place(found: DryRun, gpu: bool) -> dict[tuple[str, str], tuple[int, int]]:
    """At the peak, and the highest. Without a GPU, buffers of the device and of the host are in one memory."""
    places: dict[tuple[str, str], tuple[int, int]] = {}
    for line in found.memory:
        key = line.category, place_name(line.tier, gpu=gpu)
        at_peak, highest = places.get(key, (0, 0))
        places[key] = at_peak + line.at_peak, highest + line.highest
    return places


def _peaks(found: DryRun, gpu: bool) -> dict[str, int]:
    peaks: dict[str, int] = {}
    for tier in dict.fromkeys(line.tier for line in found.memory):
        place = place_name(tier, gpu=gpu)
        peaks[place] = peaks.get(place, 0) + found.peak(tier)
    return peaks


# The planner.


def _auto(arguments: argparse.Namespace, config: Config, forecaster: Forecaster) -> int:
    from wherry.plan.choose import choose, free_keys
    from wherry.plan.write import as_text

    choice = choose(
        config,
        forecaster.quick,
        forecaster.data_ranks,
        free=free_keys(config),
        disk=arguments.disk_path,
        confirm=forecaster.exact,
    )
    text = as_text(config, choice)
    if arguments.output:
        _write(arguments.output, text)
    if arguments.html:
        _write_page(arguments.html, choice.estimate, None)
    if arguments.json:
        print(json.dumps(_choice_as_json(choice), indent=2))
        return 0
    _show(choice.estimate)
    if choice.estimate.precision == "fp32" and choice.estimate.machine.gpus:
        # Not chosen, as it is not the same training.
        _console().print(
            f"Weights are fp32, as the config has them; --set {choice.estimate.machine.half}.enabled=true is faster."
        )
    print()
    if arguments.output:
        _show_choice(choice)
        print(f"Written to {arguments.output}.")
    else:
        print(text, end="")
    return 0


def _choice_as_json(choice: Choice) -> dict[str, Any]:
    return {
        "values": choice.values,
        "reasons": choice.reasons,
        "tried": choice.tried,
        "fitting": choice.fitting,
        "estimate": choice.estimate.to_dict(),
    }


def _show_choice(choice: Choice) -> None:
    print(f"Chosen among {choice.tried} configs, {choice.fitting} of which fit:")
    for key, value in choice.values.items():
        print(f"  {key} = {json.dumps(value)}")


def _write_page(path: str, now: Estimate, change: str | None) -> None:
    from wherry.plan.page import page

    _write(path, page(now, list(headings(now)), change))


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise WherryError(f"{path} cannot be written: {error.strerror}") from error
