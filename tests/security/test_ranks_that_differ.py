"""Ranks that were given different things, or hold different weights, are told: all of them, in the same words."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import adamw, make_model, settings, token_batch, train_step
from torch import nn

import wherry
from wherry import build
from wherry.errors import DivergenceError
from wherry.parallel.comm import Comm
from wherry.parallel.topology import Topology
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


def given(stage: int = 3) -> Given:
    """What every rank is given, unless a case says other."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage}}
    return {"model": model, "optimizer": optimizer, "config": config}


def refused(differ: Callable[[Given, int], object], words: str, ranks: int = 2, stage: int = 3) -> None:
    """Every rank is told so, by a DivergenceError of the same words."""

    def body(comm: Comm) -> str:
        mine = given(stage)
        differ(mine, comm.rank)
        with pytest.raises(DivergenceError) as told:
            wherry.initialize(mesh=comm, **mine)
        return str(told.value)

    said = run_ranks(ranks, body, timeout=20)
    assert len(set(said)) == 1, said
    assert said[0].startswith("initialize: the ranks differ: "), said
    assert words in said[0], said
    assert "give every rank the same" in said[0]


CONFIGS: list[tuple[Given, str]] = [
    ({"gradient_clipping": 0.5}, "gradient_clipping is 1.0 on rank 0 and 0.5 on rank 1;"),
    ({"bf16": {"enabled": True}}, "bf16.enabled is false on rank 0 and true on rank 1;"),
    ({"data_types": {"param_dtype": "bf16"}}, 'data_types.param_dtype is missing on rank 0 and "bf16" on rank 1;'),
    ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage is 3 on rank 0 and 2 on rank 1;"),
    ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage is 3 on rank 0 and 0 on rank 1;"),
    ({"zero_optimization": {"mics_shard_size": 1}}, "zero_optimization.mics_shard_size is -1 on rank 0 and 1"),
    ({"zero_optimization": {"zero_hpz_partition_size": 2}}, "zero_optimization.zero_hpz_partition_size is 1 on rank 0"),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, 'offload_optimizer.device is "none" on rank 0'),
    ({"activation_checkpointing": {"policy": "recompute"}}, "activation_checkpointing.policy is missing on rank 0"),
    (
        {"activation_checkpointing": {"nvme_path": "."}},
        "activation_checkpointing.nvme_path is missing on rank 0 and gi",
    ),
    ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is missing on rank 0 and 2 on rank 1;"),
    ({"optimizer": {"type": "SGD"}}, 'optimizer.type is missing on rank 0 and "SGD" on rank 1;'),
    ({"scheduler": {"type": "WarmupLR"}}, 'scheduler.type is missing on rank 0 and "WarmupLR" on rank 1;'),
    ({"wherry": {"update_policy": "before_use"}}, 'wherry.update_policy is "auto" on rank 0 and "before_use"'),
    ({"wherry": {"unit_classes": ["Linear"]}}, 'wherry.unit_classes is [] on rank 0 and ["Linear"] on rank 1;'),
    ({"wherry": {"compare_replicas": 5}}, "wherry.compare_replicas is missing on rank 0 and 5 on rank 1;"),
]


def test_configs_that_differ() -> None:
    for more, words in CONFIGS:

        def differ(mine: Given, rank: int, more: Given = more) -> None:
            mine["config"] = mine["config"] | more if rank else mine["config"]
            mine["config"]["zero_optimization"] = {"stage": 3} | mine["config"]["zero_optimization"]

        refused(differ, words)


def optimizers(first: Callable[[Given], Any], second: Callable[[Given], Any]) -> Callable[[Given, int], None]:
    def differ(mine: Given, rank: int) -> None:
        mine["optimizer"] = (second if rank else first)(mine)

    return differ


def adam(**options: Any) -> Callable[[Given], Any]:
    return lambda mine: torch.optim.AdamW(mine["model"].parameters(), **options)


def grouped(*names: str) -> Callable[[Given], Any]:
    """A group of these parameters, and one of the others."""

    def make(mine: Given) -> Any:
        inside = [p for name, p in mine["model"].named_parameters() if name in names]
        outside = [p for name, p in mine["model"].named_parameters() if name not in names]
        return torch.optim.AdamW([{"params": inside, "weight_decay": 0.0}, {"params": outside}])

    return make


def by_config(**params: Any) -> Callable[[Given], Any]:
    def make(mine: Given) -> None:
        mine["config"]["optimizer"] = {"type": "AdamW", "params": params}

    return make


