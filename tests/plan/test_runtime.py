""" "auto" in a config takes the planner's way when the engine is built."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.engine.harness import TinyLM, engine_of, make_model, train_step
from tests.plan.measured import ALONE
from torch.utils.data import TensorDataset

import wherry
from wherry import config as configs
from wherry.errors import WherryError
from wherry.observe.memory import DeviceMemory
from wherry.parallel.comm import Comm, SoloComm
from wherry.plan import choose, machines, probe, rates, runtime
from wherry.plan.imagined import FakeComm
from wherry.testing import run_ranks
from wherry.tiers.disk import DiskSpaceError

AUTO = {"stage": "auto", "offload_optimizer": {"device": "auto"}, "stage3_param_persistence_threshold": 0, **ALONE}
DATA = TensorDataset(torch.zeros(64, 6, dtype=torch.int64), torch.zeros(64, 6, dtype=torch.int64))


def engine_config(ranks: int, config: dict[str, Any], model: Any, data: Any = None) -> dict[str, Any]:
    """Train a step and return the config of rank 0's engine, which is that of all."""

    def body(comm: Comm) -> dict[str, Any]:
        engine = engine_of(copy.deepcopy(model), config, comm, training_data=data)
        train_step(engine, 0, comm.rank)
        found = engine.config
        engine.close()
        return found

    found = run_ranks(ranks, body)
    assert all(each == found[0] for each in found)
    return found[0]


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the bytes of host memory that are free for states."""

    def free(count: int) -> None:
        monkeypatch.setattr(runtime, "free_host_memory", lambda *_: count)
        monkeypatch.setattr(machines, "PROCESS", 0)

    return free


def host(**rates: Any) -> machines.Machine:
    """Return the machine that steps are timed on, without a GPU if not said otherwise."""
    return replace(machines.KNOWN["4090"], **{"gpus": 0, "host_memory": 2 * 10**9, "overhead": 1e-6} | rates)


def settle(model: torch.nn.Module, config: dict[str, Any], data: Any = None, ranks: int = 1, **how: Any) -> Any:
    comm = FakeComm(0, ranks) if ranks > 1 else SoloComm()
    how = {"ranks_here": ranks, "device": torch.device("cpu"), **how}
    return runtime.settle(model, configs.load(config), comm, data=data, **how)


def test_less_memory_means_a_higher_stage_and_all_ranks_agree(free_memory):
    model = make_model(lambda: TinyLM(blocks=4, width=64))
    stages = []
    for memory in (2**24, 2**22):
        free_memory(memory)
        stages.append(engine_config(2, {"zero_optimization": AUTO}, model)["zero_optimization"]["stage"])
    assert stages[0] < stages[1]
    free_memory(10_000)
    with pytest.raises(WherryError, match="nothing fits"):
        engine_config(2, {"zero_optimization": AUTO}, model)


@pytest.mark.parametrize("data", [None, DATA])
def test_states_are_placed_in_the_memory_that_the_config_says_there_is(data, monkeypatch):
    """Where the memory of a machine grows as it is used, little of it is free."""
    real = psutil.virtual_memory
    monkeypatch.setattr(psutil, "virtual_memory", lambda: real()._replace(available=10_000))
    monkeypatch.setattr(runtime, "this_machine", lambda _: host(host_memory=10_000))
    with pytest.raises(WherryError, match="nothing fits"):
        settle(make_model(), {"zero_optimization": AUTO}, data, ranks=2)
    config = {"zero_optimization": AUTO, "wherry": {"host_memory": "20GB"}}
    assert settle(make_model(), config, data, ranks=2).zero_optimization.stage == 0


def test_what_was_given_stays_and_a_note_says_what_was_chosen_and_why(free_memory):
    free_memory(10**9)
    settled = settle(make_model(), {"zero_optimization": AUTO}, ranks=2)
    assert any("zero_optimization.stage: auto, chosen to be 0: everything fits whole" in note for note in settled.notes)
    assert settled.auto == ()
    assert settle(make_model(), {"zero_optimization": {**AUTO, "stage": 2}}).zero_optimization.stage == 2


def test_the_gpu_with_the_least_free_counts(monkeypatch):
    model, config = make_model(lambda: TinyLM(blocks=4, width=64)), configs.load({"zero_optimization": AUTO})

    def everything_fits_whole(*free: int) -> list[bool]:
        monkeypatch.setattr(runtime, "device_memory", lambda gpu: DeviceMemory(0, 0, free[gpu.index], 10**10))
        settled = run_ranks(
            2, lambda comm: runtime.settle(model, config, comm, torch.device("cuda", comm.rank), ranks_here=2)
        )
        return [any("everything fits whole" in note for note in each.notes) for each in settled]

    assert everything_fits_whole(10**9, 10**9) == [True, True]
    assert everything_fits_whole(10**9, 2**21) == [False, False]


class Pairs(torch.nn.Module):
    """Every sample meets every other: what is saved grows with the square of the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        return torch.nn.functional.cross_entropy(y @ y.t(), torch.arange(len(x), device=x.device))


