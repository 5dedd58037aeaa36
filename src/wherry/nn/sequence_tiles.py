"""MLPs and norms of a model's blocks, run over pieces of the sequence: what is wide in them is never there whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from wherry.fake import alike, faking
from wherry.nn.stand_in import StandIn
from wherry.observe.log import say
from wherry.sharding.watched_params import Hook

# What is read of a block's children by their names; others are looked into.
MLPS = {"mlp", "ffn", "feed_forward", "feedforward", "ff"}
# Norms that look at other rows than their own.
ACROSS_ROWS = ("Batch", "Group", "Instance")
SEQUENCE = 1

Pieces = int | Literal["auto"]


class SequenceTiles:
    """The modules of `model` whose forward runs in pieces; `handles` undo it.

    MLPs are those of `blocks`; `units` are modules with gathers of their own, and what holds one runs whole.
    """

    def __init__(
        self, model: nn.Module, blocks: Iterable[nn.Module], pieces: Pieces, units: Iterable[nn.Module] = ()
    ) -> None:
        apart, left = set(units), dict[tuple[str, str], None]()
        tiled = [module for module in model.modules() if _is_norm(module)]
        norms = len(tiled)
        for block in blocks:
            for name, module in block.named_children():
                if _is_mlp(name, module):
                    if (reason := _why_whole(module, apart)) is None:
                        tiled.append(module)
                    else:
                        left[f"{type(block).__name__}.{name}", reason] = None
        if not faking():
            for name, reason in left:
                say("sequence_tiles: %s runs whole, as %s", name, reason)
            if len(tiled) == norms and not left:
                say("sequence_tiles: the model's blocks hold no MLP that is known as one, so none runs in pieces")
        self.handles = [StandIn(module, "forward", Hook(Tiled(module, pieces))) for module in tiled]


def _is_norm(module: nn.Module) -> bool:
    name = type(module).__name__
    alone = next(module.children(), None) is None
    # torch's own LayerNorm makes nothing wide.
    return alone and "Norm" in name and name != "LayerNorm" and not any(kind in name for kind in ACROSS_ROWS)


def _is_mlp(name: str, module: nn.Module) -> bool:
    """By its name; or as a stack of linear layers and what has no weights."""
    kind = type(module).__name__.lower()
    if name.lower() in MLPS or kind.endswith(("mlp", "feedforward", "ffn")) or "moe" in kind:
        return True
    parts = [part for part in module.modules() if next(part.children(), None) is None]
    linear = sum(_is_linear(part) for part in parts)
    return isinstance(module, nn.Sequential) and linear > 1 and all(map(_is_row_wise, parts))


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ in ("Conv1D", "Linear")


def _is_row_wise(module: nn.Module) -> bool:
    plain = next(module.parameters(), None) is None
    return plain or _is_linear(module) or _is_norm(module) or isinstance(module, nn.LayerNorm)


def _why_whole(module: nn.Module, apart: set[nn.Module]) -> str | None:
    inside = list(module.modules())[1:]
    if any(hasattr(part, "experts") or "Experts" in type(part).__name__ for part in (module, *inside)):
        return "it sends tokens to experts"
    if not apart.isdisjoint(inside):
        return "parts of it are gathered by themselves"
    if any(part._parameters and not _is_row_wise(part) for part in (module, *inside)):
        return "it has weights beside those of linear layers and norms"
    return None


class Tiled:
    """Takes the calls of one module's forward."""

    def __init__(self, module: nn.Module, pieces: Pieces) -> None:
        self._module = module
        self._pieces = pieces
        self._widest = max((p.shape[d] for p in module.parameters() if p.dim() == 2 for d in (0, 1)), default=0)
        self._parameters = list(module.parameters())

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or x.dim() != 3:
            return inner(*args, **kwargs)
        pieces = min(self._pieces_for(x), x.shape[SEQUENCE])
        if pieces < 2:
            return inner(x)
        trains = any(parameter.requires_grad for parameter in self._parameters)
        if not (torch.is_grad_enabled() and (x.requires_grad or trains)):
            return _in_pieces(inner, x, pieces)
        draws = self._module.training and self._widest > 0
        return _SequenceTiles.apply(x, inner, pieces, draws, *self._parameters)

    def _pieces_for(self, x: Tensor) -> int:
        """`auto`: what is widest in a piece has no more elements than `x`, and a piece no more rows than `x` is wide,
        as published for TiledMLP."""
        if self._pieces != "auto":
            return self._pieces
        width = x.shape[-1]
        return max(math.ceil(x.shape[SEQUENCE] / width), math.ceil(self._widest / width))