OPTIMIZERS: list[tuple[Callable[[Given], Any], Callable[[Given], Any], str]] = [
    (adam(lr=1e-3), adam(lr=2e-3), "param_groups[0].lr is 0.001 on rank 0 and 0.002 on rank 1;"),
    (adam(weight_decay=0.1), adam(weight_decay=0), "param_groups[0].weight_decay is 0.1 on rank 0 and 0 on rank 1;"),
    (adam(betas=(0.9, 0.99)), adam(betas=(0.9, 0.95)), "betas is [0.9, 0.99] on rank 0 and [0.9, 0.95]"),
    (adam(amsgrad=True), adam(), "param_groups[0].amsgrad is True on rank 0 and False on rank 1;"),
    (adam(lr=torch.tensor(0.5)), adam(lr=torch.tensor(0.25)), "lr is 0.5 on rank 0 and 0.25 on rank 1;"),
    (adam(), lambda given: torch.optim.SGD(given["model"].parameters()), "torch.optim.adamw.AdamW on rank 0"),
    (adam(), lambda given: None, "optimizer is torch.optim.adamw.AdamW on rank 0 and missing on rank 1;"),
    (adam(), grouped("first.bias"), "the number of param_groups is 1 on rank 0 and 2 on rank 1;"),
    (grouped("first.bias"), grouped("second.bias"), "the param_group of first.weight is 1 on rank 0"),
    (grouped(), grouped("first.bias"), "the param_group of first.bias is 1 on rank 0 and 0 on rank 1;"),
    (lambda given: adamw, lambda given: torch.optim.AdamW, "lr is 0.003 on rank 0 and 0.001 on rank 1;"),
    (by_config(lr=1e-3), by_config(lr=1e-4), "optimizer.params.lr is 0.001 on rank 0 and 0.0001 on rank 1;"),
]  # fmt: skip


def test_optimizers_that_differ() -> None:
    for number, (first, second, words) in enumerate(OPTIMIZERS):
        stage = (0, 3)[number % 2]
        refused(optimizers(first, second), words.replace("first.weight is 1", "first.bias is 0"), stage=stage)


def schedules(first: Any, second: Any) -> Callable[[Given, int], None]:
    return lambda mine, rank: mine.update(lr_scheduler=(first, second)[rank])


RATES = torch.optim.lr_scheduler
SCHEDULES: list[tuple[Any, Any, str]] = [
    (lambda o: RATES.StepLR(o, 2), lambda o: RATES.ExponentialLR(o, 0.5), ".ExponentialLR on rank 1;"),
    (lambda o: RATES.StepLR(o, 2), None, "StepLR on rank 0 and missing on rank 1;"),
    (lambda o: RATES.CosineAnnealingLR(o, 10), lambda o: RATES.CosineAnnealingLR(o, 20), "lr_scheduler.T_max is 10 on"),
]


def test_schedules_that_differ() -> None:
    for first, second, words in SCHEDULES:
        refused(schedules(first, second), words, stage=1)


def wider(model: nn.Module) -> None:
    model.first = nn.Linear(6, 7)


def deeper(model: nn.Module) -> None:
    model.third = nn.Linear(6, 6)


def turned(model: nn.Module) -> None:
    model.first, first = nn.Identity(), model.first
    model._modules = {"second": model.second, "first": first}


def buffered(model: nn.Module) -> None:
    model.seen = torch.zeros(3)


MODELS: list[tuple[Callable[[nn.Module], object], str]] = [
    (wider, "parameter first.weight is (6, 6) torch.float32 on rank 0 and (7, 6) torch.float32 on rank 1;"),
    (deeper, "parameter third.weight is missing on rank 0 and (6, 6) torch.float32 on rank 1;"),
    (nn.Module.bfloat16, "first.weight is (6, 6) torch.float32 on rank 0 and (6, 6) torch.bfloat16 on rank 1;"),
    (lambda m: m.first.requires_grad_(False), "rank 0 and (6, 6) torch.float32 frozen on rank 1;"),
    (turned, "parameter first.weight comes before parameter second.weight on rank 0 and after it on rank 1;"),
    (buffered, "buffer seen is (2,) torch.float32 on rank 0 and (3,) torch.float32 on rank 1;"),
]


def test_models_that_differ() -> None:
    for number, (change, words) in enumerate(MODELS):

        def differ(mine: Given, rank: int, change: Callable[[nn.Module], object] = change) -> None:
            if rank:
                change(mine["model"])
            mine["optimizer"] = adamw

        refused(differ, words, stage=(3, 0)[number % 2])


