"""Plans: segments whose addresses are packed once, updated many times."""

from __future__ import annotations

import struct
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wherry.errors import WherryError
from wherry.fake import is_fake
from wherry.native import fallback
from wherry.native.blocks import Blocks8
from wherry.native.loading import engine
from wherry.native.pool import Flight, Pool, default_pool
from wherry.native.rules import Rule
from wherry.tiers.tickets import DONE, Ticket

# Elements up to which waking the pool's threads costs more than it saves: for a caller who waits, who does not.
INLINE_RUN = 1 << 15
INLINE_SUBMIT = 1 << 13

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.uint8: 4}
_GRADS = (torch.float32, torch.bfloat16, torch.float16)
_WORDS = (torch.int16, torch.uint16)
# As kernels.h: numel, start, grad, weight, working, low, state x2, scale x2, four kinds, seed
_LAYOUT = struct.Struct("=qq8QiiiiIi")
_F32, _BF16, _F16, _SPLIT = range(4)


@dataclass(slots=True)
class Segment:
    """Contiguous elements with one set of hyper-parameters: all tensors 1-D, contiguous, on the CPU, of equal numel.

    The weights are one of: `working` in fp32, in place; `working` in bf16 or fp16 and `master` in fp32; `working` in
    bf16 and `low`, the 16 low bits of the master (split master); `master` alone, the working weights being elsewhere.
    `grad` may be left out where every submit brings gradients. A `state` tensor is fp32, bf16 (rounded
    stochastically) or `Blocks8`. `seed` and `start`, the number of the first element, choose the random draws, so
    that they do not depend on how a flat is cut.
    """

    grad: Tensor | None
    working: Tensor | None
    master: Tensor | None = None
    low: Tensor | None = None
    state: tuple[Tensor | Blocks8, ...] = ()
    seed: int = 0
    start: int = 0
    name: str = ""

    @property
    def numel(self) -> int:
        weights = self.master if self.working is None else self.working
        return 0 if weights is None else weights.numel()

    @property
    def weight_mode(self) -> int:
        if self.low is not None:
            return _SPLIT
        if self.working is None or self.master is None:
            return _F32
        return _BF16 if self.working.dtype is torch.bfloat16 else _F16


def _check_tensor(where: str, tensor: Tensor, numel: int, dtypes: Sequence[torch.dtype]) -> None:
    if tensor.device.type != "cpu" or tensor.dim() != 1 or not tensor.is_contiguous():
        layout = "contiguous" if tensor.is_contiguous() else f"of strides {tuple(tensor.stride())}"
        raise WherryError(
            f"{where}: expected a 1-D contiguous CPU tensor, got shape {tuple(tensor.shape)}, {layout}, on "
            f"{tensor.device}; pass `tensor.view(-1)` of contiguous memory"
        )
    if tensor.dtype not in dtypes:
        raise WherryError(f"{where}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.numel() != numel:
        raise WherryError(f"{where}: expected {numel} elements like the weights, got {tensor.numel()}")


def _check_segment(where: str, s: Segment) -> None:
    fp32 = (torch.float32,)
    if s.working is None and s.master is None:
        raise WherryError(f"{where}: it has no weights; give `working`, `master`, or both")
    if s.low is not None and (s.master is not None or s.working is None):
        raise WherryError(f"{where}: `low` makes `working` a split master; leave `master` out and give `working`")
    if s.working is not None:
        lone = s.master is None and s.low is None
        dtypes = fp32 if lone else (torch.bfloat16,) if s.low is not None else (torch.bfloat16, torch.float16)
        if lone and s.working.dtype in (torch.bfloat16, torch.float16):
            raise WherryError(
                f"{where}: working weights in {s.working.dtype} need an fp32 `master`"
                + (", or `low` for a split master" if s.working.dtype is torch.bfloat16 else "")
            )
        _check_tensor(f"{where}.working", s.working, s.numel, dtypes)
    if s.master is not None:
        _check_tensor(f"{where}.master", s.master, s.numel, fp32)
    if s.low is not None:
        _check_tensor(f"{where}.low", s.low, s.numel, _WORDS)
    if s.grad is not None:
        _check_tensor(f"{where}.grad", s.grad, s.numel, _GRADS)
    if len(s.state) > 2:
        raise WherryError(f"{where}: it has {len(s.state)} state tensors, no rule keeps more than 2")
    for k, state in enumerate(s.state):
        if isinstance(state, Blocks8):
            _check_tensor(f"{where}.state[{k}].codes", state.codes, s.numel, (torch.int8, torch.uint8))
            _check_tensor(f"{where}.state[{k}].scales", state.scales, state.scales.numel(), fp32)
        else:
            _check_tensor(f"{where}.state[{k}]", state, s.numel, (torch.float32, torch.bfloat16))


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _pack(s: Segment) -> bytes:
    values, scales, kinds = [0, 0], [0, 0], [0, 0]
    for k, state in enumerate(s.state):
        codes = state.codes if isinstance(state, Blocks8) else state
        values[k], kinds[k] = codes.data_ptr(), KINDS[codes.dtype]
        scales[k] = state.scales.data_ptr() if isinstance(state, Blocks8) else 0
    mode = s.weight_mode
    weight = s.working if mode == _F32 and s.master is None else s.master
    working = None if mode == _F32 else s.working
    grad_kind = 0 if s.grad is None else KINDS[s.grad.dtype]
    return _LAYOUT.pack(
        s.numel, s.start, _address(s.grad), _address(weight), _address(working), _address(s.low), *values, *scales,
        grad_kind, mode, *kinds, s.seed & 0xFFFFFFFF, 0,
    )  # fmt: skip


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
            _check_segment(self._where(i, segment), segment)
        self._numels = array("q", [segment.numel for segment in self.segments])
        self.numel = sum(self._numels)
        self._needs_grads = any(segment.grad is None for segment in self.segments)
        self._fitting: set[object] = set()
        self._engine = engine(isa)
        self._native = self._engine.library
        # In a dry run there is nothing to compute with.
        self._fake = any(is_fake(segment.working if segment.master is None else segment.master) for segment in segments)
        if self._native is not None and not self._fake:
            packed = b"".join(map(_pack, self.segments))
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
        flight = Flight(native, job, (self, grads))
        pool.keep(flight)
        return flight

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
        fit = all(grad.is_cpu and grad.dtype in _GRADS and grad.is_contiguous() for grad in grads)
        if not fit or array("q", map(Tensor.numel, grads)) != self._numels:
            for i, (grad, segment) in enumerate(zip(grads, self.segments, strict=True)):
                flat = grad.view(-1) if grad.is_contiguous() else grad
                _check_tensor(f"{self._where(i, segment)}: grads[{i}]", flat, segment.numel, _GRADS)
        addresses = array("Q", map(_address, grads))
        return addresses.tobytes(), array("i", [KINDS[grad.dtype] for grad in grads]).tobytes()
