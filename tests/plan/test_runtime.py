""" "auto" in a config takes the planner's way when the engine is built."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import TinyLM, adamw, make_model, token_batch
from torch.utils.data import TensorDataset

import wherry
from wherry import config as configs
from wherry.errors import WherryError
from wherry.observe.memory import DeviceMemory
from wherry.parallel.comm import Comm, SoloComm
from wherry.plan import choose, machines, probe, rates, runtime
from wherry.plan.forecaster import Forecaster
from wherry.plan.imagined import FakeComm
from wherry.testing import run_ranks
from wherry.tiers.disk import DiskSpaceError

AUTO = {"stage": "auto", "offload_optimizer": {"device": "auto"}, "stage3_param_persistence_threshold": 0}


def engine_config(ranks: int, config: dict[str, Any], model: Any = None, data: Any = None) -> list[dict[str, Any]]:
    given = model or make_model()

    def body(comm: Comm) -> dict[str, Any]:
        mine = copy.deepcopy(given)
        engine, *_ = wherry.initialize(
            model=mine, optimizer=adamw(mine.parameters()), config=config, mesh=comm, training_data=data
        )
        engine.backward(engine(*token_batch(0, 0, comm.rank)))
        engine.step()
        found = engine.config
        engine.close()
        return found

    return run_ranks(ranks, body)


Free = Callable[[int], None]
Host = Callable[..., None]
DATA = TensorDataset(torch.zeros(64, 6, dtype=torch.int64), torch.zeros(64, 6, dtype=torch.int64))


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> Free:
    """Set the bytes of host memory that are free for states."""

    def free(count: int) -> None:
        monkeypatch.setattr(runtime, "free_host_memory", lambda ranks: count)
        monkeypatch.setattr(machines, "PROCESS", 0)

    return free


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Host:
    """Set the machine that steps are timed on: without a GPU, if not said otherwise."""

    def change(**rates: Any) -> None:
        found = replace(machines.KNOWN["4090"], **{"gpus": 0, "host_memory": 2 * 10**9, "overhead": 1e-6} | rates)
        monkeypatch.setattr(runtime, "this_machine", lambda _: found)

    return change


def short() -> torch.nn.Module:
    """A dry run's time is that of its operations."""
    return make_model(lambda: TinyLM(blocks=1))


def settle(model: torch.nn.Module, config: dict[str, Any], data: Any = None, ranks: int = 1, **how: Any) -> Any:
    comm = FakeComm(0, ranks) if ranks > 1 else SoloComm()
    how = {"ranks_here": ranks, **how}
    return runtime.settle(model, configs.load(config), comm, torch.device("cpu"), data=data, **how)


def test_less_memory_means_a_higher_stage_and_all_ranks_agree(free_memory: Free) -> None:
    model = make_model(lambda: TinyLM(blocks=4, width=64))
    # So little a model would travel in one buffer, which is larger than what a stage saves.
    zero = AUTO | {"reduce_bucket_size": 0, "allgather_bucket_size": 0}
    stages = []
    for memory in (2**24, 5 * 2**20, 2**22, 3 * 2**20):
        free_memory(memory)
        try:
            found = engine_config(2, {"zero_optimization": zero}, model)
        except WherryError as error:
            assert "nothing fits" in str(error)
            break
        assert found[0] == found[1]
        stages.append(found[0]["zero_optimization"]["stage"])
    assert stages == sorted(stages)
    assert len(set(stages)) > 1


def test_with_data_the_gpu_with_the_least_free_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Seen(Forecaster):
        def __init__(self, source: Any, machine: machines.Machine, *more: Any, **how: Any) -> None:
            seen.append(machine.gpu_memory)
            super().__init__(source, machine, *more, **how)

    monkeypatch.setattr(runtime, "this_machine", lambda _: machines.KNOWN["4090"])
    monkeypatch.setattr(runtime, "device_memory", lambda gpu: DeviceMemory(0, 0, free=10**9, total=10**10))
    monkeypatch.setattr(runtime, "Forecaster", Seen)
    config = configs.load({"zero_optimization": AUTO})
    runtime.settle(short(), config, SoloComm(), torch.device("cuda", 0), ranks_here=1, data=DATA)
    assert seen == [10**9]


def test_what_does_not_fit_is_refused_on_every_rank(free_memory: Free) -> None:
    free_memory(10_000)
    with pytest.raises(WherryError, match="nothing fits"):
        engine_config(2, {"zero_optimization": AUTO})


def test_what_was_given_stays(free_memory: Free) -> None:
    free_memory(10**9)
    config = {"zero_optimization": {**AUTO, "stage": 2}, "train_micro_batch_size_per_gpu": 2}
    assert engine_config(2, config)[0]["zero_optimization"]["stage"] == 2


