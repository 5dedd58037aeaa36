"""Segments of every kind from the same numbers, and comparisons of their bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from wherry import native

ISAS = native.available_isas()
on_every_isa = pytest.mark.parametrize("isa", ISAS)
needs_library = pytest.mark.skipif(native.library() is None, reason=f"no native library: {native.why_not()}")
GRADS = (torch.float32, torch.bfloat16, torch.float16)
WEIGHTS = ("fp32", "bf16", "fp16", "split", "master")
STATES = ("fp32", "bf16", "8bit", "mixed")
# A GPU compiles each variant of the kernel, of which there are hundreds: these forms have 40.
FEW: dict[str, Any] = {"states": ("fp32", "bf16"), "every": 5}

RULES: dict[str, Callable[[int], native.Formula]] = {
    "adamw": lambda step: native.Adam(1e-2, weight_decay=0.1, step=step),
    "adam": lambda step: native.Adam(1e-2, 0.3, 0.95, 1e-6, 0.1, decoupled=False, step=step, maximize=True),
    "adagrad": lambda step: native.Adagrad(1e-2, 0.1, 1e-8, 0.1, step),
    "lion": lambda step: native.Lion(1e-3, weight_decay=0.1, step=step),
    "sgd": lambda step: native.SGD(0.1, weight_decay=0.1, maximize=True),
    "nesterov": lambda step: native.SGD(0.1, 0.9, nesterov=True, first=step == 1, step=step),
    "momentum": lambda step: native.SGD(0.1, 0.8, 0.3, weight_decay=0.01, first=step == 1, step=step),
}


def place(values: Tensor, offset: int) -> Tensor:
    """A copy that starts `offset` elements into its memory."""
    room = torch.zeros(values.numel() + offset, dtype=values.dtype)
    room[offset:] = values
    return room[offset:]


def state_for(
    rule: native.Formula, numel: int, kind: str, offsets: Iterator[int]
) -> tuple[Tensor | native.Blocks8, ...]:
    made: list[Tensor | native.Blocks8] = []
    for k, signed in enumerate(rule.state_signed[: rule.state_count]):
        here = ("bf16", "8bit")[k] if kind == "mixed" else kind
        if here == "8bit":
            made.append(native.Blocks8.zeros(numel, signed=signed))
        else:
            dtype = torch.float32 if here == "fp32" else torch.bfloat16
            made.append(place(torch.zeros(numel, dtype=dtype), next(offsets)))
    return tuple(made)


def segment(
    rule: native.Formula,
    weights: Tensor,
    grad: Tensor,
    *,
    mode: str = "fp32",
    state: str = "fp32",
    offsets: Sequence[int] = (0,),
    isa: str | None = None,
) -> native.Segment:
    """Make a segment with state of zeros; its streams begin `offsets` elements into their memory, in turn."""
    numel, at = weights.numel(), itertools.cycle(offsets)
    made = native.Segment(grad=place(grad, next(at)), working=None, state=state_for(rule, numel, state, at), seed=7)
    if mode == "split":
        made.working = place(torch.zeros(numel, dtype=torch.bfloat16), next(at))
        made.low = place(torch.zeros(numel, dtype=torch.int16), next(at))
        native.split(weights, made.working, made.low, isa=isa)
        return made
    held = place(weights, next(at))
    if mode == "fp32":
        made.working = held
    else:
        made.master = held
    if mode in ("bf16", "fp16"):
        made.working = place(weights.to(torch.bfloat16 if mode == "bf16" else torch.float16), next(at))
    return made


def master_of(made: native.Segment) -> Tensor:
    """The weights in fp32."""
    if made.low is None:
        return made.working if made.master is None else made.master  # type: ignore[return-value]
    assert made.working is not None
    whole = torch.empty(made.numel)
    native.join(made.working, made.low, whole)
    return whole


def tensors(made: native.Segment) -> list[Tensor]:
    found = [t for t in (made.working, made.master, made.low) if t is not None]
    for state in made.state:
        found += [state.codes, state.scales] if isinstance(state, native.Blocks8) else [state]
    return found


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns of a tensor, with one pattern for all NaNs: kernels may give any."""
    plain = tensor.detach().clone()
    if plain.is_floating_point():
        plain[plain.isnan()] = torch.nan
    return plain.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[plain.element_size()])


