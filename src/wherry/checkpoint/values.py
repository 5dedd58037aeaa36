"""Values of a user's, a scheduler's or a generator's state as JSON, exactly, and back. Nothing is ever pickled."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.files import DTYPES
from wherry.parallel.partition import is_dtensor

# Marks an object that stands for what JSON has not.
KIND = "$"
PutTensor = Callable[[torch.Tensor], Any]
GetTensor = Callable[[Any], torch.Tensor]


def encode(value: Any, where: str, put: PutTensor) -> Any:
    """`value` as JSON holds it. Tensors go to `put`, which returns a reference; `where` names the value in errors."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return encode(value.item(), where, put)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {KIND: "float", "value": repr(float(value))}
    if isinstance(value, bytes | bytearray):
        return {KIND: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        if value.dtype not in DTYPES or value.layout is not torch.strided or value.is_meta or is_dtensor(value):
            kind = "DTensor" if is_dtensor(value) else f"{value.layout} of {value.dtype} on {value.device}"
            raise CheckpointError(f"{where}: a tensor that is {kind} cannot be saved; make it a plain one")
        return {KIND: "tensor", "value": put(value)}
    if isinstance(value, np.ndarray):
        return _encode_array(value, where, put)
    if isinstance(value, torch.Size | tuple):
        return {KIND: "tuple", "value": _encode_items(value, where, put)}
    if isinstance(value, list):
        return _encode_items(value, where, put)
    if isinstance(value, set | frozenset):
        return {KIND: "set", "value": _encode_items(sorted(value, key=repr), where, put)}
    if isinstance(value, torch.dtype):
        return {KIND: "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, put)
    raise CheckpointError(
        f"{where}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved; a checkpoint holds None, "
        "booleans, numbers, strings, bytes, tensors, numpy arrays, and lists, tuples, sets and dicts of these. Save "
        "what the object is made of, for example its state_dict() or vars() of it"
    )


def _encode_items(items: Any, where: str, put: PutTensor) -> list[Any]:
    return [encode(item, f"{where}[{number}]", put) for number, item in enumerate(items)]


def _encode_array(value: np.ndarray, where: str, put: PutTensor) -> Any:
    if value.dtype.hasobject:
        raise CheckpointError(f"{where}: a numpy array of objects cannot be saved; give it a dtype of numbers")
    flat = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.size else torch.empty(0).byte()
    return {KIND: "array", "dtype": value.dtype.str, "shape": list(value.shape), "value": put(flat)}


def _encode_mapping(value: Mapping[Any, Any], where: str, put: PutTensor) -> Any:
    plain = type(value) is not Counter and all(isinstance(key, str) for key in value) and KIND not in value
    if plain:
        return {key: encode(item, f"{where}[{key!r}]", put) for key, item in value.items()}
    pairs = [
        [encode(key, f"{where} (a key)", put), encode(item, f"{where}[{key!r}]", put)] for key, item in value.items()
    ]
    return {KIND: "counter" if type(value) is Counter else "dict", "value": pairs}


def dtype_named(name: str) -> torch.dtype:
    """torch's dtype of this name, and nothing else of torch's."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{name!r} is no dtype of this torch; the checkpoint is damaged, or of a newer version")
    return found


def decode(value: Any, get: GetTensor) -> Any:
    """What `encode` was given. `get` finds the tensor of a reference."""
    if isinstance(value, list):
        return [decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(KIND)
    if kind is None:
        return {key: decode(item, get) for key, item in value.items()}
    inner = value["value"]
    if kind == "tensor":
        return get(inner)
    if kind == "array":
        return np.frombuffer(get(inner).numpy().tobytes(), np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    if kind == "float":
        return float(inner)
    if kind == "bytes":
        return base64.b64decode(inner)
    if kind == "dtype":
        return dtype_named(inner)
    if kind == "tuple":
        return tuple(decode(item, get) for item in inner)
    if kind == "set":
        return {decode(item, get) for item in inner}
    if kind in ("dict", "counter"):
        pairs = {decode(key, get): decode(item, get) for key, item in inner}
        return Counter(pairs) if kind == "counter" else pairs
    raise CheckpointError(f"a value of kind {kind!r} is not known; the checkpoint was written by a newer version")
