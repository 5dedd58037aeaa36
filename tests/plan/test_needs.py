"""What a plan says of host memory and disk, what an engine asks for at its start, and what it then has: one figure."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plan.test_tiers import placed
from tests.tiers.rows import ROWS
from torch import nn

import wherry
from wherry import config as configs
from wherry.config import Config
from wherry.errors import WherryError
from wherry.offload import Offload, _Needs
from wherry.parallel.comm import Comm
from wherry.parallel.threads import run_ranks
from wherry.parallel.topology import Topology
from wherry.placement import Tier
from wherry.plan import choose, machine, peaks
from wherry.plan import setting as setting_room
from wherry.plan.estimate import Estimate, Subject, estimate
from wherry.plan.imagined import FakeComm, FakeLink, FakeStore
from wherry.plan.machine import Machine, known
from wherry.plan.profile import Profile
from wherry.plan.setting import Setting
from wherry.plan.units import unit_sizes
from wherry.sharding.grouping import plan_units
from wherry.tiers import budget
from wherry.tiers.budget import HostMemoryError
from wherry.tiers.buffers import HostPool
from wherry.tiers.disk_errors import DiskSpaceError
from wherry.tiers.homes import Shelf
from wherry.update import optimizer_states
from wherry.update.optimizer import Lion, describe

READ = ("optimizer read", "parameters read")
ON_DISK = [row for row, (_, *tiers) in ROWS.items() if "nvme" in tiers]


class Blocks(nn.Module):
    """Units of one size, and nothing outside them."""

    def __init__(self, width: int, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def on_meta(*args: Any) -> nn.Module:
    with torch.device("meta"):
        return Blocks(*args)


class Disk(FakeStore):
    """With so much room."""

    def __init__(self, room: int, paths: Any, **_: Any) -> None:
        super().__init__(paths)
        self.room = room

    def check_free(self, nbytes: int) -> None:
        if nbytes > self.room:
            raise DiskSpaceError("too small", nbytes - self.room, self.paths[0])


def tiering(
    model: nn.Module,
    config: Config,
    ranks: int,
    *,
    gpu: bool,
    disk: int = 10**15,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
) -> Offload:
    topology = Topology(
        FakeComm(0, ranks),
        torch.device("cpu"),
        0,
        0,
        ranks,
        link=lambda pin: FakeLink(HostPool(), shared=not gpu),  # type: ignore[arg-type]
        open_store=partial(Disk, disk),  # type: ignore[arg-type]
    ).divided(config.shard_ranks(ranks))
    spec = describe(optimizer(model.parameters()), state_dtype=config.state_dtype())
    return Offload(config, config.placement(), topology, spec, trainable=sum(p.numel() for p in model.parameters()))


def starts(model: nn.Module, config: Config, ranks: int, *, gpu: bool, disk: int = 10**15) -> bool:
    """What the engine's check before it makes any state comes to."""
    checked = tiering(model, config, ranks, gpu=gpu, disk=disk)
    try:
        checked.check_room(plan_units(model))
    except (HostMemoryError, DiskSpaceError):
        return False
    finally:
        checked.close()
    return True


SETTINGS: list[dict[str, Any]] = [
    {"clip": 1.0},
    {"clip": 0.0},  # updates in the backward
    {"clip": 0.0, "accumulation": 3},
    {"wherry": {"update_policy": "at_step"}},
    {"wherry": {"update_policy": "delayed"}},
    {"data_types": {"grad_accum_dtype": "fp32"}, "accumulation": 2},
    {"wherry": {"state_dtype": "int8"}},
    {"wherry": {"master": "whole"}, "ratio": 0.4},
    {"precision": "fp16"},
    {"precision": "fp32", "communication_data_type": "bf16"},
]


