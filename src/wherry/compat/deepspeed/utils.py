"""`deepspeed.utils`, `deepspeed.env_report` and `deepspeed.checkpoint.utils`: small helpers that scripts call."""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from wherry.compat.deepspeed.comm import get_rank
from wherry.errors import WherryError
from wherry.observe.log import logger
from wherry.offload_states import SPELLINGS, STATES
from wherry.placement import Tier

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500

warning_once = functools.cache(logger.warning)


def env_report() -> None:
    """Run `wherry doctor`."""
    subprocess.run([sys.executable, "-m", "wherry", "doctor"], check=False)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on these ranks; without `ranks`, or with -1 among them, on all."""
    if not ranks or -1 in ranks or get_rank() in ranks:
        logger.log(level, "[Rank %d] %s", get_rank(), message)


class RepeatingLoader:
    """A loader that starts again at its end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._iterator: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Clone tensors out of the larger storages that they view, so that saving them saves no more."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone() if torch.device(device) == item.device else item.detach().to(device)
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})
    return item


def get_state_devices(engine: Any, state: Any) -> set[torch.device]:
    """Return the devices of a state of the engine; state on disk counts as the CPU's."""
    spelling = str(getattr(state, "value", state))
    name = SPELLINGS.get(spelling, spelling)
    if name not in STATES:
        raise WherryError(f"get_state_devices: state: expected one of {', '.join(SPELLINGS)}, got {spelling}")
    on_device = getattr(engine.placement, name).tier is Tier.DEVICE and name not in engine.offloaded_states()
    return {engine.device if on_device else torch.device("cpu")}
