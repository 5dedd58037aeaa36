"""`deepspeed.utils`, `deepspeed.monitor` and the like: small things that scripts take from there."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import nn

from wherry import config as configs
from wherry.compat.deepspeed.comm import get_rank
from wherry.errors import WherryError
from wherry.observe.log import logger, show_unless_shown
from wherry.observe.memory import device_memory, format_bytes, host_memory
from wherry.observe.metrics import Monitor
from wherry.offload_states import SPELLINGS, STATES
from wherry.parallel.topology import default_device
from wherry.placement import Tier
from wherry.sharding.grouping import LEAF

Function = TypeVar("Function", bound=Callable[..., Any])

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
INFERENCE_GENERIC_MODE = "generic"
default_pg_timeout = timedelta(minutes=30)
git_hash = git_branch = None
installed_ops: dict[str, bool] = {}
compatible_ops: dict[str, bool] = {}
# With which torch the operations were compiled: none is, before it is used.
torch_info = dict.fromkeys(("version", "cuda_version", "nccl_version", "hip_version"), "0.0") | {"bf16_support": False}


def env_report(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """`wherry doctor`."""
    subprocess.run([sys.executable, "-m", "wherry", "doctor"], check=False)


def log_dist(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks; without `ranks`, or with -1 among them, on all."""
    if not ranks or -1 in ranks or get_rank() in ranks:
        logger.log(level, "[Rank %d] %s", get_rank(), message)


class LoggerFactory:
    """Scripts make their loggers with it."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.INFO) -> logging.Logger:
        made = logging.getLogger(name or logger.name)
        show_unless_shown(level, made)
        made.setLevel(level)
        return made


def set_log_level_from_string(level: str, custom_logger: logging.Logger | None = None) -> None:
    (custom_logger or logger).setLevel(level.upper())


def print_json_dist(message: Any, ranks: list[int] | None = None, path: str | None = None) -> None:
    if path is not None and (not ranks or -1 in ranks or get_rank() in ranks):
        with open(path, "w", encoding="utf-8") as file:
            json.dump({**message, "rank": get_rank()}, file)


def instrument_w_nvtx(function: Function) -> Function:
    """Spans are the engine's own; a function of the script's is left as it is."""
    return function


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log memory in use, on rank 0, if `force` is given."""
    if not force or get_rank():
        return
    host, device = host_memory(), device_memory(default_device())
    on_device = f"device {format_bytes(device.allocated)}, peak {format_bytes(device.peak)}; " if device else ""
    logger.info("%s: %shost %s, peak %s", message, on_device, format_bytes(host.resident), format_bytes(host.peak))


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


# A "leaf" is a module that is gathered whole. Inside a block it is in any case.


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str]) -> list[nn.Module]:
    """Have the modules of these classes gathered whole, when the model is given to `initialize`."""
    classes = list(leaf_module_classes)
    names = {cls if isinstance(cls, str) else cls.__name__ for cls in classes}
    found = [m for m in model.modules() if type(m).__name__ in names or f"{type(m).__module__}.{type(m).__name__}" in
             names or any(isinstance(cls, type) and isinstance(m, cls) for cls in classes)]  # fmt: skip
    if not found:
        raise ValueError(f"No modules of type {sorted(names)} found in model {type(model).__name__}")
    return _mark(found, True)


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type[nn.Module]]) -> list[nn.Module]:
    classes = tuple(leaf_module_classes)
    return _mark([m for m in model.modules() if isinstance(m, classes)], False)


def _by(
    matches: Callable[[str, str], bool], leaf: bool, model: nn.Module, wanted: Iterable[str], required: bool
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules that match a name; returns them, and the names that match none."""
    found = {one: [module for name, module in model.named_modules() if matches(name, one)] for one in wanted}
    missing = [one for one, modules in found.items() if not modules]
    if missing and required:
        raise ValueError(f"No modules named {missing} found in model {type(model).__name__}")
    return _mark([module for modules in found.values() for module in modules], leaf), missing


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    return _by(str.__eq__, True, model, module_names, raise_if_not_found)


def unset_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    return _by(str.__eq__, False, model, module_names, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    return _by(str.endswith, True, model, module_name_suffixes, raise_if_not_found)


def unset_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    return _by(str.endswith, False, model, module_name_suffixes, raise_if_not_found)


def _mark(modules: list[nn.Module], leaf: bool) -> list[nn.Module]:
    for module in modules:
        setattr(module, LEAF, leaf)
    return modules


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(module: nn.Module) -> bool:
    return bool(getattr(module, LEAF, False))


z3_leaf_parameter = z3_leaf_module


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


def get_monitor_config(config: Any) -> Any:
    return configs.load(config)


class MonitorMaster(Monitor):
    """Writes `(name, value, step)` events to TensorBoard, Weights & Biases and CSV, as the config's blocks say."""

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(configs.load(monitor_config).to_dict(), get_rank())

    def write_events(self, event_list: Sequence[tuple[str, float, int]], flush: bool = True) -> None:
        super().write_events(event_list)