def test_a_micro_batch_that_is_chosen_fits_by_a_profile_of_its_own(monkeypatch):
    """The search goes by a straight line from small micro-batches, far below what a large one keeps here."""
    monkeypatch.setattr(machines, "PROCESS", 0)
    monkeypatch.setattr(runtime, "this_machine", lambda _: host(host_memory=3 * 10**6, overhead=1e-3))
    chosen = settle(Pairs(), {choose.MICRO: "auto"}, TensorDataset(torch.zeros(4, 64))).batch(1).micro

    def fits(micro: int) -> bool:
        given = {choose.MICRO: micro}
        return wherry.estimate(lambda: (Pairs(), (torch.zeros(micro, 64),)), given, runtime.this_machine(None)).fits

    assert chosen >= 16 and fits(chosen) and not fits(2 * chosen)


def test_ranks_that_share_the_model_need_room_on_the_node_as_well(free_memory):
    """Four data-parallel ranks beside four others with the other half of each matrix: eight in one memory."""
    model = make_model(lambda: TinyLM(blocks=4, width=64))

    def stage(memory: int, tensor: int) -> int:
        free_memory(memory)
        found = settle(model, {"zero_optimization": AUTO}, ranks=4, ranks_here=4 * tensor, tensor=FakeComm(0, tensor))
        return found.zero_optimization.stage

    sizes = [each << 18 for each in (32, 8)]
    shared = [stage(8 * size, 2) for size in sizes]
    assert shared == [stage(4 * size, 1) for size in sizes]
    assert shared != [stage(8 * size, 1) for size in sizes]


def test_stages_of_a_pipeline_keep_the_batch_sizes_that_they_share(free_memory):
    """Each has other layers, and most of them other inputs than the data: by themselves they would choose apart."""
    free_memory(10**9)
    config = {"zero_optimization": AUTO, choose.MICRO: "auto", choose.ACCUMULATION: "auto"}
    for stage, blocks in enumerate((2, 3)):
        model, pipe = make_model(lambda blocks=blocks: TinyLM(blocks)), FakeComm(stage, 2)
        found = settle(model, config, DATA, ranks=2, ranks_here=4, pipe=pipe)
        assert found.zero_optimization.stage == 0
        assert (found.batch(2).micro, found.batch(2).accumulation) == (1, 1)
        assert set(found.auto) == {choose.MICRO, choose.ACCUMULATION}