def _in_pieces(forward: Callable[[Tensor], Tensor], x: Tensor, pieces: int) -> Tensor:
    """Without a graph: the result, and one piece at a time of everything else."""
    result: Tensor | None = None
    start = 0
    for piece in alike(x.tensor_split(pieces, SEQUENCE)):
        part = forward(piece)
        if result is None:
            result = part.new_empty((*x.shape[:-1], part.shape[-1]))
        result.narrow(SEQUENCE, start, piece.shape[SEQUENCE]).copy_(part)
        start += piece.shape[SEQUENCE]
    assert result is not None
    return result


class _SequenceTiles(torch.autograd.Function):
    """Of the forward its input is kept; the backward runs each piece again, and sums gradients of weights in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, inner: Callable[[Tensor], Tensor], pieces: int, draws: bool, *weights: Tensor
    ) -> Tensor:
        kind = x.device.type
        ctx.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        ctx.inner, ctx.pieces, ctx.draws, ctx.weights = inner, pieces, draws, weights
        if draws:
            ctx.numbers = torch.get_rng_state(), *get_device_states(x)
        # Unpacked in the backward the weights are gathered there, whatever has happened meanwhile: frozen ones too.
        ctx.save_for_backward(x, *weights)
        return _in_pieces(inner, x, pieces)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, *_ = ctx.saved_tensors
        wants_x = ctx.needs_input_grad[0]
        of_x = torch.empty_like(x) if wants_x else None
        trained = [weight for weight in ctx.weights if weight.requires_grad]
        sums: list[Tensor | None] = [None] * len(trained)
        start = 0
        with _same_numbers(ctx.numbers, x) if ctx.draws else nullcontext():
            pieces = zip(*(t.tensor_split(ctx.pieces, SEQUENCE) for t in (x, grad)), strict=True)
            for piece, of_result in alike(list(pieces)):
                leaf = piece.detach().requires_grad_(wants_x)
                with torch.enable_grad(), _autocast(ctx.autocast, x.device.type):
                    result = ctx.inner(leaf)
                asked = [leaf, *trained] if wants_x else trained
                of_piece = list(torch.autograd.grad(result, asked, of_result, allow_unused=True))
                del result
                if of_x is not None:
                    of_x.narrow(SEQUENCE, start, leaf.shape[SEQUENCE]).copy_(of_piece.pop(0))
                for place, one in enumerate(of_piece):
                    _add(sums, place, one)
                start += leaf.shape[SEQUENCE]
        found = iter(sums)
        totals = (next(found) if weight.requires_grad else None for weight in ctx.weights)
        gradients = (None if t is None else t.to(w.dtype) for t, w in zip(totals, ctx.weights, strict=True))
        return of_x, None, None, None, *gradients


def _add(sums: list[Tensor | None], place: int, gradient: Tensor | None) -> None:
    total = sums[place]
    if gradient is None:
        return
    if total is None:
        sums[place] = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
    else:
        total.add_(gradient)


def _autocast(dtype: torch.dtype | None, kind: str) -> AbstractContextManager[Any]:
    """As it was in the forward."""
    if dtype is not None:
        return torch.autocast(kind, dtype=dtype)
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


@contextmanager
def _same_numbers(state: tuple[Any, ...], x: Tensor) -> Iterator[None]:
    """Random numbers of the forward again, and then those that would have come."""
    on_host, devices, states = state
    with torch.random.fork_rng(devices, device_type=x.device.type if devices else "cpu"):
        torch.set_rng_state(on_host)
        set_device_states(devices, states, device_type=x.device.type)
        yield
