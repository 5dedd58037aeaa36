"""A training step of GPT-2 under each system: python benchmarks/steps.py [WHAT] [--quick] [--path FOLDER].

`resident`: all states on the device, beside plain PyTorch, DDP, FSDP2 and DeepSpeed. `offload`: optimizer, or optimizer
and parameters, on host and disk, by update policy, beside FSDP2 and DeepSpeed. `window`: eight micro-batches a step,
layer by layer and step by step, with states on host and disk.

The same model, seed, data and optimizer settings for all, on the CPU or with --gpu on a GPU, the global batch and the
cores divided among the ranks. Every measure has processes of its own, which end with it: peak memory is that of one
system alone. `--before PYTHON` measures another Wherry beside this one: that of another environment's interpreter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks import harness, systems
from benchmarks.processes import TIMEOUT, Failed, Processes
from benchmarks.published import PUBLISHED
from benchmarks.systems import Recipe
from wherry.train.presets import PRESETS, Shape

ORACLE = "plain"
WARMUP = 2
POLICIES = ("at_step", "before_use", "in_backward", "delayed")
PEERS = ("plain", "ddp", "fsdp2", "deepspeed")


def _recipe(shape: Shape, batch: int, length: int, **more: Any) -> Recipe:
    return Recipe(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        sequence=shape.sequence,
        vocabulary=shape.vocabulary,
        batch=batch,
        length=length,
        clip=1.0,
        **more,
    )


def _large(layers: int, hidden: int) -> Recipe:
    # GPT-2's vocabulary, rounded up to whole tiles of a matrix unit.
    shape = Shape(layers, hidden, hidden // 128 if hidden % 128 == 0 else 24, 1024, 50304)
    return _recipe(shape, 8, 1024, dtype="bf16", recompute=True, built="device")


def _published(name: str, sequence: int) -> Recipe:
    config = PUBLISHED[name]
    shape = Shape(config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"], sequence)
    more = {"vocabulary": config["vocab_size"], "dtype": "bf16", "recompute": True, "built": "device"}
    return replace(_recipe(shape, 2, sequence), published=name, **more)


# For a GPU, billions of parameters by layers and width: those of 1, 4 and 10 are ZeRO-Offload's published ones.
LARGE = {"1b": (20, 2048), "4b": (64, 2304), "7b": (34, 4096), "10b": (50, 4096)}
MODELS: dict[str, Recipe] = {
    "tiny": _recipe(Shape(layers=2, hidden=32, heads=2, sequence=16), batch=4, length=16),
    "10m": _recipe(PRESETS["gpt2-10m"], batch=4, length=128),
    "125m": _recipe(PRESETS["gpt2-124m"], batch=2, length=256),
    **{name: _large(layers, hidden) for name, (layers, hidden) in LARGE.items()},
    "qwen3-4b": _published("qwen3-4b", 2048),
    "qwen3-tiny": _published("qwen3-tiny", 16),
}


@dataclass(frozen=True)
class Turn:
    """One measure of one system."""

    # Of each step, until the last rank has taken it.
    steps: list[float]
    # Of all ranks together: that is what the machine must have.
    peak_bytes: int
    # Before a model was built: Python, torch and the system itself.
    empty_bytes: int
    losses: list[float]
    built_s: float
    # What rank 0's engine says that it holds, by state and tier, and what its device held.
    memory: list[dict[str, Any]]
    device_bytes: int | None
    trace: dict[str, Any] | None = None
    # Of what has such: the forwards' and the backwards' parts of the steps.
    phases: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, built: list[Any], timed: list[Any], trace: dict[str, Any] | None = None) -> Turn:
        """What the ranks answered."""
        losses = [b["losses"] + t["losses"] for b, t in zip(built, timed, strict=True)]
        return cls(
            steps=[max(step) for step in zip(*(t["seconds"] for t in timed), strict=True)],
            peak_bytes=sum(t["peak_bytes"] for t in timed),
            empty_bytes=sum(b["empty_bytes"] for b in built),
            losses=[statistics.fmean(step) for step in zip(*losses, strict=True)],
            built_s=max(b["seconds"] for b in built),
            memory=timed[0]["memory"],
            device_bytes=timed[0]["device_bytes"],
            trace=trace,
            phases={name: statistics.median(values) for name, values in timed[0]["phases"].items()},
        )


@dataclass
class Subject:
    """One system with one recipe on some ranks: its turns, or the reason why there are none."""

    model: str
    ranks: int
    system: str
    label: str
    recipe: Recipe
    steps: int
    warmup: int = WARMUP
    gpu: bool = False
    python: str = sys.executable
    timeout: float = TIMEOUT
    reason: str | None = None

    def __post_init__(self) -> None:
        self.reason = systems.cannot_run(self.system)

    def case(self, measure: str) -> dict[str, Any]:
        recipe = self.recipe
        found = {"model": self.model, "dtype": recipe.dtype, "ranks": self.ranks, "clip": recipe.clip}
        if recipe.optimizer != "adamw":
            found["optimizer"] = recipe.optimizer
        if recipe.accumulation > 1:
            found["window"] = recipe.accumulation
        return found | {"tokens": recipe.batch * recipe.length, "measure": measure}

    def take(self) -> Turn | None:
        """Measure once more; after a failure, nothing more."""
        if self.reason is not None:
            return None
        try:
            with Processes(self.ranks, gpu=self.gpu, python=self.python) as processes:
                built = processes.ask(do="build", system=self.system, recipe=self.recipe, warmup=self.warmup)
                timed = processes.ask(
                    self.timeout, do="time", system=self.system, steps=self.steps, first=self.warmup > 0
                )
        except Failed as failure:
            self.reason = str(failure)
            return None
        return Turn.of(built, timed)


def measure(subjects: Sequence[Subject], rounds: int, results: harness.Results) -> None:
    """Two rows for each subject, kept as rounds go on: its step's time, and its peak of memory.

    The losses of plain PyTorch on one rank are the oracle of those of the same recipe.
    """
    turns: list[list[Turn]] = [[] for _ in subjects]
    for turn in range(rounds):
        order = [(index + turn) % len(subjects) for index in range(len(subjects))]
        for index in order:
            subject = subjects[index]
            print(f"round {turn + 1} of {rounds}: {subject.model} {subject.label}", file=sys.stderr, flush=True)
            taken = subject.take()
            if taken is not None:
                turns[index].append(taken)
            results.add(
                *(row for i, one in enumerate(subjects) if turns[i] or one.reason for row in rows_of(one, turns[i]))
            )
    oracles = {
        _same_training(subject): taken[0].losses
        for subject, taken in zip(subjects, turns, strict=True)
        if subject.system == ORACLE and taken
    }
    rows = []
    for subject, taken in zip(subjects, turns, strict=True):
        oracle = oracles.get(_same_training(subject))
        for row in rows_of(subject, taken):
            if oracle and taken:
                row["loss_difference"] = max(systems.loss_difference(turn.losses, oracle) for turn in taken)
            rows.append(row)
    results.add(*rows)


def _same_training(subject: Subject) -> Recipe:
    return replace(subject.recipe, order="", policy="auto", persistence=None)


def rows_of(subject: Subject, turns: Sequence[Turn]) -> list[harness.Row]:
    """Of its step's time and of its peak of memory; with the reason, where it took no turn."""
    step, peak = subject.case("step"), subject.case("peak memory")
    if not turns:
        reason = subject.reason or "not measured yet"
        return [harness.row(case, subject.label, unit, reason=reason) for case, unit in ((step, "s"), (peak, "B"))]
    recipe, last = subject.recipe, turns[-1]
    # Of one measure the steps themselves are the repeats.
    seconds = [statistics.median(turn.steps) for turn in turns] if len(turns) > 1 else turns[0].steps
    times = harness.row(step, subject.label, "s", seconds)
    times["tokens_per_s"] = recipe.batch * recipe.length / times["value"]
    # Of the model's own operations, without those that recomputation repeats.
    times["tflops"] = recipe.flops_per_token * times["tokens_per_s"] / 1e12
    times |= {"built_s": statistics.median(turn.built_s for turn in turns), "first_losses": turns[0].losses[:4]}
    times |= last.phases
    if last.trace is not None:
        times["trace"] = last.trace
    peaks = harness.row(peak, subject.label, "B", [float(turn.peak_bytes) for turn in turns])
    peaks["empty_bytes"] = statistics.median(turn.empty_bytes for turn in turns)
    peaks["states_bytes"] = systems.states_bytes(subject.system, recipe, subject.ranks)
    peaks |= {"memory": last.memory, "device_bytes": last.device_bytes}
    return [times, peaks]


