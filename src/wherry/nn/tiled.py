"""Linear layers too large for one gather: cut into tiles that are gathered, used and released one by one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass
from torch.nn import functional as F

from wherry.errors import WherryError
from wherry.nn.gelu import APPROXIMATE, GeluLinear
from wherry.observe.log import say
from wherry.parallel.partition import MARKS, is_dtensor
from wherry.sharding.layout import Place
from wherry.sharding.meta import Given, give, source_of
from wherry.sharding.param_shard import ParamShard, shard_of, shards_gathered
from wherry.sharding.safetensors_folder import TensorBlock


class Tile(nn.Linear):
    """One tile: a unit of its own. It is initialized as the part of the whole layer that it is."""

    always_a_unit = True

    def __init__(self, in_features: int, out_features: int, bias: bool, fan_in: int, **kind: Any) -> None:
        self.fan_in = fan_in
        super().__init__(in_features, out_features, bias, **kind)

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.fan_in) if self.fan_in else 0.0
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)


class TiledLinear(nn.Module):
    """A linear layer in `in_splits` x `out_splits` tiles, each of them a unit, with a linear layer's state_dict.

    The results are those of `nn.Linear`; where the input is split, within the order of additions.

        layer = wherry.nn.TiledLinear(16384, 65536, out_splits=8)
    """

    cut_into_tiles = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        in_splits: int = 1,
        out_splits: int = 1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, splits, features in (
            ("in_splits", in_splits, in_features), ("out_splits", out_splits, out_features)
        ):  # fmt: skip
            if not 1 <= splits <= max(1, features):
                raise WherryError(f"TiledLinear: {name} is between 1 and the {features} features, got {splits}")
        self.in_features = in_features
        self.out_features = out_features
        self.in_sizes = _cut(in_features, in_splits)
        self.out_sizes = _cut(out_features, out_splits)
        self.has_bias = bias
        # It stands for a `GeluLinear`.
        self.gelu = False
        self.tiles = nn.ModuleList(
            Tile(size, rows, bias and column == 0, in_features, device=device, dtype=dtype)
            for rows in self.out_sizes
            for column, size in enumerate(self.in_sizes)
        )
        self.register_state_dict_post_hook(_join)
        self.register_load_state_dict_pre_hook(_split)

    @classmethod
    def from_linear(cls, linear: nn.Linear, in_splits: int = 1, out_splits: int = 1) -> TiledLinear:
        """A tiled layer with the weights of `linear`."""
        with torch.device("meta"):
            tiled = cls(linear.in_features, linear.out_features, in_splits, out_splits, linear.bias is not None)
        for name, place in tiled.places().items():
            whole = getattr(linear, place.whole)
            # `detach` would share memory, and keep the whole alive as long as any tile.
            data = torch.empty(place.shape, dtype=whole.dtype, device=whole.device)
            if not data.is_meta:
                data.copy_(place.of(whole.detach()))
            owner, attribute = name.rsplit(".", 1)
            parameter = nn.Parameter(data, requires_grad=whole.requires_grad)
            setattr(tiled.get_submodule(owner), attribute, parameter)
            if (source := source_of(whole)) is not None:
                block = TensorBlock(source, place.offsets, place.shape)
                give(tiled.get_submodule(owner), attribute, Given(name, block))
        tiled.gelu = isinstance(linear, GeluLinear)
        tiled.train(linear.training)
        return tiled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gelu:
            x = F.gelu(x, approximate=APPROXIMATE)
        columns = len(self.in_sizes)
        inputs = x.split(self.in_sizes, -1) if columns > 1 else (x,)
        rows = []
        for first in range(0, len(self.tiles), columns):
            row = self.tiles[first](inputs[0])
            for column in range(1, columns):
                row = row + self.tiles[first + column](inputs[column])
            rows.append(row)
        return torch.cat(rows, -1) if len(rows) > 1 else rows[0]

    def places(self) -> dict[str, Place]:
        """For each parameter of a tile, by its name in this module: where it lies in the whole layer's."""
        found: dict[str, Place] = {}
        row_start = 0
        for row, rows in enumerate(self.out_sizes):
            column_start = 0
            for column, columns in enumerate(self.in_sizes):
                name = f"tiles.{row * len(self.in_sizes) + column}"
                found[f"{name}.weight"] = Place(
                    "weight", (self.out_features, self.in_features), (row_start, column_start), (rows, columns)
                )
                if self.has_bias and column == 0:
                    found[f"{name}.bias"] = Place("bias", (self.out_features,), (row_start,), (rows,))
                column_start += columns
            row_start += rows
        return found

    @property
    def weight(self) -> torch.Tensor:
        """A placeholder with the whole weight's shape, type and device. It reads as NaN: the whole is nowhere."""
        return self._placeholder(self.out_features, self.in_features)

    @property
    def bias(self) -> torch.Tensor | None:
        """A placeholder, as `weight` is, or None for a layer without."""
        return self._placeholder(self.out_features) if self.has_bias else None

    def _placeholder(self, *shape: int) -> torch.Tensor:
        tile = self.tiles[0].get_parameter("weight")
        return torch.full((), float("nan"), dtype=tile.dtype, device=tile.device).expand(shape)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, in_splits={len(self.in_sizes)}, "
            f"out_splits={len(self.out_sizes)}, bias={self.has_bias}"
        )


