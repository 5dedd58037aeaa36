"""Everything that wants a GPU, in one command that ends in time: python benchmarks/gpu.py [--deadline SECONDS].

Measured rates, and steps of GPT-2 beside the bound that they set: update policies side by side, others' offload where
it is installed, with clipping and without, and with it from 1k to 64k tokens in a step, the largest model that takes a
step under small caps, sizes of the published table with the device capped and not, and what the allocator holds
unused. Every stage has its share of the time; rows are written as they come, and what time leaves out is named: a part
of the stages (`--stages`) has a file of its own, and all the time for itself. DeepSpeed compiles its host optimizer at
its first use, which is before the peers have their turn; `python benchmarks/peers.py` does it once. Without a GPU,
`--toy` runs all of it on the CPU at a size that shows that it works, and nothing else.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import alone, bounds, systems
from benchmarks.gpu_session import (
    GIB,
    SIZES,
    NoTime,
    Session,
    blocks,
    gpt2,
    host_bytes,
    let_go,
    step_row,
    uncap,
)
from benchmarks.rooms import RoomFailed
from benchmarks.systems import Recipe
from wherry.observe import bench

CAP = 32
CAPS = (8, 16, 24, 32)
# Who takes other numbers of tokens too, beside ours, and how often.
TOKEN_PEERS = (systems.COMPUTE, "fsdp2-cpu", "deepspeed-2-cpu", "deepspeed-3-super")
TOKEN_ROUNDS = 2
# The policy that stands beside others' offload first. An update in the backward cannot know the norm it would clip by.
POLICIES = {1.0: ("before_use", "at_step", "delayed"), 0.0: ("in_backward", "before_use")}
# With weights on the host beside the optimizer.
WEIGHTS_TOO = "wherry-3-cpu"
UNUSED = ("plain", "recompute")
PEERS = ("fsdp2-cpu", "deepspeed-2-cpu", "deepspeed-3-super", "deepspeed-3-cpu", "deepspeed-3-reflow")
TOKENS = tuple(1024 * 2**power for power in range(7))
# Bytes of the device that what is closed may still have. More would be missing under the caps of the next stages, which
# have a new process then.
LEFT = GIB
# What is left of the layers after a process that was out of host memory.
FEWER = 0.85


def rates(session: Session) -> None:
    """What the machine reaches."""
    folder = session.options.path
    answer = session.ask(do="rates", dtype="bf16", toy=session.options.toy, folder=folder)
    session.rates = bounds.Rates(**answer["rates"])
    session.results.add(*answer["rows"])


Subjects = dict[str, tuple[str, Recipe]]


def policies(session: Session) -> None:
    """Update policies side by side, clipping on and off, 8k tokens a step; with clipping other placements too."""
    for clip in POLICIES:
        case, recipe, ours = _with_clipping(session, clip)
        if clip:
            ours |= {WEIGHTS_TOO: (WEIGHTS_TOO, recipe), "wherry-2": ("wherry-2", recipe)}
        _in_turns(session, {"measure": "policies"} | case, ours)


def peers(session: Session) -> None:
    """Others' offload with clipping, 8k tokens a step and then from 1k to 64k, beside the policy that suits it best."""
    turns, case = _beside(session, 1.0)
    turns.take(case)
    size = session.sizes["1b"]
    counts = TOKENS if not session.options.toy else tuple(size.length * 2**power for power in range(3))
    names = [name for name in turns.subjects if name in TOKEN_PEERS or name.startswith("wherry")]
    for count in counts:
        if count != case["tokens"]:
            turns.take(case | {"tokens": count}, count // size.length, names=names)
    turns.close()


def unclipped(session: Session) -> None:
    """The same without clipping, 8k tokens a step, beside an update in the backward."""
    turns, case = _beside(session, 0.0)
    turns.take(case)
    turns.close()


def _beside(session: Session, clip: float) -> tuple[Turns, dict[str, Any]]:
    """What computes alone, ours and others', built in this order: what time leaves out is a peer.

    Ours is also there with weights on the host, as some of the peers have them.
    """
    session.compile_peers()
    case, recipe, ours = _with_clipping(session, clip)
    name, (system, best) = next(iter(ours.items()))
    subjects = {systems.COMPUTE: (systems.COMPUTE, recipe), name: (system, best)}
    subjects[name.replace(system, WEIGHTS_TOO)] = WEIGHTS_TOO, best
    subjects |= {peer: (peer, recipe) for peer in session.options.peers}
    return Turns(session, subjects), {"measure": "beside others"} | case


def _with_clipping(session: Session, clip: float) -> tuple[dict[str, Any], Recipe, Subjects]:
    size = session.sizes["1b"]
    recipe = replace(size, batch=min(size.batch, 8), clip=clip)
    case = {"model": "1b", "tokens": recipe.batch * recipe.length, "clip": clip}
    ours = {f"wherry-2-cpu {policy}": ("wherry-2-cpu", replace(recipe, policy=policy)) for policy in POLICIES[clip]}
    return case, recipe, ours


class Turns:
    """Systems of one process that are timed in turns: the rows of those that could be, and why the others could not."""

    def __init__(self, session: Session, subjects: Subjects) -> None:
        self.session, self.subjects = session, subjects
        self.built: list[str] = []
        self.reasons: dict[str, str] = {}
        # Of the first steps, on the same tokens: they show that all of them train the same model.
        self.losses: dict[str, list[float]] = {}
        for name in subjects:
            self._build(name)
        for lost in [name for name in self.built if name in self.reasons]:
            self.built.remove(lost)
            del self.reasons[lost]
            self._build(lost)

    def _build(self, name: str) -> None:
        try:
            self.losses[name] = self.session.build(name, *self.subjects[name])["losses"]
            self.built.append(name)
        except (RoomFailed, NoTime) as failure:
            self.reasons[name] = str(failure)
            self._if_ended(name, failure)

    def _if_ended(self, name: str, failure: Exception) -> None:
        """A process that ends takes with it all that was built there."""
        if self.session.ended:
            self.reasons.setdefault(name, str(failure))
            for lost in self.built:
                self.reasons.setdefault(lost, f"ended with {name}: {failure}")

    def _off(self, name: str) -> float | None:
        """How far the first losses are from those of the first system that trains.

        Computing alone has but one, and so have updates that come a step late.
        """
        trains = [other for other in self.subjects if other in self.losses and other != systems.COMPUTE]
        if not trains:
            return None
        alike = 1 if name == systems.COMPUTE or name.endswith("delayed") else None
        return systems.loss_difference(self.losses[name][:alike], self.losses[trains[0]][:alike])

    def take(self, case: dict[str, Any], batch: int | None = None, *, names: Sequence[str] | None = None) -> None:
        """The rows of some rounds, kept as they come. `batch` is one that was not taken before, by some `names`."""
        session, options = self.session, self.session.options
        subjects = {name: found for name, found in self.subjects.items() if names is None or name in names}
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in subjects}
        failed: dict[str, str] = {}
        here = [name for name in subjects if name in self.built]

        def keep() -> None:
            rows = []
            for name, (system, recipe) in subjects.items():
                taken, reason = replace(recipe, batch=batch or recipe.batch), failed.get(name) or self.reasons.get(name)
                if answers[name]:
                    row = step_row(session, case, system, taken, answers[name])
                    rows.append(row | {"system": name, "loss_difference": self._off(name)})
                elif reason:
                    rows.append(bench.row(case, name, "s", reason=reason))
            session.results.put(*rows)

        for turn in range(options.rounds if batch is None else min(options.rounds, TOKEN_ROUNDS)):
            start = turn % max(1, len(here))
            for name in here[start:] + here[:start]:
                if name in failed or name in self.reasons:
                    continue
                count = batch or subjects[name][1].batch
                # What was built is timed once in any case: for that it has the time of all.
                more = {"another": batch is not None and not turn, "whole": batch is None and not turn}
                try:
                    answers[name].append(session.time(name, options.steps, count, **more))
                except (RoomFailed, NoTime) as failure:
                    failed[name] = str(failure)
                    self._if_ended(name, failure)
                keep()
        keep()

    def close(self) -> None:
        left = [let_go(self.session, name) for name in self.built]
        if left and (left[-1] is None or left[-1] > LEFT):
            self.session.close()