# What is measured.


def systems_of(
    what: str, places: Sequence[str], peers: Sequence[str], clip: float, policies: Sequence[str]
) -> list[str]:
    """Their labels: a system of Wherry's may have its policy, or the order of a window, behind a colon."""
    found = []
    for place in places:
        ours = f"wherry-{place}"
        if what == "window":
            found += [f"{ours}:layer_major", f"{ours}:step_major"]
        elif what == "offload":
            # An update in the backward cannot know the norm that it would clip by.
            found += [f"{ours}:{policy}" for policy in policies if not (clip and policy == "in_backward")]
        else:
            found.append(ours)
        found += [name for peer in peers if (name := systems.peer_of(ours, peer)) in systems.SYSTEMS]
    plain = [peer for peer in peers if peer in systems.SYSTEMS and peer != "fsdp2"]
    return list(dict.fromkeys([*plain, *found]))


def recipe_of(
    model: str, label: str, dtype: str, clip: float, window: int, batch: int | None, optimizer: str = "adamw"
) -> Recipe:
    """A window has as many micro-batches, each of the model's own size."""
    recipe = MODELS[model]
    word = label.partition(":")[2]
    chosen = {"order": word} if word.endswith("_major") else {"policy": word} if word else {}
    if word == "streamed":
        chosen = {"policy": "before_use", "update_on": "device"}
    return replace(
        recipe,
        dtype=dtype,
        clip=clip,
        accumulation=window,
        batch=(batch or recipe.batch) * window,
        optimizer=optimizer,
        **chosen,
    )


