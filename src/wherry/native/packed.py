"""Segments whose addresses are packed once, updated many times."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterable, Sequence

from torch import Tensor

from wherry.fake import is_fake
from wherry.native import fallback
from wherry.native.formulas import Formula
from wherry.native.loading import engine
from wherry.native.pool import JobTicket, Pool, default_pool
from wherry.native.segment import GRADS, KINDS, Segment, pack
from wherry.tickets import DONE, Ticket

# Elements up to which waking the pool's threads costs more than it saves: for a caller who waits, who does not.
INLINE_RUN = 1 << 15
INLINE_SUBMIT = 1 << 13


class PackedSegments:
    """Segments to update together. Their addresses are packed once; the tensors are kept alive.

    >>> weight, grad = torch.ones(3), torch.ones(3)
    >>> packed = PackedSegments([Segment(grad=grad, working=weight)])
    >>> packed.run(SGD(lr=0.5))
    >>> weight
    tensor([0.5000, 0.5000, 0.5000])
    """

    def __init__(self, segments: Sequence[Segment], *, isa: str | None = None) -> None:
        self.segments = tuple(segments)
        for segment in self.segments:
            segment.check()
        self._numels = array("q", [segment.numel for segment in self.segments])
        self.numel = sum(self._numels)
        self._needs_grads = any(segment.grad is None for segment in self.segments)
        self._fitting: set[object] = set()
        self._engine = engine(isa)
        self._native = self._engine.library
        # In a dry run there is nothing to compute with.
        self._fake = any(is_fake(segment.working if segment.master is None else segment.master) for segment in segments)
        if self._native is not None and not self._fake:
            packed = b"".join(map(pack, self.segments))
            self._handle = self._native.wherry_plan_create(self._engine.code, packed, len(self.segments))
            weakref.finalize(self, self._native.wherry_plan_free, self._handle).atexit = False

    def submit(
        self,
        formulas: Formula | Sequence[Formula],
        multiplier: float = 1.0,
        pool: Pool | None = None,
        grads: Sequence[Tensor] | None = None,
        *,
        inline: int = INLINE_SUBMIT,
    ) -> Ticket:
        """Start updating every segment by its formula (one for all, or one each); every gradient is first multiplied.

        `grads`, instead of the segments' own, may have any shape. Submissions are not ordered among each other:
        wait for one before submitting another on the same tensors. The torch fallback has finished when this returns,
        and so has a plan of up to `inline` elements.
        """
        packed, count = self._pack_formulas(formulas)
        if self._fake:
            return DONE
        pointers, kinds = self._grads(grads)
        native = self._native
        if native is None:
            fallback.update(self.segments, formulas, multiplier, grads)
            return DONE
        if self.numel <= inline:
            native.wherry_plan_run(self._handle, packed, count, multiplier, pointers, kinds)
            return DONE
        pool = pool or default_pool()
        job = native.wherry_plan_submit(self._handle, pool.handle(native), packed, count, multiplier, pointers, kinds)
        return JobTicket(native, job, (self, grads))

    def run(
        self,
        formulas: Formula | Sequence[Formula],
        multiplier: float = 1.0,
        pool: Pool | None = None,
        grads: Sequence[Tensor] | None = None,
    ) -> None:
        """The same, to its end."""
        self.submit(formulas, multiplier, pool, grads, inline=INLINE_RUN).wait()

    def _pack_formulas(self, formulas: Formula | Sequence[Formula]) -> tuple[bytes, int]:
        if isinstance(formulas, Formula):
            self._check([formulas], [formulas] * len(self.segments))
            return formulas.pack(), 1
        assert len(formulas) == len(self.segments), "one formula for all segments, or one each"
        # Segments of one group share a formula: each is packed once.
        ids = [id(formula) for formula in formulas]
        distinct = dict(zip(ids, formulas, strict=True))
        self._check(distinct.values(), formulas)
        packed = {key: formula.pack() for key, formula in distinct.items()}
        return b"".join([packed[key] for key in ids]), len(formulas)

    def _check(self, distinct: Iterable[Formula], formulas: Sequence[Formula]) -> None:
        """That each segment has the state that its formula keeps; formulas of a kind that was seen are known to fit."""
        kinds = {(type(formula), formula.state_count) for formula in distinct}
        if len(kinds) == 1 and kinds <= self._fitting:
            return
        for segment, formula in zip(self.segments, formulas, strict=True):
            segment.check_state(formula)
        if len(kinds) == 1:
            self._fitting |= kinds

    def _grads(self, grads: Sequence[Tensor] | None) -> tuple[bytes | None, bytes | None]:
        if grads is None:
            assert not self._needs_grads, "segments without gradients are given them at each update"
            return None, None
        assert all(grad.is_cpu and grad.dtype in GRADS and grad.is_contiguous() for grad in grads)
        assert array("q", map(Tensor.numel, grads)) == self._numels, "gradients of other sizes than the weights"
        addresses = array("Q", map(Tensor.data_ptr, grads))
        return addresses.tobytes(), array("i", [KINDS[grad.dtype] for grad in grads]).tobytes()
