"""Which parameters an engine trains, and whether the model still holds them, as it has them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import nn

from wherry.errors import WherryError
from wherry.fake import is_fake
from wherry.sharding.attached import Moves
from wherry.sharding.unit import Unit

_PARAMETERS = operator.attrgetter("_parameters")


class Roster:
    """The places of an engine's parameters in the model: what is put there later would never be trained."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        ours = {parameter for unit in units for flat in unit.flats for parameter in flat.parameters}
        self._frozen = [p for unit in units for flat in unit.flats if not flat.trainable for p in flat.parameters]
        self._model = model
        # The places, by what they are in, by their names there, and by what is in them.
        self._modules: list[nn.Module] = []
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter in ours:
                    self._modules.append(module)
                    self._names.append(name)
                    self._parameters.append(parameter)
            module.__dict__["_apply"] = Moves(module, self._refuse_moves)
        # Parameters that always are views of their flat, those views, and where they were when last looked at.
        shown = [
            (parameter, view)
            for unit in units
            for flat in unit.flats
            if flat.resident and not flat.distributed and not is_fake(flat.whole)
            for parameter, view in zip(flat.parameters, flat.views, strict=True)
        ]
        self._shown, self._views = [parameter for parameter, _ in shown], [view for _, view in shown]
        self._addresses: list[int] = []

    def check(self) -> None:
        """Raise if a parameter has been replaced, removed or unfrozen since the engine was built."""
        # Every step comes here: without a call of Python for each parameter.
        now = map(dict.get, map(_PARAMETERS, self._modules), self._names)
        if not all(map(operator.is_, now, self._parameters)):
            self._tell_of_replaced()
        addresses = list(map(torch.Tensor.data_ptr, self._shown))
        if addresses != self._addresses:
            self._tell_of_other_data()
            self._addresses = addresses
        for parameter in self._frozen:
            if parameter.requires_grad:
                raise WherryError(
                    f"{self._name_of(parameter)}: this parameter was frozen at wherry.initialize and requires a "
                    "gradient now, for which no room was made; let it require one before wherry.initialize (and "
                    "freeze it after that, as often as you like), or close() the engine and call it again"
                )

    def _tell_of_replaced(self) -> None:
        for module, name, parameter in zip(self._modules, self._names, self._parameters, strict=True):
            if module._parameters.get(name) is not parameter:
                raise WherryError(
                    f"{self._path(module, name)}: this parameter has been replaced or removed since wherry.initialize, "
                    "and what is there now is not trained; edit it in place inside wherry.gathered(...), or close() "
                    "the engine and call wherry.initialize again"
                )

    def _tell_of_other_data(self) -> None:
        for parameter, view in zip(self._shown, self._views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                raise WherryError(
                    f"{self._name_of(parameter)}: this parameter has been given other data since wherry.initialize (by "
                    "an assignment to its .data, set_() or swap_tensors), which is not trained; copy into it inside "
                    "wherry.gathered(...), as with parameter.data.copy_(values)"
                )

    def _refuse_moves(self, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """The placement says where weights rest, and the config in which dtype; what changes neither goes through."""
        ours, seen = set(self._parameters), set()
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
        place = next(place for place, other in enumerate(self._parameters) if other is parameter)
        return self._path(self._modules[place], self._names[place])

    def _path(self, module: nn.Module, name: str) -> str:
        path = next((path for path, other in self._model.named_modules() if other is module), "")
        return f"{path}.{name}" if path else name

    def close(self) -> None:
        for module in self._model.modules():
            if isinstance(module.__dict__.get("_apply"), Moves):
                del module.__dict__["_apply"]
        for places in (self._modules, self._names, self._parameters, self._frozen, self._shown, self._views):
            places.clear()
