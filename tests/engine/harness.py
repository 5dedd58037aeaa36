"""A small model, its plain-PyTorch oracle, and the same training through the engine on ranks that are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wherry
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks

VOCABULARY, WIDTH, LENGTH = 29, 16, 6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + torch.tanh(self.mix(h.cumsum(1) / 3))
        return x + self.down(F.gelu(self.up(x)))


class TinyLM(nn.Module):
    """Embedding, blocks, and a head tied to the embedding."""

    def __init__(self, blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def make_model(cls: Callable[[], nn.Module] = TinyLM, seed: int = 0) -> nn.Module:
    # The generator is the process's, and ranks are threads: models are built by one thread, and copied.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return cls()


def token_batch(step: int, micro: int, rank: int, size: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    ids = torch.randint(0, VOCABULARY, (size, LENGTH + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


Batch = Callable[[int, int, int], tuple[torch.Tensor, ...]]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def engine_of(model: nn.Module, config: dict[str, Any], mesh: Any = None) -> Any:
    """An engine that trains all of the model."""
    return wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config, mesh=mesh)[0]


def train_step(engine: Any, step: int, rank: int) -> None:
    """Of one micro-batch."""
    engine.backward(engine(*token_batch(step, 0, rank)))
    engine.step()


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    extra: Any = None


def train_plain(
    model: nn.Module,
    *,
    ranks: int = 1,
    accumulation: int = 1,
    steps: int = 20,
    clip: float = 0.0,
    optimizer: MakeOptimizer = adamw,
    batch: Batch = token_batch,
) -> Run:
    """The oracle: one process, plain PyTorch, the mean loss over all ranks' micro-batches."""
    model = copy.deepcopy(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    opt = optimizer(trainable)
    run = Run()
    for step in range(steps):
        opt.zero_grad()
        total = 0.0
        for micro in range(accumulation):
            for rank in range(ranks):
                loss = model(*batch(step, micro, rank)) / (ranks * accumulation)
                loss.backward()
                total += float(loss.detach())
        # In float64: over a million elements torch's own norm is off by more than the tolerance.
        squares = [p.grad.double().square().sum() for p in trainable if p.grad is not None]
        run.norms.append(float(torch.stack(squares).sum().sqrt()))
        if clip > 0:
            nn.utils.clip_grad_norm_(trainable, clip)
        opt.step()
        run.losses.append(total)
    run.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


def train_engine(
    model: nn.Module,
    *,
    stage: int,
    ranks: int = 1,
    accumulation: int = 1,
    steps: int = 20,
    clip: float = 0.0,
    optimizer: MakeOptimizer | None = adamw,
    batch: Batch = token_batch,
    config: dict[str, Any] | None = None,
    place: Callable[[Comm], Any] = lambda comm: comm,
    schedule: Any = None,
    before_step: Callable[[Any, int], None] | None = None,
    each_step: Callable[[Any, int], None] | None = None,
    finish: Callable[[Any], Any] | None = None,
    plain_backward: bool = False,
) -> Run:
    """The same training through the engine; what rank 0 saw, losses averaged over ranks.

    `place` is where a rank is: its mesh. `before_step(engine, step)` and `each_step` are called around a step.
    """

    def body(comm: Comm) -> Run:
        run = Run()
        mine = copy.deepcopy(model)
        engine, _, _, _ = wherry.initialize(
            model=mine,
            optimizer=optimizer(mine.parameters()) if optimizer is not None else None,
            lr_scheduler=schedule,
            mesh=place(comm),
            config=settings(stage, accumulation, clip, config),
        )
        for step in range(steps):
            total = 0.0
            if before_step is not None:
                before_step(engine, step)
            micro_batches = engine.gradient_accumulation_steps()
            for micro in range(micro_batches):
                loss = engine(*batch(step, micro, comm.rank))
                if plain_backward:
                    loss.backward()
                else:
                    engine.backward(loss)
                engine.step()
                total += float(loss.detach()) / micro_batches
            if each_step is not None:
                each_step(engine, step)
            norm = engine.get_global_grad_norm()
            run.norms.append(-1.0 if norm is None else norm)
            run.losses.append(sum(comm.gather_objects(total)) / comm.size)
        engine.settle()  # of delayed updates, the last is made
        with wherry.gathered(engine.module):
            run.weights = {name: p.detach().clone() for name, p in mine.named_parameters()}
        run.extra = finish(engine) if finish is not None else None
        engine.close()
        return run

    return run_ranks(ranks, body)[0]


def settings(
    stage: int, accumulation: int = 1, clip: float = 0.0, more: dict[str, Any] | None = None
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        **(more or {}),
    }
    # Every flat travels, by itself.
    alone = {"reduce_bucket_size": 0, "allgather_bucket_size": 0}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **alone}
    config["zero_optimization"] = zero | config.get("zero_optimization", {})
    return config


def gathered(engine: Any) -> int:
    """Bytes of weights that are whole at this moment, and do not stay so."""
    return next((row.bytes_actual for row in engine.memory() if row.state == "gathered"), 0)


class PeakGathered:
    """The most of them, looked at whenever a module begins and whenever a gradient comes."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.highest = 0
        for module in engine.module.modules():
            module.register_forward_pre_hook(lambda *_: self.look())
            for parameter in module.parameters(recurse=False):
                parameter.register_post_accumulate_grad_hook(lambda _: self.look())

    def look(self) -> None:
        self.highest = max(self.highest, gathered(self.engine))

    def take(self) -> int:
        highest, self.highest = self.highest, 0
        return highest


def assert_close(one: Run, other: Run, tolerance: float = 1e-5) -> None:
    for name in ("losses", "norms"):
        ours, theirs = torch.tensor(getattr(one, name)), torch.tensor(getattr(other, name))
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0, msg=lambda m, name=name: f"{name}: {m}")
    for name, weight in other.weights.items():
        torch.testing.assert_close(one.weights[name], weight, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def assert_equal(one: Run, other: Run) -> None:
    """The same bits, but for the norm's float64 sum, whose order follows the shards."""
    assert one.losses == other.losses
    assert one.norms == pytest.approx(other.norms, rel=1e-13, nan_ok=True)
    for name, weight in other.weights.items():
        assert torch.equal(one.weights[name], weight), name
