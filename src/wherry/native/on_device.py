"""Updates of segments that lie on a device: the bits of the host's kernels, by a Triton kernel or in torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType

import torch

from wherry.fake import is_fake
from wherry.native import fallback
from wherry.native.formulas import SGD, Formula
from wherry.native.segment import Blocks8, Segment
from wherry.observe.log import warn

# Words of weights that are digested at once in torch.
DIGESTED = 1 << 17


def update_on_device(segments: Sequence[Segment], formulas: Sequence[Formula], multiplier: float) -> None:
    """What `PackedSegments(segments).run(formulas, multiplier)` does, to the bit, of segments that lie on one device.

    It is queued on the device's current stream, and the host waits for nothing.
    """
    if not segments:
        return
    weights = segments[0].working if segments[0].master is None else segments[0].master
    assert weights is not None, segments[0].name
    if is_fake(weights):
        return
    device = weights.device
    triton_kernel = _triton(device) if device.type == "cuda" else None
    with torch.no_grad(), torch.accelerator.device_index(device.index):
        for segment, formula in zip(segments, formulas, strict=True):
            segment.check(device)
            segment.check_state(formula)
            if triton_kernel is None or any(isinstance(state, Blocks8) for state in segment.state):
                fallback.update([segment], formula, multiplier, None)
            else:
                triton_kernel.update(segment, formula, multiplier)


def digest(weights: torch.Tensor) -> torch.Tensor:
    """Sum the words of 8 bytes of weights, each mixed with its place: an edit or a swap changes the sum.

    On a device the result stays there.
    """
    words = weights.view(torch.int64)
    triton_kernel = _triton(words.device) if words.device.type == "cuda" and not is_fake(words) else None
    if triton_kernel is not None:
        with torch.accelerator.device_index(words.device.index):
            return triton_kernel.digest(words)
    sums = []
    # Chunks that stay in a processor's cache take a seventh of the time of the whole; devices launch few kernels.
    chunk = DIGESTED if words.is_cpu else DIGESTED << 7
    for start in range(0, words.numel(), chunk):
        part = words[start : start + chunk]
        if words.is_cpu:
            places = torch.arange(2 * start + 1, 2 * (start + part.numel()), 2)
        else:  # what torch fills from the host may wait for the device
            places = torch.full_like(part, 2).cumsum_(0).add_(2 * start - 1)
        mixed = places.mul_((part >> 31).bitwise_xor_(part))
        sums.append((mixed >> 29).bitwise_xor_(mixed).sum())
    return sums[0] if len(sums) == 1 else torch.stack(sums or [words.new_zeros(())]).sum()


@functools.cache
def _triton(device: torch.device) -> ModuleType | None:
    """Import the Triton kernels and try one on an element; return None, with a warning, where it does not work."""
    try:
        from wherry.native import triton_kernel

        one = torch.zeros(1, device=device, dtype=torch.float32)
        with torch.accelerator.device_index(device.index):
            triton_kernel.update(Segment(grad=one, working=one), SGD(lr=0.0), 1.0)
    except Exception as error:  # Triton is missing, or a compiler for its launchers, or it does not know the GPU
        warn(
            "updates on %s run in torch, slower and with the same bits, as Triton does not work here (%s: %s); install "
            "the triton that goes with this torch, and a C compiler",
            device, type(error).__name__, error,
        )  # fmt: skip
        return None
    return triton_kernel
