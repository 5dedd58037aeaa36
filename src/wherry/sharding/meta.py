"""Models built under `torch.device("meta")`: parameters get memory a unit at a time, and values from files or by the
modules' own code."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from wherry.errors import WherryError
from wherry.fake import is_fake
from wherry.parallel.partition import is_dtensor
from wherry.sharding.layout import FlatLayout
from wherry.sharding.safetensors_folder import TensorSource

# On a parameter: what it is to be given. On a module: the names of its parameters and buffers that are given something.
GIVEN = "_wherry_given"


class Given(NamedTuple):
    name: str
    source: TensorSource


class LazyParameter(nn.Parameter):
    """A parameter on the meta device that has values in a file, made of an ordinary one by its class, as torch's
    `UninitializedParameter` is. Casts and copies keep them; what would lose them without a word is an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lazy = [value for value in tree_iter((args, kwargs)) if isinstance(value, LazyParameter)]
        with torch._C.DisableTorchFunctionSubclass():
            versions = [parameter._version for parameter in lazy]
            try:
                result = func(*args, **(kwargs or {}))
            except NotImplementedError as error:  # what torch says where there is nothing to copy
                raise lazy[0]._moved() from error
            for parameter, version in zip(lazy, versions, strict=True):
                if parameter._version != version:
                    raise parameter._written()
            for made in tree_iter(result):
                if isinstance(made, torch.Tensor) and not made.is_meta and not is_fake(made):
                    raise lazy[0]._moved()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copy: nn.Parameter = super().__deepcopy__(memo)
        if isinstance(copy, LazyParameter):  # and no tensor of a dry run
            copy.__dict__[GIVEN] = self.__dict__[GIVEN]
        return copy

    def __reduce_ex__(self, protocol: object) -> Any:
        raise WherryError(
            f"{self._name}: load_pretrained has only found the values of this model on the meta device, and "
            "wherry.initialize reads them: until then it cannot be pickled or saved. Pickle it before load_pretrained, "
            "and load where it is unpickled; or save the engine that wherry.initialize returns"
        )

    @property
    def _name(self) -> str:
        given: Given = self.__dict__[GIVEN]
        return given.name

    def _moved(self) -> WherryError:
        return WherryError(
            f"{self._name}: load_pretrained has found its values in a file, and wherry.initialize gives it memory and "
            "reads them there; leave out the to_empty() or to() that moves it off the meta device (or call to_empty() "
            "before load_pretrained, which then reads all of the model on every rank)"
        )

    def _written(self) -> WherryError:
        return WherryError(
            f"{self._name}: load_pretrained has found its values in a file, where they are until wherry.initialize "
            "reads them, and a write does nothing on the meta device. Write to it after wherry.initialize, inside "
            "wherry.gathered; or put a new parameter that is in memory, or a new module, in its place"
        )


_SETS_DATA = getattr(torch.Tensor.data, "__set__")  # noqa: B009


class StayingInMemory(TorchFunctionMode):
    """Within it nothing is moved to the meta device.

    PEFT moves the adapters that it has drawn to where the base's weights are. Of a base on the meta device they would
    be drawn once more, by `wherry.initialize`: like these, but not the same for a seed. Inside they keep their values:

        wherry.load_pretrained(model, folder)
        with StayingInMemory():
            model = peft.get_peft_model(model, peft.LoraConfig())
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to and not args[0].is_meta:
            args = tuple(args[0].device if _is_meta_device(value) else value for value in args)
            kwargs = {name: args[0].device if _is_meta_device(value) else value for name, value in kwargs.items()}
        if func == _SETS_DATA and args[1].is_meta and not args[0].is_meta:
            raise WherryError(
                'an adapter is to begin at what the weights of its base are (as with init_lora_weights="pissa"), which '
                "are in files as yet; build the model with from_pretrained, or begin the adapter otherwise"
            )
        return func(*args, **kwargs)


def _is_meta_device(value: Any) -> bool:
    return isinstance(value, torch.device | str) and str(value) == "meta"


def give(module: nn.Module, name: str, given: Given) -> None:
    """A module's parameter on the meta device has values in a file."""
    parameter = module._parameters[name]
    assert parameter is not None, name
    parameter.__dict__[GIVEN] = given
    if type(parameter) is nn.Parameter:  # a DTensor stays one
        parameter.__class__ = LazyParameter
    module.__dict__.setdefault(GIVEN, set()).add(name)


def give_buffer(module: nn.Module, name: str) -> None:
    """A module's buffer has been given its values from a file: who draws the rest of the module leaves them."""
    if _held_on_meta(module):
        module.__dict__.setdefault(GIVEN, set()).add(name)


