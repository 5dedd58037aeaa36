"""Segments: what one set of hyper-parameters updates, with state in 8 bits or more, as the kernels take it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from wherry.native.formulas import Formula

# Values with one scale, in 8 bits.
BLOCK = 256
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.uint8: 4}
GRADS = (torch.float32, torch.bfloat16, torch.float16)
_WORDS = (torch.int16, torch.uint16)
CODES = (torch.int8, torch.uint8)
STATES = (torch.float32, torch.bfloat16)
# As kernels.h: numel, start, grad, weight, working, low, state x2, scale x2, four kinds, seed
LAYOUT = struct.Struct("=qq8QiiiiIi")
_F32, _BF16, _F16, _SPLIT = range(4)
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Blocks8:
    """One state tensor as 8-bit codes. Codes are int8 for values with a sign (momentum), uint8 for those without.

    >>> Blocks8.zeros(1000, signed=True).nbytes
    1016
    """

    codes: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        assert self.codes.dtype in CODES, self.codes.dtype
        assert self.scales.dtype is torch.float32 and self.scales.numel() == blocks_of(self.codes.numel())

    @classmethod
    def zeros(cls, numel: int, *, signed: bool) -> Blocks8:
        codes = torch.zeros(numel, dtype=torch.int8 if signed else torch.uint8)
        return cls(codes, torch.zeros(blocks_of(numel)))

    @property
    def signed(self) -> bool:
        return self.codes.dtype is torch.int8

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def numel(self) -> int:
        return self.codes.numel()

    def cut(self, start: int, stop: int) -> Blocks8:
        """A part, from a block's start on."""
        return Blocks8(self.codes[start:stop], self.scales[start // BLOCK : blocks_of(stop)])


def blocks_of(numel: int) -> int:
    return -(-numel // BLOCK)


@dataclass(slots=True)
class Segment:
    """Contiguous elements with one set of hyper-parameters: all tensors 1-D, contiguous, of equal numel, on the CPU
    (for `update_on_device`, on one device).

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

    def cut(self, start: int, stop: int) -> Self:
        """A part of it, from a block's start on."""
        whole = (self.grad, self.working, self.master, self.low)
        grad, working, master, low = [None if tensor is None else tensor[start:stop] for tensor in whole]
        state = tuple(s.cut(start, stop) if isinstance(s, Blocks8) else s[start:stop] for s in self.state)
        return replace(self, grad=grad, working=working, master=master, low=low, state=state, start=self.start + start)

    @property
    def weight_mode(self) -> int:
        if self.low is not None:
            return _SPLIT
        if self.working is None or self.master is None:
            return _F32
        return _BF16 if self.working.dtype is torch.bfloat16 else _F16

    def check(self, device: torch.device = _HOST) -> None:
        """What the kernels take for granted, which are given addresses."""
        weights = (torch.float32,) if self.master is None else (torch.bfloat16, torch.float16)
        kinds = {
            "working": weights if self.low is None else (torch.bfloat16,),
            "master": (torch.float32,),
            "low": _WORDS,
            "grad": GRADS,
        }
        assert self.working is not None or self.master is not None, f"{self.name}: no weights"
        assert self.low is None or (self.master is None and self.working is not None), f"{self.name}: two masters"
        for name, dtypes in kinds.items():
            tensor = getattr(self, name)
            assert tensor is None or fits(tensor, self.numel, dtypes, device), f"{self.name}: {name}"
        for state in self.state:
            values = state.codes if isinstance(state, Blocks8) else state
            assert fits(values, self.numel, STATES if values is state else CODES, device), f"{self.name}: state"

    def check_state(self, formula: Formula) -> None:
        """That it has the state that the formula keeps."""
        assert len(self.state) == formula.state_count, self.name
        for state, signed in zip(self.state, formula.state_signed, strict=False):
            assert not isinstance(state, Blocks8) or state.signed is signed, self.name


def fits(tensor: Tensor, numel: int, dtypes: Sequence[torch.dtype], device: torch.device) -> bool:
    return (
        tensor.device == device
        and tensor.dim() == 1
        and tensor.is_contiguous()
        and tensor.dtype in dtypes
        and tensor.numel() == numel
    )


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def pack(s: Segment) -> bytes:
    values, scales, kinds = [0, 0], [0, 0], [0, 0]
    for k, state in enumerate(s.state):
        codes = state.codes if isinstance(state, Blocks8) else state
        values[k], kinds[k] = codes.data_ptr(), KINDS[codes.dtype]
        scales[k] = state.scales.data_ptr() if isinstance(state, Blocks8) else 0
    mode = s.weight_mode
    weight = s.working if mode == _F32 and s.master is None else s.master
    working = None if mode == _F32 else s.working
    grad_kind = 0 if s.grad is None else KINDS[s.grad.dtype]
    return LAYOUT.pack(
        s.numel, s.start, address(s.grad), address(weight), address(working), address(s.low), *values, *scales,
        grad_kind, mode, *kinds, s.seed & 0xFFFFFFFF, 0,
    )  # fmt: skip
