"""One run on a GPU: its models, the process that builds them and times their steps, the time that it has, its rows."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import bounds, systems
from benchmarks import peers as builders
from benchmarks.rooms import Room, RoomFailed
from benchmarks.systems import Recipe
from wherry.observe import bench
from wherry.train.presets import GPT2

WORKER = Path(__file__).parent / "gpu_worker.py"
GIB = 2**30
# Seconds for the last rows and the file, and for the end of a process that has pinned much.
RESERVE = 12.0
# And for what has begun, though the share of its stage be over.
PATIENCE = 45.0
# Seconds for a compiler, at most.
COMPILE = 150.0
# Bytes of host memory that a parameter's states take at most, gradients under way included.
HOST_BYTES = {"wherry": 15.0, "fsdp2": 18.0, "deepspeed": 24.0}
# Without clipping gradients are used as they come.
HOST_BYTES_UNCLIPPED = 12.6
# What a build takes, seconds and seconds for each billion of parameters; a guess that the first one corrects.
BUILD_S, BUILD_S_PER_BILLION = 5.0, 9.0


def gpt2(layers: int, hidden: int, batch: int, length: int = 1024) -> Recipe:
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
    "1b": gpt2(20, 2048, 32),
    "2b": gpt2(40, 2048, 32),
    "4b": gpt2(64, 2304, 32),
    "6b": gpt2(53, 3072, 16),
    "8b": gpt2(72, 3072, 16),
    "10b": gpt2(50, 4096, 10),
    "11b": gpt2(55, 4096, 8),
    "12b": gpt2(60, 4096, 4),
    "13b": gpt2(65, 4096, 4),
}
_TOY = replace(gpt2(2, 128, 2, 32), heads=2, vocabulary=256)
TOY: dict[str, Recipe] = {"1b": _TOY, "2b": replace(_TOY, layers=3)}


class NoTime(Exception):
    """The deadline leaves no room for a measure."""


class Session:
    """One run: its deadline, its room, the rates and the results. The time counts from when it was `begun`."""

    def __init__(self, options: Any, results: bench.Results, begun: float | None = None) -> None:
        self.options = options
        self.results = results
        self.deadline = (time.monotonic() if begun is None else begun) + options.deadline - RESERVE
        self.sizes = TOY if options.toy else SIZES
        self.rates: bounds.Rates | None = None
        self._build_paces: list[float] = []
        self._room: Room | None = None
        # Seconds of a sequence in a step, by the name of what was built.
        self._pace: dict[str, float] = {}
        # Peers that ended their process, or did not answer, while they were built, and how.
        self._given_up: dict[str, str] = {}
        self.share_out(1.0)

    def share_out(self, part: float) -> None:
        """What begins now has this part of the time that is left, and begins nothing after it."""
        now = time.monotonic()
        self._ends = now + part * max(0.0, self.deadline - now)

    def left(self, *, whole: bool = False) -> float:
        """Seconds that are left of the stage's share, or of the whole."""
        return max(0.0, (self.deadline if whole else self._ends) - time.monotonic())

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done meanwhile is no part of a stage's share."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self._ends = min(self.deadline, self._ends + time.monotonic() - begun)

    @property
    def build_pace(self) -> float:
        """How many times as long as the guess builds take: the slowest so far."""
        return min(3.0, max(self._build_paces, default=1.0))

    @property
    def ended(self) -> bool:
        """Whether the process is gone, and with it all that was built there."""
        return self._room is None

    def ask(self, need: float = 0.0, *, whole: bool = False, most: float | None = None, **request: Any) -> Any:
        """Ask the worker. One that fails, or does not answer in time, is replaced.

        `need` seconds must be left. `whole`: it may take what is left of the whole time, and not of the stage's share.
        `most` seconds, with some patience, are what it is waited for in any case.
        """
        left = self.left(whole=whole)
        if left < max(need, 1.0):
            raise NoTime(f"left out: {left:.0f} s were left for it of {self.options.deadline} s in all")
        self._start()
        assert self._room is not None
        # What has begun is not given up with its share: a process that ends takes with it what others built.
        share = self.left(whole=whole) if most is None else min(most, self.left(whole=whole))
        timeout = min(self.left(whole=True), max(share, PATIENCE))
        try:
            answer = self._room.ask(timeout=timeout, do="answer", request=request)[0]
        except RoomFailed:
            self.close()
            raise
        if "failed" in answer:
            print(answer.get("trace", answer["failed"]), file=sys.stderr, flush=True)
            raise RoomFailed(answer["failed"])
        return answer["found"]

    def _start(self) -> None:
        """Have a process."""
        if self._room is not None:
            return
        with self.aside():
            self._room = Room(1, worker=WORKER, environment=systems.gpu_environment())
            try:
                self._room.ask(timeout=self.left(whole=True), do="ready")
            except RoomFailed:
                self.close()
                raise

    def compile_peers(self) -> None:
        """What DeepSpeed would compile for a minute while its first system is built, once for all of them."""
        wanted = [peer for peer in self.options.peers if peer.startswith("deepspeed") and not self._reason(peer)]
        if not wanted or builders.built("cpu_adam").is_file():
            return
        with self.aside():
            reason = builders.build(builders.HOST_OPTIMIZER, timeout=min(COMPILE, self.left(whole=True)))
        if reason is not None:
            self._given_up |= dict.fromkeys(wanted, f"its host optimizer is not built: {reason}")

    def _reason(self, system: str) -> str | None:
        """Why a system cannot be tried here, or not again."""
        return systems.cannot_run(system) or self._given_up.get(system)

    def build(self, name: str, system: str, recipe: Recipe, warmup: int = 2, *, shrink: bool = False) -> dict[str, Any]:
        """Build a system if memory and time allow; the reason why not is an exception's.

        `shrink`: where its first step is out of memory, the batch is halved until it is not; the answer has the batch.
        """
        reason = self._reason(system) or self._too_large(system, recipe)
        if reason:
            raise RoomFailed(reason)
        guess = BUILD_S + BUILD_S_PER_BILLION * recipe.parameters / 1e9
        need = self.build_pace * guess
        ours = system.startswith("wherry")
        request = {"name": name, "system": system, "recipe": recipe, "warmup": warmup, "shrink": shrink}
        begun = time.monotonic()
        try:
            found: dict[str, Any] = self.ask(need, most=None if ours else 3 * need, do="build", **request)
        except RoomFailed as failure:
            if self.ended and not ours:
                # It would take its neighbours with it, and time, whenever it is tried.
                self._given_up[system] = str(failure)
            raise
        taken = time.monotonic() - begun
        self._pace[name] = found["step_s"] / found["batch"]
        if recipe.parameters > 5e8 and ours:
            self._build_paces.append(1.1 * taken / guess)
        return found

    def time(self, name: str, steps: int, batch: int, *, another: bool = False, whole: bool = False) -> dict[str, Any]:
        """A timed block of steps, if there is time for it. `another` batch is one that was not taken before."""
        need = (steps + 1) * batch * self._pace[name]  # one that is not counted comes first
        more = {"batch": batch} if another else {}
        found: dict[str, Any] = self.ask(need, whole=whole, do="time", name=name, steps=steps, **more)
        self._pace[name] = found["seconds"] / batch
        return found

    def _too_large(self, system: str, recipe: Recipe) -> str | None:
        if systems.place_of(system).optimizer != "cpu":
            return None
        need = host_bytes(system, recipe.clip) * recipe.parameters
        free = bounds.free_host_memory()
        if need > 0.97 * free:
            return f"needs {need / GIB:.0f} GiB of host memory, {free / GIB:.0f} GiB are free"
        return None

    def close(self) -> None:
        if self._room is not None:
            self._room.close()
            self._room = None


