"""A small language model, trained by plain PyTorch, the oracle, and through the engine on ranks that are threads."""

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


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


# Training.

# Positional or named inputs of a step, micro-batch and rank, or a function that computes the model's loss.
Batch = Callable[[int, int, int], Any]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def engine_of(
    model: nn.Module, config: dict[str, Any], mesh: Any = None, optimizer: MakeOptimizer | None = adamw, **more: Any
) -> Any:
    """Build an engine that trains all of the model."""
    made = optimizer(model.parameters()) if optimizer is not None else None
    return wherry.initialize(model=model, optimizer=made, config=config, mesh=mesh, **more)[0]


def on_ranks(
    use: Callable[[Any], Any],
    *,
    ranks: int = 2,
    stage: int = 3,
    accumulation: int = 1,
    clip: float = 0.0,
    model: nn.Module | None = None,
    optimizer: MakeOptimizer | None = adamw,
    config: dict[str, Any] | None = None,
    place: Callable[[Comm], Any] = lambda comm: comm,
    schedule: Any = None,
) -> list[Any]:
    """Build one engine per rank, each of a copy of the model; return the results of `use(engine)` by rank.

    `place` gives a rank's mesh.
    """
    source = make_model() if model is None else model

    def body(comm: Comm) -> Any:
        full = settings(stage, accumulation, clip, copy.deepcopy(config))
        engine = engine_of(copy.deepcopy(source), full, place(comm), optimizer, lr_scheduler=schedule)
        result = use(engine)
        engine.close()
        return result

    return run_ranks(ranks, body)


def train_step(engine: Any, step: int, rank: int) -> None:
    """Train one micro-batch, which is a window."""
    engine.backward(engine(*token_batch(step, 0, rank)))
    engine.step()


def train(engine: Any, stop: int, start: int = 0, batch: Batch = token_batch) -> list[float]:
    """Train the steps from `start` up to `stop` on this rank's batches; return the loss of each micro-batch."""
    losses = []
    for step in range(start, stop):
        for micro in range(engine.gradient_accumulation_steps()):
            loss = _forward(engine, batch(step, micro, engine.comm.rank))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    """Copy the whole working weights of an engine."""
    with wherry.gathered(engine.module):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def masters_of(engine: Any) -> dict[str, torch.Tensor]:
    """Copy the whole fp32 masters of an engine."""
    return {name: engine.states.full(name, "master") for name, _ in engine.module.named_parameters()}


def state_of(model: nn.Module, stage: int = 3, mesh: Any = None, **more: Any) -> dict[str, torch.Tensor]:
    """Copy the values of a model from a new engine of it."""
    with wherry.initialize(model=model, config=settings(stage, more=more), mesh=mesh)[0] as engine:
        return {name: value.clone() for name, value in engine.module.state_dict().items()}


def train_plain(
    model: nn.Module,
    *,
    ranks: int = 1,
    accumulation: int = 1,
    steps: int = 20,
    clip: float = 0.0,
    optimizer: MakeOptimizer = adamw,
    batch: Batch = token_batch,
    in_place: bool = False,
    before_step: Callable[[nn.Module, int], None] = lambda model, step: None,
) -> Run:
    """Train by plain PyTorch on one process: the oracle, on the mean loss over all ranks' micro-batches."""
    model = model if in_place else copy.deepcopy(model)
    parameters = list(model.parameters())
    opt = optimizer(parameters)
    run = Run()
    for step in range(steps):
        before_step(model, step)
        opt.zero_grad()
        total = 0.0
        for micro in range(accumulation):
            for rank in range(ranks):
                loss = _forward(model, batch(step, micro, rank)) / (ranks * accumulation)
                loss.backward()
                total += float(loss.detach())
        # In float64: over a million elements torch's own norm is off by more than the tolerance.
        squares = [p.grad.double().square().sum() for p in parameters if p.grad is not None]
        run.norms.append(float(torch.stack(squares).sum().sqrt()))
        if clip > 0:
            nn.utils.clip_grad_norm_(parameters, clip)
        opt.step()
        run.losses.append(total)
    run.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


def train_masters(
    model: nn.Module,
    dtype: torch.dtype,
    *,
    steps: int,
    ranks: int = 1,
    accumulation: int = 1,
    accumulate: torch.dtype | None = None,
    scale: float = 1.0,
    optimizer: MakeOptimizer = adamw,
) -> Run:
    """Train fp32 masters by gradients of their rounded copies, summed in `accumulate`: the oracle of half precision."""
    masters, working = copy.deepcopy(model), copy.deepcopy(model).to(dtype)
    opt, run = optimizer(masters.parameters()), Run()
    for step in range(steps):
        opt.zero_grad()
        total = 0.0
        for rank in range(ranks):
            sums = [torch.zeros_like(p, dtype=accumulate or dtype) for p in working.parameters()]
            for micro in range(accumulation):
                loss = working(*token_batch(step, micro, rank))
                torch._foreach_add_(sums, torch.autograd.grad(loss * scale, list(working.parameters())))
                total += float(loss.detach()) / (ranks * accumulation)
            for master, grad in zip(masters.parameters(), sums, strict=True):
                grad = grad.float() / (scale * accumulation * ranks)
                master.grad = grad if master.grad is None else master.grad + grad
        opt.step()
        with torch.no_grad():
            torch._foreach_copy_(list(working.parameters()), list(masters.parameters()))
        run.losses.append(total)
    run.weights = {name: p.detach() for name, p in working.named_parameters()}
    run.extra = {name: p.detach() for name, p in masters.named_parameters()}
    return run