def _in_turns(session: Session, case: dict[str, Any], subjects: Subjects) -> None:
    turns = Turns(session, subjects)
    turns.take(case)
    turns.close()


def place_for(recipe: Recipe) -> str:
    """Weights and gradients rest on the device while they leave half of the cap for activations."""
    return "wherry-2-cpu" if 4 * recipe.parameters < CAP * GIB / 2 else WEIGHTS_TOO


def sizes(session: Session, names: Sequence[str]) -> None:
    """Sizes of the published table, the device capped at 32 GB and then not."""
    for model in names:
        _size(session, model)
        let_go(session, model)
    uncap(session)


def _size(session: Session, model: str) -> None:
    recipe = session.sizes[model]
    system = place_for(recipe)
    case, ended = {"measure": "published sizes", "model": model}, ""
    try:
        session.ask(do="cap", gib=CAP)
        batch = session.build(model, system, recipe, warmup=1, shrink=True)["batch"]
    except (RoomFailed, NoTime) as failure:
        for cap in (CAP, None):
            tokens = {"tokens": recipe.batch * recipe.length}
            session.results.add(bench.row(case | tokens | {"cap_gib": cap}, system, "s", reason=str(failure)))
        return
    rounds = session.options.rounds if recipe.parameters < 3e9 else 2
    steps = 1 if recipe.parameters > 3e9 else session.options.steps
    for cap in (CAP, None):
        # What the cap leaves no memory for is taken without it: the batch of the table.
        taken = replace(recipe, batch=batch if cap else recipe.batch)
        full = case | {"tokens": taken.batch * taken.length, "cap_gib": cap}
        if ended:  # it took along what was built
            session.results.add(bench.row(full, system, "s", reason=ended))
            continue
        try:
            session.ask(do="cap", gib=cap)
            found = blocks(session, model, rounds, steps, taken.batch, another=taken.batch != batch)
        except (RoomFailed, NoTime) as failure:
            session.results.add(bench.row(full, system, "s", reason=str(failure)))
            ended = str(failure) if session.ended else ""
            continue
        session.results.add(step_row(session, full, system, taken, found, batch_of_table=recipe.batch))


