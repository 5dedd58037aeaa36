"""The cross-entropy of a language model's head, from hidden states and the head's weight: no whole logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from wherry.errors import WherryError
from wherry.fake import alike, is_fake

# Logits that exist at a time: 64 MiB of fp32 on a device. What is as large a host's allocator gives back at once, and
# the system makes it anew, page by page.
CHUNK, CHUNK_ON_HOST = 2**24, 2**22


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    num_items: int | float | Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias), labels)`, of which a tile of logits exists at a time.

    `hidden` is (..., width), `weight` (classes, width), `labels` (...): the caller shifts them. Logits are multiplied
    by `scale`, then capped: `softcap * tanh(logits / softcap)`. `z_loss` times the square of each row's logsumexp is
    added to its loss. `num_items` divides the sum in place of the number of labels that count; a mean over none is NaN,
    with gradients of zero, as torch has it. `chunk` is how many logits exist at a time.

    Loss and gradients are the plain ones: products in the type of `hidden` (of autocast, where that is on), everything
    else and all sums in fp32, and the loss is in fp32. The backward computes the logits a second time, so between
    forward and backward a number for each row is kept. It runs torch's own products on every device: no kernel of
    another library is ever taken.

    >>> hidden, weight = torch.ones(2, 3, 4), torch.eye(8, 4)
    >>> chunked_cross_entropy(hidden, weight, torch.zeros(2, 3, dtype=torch.long))
    tensor(1.6996)
    """
    _check(hidden, weight, labels, bias, reduction)
    if labels.device.type == "cpu" and not is_fake(labels):
        _check_labels(labels, weight.shape[0], ignore_index)
    if softcap is not None and softcap <= 0:
        raise WherryError(f"chunked_cross_entropy: softcap is above 0, or None for no cap, got {softcap}")
    kind = hidden.device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    recipe = Recipe(
        ignore_index, label_smoothing, z_loss, softcap, scale,
        chunk or (CHUNK_ON_HOST if kind == "cpu" and not is_fake(hidden) else CHUNK),
        dtype=hidden.dtype if hidden.dtype == torch.float64 else cast,
    )  # fmt: skip
    with _no_autocast(kind):
        rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        losses = _ChunkedCrossEntropy.apply(rows, weight, bias, flat, recipe)
        if reduction == "none":
            return losses.view(labels.shape)
        if num_items is not None:
            return losses.sum() / num_items
        return losses.sum() / (flat != ignore_index).sum() if reduction == "mean" else losses.sum()