def host_bytes(system: str, clip: float) -> float:
    """Bytes of host memory for a parameter of an offloaded system."""
    who = system.partition("-")[0]
    return HOST_BYTES_UNCLIPPED if who == "wherry" and not clip else HOST_BYTES[who]


def step_row(
    session: Session, case: dict[str, Any], system: str, recipe: Recipe, answers: Sequence[dict[str, Any]], **facts: Any
) -> bench.Row:
    """A row from timed blocks of steps, with its part of the bound."""
    place, seconds = systems.place_of(system), [answer["seconds"] for answer in answers]
    row = bench.row(case, system, "s", seconds, **facts)
    last, tokens = answers[-1], recipe.batch * recipe.length
    work = bounds.Work(recipe.flops)
    if system != systems.COMPUTE:
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
    for key in ("peak_device_bytes", "peak_reserved_bytes", "resident_bytes"):
        row[key] = last[key]
    tiers: dict[str, int] = {}
    for state in last["memory"]:
        tiers[state["tier"]] = tiers.get(state["tier"], 0) + state["bytes_actual"]
    row["state_bytes_by_tier"] = tiers
    # What the states must take there, by the published formula.
    formula = bounds.states_by_tier(system, recipe.parameters, recipe.dtype)
    row["formula_host_bytes"] = formula["host"]
    row["formula_device_bytes"] = None if last["peak_device_bytes"] is None else formula["device"]
    # Of every system what is seen in its process, and in what the machine has left: memory that is pinned, or a
    # child's, may be missing in the one, and what others gave back meanwhile in the other.
    row["host_bytes"] = max(last["resident_bytes"], last["taken_bytes"])
    row["host_bytes_per_parameter"] = row["host_bytes"] / recipe.parameters
    # What an engine says of its states alone.
    row["own_host_bytes_per_parameter"] = tiers.get("host", 0) / recipe.parameters if tiers else None
    return row


def blocks(
    session: Session, name: str, rounds: int, steps: int, batch: int, *, another: bool = False
) -> list[dict[str, Any]]:
    """Timed blocks of steps: as many as there is time for, and one at least."""
    found: list[dict[str, Any]] = []
    for turn in range(rounds):
        try:
            found.append(session.time(name, steps, batch, another=another and not turn))
        except NoTime:
            if not found:
                raise
            break
    return found


def put_back(session: Session, **request: Any) -> Any:
    """What one stage leaves in the process is not to be missing for the next: this has the time of all of them.

    The answer, if there is one.
    """
    if not session.ended:
        with suppress(RoomFailed, NoTime):
            return session.ask(whole=True, **request)
    return None


def let_go(session: Session, name: str) -> int | None:
    """Close a system, and what a failure may have left of one; bytes of the device that are in use then, if known."""
    answer = put_back(session, do="close", name=name)
    return None if answer is None else int(answer["left_bytes"])


def uncap(session: Session) -> None:
    put_back(session, do="cap", gib=None)