@pytest.mark.parametrize("more", SETTINGS, ids=str)
def test_a_plan_asks_for_what_an_engine_asks_for_at_its_start(
    more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the host and of the disk, to the byte: in every placement, with a device of its own and without."""
    monkeypatch.setattr(setting_room, "BUCKET_NUMEL", 5000)
    model = on_meta(64, 12)
    found = Profile.of_sizes(unit_sizes(model), 1)
    for row, (_, optimizer, _) in ROWS.items():
        if optimizer == "none" and more.get("wherry", {}).get("update_policy") == "delayed":
            continue
        given = configs.load(placed(row, tmp_path, **copy.deepcopy(more)))
        for gpu in (False, True):
            for ranks in (1, 4):
                setting = Setting.of(given, ranks, gpu=gpu)
                needs = _Needs(tiering(model, given, ranks, gpu=gpu), plan_units(model))
                assert needs.on_host(given.placement()) == setting.host_needs(found), (row, gpu, ranks)
                rows = setting.rows(found)
                assert {state for state, *_ in rows if state in READ} == {
                    state for state, tier in zip(READ, ROWS[row][1:], strict=True) if tier == "nvme"
                }, row
                for state in ("parameters", "optimizer"):
                    told = sum(nbytes for name, tier, nbytes in rows if (name, tier) == (state, Tier.DISK))
                    assert needs.on_disk(given.placement(), state) == told, (row, gpu, ranks)


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
def test_what_just_fits_starts_and_a_byte_less_does_not(
    gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, model = 2, on_meta(256, 12)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    found = Profile.of_sizes(unit_sizes(model), 2)
    host = replace(known("4090"), gpus=2 if gpu else 0)

    def fits(config: Config) -> bool:
        told = estimate(Subject("blocks"), found, config, host, ranks).fits
        assert told == starts(model, config, ranks, gpu=gpu)
        return told

    for row in ROWS:
        given = configs.load(placed(row, tmp_path))
        needs = ranks * Setting.of(given, ranks, gpu=gpu).host_needs(found)
        assert fits(configs.load(given, overrides={"wherry.host_memory": needs})), row
        assert not fits(configs.load(given, overrides={"wherry.host_memory": needs - 1})), row


def held_by_engines(
    given: dict[str, Any], ranks: int, monkeypatch: pytest.MonkeyPatch, steps: int = 3
) -> list[tuple[dict[tuple[str, str], tuple[int, int]], dict[str, int]]]:
    """By rank: rows of `engine.memory()`, promised and held, and the most that each shelf has had in memory."""
    take, model = Shelf.take, Blocks(128)

    def seen(shelf: Shelf, nbytes: int) -> torch.Tensor:
        buffer = take(shelf, nbytes)
        shelf.most = max(vars(shelf).get("most", 0), shelf.held)  # type: ignore[attr-defined]
        return buffer

    monkeypatch.setattr(Shelf, "take", seen)
    inputs = torch.randn(2, 128)

    def body(comm: Comm) -> tuple[dict[tuple[str, str], tuple[int, int]], dict[str, int]]:
        engine, *_ = wherry.initialize(model=copy.deepcopy(model), config=given, mesh=comm, optimizer=torch.optim.AdamW)
        shelves = {"optimizer read": "_records_shelf", "parameters read": "_weights_shelf"}
        found = {name: getattr(engine._offload, shelf) for name, shelf in shelves.items()}
        for shelf in found.values():
            if shelf is not None:
                shelf.most = 0  # of training, not of its beginning
        for _ in range(steps):
            engine.backward(engine(inputs.to(torch.bfloat16)))
            engine.step()
        rows = {(row.state, row.tier): (row.bytes_expected, row.bytes_actual) for row in engine.memory()}
        engine.settle()
        most = {name: shelf.most for name, shelf in found.items() if shelf is not None}
        engine.close()
        return rows, most

    return run_ranks(ranks, body)


@pytest.mark.parametrize(
    ("policy", "ranks"),
    [("at_step", 1), ("at_step", 2), ("at_step", 4), ("before_use", 2), ("in_backward", 2), ("delayed", 2)],
)
def test_what_is_read_from_disk_takes_what_was_planned(
    policy: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 3 % where updates are made in the step. Beside it they may be fewer at a time, and never more."""
    for module in (setting_room, optimizer_states):
        monkeypatch.setattr(module, "BUCKET_NUMEL", 1)
    for row in ON_DISK:
        if policy == "delayed" and ROWS[row][1] == "none":
            continue
        own = {"update_policy": policy, "delayed_update_warmup": 1}
        given = placed(row, tmp_path, clip=0.0, wherry=own)
        for block, count in (("offload_optimizer", 2), ("offload_param", 3)):
            given["zero_optimization"][block]["buffer_count"] = count
        setting, found = Setting.of(configs.load(given), ranks), Profile.of_sizes(unit_sizes(Blocks(128)), 2)
        for rank, (rows, most) in enumerate(held_by_engines(given, ranks, monkeypatch)):
            told: defaultdict[tuple[str, str], int] = defaultdict(int)
            for state, tier, nbytes in setting.rows(found, rank):
                told[state, str(tier)] += nbytes
            for name, held in most.items():
                planned = told[name, "host"]
                assert rows[name, "host"][0] == pytest.approx(planned, rel=0.03), (row, name)
                assert held <= 1.03 * planned, (row, name)
                if policy == "at_step":
                    assert held == pytest.approx(planned, rel=0.03), (row, name)
            if policy == "delayed":
                for place in (("gradients", "host"), ("parameters to come", "host")):
                    promised, _ = rows.get(place, (0, 0))
                    assert promised == pytest.approx(told[place], rel=0.03), (row, place)


def random_case(chance: random.Random) -> tuple[nn.Module, dict[str, Any], int, Machine]:
    """A small model, a config that leaves its placement open, ranks, and a machine on which it is tight."""
    model = on_meta(chance.choice([48, 64, 96, 200]), chance.randint(1, 12))
    ranks = chance.choice([1, 2, 3, 4, 8])
    states = 16 * sum(p.numel() for p in model.parameters())
    zero: dict[str, Any] = {
        "stage3_param_persistence_threshold": chance.choice([0, 5000]),
        "offload_optimizer": {"device": "auto", "buffer_count": chance.randint(1, 5)},
        "offload_param": {"device": "auto", "buffer_count": chance.randint(1, 5)},
    }
    if chance.random() < 0.7:
        zero["offload_param"]["max_in_cpu"] = chance.choice([0, 10_000])
    config: dict[str, Any] = {
        "zero_optimization": zero,
        "gradient_clipping": chance.choice([0.0, 1.0]),
        "gradient_accumulation_steps": chance.choice([1, 1, 2]),
        "bf16": {"enabled": chance.random() < 0.7},
    }
    if chance.random() < 0.3:
        zero["mics_shard_size"] = chance.choice([size for size in (1, 2, ranks) if ranks % size == 0])
    gpus = chance.choice([0, ranks])
    host = replace(
        known("4090"),
        gpus=gpus,
        gpu_memory=int(states * chance.uniform(0.05, 1.5)) if gpus else 0,
        host_memory=int(states * chance.uniform(0.1, 2.5) * (1 if gpus else ranks)),
        disk=int(states * chance.choice([0.5, 2.0, 100.0])),
    )
    return model, config, ranks, host


def picked(chance: random.Random, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Where the optimizer rests by what is picked, None if nothing fits; an engine is asked about all that is tried."""
    model, given, ranks, host = random_case(chance)
    together = chance.choice([1, 10_000, 1 << 18])
    for module in (setting_room, peaks):
        monkeypatch.setattr(module, "BUCKET_NUMEL", together)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(budget, "free_host_memory", partial(host.capacity, Tier.HOST, ranks))
    config, found = configs.load(given), Profile.of_sizes(unit_sizes(model), 1)

    def starting(config: Config) -> bool:
        return starts(model, config, ranks, gpu=host.gpus > 0, disk=host.capacity(Tier.DISK, ranks))

    def answer(config: Config) -> Estimate:
        told = estimate(Subject("blocks"), found, config, host, ranks)
        fits = all(use.fits for use in told.uses if use.place != "GPU")
        # Without a device of its own a plan asks for more: for the buffers of a step.
        assert fits == starting(config) or (not fits and not host.gpus), (given, config.placement(), host)
        return told

    free = choose.free_keys(config) & {choose.STAGE, choose.OPTIMIZER, choose.PARAM, choose.RATIO}
    try:
        choice = choose.choose(config, answer, ranks, free=free, disk=str(folder))
    except WherryError as error:
        assert "nothing fits" in str(error)
        return None
    settled = configs.load(config, overrides=choice.values)
    assert choice.estimate.fits and starting(settled)
    return settled.zero_optimization.offload_optimizer.device


def test_whatever_is_picked_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan says fits an engine accepts on such a machine; with a device of its own, that and nothing else."""
    monkeypatch.setattr(machine, "PROCESS", 0)
    chance = random.Random(1)
    assert {picked(chance, tmp_path, monkeypatch) for _ in range(20)} == {None, "none", "cpu", "nvme"}


def test_a_share_on_the_device_is_picked_where_the_host_has_no_room_for_all(tmp_path: Path) -> None:
    model = on_meta(1024, 40)
    numel, found = sum(p.numel() for p in model.parameters()), Profile.of_sizes(unit_sizes(model), 1)
    given = {"bf16": {"enabled": True}, "gradient_clipping": 1.0}
    host = replace(known("4090"), gpu_memory=12 * numel, host_memory=10 * numel + machine.PROCESS)

    def answer(config: Config) -> Estimate:
        return estimate(Subject("blocks"), found, config, host, 1)

    config = configs.load(given)
    placing = frozenset({choose.STAGE, choose.OPTIMIZER, choose.PARAM})
    with pytest.raises(WherryError, match="nothing fits"):
        choose.choose(config, answer, 1, free=placing)
    choice = choose.choose(config, answer, 1, free=placing | {choose.RATIO})
    assert choice.estimate.fits and 0 < choice.values[choose.RATIO] < 1
    assert "is updated on the device" in choice.reasons[choose.RATIO]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
    "lion": Lion,
    "rmsprop": torch.optim.RMSprop,  # counted as if it had two moments
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers_and_frozen_parameters(name: str, tmp_path: Path) -> None:
    model = on_meta(64, 12)
    for parameter in list(model.parameters())[:9]:
        parameter.requires_grad = False
    plans, found = plan_units(model), Profile.of_sizes(unit_sizes(model), 1)
    for row in ("offload-2", "disk-3-parameters", "disk-parameters"):
        if name == "rmsprop" and "disk-3" in row:
            continue  # its state cannot rest there
        given = configs.load(placed(row, tmp_path))
        for gpu in (False, True):
            needs = _Needs(tiering(model, given, 2, gpu=gpu, optimizer=OPTIMIZERS[name]), plans)
            assert needs.on_host(given.placement()) == Setting.of(given, 2, name, gpu=gpu).host_needs(found), (row, gpu)


def test_a_change_that_does_not_hold_is_passed_over_for_the_next() -> None:
    """The search's answer is quick: what it likes most may not fit by the exact one."""
    model = on_meta(1024, 40)
    numel, found = sum(p.numel() for p in model.parameters()), Profile.of_sizes(unit_sizes(model), 1)
    host, config = replace(known("4090"), gpus=2, gpu_memory=14 * numel), configs.load({"bf16": {"enabled": True}})
    asked: list[Config] = []

    def answer(config: Config) -> Estimate:
        return estimate(Subject("blocks"), found, config, host, 2)

    def refusing(config: Config) -> Estimate:
        asked.append(config)
        told = answer(config)
        return told if len(asked) > 1 else replace(told, uses=tuple(replace(use, usable=0) for use in told.uses))

    now = answer(config)
    assert not now.fits
    liked, change = (choose.nearest_change(config, now, answer, confirm) for confirm in (answer, refusing))
    assert liked is not None and change is not None and len(asked) == 2
    assert change.estimate.fits and change.values != liked.values
    nothing = choose.nearest_change(config, now, answer, lambda config: now)
    assert nothing is None


@pytest.mark.parametrize("row", ["offload-2", "offload-3", "offload-3-parameters", "disk-3-parameters"])
def test_a_number_of_parameters_has_the_records_of_a_model_with_as_many(row: str, tmp_path: Path) -> None:
    """Beside a GPU the host's records have copies of the weights; a share of them may stay on the device."""
    model, ranks = on_meta(1024, 40), 2
    numel, found = sum(p.numel() for p in model.parameters()), Profile.of_sizes(unit_sizes(model), 1)

    def on_tier(rows: Any, gpu: bool) -> dict[str, int]:
        told: defaultdict[str, int] = defaultdict(int)
        for state, tier, nbytes in rows:
            told[str(tier) if gpu or str(tier) == "disk" else "host"] += nbytes if state == "optimizer" else 0
        return {tier: nbytes for tier, nbytes in told.items() if nbytes}

    for gpu in (True, False):
        for ratio in (1.0, 0.5):
            given = configs.load(placed(row, tmp_path, ratio=ratio))
            where = replace(known("4090"), gpus=ranks if gpu else 0)
            counted = wherry.estimate(numel, given, where, ranks=ranks)
            by_count = on_tier(((each.category, each.tier, each.bytes) for each in counted.rows), gpu)
            by_model = on_tier(Setting.of(given, ranks, gpu=gpu).rows(found), gpu)
            assert by_count == pytest.approx(by_model, rel=0.03), (gpu, ratio)
            if (row, gpu, ratio) == ("offload-2", True, 1.0):
                assert by_count == {"host": 12 * numel // ranks}