def _forward(model: Any, batch: Any) -> torch.Tensor:
    """Return the loss of a batch: of positional inputs, of named ones, or by a function of the model."""
    if callable(batch):
        return batch(model)
    return model(**batch).loss if isinstance(batch, dict) else model(*batch)


def train_engine(
    model: nn.Module,
    *,
    stage: int,
    ranks: int = 1,
    steps: int = 20,
    batch: Batch = token_batch,
    before_step: Callable[[Any, int], None] | None = None,
    each_step: Callable[[Any, int], None] | None = None,
    finish: Callable[[Any], Any] | None = None,
    plain_backward: bool = False,
    by_window: bool = False,
    **how: Any,
) -> Run:
    """Train the same through the engine; return rank 0's run, with losses averaged over ranks.

    `before_step(engine, step)` and `each_step` are called around a step; `extra` of the run is the result of
    `finish(engine)`, or without it the results of `each_step`. With `by_window`, a step is one call of
    `engine.train_batch`. `how` goes to `on_ranks`.
    """

    def use(engine: Any) -> Run:
        run, results, comm = Run(), [], engine.comm
        for step in range(steps):
            total = 0.0
            if before_step is not None:
                before_step(engine, step)
            micro_batches = engine.gradient_accumulation_steps()
            batches = (batch(step, micro, comm.rank) for micro in range(micro_batches))
            if by_window:
                comm.traffic.clear()
                total = float(engine.train_batch(batches))
            for given in () if by_window else batches:
                loss = _forward(engine, given)
                if plain_backward:
                    loss.backward()
                else:
                    engine.backward(loss)
                engine.step()
                total += float(loss.detach()) / micro_batches
            if each_step is not None:
                results.append(each_step(engine, step))
            norm = engine.get_global_grad_norm()
            run.norms.append(-1.0 if norm is None else norm)
            run.losses.append(sum(comm.gather_objects(total)) / comm.size)
        engine.settle()  # with delayed updates, apply the last one
        run.weights = weights_of(engine)
        run.extra = finish(engine) if finish is not None else results
        return run

    return on_ranks(use, ranks=ranks, stage=stage, model=model, **how)[0]


def settings(
    stage: int, accumulation: int = 1, clip: float = 0.0, more: dict[str, Any] | None = None
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        **(more or {}),
    }
    # Every flat is communicated, and each in a collective of its own.
    alone = {"reduce_bucket_size": 0, "allgather_bucket_size": 0}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **alone}
    config["zero_optimization"] = zero | config.get("zero_optimization", {})
    return config


def gathered(engine: Any) -> int:
    """Return the bytes of gathered weights that are whole at this moment."""
    return next((row.bytes_actual for row in engine.memory() if row.state == "gathered"), 0)


class PeakGathered:
    """The most gathered bytes, sampled at each module's forward and at each gradient."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.highest = 0
        for module in engine.module.modules():
            module.register_forward_pre_hook(lambda *_: self.look())
            for parameter in filter(lambda parameter: parameter.requires_grad, module.parameters(recurse=False)):
                parameter.register_post_accumulate_grad_hook(lambda _: self.look())

    def look(self) -> None:
        self.highest = max(self.highest, gathered(self.engine))

    def take(self) -> int:
        highest, self.highest = self.highest, 0
        return highest


# Comparing.


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    extra: Any = None


def assert_close(one: Run, other: Run, tolerance: float = 1e-5) -> None:
    for name in ("losses", "norms"):
        ours, theirs = torch.tensor(getattr(one, name)), torch.tensor(getattr(other, name))
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0, msg=lambda m, name=name: f"{name}: {m}")
    assert_near(one.weights, other.weights, tolerance)


def assert_equal(one: Run, other: Run) -> None:
    """Compare bits; of norms the value, as the order of their float64 sum follows the shards."""
    assert one.losses == other.losses
    assert one.norms == pytest.approx(other.norms, rel=1e-13, nan_ok=True)
    for name, weight in other.weights.items():
        assert torch.equal(one.weights[name], weight), name


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Compare the bits of two state_dicts."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def assert_near(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """Compare the tensors that `other` has."""
    for name, value in other.items():
        torch.testing.assert_close(
            one[name], value, rtol=0, atol=tolerance, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