def largest(session: Session) -> None:
    """The largest model that takes a step under small caps: found by dry run, shown by one real step."""
    system, layers = WEIGHTS_TOO, LAYERS_TOY if session.options.toy else LAYERS
    # Built in parts: the device never holds the whole of it.
    base = replace(session.sizes["1b"] if session.options.toy else gpt2(1, 4096, 1), batch=1, in_parts=True)
    try:
        few, more = (session.ask(do="fits", recipe=replace(base, layers=n), system=system) for n in layers)
    except (RoomFailed, NoTime) as failure:
        few = more = None
        reason = f"the dry run failed: {failure}"
    free, done, most = bounds.free_host_memory(), None, sys.maxsize
    for cap in CAPS:
        case = {"measure": "largest model", "cap_gib": cap}
        if few is None or more is None:
            session.results.add(bench.row(case, system, "s", reason=reason))
            continue
        predicted, tier = _layers_within(few, more, layers, {"device": 0.9 * cap * GIB, "host": 0.92 * free}, base)
        recipe = replace(base, layers=min(predicted, 3 if session.options.toy else most))
        facts = {"layers": recipe.layers, "predicted_by": "dry run", "limited_by": tier, "host_free_bytes": free}
        try:
            if done != recipe:
                if done is not None:
                    session.ask(do="close", name="largest")
                session.ask(do="cap", gib=cap)
                done = None
                session.build("largest", system, recipe, warmup=1)
                done = recipe
            session.ask(do="cap", gib=cap)
            found = blocks(session, "largest", 1, 1, recipe.batch)
        except (RoomFailed, NoTime) as failure:
            session.results.add(bench.row(case, system, "s", reason=str(failure), **facts))
            if session.ended:  # the system ends what takes more host memory than there is
                done, most = None, max(1, int(FEWER * recipe.layers))
            continue
        session.results.add(step_row(session, case, system, recipe, found, **facts))
    let_go(session, "largest")
    uncap(session)


# Layers of the two dry runs from which others are told: more than are gathered at once.
LAYERS, LAYERS_TOY = (8, 16), (2, 4)


def _layers_within(
    few: dict[str, int], more: dict[str, int], layers: tuple[int, int], limits: dict[str, float], base: Recipe
) -> tuple[int, str]:
    """Bytes grow by the same for every layer: how many are within all limits, and the tier that has no room for more.

    The host holds the states at least.
    """
    found: dict[str, int] = {}
    for tier, limit in limits.items():
        slope = (more[tier] - few[tier]) / (layers[1] - layers[0])
        if tier == "host":
            per_layer = replace(base, layers=1).parameters - replace(base, layers=0).parameters
            slope = max(slope, host_bytes("wherry", base.clip) * per_layer)
        start = few[tier] - slope * layers[0]
        if slope > 0:
            found[tier] = max(1, int((limit - start) / slope))
    tier = min(found, key=found.__getitem__)
    return found[tier], tier


