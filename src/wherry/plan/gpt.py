"""Memory and bandwidth of GPT-like models by their shape: the formulas published with ZeRO-Infinity."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction

from wherry.errors import WherryError

K = 1024
HALF = 2
"""Bytes of a value in fp16 or bf16."""

STATE_BYTES = 20
"""Bytes of model states for each parameter: 2 + 2 in half precision, and master, moments and gradient in fp32."""


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise WherryError(f"{name}: expected 1 or more, got {value}")


@dataclass(frozen=True)
class GptShape:
    """A GPT-like model by its numbers; embeddings and biases are not counted.

    >>> GptShape(layers=80, hidden=10 * K, heads=128).parameters
    100663296000
    """

    layers: int
    hidden: int
    heads: int

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads"):
            _at_least_one(name, getattr(self, name))

    @property
    def parameters(self) -> int:
        return 12 * self.layers * self.hidden**2

    def layer_activations(self, samples: int, sequence: int) -> int:
        """Bytes that one layer's forward keeps for its backward: 16 values of `hidden`, and two score matrices."""
        return HALF * samples * sequence * (16 * self.hidden + 2 * self.heads * sequence)

    def activations(self, samples: int, sequence: int) -> int:
        """Bytes that a forward keeps without checkpointing."""
        return self.layers * self.layer_activations(samples, sequence)

    def checkpoints(self, samples: int, sequence: int, interval: int = 1) -> int:
        """Bytes of activation checkpoints, one in `interval` layers."""
        _at_least_one("interval", interval)
        return HALF * samples * sequence * self.hidden * -(-self.layers // interval)

    def working_activations(self, samples: int, sequence: int, interval: int = 1) -> int:
        """Bytes of the activations between two checkpoints, which are there at once in a backward."""
        _at_least_one("interval", interval)
        return min(interval, self.layers) * self.layer_activations(samples, sequence)

    def working_states(self) -> int:
        """Bytes of the largest layer, hidden to 4 hidden: its weights and their gradients in half precision."""
        return 2 * HALF * self.hidden * 4 * self.hidden


PUBLISHED = (
    GptShape(layers=80, hidden=10 * K, heads=128),
    GptShape(layers=100, hidden=20 * K, heads=160),
    GptShape(layers=128, hidden=25 * K, heads=256),
    GptShape(layers=195, hidden=64 * K, heads=512),
    GptShape(layers=315, hidden=160 * K, heads=1024),
)
"""The shapes of the published table, 0.1T to 100T parameters."""


@dataclass(frozen=True)
class Work:
    """What a node trains on at once, and how nodes are built."""

    batch: int = 32
    sequence: int = K
    gpus_per_node: int = 16
    interval: int = 1
    nodes: int = 32

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "gpus_per_node", "interval", "nodes"):
            _at_least_one(name, getattr(self, name))
        if self.batch % self.gpus_per_node:
            raise WherryError(
                f"batch: the {self.batch} samples of a node do not divide by its {self.gpus_per_node} GPUs; "
                "give a multiple of them"
            )

    @property
    def samples_per_gpu(self) -> int:
        return self.batch // self.gpus_per_node

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


def demand(shape: GptShape, work: Work) -> dict[str, int]:
    """One row of the table: bytes of the model, of a node, of a GPU."""
    return asdict(shape) | {
        "parameters": shape.parameters,
        "model_states": STATE_BYTES * shape.parameters,
        "node_activations": shape.activations(work.batch, work.sequence),
        "node_checkpoints": shape.checkpoints(work.batch, work.sequence, work.interval),
        "gpu_working_states": shape.working_states(),
        "gpu_working_activations": shape.working_activations(work.samples_per_gpu, work.sequence, work.interval),
    }


# Arithmetic intensity: floating-point operations for each byte that travels. A step computes 8 for each parameter and
# token: 2 in the forward, 2 in its recomputation, and 4 in the backward.


def weight_intensity(samples: int, sequence: int) -> Fraction:
    """Weights travel in forward, recomputation and backward, gradients once: four times 2 bytes a parameter."""
    return Fraction(8 * samples * sequence, 4 * HALF)


def optimizer_intensity(samples: int, sequence: int) -> Fraction:
    """Master, moments and gradient, 16 bytes a parameter, are read and written."""
    return Fraction(8 * samples * sequence, 2 * 16)


def checkpoint_intensity(hidden: int, interval: int = 1) -> Fraction:
    """A checkpoint of 2 hidden bytes a token is written and read; it stands for `interval` layers of 12 hidden^2."""
    return Fraction(8 * 12 * hidden**2 * interval, 2 * HALF * hidden)


def bandwidth_for(intensity: Fraction, target: float, peak: float) -> float:
    """Bytes a second that leave `target` of `peak` operations a second, where computing waits for what travels."""
    if not 0 < target < 1:
        raise WherryError(f"efficiency: expected a number between 0 and 1, got {target:g}")
    if not peak > 0:
        raise WherryError(f"peak: expected more than 0 operations a second, got {peak:g}")
    return peak * target / (1 - target) / float(intensity)
