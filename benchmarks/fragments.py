"""What torch's CUDA allocator holds and nobody uses, over steps of changing length.

On a GPU the allocator itself is asked. Elsewhere a model of it is given the tensors of the same steps, which may be
fake: the sizes of its blocks and segments, which block it takes, and what it splits and joins, are those of torch.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import wherry
from wherry.observe import bench
from wherry.observe.footprint import WORKING, Footprint
from wherry.parallel.comm import SoloComm
from wherry.parallel.topology import Topology
from wherry.plan.imagined import FakeLink, FakePool, FakeStore
from wherry.train.model import GPT, GPTConfig

MIB = 1 << 20
# Of torch's CUDA allocator: the grain of a block, the largest of the pool for small ones, what a segment for small and
# for middling ones has, from when on a block has a segment of its own, and the grain of that.
GRAIN, SMALL, SMALL_SEGMENT, SEGMENT, LARGE, LARGE_GRAIN = 512, MIB, 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB

# A step of some length, which calls what it is given where most activations live: between forward and backward.
Step = Callable[[int, Callable[[], None]], None]


class Memory(Protocol):
    """An allocator: bytes that it has handed out, those at their highest, and those it holds."""

    @property
    def allocated(self) -> int: ...

    @property
    def highest(self) -> int: ...

    @property
    def reserved(self) -> int: ...


class CudaMemory:
    """torch's allocator on a GPU, from an empty cache on."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    @property
    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    @property
    def highest(self) -> int:
        return torch.cuda.max_memory_allocated()

    @property
    def reserved(self) -> int:
        return torch.cuda.memory_reserved()


@dataclass(eq=False)
class Block:
    """A piece of a segment, and its neighbours there."""

    address: int
    size: int
    free: bool = False
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """What torch's CUDA allocator does: it takes the smallest free block that is large enough, or a new segment.

    >>> memory = CachingAllocator()
    >>> block = memory.take(3 * MIB)
    >>> memory.allocated, memory.reserved
    (3145728, 20971520)
    """

    def __init__(self) -> None:
        self.allocated = self.highest = self.reserved = 0
        # The free ones of the pools for small and for other blocks, by size and then address.
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._pool: dict[Block, bool] = {}
        self._end = 0

    def take(self, nbytes: int) -> Block:
        size = max(GRAIN, _up(nbytes, GRAIN))
        small = size <= SMALL
        free = self._free[small]
        place = bisect_left(free, (size, -1))
        block = free.pop(place)[2] if place < len(free) else self._segment(size, small)
        block.free = False
        self._pool[block] = small
        rest = block.size - size
        if rest >= GRAIN if small else rest > SMALL:
            remaining = Block(block.address + size, rest, True, block, block.after)
            if block.after is not None:
                block.after.before = remaining
            block.after, block.size = remaining, size
            insort(free, (rest, remaining.address, remaining))
        self.allocated += block.size
        self.highest = max(self.highest, self.allocated)
        return block

    def give(self, block: Block) -> None:
        free = self._free[self._pool.pop(block)]
        self.allocated -= block.size
        block.free = True
        for neighbour in (block.before, block.after):
            if neighbour is None or not neighbour.free:
                continue
            free.pop(bisect_left(free, (neighbour.size, neighbour.address)))
            first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
            first.size += second.size
            first.after = second.after
            if second.after is not None:
                second.after.before = first
            block = first
        insort(free, (block.size, block.address, block))

    def _segment(self, size: int, small: bool) -> Block:
        whole = SMALL_SEGMENT if small else SEGMENT if size < LARGE else _up(size, LARGE_GRAIN)
        block = Block(self._end, whole)
        self._end += whole
        self.reserved += whole
        return block


