"""What is counted, not timed: collectives, bytes, allocations, calls of Python, instructions of the native kernels.

    python -m tests.guard.counts --update

writes what this tree does to expected.json, which the tests compare with. Do it when a change of a count is meant, and
say in the commit why.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.engine.harness import adamw, make_model, settings, token_batch

import wherry
from wherry.native import loading
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.tickets import DONE, Ticket

FOLDER = Path(__file__).parent
EXPECTED = FOLDER / "expected.json"
STAGES = (0, 1, 2, 3)
OFFLOADED_STAGES = (2, 3)
RANKS = 2
WARMUP = 3
# bf16 with masters on the host, which steps after so many micro-batches.
MICROS = 2
OFFLOADED = {"bf16": {"enabled": True}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
# Elements that kernels.cpp runs over.
ELEMENTS = 4 * 32768
# valgrind knows no AVX-512.
COUNTED_ISAS = ("avx2", "portable")


def _engine(stage: int, comm: Comm, model: torch.nn.Module, *, offloaded: bool = False) -> Any:
    config = settings(stage, MICROS, 0.5, OFFLOADED) if offloaded else settings(stage, 1, 0.5)
    return wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config, mesh=comm)[0]


def _step(engine: Any, step: int, rank: int, *, offloaded: bool = False) -> None:
    for micro in range(MICROS if offloaded else 1):
        engine.backward(engine(*token_batch(step, micro, rank)))
        engine.step()


# Collectives and bytes.


def collectives(stage: int, *, offloaded: bool = False) -> dict[str, Any]:
    """Calls and bytes of one step of each of two ranks; they are alike."""
    model = make_model()

    def body(comm: Comm) -> dict[str, Any]:
        engine = _engine(stage, comm, copy.deepcopy(model), offloaded=offloaded)
        for step in range(WARMUP):
            comm.traffic.clear()
            _step(engine, step, comm.rank, offloaded=offloaded)
        engine.settle()
        found = {"calls": dict(sorted(comm.traffic.calls.items())), "bytes": dict(sorted(comm.traffic.bytes.items()))}
        engine.close()
        return found

    first, *others = run_ranks(RANKS, body)
    assert all(other == first for other in others), (first, others)
    return first


# Python, and tensors.


class SilentComm(Comm):
    """One rank of several, whose other ranks are never there: nothing is communicated, and what is called is the same.

    It runs on one thread, so that no waiting is counted.
    """

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> Ticket:
        tensor.mul_(self.size)  # as if the others had the same
        return DONE

    def _reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> Ticket:
        shard.copy_(whole[: shard.numel()])
        return DONE

    def _all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Ticket:
        whole[: shard.numel()].copy_(shard)
        whole[shard.numel() :].copy_(shard)
        return DONE

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Ticket:
        return DONE

    def _gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.size


def python_calls(stage: int, ranks: int = RANKS, *, offloaded: bool = False) -> int:
    """Calls of Wherry's own Python functions in one step of the first of so many ranks."""
    folder = str(Path(wherry.__file__).parent)
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            count += 1

    def run(step: Callable[[], None]) -> None:
        sys.setprofile(see)
        try:
            step()
        finally:
            sys.setprofile(None)

    _on_the_first(ranks, stage, run, offloaded=offloaded)
    return count


def allocations(stage: int) -> int:
    """Tensors that one step of one rank of two allocates above those of plain PyTorch doing the same."""
    seen: list[int] = []
    _on_the_first(RANKS, stage, lambda step: seen.append(_allocated(step)))
    model = make_model()
    optimizer = adamw(model.parameters())

    def plain(number: int) -> None:
        loss = model(*token_batch(number, 0, 0))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    for number in range(WARMUP):
        plain(number)
    return seen[0] - _allocated(lambda: plain(WARMUP))