def source_of(parameter: torch.Tensor) -> TensorSource | None:
    """Where the values of a parameter are that has not been read yet."""
    given: Given | None = parameter.__dict__.get(GIVEN)
    return None if given is None else given.source


def give_memory(parameter: nn.Parameter, memory: torch.Tensor) -> None:
    """Off the meta device, and still the parameter that users and optimizers know, with what they have set on it."""
    kept = {name: value for name, value in parameter.__dict__.items() if name != GIVEN}
    torch.utils.swap_tensors(parameter, nn.Parameter(memory, requires_grad=parameter.requires_grad))
    parameter.__dict__.update(kept)


def refuse_lost(model: nn.Module) -> None:
    """What took the place of a parameter with values in a file would be drawn anew, without a word."""
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta or is_fake(parameter):
                continue
            source, full = source_of(parameter), f"{prefix}.{name}" if prefix else name
            inverted = isinstance(module, ParametrizationList) and any(hasattr(m, "right_inverse") for m in module)
            if inverted and isinstance(parameter, LazyParameter):
                raise parameter._written()  # by `set_`, which torch does not tell of
            if source is None and name in module.__dict__.get(GIVEN, ()):
                raise WherryError(
                    f"{full}: load_pretrained has given it values, and another tensor "
                    "on the meta device has taken its place since, which has none; load after the model is changed, "
                    "or into the engine that wherry.initialize returns"
                )
            if source is not None and tuple(source.shape) != tuple(parameter.shape):
                raise WherryError(
                    f"{full}: load_pretrained has given it values of shape {list(source.shape)}, and it has been made "
                    f"{list(parameter.shape)} since; load after the model is changed, or change it when it has its "
                    "values"
                )


def settle(model: nn.Module) -> None:
    """All has been read: modules are as they were."""
    for module in model.modules():
        module.__dict__.pop(GIVEN, None)


def pieces(layout: FlatLayout, rank: int, sources: Mapping[int, TensorSource]) -> Iterator[tuple[int, torch.Tensor]]:
    """What of the sources, by the numbers of their slots, lies in a rank's shard: where, and its values, flattened."""
    for index, source in sources.items():
        slot = layout.slots[index]
        overlap = layout.overlap(slot, rank)
        if overlap is None:
            continue
        first, last, start = overlap
        if slot.part is not None and tuple(source.shape) != slot.shape:  # a rank may have files of its own
            assert slot.part.offsets is not None, slot
            yield start, source.block(slot.part.offsets, slot.shape).reshape(-1)[first:last]
        else:
            yield start, source.elements(first, last)


def write(start: int, values: torch.Tensor, target: torch.Tensor, begin: int = 0) -> None:
    """Copy what of a piece lies in `target`, which begins at the shard's `begin`-th element."""
    low, high = max(start, begin), min(start + values.numel(), begin + target.numel())
    if low < high:
        target[low - begin : high - begin].copy_(values[low - start : high - start])


# What has no values in files.


