"""Plans: segments whose addresses are packed once, updated many times."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence

from torch import Tensor

from wherry.errors import WherryError
from wherry.fake import is_fake
from wherry.native import fallback
from wherry.native.loading import engine
from wherry.native.pool import Pool, default_pool
from wherry.native.rules import Rule
from wherry.native.segment import GRADS, KINDS, Blocks8, Segment, check_segment, check_tensor, pack
from wherry.tiers.tickets import DONE, Ticket

# Elements up to which waking the pool's threads costs more than it saves: for a caller who waits, who does not.
INLINE_RUN = 1 << 15
INLINE_SUBMIT = 1 << 13


class Plan:
    """Segments to update together. Their addresses are packed once; the tensors are kept alive.

    >>> weight, grad = torch.ones(3), torch.ones(3)
    >>> plan = Plan([Segment(grad=grad, working=weight)])
    >>> plan.run(SGD(lr=0.5))
    >>> weight
    tensor([0.5000, 0.5000, 0.5000])
    """

    def __init__(self, segments: Sequence[Segment], *, isa: str | None = None) -> None:
        self.segments = tuple(segments)
        for i, segment in enumerate(self.segments):
            check_segment(self._where(i, segment), segment)
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

    @staticmethod
    def _where(i: int, segment: Segment) -> str:
        return f"segment {i} ({segment.name})" if segment.name else f"segment {i}"

    def submit(
        self,
        rules: Rule | Sequence[Rule],
        multiplier: float = 1.0,
        pool: Pool | None = None,
        grads: Sequence[Tensor] | None = None,
    ) -> Ticket:
        """Start updating every segment by its rule (one for all, or one each); every gradient is first multiplied.

        `grads`, instead of the segments' own, may have any shape. Submissions are not ordered among each other:
        wait for one before submitting another on the same tensors. The torch fallback has finished when this returns.
        """
        packed, count = self._pack_rules(rules)
        if self._fake:
            return DONE
        pointers, kinds = self._grads(grads)
        native = self._native
        if native is None:
            fallback.update(self.segments, rules, multiplier, grads)
            return DONE
        if self.numel <= INLINE_SUBMIT:
            native.wherry_plan_run(self._handle, packed, count, multiplier, pointers, kinds)
            return DONE
        pool = pool or default_pool()
        job = native.wherry_plan_submit(self._handle, pool.handle(native), packed, count, multiplier, pointers, kinds)
        return pool.ticket(native, job, (self, grads))

    def run(
        self,
        rules: Rule | Sequence[Rule],
        multiplier: float = 1.0,
        pool: Pool | None = None,
        grads: Sequence[Tensor] | None = None,
    ) -> None:
        """The same, to its end; a small plan runs in the calling thread."""
        if self._native is None or self.numel > INLINE_RUN or self._fake:
            return self.submit(rules, multiplier, pool, grads).wait()
        packed, count = self._pack_rules(rules)
        pointers, kinds = self._grads(grads)
        self._native.wherry_plan_run(self._handle, packed, count, multiplier, pointers, kinds)

    def _pack_rules(self, rules: Rule | Sequence[Rule]) -> tuple[bytes, int]:
        if isinstance(rules, Rule):
            if (type(rules), rules.state_count) not in self._fitting:
                for i in range(len(self.segments)):
                    self._check_rule(i, rules)
                self._fitting.add((type(rules), rules.state_count))
            return rules.pack(), 1
        if len(rules) != len(self.segments):
            raise WherryError(f"Plan: {len(rules)} rules for {len(self.segments)} segments; give one, or one each")
        # Segments of one group share a rule: each is packed once.
        ids = [id(rule) for rule in rules]
        distinct = dict(zip(ids, rules, strict=True))
        kinds = {(type(rule), rule.state_count) for rule in distinct.values()}
        if len(kinds) > 1 or not kinds <= self._fitting:
            for i, rule in enumerate(rules):
                self._check_rule(i, rule)
            if len(kinds) == 1:
                self._fitting |= kinds
        packed = {key: rule.pack() for key, rule in distinct.items()}
        return b"".join([packed[key] for key in ids]), len(rules)

    def _check_rule(self, i: int, rule: Rule) -> None:
        segment = self.segments[i]
        name = type(rule).__name__
        if len(segment.state) != rule.state_count:
            raise WherryError(
                f"{self._where(i, segment)}: {name} keeps {rule.state_count} state tensors, the segment has "
                f"{len(segment.state)}"
            )
        for k, (state, signed) in enumerate(zip(segment.state, rule.state_signed, strict=False)):
            if isinstance(state, Blocks8) and state.signed is not signed:
                raise WherryError(
                    f"{self._where(i, segment)}.state[{k}]: {name} needs codes {'with' if signed else 'without'} a "
                    f"sign there; make it by Blocks8.zeros(numel, signed={signed})"
                )

    def _grads(self, grads: Sequence[Tensor] | None) -> tuple[bytes | None, bytes | None]:
        if grads is None:
            if self._needs_grads:
                missing = next(i for i, s in enumerate(self.segments) if s.grad is None)
                where = self._where(missing, self.segments[missing])
                raise WherryError(f"{where}: it was made without a gradient; pass `grads` to submit or run")
            return None, None
        if len(grads) != len(self.segments):
            raise WherryError(f"Plan: {len(grads)} gradients for {len(self.segments)} segments")
        fit = all(grad.is_cpu and grad.dtype in GRADS and grad.is_contiguous() for grad in grads)
        if not fit or array("q", map(Tensor.numel, grads)) != self._numels:
            for i, (grad, segment) in enumerate(zip(grads, self.segments, strict=True)):
                flat = grad.view(-1) if grad.is_contiguous() else grad
                check_tensor(f"{self._where(i, segment)}: grads[{i}]", flat, segment.numel, GRADS)
        addresses = array("Q", map(Tensor.data_ptr, grads))
        return addresses.tobytes(), array("i", [KINDS[grad.dtype] for grad in grads]).tobytes()
