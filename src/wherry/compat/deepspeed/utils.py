"""`deepspeed.utils`, `deepspeed.monitor` and the like: small things that scripts take from there."""

from __future__ import annotations

import functools
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch

from wherry.compat.deepspeed.comm import get_rank
from wherry.errors import WherryError
from wherry.observe.log import logger, show_unless_shown
from wherry.offload_states import SPELLINGS, STATES
from wherry.placement import Tier

Function = TypeVar("Function", bound=Callable[..., Any])

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
INFERENCE_GENERIC_MODE = "generic"
default_pg_timeout = timedelta(minutes=30)
git_hash = git_branch = "unknown"
# With which torch the operations were compiled: theirs are, before they are used.
torch_info = dict.fromkeys(("cuda_version", "nccl_version", "hip_version"), "0.0") | {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": False,
}


def env_report(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """`wherry doctor`."""
    subprocess.run([sys.executable, "-m", "wherry", "doctor"], check=False)


def get_dist_msg(message: str, ranks: Sequence[int] | None = None) -> str | None:
    """The message with its rank where it is for this one; without `ranks`, or with -1 among them, it is for all."""
    return f"[Rank {get_rank()}] {message}" if not ranks or -1 in ranks or get_rank() in ranks else None


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    if (line := get_dist_msg(message, ranks)) is not None:
        logger.log(level, "%s", line)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    if (line := get_dist_msg(message, ranks)) is not None:
        print(line)


_log_once = functools.cache(log_dist)
warning_once = functools.cache(logger.warning)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    _log_once(message, None if ranks is None else tuple(ranks), level)


def print_configuration(args: Any, name: str) -> None:
    logger.info("%s:", name)
    for argument in sorted(vars(args)):
        logger.info("  %s %s %s", argument, "." * (29 - len(argument)), getattr(args, argument))


class LoggerFactory:
    """Scripts make their loggers with it."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.INFO) -> logging.Logger:
        made = logging.getLogger(name or logger.name)
        show_unless_shown(level, made)
        made.setLevel(level)
        return made


class UnknownLevel(WherryError, ValueError):
    """A log level that there is not."""


log_levels = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


def get_log_level_from_string(log_level_str: str) -> int:
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise UnknownLevel(f"there is no log level {log_level_str!r}; they are {', '.join(log_levels)}")
    return int(level)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Of a logger and its handlers."""
    level, of = get_log_level_from_string(log_level_str), custom_logger or logger
    of.setLevel(level)
    for handler in of.handlers:
        handler.setLevel(level)


def get_current_level() -> int:
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether what is of this level is logged."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def print_json_dist(message: Any, ranks: list[int] | None = None, path: str | None = None) -> None:
    if path is not None and (not ranks or -1 in ranks or get_rank() in ranks):
        with open(path, "w", encoding="utf-8") as file:
            json.dump({**message, "rank": get_rank()}, file)


class RepeatingLoader:
    """A loader that begins again at its end."""

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


def parse_range_list(range_str: str) -> list[int]:
    """Numbers and ranges in ascending order, as of cores.

    >>> parse_range_list("0,2-4,6")
    [0, 2, 3, 4, 6]
    """
    found: list[int] = []
    for part in range_str.split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers or (found and numbers[0] <= found[-1]):
            raise BadRange(f"{range_str!r}: expected numbers and ranges that ascend and do not overlap, got {part!r}")
        found += numbers
    return found


class BadRange(WherryError, ValueError):
    """A list of ranges that cannot be read."""


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Whether torch is of at least, and of at most, these versions."""
    assert min_version or max_version, "required_torch_version: give min_version or max_version"
    own = torch.torch_version.TorchVersion(torch.__version__)
    return (not min_version or own >= str(min_version)) and (not max_version or own <= str(max_version))


def register_grad_hook(param: torch.Tensor, hook: Callable[..., Any]) -> Any:
    return param.register_post_accumulate_grad_hook(hook)


def jit_script_compat(fn: Function) -> Function:
    return torch.compile(fn)  # type: ignore[return-value]


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Tensors cloned out of the larger storages that they are views of, so that saving them saves no more."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone() if torch.device(device) == item.device else item.detach().to(device)
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})
    return item


def get_state_devices(engine: Any, state: Any) -> set[torch.device]:
    """The devices on which a state of the engine rests; what rests on disk is read into the host's memory."""
    spelling = str(getattr(state, "value", state))
    name = SPELLINGS.get(spelling, spelling)
    if name not in STATES:
        raise WherryError(f"get_state_devices: {spelling} is no state; they are {', '.join(SPELLINGS)}")
    on_device = getattr(engine.placement, name).tier is Tier.DEVICE and name not in engine.offloaded_states()
    return {engine.device if on_device else torch.device("cpu")}
