"""Any model, unchanged: the shapes of model that break sharded training elsewhere, each against plain PyTorch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.harness import Run, assert_close, assert_equal, make_model, settings, train_engine, train_plain
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import wherry
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks

D = 12


def vectors(step: int, micro: int, rank: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    rows = 4 + micro % 2
    return (torch.randn(rows, D, generator=generator), torch.randn(rows, D, generator=generator))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9, weight_decay=0.1)


class Residual(nn.Module):
    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Stack(nn.Module):
    """Blocks, and a loss: the base of the models below."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(blocks))
        self.out = nn.Linear(D, D)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.run(x), y)


class TiedTwice(Stack):
    """A weight that two blocks and a layer outside share."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].linear.weight = self.blocks[0].linear.weight
        self.out.weight = self.blocks[1].linear.weight


class CalledTwice(Stack):
    """The same module several times in one forward, as in ALBERT."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.out(self.blocks[0](x))


class SometimesUnused(Stack):
    """Parameters that no forward uses, and a block that only every other one does."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(D, D)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        if len(x) % 2:
            x = self.blocks[1](x)
        return self.out(self.blocks[2](x))


class Experts(nn.Module):
    """Parts of a block that get data on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts[int(x[0, 0] > 0)](x)


class UnusedOnOneRank(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(3))


class UsedOutside(Stack):
    """A block's weight, read by the model's own forward and by another block."""

    class Borrower(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.lender: list[nn.Module] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(F.linear(x, self.lender[0].linear.weight))

    def __init__(self) -> None:
        super().__init__()
        borrower = self.Borrower()
        self.blocks = nn.ModuleList([Residual(), borrower, self.Borrower(), Residual()])
        self.blocks[1].lender.append(self.blocks[3])
        self.blocks[2].lender.append(self.blocks[0])

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(F.linear(x, self.blocks[3].linear.weight, self.blocks[0].linear.bias))


@dataclasses.dataclass
class Pair:
    hidden: torch.Tensor
    more: dict[str, Any]


class NestedOutputs(Stack):
    class Wrapping(Residual):
        def forward(self, pair: Pair) -> Pair:  # type: ignore[override]
            x = super().forward(pair.hidden)
            return Pair(x, {"pre": (pair.hidden, [x * 2, None]), "count": 1})

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Wrapping() for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pair = Pair(x, {})
        for block in self.blocks:
            pair = block(pair)
        return F.mse_loss(self.out(pair.hidden + pair.more["pre"][1][0]), y)


class NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, 2 * D)
        self.second = nn.Linear(2 * D, D)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.gain * self.second(F.gelu(self.first(x))), y)


class OneHugeLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(D, 90_000, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.wide(x).view(len(x), D, -1).mean(2), y)


class OnlySequential(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return F.mse_loss(super().forward(x), y)


class MixedDtypes(Stack):
    """Half of the model in float64: a flat has one dtype, a unit may have several."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].double()
        self.blocks[0].norm.double()

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = x.double()
        x = x + torch.tanh(self.blocks[0].linear(self.blocks[0].norm(x).float())).double()
        x = self.blocks[1](x)
        return self.out(self.blocks[2](x.float()))


class Buffers(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(0, 1, D, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("open", torch.ones(D, dtype=torch.bool), persistent=False)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().run(torch.where(self.open, x + 0.01 * self.shift.float(), x))


class Checkpointed(Stack):
    def __init__(self, *, reentrant: bool, span: int = 1) -> None:
        super().__init__(blocks=4)
        self.reentrant, self.span = reentrant, span

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for start in range(0, 4, self.span):
            blocks = self.blocks[start : start + self.span]
            x = checkpoint(nn.Sequential(*blocks), x, use_reentrant=self.reentrant)
        return self.out(x)


class CheckpointedTwice(Stack):
    """A module in two reentrant checkpoints: its gradients arrive twice in one backward."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in (*self.blocks, self.blocks[1], self.blocks[0]):
            x = checkpoint(block, x, use_reentrant=True)
        return self.out(x)


class Adapted(Stack):
    """LoRA-like: frozen blocks with small trainable parts."""

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = Residual().requires_grad_(False)
            self.a, self.b = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # The frozen weights come last in backward: after the adapter's gradients have all arrived.
            return self.base(x + self.b(self.a(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Adapter(), Residual().requires_grad_(False), self.Adapter()])


class AdaptedAtTheEnd(Adapted):
    class Adapter(Adapted.Adapter):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.b(self.a(x))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 4, 3, padding=1)
        self.stages = nn.ModuleDict({"a": nn.Conv1d(4, 4, 3, padding=1), "b": nn.Conv1d(4, 4, 3, padding=1)})
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4 * D, D)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.stem(x[:, None]))
        for stage in self.stages.values():
            h = h + F.relu(self.norm(stage(h)))
        return F.mse_loss(self.head(h.flatten(1)), y)


