"""Models built under `torch.device("meta")`: their parameters get memory, and values by the modules' own code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from wherry.errors import WherryError
from wherry.parallel.comm import SoloComm
from wherry.parallel.partition import is_dtensor, local, slice_of
from wherry.sharding.given import forget, given, refuse_lost, settle, values_of
from wherry.sharding.safetensors_folder import Source


class _Placed(NamedTuple):
    """A module's parameter or buffer that has left the meta device, and where its values are if a file has them."""

    name: str
    tensor: torch.Tensor
    source: Source | None


class Materialiser:
    """Gives values to what is on the meta device, as many modules at a time as hold the parameters asked for.

    A module's `reset_parameters` initialises its own parameters and buffers; models of `transformers` have
    `_init_weights(module)` for all of theirs. What has values in a file is not drawn.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self._names = {module: name for name, module in model.named_modules()}
        refuse_lost(model)
        self._waiting = [module for module in model.modules() if _held_on_meta(module)]
        # What parameters read as whose values are still in a file.
        self._blanks: dict[torch.dtype, torch.Tensor] = {}
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
        lacking = [module for module in self._waiting if not self._ways(module) and not _all_given(module)]
        if lacking:
            shown = ", ".join(f"{self._names[m] or 'the model'} ({type(m).__name__})" for m in lacking[:8])
            more = f" and {len(lacking) - 8} more" if len(lacking) > 8 else ""
            raise WherryError(
                f"the model is on the meta device, and {len(lacking)} of its modules have no reset_parameters() that "
                f"would give their parameters and buffers values: {shown}{more}. Give them one, build the model under "
                "wherry.Init() instead, or give it values before wherry.initialize"
            )

    def fill(
        self,
        parameters: Sequence[nn.Parameter],
        block: nn.Module | None,
        memory: Mapping[nn.Parameter, torch.Tensor],
    ) -> None:
        """Give values to the modules that hold any of `parameters`, as far as these are on the meta device.

        `block` has them all, if one module has: modules in it that hold none may initialise those of their children.
        Parameters in `memory` are given that. What goes into a flat and has values in a file is left for it to read.
        """
        modules = self._holding(parameters)
        if not modules:
            return
        placed = {module: self._fill(module, memory) for module in modules}
        with torch.no_grad():
            for module in reversed(list(block.modules()) if block is not None else []):  # children before parents
                if not _direct(module):
                    for way in self._ways_of_model(module):
                        way()
        for module in modules:
            self._read(module, placed[module])

    def leave_to_files(self, parameters: Sequence[nn.Parameter]) -> None:
        """Where files have all values of the modules that hold any of `parameters`, these only leave the meta device.

        Whoever cuts them reads what he needs.
        """
        modules = self._holding(parameters)
        if all(_all_given(module) for module in modules):
            for module in modules:
                self._leave_to_files(module)

    def _holding(self, parameters: Sequence[nn.Parameter]) -> list[nn.Module]:
        wanted = {parameter for parameter in parameters if parameter.is_meta}
        return [module for module in self._waiting if wanted & _direct(module)] if wanted else []

    def finish(self) -> None:
        """Modules that have no parameters, but buffers; and nobody asks any more what had values in files."""
        for module in list(self._waiting):
            if _all_given(module):
                self._leave_to_files(module)
            else:
                self._read(module, self._fill(module, {}))
        settle(self.model)

    @torch.no_grad()
    def _fill(self, module: nn.Module, memory: Mapping[nn.Parameter, torch.Tensor]) -> list[_Placed]:
        """Returns what it has taken off the meta device; of that which has values in files, those will count."""
        old = {name: p for name, p in module._parameters.items() if p is not None and not p.is_meta}

        def place(parameter: nn.Parameter) -> torch.Tensor:
            there = memory.get(parameter)
            unset = _unset(parameter)
            return _filled_like(parameter, unset, self.device) if there is None else there.fill_(unset)

        placed = self._take_off_meta(module, place)
        if not placed:  # all it has is tied to modules that had their turn
            return placed
        # Tied to a module that had its turn: those values stay.
        with _scratch(module, old, self.device):
            for way in self._ways(module):
                way()
        self._check(module, placed)
        return placed

    @torch.no_grad()
    def _leave_to_files(self, module: nn.Module) -> None:
        """Its parameters take no memory yet, but those that no flat will hold. Nothing of it is drawn."""

        def place(parameter: nn.Parameter) -> torch.Tensor:
            if type(parameter) is not nn.Parameter or not _goes_into_a_flat(parameter):
                return _filled_like(parameter, 0, self.device)
            blank = self._blanks.get(parameter.dtype)
            if blank is None:
                nan = torch.full((), float("nan"), dtype=parameter.dtype, device=self.device)
                blank = self._blanks[parameter.dtype] = nan
            return blank.expand(parameter.shape)

        self._read(module, self._take_off_meta(module, place))

    def _take_off_meta(self, module: nn.Module, place: Callable[[nn.Parameter], torch.Tensor]) -> list[_Placed]:
        self._waiting.remove(module)
        placed = []
        if isinstance(module, nn.RNNBase):
            module._flat_weight_refs = []  # a tensor with weak references cannot be swapped
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                with _attributes_of(parameter):
                    other = nn.Parameter(place(parameter), requires_grad=parameter.requires_grad)
                    torch.utils.swap_tensors(parameter, other)
                placed.append(_Placed(name, parameter, given(parameter)))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = memory = _filled_like(buffer, _unset(buffer), self.device)
                placed.append(_Placed(name, memory, given(buffer)))
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
        return placed

    def _check(self, module: nn.Module, placed: Sequence[_Placed]) -> None:
        unset = [p.name for p in placed if p.source is None and _is_unset(p.tensor)]
        if unset:
            where = self._names[module] or "the model"
            raise WherryError(
                f"{where}: reset_parameters() of {type(module).__name__} has left {', '.join(unset)} without values, "
                "which were on the meta device; let it set them too, or build the model under wherry.Init() instead"
            )

    def _read(self, module: nn.Module, placed: Iterable[_Placed]) -> None:
        prefix = self._names[module]
        for p in placed:
            if p.source is not None and not _goes_into_a_flat(p.tensor):  # a flat reads its own, as precise as masters
                name, held = f"{prefix}.{p.name}" if prefix else p.name, local(p.tensor)
                part = slice_of(name, p.tensor, SoloComm()) if isinstance(p.tensor, nn.Parameter) else None
                held.copy_(values_of(p.source, tuple(held.shape), part))
                forget(p.tensor)


def _filled_like(tensor: torch.Tensor, value: float, device: torch.device) -> torch.Tensor:
    # Of one on the meta device torch works out the strides by code that takes half a second to load.
    if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_contiguous():
        return torch.full(tensor.shape, value, dtype=tensor.dtype, device=device)
    return torch.full_like(tensor, value, device=device)


def _unset(tensor: torch.Tensor) -> float:
    """What it is filled with before it is given values."""
    return float("nan") if tensor.is_floating_point() else 0


def _is_unset(tensor: torch.Tensor) -> bool:
    """Whether all of it is NaN yet: its first element tells, unless ranks share it out."""
    if not tensor.is_floating_point() or not tensor.numel():
        return False
    if not is_dtensor(tensor) and not bool(tensor[(0,) * tensor.ndim].isnan()):
        return False
    return bool(tensor.isnan().all())


def _goes_into_a_flat(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.is_floating_point()


def _init_weights(module: nn.Module) -> Any:
    return getattr(type(module), "_init_weights", None)


def _direct(module: nn.Module) -> set[nn.Parameter]:
    return {parameter for parameter in module._parameters.values() if parameter is not None}


def _held_on_meta(module: nn.Module) -> list[torch.Tensor]:
    held = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in held if tensor is not None and tensor.is_meta]


def _all_given(module: nn.Module) -> bool:
    """Whether files have all values that it lacks."""
    return all(given(tensor) is not None for tensor in _held_on_meta(module))


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