def fragments(session: Session) -> None:
    """What torch's allocator holds and nobody uses, by where checkpoints are."""
    for system in UNUSED:
        try:
            session.results.add(session.ask(do="fragments", system=system, toy=session.options.toy))
        except (RoomFailed, NoTime) as failure:
            session.results.add(bench.row({"measure": "fragments"}, system, "bytes", reason=str(failure)))


STAGES: dict[str, Callable[[Session], None]] = {
    "rates": rates,
    "policies": policies,
    "peers": peers,
    "unclipped": unclipped,
    "largest": largest,
    "small": lambda session: sizes(session, [name for name in ("1b", "4b", "2b") if name in session.sizes]),
    "large": lambda session: sizes(
        session, [name for name in ("8b", "10b", "6b", "11b", "12b", "13b") if name in session.sizes]
    ),
    "fragments": fragments,
}


# Parts of the time; what a stage leaves is for those after it. Without rates there is no bound, and they come with the
# start of a process and of the GPU.
SHARES = {
    "rates": 10,
    "policies": 7,
    "peers": 13,
    "unclipped": 6,
    "largest": 7,
    "small": 6,
    "large": 5,
    "fragments": 2,
}


def run(session: Session, names: Sequence[str]) -> None:
    """All stages in turn; one that fails, or that its time ends, is a row with the reason, and the others go on."""
    for index, name in enumerate(names):
        begun = time.monotonic()
        session.share_out(SHARES[name] / sum(SHARES[later] for later in names[index:]))
        try:
            STAGES[name](session)
        except (RoomFailed, NoTime) as failure:
            session.results.add(bench.row({"measure": name}, "wherry", "s", reason=str(failure)))
        except Exception as failure:  # a fault of this script, too, costs its stage and not the run
            traceback.print_exc()
            reason = f"{type(failure).__name__}: {failure}"
            session.results.add(bench.row({"measure": name}, "wherry", "s", reason=reason))
            session.close()
        session.share_out(1.0)
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
                difference = row.get("loss_difference")
                if difference is not None and not systems.same_losses(difference, "bf16"):
                    notes.append(f"{name}: NOT THE LOSSES OF THE OTHERS, {difference:.0e} off")
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


def _part(stages: Sequence[str]) -> str:
    """What a file of some stages is named by: those of the whole stay as they are."""
    return "" if set(stages) == set(STAGES) else "-".join(stages[1:]) or stages[0]


def main(argv: Sequence[str] | None = None) -> int:
    begun = time.monotonic()
    parser = bench.parser("gpu", __doc__ or "")
    parser.add_argument("--deadline", type=bench.positive, default=520, help="seconds after which it has ended (520)")
    parser.add_argument("--stages", type=bench.listed(tuple(STAGES)), default=list(STAGES), help=", ".join(STAGES))
    parser.add_argument("--rounds", type=bench.positive, help="blocks of steps of each (3; 2 with --quick)")
    parser.add_argument("--steps", type=bench.positive, default=3, help="steps in a block")
    some = bench.listed(PEERS, or_none=True)
    parser.add_argument("--peers", type=some, default=list(PEERS), help=f"of {', '.join(PEERS)}, or none (all)")
    parser.add_argument("--path", type=bench.folder, help="a folder on the disk whose rate is measured too")
    parser.add_argument("--toy", action="store_true", help="on the CPU, at a size that only shows that it works")
    options = bench.parse(parser, argv)
    if not options.toy and systems.device_type() != "cuda":
        parser.error("no GPU is seen by torch here; --toy shows on the CPU that everything works")
    options.rounds = options.rounds or (2 if options.quick else 3)
    stages = ["rates", *(name for name in options.stages if name != "rates")]
    settings = {"deadline_s": options.deadline, "rounds": options.rounds, "steps": options.steps, "toy": options.toy}
    settings |= {"stages": stages, "sizes": {name: asdict(recipe) for name, recipe in SIZES.items()}}
    results = bench.Results("gpu", options, settings, part=_part(stages))
    session = Session(options, results, begun)
    try:
        run(session, stages)
        results.close()  # before a process that has pinned much is waited for
    finally:
        session.close()
    table(results.rows)
    return 0


if __name__ == "__main__":
    alone(main)
