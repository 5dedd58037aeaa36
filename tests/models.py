"""Shapes of model that break sharded training elsewhere; all take and return vectors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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
    """Blocks and a loss: the base of the models below."""

    Block: Callable[[], nn.Module] = Residual

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(blocks))
        self.out = nn.Linear(D, D)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.run(x), y)


class TiedTwice(Stack):
    """A weight shared by two blocks, and one shared with a layer outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].linear.weight = self.blocks[0].linear.weight
        self.out.weight = self.blocks[1].linear.weight


class CalledTwice(Stack):
    """Modules that run several times in one forward, as in ALBERT."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.out(self.blocks[0](x))


class TwoPasses(Stack):
    """Two forwards of the blocks in one step, one of them without gradients."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.run(y)
        return F.mse_loss(self.run(x), target + y)


class UsedOutside(Stack):
    """A block's weight, read by the model's forward and by another block."""

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
    class Block(Residual):
        def forward(self, pair: Pair) -> Pair:  # type: ignore[override]
            x = super().forward(pair.hidden)
            return Pair(x, {"pre": (pair.hidden, [x * 2, None]), "count": 1})

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pair = Pair(x, {})
        for block in self.blocks:
            pair = block(pair)
        return F.mse_loss(self.out(pair.hidden + pair.more["pre"][1][0]), y)


class OneHugeLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(D, 90_000, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.wide(x).view(len(x), D, -1).mean(2), y)


class MixedDtypes(Stack):
    """Units with parameters of two dtypes, in two flats."""

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
    """Modules in two reentrant checkpoints, so that their gradients arrive twice in one backward."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in (*self.blocks, self.blocks[1], self.blocks[0]):
            x = checkpoint(block, x, use_reentrant=True)
        return self.out(x)


class Adapted(Stack):
    """Frozen blocks with small trainable parts, as LoRA has them."""

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = Residual().requires_grad_(False)
            self.a, self.b = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # In backward the frozen weights come last, after all of the adapter's gradients.
            return self.base(x + self.b(self.a(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Adapter(), Residual().requires_grad_(False), self.Adapter()])


class WithAttention(Stack):
    """MultiheadAttention, which reads its output projection's weight without calling it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(D, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.attention(x[None], x[None], x[None], need_weights=False)[0][0]

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.single = nn.MultiheadAttention(D, 2, batch_first=True)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = super().run(x)
        return x + self.single(x[None], x[None], x[None], need_weights=False)[0][0]


class EmptyParts(Stack):
    """Parameters without elements; buffers of a dtype without collectives, and of overlapping memory."""

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
    """Convolutions in a memory format that flats do not keep, with statistics of each rank."""

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
    """Recurrent layers, which keep lists of their weights."""

    def __init__(self) -> None:
        super().__init__(1)
        self.lstm = nn.LSTM(D, D, num_layers=2, bidirectional=True)
        self.cell = nn.GRUCell(2 * D, D)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(super().run(x)[:, None])
        return self.cell(hidden[:, 0], self.cell(hidden[:, 0]))


class Choosing(Stack):
    """Layer drop that differs between ranks and micro-batches."""

    def __init__(self, blocks: int = 5) -> None:
        super().__init__(blocks)

    def chosen(self, x: torch.Tensor) -> list[bool]:
        bits = int(x[0, 0].abs() * 1000)
        return [bool(bits >> index & 1) for index in range(len(self.blocks))]

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block, chosen in zip(self.blocks, self.chosen(x), strict=True):
            if chosen:
                x = block(x)
        return self.out(x)


class ChoosingExperts(Choosing):
    """Experts in units of their own, chosen by the batch, between blocks that all ranks run."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        x = self.blocks[1 + int(x[0, 0].abs() * 1000) % 3](x)
        return self.out(self.blocks[4](x))


class ChoosingCheckpointed(Choosing):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.chosen(x)
        x = x.clone().requires_grad_()
        for block, run in zip(self.blocks, chosen, strict=True):
            if run:
                x = checkpoint(block, x, use_reentrant=False)
        return self.out(x)


class ChoosingOutOfOrder(Choosing):
    """Blocks that run out of the order of registration, and one twice."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[3](self.blocks[1](x))
        for index, chosen in zip((4, 0, 2), self.chosen(x), strict=False):
            if chosen or not self.settled:
                x = self.blocks[index](x)
        return self.out(self.blocks[1](x))

    settled = False


class ChoosingMixed(Choosing):
    """Layer drop of blocks of different sizes, so that gathers cannot be confused."""

    class Wide(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(D, width), nn.Linear(width, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.tanh(self.up(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Wide(width) for width in (8, 40, 16, 120, 8))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "stack": Stack,
    "tied": TiedTwice,
    "called twice": CalledTwice,
    "two passes": TwoPasses,
    "used outside": UsedOutside,
    "nested outputs": NestedOutputs,
    "one huge layer": OneHugeLayer,
    "mixed dtypes": MixedDtypes,
    "buffers": Buffers,
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "checkpointed, reentrant": lambda: Checkpointed(reentrant=True),
    "checkpointed by two, reentrant": lambda: Checkpointed(reentrant=True, span=2),
    "checkpointed twice, reentrant": CheckpointedTwice,
    "adapters": Adapted,
    "channels last": ChannelsLast,
    "recurrent": Recurrent,
    "attention": WithAttention,
    "empty parts": EmptyParts,
    "layer drop": Choosing,
    "layer drop, checkpointed": ChoosingCheckpointed,
    "layer drop of many sizes": ChoosingMixed,
    "experts": ChoosingExperts,
}