def test_the_disk_is_chosen_where_memory_is_short_and_a_folder_is_given(tmp_path, free_memory):
    model = make_model(lambda: TinyLM(blocks=8, width=64))
    offload = {"device": "auto", "buffer_count": 1}
    zero = {"stage": "auto", "offload_optimizer": offload | {"nvme_path": str(tmp_path)}, "offload_param": offload}
    parameters = sum(p.numel() for p in model.parameters())
    devices = {}
    for width in (40, 16):  # bytes of a parameter that there is room for
        free_memory(int(width * parameters / runtime.FOR_STATES))
        found = engine_config(1, {"zero_optimization": zero}, model)["zero_optimization"]
        devices[width] = found["offload_optimizer"]["device"], found["offload_param"]["device"]
    assert devices == {40: ("none", "none"), 16: ("nvme", "none")}
    # There is no disk to choose without a folder, or for an optimizer that the host's kernels do not know.
    for config in (
        {"zero_optimization": zero | {"offload_optimizer": offload}},
        {"zero_optimization": zero, "optimizer": {"type": "Muon", "params": {"lr": 0.1}}},
        {"zero_optimization": zero, "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "amsgrad": True}}},
    ):
        with pytest.raises(WherryError, match="nothing fits"):
            settle(model, config)


class Spare(TinyLM):
    """A layer of it has no part in the loss."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.spare = torch.nn.LayerNorm(4)


def test_everything_that_is_chosen_may_be_auto_also_of_a_model_on_the_meta_device(monkeypatch):
    monkeypatch.setattr(runtime, "this_machine", lambda _: host())
    config: dict[str, Any] = {key: "auto" for key in choose.CHOSEN}
    config |= {choose.RECOMPUTE: "auto", "train_batch_size": 32}
    with torch.device("meta"):
        model = Spare()
    chosen = configs.load(engine_config(2, config, model, DATA))
    assert chosen.auto == () and chosen.batch(2).train == 32 and chosen.batch(2).micro > 1
    assert chosen.activation_checkpointing.policy == "auto"  # measured in the first steps


# --- the machine ---


def test_the_machine_is_measured_once_while_no_others_work(tmp_path, monkeypatch, caplog):
    cache, times, real = tmp_path / "cache", list[Path](), machines.KNOWN["4090"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(rates, "measure", lambda folder: times.append(folder) or replace(real, measured=True))
    worked = itertools.count(step=1000)
    monkeypatch.setattr(probe, "_others_worked", lambda: float(next(worked)))
    with caplog.at_level("WARNING", logger=probe.logger.name):
        assert probe.this_machine(tmp_path).busy
    assert "are measured again the next time" in caplog.text and not cache.exists()
    monkeypatch.setattr(probe, "_others_worked", lambda: 0.0)
    first, second = probe.this_machine(tmp_path), probe.this_machine(tmp_path)
    assert len(times) == 2
    assert first.measured and first.matrix == second.matrix == real.matrix
    # What is free is looked at each time.
    assert first.host_memory != real.host_memory
    probe.this_machine(tmp_path, again=True)
    assert len(times) == 3
    for file in (cache / "wherry").iterdir():
        file.write_text("{")
    probe.this_machine(tmp_path)
    assert len(times) == 4


def test_a_disk_that_cannot_be_measured_is_unknown(tmp_path, monkeypatch, caplog):
    def write(*_: Any) -> None:
        raise DiskSpaceError("it is full", 1, "there")

    monkeypatch.setattr(rates.DiskStore, "write", write)
    assert rates._disk(tmp_path) == rates.UNKNOWN_DISK
    assert f"the disk of {tmp_path} is not measured (" in caplog.text and "read 1 GB a second" in caplog.text


@pytest.mark.nightly
def test_rates_are_measured(tmp_path):
    before = torch.get_rng_state()
    found = rates.measure(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    seen = (found.matrix, found.matrix_fp32, found.stream, found.disk_read, found.disk_write, found.link)
    assert found.measured and all(rate > 1e6 for rate in seen)
    assert 1e-8 < found.overhead < 1e-2
    assert not list(tmp_path.iterdir())
    assert machines.Machine(**json.loads(json.dumps(asdict(found)))) == found


def test_a_machine_that_gains_or_loses_gpus():
    """Each rate is of what computes: nothing of the other is left."""
    with_gpus = machines.known("h100")
    host = machines.described(with_gpus, gpus=0, nodes=3)
    assert (host.gpus, host.gpu_memory, host.nodes) == (0, 0, 3)
    assert host.overhead == 3e-6 and host.network == machines.HOST_NETWORK
    assert host.device_stream == host.stream == with_gpus.stream
    back = machines.described(host, gpus=4, gpu_memory=24 * 10**9)
    a100 = machines.known("a100")
    assert (back.gpus, back.gpu_memory, back.nodes) == (4, 24 * 10**9, 3)
    for name in ("matrix", "device_stream", "pcie", "link", "network", "overhead"):
        assert getattr(back, name) == getattr(a100, name), name
    assert back.stream == host.stream and back.disk == host.disk
    assert machines.described(host, gpus=4).gpu_memory == 0