PLACES = {
    "resident": tuple(place.name for place in systems.RESIDENT),
    "offload": tuple(place.name for place in systems.OFFLOADED),
    "window": ("3-cpu", "3-nvme"),
}


def subjects_of(what: str, options: argparse.Namespace, window: int) -> list[Subject]:
    found: list[Subject] = []
    counts = {"steps": options.steps, "warmup": options.warmup, "timeout": options.timeout}
    for model in options.models:
        for dtype in options.dtypes or [MODELS[model].dtype]:
            for clip in options.clips:
                recipe = recipe_of(model, "", dtype, clip, window, options.batch, options.optimizer)
                if "plain" in options.peers and not options.gpu and 1 not in options.ranks:
                    found.append(Subject(model, 1, ORACLE, ORACLE, recipe, **counts))
                for ranks in options.ranks:
                    if recipe.batch // window % ranks:
                        raise SystemExit(f"--ranks {ranks}: {recipe.batch} sequences do not divide among them")
                    for label in systems_of(what, options.places, options.peers, clip, options.policies):
                        if options.optimizer != "adamw" and label.partition("-")[0] in ("ddp", "fsdp2"):
                            continue  # a shard of FSDP2's is no matrix
                        if options.optimizer == "muon" and label == "deepspeed-0":
                            continue  # it takes the raw gradient there
                        if label == ORACLE and ranks > 1:
                            continue
                        own = recipe_of(model, label, dtype, clip, window, options.batch, options.optimizer)
                        system = label.partition(":")[0]
                        one = Subject(model, ranks, system, label, own, gpu=options.gpu, **counts)
                        found.append(one)
                        if options.before and label.startswith("wherry"):
                            found.append(replace(one, label=f"before: {label}", python=options.before))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("what", nargs="?", choices=tuple(PLACES), default="resident", help="(default: resident)")
    models = ", ".join(MODELS)
    parser.add_argument("--models", type=harness.listed(MODELS), default=["10m"], help=f"of {models} (default: 10m)")
    parser.add_argument("--dtypes", type=harness.listed(("fp32", "bf16")), help="(default: the model's own)")
    parser.add_argument("--clips", type=lambda text: [float(x) for x in text.split(",")], default=[1.0], help="(1)")
    parser.add_argument("--places", type=harness.listed(systems.PLACES), help=f"of {', '.join(systems.PLACES)}")
    parser.add_argument("--policies", type=harness.listed(POLICIES), default=["before_use"], help=", ".join(POLICIES))
    parser.add_argument("--peers", type=harness.listed((*PEERS, "none")), default=list(PEERS), help=", ".join(PEERS))
    parser.add_argument("--ranks", type=harness.positives, default=[1], help="numbers of ranks (default: 1)")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help="(default: adamw)")
    parser.add_argument("--batch", type=harness.positive, help="sequences of a micro-batch, over all ranks")
    parser.add_argument("--window", type=harness.positive, default=8, help="micro-batches of a window (8)")
    parser.add_argument("--before", metavar="PYTHON", help="the interpreter of an environment with another Wherry")
    parser.add_argument("--gpu", action="store_true", help="on the GPU of this machine")
    parser.add_argument("--path", type=harness.folder, default=".", help="a folder on the disk for states (current)")
    parser.add_argument("--steps", type=harness.positive, help="steps in one measure")
    parser.add_argument("--warmup", type=_or_none, default=WARMUP, help=f"steps before it ({WARMUP}); 0: none at all")
    parser.add_argument(
        "--timeout", type=harness.positive, default=int(TIMEOUT), help="seconds for the steps of a measure"
    )
    options = harness.parse(parser, argv)
    options.places = options.places or list(PLACES[options.what])
    options.steps = options.steps or (3 if options.quick else 8)
    rounds = options.rounds or (1 if options.quick or options.gpu else 5)
    os.environ[systems.DISK_FOLDER] = os.path.abspath(options.path)
    subjects = subjects_of(options.what, options, options.window if options.what == "window" else 1)
    muon = ["muon"] if options.optimizer == "muon" else []
    part = "-".join([options.what, *muon, *options.models, *(["gpu"] if options.gpu else [])])
    settings = {"rounds": rounds, "steps": options.steps, "warmup": options.warmup}
    settings["models"] = {model: vars(MODELS[model]) for model in options.models}
    results = harness.Results("steps", options, settings, part)
    measure(subjects, rounds, results)
    harness.show(results.rows, {"losses": losses_words})
    results.close()
    return 0


def _or_none(text: str) -> int:
    return 0 if text == "0" else harness.positive(text)


def losses_words(row: harness.Row) -> str:
    """How losses compare with those of plain PyTorch."""
    difference = row.get("loss_difference")
    if difference is None:
        return ""
    return "same" if systems.same_losses(difference, row["case"]["dtype"]) else f"{difference:.0e} off"


if __name__ == "__main__":
    harness.alone(main)
