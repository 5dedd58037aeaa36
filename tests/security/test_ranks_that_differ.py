"""Ranks that have different arguments, or hold different weights, all raise a DivergenceError of the same words."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import adamw, engine_of, make_model, settings, train_step
from tests.models import ChannelsLast, vectors
from torch import nn

import wherry
from wherry.errors import DivergenceError
from wherry.parallel.comm import Comm
from wherry.sharding.replicas import checksum
from wherry.testing import run_ranks
from wherry.testing.late import Chaos, topology
from wherry.testing.ranks import run_grid

Given = dict[str, Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(2))


def given(stage: int) -> Given:
    """Arguments of every rank, unless a case changes them."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage}}
    return {"model": model, "optimizer": optimizer, "config": config}


def grouped(order: int) -> Callable[[Given], None]:
    """An optimizer of two groups, the other way around with -1."""

    def change(mine: Given) -> None:
        groups = [{"params": [p for p in mine["model"].parameters() if p.ndim == dims]} for dims in (1, 2)]
        mine["optimizer"] = torch.optim.AdamW(groups[::order])

    return change


def optimizer(make: Callable[..., Any], **options: Any) -> Callable[[Given], None]:
    return lambda mine: mine.update(optimizer=make(mine["model"].parameters(), **options))


def steps(size: int) -> Callable[[Given], None]:
    return lambda mine: mine.update(lr_scheduler=lambda built: torch.optim.lr_scheduler.StepLR(built, size))


def config(**blocks: Any) -> Callable[[Given], None]:
    return lambda mine: mine["config"].update(blocks)


def model(change: Callable[[nn.Module], object]) -> Callable[[Given], object]:
    return lambda mine: (change(mine["model"]), mine.update(optimizer=adamw))


PLANNED = config(train_micro_batch_size_per_gpu="auto")
# Changes of the arguments of rank 0 and of rank 1, and words of the error.
ROWS: list[tuple[Callable[[Given], Any], Callable[[Given], Any], str]] = [
    (config(), config(gradient_clipping=0.5), "gradient_clipping is 1.0 on rank 0 and 0.5 on rank 1;"),
    (config(), config(bf16={"enabled": True}), "bf16.enabled is false on rank 0 and true on rank 1;"),
    (config(), config(zero_optimization={"stage": 2}), "zero_optimization.stage is 3 on rank 0 and 2 on rank 1;"),
    (config(), config(optimizer={"type": "SGD"}), 'optimizer.type is missing on rank 0 and "SGD" on rank 1;'),
    (config(), config(wherry={"unit_classes": ["Net"]}), 'unit_classes is [] on rank 0 and ["Net"] on rank 1;'),
    (config(), optimizer(torch.optim.AdamW, lr=2e-3), "param_groups[0].lr is 0.001 on rank 0 and 0.002 on rank 1;"),
    (config(), optimizer(torch.optim.AdamW, lr=torch.tensor(0.5)), "lr is 0.001 on rank 0 and 0.5 on rank 1;"),
    (config(), optimizer(torch.optim.SGD), "torch.optim.adamw.AdamW on rank 0"),
    (config(), optimizer(lambda _: None), "optimizer is torch.optim.adamw.AdamW on rank 0 and missing on rank 1;"),
    (config(), grouped(1), "the number of param_groups is 1 on rank 0 and 2 on rank 1;"),
    (grouped(1), grouped(-1), "the param_group of first.weight is 1 on rank 0 and 0 on rank 1;"),
    (steps(2), config(), "StepLR on rank 0 and missing on rank 1;"),
    (steps(2), steps(3), "lr_scheduler.step_size is 2 on rank 0 and 3 on rank 1;"),
    (PLANNED, lambda mine: (PLANNED(mine), mine.update(training_data=[0])), "training_data is missing on rank 0"),
    (model(id), model(lambda m: setattr(m, "first", nn.Linear(6, 7))), "first.weight is (6, 6) torch.float32 on rank"),
    (model(id), model(lambda m: setattr(m, "third", nn.Linear(6, 6))), "parameter third.weight is missing on rank 0"),
    (model(id), model(nn.Module.bfloat16), "rank 0 and (6, 6) torch.bfloat16 on rank 1;"),
    (model(id), model(lambda m: m.first.requires_grad_(False)), "rank 0 and (6, 6) torch.float32 frozen on rank 1;"),
    (model(id), model(lambda m: setattr(m, "first", m._modules.pop("first"))), "first.weight comes before parameter"),
    (model(id), model(lambda m: setattr(m, "seen", torch.zeros(3))), "buffer seen is (2,) torch.float32 on rank 0"),
]


def initialized(mesh: Any, rank: int, changes: Sequence[Callable[[Given], Any]], stage: int) -> str:
    """Initialize a rank with changed arguments; return the error, if the ranks are said to differ."""
    mine = given(stage)
    changes[rank](mine)
    try:
        wherry.initialize(mesh=mesh, **mine)[0].close()
    except DivergenceError as error:
        return str(error)
    return "none"


def test_arguments_that_differ() -> None:
    for *changes, words in ROWS:
        stage = 0 if changes[0] is PLANNED else 3
        said = run_ranks(2, lambda comm: initialized(comm, comm.rank, changes, stage), timeout=20)  # noqa: B023
        assert len(set(said)) == 1, said
        assert said[0].startswith("initialize: the ranks differ: ") and words in said[0], (words, said)
        assert "give every rank the same" in said[0]


