"""Everything that wants a GPU, in one command that ends in time: python benchmarks/gpu.py [--deadline SECONDS].

Measured rates, and steps of GPT-2 beside the bound that they set: sizes of the published table with the device capped
and not, update policies side by side, tokens in a step from 1k to 64k, what the allocator holds unused, others'
offload where it is installed, and the largest model that takes a step under small caps. Rows are written as they come;
what the deadline leaves out is named. Without a GPU, `--toy` runs all of it on the CPU at a size that shows that it
works, and nothing else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import bounds, systems
from benchmarks.rooms import Room, RoomFailed
from benchmarks.systems import Recipe
from wherry.observe import bench
from wherry.tiers.budget import free_host_memory
from wherry.train.presets import GPT2

WORKER = Path(__file__).parent / "gpu_worker.py"
GIB = 2**30
CAP = 32
CAPS = (8, 16, 24, 32)
POLICIES = ("at_step", "before_use", "in_backward")
CLIPS = (1.0, 0.0)
UNUSED = ("plain", "recompute", "recompute, contiguous")
PEERS = ("fsdp2-cpu", "deepspeed-2-cpu", "deepspeed-3-cpu", "deepspeed-3-super")
TOKENS = tuple(1024 * 2**power for power in range(7))
# Bytes of host memory that a parameter's states take at most, gradients under way included.
HOST_BYTES = {"wherry": 15, "fsdp2": 18, "deepspeed": 24}
# What a build takes, seconds and seconds for each billion of parameters; a guess that later ones correct.
BUILD_S, BUILD_S_PER_BILLION = 5.0, 9.0


def _gpt2(layers: int, hidden: int, batch: int, length: int = 1024) -> Recipe:
    return Recipe(
        layers=layers,
        hidden=hidden,
        heads=hidden // 128 if hidden % 128 == 0 else 24,
        sequence=length,
        vocabulary=GPT2,
        batch=batch,
        length=length,
        clip=1.0,
        dtype="bf16",
        recompute=True,
        built_there=True,
    )


# The published table of ZeRO-Offload: layers, width and the batch of a GPU.
SIZES: dict[str, Recipe] = {
    "1b": _gpt2(20, 2048, 32),
    "2b": _gpt2(40, 2048, 32),
    "4b": _gpt2(64, 2304, 32),
    "6b": _gpt2(53, 3072, 16),
    "8b": _gpt2(72, 3072, 16),
    "10b": _gpt2(50, 4096, 10),
    "11b": _gpt2(55, 4096, 8),
    "12b": _gpt2(60, 4096, 4),
    "13b": _gpt2(65, 4096, 4),
}
_TOY = replace(_gpt2(2, 128, 2, 32), heads=2, vocabulary=256)
TOY: dict[str, Recipe] = {"1b": _TOY, "2b": replace(_TOY, layers=3)}


class NoTime(Exception):
    """The deadline leaves no room for a measure."""


class Session:
    """One run: its deadline, its room, the rates and the results."""

    def __init__(self, options: Any, results: bench.Results) -> None:
        self.options = options
        self.results = results
        self.deadline = time.monotonic() + options.deadline
        self.sizes = TOY if options.toy else SIZES
        self.rates: bounds.Rates | None = None
        self.build_pace = 1.0
        self._room: Room | None = None

    def left(self) -> float:
        # Some seconds are for the last rows and the file.
        return self.deadline - time.monotonic() - 5.0

    def ask(self, need: float = 0.0, **request: Any) -> Any:
        """Ask the worker. One that fails, or does not answer before the deadline, is replaced."""
        if self.left() < max(need, 1.0):
            raise NoTime(f"left out: {self.left():.0f} s were left of {self.options.deadline} s")
        if self._room is None:
            self._room = Room(1, worker=WORKER, environment=systems.gpu_environment())
        try:
            answer = self._room.ask(timeout=self.left(), do="answer", request=request)[0]
        except RoomFailed:
            self.close()
            raise
        if "failed" in answer:
            raise RoomFailed(answer["failed"])
        return answer["found"]

    def build(self, name: str, system: str, recipe: Recipe, warmup: int = 2) -> dict[str, Any]:
        """Build a system if memory and time allow; the reason why not is an exception's."""
        reason = systems.cannot_run(system) or self._too_large(system, recipe)
        if reason:
            raise RoomFailed(reason)
        need = self.build_pace * (BUILD_S + BUILD_S_PER_BILLION * recipe.parameters / 1e9)
        begun = time.monotonic()
        found: dict[str, Any] = self.ask(need, do="build", name=name, system=system, recipe=recipe, warmup=warmup)
        taken = time.monotonic() - begun
        if recipe.parameters > 5e8 and system.startswith("wherry"):
            self.build_pace = min(3.0, max(self.build_pace, 1.1 * self.build_pace * taken / need))
        return found

    def _too_large(self, system: str, recipe: Recipe) -> str | None:
        if systems.place_of(system).optimizer != "cpu":
            return None
        need = HOST_BYTES[system.partition("-")[0]] * recipe.parameters
        free = free_host_memory()
        if need > 0.97 * free:
            return f"needs {need / GIB:.0f} GiB of host memory, {free / GIB:.0f} GiB are free"
        return None

    def close(self) -> None:
        if self._room is not None:
            self._room.close()
            self._room = None