def _cut(features: int, splits: int) -> list[int]:
    """Sizes that differ by one at most."""
    return [features // splits + (index < features % splits) for index in range(splits)]


def _join(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """The tiles' entries of a state_dict become those of a linear layer."""
    assert isinstance(module, TiledLinear)
    for name, place in module.places().items():
        part = state.pop(prefix + name, None)
        if part is None:
            continue
        whole = state.get(prefix + place.whole)
        if whole is None:
            whole = state[prefix + place.whole] = torch.empty(place.whole_shape, dtype=part.dtype, device=part.device)
        with DisableTorchFunctionSubclass():  # an engine replaces placeholders by values after this
            place.of(whole).copy_(part.detach())


def _split(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """A linear layer's entries of a state_dict become the tiles'."""
    assert isinstance(module, TiledLinear)
    errors = rest[-1]
    for name, place in module.places().items():
        whole = state.get(prefix + place.whole)
        if whole is None:
            continue
        if tuple(whole.shape) != place.whole_shape:
            errors.append(
                f"size mismatch for {prefix}{place.whole}: {tuple(whole.shape)} in the checkpoint, "
                f"{place.whole_shape} in the model"
            )
        else:
            state[prefix + name] = place.of(whole)
    state.pop(prefix + "weight", None)
    state.pop(prefix + "bias", None)


def tile(
    model: nn.Module, *, max_bytes: int, names: Sequence[str] | None = None
) -> dict[nn.Parameter, list[nn.Parameter]]:
    """Replace every linear layer whose weight has more than `max_bytes` by tiles of at most that; in place.

    Layers whose weight is used elsewhere too (a head that is tied to an embedding) stay as they are. Make the optimizer
    afterwards; what is returned says which parameters have taken the place of which. `names` restricts it to some.

        wherry.tile(model, max_bytes=256 * 2**20)
    """
    if max_bytes < 1:
        raise WherryError(f"tile: max_bytes is at least 1, got {max_bytes}")
    users = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    replaced: dict[nn.Parameter, list[nn.Parameter]] = {}
    done: dict[nn.Module, TiledLinear] = {}
    for prefix, parent in list(model.named_modules()):
        for attribute, child in list(parent._modules.items()):
            name = f"{prefix}.{attribute}" if prefix else attribute
            # Another subclass may compute something else.
            if type(child) not in (nn.Linear, GeluLinear) or (names is not None and name not in names):
                continue
            weight = child._parameters.get("weight")
            # A weight that is computed, as `weight_norm` does, is no parameter.
            if weight is None or weight.numel() * weight.element_size() <= max_bytes:
                continue
            reason = _why_whole(child, parent, users)
            if reason is not None:
                say("tile: %s stays whole, as %s", name, reason)
                continue
            if child not in done:
                done[child] = _tiled(child, max_bytes)
                for old_name, old in child.named_parameters():
                    replaced[old] = [
                        done[child].get_parameter(new)
                        for new, place in done[child].places().items()
                        if place.whole == old_name
                    ]
            setattr(parent, attribute, done[child])
    return replaced


def larger_than(model: nn.Module, live: int) -> dict[str, nn.Parameter]:
    """The weights of linear layers that a budget of live parameters does not allow whole; one of 0 allows a unit."""
    if not live:
        return {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    weights = {name: layer._parameters.get("weight") for name, layer in layers.items()}
    return {name: weight for name, weight in weights.items() if weight is not None and weight.numel() > live}


def tile_large_layers(
    model: nn.Module, live: int, optimizer: Any, model_parameters: Iterable[Any] | None
) -> list[Any] | None:
    """`tile` for layers that a budget of live parameters does not allow: in tiles of at most half of it, told of.

    The tiles are in the groups of an optimizer. Returns `model_parameters` with them.
    """
    replaced: dict[nn.Parameter, list[nn.Parameter]] = {}
    for name, weight in larger_than(model, live).items():
        replaced |= tile(model, max_bytes=max(1, live // 2) * weight.element_size(), names=[name])
        if tiles := replaced.get(weight):
            say("%s has more than the %d elements that may be live: %d tiles instead", name, live, len(tiles))

    def renewed(given: Iterable[Any]) -> list[Any]:
        found: list[Any] = []
        for item in given:
            if isinstance(item, dict):
                found.append({**item, "params": renewed(item["params"])})
            elif isinstance(item, nn.Parameter):
                found += replaced.get(item, [item])
            else:
                found.append(item)
        return found

    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            group["params"] = renewed(group["params"])
    return None if model_parameters is None else renewed(model_parameters)


def tell_of_large_layers(model: nn.Module, live: int) -> None:
    """Say which layers are gathered whole although the budget of live parameters does not allow it."""
    if large := larger_than(model, live):
        say(
            "%s (of %d linear layers) has more elements than the %d of stage3_max_live_parameters, and is gathered "
            'whole nevertheless; "wherry": {"tile_linear": true} cuts such layers into tiles',
            next(iter(large)),
            len(large),
            live,
        )


def _why_whole(linear: nn.Linear, parent: nn.Module, users: Mapping[nn.Parameter, int]) -> str | None:
    if any(users[parameter] > 1 for parameter in linear.parameters()):
        return "its weight is used elsewhere too"
    if "forward" in linear.__dict__ or linear._forward_hooks or linear._forward_pre_hooks:
        return "its forward has been changed or has hooks"
    if isinstance(parent, nn.TransformerEncoderLayer):
        return f"{type(parent).__name__} reads its weight itself when it evaluates"
    if is_dtensor(linear.weight) or any(getattr(linear.weight, mark, False) for mark in MARKS):
        return "tensor-parallel ranks have cut its weight"
    return None


def _tiled(linear: nn.Linear, max_bytes: int) -> TiledLinear:
    size = linear.weight.element_size()
    out_splits = min(linear.out_features, -(-linear.weight.numel() * size // max_bytes))
    rows = -(-linear.out_features // out_splits)
    in_splits = min(linear.in_features, max(1, -(-rows * linear.in_features * size // max_bytes)))
    while in_splits == 1 and max(_cut(linear.out_features, out_splits)) * linear.in_features * size > max_bytes:
        out_splits += 1
    shards = [shard for parameter in linear.parameters() if (shard := shard_of(parameter)) is not None]
    with shards_gathered(shards, None):
        tiled = TiledLinear.from_linear(linear, in_splits, out_splits)
    for parameter in tiled.parameters() if shards else ():
        ParamShard(parameter, shards[0].sharing).release()
    return tiled