def test_stages_of_a_pipeline_may_differ_and_the_ranks_of_one_may_not() -> None:
    def last(lr: float = 0.001, **blocks: Any) -> Callable[[Given], None]:
        def change(mine: Given) -> None:
            mine["model"] = nn.Linear(6, 4)
            optimizer(torch.optim.AdamW, lr=lr)(mine)
            config(**blocks)(mine)

        return change

    clipped = last(gradient_clipping=0.5)
    for changes, words in (
        ((last(), last()), "none"),
        ((last(), last(lr=0.5)), "param_groups[0].lr is 0.001 on rank 2 and 0.5 on rank 3;"),
        ((clipped, clipped), "gradient_clipping is 1.0 on rank 0 and 0.5 on rank 2;"),
    ):
        by_rank = (config(), config(), *changes)
        said = run_grid(lambda place: initialized(place, place.global_rank, by_rank, 1), data=2, pipe=2)  # noqa: B023
        assert len(set(said)) == 1 and words in said[0], said


def test_arguments_that_may_differ(tmp_path: Path) -> None:
    """Logs and their places, the tuning of disks, and timeouts."""

    def own(rank: int) -> Callable[[Given], None]:
        (folder := tmp_path / str(rank)).mkdir()
        return config(
            steps_per_print=1 + rank,
            csv_monitor={"enabled": rank == 0, "output_path": str(tmp_path / "csv")},
            aio={"queue_depth": 4 << rank},
            zero_optimization={"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}},
            wherry={"timeout_s": 50 + rank, "run_dir": str(tmp_path / f"run{rank}")},
        )

    changes = own(0), own(1)
    assert run_ranks(2, lambda comm: initialized(comm, comm.rank, changes, 3)) == ["none", "none"]


# Weights of the same model that ranks hold.


def edit_whole(engine: Any) -> None:
    """Change one bit of one weight."""
    with torch.no_grad():
        engine.module.blocks[1].up.weight.view(-1).view(torch.int32)[3] ^= 1


def edit_shard(engine: Any) -> None:
    (flat,) = engine.units[2].flats
    with flat.opened(write=True) as shard:
        shard.view(torch.int32)[7] ^= 1


MICS = {"zero_optimization": {"mics_shard_size": 2}}
BF16 = {"bf16": {"enabled": True}}
EACH_STEP = {"wherry": {"compare_replicas": 2}}
WHOLE = "the whole of blocks.1 on rank 1 is not what it is on rank 0"
# Stage, ranks, config, edit of the last rank, words of the error, and the call that raises it.
APART: list[tuple[int, int, Given, Callable[[Any], None], str, str]] = [
    (2, 2, {}, edit_whole, WHOLE, "save_16bit_model()"),
    (3, 4, MICS | EACH_STEP, edit_shard, "part 1 of 2 of blocks.1 on rank 3 is not what it is on rank 1", "step 2"),
    (0, 2, BF16, edit_shard, WHOLE, "save_checkpoint()"),
]


@pytest.mark.parametrize(("stage", "ranks", "more", "edit", "words", "call"), APART)
def test_weights_that_differ_are_told_before_a_write(
    stage: int, ranks: int, more: Given, edit: Callable[[Any], None], words: str, call: str, tmp_path: Path
) -> None:
    def body(comm: Comm) -> str:
        engine = engine_of(copy.deepcopy(model), settings(stage, more=more), comm)
        train_step(engine, 0, comm.rank)
        if comm.rank == ranks - 1:
            edit(engine)
        with pytest.raises(DivergenceError) as told:
            if call == "step 2":
                train_step(engine, 1, comm.rank)
            else:
                getattr(engine, call[:-2])(tmp_path / "c")
        assert not list(tmp_path.iterdir())
        with wherry.gathered(engine.module, modifier_rank=0):
            pass
        engine.save_checkpoint(tmp_path / "c")
        return str(told.value)

    model = make_model()
    said = run_ranks(ranks, body)
    assert len(set(said)) == 1, said
    assert said[0].startswith(f"{call}: the ranks hold different weights: ") and words in said[0], said
    assert "load_checkpoint()" in said[0] and "modifier_rank=0" in said[0]


HPZ = {"zero_optimization": {"zero_hpz_partition_size": 2}}
OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(("policy", "stage", "more"), [("at_step", 3, HPZ), ("delayed", 2, OFFLOADED)])
def test_healthy_replicas_never_differ(stage: int, more: Given, policy: str, tmp_path: Path) -> None:
    """With updates in flight, and statistics of each rank's own data."""
    own = {"wherry": {"update_policy": policy, "delayed_update_warmup": 1, "compare_replicas": 1}}

    def body(comm: Comm) -> None:
        place = topology(comm, Chaos(seed=comm.rank))
        engine = engine_of(copy.deepcopy(model), settings(stage, more=more | own), place)
        for step in range(3):
            engine.backward(engine(*vectors(step, 0, comm.rank)))
            engine.step()
        with torch.no_grad():
            engine(*vectors(9, 0, comm.rank))  # secondary shards are fresh
        engine.save_checkpoint(tmp_path / "c")
        engine.close()

    model = make_model(ChannelsLast)
    run_ranks(4, body)


def test_every_word_and_every_byte_counts_in_a_sum_of_bits() -> None:
    flat = torch.randn(4096, dtype=torch.bfloat16)
    spans = [(0, 1003), (1024, 1025), (1056, 4096)]
    expected = checksum(flat, spans)
    bits = flat.view(torch.int16)
    for place, bit in itertools.product((0, 5, 1001, 1002, 1024, 1056, 4095), (1, 1 << 14)):
        bits[place] ^= bit
        assert checksum(flat, spans) != expected, place
        bits[place] ^= bit
    bits[1003:1024] += 1  # between spans is padding, which is not compared
    assert checksum(flat, spans) == expected
    bits[[8, 12]] = bits[[12, 8]]
    assert checksum(flat, spans) != expected
