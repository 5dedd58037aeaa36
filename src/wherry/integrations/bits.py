"""A base in few bits, of bitsandbytes: its layers on the meta device, and folders that have codes already."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.errors import WherryError
from wherry.regular import read_regular

if TYPE_CHECKING:
    import torch

_LONGEST = 16 << 20


def bits_in(folder: Path, command: str, asked: int | None = None) -> int | None:
    """The bits of a folder's codes, which cannot be others than are `asked` for; None where its weights are numbers."""
    file = folder / "config.json"
    try:
        told = json.loads(read_regular(file, _LONGEST)).get("quantization_config")
        if told is None:
            return None
        ours = told.get("quant_method", "bitsandbytes") == "bitsandbytes"
        in_4 = ours and True in (told.get("load_in_4bit"), told.get("_load_in_4bit"))
        how = "8 bits by bitsandbytes" if ours else f"few bits by {told['quant_method']}"
    except (OSError, ValueError, AttributeError) as error:
        raise WherryError(f"{command}: {file}: quantization_config cannot be read: {error}") from None
    if in_4 and asked in (4, None):
        return 4
    if in_4:
        raise WherryError(
            f"{command}: --bits {asked}: {folder} has weights in 4 bits already; leave --bits out, or give the model "
            "in full precision"
        )
    raise WherryError(
        f"{command}: {folder} holds weights in {how}; full precision and 4 bits by bitsandbytes can be read: give the "
        "folder of the model that they were made of, which `wherry finetune --lora --bits 8` quantizes while it is read"
    )


def is_here() -> bool:
    """Whether a base can be quantized by what is installed."""
    from transformers.utils.import_utils import is_bitsandbytes_available

    return bool(is_bitsandbytes_available())


def to_bits(model: Any, bits: int, dtype: torch.dtype, command: str) -> Any:
    """The model, on the meta device, with layers of bitsandbytes that compute in `dtype`.

    Once `wherry.load_pretrained` has found their values, an engine makes codes of these while it reads them.
    """
    told = getattr(model.config, "quantization_config", None) or {
        f"load_in_{bits}bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    }
    return _replaced(model, told, dtype, command, has_codes=False)


def load_codes(model: Any, folder: Path, dtype: torch.dtype, command: str) -> Any:
    """`wherry.load_pretrained` of a folder that has codes of 4 bits, whose scales are read here and now."""
    import torch

    import wherry
    from wherry.sharding.safetensors_folder import InFile, open_folder

    _replaced(model, model.config.quantization_config, dtype, command, has_codes=True)
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit

    beside: dict[str, dict[str, torch.Tensor]] = {}
    sources = open_folder(folder, model, dict(model.named_parameters()))
    for name, source in sources.items():
        path, _, kind = name.rpartition(".weight.")
        if path:
            beside.setdefault(path, {})[kind] = source.elements(0, math.prod(source.shape))
    layers = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, Linear4bit)]
    for path, layer in layers:
        codes = sources.get(f"{path}.weight")
        if not isinstance(codes, InFile) or path not in beside:
            raise WherryError(f"{command}: {folder} has no codes of {path}.weight, or no scales beside them")
        attributes = layer.weight.__dict__
        empty = torch.empty(codes.shape, dtype=codes.dtype, device="meta")
        layer.weight = torch.Tensor._make_subclass(type(layer.weight), empty, False)
        try:
            layer.quant_state = QuantState.from_dict(dict(beside[path]), torch.device("cpu"))
        except (AssertionError, KeyError, ValueError) as error:
            raise WherryError(f"{command}: {folder}: the scales of {path}.weight cannot be read: {error}") from error
        layer.weight.__dict__.update(attributes, quant_state=layer.quant_state, bnb_quantized=True)
    found = wherry.load_pretrained(model, folder, strict=False)
    scales = {f"{path}.weight.{kind}" for path, layer in layers for kind in beside[path]}
    if wrong := [*found.missing, *(name for name in found.unexpected if name not in scales)]:
        raise WherryError(f"{command}: {folder} and its config differ in {', '.join(wrong[:10])}")
    return model


def left_wide(model: Any) -> int:
    """How many weights of matrices are as they were, but embeddings and the head."""
    coded = {id(weight) for weight in _coded(model)}
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    coded |= {id(parameter) for end in ends if end is not None for parameter in end.parameters()}
    return sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in coded)


def in_bits(model: Any) -> int:
    """How many weights of a model are held as codes."""
    shapes = (getattr(getattr(weight, "quant_state", weight), "shape", weight.shape) for weight in _coded(model))
    return sum(shape.numel() for shape in shapes)


def _coded(model: Any) -> Iterator[Any]:
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    yield from (layer.weight for layer in model.modules() if isinstance(layer, Linear4bit | Linear8bitLt))


def _replaced(model: Any, told: Mapping[str, Any], dtype: torch.dtype, command: str, *, has_codes: bool) -> Any:
    from transformers import BitsAndBytesConfig
    from transformers.quantizers import AutoHfQuantizer

    if not is_here():
        raise WherryError(f"{command}: weights in 4 or 8 bits need bitsandbytes: pip install --upgrade bitsandbytes")
    try:
        config = BitsAndBytesConfig.from_dict({**told, "bnb_4bit_compute_dtype": dtype})
    except (AttributeError, TypeError, ValueError) as error:
        raise WherryError(f"{command}: quantization_config of the model's config.json: {error}") from error
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells of every product that it casts
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=has_codes)
    model.config = copy(model.config)  # others may be made of it
    quantizer.preprocess_model(model=model, dtype=dtype, device_map=None)
    quantizer.postprocess_model(model)
    if not any(True for _ in _coded(model)):
        raise WherryError(f"{command}: a {type(model).__name__} has no layers that are held in few bits")
    model.hf_quantizer = quantizer
    return model
