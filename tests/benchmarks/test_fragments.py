"""What an allocator holds and nobody uses: the model of torch's CUDA allocator, and the measure on top of it."""

import itertools
import random

import torch

from benchmarks import fragments
from benchmarks.fragments import MIB, CachingAllocator, Simulated
from wherry.train.model import GPTConfig


def test_segments_and_blocks_have_torchs_sizes():
    memory = CachingAllocator()
    memory.take(1)
    assert (memory.allocated, memory.reserved) == (512, 2 * MIB)  # a small one: its segment has room for more
    memory.take(MIB)
    assert memory.reserved == 2 * MIB
    memory.take(MIB + 1)
    assert memory.reserved == (2 + 20) * MIB
    memory.take(10 * MIB)
    assert memory.reserved == (2 + 20) * MIB  # behind the one before it
    memory.take(21 * MIB)
    assert memory.reserved == (2 + 20 + 22) * MIB  # in a segment of its own, to whole grains
    # What would be left is too small to be split off.
    assert memory.allocated == 512 + MIB + MIB + 512 + 10 * MIB + 22 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken():
    memory = CachingAllocator()
    small, apart, large = memory.take(3 * MIB), memory.take(2 * MIB), memory.take(15 * MIB)
    assert memory.reserved == 20 * MIB
    memory.give(large)
    memory.give(small)
    assert memory.take(2 * MIB) is small
    assert apart.before is small and small.size == 3 * MIB  # a megabyte is not split off


def test_neighbours_that_are_free_become_one():
    memory = CachingAllocator()
    blocks = [memory.take(5 * MIB) for _ in range(4)]
    for index in (1, 3, 2, 0):
        memory.give(blocks[index])
    memory.take(20 * MIB)
    assert (memory.allocated, memory.reserved, memory.highest) == (20 * MIB, 20 * MIB, 20 * MIB)


def test_no_byte_is_lost_or_lent_twice():
    memory, chooser, held = CachingAllocator(), random.Random(0), []
    for _ in range(2000):
        if held and chooser.random() < 0.5:
            memory.give(held.pop(chooser.randrange(len(held))))
        else:
            held.append(memory.take(chooser.choice([700, 90_000, 3 * MIB, 12 * MIB])))
        spans = sorted((block.address, block.address + block.size) for block in held)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert memory.allocated == sum(block.size for block in held) <= memory.reserved
    for block in held:
        memory.give(block)
    free = sum(size for pool in memory._free.values() for size, _, _ in pool)
    assert memory.allocated == 0 and free == memory.reserved


def test_tensors_of_the_cpu_are_followed():
    with Simulated() as memory:
        x = torch.zeros(MIB)
        y = x.view(2, -1) + 1
        assert memory.allocated == 8 * MIB
        del x, y
        assert memory.allocated == 0 and memory.highest == 8 * MIB and memory.reserved == 20 * MIB


def test_fragments_of_a_training_run_on_fake_tensors():
    config = GPTConfig(layers=2, hidden=512, heads=8, sequence=512, vocabulary=512)
    found = {name: fragments.measure(name, config, 16, 5, device="simulated") for name in fragments.SYSTEMS}
    for one in found.values():
        assert len(one.unused) == 5 and 0 < one.highest < one.reserved and one.excess > 0
        assert all(0 < unused < one.reserved for unused in one.unused)


def test_lengths_are_the_same_for_everyone():
    lengths = fragments.lengths_of(1024, 100)
    assert lengths == fragments.lengths_of(1024, 100) and len(set(lengths)) > 20
    assert min(lengths) >= 256 and max(lengths) <= 1024 and all(length % 8 == 0 for length in lengths)