def _on_the_first(
    ranks: int, stage: int, run: Callable[[Callable[[], None]], None], *, offloaded: bool = False
) -> None:
    model = make_model()
    engine = _engine(stage, SilentComm(0, ranks), model, offloaded=offloaded)
    for step in range(WARMUP):
        _step(engine, step, 0, offloaded=offloaded)
    engine.settle()

    def step() -> None:
        _step(engine, WARMUP, 0, offloaded=offloaded)
        engine.settle()

    # What is left over of other tests in this process is not finalised within the counted step.
    gc.collect()
    gc.disable()
    try:
        run(step)
    finally:
        gc.enable()
    engine.close()


def _allocated(step: Callable[[], None]) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    return sum(event.name() == "[memory]" and event.nbytes() > 0 for event in events)


# Instructions.


def cannot_count_instructions() -> str | None:
    """Why instructions cannot be counted here; None when they can."""
    if shutil.which("valgrind") is None:
        return "valgrind is not installed, which counts instructions"
    if shutil.which("c++") is None:
        return "there is no C++ compiler for the program whose instructions are counted"
    if loading.library() is None:
        return f"the native library is not active: {loading.why_not()}"
    return None


def instructions(isa: str) -> dict[str, float]:
    """Instructions of each kernel for an element, from callgrind."""
    library = Path(loading.__file__).parent / "libwherry.so"
    sources = library.parent / "src"
    with tempfile.TemporaryDirectory() as folder:
        program, counts = Path(folder) / "kernels", Path(folder) / "counts"
        compile_it = ["c++", "-std=c++17", "-O2", "-I", str(sources), str(FOLDER / "kernels.cpp"), "-ldl", "-o"]
        subprocess.run([*compile_it, str(program)], check=True, capture_output=True)
        tool = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={counts}"]
        command = [*tool, str(program), str(library), str(loading.ISA_CODES[isa])]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        listing = subprocess.run(
            ["callgrind_annotate", "--inclusive=yes", "--threshold=100", str(counts)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    found = re.findall(r"^\s*([\d,]+) .*?:measured_(\w+)", listing, flags=re.MULTILINE)
    return {name: round(int(count.replace(",", "")) / ELEMENTS, 3) for count, name in sorted(found, key=lambda f: f[1])}


def compiler() -> str:
    """What compiled the library: another one makes other instructions."""
    text = (Path(loading.__file__).parent / "libwherry.so").read_bytes()
    found = re.search(rb"GCC: \([^)]*\) [\d.]+|clang version [\d.]+", text)
    return found.group().decode() if found else "unknown"


def count() -> dict[str, Any]:
    """All that can be counted here."""
    found: dict[str, Any] = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.partition("+")[0],
        "collectives": {str(stage): collectives(stage) for stage in STAGES},
        "python_calls": {str(stage): python_calls(stage) for stage in STAGES},
        "python_calls_alone": {str(stage): python_calls(stage, ranks=1) for stage in STAGES},
        "collectives_offloaded": {str(stage): collectives(stage, offloaded=True) for stage in OFFLOADED_STAGES},
        "python_calls_offloaded": {str(stage): python_calls(stage, offloaded=True) for stage in OFFLOADED_STAGES},
        "allocations": {str(stage): allocations(stage) for stage in STAGES},
    }
    if cannot_count_instructions() is None:
        found["compiler"] = compiler()
        found["instructions"] = {isa: instructions(isa) for isa in COUNTED_ISAS if isa in loading.available_isas()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.guard.counts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--update", action="store_true", help="write what this tree does to expected.json")
    options = parser.parse_args()
    found = count()
    reason = cannot_count_instructions()
    if reason is not None and EXPECTED.exists():
        print(f"instructions stay as they were: {reason}")
        before = json.loads(EXPECTED.read_text())
        found |= {key: before[key] for key in ("compiler", "instructions") if key in before}
    if options.update:
        EXPECTED.write_text(json.dumps(found, indent=1) + "\n")
        print(f"written: tests/guard/{EXPECTED.name}")
    else:
        print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
