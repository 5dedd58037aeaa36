"""Which parameters an engine trains, and whether the model still holds them, as it has them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass

from wherry.errors import WherryError
from wherry.fake import is_fake
from wherry.sharding.unit import Flat, Unit, Weights


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
    """The parameters of an engine, and where the model has them: one that is put there later would not be trained.

    `optimized` are the parameters that the optimizer was given.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], optimized: Collection[nn.Parameter]) -> None:
        self._model = model
        ours = {parameter for unit in units for flat in unit.flats for parameter in flat.parameters}
        self._places = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter in ours
        ]
        for module in model.modules():
            module.__dict__["_apply"] = Moves(module, self._refuse_moves)
        self._note_tree()
        flats = [flat for unit in units for flat in unit.flats]
        self._flats = [f for f in flats if not (f.distributed or is_fake(f.whole)) and _shows_data(f)]
        self._travelling = [flat for flat in self._flats if not flat.resident]
        frozen = [parameter for flat in flats if not flat.trainable for parameter in flat.parameters]
        # Frozen parameters that are trained once they require a gradient, and those that never are.
        self.waiting = [parameter for parameter in frozen if parameter in optimized]
        self._untrained = [parameter for parameter in frozen if parameter not in optimized]
        self._optimized = optimized

    def _note_tree(self) -> None:
        """Note the children of modules, and the identities of the parameters in modules that hold some."""
        modules = list(self._model.modules())
        self._children = [(module, list(module._modules.values())) for module in modules if module._modules]
        self._held = [
            (module, list(map(id, dict.values(module._parameters)))) for module in modules if module._parameters
        ]

    def _tree_changed(self) -> bool:
        # In lists, as each step comes here: a generator's turns cost more.
        return any([list(module._modules.values()) != children for module, children in self._children]) or any(
            [list(map(id, dict.values(module._parameters))) != held for module, held in self._held]
        )

    @property
    def unfrozen(self) -> list[str]:
        """The parameters that the optimizer was given frozen, and that require a gradient now."""
        with DisableTorchFunctionSubclass():
            return [self._name_of(parameter) for parameter in self.waiting if parameter.requires_grad]

    def check(self) -> None:
        """Raise if a parameter has changed since the engine was built so that it is not trained."""
        if self._tree_changed():
            self._check_tree()
            self._note_tree()
        self._check_data(self._flats)
        with DisableTorchFunctionSubclass():
            trained = [parameter for parameter in self._untrained + self.waiting if parameter.requires_grad]
        for parameter in trained:
            if parameter not in self._optimized:
                raise WherryError(
                    f"{self._name_of(parameter)}: this parameter was frozen at wherry.initialize and requires a "
                    "gradient now, and the optimizer was not given it; give the optimizer all that is ever to be "
                    "trained (model_parameters=model.parameters(), where the config names it), or freeze it again"
                )
            if parameter.grad is not None:
                raise WherryError(
                    f"{self._name_of(parameter)}: this parameter came to require a gradient within an accumulation "
                    "window, of which this gradient is a part; unfreeze it after a step and before the next forward"
                )

    def check_released(self) -> None:
        """Raise if a released parameter has been given data, which the next gather would overwrite."""
        self._check_data(self._travelling)

    def _check_data(self, flats: Sequence[Flat]) -> None:
        address = torch.Tensor.data_ptr
        with DisableTorchFunctionSubclass():  # released parameters look at each call
            for flat in flats:
                if not flat.resident and flat.weights is not Weights.RELEASED:
                    continue
                shown = flat.views if flat.resident and not flat.pending else flat.blanks
                if list(map(address, flat.parameters)) != list(map(address, shown)):
                    self._check_flat(flat)

    def _check_flat(self, flat: Flat) -> None:
        # One whose update is under way shows placeholders from the step on, until the update is waited for.
        shown = (flat.views,) * flat.resident + (flat.blanks,) * (flat.pending or not flat.resident)
        for parameter, *tensors in zip(flat.parameters, *shown, strict=True):
            if parameter.data_ptr() not in {tensor.data_ptr() for tensor in tensors}:
                raise WherryError(
                    f"{self._name_of(parameter)}: this parameter has been given other data since wherry.initialize (by "
                    "an assignment to its .data, set_() or swap_tensors), which is not trained; copy into it inside "
                    "wherry.gathered(...), as with parameter.data.copy_(values)"
                )

    def _check_tree(self) -> None:
        """Modules may come and go, as long as all parameters that require a gradient are the engine's."""
        for module, name, parameter in self._places:
            if dict.get(module._parameters, name) is not parameter:
                raise WherryError(
                    f"{self._path(module, name)}: this parameter has been replaced or removed since wherry.initialize, "
                    "and what is there now is not trained; edit it in place inside wherry.gathered(...), or close() "
                    "the engine and call wherry.initialize again"
                )
        ours = {parameter for _, _, parameter in self._places}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and parameter not in ours:
                raise WherryError(
                    f"{name}: this parameter has come into the model since wherry.initialize, as by a module that was "
                    "added or replaced, and is not trained; copy its values into the parameter that was there, inside "
                    "wherry.gathered(...), or close() the engine and call wherry.initialize again"
                )

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
        self._children.clear()
        self._held.clear()
        self._flats.clear()
        self._travelling.clear()


def _shows_data(flat: Flat) -> bool:
    """Tell whether its parameters have their values in `data`, and not in tensors that they are made of."""
    return all(places[0][1] == "data" for places in flat.places)