def _up(size: int, grain: int) -> int:
    return -(-size // grain) * grain


class Simulated(Footprint):
    """While entered: the tensors of this thread, in the memory of a `CachingAllocator`."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = CachingAllocator()
        self._blocks: dict[int, Block] = {}

    def _add(self, tensor: torch.Tensor, category: str = WORKING) -> None:
        super()._add(tensor, category)
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self._entries and storage._cdata not in self._blocks:
            self._blocks[storage._cdata] = self.allocator.take(storage.nbytes())

    def _free(self, key: int) -> None:
        super()._free(key)
        self.allocator.give(self._blocks.pop(key))

    @property
    def allocated(self) -> int:
        return self.allocator.allocated

    @property
    def highest(self) -> int:
        return self.allocator.highest

    @property
    def reserved(self) -> int:
        return self.allocator.reserved


@dataclass(frozen=True)
class Fragments:
    """Over some steps: bytes in use at their highest, held at the end, and unused where a forward ends, by step."""

    highest: int
    reserved: int
    unused: tuple[int, ...]

    @property
    def excess(self) -> int:
        """Held and never needed at once."""
        return self.reserved - self.highest

    def row(self, system: str, config: GPTConfig, batch: int, device: str) -> bench.Row:
        case = {"measure": "fragments", "allocator": device, "layers": config.layers, "hidden": config.hidden}
        case |= {"longest": config.sequence, "batch": batch, "steps": len(self.unused)}
        facts = {"highest_bytes": self.highest, "reserved_bytes": self.reserved, "excess_bytes": self.excess}
        made = bench.row(case, system, "bytes", [float(value) for value in self.unused], **facts)
        return made | {"of_limit": self.highest / self.reserved}


def over(step: Step, lengths: Sequence[int], memory: Memory) -> Fragments:
    """Take a step of each length, and look at the allocator in each of them."""
    unused: list[int] = []
    for length in lengths:
        step(length, lambda: unused.append(memory.reserved - memory.allocated))
    return Fragments(memory.highest, memory.reserved, tuple(unused))


def lengths_of(longest: int, steps: int) -> list[int]:
    """Lengths of batches, multiples of 8 between a quarter of the longest and all of it; the same for everyone."""
    chooser = random.Random(0)
    return [8 * chooser.randint(longest // 32, longest // 8) for _ in range(steps)]


# Steps of a measure, sequences in a step, and the sizes of a large model's tensors; simulated, it has fewer blocks, as
# each has the same ones.
STEPS, BATCH = 100, 4
LARGE_MODEL = GPTConfig(24, 1024, 16, 1024)
SIMULATED_MODEL = GPTConfig(8, 1024, 16, 1024)
TOY_MODEL = GPTConfig(layers=2, hidden=512, heads=8, sequence=512)

# What is compared, all of it with every block computed again: plain PyTorch, the engine, and the engine with
# checkpoints in memory of their own.
SYSTEMS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "recompute": {"policy": "recompute"},
    "recompute, contiguous": {"policy": "recompute", "contiguous_memory_optimization": True},
}


def measure(system: str, config: GPTConfig, batch: int, steps: int, device: str = "cuda") -> Fragments:
    """Train a GPT-2 on batches of changing length, on a GPU or, as "simulated", on fake tensors."""
    with ExitStack() as stack:
        if device == "cuda":
            memory: Memory = CudaMemory()
            mesh = None
        else:
            fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            memory = simulated = stack.enter_context(Simulated())
            moved = Counter[str]()
            link = FakeLink(FakePool(fake, simulated), moved, shared=False)
            cpu = torch.device("cpu")
            mesh = Topology(SoloComm(), cpu, 0, 0, 1, link=lambda pin: link, open_store=partial(FakeStore, moved))  # type: ignore[arg-type]
        step = stack.enter_context(_training(system, config, batch, mesh, "cuda" if device == "cuda" else "cpu"))
        return over(step, lengths_of(config.sequence, steps), memory)


@contextmanager
def _training(system: str, config: GPTConfig, batch: int, mesh: Any, device: str) -> Iterator[Step]:
    block = SYSTEMS[system]
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(config)

    def ids_of(length: int) -> torch.Tensor:
        return torch.zeros(batch, length, dtype=torch.int64, device=device)

    if block is None:
        model.config = type(config)(**{**vars(config), "checkpoint_activations": True})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def plain(length: int, between: Callable[[], None]) -> None:
            ids = ids_of(length)
            loss = model(ids, ids)
            between()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        yield plain
        return
    settings = {
        "train_micro_batch_size_per_gpu": batch,
        "activation_checkpointing": {**block, "number_checkpoints": config.layers},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = wherry.initialize(model=model, config=settings, mesh=mesh)

    def trained(length: int, between: Callable[[], None]) -> None:
        ids = ids_of(length)
        loss = engine(ids, ids)
        between()
        engine.backward(loss)
        engine.step()

    try:
        yield trained
    finally:
        engine.close()
