"""Which parameters an engine trains, and whether the model still holds them."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import nn

from wherry.errors import WherryError
from wherry.sharding.unit import Unit

_PARAMETERS = operator.attrgetter("_parameters")


class Roster:
    """The places of an engine's parameters in the model: a parameter put there later would never be trained."""

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

    def check(self) -> None:
        """Raise if a parameter has been replaced, removed or unfrozen since the engine was built."""
        # Every step comes here: without a call of Python for each parameter.
        now = map(dict.get, map(_PARAMETERS, self._modules), self._names)
        if not all(map(operator.is_, now, self._parameters)):
            self._tell_of_replaced()
        for parameter in self._frozen:
            if parameter.requires_grad:
                place = next(place for place, other in enumerate(self._parameters) if other is parameter)
                module, name = self._modules[place], self._names[place]
                raise WherryError(
                    f"{self._path(module, name)}: this parameter was frozen at wherry.initialize and requires a "
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

    def _path(self, module: nn.Module, name: str) -> str:
        path = next((path for path, other in self._model.named_modules() if other is module), "")
        return f"{path}.{name}" if path else name

    def close(self) -> None:
        for places in (self._modules, self._names, self._parameters, self._frozen):
            places.clear()