class Materializer:
    """Gives values to what is on the meta device, as many modules at a time as hold the parameters asked for.

    A module's `reset_parameters` initializes its own parameters and buffers; models of `transformers` have
    `_init_weights(module)` for all of theirs. Modules whose values are all in files get memory alone.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self._names = {module: name for name, module in model.named_modules()}
        refuse_lost(model)
        self._waiting = [module for module in model.modules() if _held_on_meta(module)]
        self._holders: dict[str, Callable[[nn.Module], Any]] = {
            name: module._init_weights for name, module in model.named_modules() if callable(_init_weights(module))
        }
        # PEFT's layers draw the adapters inside of them, in another way than these would draw themselves.
        self._adapted: list[Any] = [module for module in model.modules() if callable(_reset_lora(module))]
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

        `block` has them all, if one module has: modules in it that hold none may initialize those of their children.
        Parameters in `memory` are given that. What has values in a file is drawn only beside what has none.
        """
        wanted = {parameter for parameter in parameters if parameter.is_meta}
        for module in self._holding(wanted):
            self._draw(module, self._take_off_meta(module, memory))
        with torch.no_grad():
            for module in reversed(list(block.modules()) if block is not None else []):  # children before parents
                if not _direct(module):
                    for way in self._ways_of_model(module):
                        way()
            for module in self._adapted:
                if any(parameter in wanted for parameter in module.lora_A.parameters()):
                    self._draw_adapters(module)

    def leave_to_files(self, parameters: Sequence[nn.Parameter]) -> None:
        """Where files have all values of the modules that hold any of `parameters`, nothing of these is drawn, and they
        leave the meta device without taking memory: whoever cuts them reads what it needs."""
        modules = self._holding({parameter for parameter in parameters if parameter.is_meta})
        if all(_all_given(module) for module in modules):
            for module in modules:
                self._take_off_meta(module, {}, in_files=True)

    def _holding(self, wanted: Set[nn.Parameter]) -> list[nn.Module]:
        return [module for module in self._waiting if wanted & _direct(module)]

    def _draw_adapters(self, module: Any) -> None:
        configs = getattr(self.model, "peft_config", {})
        for name in module.lora_A:
            _reset_lora(module)(name, getattr(configs.get(name), "init_lora_weights", True))

    def finish(self) -> None:
        """Modules that have no parameters, but buffers; and nobody asks any more what had values in files."""
        for module in list(self._waiting):
            self._draw(module, self._take_off_meta(module, {}))
        settle(self.model)

    @torch.no_grad()
    def _take_off_meta(
        self, module: nn.Module, memory: Mapping[nn.Parameter, torch.Tensor], *, in_files: bool = False
    ) -> dict[str, torch.Tensor]:
        """Returns what it has taken off the meta device, filled with what no initializer leaves where none is read."""
        self._waiting.remove(module)
        placed: dict[str, torch.Tensor] = {}
        if isinstance(module, nn.RNNBase):
            module._flat_weight_refs = []  # a tensor with weak references cannot be swapped
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                value = _unset(parameter) if source_of(parameter) is None else 0
                if in_files and isinstance(parameter, LazyParameter):
                    there = torch.zeros((), dtype=parameter.dtype, device=self.device).expand(parameter.shape)
                elif parameter in memory:
                    there = memory[parameter].fill_(value)
                else:
                    there = _filled_like(parameter, value, self.device)
                give_memory(parameter, there)
                placed[name] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = placed[name] = _filled_like(buffer, _unset(buffer), self.device)
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
        return placed

    @torch.no_grad()
    def _draw(self, module: nn.Module, placed: Mapping[str, torch.Tensor]) -> None:
        if not placed:  # all it has is tied to modules that had their turn
            return
        with _values_kept(module, placed, self.device):
            for way in self._ways(module):
                way()
        unset = [name for name, tensor in placed.items() if _is_unset(tensor)]
        if unset:
            where = self._names[module] or "the model"
            raise WherryError(
                f"{where}: reset_parameters() of {type(module).__name__} has left {', '.join(unset)} without values, "
                "which were on the meta device; let it set them too, or build the model under wherry.Init() instead"
            )


def _filled_like(tensor: torch.Tensor, value: float, device: torch.device) -> torch.Tensor:
    # Of one on the meta device torch works out the strides by code that takes half a second to load.
    if type(tensor) in (torch.Tensor, nn.Parameter, LazyParameter) and tensor.is_contiguous():
        return torch.full(tensor.shape, value, dtype=tensor.dtype, device=device)
    with torch._C.DisableTorchFunctionSubclass():  # a lazy parameter refuses to be given memory
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


def _reset_lora(module: nn.Module) -> Any:
    return getattr(module, "reset_lora_parameters", None)


def _init_weights(module: nn.Module) -> Any:
    return getattr(type(module), "_init_weights", None)


def _direct(module: nn.Module) -> set[nn.Parameter]:
    return {parameter for parameter in module._parameters.values() if parameter is not None}


def _held_on_meta(module: nn.Module) -> list[torch.Tensor]:
    held = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in held if tensor is not None and tensor.is_meta]


def _all_given(module: nn.Module) -> bool:
    """Whether files have all values that it lacks."""
    return all(source_of(tensor) is not None for tensor in _held_on_meta(module))


@contextmanager
def _values_kept(module: nn.Module, placed: Container[str], device: torch.device) -> Iterator[None]:
    """What has values that count is a copy for a while: parameters that are tied to a module that had its turn or were
    built in memory, and buffers that were read from files. An initializer may read other buffers, and sets them."""
    parameters = {n: p for n, p in module._parameters.items() if p is not None and n not in placed}
    read = module.__dict__.get(GIVEN, ())
    buffers = {n: b for n, b in module._buffers.items() if b is not None and n in read}
    for name, parameter in parameters.items():
        copy = parameter.detach().to(device, copy=True)
        module._parameters[name] = nn.Parameter(copy, requires_grad=parameter.requires_grad)
    for name, buffer in buffers.items():
        module._buffers[name] = buffer.to(device, copy=True)
    try:
        yield
    finally:
        module._parameters.update(parameters)
        module._buffers.update(buffers)