class WithAttention(Stack):
    """MultiheadAttention reads its output projection's weight without calling it."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(D, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.attention(x[None], x[None], x[None], need_weights=False)[0][0]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Layer() for _ in range(2))
        self.single = nn.MultiheadAttention(D, 2, batch_first=True)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = super().run(x)
        return x + self.single(x[None], x[None], x[None], need_weights=False)[0][0]


class EmptyParts(Stack):
    """Parameters without elements, alone in a block and beside others; buffers of dtypes that backends do not know."""

    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.empty(0, D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.none.sum()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Nothing(), self.Nothing(), Residual(), Residual()])
        self.register_buffer("short", torch.arange(3, dtype=torch.int16))
        self.register_buffer("expanded", torch.ones(1).expand(4))


class ChannelsLast(nn.Module):
    """Images, whose statistics each rank has of its own, in a memory format that flats do not keep."""

    def __init__(self) -> None:
        super().__init__()
        parts = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1))
        self.blocks = nn.ModuleList([nn.Sequential(*parts)])
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        images = x.view(-1, 3, 2, 2).to(memory_format=torch.channels_last)
        out = self.blocks[0](images)
        assert out.is_contiguous(memory_format=torch.channels_last)
        return F.mse_loss(out, y.view(-1, 3, 2, 2))


class Recurrent(Stack):
    """cuDNN's layers keep lists of their weights."""

    def __init__(self) -> None:
        super().__init__(1)
        self.lstm = nn.LSTM(D, D, num_layers=2, bidirectional=True)
        self.cell = nn.GRUCell(2 * D, D)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(super().run(x)[:, None])
        return self.cell(hidden[:, 0], self.cell(hidden[:, 0]))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "stack": Stack,
    "tied": TiedTwice,
    "called twice": CalledTwice,
    "unused": SometimesUnused,
    "unused on one rank": UnusedOnOneRank,
    "used outside": UsedOutside,
    "nested outputs": NestedOutputs,
    "no blocks": NoBlocks,
    "one huge layer": OneHugeLayer,
    "sequential": OnlySequential,
    "mixed dtypes": MixedDtypes,
    "buffers": Buffers,
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "checkpointed by two": lambda: Checkpointed(reentrant=False, span=2),
    "checkpointed, reentrant": lambda: Checkpointed(reentrant=True),
    "checkpointed by two, reentrant": lambda: Checkpointed(reentrant=True, span=2),
    "checkpointed twice, reentrant": CheckpointedTwice,
    "adapters": Adapted,
    "adapters beside": AdaptedAtTheEnd,
    "convolutions": ConvNet,
    "channels last": ChannelsLast,
    "recurrent": Recurrent,
    "attention": WithAttention,
    "empty parts": EmptyParts,
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_plain_pytorch(name: str, stage: int) -> None:
    model = make_model(MODELS[name])
    # Not Adam: it divides by gradients that are zero but for rounding, as those of attention's key bias.
    runs = [
        train(model, ranks=2, accumulation=2, steps=4, batch=vectors, optimizer=sgd, **extra)
        for train, extra in ((train_plain, {}), (train_engine, {"stage": stage}))
    ]
    assert_close(runs[1], runs[0])


def slow_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_on_one_rank(name: str) -> None:
    model = make_model(MODELS[name])
    common: dict[str, Any] = {"steps": 3, "batch": vectors, "optimizer": slow_sgd}
    plain = train_plain(model, **common)
    for plain_backward in (False, True):
        assert_close(train_engine(model, stage=2, plain_backward=plain_backward, **common), plain)


