"""Host optimizers beside torch's and DeepSpeed's: python benchmarks/cpu_adam.py [--quick].

`wherry bench adam` with peers: torch's AdamW in its three forms, DeepSpeedCPUAdam, and a bf16 update done in the three
passes that the usual way takes. The limit is an update of the same streams without arithmetic, in the same run.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

if not __package__:  # run as a script: this folder is found as it is when imported
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from torch import Tensor

from benchmarks import harness, systems
from wherry import native
from wherry.cli.bench import FAMILIES, LIMIT, Form, floats, forms_of, instruction_sets, time_forms


def _optimizers(name: str, numel: int) -> Iterator[Form]:
    """Those of other systems that do what a family does, or nearly."""
    w, g = floats(numel, 0.02), floats(numel, 0.01)
    if name == "fp32":
        for kind, options in (("foreach", {"foreach": True}), ("loop", {"foreach": False, "fused": False})):
            parameter = torch.nn.Parameter(w)
            parameter.grad = g
            optimizer = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.1, **options)
            yield Form(f"torch AdamW {kind}", 28, optimizer.step)
        yield from _deepspeed("DeepSpeedCPUAdam fp32", 28, w, g)
    elif name == "split":
        # It keeps no master at all: fewer bytes, and updates below a bf16 step of the weight are lost.
        yield from _deepspeed("DeepSpeedCPUAdam bf16, without a master", 22, w.bfloat16(), g.bfloat16())
    elif name == "whole":
        working = w.bfloat16()
        for form in _deepspeed("three passes, with DeepSpeedCPUAdam", 42, w, g):

            def passes(step: Callable[[], object] = form.run) -> None:
                g.mul_(1.0)
                step()
                working.copy_(w)

            yield Form(form.name, form.nbytes, passes)


def _deepspeed(name: str, nbytes: int, weight: Tensor, grad: Tensor) -> Iterator[Form]:
    if systems.cannot_run("deepspeed-0"):
        return
    parameter = torch.nn.Parameter(weight)
    parameter.grad = grad
    adam = importlib.import_module("deepspeed.ops.adam")
    yield Form(name, nbytes, adam.DeepSpeedCPUAdam([parameter], lr=1e-4, weight_decay=0.1).step)


def measure(family: str, numel: int, pool: native.Pool, isas: Sequence[str], repeats: int) -> list[harness.Row]:
    forms = [*forms_of(family, numel, pool, isas), *_optimizers(family, numel)]
    seconds = time_forms(forms, repeats)
    case = {"family": family, "numel": numel, "threads": pool.threads}
    return [
        harness.row(
            case,
            form.name,
            "ns/param",
            [1e9 * value / numel for value in seconds[form.name]],
            bytes=form.nbytes,
        )
        for form in forms
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--sizes", type=harness.positives, help="numbers of parameters (default 1e7,1e8)")
    parser.add_argument("--threads", type=harness.positives, help="numbers of threads (default 1 and all)")
    parser.add_argument("--families", type=harness.listed(FAMILIES), default=list(FAMILIES), help="with commas")
    options = harness.parse(parser, argv)
    isas, every = instruction_sets(None), native.default_pool().threads
    sizes = options.sizes or ([10**6] if options.quick else [10**7, 10**8])
    repeats = options.rounds or (3 if options.quick else 9)
    results = harness.Results("cpu_adam", options, {"sizes": sizes, "isas": isas, "repeats": repeats})
    for threads in options.threads or sorted({1, every}):
        torch.set_num_threads(threads)
        with native.Pool(threads=threads) as pool, torch.no_grad():
            for numel in sizes:
                for family in options.families:
                    results.add(*measure(family, numel, pool, isas, repeats))
    harness.show(
        results.rows,
        {
            "GB/s": lambda row: f"{row['bytes'] / row['value']:.1f}",
            "of limit": lambda row: f"{row['ratio'].get(LIMIT, 1.0):.2f}",
        },
    )
    results.close()
    return 0


if __name__ == "__main__":
    harness.alone(main)