def step_row(
    session: Session, case: dict[str, Any], system: str, recipe: Recipe, answers: Sequence[dict[str, Any]], **facts: Any
) -> bench.Row:
    """A row from timed blocks of steps, with its part of the bound."""
    place, seconds = systems.place_of(system), [answer["seconds"] for answer in answers]
    row = bench.row(case, system, "s", seconds, **facts)
    last, tokens = answers[-1], recipe.batch * recipe.length
    work = bounds.work_of(
        recipe.parameters,
        recipe.flops,
        recipe.dtype,
        offload_optimizer=place.optimizer,
        offload_param=place.parameters,
        gpu=session.rates is not None and session.rates.up is not None,
    )
    if session.rates is not None:
        row["bound_s"], row["bound_by"] = bounds.bound(work, session.rates)
        row["of_limit"] = row["bound_s"] / row["value"]
    row["tokens_per_s"] = tokens / row["value"]
    # Of the model's own operations, and with those that recomputation repeats.
    row["tflops"] = recipe.flops / row["value"] / 1e12 * (3 / 4 if recipe.recompute else 1)
    row["hardware_tflops"] = recipe.flops / row["value"] / 1e12
    row["parameters"] = recipe.parameters
    row["loss"] = last["losses"][-1]
    for key in ("peak_device_bytes", "peak_reserved_bytes", "peak_resident_bytes"):
        row[key] = last[key]
    tiers: dict[str, int] = {}
    for state in last["memory"]:
        tiers[state["tier"]] = tiers.get(state["tier"], 0) + state["bytes_actual"]
    row["state_bytes_by_tier"] = tiers
    row["host_bytes_per_parameter"] = tiers["host"] / recipe.parameters if "host" in tiers else None
    return row


def blocks(session: Session, name: str, rounds: int, steps: int, **more: Any) -> list[dict[str, Any]]:
    """Timed blocks of steps: as many as there is time for, and one at least."""
    found: list[dict[str, Any]] = []
    for _ in range(rounds):
        try:
            found.append(session.ask(do="time", name=name, steps=steps, **more))
        except NoTime:
            if not found:
                raise
            break
    return found


def let_go(session: Session, name: str) -> None:
    """Close what a failure may have left of a system."""
    if session._room is not None:
        with suppress(RoomFailed, NoTime):
            session.ask(do="close", name=name)


# The stages.


def rates(session: Session) -> None:
    """What the machine reaches."""
    folder = session.options.path
    answer = session.ask(do="rates", dtype="bf16", toy=session.options.toy, folder=folder)
    session.rates = bounds.Rates(**answer["rates"])
    session.results.add(*answer["rows"])


