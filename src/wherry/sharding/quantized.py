"""Weights in few bits: which of their tensors lies in a flat, in which dtype, and what of them stays beside it.

Codes are frozen: a flat of their own dtype holds them, which rests, travels and is saved as any other. A weight of
bitsandbytes is a parameter of codes; one of torchao is a tensor made of others, the largest of which has the codes.
What else they have, scales mostly, 1/64 to 1/8 of the codes, stays whole on the device of every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from wherry.errors import WherryError
from wherry.parallel.partition import inside, is_dtensor, part_of, parts
from wherry.sharding.meta import GIVEN
from wherry.sharding.safetensors_folder import TensorSource

# Where `show` finds whose attributes are a parameter's values: an object, and the attribute's name.
Attribute = tuple[Any, str]


class Scale(NamedTuple):
    """A tensor that belongs to a weight in few bits, by the name that it has beside the weight's."""

    name: str
    parameter: nn.Parameter
    holder: Any
    attribute: str

    @property
    def tensor(self) -> torch.Tensor:
        found: torch.Tensor = getattr(self.holder, self.attribute)
        return found


def is_wide(dtype: torch.dtype) -> bool:
    """Whether it is a type to compute in, that a working type may take the place of: others hold codes."""
    return dtype.is_floating_point and dtype.itemsize > 1


def placeholder(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What every element of a released parameter reads as. Where there is no NaN it is the largest number: codes with
    their greatest weight, so that the loss is far off."""
    if dtype.is_floating_point:
        try:
            return torch.full((), float("nan"), dtype=dtype, device=device)
        except NotImplementedError:  # of less than a byte
            return torch.full((), 0x77, dtype=torch.uint8, device=device).view(dtype)
    return torch.full((), True if dtype is torch.bool else torch.iinfo(dtype).max, dtype=dtype, device=device)


def flat_kind(parameter: torch.Tensor, working: torch.dtype | None) -> tuple[torch.dtype, int]:
    """The dtype of the flat that a parameter lies in, and how many elements of it this rank has of the parameter."""
    if _awaits_4_bits(parameter):
        storage: torch.dtype = parameter.quant_storage  # type: ignore[attr-defined]
        return storage, math.ceil(parameter.numel() / 2 / storage.itemsize)
    if _awaits_8_bits(parameter):
        return torch.int8, parameter.numel()
    own = part_of(parameter)
    return (own.dtype if has_codes(parameter) or working is None else working), own.numel()


def has_codes(parameter: torch.Tensor) -> bool:
    """Whether its elements have no meaning as numbers. bitsandbytes may store codes in a type of floats."""
    if parameter.requires_grad:
        return False
    coded = getattr(parameter, "quant_state", None) is not None or _is_made_of_others(parameter)
    return coded or not is_wide(part_of(parameter).dtype)


def _is_made_of_others(tensor: torch.Tensor) -> bool:
    return not is_dtensor(tensor) and inside(tensor) is not None


def places(parameter: nn.Parameter, module: nn.Module | None = None) -> list[Attribute]:
    """Whose attributes the values of a parameter are; `module` is what has them too, if any has."""
    found: list[Attribute] = [inside(parameter) or (parameter, "data")]
    state = module.__dict__.get("state") if module is not None else None
    if getattr(state, "CB", None) is not None:  # of bitsandbytes' Linear8bitLt, which computes with this
        found.append((state, "CB"))
    return found


# bitsandbytes, whose weights get their codes when they are moved.


def _awaits_4_bits(parameter: torch.Tensor) -> bool:
    return getattr(parameter, "bnb_quantized", True) is False


def _awaits_8_bits(parameter: torch.Tensor) -> bool:
    return getattr(parameter, "has_fp16_weights", True) is False and parameter.dtype is not torch.int8


def _has_codes_in_a_file(parameter: torch.Tensor) -> bool:
    return parameter.is_meta and getattr(parameter, "quant_state", None) is not None


def quantize(name: str, parameter: nn.Parameter, source: TensorSource | None, device: torch.device) -> bool:
    """Give a weight of bitsandbytes its codes, as `module.to(device)` does, if it has none. True where it was read from
    `source` for that: a file has it in full precision, or the codes."""
    if not (_awaits_4_bits(parameter) or _awaits_8_bits(parameter) or _has_codes_in_a_file(parameter)):
        return False
    on_meta = parameter.is_meta
    if on_meta:
        if source is None:
            raise WherryError(
                f"{name}: it is on the meta device, and {type(parameter).__name__} makes codes of values; call "
                "wherry.load_pretrained before wherry.initialize"
            )
        values = source.elements(0, math.prod(source.shape)).view(source.shape).to(parameter.dtype)
        made = torch.Tensor._make_subclass(type(parameter), values, False)
        made.__dict__.update((key, value) for key, value in parameter.__dict__.items() if key != GIVEN)
        torch.utils.swap_tensors(parameter, made)
    parameter.to(device)  # it stays this object
    return on_meta


def turned(model: nn.Module) -> set[str]:
    """Weights that await codes, of layers whose weights have inputs first, as GPT-2's do: those of bitsandbytes have
    outputs first."""
    return {
        f"{path}.weight"
        for path, module in model.named_modules()
        if getattr(module.__dict__.get("source_cls"), "__name__", "") == "Conv1D"
        and not _has_codes_in_a_file(module.get_parameter("weight"))
    }


def prepare(module: nn.Module) -> None:
    """Let a layer of bitsandbytes compute with what its weight shows, and with nothing that it has kept of it."""
    if hasattr(module, "support_avx512bf16_for_cpu"):
        module.__dict__["support_avx512bf16_for_cpu"] = False  # it would pack its codes anew for an evaluation
    weight: Any = module._parameters.get("weight")
    if getattr(weight, "CB", None) is None:
        return
    if callable(moves := getattr(module, "init_8bit_state", None)):
        moves()
    else:
        weight.CB = None


def scales(model: nn.Module) -> Iterator[Scale]:
    """What weights in few bits have beside their codes; each once, by its name in the model."""
    seen: set[tuple[int, str]] = set()
    for prefix, module in model.named_modules():
        for name, parameter in dict.items(module._parameters):
            for found in _scales(name, parameter, module) if parameter is not None else ():
                key = id(found.holder), found.attribute
                if key not in seen:
                    seen.add(key)
                    yield found._replace(name=f"{prefix}.{found.name}" if prefix else found.name)


def _scales(name: str, parameter: nn.Parameter, module: nn.Module) -> Iterator[Scale]:
    state = getattr(parameter, "quant_state", None)
    nested = getattr(state, "state2", None)
    # By bitsandbytes' own names, as far as it has such.
    found = [
        (f"{name}.absmax", state, "absmax"),
        (f"{name}.quant_map", state, "code"),
        (f"{name}.nested_offset", state, "offset"),
        (f"{name}.nested_absmax", nested, "absmax"),
        (f"{name}.nested_quant_map", nested, "code"),
    ]
    if hasattr(parameter, "SCB"):
        found.append(("SCB", module.__dict__.get("state") if parameter.SCB is None else parameter, "SCB"))
    if _is_made_of_others(parameter):
        codes = inside(parameter)
        found += [
            (f"{name}.{path}", holder, attribute)
            for path, holder, attribute in parts(parameter)
            if (holder, attribute) != codes
        ]
    for path, holder, attribute in found:
        if isinstance(getattr(holder, attribute, None), torch.Tensor):
            yield Scale(path, parameter, holder, attribute)
