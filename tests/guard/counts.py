"""Count allocations and calls of Python in a step, and instructions of the native kernels; no times.

    python -m tests.guard.counts --update

writes the counts of this tree to expected.json, with which the tests compare.
"""

from __future__ import annotations

import argparse
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
from tests.engine.harness import engine_of, make_model, settings, token_batch, train

import wherry
from wherry.native import loading
from wherry.parallel.comm import Comm
from wherry.tickets import DONE, Ticket

FOLDER = Path(__file__).parent
EXPECTED = FOLDER / "expected.json"
# Stage, number of ranks, and whether states are on the host.
STEPS = {
    **{f"stage {stage}": (stage, 2, False) for stage in range(4)},
    "alone": (3, 1, False),
    "offloaded at stage 2": (2, 2, True),
    "offloaded at stage 3": (3, 2, True),
}
WARMUP = 3
# bf16 with masters on the host, which steps after so many micro-batches.
MICROS = 2
OFFLOADED = {"bf16": {"enabled": True}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
# Elements that kernels.cpp runs over.
ELEMENTS = 4 * 32768
# valgrind knows no AVX-512.
COUNTED_ISAS = ("avx2", "portable")


# Python, and tensors.


class SilentComm(Comm):
    """One rank of several that communicates with none, through the same calls and on one thread."""

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


def python_calls(stage: int, ranks: int, offloaded: bool) -> int:
    """Count the calls of Wherry's own Python functions in one step of the first rank."""
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

    _on_the_first(ranks, stage, run, offloaded)
    return count


def allocations(stage: int, ranks: int, offloaded: bool) -> int:
    """Count the tensors that one step of the first rank allocates above those of the model's forward and backward."""
    seen: list[int] = []
    _on_the_first(ranks, stage, lambda step: seen.append(_allocated(step)), offloaded)
    model = make_model().bfloat16() if offloaded else make_model()

    def plain() -> None:
        for micro in range(MICROS if offloaded else 1):
            model(*token_batch(WARMUP, micro, 0)).backward()

    plain()
    return seen[0] - _allocated(plain)


def _on_the_first(ranks: int, stage: int, run: Callable[[Callable[[], None]], None], offloaded: bool) -> None:
    config = settings(stage, MICROS, 0.5, OFFLOADED) if offloaded else settings(stage, 1, 0.5)
    engine = engine_of(make_model(), config, SilentComm(0, ranks))
    train(engine, WARMUP)

    def step() -> None:
        train(engine, WARMUP + 1, WARMUP)
        engine.settle()

    engine.settle()
    # Objects that other tests left in this process are not finalized within the counted step.
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
    """Return the reason why instructions cannot be counted here, if there is one."""
    if shutil.which("valgrind") is None:
        return "valgrind is not installed, which counts instructions"
    if shutil.which("c++") is None:
        return "there is no C++ compiler for the program whose instructions are counted"
    if loading.library() is None:
        return f"the native library is not active: {loading.why_not()}"
    return None


def instructions(isa: str) -> dict[str, float]:
    """Measure the instructions of each kernel for an element, with callgrind."""
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
    """Read the name and version of the library's compiler: another one makes other instructions."""
    text = (Path(loading.__file__).parent / "libwherry.so").read_bytes()
    found = re.search(rb"GCC: \([^)]*\) [\d.]+|clang version [\d.]+", text)
    return found.group().decode() if found else "unknown"


def count() -> dict[str, Any]:
    """Count all that can be counted here."""
    found: dict[str, Any] = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.partition("+")[0],
        "python_calls": {name: python_calls(*how) for name, how in STEPS.items()},
        "allocations": {name: allocations(*how) for name, how in STEPS.items()},
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