def run_with(
    model: nn.Module, use: Callable[[Any, int, Comm], None], stage: int, ranks: int = 2, steps: int = 4
) -> Run:
    """Train, and do something else between the steps."""

    def body(comm: Comm) -> Run:
        mine = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-3, weight_decay=0.1)
        engine, *_ = wherry.initialize(model=mine, optimizer=optimizer, config=settings(stage), mesh=comm)
        run = Run()
        for step in range(steps):
            use(engine, step, comm)
            loss = engine(*vectors(step, 0, comm.rank))
            engine.backward(loss)
            engine.step()
            run.losses.append(sum(comm.gather_objects(float(loss.detach()))) / comm.size)
            run.norms.append(engine.get_global_grad_norm() or -1.0)
        with wherry.gathered(engine.module):
            run.weights = {name: p.detach().clone() for name, p in mine.named_parameters()}
        return run

    return run_ranks(ranks, body)[0]


def nothing(engine: Any, step: int, comm: Comm) -> None:
    pass


def evaluate(engine: Any, step: int, comm: Comm) -> None:
    engine.eval()
    with torch.no_grad() if step % 2 else torch.inference_mode():
        assert torch.isfinite(engine(*vectors(step, 1, comm.rank)))
        assert torch.isfinite(engine.module.blocks[1](vectors(step, 1, comm.rank)[0])).all()
    engine.train()
    # In grad mode, with no backward to follow.
    assert torch.isfinite(engine(*vectors(step, 2, comm.rank)))


class Hiccup(RuntimeError):
    pass


def fail_forward(engine: Any, step: int, comm: Comm) -> None:
    def stumble(*_: Any) -> None:
        raise Hiccup

    handle = engine.module.blocks[1].linear.register_forward_hook(stumble)
    with pytest.raises(Hiccup):
        engine(*vectors(step, 1, comm.rank))
    handle.remove()


def interrupt(engine: Any, step: int, comm: Comm) -> None:
    """Ctrl-C in a notebook, whose next cell goes on: torch calls no hooks for what is no Exception."""

    def stumble(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = engine.module.blocks[1].linear.register_forward_hook(stumble)
    inputs = vectors(step, 1, comm.rank)
    calls = (lambda: engine(*inputs), lambda: engine.module(*inputs), lambda: engine.run(inputs[0]))
    with pytest.raises(KeyboardInterrupt):
        calls[step % 3]()
    handle.remove()


def fail_backward(engine: Any, step: int, comm: Comm) -> None:
    def stumble(*_: Any) -> None:
        raise Hiccup

    handle = engine.module.blocks[1].linear.register_full_backward_hook(stumble)
    for backward in (engine.backward, torch.Tensor.backward):
        loss = engine(*vectors(step, 1, comm.rank))
        with pytest.raises(Hiccup):
            backward(loss)
    handle.remove()


def discard(engine: Any, step: int, comm: Comm) -> None:
    engine.backward(engine(*vectors(step, 1, comm.rank)))
    engine.zero_grad()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("use", [evaluate, fail_forward, interrupt, fail_backward, discard])
def test_what_happens_between_steps_changes_nothing(use: Callable[..., None], stage: int) -> None:
    model = make_model(Stack)
    assert_equal(run_with(model, use, stage), run_with(model, nothing, stage))


class TwoForwards(Stack):
    """Several forwards of the engine, one backward of their sum."""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_several_forwards_before_one_backward(stage: int) -> None:
    model = make_model(TwoForwards)
    plain = copy.deepcopy(model)
    (sum(plain(*vectors(0, micro, rank)) for micro in range(3) for rank in range(2)) / 2).backward()

    def body(comm: Comm) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(model=mine, config=settings(stage), mesh=comm)
        losses = [engine(*vectors(0, micro, comm.rank)) for micro in range(3)]
        engine.backward(losses[0] + losses[1] + losses[2])
        return {name: engine.gradients(name) for name, _ in mine.named_parameters()}

    grads = run_ranks(2, body)[0]
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-5, atol=1e-6)