@pytest.mark.parametrize("name", ["Wherry's version", "torch's version", "the number of pipeline stages"])
def test_versions_and_layouts_that_differ(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = build._described

    def described(*args: Any) -> Iterator[tuple[str, str]]:
        for key, value in real(*args):
            yield key, "other" if key == name and threading.current_thread().name == "rank1" else value

    monkeypatch.setattr(build, "_described", described)
    refused(lambda mine, rank: None, f"{name} is ")


def test_the_ranks_that_share_out_a_copy_differ() -> None:
    def body(comm: Comm) -> None:
        place = topology(comm)
        with pytest.raises(DivergenceError, match="share out one copy is 2 on rank 0 and 1 on rank 1"):
            wherry.initialize(mesh=place.divided(1) if comm.rank else place, **given())

    run_ranks(2, body)


def test_data_that_one_rank_alone_plans_by() -> None:
    def differ(mine: Given, rank: int) -> None:
        mine["config"] = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 0}}
        if rank:
            mine["training_data"] = [torch.ones(6)]

    refused(differ, "training_data is missing on rank 0 and given on rank 1;")


def test_of_many_ranks_the_one_that_differs_is_named() -> None:
    def differ(mine: Given, rank: int) -> None:
        mine["config"]["gradient_clipping"] = 2.0 if rank == 2 else 1.0

    refused(differ, "gradient_clipping is 1.0 on rank 0 and 2.0 on rank 2;", ranks=4)


def test_stages_of_a_pipeline_may_differ_and_the_ranks_of_one_may_not() -> None:
    def body(place: Topology, wrong: str) -> str:
        mine = given(stage=1)
        stage = place.pipe.rank
        if stage:
            mine["model"] = nn.Linear(6, 4)
        mine["optimizer"] = torch.optim.AdamW([{"params": [p]} for p in mine["model"].parameters()], lr=1e-3)
        if wrong == "lr" and place.global_rank == 3:
            mine["optimizer"].param_groups[1]["lr"] = 0.5
        if wrong == "config" and stage:
            mine["config"]["gradient_clipping"] = 0.5
        try:
            wherry.initialize(mesh=place, **mine)[0].close()
        except DivergenceError as error:
            return str(error)
        return ""

    assert run_grid(lambda place: body(place, ""), data=2, pipe=2) == [""] * 4
    for wrong, words in (
        ("lr", "param_groups[1].lr is 0.001 on rank 2 and 0.5 on rank 3;"),
        ("config", "gradient_clipping is 1.0 on rank 0 and 0.5 on rank 2;"),
    ):
        said = run_grid(lambda place, wrong=wrong: body(place, wrong), data=2, pipe=2)
        assert len(set(said)) == 1 and words in said[0], said


def test_what_ranks_may_have_each_for_themselves(tmp_path: Path) -> None:
    """What is written down and where, how disks are asked, and when somebody gives up."""

    def body(comm: Comm) -> None:
        mine = given()
        disk = {"device": "nvme", "nvme_path": str(tmp_path / str(comm.rank))}
        mine["config"] |= {
            "steps_per_print": 1 + comm.rank,
            "wall_clock_breakdown": comm.rank == 1,
            "csv_monitor": {"enabled": comm.rank == 0, "output_path": str(tmp_path / "csv")},
            "aio": {"queue_depth": 4 << comm.rank},
            "zero_optimization": {"stage": 3, "offload_optimizer": disk},
            "wherry": {"timeout_s": 50 + comm.rank, "run_dir": str(tmp_path / f"run{comm.rank}")},
        }
        (tmp_path / str(comm.rank)).mkdir()
        engine, *_ = wherry.initialize(mesh=comm, **mine)
        engine.backward(engine(torch.ones(2, 6)))
        engine.step()
        engine.close()

    run_ranks(2, body)


PROGRAM = """
import os, sys
import torch, wherry
rank = int(os.environ["RANK"])
model = torch.nn.Linear(64, 64)
config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "bf16": {"enabled": rank == 1}}
try:
    wherry.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
except wherry.WherryError as error:
    os.write(1, f"{type(error).__name__} {error}\\n".encode())  # whole: both ranks write to one pipe
"""


def test_processes_of_which_one_alone_has_bf16_are_told_before_the_transport_aborts(tmp_path: Path, forks: Any) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = forks.run(str(tmp_path / "program.py"), folder=tmp_path, ranks=2)
    told = done.stdout.splitlines()
    assert done.returncode == 0 and len(told) == 2 and told[0] == told[1], (done.stdout, done.stderr)
    assert "DivergenceError initialize: the ranks differ: bf16.enabled is false on rank 0 and true on rank 1" in told[0]


# What the ranks hold of the same weights.


def engine_on(place: Any, stage: int, more: Given | None = None, model: nn.Module | None = None) -> Any:
    mine = copy.deepcopy(model) if model is not None else make_model()
    trained = [p for p in mine.parameters() if p.requires_grad]
    return wherry.initialize(model=mine, optimizer=adamw(trained), config=settings(stage, more=more), mesh=place)[0]


def edit_whole(engine: Any) -> None:
    """One bit of one weight."""
    with torch.no_grad():
        engine.module.blocks[1].up.weight.view(-1).view(torch.int32)[3] ^= 1