def test_no_auto_no_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("the planner was asked")

    monkeypatch.setattr(runtime, "settle", never)
    engine_config(1, {"zero_optimization": {"stage": 0}})


class Spare(TinyLM):
    """A layer of it has no part in the loss."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.spare = torch.nn.LayerNorm(4)


def test_a_model_on_the_meta_device_is_run_and_then_gets_its_values(machine: Host) -> None:
    machine()
    with torch.device("meta"):
        model = Spare()
    config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    engine, *_ = wherry.initialize(model=model, optimizer=adamw, config=config, training_data=DATA)
    assert torch.isfinite(engine(*token_batch(0, 0, 0)))


class Pairs(torch.nn.Module):
    """Every sample meets every other: what is saved grows with the square of the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        return torch.nn.functional.cross_entropy(y @ y.t(), torch.arange(len(x), device=x.device))


def test_a_micro_batch_that_is_chosen_fits_by_a_profile_of_its_own(
    monkeypatch: pytest.MonkeyPatch, machine: Host
) -> None:
    """The search goes by a straight line from small micro-batches, far below what a large one keeps here."""
    monkeypatch.setattr(machines, "PROCESS", 0)
    machine(host_memory=3 * 10**6, overhead=1e-3)
    data, asked = TensorDataset(torch.zeros(4, 64)), list[int]()

    class Asked(Forecaster):
        def exact(self, config: configs.Config) -> Any:
            asked.append(config.batch(1).micro)
            return super().exact(config)

    monkeypatch.setattr(runtime, "Forecaster", Asked)
    chosen = settle(Pairs(), {choose.MICRO: "auto"}, data).batch(1).micro

    def fits(micro: int) -> bool:
        given = {choose.MICRO: micro}
        return wherry.estimate(lambda: (Pairs(), (torch.zeros(micro, 64),)), given, runtime.this_machine(None)).fits

    assert fits(chosen) and not fits(2 * chosen)
    # The line told of at least one that is larger, and does not fit.
    assert max(asked) >= 2 * chosen >= 32


def test_ranks_that_share_the_model_need_room_on_the_node_as_well(free_memory: Free) -> None:
    """Four data-parallel ranks beside four others with the other half of each matrix: eight in one memory."""
    model = make_model(lambda: TinyLM(blocks=4, width=64))
    config = {"zero_optimization": AUTO | {"reduce_bucket_size": 0, "allgather_bucket_size": 0}}

    def stage(memory: int, tensor: int) -> int:
        free_memory(memory)
        found = settle(model, config, ranks=4, ranks_here=4 * tensor, tensor=FakeComm(0, tensor))
        return found.zero_optimization.stage

    sizes = [each << 18 for each in (32, 8)]
    shared = [stage(8 * size, 2) for size in sizes]
    assert shared == [stage(4 * size, 1) for size in sizes]
    assert shared != [stage(8 * size, 1) for size in sizes]


def test_stages_of_a_pipeline_keep_the_batch_sizes_that_they_share(free_memory: Free) -> None:
    """Each has other layers, and most of them other inputs than the data: by themselves they would choose apart."""
    free_memory(10**9)
    config = {"zero_optimization": AUTO, choose.MICRO: "auto", choose.ACCUMULATION: "auto"}
    for stage, blocks in enumerate((2, 3)):
        model, pipe = make_model(lambda blocks=blocks: TinyLM(blocks)), FakeComm(stage, 2)
        found = settle(model, config, DATA, ranks=2, ranks_here=4, pipe=pipe)
        assert found.zero_optimization.stage == 0
        assert (found.batch(2).micro, found.batch(2).accumulation) == (1, 1)
        assert set(found.auto) == {choose.MICRO, choose.ACCUMULATION}


@pytest.mark.long
def test_a_ratio_is_chosen_where_a_step_can_be_timed(machine: Host) -> None:
    """The host's update takes longest by far: as little of the state as planners try is left to it."""
    given = {"offload_optimizer": {"device": "cpu", "ratio": "auto"}}

    def settled(stream: float, data: Any) -> configs.Config:
        known = machines.KNOWN["4090"]
        # Computing takes longer than copies.
        machine(gpus=1, host_memory=known.host_memory, overhead=known.overhead, stream=stream, matrix_fp32=1e8)
        return settle(make_model(), {"zero_optimization": given, "gradient_clipping": 1.0}, data)

    slow, fast, untimed = settled(1e6, DATA), settled(1e15, DATA), settled(1e6, None)
    assert slow.zero_optimization.offload_optimizer.ratio == 0.25
    assert any("ratio: auto, chosen to be 0.25: the other 75% of the state is updated" in note for note in slow.notes)
    assert fast.zero_optimization.offload_optimizer.ratio == 1.0 == untimed.zero_optimization.offload_optimizer.ratio
    assert slow.auto == fast.auto == () and untimed.auto == ("zero_optimization.offload_optimizer.ratio",)


