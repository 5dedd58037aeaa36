"""The model shapes that people know by name, and the choice of one for this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from wherry.errors import WherryError
from wherry.plan.grid import Grid
from wherry.plan.machines import Machine

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

    def check_grid(self, grid: Grid) -> None:
        """Raise if the ranks that are to share a model cannot: each takes whole heads, and each stage whole blocks."""
        if self.heads % grid.tensor:
            raise WherryError(
                f"--tensor-parallel {grid.tensor} does not divide the {self.heads} attention heads, and each rank "
                "takes whole heads"
            )
        if self.layers < grid.pipe:
            raise WherryError(
                f"--pipeline-parallel {grid.pipe}: the model has {self.layers} blocks, and each stage takes one or more"
            )


PRESETS: dict[str, Shape] = {
    "gpt2-10m": Shape(layers=6, hidden=384, heads=6, sequence=128),
    "gpt2-124m": Shape(layers=12, hidden=768, heads=12, sequence=1024, vocabulary=GPT2),
    "gpt2-1.5b": Shape(layers=48, hidden=1600, heads=25, sequence=1024, vocabulary=GPT2),
    "gpt2-10b": Shape(layers=50, hidden=4096, heads=32, sequence=1024, vocabulary=GPT2),
}
DEFAULT = "gpt2-10m"


def name_of(shape: Shape) -> str:
    """What a run of this shape is called, fit for a folder's name: gpt2-124m, or gpt2-21.5k-1x32 of no preset."""
    for name, preset in PRESETS.items():
        if asdict(preset) == {key: getattr(shape, key) for key in asdict(preset)}:
            return name
    return f"gpt2-{shape.size.lower()}-{shape.layers}x{shape.hidden}"


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


def choose(machine: Machine, ranks: int, micro_batch: int, *, itemsize: int) -> tuple[Shape, str]:
    """The largest shape that so many ranks of a machine train comfortably, and the reason in words.

    Comfortable: weights, gradients, Adam's state and activations take at most half the free memory, and
    a third of the speed of a bare matrix product gives 500 tokens a second.
    """
    gpus = min(ranks, machine.gpus)
    memory = gpus * machine.gpu_memory if gpus else machine.host_memory
    speed = gpus * machine.matrix if gpus else machine.matrix_fp32

    def comfortable(shape: Shape) -> bool:
        states = shape.parameters * (16 if itemsize == 4 else 18)
        activations = shape.activation_bytes(ranks * micro_batch, checkpointed=False, itemsize=itemsize)
        tokens = speed / 3 / shape.flops_per_token()
        return states + activations <= memory / 2 and tokens >= COMFORTABLE_TOKENS_PER_SECOND

    shape = next((shape for shape in reversed(LADDER) if comfortable(shape)), LADDER[0])
    reason = f"auto: {machine.name}, {memory / 1e9:.0f} GB free, {speed / 1e12:.2g} TFLOP/s: {shape.size} parameters"
    return shape, reason
