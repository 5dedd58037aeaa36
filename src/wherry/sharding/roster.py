"""Which parameters an engine trains, and whether the model still holds them, as it has them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from wherry.errors import WherryError
from wherry.fake import is_fake
from wherry.sharding.unit import Unit


class Moves:
    """`module._apply`, of which `to`, `half` and `to_empty` are made, of a module whose parameters an engine holds.

    `check` is called with the module and with what would be done to each of its parameters; a copy of the module has
    none.
    """

    def __init__(self, module: nn.Module, check: Callable[[nn.Module, Callable[..., Any]], None] | None = None) -> None:
        self._module = weakref.ref(module)
        self._check = check

    def __call__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        if self._check is not None:
            self._check(module, fn)
        return type(module)._apply(module, fn, *args, **kwargs)

    def __reduce__(self) -> Any:
        return Moves, (self._module(),)


class Roster:
    """The places of an engine's parameters in the model: what is put there later would never be trained."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._model, self._units = model, units
        self._checked = False
        ours = {parameter for unit in units for flat in unit.flats for parameter in flat.parameters}
        self._places = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter in ours
        ]
        for module in model.modules():
            module.__dict__["_apply"] = Moves(module, self._refuse_moves)

    def check_once(self) -> None:
        """Check at the first step: scripts change their model between initialize and that, or resume in between."""
        if not self._checked:
            self.check()
            self._checked = True

    def check(self) -> None:
        """Raise if a parameter has been replaced, removed or unfrozen since the engine was built."""
        for module, name, parameter in self._places:
            if dict.get(module._parameters, name) is not parameter:
                raise WherryError(
                    f"{self._path(module, name)}: this parameter has been replaced or removed since wherry.initialize, "
                    "and what is there now is not trained; edit it in place inside wherry.gathered(...), or close() "
                    "the engine and call wherry.initialize again"
                )
        for parameter, view, frozen in self._shown():
            if view is not None and parameter.data_ptr() != view.data_ptr():
                raise WherryError(
                    f"{self._name_of(parameter)}: this parameter has been given other data since wherry.initialize (by "
                    "an assignment to its .data, set_() or swap_tensors), which is not trained; copy into it inside "
                    "wherry.gathered(...), as with parameter.data.copy_(values)"
                )
            if frozen and parameter.requires_grad:
                raise WherryError(
                    f"{self._name_of(parameter)}: this parameter was frozen at wherry.initialize and requires a "
                    "gradient now, for which no room was made; let it require one before wherry.initialize (and "
                    "freeze it after that, as often as you like), or close() the engine and call it again"
                )

    def _shown(self) -> Iterator[tuple[nn.Parameter, torch.Tensor | None, bool]]:
        """Parameters, the views that they always are if their flat is whole for ever, and whether they are frozen."""
        for unit in self._units:
            for flat in unit.flats:
                always = flat.resident and not is_fake(flat.whole)
                for parameter, view, places in zip(flat.parameters, flat.views, flat.places, strict=True):
                    yield parameter, view if always and places[0][1] == "data" else None, not flat.trainable

    def _refuse_moves(self, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """The placement says where weights rest, and the config in which dtype; what changes neither goes through."""
        ours, seen = {parameter for _, _, parameter in self._places}, set()
        for parameter in module.parameters():
            kind = (parameter.dtype, parameter.device, parameter.dim())
            if parameter not in ours or kind in seen:
                continue
            seen.add(kind)
            probe = torch.empty([2] * parameter.dim(), dtype=parameter.dtype, device=parameter.device)
            changed = fn(probe)
            if changed is not probe:
                raise WherryError(
                    f"{self._name_of(parameter)}: an engine holds this weight in {parameter.dtype} on "
                    f"{parameter.device}, and it cannot be moved or cast to {changed.dtype} on {changed.device}, in "
                    'other memory; set the dtype in the config ("bf16": {"enabled": true}, "fp16"), and where weights '
                    "rest with zero_optimization.offload_param. To change the model itself, take it back with "
                    "engine.unwrap(), change it, and call wherry.initialize again"
                )

    def _name_of(self, parameter: nn.Parameter) -> str:
        return next(self._path(module, name) for module, name, other in self._places if other is parameter)

    def _path(self, module: nn.Module, name: str) -> str:
        path = next((path for path, other in self._model.named_modules() if other is module), "")
        return f"{path}.{name}" if path else name

    def close(self) -> None:
        for module in self._model.modules():
            if isinstance(module.__dict__.get("_apply"), Moves):
                del module.__dict__["_apply"]
        self._places.clear()