def test_the_disk_is_chosen_where_memory_is_short_and_a_folder_is_given(tmp_path: Path, free_memory: Free) -> None:
    model = make_model(lambda: TinyLM(blocks=8, width=64))
    offload = {"device": "auto", "buffer_count": 1}
    zero = {"stage": "auto", "offload_optimizer": offload | {"nvme_path": str(tmp_path)}, "offload_param": offload}
    parameters = sum(p.numel() for p in model.parameters())
    devices = {}
    for width in (40, 16):  # bytes of a parameter that there is room for
        free_memory(int(width * parameters / runtime.FOR_STATES))
        found = engine_config(1, {"zero_optimization": zero}, model)[0]["zero_optimization"]
        devices[width] = found["offload_optimizer"]["device"], found["offload_param"]["device"]
    assert devices == {40: ("none", "none"), 16: ("nvme", "none")}
    # Without a folder there is no disk to choose.
    with pytest.raises(WherryError, match="nothing fits"):
        engine_config(1, {"zero_optimization": zero | {"offload_optimizer": offload}}, model)


def test_everything_that_is_chosen_may_be_auto(machine: Host) -> None:
    machine()
    config: dict[str, Any] = {}
    for key in choose.CHOSEN:
        config[key] = "auto"
    config |= {choose.RECOMPUTE: "auto", "train_batch_size": 32}
    model = short()
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = engine_config(2, config, model, DATA)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert found[0] == found[1]
    chosen = configs.load(found[0])
    assert chosen.auto == () and chosen.batch(2).train == 32 and chosen.batch(2).micro > 1
    assert chosen.activation_checkpointing.policy == "auto"  # measured in the first steps


def test_a_note_says_what_was_chosen_and_why(free_memory: Free) -> None:
    free_memory(10**9)
    config = configs.load({"zero_optimization": AUTO})
    settled = run_ranks(2, lambda comm: runtime.settle(make_model(), config, comm, torch.device("cpu"), ranks_here=2))[
        1
    ]
    assert any("zero_optimization.stage: auto, chosen to be 0: everything fits whole" in note for note in settled.notes)
    assert settled.auto == ()


def test_the_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    times = []
    real = machines.KNOWN["4090"]

    def measured(folder: Path) -> machines.Machine:
        times.append(folder)
        return replace(real, measured=True)

    monkeypatch.setattr(rates, "measure", measured)
    monkeypatch.setattr(probe, "_others_worked", lambda: 0.0)
    first, second = probe.this_machine(tmp_path), probe.this_machine(tmp_path)
    assert len(times) == 1
    assert first.measured and first.matrix == second.matrix == real.matrix
    # What is free is looked at each time.
    assert first.host_memory != real.host_memory
    probe.this_machine(tmp_path, again=True)
    assert len(times) == 2
    for file in (tmp_path / "cache" / "wherry").iterdir():
        file.write_text("{")
    probe.this_machine(tmp_path)
    assert len(times) == 3


def test_what_was_measured_while_others_worked_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(rates, "measure", lambda folder: machines.known("4090"))
    worked = itertools.count(step=1000)
    monkeypatch.setattr(probe, "_others_worked", lambda: float(next(worked)))
    with caplog.at_level("WARNING", logger=probe.logger.name):
        assert probe.this_machine(tmp_path).busy
    assert "are measured again the next time" in caplog.text
    assert not (tmp_path / "cache").exists()


@pytest.mark.nightly
def test_rates_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typical = rates._typical
    monkeypatch.setattr(rates, "_typical", lambda work, device, seconds=0.0: typical(work, device, 0.0))
    before = torch.get_rng_state()
    found = rates.measure(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    seen = (found.matrix, found.matrix_fp32, found.stream, found.disk_read, found.disk_write, found.link)
    assert found.measured and all(rate > 1e6 for rate in seen)
    assert 1e-8 < found.overhead < 1e-2
    assert not list(tmp_path.iterdir())
    assert machines.Machine(**json.loads(json.dumps(asdict(found)))) == found


@pytest.mark.parametrize("error", [OSError("the disk is gone"), DiskSpaceError("it is full", 1, "there")])
def test_a_disk_that_cannot_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(rates.DiskStore, "write", fails)
    with caplog.at_level("WARNING", logger=rates.logger.name):
        assert rates._disk(tmp_path) == rates.UNKNOWN_DISK
    assert f"is not measured ({error})" in caplog.text


def test_a_machine_that_gains_or_loses_gpus() -> None:
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
