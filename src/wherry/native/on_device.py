"""Updates of segments that lie on a device: the bits of the host's kernels, by a Triton kernel or in torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from wherry.fake import is_fake
from wherry.native import fallback
from wherry.native.formulas import SGD, Formula
from wherry.native.segment import Blocks8, Segment
from wherry.observe.log import warn


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
    kernel = _triton(device) if device.type == "cuda" else None
    with torch.no_grad(), torch.accelerator.device_index(device.index):
        for segment, formula in zip(segments, formulas, strict=True):
            segment.check(device)
            segment.check_state(formula)
            if kernel is None or any(isinstance(state, Blocks8) for state in segment.state):
                fallback.update([segment], formula, multiplier, None)
            else:
                kernel(segment, formula, multiplier)


@functools.cache
def _triton(device: torch.device) -> Callable[[Segment, Formula, float], None] | None:
    """The Triton kernel, tried on one element; None, and a word about it, where it does not work."""
    try:
        from wherry.native.triton_kernel import update

        one = torch.zeros(1, device=device, dtype=torch.float32)
        with torch.accelerator.device_index(device.index):
            update(Segment(grad=one, working=one), SGD(lr=0.0), 1.0)
    except Exception as error:  # Triton is missing, or a compiler for its launchers, or it does not know the GPU
        warn(
            "updates on %s run in torch, slower and with the same bits, as Triton does not work here (%s: %s); install "
            "the triton that goes with this torch, and a C compiler",
            device, type(error).__name__, error,
        )  # fmt: skip
        return None
    return update