def assert_same_bits(got: list[Tensor], expected: list[Tensor], what: object = "") -> None:
    for k, (a, b) in enumerate(zip(got, expected, strict=True)):
        different = (bits(a) != bits(b)).nonzero().view(-1)
        assert different.numel() == 0, (
            f"{what}: tensor {k} differs at {different[:5].tolist()}: {a[different[:5]]} and {b[different[:5]]}"
        )


def assert_same_segment(got: native.Segment, expected: native.Segment, what: object = "") -> None:
    """Compare bits; of split weights compare the joined master, where a NaN may be any."""
    if got.low is None:
        return assert_same_bits(tensors(got), tensors(expected), what)
    masters = [master_of(got), master_of(expected)]
    for made, master in zip((got, expected), masters, strict=True):
        assert made.working is not None
        assert torch.equal(made.working.isnan(), master.isnan()), f"{what}: working weights and master differ in NaNs"
    assert_same_bits([masters[0]], [masters[1]], what)
    assert_same_bits(tensors(got)[2:], tensors(expected)[2:], what)


# Values that kernels handle wrongly first.
SPECIAL = np.array(
    [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.1754944e-38, 3.4028235e38, -3.4028235e38, np.inf, -np.inf, np.nan, 1.0, 65504.0,
     65520.0, 6e-8, 2.98e-8],
    dtype=np.float32,
)  # fmt: skip


def random_bits(generator: np.random.Generator, numel: int) -> Tensor:
    """Draw fp32 values of random bit patterns, and special ones among them."""
    raw = generator.integers(0, 1 << 32, numel, dtype=np.uint32).view(np.float32)
    chosen = np.where(generator.random(numel) < 0.2, generator.choice(SPECIAL, numel), raw)
    return torch.from_numpy(chosen.astype(np.float32))


def moved(made: native.Segment, device: str) -> native.Segment:
    """Copy a segment to a device."""

    def there(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.to(device, copy=True)

    weights = {name: there(getattr(made, name)) for name in ("grad", "working", "master", "low")}
    state = [
        native.Blocks8(there(s.codes), there(s.scales)) if isinstance(s, native.Blocks8) else there(s)
        for s in made.state
    ]
    return replace(made, **weights, state=tuple(state))


def assert_updates_as_the_host(
    update: Any, device: str = "cpu", states: Sequence[str] = STATES, every: int = 1
) -> None:
    """Compare the bits of `update(segments, formulas, multiplier)` on a device with those of `PackedSegments.run`.

    Each rule and state takes one in `every` of the forms, in turn, so that all forms are taken.
    """
    generator = np.random.default_rng(0)
    forms = [*((mode, 1061) for mode in WEIGHTS), ("bf16", 0), ("split", 1), ("fp16", 2048)]
    grad_dtypes = itertools.cycle(GRADS)

    def numbers(numel: int) -> Tensor:
        """Draw finite numbers, some halfway between two bf16 numbers, and 300 random patterns at the end."""
        sizes = generator.choice([0.0, 1e-45, 1e-39, 1e-20, 1e-3, 1.0, 1e3], numel).astype(np.float32)
        values = torch.from_numpy(sizes) * torch.randn(numel)
        values.view(torch.int32)[::3] &= -0x10000
        values.view(torch.int32)[::3] |= 0x8000
        values[-300:] = random_bits(generator, len(values[-300:]))
        return values

    torch.manual_seed(0)
    for index, (name, state) in enumerate(itertools.product(RULES, states)):
        rule = RULES[name]
        host = []
        taken = forms[index % every :: every]
        for mode, numel in taken:
            host.append(segment(rule(1), numbers(numel), numbers(numel), mode=mode, state=state))
            host[-1].start = (3 << 32) - 512  # element numbers cross a multiple of 2^32
        made = [moved(one, device) for one in host]
        for step in (1, 2):
            for mine, theirs in zip(made, host, strict=True):
                theirs.grad = numbers(theirs.numel).to(next(grad_dtypes))
                mine.grad = theirs.grad.to(device)
            formulas = [rule(step + k) for k in range(len(host))]
            native.PackedSegments(host).run(formulas, 0.7)
            update(made, formulas, 0.7)
        for form, mine, theirs in zip(taken, made, host, strict=True):
            assert_same_segment(moved(mine, "cpu"), theirs, (name, state, form))
