"""The loss of a large vocabulary in tiles: plain torch's loss and gradients, in a small part of its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from wherry.errors import WherryError
from wherry.nn.cross_entropy import chunked_cross_entropy

ROWS, WIDTH, CLASSES = (3, 7), 6, 50
# Many tiles, of which rows and columns do not divide; and one.
CHUNKS = (12, 60, 10_000)


def inputs(dtype: torch.dtype = torch.float32, *, rows: Any = ROWS, bias: bool = True) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*rows, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(CLASSES, WIDTH, generator=generator).to(dtype).requires_grad_()
    shift = torch.randn(CLASSES, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, CLASSES, rows, generator=generator)
    labels[0, :4] = -100
    return hidden, weight, labels, shift


def plain(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    num_items: Any = None,
    reduction: str = "mean",
    **options: Any,
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    logits = (logits if logits.dtype == torch.float64 else logits.float()) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits, labels = logits.flatten(0, -2), labels.flatten()
    losses = F.cross_entropy(logits, labels, reduction="none", **options)
    counts = labels != options.get("ignore_index", -100)
    losses = losses + z_loss * logits.logsumexp(-1).square() * counts
    if reduction == "none":
        return losses.view(hidden.shape[:-1])
    return losses.sum() / (num_items or (counts.sum() if reduction == "mean" else 1))


def run(loss: Callable[..., Tensor], given: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
    hidden, weight, labels, bias = (t.detach().clone().requires_grad_(t.requires_grad) for t in given)
    value = loss(hidden, weight, labels, bias=bias, **options)
    (value * torch.arange(1, value.numel() + 1).view(value.shape)).sum().backward()
    return [value.detach(), *(t.grad for t in (hidden, weight, bias) if t.grad is not None)]


def close(one: list[Tensor], other: list[Tensor], tolerance: float) -> None:
    assert len(one) == len(other) >= 2
    for mine, its in zip(one, other, strict=True):
        assert mine.dtype == its.dtype
        assert (mine.double() - its.double()).norm() <= tolerance * its.double().norm()


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "items of a tensor": {"num_items": torch.tensor(40)},
    "other index": {"ignore_index": 3},
    "smoothed": {"label_smoothing": 0.1, "reduction": "none"},
    "z-loss": {"z_loss": 1e-2},
    "capped": {"softcap": 2.0, "scale": 0.5},
    "all": {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 3.0, "scale": 2.0, "num_items": 7},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_loss_and_gradients_are_the_plain_ones(options: dict[str, Any]) -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        given = inputs(dtype)
        if options.get("ignore_index") == 3:
            given[2].clamp_(min=0)
        for chunk in CHUNKS:
            close(run(chunked_cross_entropy, given, chunk=chunk, **options), run(plain, given, **options), tolerance)


def test_16_bits_to_their_rounding_and_sums_in_fp32() -> None:
    for dtype, rows in ((torch.bfloat16, ROWS), (torch.bfloat16, (30, 7)), (torch.float16, ROWS)):
        given = inputs(dtype, rows=rows)
        exact = plain(*(t.double() if t.is_floating_point() else t for t in given[:3]), bias=given[3].double())
        for chunk in CHUNKS[1:]:
            mine, its = (
                run(loss, given, **more) for loss, more in ((chunked_cross_entropy, {"chunk": chunk}), (plain, {}))
            )
            close(mine, its, 2 * torch.finfo(dtype).eps)
            assert mine[0].dtype == torch.float32 and float(mine[0]) == pytest.approx(float(exact.detach()), rel=1e-2)


def test_under_autocast_and_with_another_type_of_its_own() -> None:
    given = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        mine, its = run(chunked_cross_entropy, given, chunk=60), run(plain, given)
    close(mine, its, 2 * torch.finfo(torch.bfloat16).eps)
    with pytest.raises(WherryError, match=r"hidden is torch.float32 and weight torch.float64"):
        chunked_cross_entropy(given[0], given[1].double(), given[2])


def test_nothing_is_computed_that_nobody_asked_for() -> None:
    product = 2 * ROWS[0] * ROWS[1] * WIDTH * CLASSES
    for trained, products in (((True, True), 4), ((True, False), 3), ((False, True), 3)):
        hidden, weight, labels, _ = inputs()
        hidden.requires_grad_(trained[0])
        weight.requires_grad_(trained[1])
        with FlopCounterMode(display=False) as counter:
            chunked_cross_entropy(hidden, weight, labels, chunk=60).backward()
        assert counter.get_total_flops() == products * product
        assert (hidden.grad is not None, weight.grad is not None) == trained
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            assert not chunked_cross_entropy(hidden, weight, labels, chunk=60).requires_grad
        assert counter.get_total_flops() == product


def test_labels_that_are_all_ignored_or_none() -> None:
    given = inputs()
    given[2].fill_(-100)
    mine, its = run(chunked_cross_entropy, given), run(plain, given)
    assert mine[0].isnan() and its[0].isnan()
    assert all(gradient.count_nonzero() == 0 for gradient in mine[1:])
    assert run(chunked_cross_entropy, given, num_items=3)[0] == 0
    given[2][0, 0] = CLASSES
    with pytest.raises(WherryError, match="label 50 is none of the 50 classes"):
        chunked_cross_entropy(*given[:3])
    with pytest.raises(WherryError, match=r"of shape \(3, 7\).*got torch.int64 and \(21,\)"):
        chunked_cross_entropy(given[0], given[1], given[2].flatten())


def test_a_weight_that_is_tied_and_a_graph_that_is_used_twice() -> None:
    found = []
    for loss in (plain, chunked_cross_entropy):
        _, weight, labels, _ = inputs()
        hidden = F.embedding(labels.clamp(min=0), weight)
        value = loss(hidden, weight, labels)
        value.backward(retain_graph=True)
        value.backward()
        assert weight.grad is not None
        found.append([value.detach(), weight.grad])
    close(*found, 1e-6)


def test_rows_with_classes_that_are_masked_out() -> None:
    given = inputs()
    with torch.no_grad():
        given[3][5:20] = -torch.inf
    given[2].clamp_(max=4)
    close(run(chunked_cross_entropy, given, chunk=20), run(plain, given), 1e-6)


def peak(step: Callable[[], Any]) -> int:
    """The highest sum of what the allocator has given out above what there was."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    live = highest = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return highest


def test_the_peak_is_a_twentieth_of_plains() -> None:
    rows, classes, width, chunk = 1024, 4096, 16, 1 << 14
    given = torch.zeros(rows, width, requires_grad=True), torch.zeros(classes, width, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.long)
    gradients = sum(t.nbytes for t in given)
    whole = peak(lambda: plain(*given, labels).backward()) - gradients
    mine = peak(lambda: chunked_cross_entropy(*given, labels, chunk=chunk).backward())
    assert whole > 4 * 4 * rows * classes
    assert 4 * chunk < mine < 0.05 * whole, (mine, whole)