def side_by_side(session: Session) -> None:
    """Update policies and others' offload, clipping on and off, 8k tokens a step: in one process, in turns."""
    size = session.sizes["1b"]
    for clip in CLIPS:
        recipe = replace(size, batch=min(size.batch, 8), clip=clip)
        case = {"measure": "side by side", "model": "1b", "tokens": recipe.batch * recipe.length, "clip": clip}
        # An update in the backward cannot know the norm that it would clip by.
        policies = [policy for policy in POLICIES if not (clip and policy == "in_backward")]
        subjects = {f"wherry-2-cpu {policy}": ("wherry-2-cpu", replace(recipe, policy=policy)) for policy in policies}
        subjects["wherry-3-cpu"] = ("wherry-3-cpu", recipe)
        subjects["wherry-2"] = ("wherry-2", recipe)
        subjects |= {peer: (peer, recipe) for peer in session.options.peers}
        _in_turns(session, case, subjects)


def _in_turns(session: Session, case: dict[str, Any], subjects: dict[str, tuple[str, Recipe]]) -> None:
    answers: dict[str, list[dict[str, Any]]] = {}
    reasons: dict[str, str] = {}
    for name, (system, recipe) in subjects.items():
        try:
            session.build(name, system, recipe)
            answers[name] = []
        except (RoomFailed, NoTime) as failure:
            reasons[name] = str(failure)
            if session._room is None:  # with it went those that were built before
                reasons |= {lost: f"ended with {name}: {failure}" for lost in answers}
                answers.clear()
    try:
        for _ in range(session.options.rounds):
            for name in answers:
                answers[name].append(session.ask(do="time", name=name, steps=session.options.steps))
    except (RoomFailed, NoTime) as failure:
        reasons |= {name: str(failure) for name in answers if not answers[name]}
    rows = []
    for name, (system, recipe) in subjects.items():
        if answers.get(name):
            rows.append(step_row(session, case, system, recipe, answers[name]) | {"system": name})
        else:
            rows.append(bench.row(case, name, "s", reason=reasons[name]))
    bench.compare(rows)
    session.results.add(*rows)
    for name in answers:
        let_go(session, name)


