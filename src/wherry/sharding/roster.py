"""Which parameters an engine trains, and whether the model still holds them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from wherry.errors import WherryError
from wherry.sharding.unit import Unit


class Roster:
    """The places of an engine's parameters in the model: a parameter put there later would never be trained."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        ours = {parameter for unit in units for flat in unit.flats for parameter in flat.parameters}
        self._frozen = [
            p for unit in units for flat in unit.flats if not flat.trainable for p in flat.parameters
        ]
        self._model = model
        self._places = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter in ours
        ]

    def check(self) -> None:
        """Raise if a parameter has been replaced, removed or unfrozen since the engine was built."""
        for module, name, parameter in self._places:
            if module._parameters.get(name) is not parameter:
                raise WherryError(
                    f"{self._path(module, name)}: this parameter has been replaced or removed since wherry.initialize, "
                    "and what is there now is not trained; edit it in place inside wherry.gathered(...), or close() "
                    "the engine and call wherry.initialize again"
                )
        for parameter in self._frozen:
            if parameter.requires_grad:
                module, name, _ = next(place for place in self._places if place[2] is parameter)
                raise WherryError(
                    f"{self._path(module, name)}: this parameter was frozen at wherry.initialize and requires a "
                    "gradient now, for which no room was made; let it require one before wherry.initialize (and "
                    "freeze it after that, as often as you like), or close() the engine and call it again"
                )

    def _path(self, module: nn.Module, name: str) -> str:
        path = next((path for path, other in self._model.named_modules() if other is module), "")
        return f"{path}.{name}" if path else name

    def close(self) -> None:
        self._places.clear()
        self._frozen.clear()
