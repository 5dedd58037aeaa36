"""Ctrl-C at an instant that was drawn, and what is to be said of where it came."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import wherry

HERE = os.path.dirname(__file__)
PACKAGE = Path(wherry.__file__).parent


class Calls:
    """Counts Python's calls and returns from C, which is where it looks for signals, and interrupts at one of them."""

    def __init__(self, at: int = -1) -> None:
        self.count, self.at = 0, at

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if frame.f_code.co_filename.startswith(HERE) or event not in ("call", "c_return"):
            return
        if event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR:
            return  # the generator's own `finally` would be left out
        self.count += 1
        if self.count == self.at:
            interrupt()


class Fired:
    """Whether the last one has come."""

    so = False


def interrupt(*_: object) -> None:
    sys.setprofile(None)
    Fired.so = True
    raise KeyboardInterrupt


@contextlib.contextmanager
def interrupted(seconds: float | None, calls: Calls | None) -> Iterator[None]:
    """After so many seconds, or at a call; `signal.SIGALRM` is to be handled by `interrupt`."""
    Fired.so = False
    try:
        if seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, seconds))
        sys.setprofile(calls)
        yield
    finally:
        sys.setprofile(None)
        signal.setitimer(signal.ITIMER_REAL, 0)


def told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def where(error: BaseException) -> str:
    """The innermost frames, ours by file and function."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(HERE)]
    lines = [f"{'/'.join(Path(f.filename).parts[-2:])}:{f.lineno} {f.name}: {f.line}" for f in frames]
    return "\n".join(lines[-5:])


def phase(error: BaseException) -> str:
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename) == PACKAGE / "engine.py" and frame.name != "train_batch":
            return re.sub("_checkpoint|^_", "", frame.name)
    return "between"


def open_now() -> dict[str, int]:
    """What a process holds. Tensors by their storages, as views come and go."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    storages = {
        t.untyped_storage().data_ptr() for t in tensors if t.layout is torch.strided and t.device.type != "meta"
    }
    return {
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "tensors": len(tensors),
        "storages": len(storages),
    }