def edit_shard(engine: Any) -> None:
    (flat,) = engine.units[2].flats
    with flat.opened(write=True) as shard:
        shard.view(torch.int32)[7] ^= 1


def edit_frozen(engine: Any) -> None:
    with torch.no_grad():
        engine.module.norm.weight[0] += 1


MICS = {"zero_optimization": {"mics_shard_size": 2}}
PERSISTENT = {"zero_optimization": {"stage3_param_persistence_threshold": 10**6}}
BF16 = {"bf16": {"enabled": True}}
APART: list[tuple[int, int, Given, Callable[[Any], None], str]] = [
    (0, 2, {}, edit_whole, "the whole of blocks.1 on rank 1 is not what it is on rank 0"),
    (1, 2, {}, edit_whole, "the whole of blocks.1 on rank 1 is not what it is on rank 0"),
    (2, 3, {}, edit_whole, "the whole of blocks.1 on rank 1 is not what it is on rank 0"),
    (3, 2, PERSISTENT, edit_whole, "the whole of blocks.1 on rank 1 is not what it is on rank 0"),
    (3, 4, MICS, edit_shard, "part 1 of 2 of blocks.1 on rank 3 is not what it is on rank 1"),
    (0, 2, BF16, edit_shard, "the whole of blocks.1 on rank 1 is not what it is on rank 0"),
    (0, 2, {}, edit_frozen, "the whole of root (float32, frozen) on rank 1 is not what it is on rank 0"),
]


@pytest.mark.parametrize(
    ("stage", "ranks", "more", "edit", "words", "call"),
    [(*case, ("save", "save_16bit", "interval")[number % 3]) for number, case in enumerate(APART)],
    ids=[f"{case[:3]} {case[4]}" for case in APART],
)
def test_weights_that_have_parted_are_told_of_before_anything_is_written(
    stage: int, ranks: int, more: Given, edit: Callable[[Any], None], words: str, call: str, tmp_path: Path
) -> None:
    model = make_model()
    model.norm.requires_grad_(edit is not edit_frozen)
    if call == "interval":
        more = more | {"wherry": {"compare_replicas": 2}}

    def body(comm: Comm) -> str:
        engine = engine_on(comm, stage, more, model)
        train_step(engine, 0, comm.rank)
        if comm.rank == (3 if edit is edit_shard and ranks == 4 else 1):
            edit(engine)
        with pytest.raises(DivergenceError) as told:
            if call == "save":
                engine.save_checkpoint(tmp_path / "c")
            elif call == "save_16bit":
                engine.save_16bit_model(tmp_path / "c")
            else:
                train_step(engine, 1, comm.rank)
        assert not list(tmp_path.iterdir())
        with wherry.gathered(engine.module, modifier_rank=0):
            pass
        engine.save_checkpoint(tmp_path / "c")
        return str(told.value)

    said = run_ranks(ranks, body)
    assert len(set(said)) == 1, said
    named = {"save": "save_checkpoint()", "save_16bit": "save_16bit_model()", "interval": "step 2"}[call]
    assert said[0].startswith(f"{named}: the ranks hold different weights: ") and words in said[0], said
    assert "load_checkpoint()" in said[0] and "modifier_rank=0" in said[0]


class Counting(nn.Module):
    """With statistics of its own data, and a part that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(6)) for _ in range(3))
        self.blocks[1][0].requires_grad_(False)
        self.out = nn.Linear(16, 29)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), targets.flatten())


HPZ = {"zero_optimization": {"zero_hpz_partition_size": 2}}
OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("policy", "stage", "more"),
    [("at_step", 3, HPZ), ("before_use", 2, OFFLOADED), ("in_backward", 0, {}), ("delayed", 3, MICS)],
)
def test_healthy_replicas_are_never_told_of(stage: int, more: Given, policy: str, tmp_path: Path) -> None:
    """With updates in flight, frozen parts, statistics of each rank's own data, and within a window."""
    if policy == "delayed":
        more = {"zero_optimization": more.get("zero_optimization", {}) | OFFLOADED["zero_optimization"]}
    own = {"wherry": {"update_policy": policy, "delayed_update_warmup": 1, "compare_replicas": 1}}

    def body(comm: Comm) -> None:
        engine = engine_on(topology(comm, Chaos(seed=comm.rank)), stage, more | own, model)
        for step in range(3):
            train_step(engine, step, comm.rank)
        with torch.no_grad():
            engine(*token_batch(9, 0, comm.rank))  # secondary shards are fresh
        engine.save_checkpoint(tmp_path / "c")
        engine.close()

    model = make_model(Counting)
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
    bits[1003:1024] += 1  # between spans is padding, which nobody compares
    assert checksum(flat, spans) == expected
    bits[[8, 12]] = bits[[12, 8]]
    assert checksum(flat, spans) != expected
