"""The model shapes that people know by name, and the choice of one for this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GPT2 = 50257
"""GPT-2's own vocabulary. The larger presets keep it, so that their names tell their true size."""


@dataclass(frozen=True)
class Shape:
    """A GPT-2 by its numbers."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int = 256

    @property
    def parameters(self) -> int:
        """How many parameters this shape has; the tied head counts once."""
        block = 12 * self.hidden**2 + 13 * self.hidden
        return self.layers * block + (self.vocabulary + self.sequence + 2) * self.hidden

    @property
    def size(self) -> str:
        """The number of parameters, as people say it: 21.5K, 10.8M, 1.56B."""
        count = self.parameters
        if count >= 1e9:
            return f"{count / 1e9:.2f}B"
        return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count / 1e3:.1f}K"

    def flops_per_token(self) -> int:
        """Forward and backward: six per parameter that multiplies, and attention over half the sequence."""
        multiplied = self.layers * 12 * self.hidden**2 + self.vocabulary * self.hidden
        return 6 * multiplied + 6 * self.layers * self.hidden * self.sequence

    def activation_bytes(self, micro_batch: int, *, checkpointed: bool, itemsize: int) -> int:
        """About what one forward keeps for its backward, with the logits and their gradient in fp32."""
        tokens = micro_batch * self.sequence
        # Twelve times the stream, and what is small change in large models.
        block = 13 * tokens * self.hidden * itemsize
        kept = self.layers * tokens * self.hidden * itemsize + block if checkpointed else self.layers * block
        return kept + 3 * 4 * tokens * self.vocabulary


PRESETS: dict[str, Shape] = {
    "gpt2-10m": Shape(layers=6, hidden=384, heads=6, sequence=128),
    "gpt2-124m": Shape(layers=12, hidden=768, heads=12, sequence=1024, vocabulary=GPT2),
    "gpt2-1.5b": Shape(layers=48, hidden=1600, heads=25, sequence=1024, vocabulary=GPT2),
    "gpt2-10b": Shape(layers=50, hidden=4096, heads=32, sequence=1024, vocabulary=GPT2),
}

# What `auto` chooses from, smallest first: the presets, and others of GPT-2's own sizes.
LADDER = sorted(
    [
        *PRESETS.values(),
        Shape(layers=8, hidden=512, heads=8, sequence=256),
        Shape(layers=24, hidden=1024, heads=16, sequence=1024, vocabulary=GPT2),
        Shape(layers=36, hidden=1280, heads=20, sequence=1024, vocabulary=GPT2),
    ],
    key=lambda shape: shape.parameters,
)
COMFORTABLE_TOKENS_PER_SECOND = 500.0


@dataclass(frozen=True)
class Machine:
    """What a choice of model depends on: bytes to spare, and the speed of a matrix product."""

    memory: int
    flops: float
    where: str


def measure_machine(ranks: int = 1) -> Machine:
    """This machine: its accelerators if it has any, else its cores. Takes about a quarter of a second."""
    import torch

    from wherry.observe.memory import host_memory

    if torch.cuda.is_available():
        # This process's own stands for the others: one that is asked has half a GB less for the rank that has it.
        device, count = torch.device("cuda", torch.cuda.current_device()), min(ranks, torch.cuda.device_count())
        memory = count * torch.cuda.mem_get_info(device)[0]
        speed = count * _product_flops(device, size=4096, dtype=torch.bfloat16)
        return Machine(memory, speed, f"{count} x {torch.cuda.get_device_name(device)}")
    speed = _product_flops(torch.device("cpu"), size=768, dtype=torch.float32)
    return Machine(host_memory().available, speed, f"{torch.get_num_threads()} CPU cores")


def _product_flops(device: torch.device, size: int, dtype: torch.dtype) -> float:
    import torch

    a = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def choose(machine: Machine, micro_batch: int, *, itemsize: int) -> tuple[Shape, str]:
    """The largest shape that `machine` trains comfortably, and the reason in words.

    Comfortable: weights, gradients, Adam's state and activations take at most half the free memory, and
    a third of the speed of a bare matrix product gives 500 tokens a second.
    """

    def comfortable(shape: Shape) -> bool:
        states = shape.parameters * (16 if itemsize == 4 else 18)
        activations = shape.activation_bytes(micro_batch, checkpointed=False, itemsize=itemsize)
        tokens = machine.flops / 3 / shape.flops_per_token()
        return states + activations <= machine.memory / 2 and tokens >= COMFORTABLE_TOKENS_PER_SECOND

    shape = next((shape for shape in reversed(LADDER) if comfortable(shape)), LADDER[0])
    reason = (
        f"auto: {machine.where}, {machine.memory / 1e9:.0f} GB free, {machine.flops / 1e12:.2g} TFLOP/s: "
        f"{shape.size} parameters"
    )
    return shape, reason
