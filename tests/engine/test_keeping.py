"""References that outlive an engine never crash the process.

`main` runs all cases on one placement, and prints the name of each before it: the last name is the one that crashed.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.harness import make_model, on_ranks, train
from tests.forks import Forks
from tests.tiers.rows import ROWS, zero_block
from torch.utils import dlpack

import wherry
from wherry.engine import Engine


def forms(tensors: Any) -> list[Any]:
    """Make every object that shares a tensor's memory."""
    found: list[Any] = []
    for tensor in (each.detach() for each in tensors):
        found += [tensor, tensor[:1], tensor.numpy(), memoryview(tensor.numpy())]
        found.append(dlpack.from_dlpack(dlpack.to_dlpack(tensor)))
    return found


def use(kept: list[Any], *, write: bool = False) -> None:
    for form in kept:
        tensor = form.detach() if isinstance(form, torch.Tensor) else torch.from_numpy(np.asarray(form))
        float((tensor + 1).sum()), str(tensor), tensor.clone()
        if write and isinstance(form, torch.Tensor) and 0 not in form.stride():
            form.fill_(1.0)


def kept_from_gathered(engine: Engine) -> None:
    with wherry.gathered(engine.module):
        kept = forms(engine.module.parameters())
        values = [parameter.detach().clone() for parameter in engine.module.parameters()]
    train(engine, 3, 1)
    use(kept)
    # Whole weights are not copied by gathered, and have been trained since.
    assert engine.zero_optimization_stage() < 3 or all(map(torch.equal, kept[:: len(kept) // len(values)], values))
    engine.close()
    use(kept, write=True)


def kept_by_hooks(engine: Engine) -> None:
    kept: list[Any] = []

    def keep(module: torch.nn.Module, *_: Any) -> None:
        kept.extend(forms(module.parameters(recurse=False)))

    for module in engine.module.modules():
        module.register_forward_hook(keep)
    for parameter in engine.module.parameters():
        parameter.register_hook(lambda grad: kept.append(grad))
    train(engine, 3, 1)
    use(kept)
    engine.close()
    use(kept, write=True)


CASES: list[Callable[[Engine], None]] = [kept_from_gathered, kept_by_hooks]


def main() -> None:
    row, folder = sys.argv[1:]
    stage, *tiers = ROWS.get(row, (3, "none", "none"))
    config = {"zero_optimization": zero_block(stage, *tiers, Path(folder)), "wherry": {"update_policy": "at_step"}}
    faulthandler.enable()
    torch.set_num_threads(1)
    torch.set_printoptions(threshold=0, edgeitems=1)  # `use` reads every element in quicker ways
    model = make_model()
    for case in CASES:

        def body(engine: Engine, case: Callable[[Engine], None] = case) -> None:
            with engine:
                train(engine, 1)
                case(engine)

        print(case.__name__, flush=True)
        on_ranks(body, ranks=1 if row == "infinity" else 2, stage=stage, model=model, config=config)


@pytest.mark.parametrize("row", ["stage-3", "offload-2", "infinity"])
def test_no_reference_crashes_the_process(row: str, tmp_path: Path, forks: Forks) -> None:
    program = "from tests.engine.test_keeping import main; main()"
    done = forks.run("-c", program, row, tmp_path, folder=tmp_path, launched=False)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-4000:]
    assert done.stdout.split() == [case.__name__ for case in CASES]