@dataclass(frozen=True)
class Recipe:
    """How losses come from products."""

    ignore_index: int
    smoothing: float
    z_loss: float
    softcap: float | None
    scale: float
    chunk: int
    # Of the products. Sums are in fp32 at least.
    dtype: torch.dtype

    @property
    def sums(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """A loss for each row. Gradients could be made in the forward too, for three products in place of four; but they
    are as large as the weight in fp32, are there from forward to backward, and an evaluation would make them too."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, recipe: Recipe
    ) -> Tensor:
        tiles = Tiles(hidden, weight, bias, labels, recipe)
        rows, sums = hidden.shape[0], recipe.sums
        norms = hidden.new_full((rows,), -math.inf, dtype=sums)  # each row's logsumexp
        # A label that no tile has leaves NaN, on devices too, where nobody has looked.
        picked = hidden.new_full((rows,), math.nan, dtype=sums)
        total = hidden.new_zeros(rows if recipe.smoothing else 0, dtype=sums)
        for row, column in tiles.walk(by_rows=True):
            logits, _ = tiles.logits(row, column)
            here, place = tiles.places(row, column)
            picked[row] = torch.where(here, logits.gather(1, place)[:, 0], picked[row])
            if recipe.smoothing:
                total[row] += logits.sum(1)
            highest = logits.amax(1).clamp_(min=torch.finfo(sums).min)
            sum_here = logits.sub_(highest[:, None]).exp_().sum(1)
            norms[row] = torch.logaddexp(norms[row], sum_here.log_().add_(highest))
        ctx.save_for_backward(hidden, weight, bias, labels, norms)
        ctx.recipe = recipe
        losses = norms - (1 - recipe.smoothing) * picked
        if recipe.smoothing:
            losses -= recipe.smoothing / weight.shape[0] * total
        if recipe.z_loss:
            losses += recipe.z_loss * norms.square()
        return losses.masked_fill_(labels == recipe.ignore_index, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, norms = ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        with _no_autocast(hidden.device.type):
            tiles = Tiles(hidden, weight, bias, labels, recipe)
            grad = torch.where(labels == recipe.ignore_index, 0.0, grad.to(recipe.sums))
            # Of each exponential; z-loss is a part of it.
            pull = grad * (1 + 2 * recipe.z_loss * norms) if recipe.z_loss else grad
            # What the outer loop goes over is summed up a part at a time, what the inner one does is there whole in
            # fp32: the smaller of the two, or what has no gradient.
            by_rows = not wants_weight or (wants_hidden and hidden.shape[0] > weight.shape[0])
            of_hidden = Sum(hidden, recipe.sums, whole=not by_rows) if wants_hidden else None
            of_weight = Sum(weight, recipe.sums, whole=by_rows) if wants_weight else None
            of_bias = weight.new_zeros(weight.shape[0], dtype=recipe.sums) if wants_bias else None
            for row, column in tiles.walk(by_rows=by_rows):
                back = tiles.gradient(row, column, norms[row], grad[row], pull[row])
                if of_bias is not None:
                    of_bias[column] += back.sum(0)
                back = back.to(recipe.dtype)
                if of_hidden is not None:
                    of_hidden.add(row, back, tiles.weight(column))
                if of_weight is not None:
                    of_weight.add(column, back.t(), tiles.hidden(row))
        return (
            of_hidden.result() if of_hidden is not None else None,
            of_weight.result() if of_weight is not None else None,
            of_bias.to(bias.dtype) if of_bias is not None else None,
            None,
            None,
        )


class Tiles:
    """Rows of hidden states times columns of classes, a tile at a time."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, recipe: Recipe) -> None:
        self._hidden, self._weight, self._bias, self._labels, self._recipe = hidden, weight, bias, labels, recipe
        rows, columns = hidden.shape[0], weight.shape[0]
        # As near to a square as there are rows and columns for: what is read is least then.
        height = max(1, min(rows, max(math.isqrt(recipe.chunk), recipe.chunk // columns)))
        self._height, self._width = height, max(1, min(columns, recipe.chunk // height))

    def walk(self, *, by_rows: bool) -> Iterator[tuple[slice, slice]]:
        """All tiles, row by row or column by column."""
        rows = [slice(i, i + self._height) for i in range(0, self._hidden.shape[0], self._height)]
        columns = [slice(i, i + self._width) for i in range(0, self._weight.shape[0], self._width)]
        if by_rows:
            return alike([(row, column) for row in rows for column in columns])
        return alike([(row, column) for column in columns for row in rows])

    def hidden(self, row: slice) -> Tensor:
        return self._hidden[row].to(self._recipe.dtype)

    def weight(self, column: slice) -> Tensor:
        return self._weight[column].to(self._recipe.dtype)

    def logits(self, row: slice, column: slice) -> tuple[Tensor, Tensor | None]:
        """Those of a tile, in memory of their own; and what goes into them where they are capped, by the cap."""
        recipe = self._recipe
        bias = self._bias[column].to(recipe.dtype) if self._bias is not None else None
        logits = torch.nn.functional.linear(self.hidden(row), self.weight(column), bias).to(recipe.sums)
        if recipe.softcap is None:
            return (logits.mul_(recipe.scale) if recipe.scale != 1 else logits), None
        bent = logits.mul_(recipe.scale / recipe.softcap).tanh_()
        return bent * recipe.softcap, bent

    def places(self, row: slice, column: slice) -> tuple[Tensor, Tensor]:
        """Whether each row's label is among these columns, and which of them it is, or any."""
        place = self._labels[row] - column.start
        here = (place >= 0) & (place < min(column.stop, self._weight.shape[0]) - column.start)
        return here & (self._labels[row] != self._recipe.ignore_index), torch.where(here, place, 0)[:, None]

    def gradient(self, row: slice, column: slice, norms: Tensor, grad: Tensor, pull: Tensor) -> Tensor:
        """Of the products of a tile."""
        recipe = self._recipe
        logits, bent = self.logits(row, column)
        back = logits.sub_(norms[:, None]).exp_().mul_(pull[:, None])
        if recipe.smoothing:
            back.sub_(grad[:, None], alpha=recipe.smoothing / self._weight.shape[0])
        here, place = self.places(row, column)
        at_label = back.gather(1, place)[:, 0] - torch.where(here, (1 - recipe.smoothing) * grad, 0.0)
        back.scatter_(1, place, at_label[:, None])
        if bent is not None:
            back.mul_(bent.square_().neg_().add_(1))
        return back.mul_(recipe.scale) if recipe.scale != 1 else back


class Sum:
    """A gradient, summed up in fp32 over tiles: whole, or a part after another, each rounded when it is complete."""

    def __init__(self, like: Tensor, dtype: torch.dtype, *, whole: bool) -> None:
        self._like = like
        self._dtype = dtype
        self._sum = torch.zeros_like(like, dtype=dtype if whole else like.dtype, requires_grad=False)
        self._part: Tensor | None = None
        self._place = slice(0)

    def add(self, place: slice, left: Tensor, right: Tensor) -> None:
        if self._sum.dtype == self._dtype:
            part = self._sum[place]
        else:
            if self._part is None or place != self._place:
                self._round()
                self._place, self._part = place, torch.zeros_like(self._sum[place], dtype=self._dtype)
            part = self._part
        if left.dtype == self._dtype:
            torch.addmm(part, left, right, out=part)
        else:
            part.add_(left @ right)

    def _round(self) -> None:
        if self._part is not None:
            self._sum[self._place] = self._part
            self._part = None

    def result(self) -> Tensor:
        self._round()
        return self._sum.to(self._like.dtype)


def _no_autocast(kind: str) -> AbstractContextManager[Any]:
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, reduction: str) -> None:
    call = "chunked_cross_entropy"
    if weight.dim() != 2 or not hidden.dim() or hidden.shape[-1] != weight.shape[1]:
        raise WherryError(
            f"{call}: hidden (..., width) and weight (classes, width) have the same width, got "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if labels.shape != hidden.shape[:-1] or labels.dtype != torch.int64:
        raise WherryError(
            f"{call}: labels are int64 and of shape {tuple(hidden.shape[:-1])}, as hidden without its last dim, got "
            f"{labels.dtype} and {tuple(labels.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise WherryError(f"{call}: bias has the {weight.shape[0]} classes of weight, got {tuple(bias.shape)}")
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise WherryError(
            f"{call}: hidden is {hidden.dtype} and weight {weight.dtype}; cast one of them, or run under torch.autocast"
        )
    if reduction not in ("mean", "sum", "none"):
        raise WherryError(f'{call}: reduction is "mean", "sum" or "none", got {reduction!r}')


def _check_labels(labels: Tensor, classes: int, ignore_index: int) -> None:
    wrong = ((labels < 0) | (labels >= classes)) & (labels != ignore_index)
    if wrong.any():
        raise WherryError(
            f"chunked_cross_entropy: label {int(labels[wrong][0])} is none of the {classes} classes, nor the "
            f"ignore_index {ignore_index}"
        )
