"""Run by test_reading: saves, loads and exports a model in a process of its own, and prints what memory each took."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.engine.harness import engine_of, make_model, settings
from torch import nn

from wherry.checkpoint import files, reader
from wherry.checkpoint.export import export

WIDTH, LAYERS = 800, 12
# Buffers are of fixed sizes, which a small model must not be lost in.
files.BLOCK = 1 << 20
reader.PART = 1 << 18


def status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def peak_of(work: Callable[[], Any]) -> int:
    """Bytes that the process held above what it held before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def trained(more: dict[str, Any] | None = None) -> Any:
    model = make_model(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))))
    engine = engine_of(model, settings(3, more=more))
    engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
    engine.step()
    engine.settle()
    return engine


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    unit = 12 * WIDTH * WIDTH
    seen: dict[str, int] = {"unit": unit, "states": LAYERS * unit, "buffers": (files.THREADS + 2) * files.BLOCK}
    engine = trained()
    engine.save_checkpoint(folder / "warm")
    seen["save"] = peak_of(lambda: engine.save_checkpoint(folder / "one"))
    seen["load"] = peak_of(lambda: engine.load_checkpoint(folder / "one"))
    engine.close()
    del engine
    # What the allocator keeps of other threads comes on top, and differs.
    seen["export"] = min(peak_of(partial(export, folder / "one", folder / f"out{turn}")) for turn in range(4))
    (folder / "states").mkdir()
    tier = {"device": "nvme", "nvme_path": str(folder / "states")}
    zero = {"stage": 3, "offload_optimizer": tier, "offload_param": {**tier, "max_in_cpu": 0}}
    engine = trained({"zero_optimization": zero, "wherry": {"checkpoint": {"async_save": True}}})

    def behind() -> None:
        engine.save_checkpoint(folder / "behind")
        engine.wait_for_checkpoint()

    seen["async save from disk"] = peak_of(behind)
    engine.close()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