def tokens(session: Session) -> None:
    """Tokens in a step from 1k to 64k, one engine."""
    size = session.sizes["1b"]
    system = "wherry-2-cpu"
    counts = TOKENS if not session.options.toy else tuple(size.length * 2**power for power in range(3))
    session.build("tokens", system, replace(size, batch=counts[0] // size.length))
    for count in counts:
        recipe = replace(size, batch=count // size.length)
        case = {"measure": "tokens in a step", "model": "1b", "tokens": count}
        try:
            found = blocks(session, "tokens", session.options.rounds, session.options.steps, batch=recipe.batch)
        except (RoomFailed, NoTime) as failure:
            session.results.add(bench.row(case, system, "s", reason=str(failure)))
            if session._room is None:
                return
        else:
            session.results.add(step_row(session, case, system, recipe, found))
    let_go(session, "tokens")


def sizes(session: Session, names: Sequence[str]) -> None:
    """Sizes of the published table, the device capped at 32 GB and then not."""
    for model in names:
        recipe = session.sizes[model]
        # Weights and gradients rest on the device while they leave half of the cap for activations.
        system = "wherry-2-cpu" if 4 * recipe.parameters < CAP * GIB / 2 else "wherry-3-cpu"
        case = {"measure": "published sizes", "model": model, "tokens": recipe.batch * recipe.length}
        try:
            session.ask(do="cap", gib=CAP)
            session.build(model, system, recipe, warmup=1)
        except (RoomFailed, NoTime) as failure:
            for cap in (CAP, None):
                session.results.add(bench.row(case | {"cap_gib": cap}, system, "s", reason=str(failure)))
            let_go(session, model)
            continue
        rounds = session.options.rounds if recipe.parameters < 3e9 else 2
        for cap in (CAP, None):
            try:
                session.ask(do="cap", gib=cap)
                found = blocks(session, model, rounds, 1 if recipe.parameters > 3e9 else session.options.steps)
            except (RoomFailed, NoTime) as failure:
                session.results.add(bench.row(case | {"cap_gib": cap}, system, "s", reason=str(failure)))
                continue
            session.results.add(step_row(session, case | {"cap_gib": cap}, system, recipe, found))
        let_go(session, model)
    if session._room is not None:
        session.ask(do="cap", gib=None)


def largest(session: Session) -> None:
    """The largest model that takes a step under small caps: found by dry run, shown by one real step."""
    system, layers = "wherry-3-cpu", (2, 4) if session.options.toy else (4, 8)
    base = replace(session.sizes["1b"], batch=1) if session.options.toy else _gpt2(4, 4096, 1)
    try:
        few, more = (session.ask(do="fits", recipe=replace(base, layers=n), system=system) for n in layers)
    except (RoomFailed, NoTime) as failure:
        few = more = None
        reason = f"the dry run failed: {failure}"
    free, done = free_host_memory(), None
    for cap in CAPS:
        case = {"measure": "largest model", "cap_gib": cap}
        if few is None or more is None:
            session.results.add(bench.row(case, system, "s", reason=reason))
            continue
        predicted = _layers_within(few, more, layers, {"device": 0.9 * cap * GIB, "host": 0.92 * free}, base)
        recipe = replace(base, layers=min(predicted, 3) if session.options.toy else predicted)
        facts = {"layers": recipe.layers, "predicted_by": "dry run", "host_free_bytes": free}
        try:
            if done != recipe:
                if done is not None:
                    session.ask(do="close", name="largest")
                session.ask(do="cap", gib=cap)
                done = None
                session.build("largest", system, recipe, warmup=1)
                done = recipe
            session.ask(do="cap", gib=cap)
            found = blocks(session, "largest", 1, 1)
        except (RoomFailed, NoTime) as failure:
            session.results.add(bench.row(case, system, "s", reason=str(failure), **facts))
            if session._room is None:
                done = None
            continue
        session.results.add(step_row(session, case, system, recipe, found, **facts))


def _layers_within(
    few: dict[str, int], more: dict[str, int], layers: tuple[int, int], limits: dict[str, float], base: Recipe
) -> int:
    """Bytes grow by the same for every layer: how many are within all limits. The host holds the states at least."""
    best = 10_000
    for tier, limit in limits.items():
        slope = (more[tier] - few[tier]) / (layers[1] - layers[0])
        if tier == "host":
            per_layer = replace(base, layers=1).parameters - replace(base, layers=0).parameters
            slope = max(slope, HOST_BYTES["wherry"] * per_layer)
        start = few[tier] - slope * layers[0]
        if slope > 0:
            best = min(best, int((limit - start) / slope))
    return max(best, 1)


def fragments(session: Session) -> None:
    """What torch's allocator holds and nobody uses, by where checkpoints are."""
    for system in UNUSED:
        try:
            session.results.add(session.ask(do="fragments", system=system, toy=session.options.toy))
        except (RoomFailed, NoTime) as failure:
            session.results.add(bench.row({"measure": "fragments"}, system, "bytes", reason=str(failure)))


STAGES: dict[str, Callable[[Session], None]] = {
    "rates": rates,
    "side": side_by_side,
    "tokens": tokens,
    "fragments": fragments,
    "small": lambda session: sizes(session, [name for name in ("1b", "2b", "4b") if name in session.sizes]),
    "largest": largest,
    "large": lambda session: sizes(
        session, [name for name in ("8b", "10b", "6b", "11b", "12b", "13b") if name in session.sizes]
    ),
}


def run(session: Session, names: Sequence[str]) -> None:
    """All stages in turn; one that fails is a row with the reason, and the others go on."""
    for name in names:
        begun = time.monotonic()
        try:
            STAGES[name](session)
        except (RoomFailed, NoTime) as failure:
            session.results.add(bench.row({"measure": name}, "wherry", "s", reason=str(failure)))
        print(f"{name}: {time.monotonic() - begun:.0f} s, {session.left():.0f} s left", file=sys.stderr, flush=True)


def table(rows: Sequence[bench.Row]) -> None:
    """Print the rows at 80 columns: the rates, then a table for each measure."""
    notes = []
    for row in rows:
        if "rate" in row["case"]:
            unit, word = (1e12, "TFLOPS") if row["unit"] == "flop/s" else (1e9, "GB/s")
            notes.append(f"{row['case']['rate']} {row['case']['dtype']}: {row['value'] / unit:,.2f} {word}")
    bench.show("measured rates", (), [], [*notes, ""])
    steps = [row for row in rows if "rate" not in row["case"]]
    for measure in dict.fromkeys(row["case"]["measure"] for row in steps):
        if measure == "fragments":
            _show_unused([row for row in steps if row["case"]["measure"] == measure])
            continue
        lines, notes = [], []
        for row in (row for row in steps if row["case"]["measure"] == measure):
            case = ", ".join(f"{key} {value}" for key, value in row["case"].items() if key != "measure")
            name = f"{row['system']}: {case}"
            if row["reason"] is not None:
                lines.append([name, *["-"] * 6])
                notes.append(f"{name}: {row['reason']}")
            else:
                lines.append([name, *_figures(row)])
        bench.show(measure, ("", "s", "spread", "tokens/s", "TFLOPS", "of bound", "GiB"), lines, [*notes, ""])


def _show_unused(rows: Sequence[bench.Row]) -> None:
    """Bytes that the allocator holds: in use at their highest, held, never used at once, unused in the median step."""
    kept = ("highest_bytes", "reserved_bytes", "excess_bytes", "value")
    lines = [[row["system"], *("-" if row["reason"] else f"{row[key] / 1e9:.3f} GB" for key in kept)] for row in rows]
    notes = [f"{row['system']}: {row['reason']}" for row in rows if row["reason"]]
    title = f"fragments of the allocator ({rows[0]['case'].get('allocator', 'cuda')})"
    bench.show(title, ("", "in use", "held", "never used", "unused"), lines, [*notes, ""])


def _figures(row: bench.Row) -> list[str]:
    peak = row["peak_device_bytes"]
    return [
        f"{row['value']:.3f}",
        bench.spread_words(row),
        f"{row['tokens_per_s']:,.0f}",
        f"{row['tflops']:.0f}",
        "" if row["of_limit"] is None else f"{row['of_limit']:.2f}",
        "" if peak is None else f"{peak / GIB:.1f}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.parser("gpu", __doc__ or "")
    parser.add_argument("--deadline", type=bench.positive, default=530, help="seconds after which it has ended (530)")
    parser.add_argument("--stages", type=bench.listed(tuple(STAGES)), default=list(STAGES), help=", ".join(STAGES))
    parser.add_argument("--rounds", type=bench.positive, default=5, help="blocks of steps of each")
    parser.add_argument("--steps", type=bench.positive, default=3, help="steps in a block")
    parser.add_argument("--peers", type=bench.listed(PEERS), default=list(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--path", help="a folder on the disk whose rate is measured too")
    parser.add_argument("--toy", action="store_true", help="on the CPU, at a size that only shows that it works")
    options = bench.parse(parser, argv)
    if not options.toy and systems.device_type() != "cuda":
        parser.error("no GPU is seen by torch here; --toy shows on the CPU that everything works")
    stages = options.stages if options.stages[0] == "rates" else ["rates", *options.stages]
    settings = {"deadline_s": options.deadline, "rounds": options.rounds, "steps": options.steps, "toy": options.toy}
    settings |= {"stages": stages, "sizes": {name: asdict(recipe) for name, recipe in SIZES.items()}}
    results = bench.Results("gpu", options, settings)
    session = Session(options, results)
    try:
        run(session, stages)
    finally:
        session.close()
    results.close()
    table(results.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
