"""Ranks that build the same model within `Init` send each other fingerprints of it, and not its weights."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.scale.test_init import STAGE3
from torch import nn

import wherry
from wherry.native import checksum
from wherry.parallel.comm import Comm
from wherry.parallel.threads import run_ranks
from wherry.sharding import fingerprint as fingerprints
from wherry.sharding.parts import SMALL, part_of

# What a rank changes of the weights it has drawn.
Change = Callable[[torch.Tensor], object]


class Leaf(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())  # nobody else holds it
        self.bias = nn.Parameter(torch.zeros(3))


class Mixed(nn.Module):
    """Weights from a generator of the rank's own: threads share torch's."""

    def __init__(self, seed: int, change: Change = lambda weight: None, changed: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.leaves = nn.ModuleList()
        for index, (dtype, *shape) in enumerate(
            [
                (torch.float32, 70, 61),
                (torch.float32, 9001),
                (torch.bfloat16, 5003),
                (torch.bfloat16, 3, 5, 701),
                (torch.float32, 64, 64),
            ]
        ):
            weight = torch.empty(shape, dtype=dtype).normal_(generator=generator)
            assert weight.nbytes > SMALL
            if index == changed:
                change(weight)
            self.leaves.append(Leaf(weight))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).clone()


def assert_values(model: nn.Module, expected: nn.Module) -> None:
    with wherry.gathered(model):
        for name, parameter in model.named_parameters():
            assert torch.equal(bits(parameter), bits(expected.get_parameter(name))), name


def built(comm: Comm, build: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, int], dict[str, int]]:
    """A model, and the calls and bytes of its collectives."""
    comm.traffic.clear()
    with wherry.Init(STAGE3, mesh=comm):
        model = build()
    assert all(not part_of(parameter).whole for parameter in model.parameters())
    return model, dict(comm.traffic.calls), dict(comm.traffic.bytes)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_weights_that_are_the_same_on_all_ranks_are_not_sent(ranks: int) -> None:
    plain = Mixed(0)

    def body(comm: Comm) -> None:
        model, calls, nbytes = built(comm, lambda: Mixed(0))
        assert_values(model, plain)
        # One word for each leaf and its bias.
        assert calls == {"all_reduce": len(plain.leaves)}, calls
        assert nbytes["all_reduce"] <= len(plain.leaves) * (2 * 2 + 12 + 16), nbytes

    run_ranks(ranks, body)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_draw_for_themselves_get_the_first_ones_values_and_compare_once(ranks: int) -> None:
    plain = Mixed(0)

    def body(comm: Comm) -> None:
        model, calls, nbytes = built(comm, lambda: Mixed(comm.rank))
        assert_values(model, plain)
        leaves = len(plain.leaves)
        assert calls == {"all_reduce": 1, "broadcast": leaves + leaves - 1}, calls
        assert nbytes["broadcast"] >= sum(leaf.weight.nbytes for leaf in plain.leaves)
        # Another context asks again, and so does this one when it is entered again.
        assert built(comm, lambda: Mixed(0))[1] == {"all_reduce": leaves}

    run_ranks(ranks, body)


def _one_bit(weight: torch.Tensor) -> None:
    weight.view(-1)[-1:].view(torch.uint8)[0] ^= 1


def _swapped(weight: torch.Tensor) -> None:
    flat = weight.view(-1)
    flat[-40:][[3, 30]] = flat[-40:][[30, 3]].clone()


def _signs_of_two(weight: torch.Tensor) -> None:
    weight.view(-1)[-20::12] *= -1


def _two_that_add_up(weight: torch.Tensor) -> None:
    """One bit is one more here, and one less there."""
    words = weight.view(-1).view(torch.int16)
    words[-9] += 1
    words[-3] -= 1


@pytest.mark.parametrize("changed", range(5))
@pytest.mark.parametrize("change", [_one_bit, _swapped, _signs_of_two, _two_that_add_up])
def test_the_least_difference_is_noticed(change: Change, changed: int) -> None:
    """Of the last rank, in what it keeps of the weight."""
    plain = Mixed(0)

    def body(comm: Comm) -> None:
        last = comm.rank == comm.size - 1
        model, calls, nbytes = built(comm, lambda: Mixed(0, change if last else lambda weight: None, changed))
        assert_values(model, plain)
        # The changed one, and those after it.
        sent = [leaf.weight.nbytes for leaf in plain.leaves][changed:]
        assert calls["all_reduce"] == changed + 1
        assert sum(sent) <= nbytes["broadcast"] <= sum(sent) + len(sent) * SMALL

    run_ranks(3, body)


def test_zeros_and_nans_are_told_by_their_bits() -> None:
    def odd(first: float, payload: int) -> Change:
        def change(weight: torch.Tensor) -> None:
            weight.view(-1)[-2] = first
            weight.view(-1)[-1:].view(torch.int32)[0] = payload

        return change

    first = odd(-0.0, 0x7FC00001)
    plain = Mixed(0, first)

    def body(comm: Comm) -> None:
        for others in (odd(0.0, 0x7FC00001), odd(-0.0, 0x7FC00002), odd(-0.0, 0x7FC00001)):
            model, calls, _ = built(comm, lambda others=others: Mixed(0, others if comm.rank else first))
            assert_values(model, plain)
        assert "broadcast" not in calls, "NaNs of the same bits are the same"

    run_ranks(2, body)


def test_a_weight_that_lies_in_another_order_is_sent_as_it_was() -> None:
    def turned(seed: int) -> nn.Module:
        values = torch.randn(61, 70, generator=torch.Generator().manual_seed(seed))
        return nn.Sequential(Leaf(values.t()), Leaf(values))

    def body(comm: Comm) -> None:
        model, calls, nbytes = built(comm, lambda: turned(0))
        assert_values(model, turned(0))
        # It and the word before it; the leaf after it is compared.
        assert calls == {"broadcast": 2, "all_reduce": 1} and nbytes["broadcast"] <= 4 * 61 * 70 + 16
        assert_values(built(comm, lambda: turned(comm.rank))[0], turned(0))

    run_ranks(2, body)


@pytest.mark.parametrize("holder", [None, 0, 1])
def test_what_one_rank_holds_is_not_compared(holder: int | None) -> None:
    """And what is sent for that reason does not end the comparing."""
    plain = Mixed(0)

    def build(rank: int) -> nn.Module:
        model = Mixed(0)
        with torch.no_grad():
            model.leaves[0].weight.mul_(1.0)
            held = model.leaves[0].weight.data if rank == holder else None
            model.leaves[1].weight.mul_(1.0)
            assert part_of(model.leaves[0].weight).whole == (holder == 0)
            del held
            model.leaves[2].weight.mul_(1.0)
            assert not part_of(model.leaves[0].weight).whole
        return model

    def body(comm: Comm) -> None:
        model, calls, _ = built(comm, lambda: build(comm.rank))
        assert_values(model, plain)
        assert calls.get("broadcast", 0) == (holder == 1), calls
        assert calls["all_reduce"] == len(plain.leaves) + 3, calls

    run_ranks(2, body)


def test_an_edit_that_ranks_make_in_their_own_way_is_the_first_ones() -> None:
    def build(value: float) -> nn.Module:
        model = Mixed(0)
        with torch.no_grad():
            model.leaves[-1].weight.fill_(value)
            model.leaves[0].weight[-1] = value
        return model

    run_ranks(2, lambda comm: assert_values(built(comm, lambda: build(5.0 + comm.rank))[0], build(5.0)))


# Fingerprints themselves.

WAYS = ["native", "host", "device"]


@pytest.fixture(params=WAYS)
def fingerprint(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor], int]:
    """All that there are, cut into pieces and rows of next to nothing."""
    if request.param == "native" and checksum._fast() is None:
        pytest.skip("without the library, or without the processor's help")
    monkeypatch.setattr(checksum, "_PIECE", 96)
    monkeypatch.setattr(fingerprints, "_COLUMNS", 4)
    monkeypatch.setattr(fingerprints, "_ROWS", 3)
    if request.param == "host":
        monkeypatch.setattr(checksum, "_fast", lambda: None)
    return fingerprints.on_device if request.param == "device" else fingerprints.fingerprint


@pytest.mark.parametrize("nbytes", [1, 3, 4, 15, 16, 17, 47, 48, 49, 95, 96, 97, 192, 333])
def test_any_change_of_a_bit_or_of_the_order_is_noticed(fingerprint: Any, nbytes: int) -> None:
    generator = torch.Generator().manual_seed(nbytes)
    memory = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    first = fingerprint(memory)
    assert 0 <= first < 1 << 64
    for offset in range(1, 5):
        room = torch.full((nbytes + 8,), 7, dtype=torch.uint8)
        room[offset : offset + nbytes] = memory
        assert fingerprint(room[offset : offset + nbytes]) == first, "wherever the bytes lie"
    found = {first}
    for place, bit in itertools.product(range(nbytes), range(8)):
        other = memory.clone()
        other[place] ^= 1 << bit
        found.add(fingerprint(other))
    assert len(found) == 1 + 8 * nbytes
    # Blocks of all sizes in each other's place: words, rows, pieces.
    for size in (1, 2, 4, 8, 16, 48, 96):
        blocks = memory[: nbytes // size * size].view(-1, size)
        for here, there in itertools.combinations(range(min(len(blocks), 12)), 2):
            if torch.equal(blocks[here], blocks[there]):
                continue
            other = memory.clone()
            swapped = other[: nbytes // size * size].view(-1, size)
            swapped[[here, there]] = blocks[[there, here]]
            assert fingerprint(other) != first, (size, here, there)


def test_signs_of_any_words_are_noticed(fingerprint: Any) -> None:
    """What is in the highest bit alone, an even number of times, is lost by sums that are too short."""
    words = torch.randint(-(2**31), 2**31, (40,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    first = fingerprint(words.view(torch.uint8))
    for here, there in itertools.combinations(range(40), 2):
        other = words.clone()
        other[[here, there]] ^= -(2**31)
        assert fingerprint(other.view(torch.uint8)) != first, (here, there)


def test_constants_differ(fingerprint: Any) -> None:
    found = {fingerprint(torch.full((192,), value, dtype=torch.uint8)) for value in range(256)}
    assert len(found) == 256


def test_the_device_computes_what_integers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modulo 2^64, in whichever pieces."""
    columns = 8
    monkeypatch.setattr(fingerprints, "_COLUMNS", columns)
    mask = (1 << 64) - 1

    def scrambled(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
        return value ^ value >> 31

    def step(place: int) -> int:
        return (place + 1) * 0x9E3779B97F4A7C15 & mask

    memory = torch.randint(0, 256, (1003,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    data = bytes(memory.tolist())
    data += bytes(-len(data) % (4 * columns))
    words = [int.from_bytes(data[at : at + 4], "little", signed=True) for at in range(0, len(data), 4)]
    factors = [scrambled(step(place)) | 1 for place in range(2 * columns)]
    sums = [
        sum(word * factor for word, factor in zip(words[at:], row, strict=False))
        for row in (factors[:columns], factors[columns:])
        for at in range(0, len(words), columns)
    ]
    expected = sum(scrambled((total + step(place)) & mask) for place, total in enumerate(sums)) & mask
    for rows in (1, 3, 1000):
        monkeypatch.setattr(fingerprints, "_ROWS", rows)
        assert fingerprints.on_device(memory) == expected


def test_the_greatest_claims_say_what_all_ranks_have_alike() -> None:
    rng = random.Random(0)
    values = [0, 1, (1 << 64) - 1, 1 << 63, 0x00FF00FF00FF00FF, *(rng.getrandbits(64) for _ in range(5))]
    for ranks in (1, 2, 3, 300):
        everybody = [[rng.choice(values[: 1 + place % 10]) for place in range(60)] for _ in range(ranks)]
        greatest = torch.stack([fingerprints.claims(mine) for mine in everybody]).max(0).values
        expected = [len(set(column)) == 1 for column in zip(*everybody, strict=True)]
        assert fingerprints.alike(greatest) == expected
        assert True in expected and (ranks == 1 or False in expected)
    assert fingerprints.alike(fingerprints.claims([])) == []


# Whole models, which `wherry.initialize` cuts.


@pytest.mark.parametrize("stage", [0, 3])
def test_whole_models_that_are_the_same_are_not_sent(stage: int) -> None:
    models = [Mixed(1) for _ in range(3)]

    def body(comm: Comm) -> None:
        comm.traffic.clear()
        engine, *_ = wherry.initialize(
            model=models[comm.rank], config={**STAGE3, "zero_optimization": {"stage": stage}}, mesh=comm
        )
        assert not comm.traffic.calls["broadcast"]
        assert comm.traffic.bytes["all_reduce"] < 1000
        state = engine.module.state_dict()
        for name, value in Mixed(1).state_dict().items():
            assert torch.equal(bits(state[name]), bits(value)), name

    run_ranks(3, body)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("alike", [True, False])
def test_of_whole_models_that_differ_the_first_ranks_counts(stage: int, alike: bool) -> None:
    def last(weight: torch.Tensor) -> None:
        weight.view(-1)[-1] += 1

    models = [Mixed(1), Mixed(1 if alike else 2, last if alike else lambda weight: None)]

    def body(comm: Comm) -> None:
        comm.traffic.clear()
        engine, *_ = wherry.initialize(
            model=models[comm.rank], config={**STAGE3, "zero_optimization": {"stage": stage}}, mesh=comm
        )
        assert comm.traffic.calls["broadcast"] >= 1
        state = engine.module.state_dict()
        for name, value in Mixed(1).state_dict().items():
            assert torch.equal(bits(state[name]), bits(value)), name

    run_ranks(2, body)
