"""Models built under `torch.device("meta")`: their parameters get memory, and values by the modules' own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from wherry.errors import WherryError
from wherry.parallel.partition import is_dtensor


class Materialiser:
    """Gives values to what is on the meta device, as many modules at a time as hold the parameters asked for.

    A module's `reset_parameters` initialises its own parameters and buffers; models of `transformers` have
    `_init_weights(module)` for all of theirs.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self._names = {module: name for name, module in model.named_modules()}
        self._waiting = [module for module in model.modules() if _on_meta(module)]
        self._holders: dict[str, Callable[[nn.Module], Any]] = {
            name: module._init_weights for name, module in model.named_modules() if callable(_init_weights(module))
        }
        self._refuse_those_without_a_way()

    def _ways(self, module: nn.Module) -> list[Callable[[], Any]]:
        own = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
        ways = [way for way in own if callable(way)][:1]
        # As transformers builds: the module's own first, then the model's.
        return ways + self._ways_of_model(module)

    def _ways_of_model(self, module: nn.Module) -> list[Callable[[], Any]]:
        name = self._names[module]
        holders = [h for h in self._holders if not h or name == h or name.startswith(h + ".")]
        return [partial(self._holders[max(holders, key=len)], module)] if holders else []

    def _refuse_those_without_a_way(self) -> None:
        lacking = [module for module in self._waiting if not self._ways(module)]
        if lacking:
            shown = ", ".join(f"{self._names[m] or 'the model'} ({type(m).__name__})" for m in lacking[:8])
            more = f" and {len(lacking) - 8} more" if len(lacking) > 8 else ""
            raise WherryError(
                f"the model is on the meta device, and {len(lacking)} of its modules have no reset_parameters() that "
                f"would give their parameters and buffers values: {shown}{more}. Give them one, build the model under "
                "wherry.Init() instead, or give it values before wherry.initialize"
            )

    def fill(self, parameters: Sequence[nn.Parameter], block: nn.Module | None) -> None:
        """Give values to the modules that hold any of `parameters`, as far as these are on the meta device.

        `block` has them all, if one module has: modules in it that hold none may initialise those of their children.
        """
        wanted = {parameter for parameter in parameters if parameter.is_meta}
        if not wanted:
            return
        for module in [m for m in self._waiting if wanted & _direct(m)]:
            self._fill(module)
        with torch.no_grad():
            for module in reversed(list(block.modules()) if block is not None else []):  # children before parents
                if not _direct(module):
                    for way in self._ways_of_model(module):
                        way()

    def finish(self) -> None:
        """Modules that have no parameters, but buffers."""
        for module in list(self._waiting):
            self._fill(module)

    @torch.no_grad()
    def _fill(self, module: nn.Module) -> None:
        self._waiting.remove(module)
        old = {name: p for name, p in module._parameters.items() if p is not None and not p.is_meta}
        if isinstance(module, nn.RNNBase):
            module._flat_weight_refs = []  # a tensor with weak references cannot be swapped
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta:
                given = _filled_like(parameter, float("nan"), self.device)
                with _attributes_of(parameter):
                    torch.utils.swap_tensors(parameter, nn.Parameter(given, requires_grad=parameter.requires_grad))
        buffers = []
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                unknown = float("nan") if buffer.is_floating_point() else 0
                module._buffers[name] = _filled_like(buffer, unknown, self.device)
                buffers.append(name)
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
        # Tied to a module that had its turn: those values stay.
        with _scratch(module, old, self.device):
            for way in self._ways(module):
                way()
        self._check(module, buffers)

    def _check(self, module: nn.Module, buffers: Sequence[str]) -> None:
        held = {**module._parameters, **{name: module._buffers[name] for name in buffers}}
        unset = [
            name
            for name, tensor in held.items()
            if tensor is not None and tensor.is_floating_point() and tensor.numel() and _is_unset(tensor)
        ]
        if unset:
            where = self._names[module] or "the model"
            raise WherryError(
                f"{where}: reset_parameters() of {type(module).__name__} has left {', '.join(unset)} without values, "
                "which were on the meta device; let it set them too, or build the model under wherry.Init() instead"
            )


def _filled_like(tensor: torch.Tensor, value: float, device: torch.device) -> torch.Tensor:
    # Of one on the meta device torch works out the strides by code that takes half a second to load.
    if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_contiguous():
        return torch.full(tensor.shape, value, dtype=tensor.dtype, device=device)
    return torch.full_like(tensor, value, device=device)


def _is_unset(tensor: torch.Tensor) -> bool:
    """Whether all of it is NaN yet: its first element tells, unless ranks share it out."""
    if not is_dtensor(tensor) and not bool(tensor[(0,) * tensor.ndim].isnan()):
        return False
    return bool(tensor.isnan().all())


def _init_weights(module: nn.Module) -> Any:
    return getattr(type(module), "_init_weights", None)


def _direct(module: nn.Module) -> set[nn.Parameter]:
    return {parameter for parameter in module._parameters.values() if parameter is not None}


def _on_meta(module: nn.Module) -> bool:
    held = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in held)


@contextmanager
def _attributes_of(parameter: nn.Parameter) -> Iterator[None]:
    """What users have set on a parameter stays when its tensor is swapped."""
    kept = dict(parameter.__dict__)
    yield
    parameter.__dict__.update(kept)


@contextmanager
def _scratch(module: nn.Module, names: dict[str, nn.Parameter], device: torch.device) -> Iterator[None]:
    """Other memory in the place of some parameters, for a while."""
    for name, parameter in names.items():
        module._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device))
    try:
        yield
    finally:
        module._parameters.update(names)
