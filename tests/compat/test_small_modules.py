"""Small modules of the alias: builders, accelerators, collectives, monitors, timers, tiles, estimators, autocast."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.compat.harness import engine_of
from torch import nn

from wherry.compat import deepspeed as compat
from wherry.compat.deepspeed import builders, comm, monitor, profiling, runtime_utils, tiled, timer
from wherry.compat.deepspeed import engine as engines
from wherry.compat.deepspeed.accelerator import Accelerator, Host
from wherry.compat.deepspeed.config import DeepSpeedConfig
from wherry.compat.deepspeed.names import ABSENT_MODULES, why_absent
from wherry.observe.memory import format_bytes


@pytest.fixture
def alone() -> None:
    """A group of one, for what asks torch.distributed."""
    comm.init_distributed("gloo")


def test_what_is_absent_is_there_by_name_only() -> None:
    absent = compat.absent("deepspeed.pipe.PipelineModule", "use something else")

    class Mine(absent):
        pass

    assert getattr(absent, "NAME", 3) == 3 and not isinstance(nn.Linear(1, 1), absent)
    for use in (Mine, absent, lambda: absent.NAME):
        with pytest.raises(NotImplementedError, match=r"PipelineModule.* is not part of Wherry; use something else"):
            use()
    assert all(why_absent(f"{path}.below") for path in ABSENT_MODULES)
    assert builders.CPUAdamBuilder().is_compatible() and builders.COMPATIBLE_OPS["cpu_adam"]
    assert not builders.OpBuilder.is_rocm_pytorch() and not builders.AsyncIOBuilder().is_compatible()
    with pytest.raises(NotImplementedError, match=r"AsyncIOBuilder\(\).load\(\) is not part of Wherry"):
        builders.AsyncIOBuilder().load()


def test_the_accelerator_is_the_host_or_a_device_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host("cpu")
    for name, method in inspect.getmembers(host, inspect.ismethod):
        needed = [each for each in inspect.signature(method).parameters.values() if each.default is each.empty]
        if not name.startswith("_") and not needed:
            method()
    host.set_rng_state(host.get_rng_state())
    assert host.memory_allocated() > 0 and host.lazy_call(lambda: 3) == 3
    assert host.FloatTensor([1.0]).dtype == torch.float32 and host.LongTensor(2, 3).shape == (2, 3)
    assert host.get_op_builder("CPUAdamBuilder").NAME == "cpu_adam" and not host.get_op_builder("?")().is_compatible()
    tensor = torch.ones(2)
    assert host.pin_memory(tensor) is tensor
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert host.device_count() == 3
    properties = {0: SimpleNamespace(total_memory=5), 1: SimpleNamespace(total_memory=7)}
    module = SimpleNamespace(current_device=lambda: 1, get_device_properties=properties.get)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    device = Accelerator("cuda")
    assert [device.total_memory(index) for index in (None, 0, 1)] == [7, 5, 7]
    assert (device.device_name(), device.current_device_name()) == ("cuda", "cuda:1")
    half = Accelerator("meta").HalfTensor([1])
    assert (half.dtype, half.device.type) == (torch.float16, "meta")


@pytest.mark.parametrize(
    ("kind", "asked", "backend"),
    [("cuda", None, "cpu:gloo,cuda:nccl"), ("xpu", "nccl", "cpu:gloo,xpu:xccl"), ("privateuseone", "nccl", "gloo"),
     ("cuda", "mpi", "mpi")],
)  # fmt: skip
def test_devices_communicate_by_the_backend_of_their_kind(
    kind: str, asked: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace())
    monkeypatch.setattr(comm, "get_accelerator", lambda: Accelerator(kind))
    monkeypatch.setattr(comm, "default_device", lambda: torch.device(kind, 0))
    started: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: started.append(backend))
    with pytest.raises(AssertionError, match=r"torch.distributed has not started"):
        comm.init_distributed(dist_init_required=False)
    comm.init_distributed(asked)
    assert started == [backend]


def test_a_scripts_own_collectives_are_counted(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "script_traffic", comm.Traffic())
    tensor = torch.ones(4)
    for _ in range(2):
        comm.all_reduce(tensor)
    comm.configure(prof_all=False, prof_ops=["broadcast"])
    comm.all_reduce(tensor)
    comm.broadcast(tensor=tensor, src=0)
    comm.configure(enabled=False)
    comm.broadcast(tensor, 0)
    comm.configure(enabled=True)
    comm.allgather_fn(torch.empty(4), tensor)
    summary = comm.log_summary(show_straggler=True, return_dict=True)
    assert summary is not None
    counted = (("all_reduce", 2), ("broadcast", 1), ("all_gather_into_tensor", 1))
    assert summary["summary"] == {name: {16: {"count": count, "msg_size_bytes": 16}} for name, count in counted}


def test_events_are_written_by_the_monitors_of_a_config(tmp_path: Path) -> None:
    block = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    config = DeepSpeedConfig({"train_batch_size": 1, **block}).monitor_config
    for one in (monitor.MonitorMaster(config), monitor.csvMonitor(config), monitor.WandbMonitor(config)):
        one.write_events([("Train/my loss", 2.5, 8)])
    assert (tmp_path / "job" / "Train_my_loss.csv").read_text() == "step,my loss\n8,2.5\n" * 2
    assert (config.tensorboard.job_name, config.wandb.project) == ("DeepSpeedJobName", "deepspeed")


def test_timers_add_up_and_print(capsys: pytest.CaptureFixture[str]) -> None:
    timers = timer.SynchronizedWallClockTimer()
    for _ in range(2):
        timers("forward").start()
        timers("forward").stop()
    timers("backward").start()
    assert timers("forward").elapsed(reset=False) > 0 and timers("backward").elapsed() > 0
    timers.log(["forward", "nothing"])
    assert re.fullmatch(r"\[Rank 0\] time \(ms\) \| forward: \d+\.\d\d\n", capsys.readouterr().out)
    assert timers("forward").elapsed() == 0
    with pytest.raises(AssertionError, match="not started"):
        timers("forward").stop()


class Counted(nn.Linear):
    """A layer that counts its rows."""

    rows: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += (x.shape[-2],)
        return super().forward(x)


compute = tiled.sequence_tiled_compute


@pytest.mark.parametrize(
    "run",
    [
        lambda layer, x: tiled.TiledMLP.apply(Counted.forward, layer, x, 4),
        lambda layer, x: compute(Counted.forward, 13, 4, {"x": x}, {"self": layer}, "x", output_reduction=None),
        lambda layer, x: compute(
            lambda layer, x: layer(x).square().sum(), 13, 4, {"x": x}, {"layer": layer}, "x", None, 0, "sum"
        ).sqrt(),
    ],
)
def test_tiles_give_the_numbers_of_the_whole(run: Any) -> None:
    results = []
    for call in (run, Counted.__call__):
        torch.manual_seed(0)
        layer, x = Counted(6, 6), torch.rand(2, 13, 6, requires_grad=True)
        total = call(layer, x).square().sum()
        results.append([total, *torch.autograd.grad(total, [x, layer.weight])])
        assert call is not run or max(layer.rows) == 4
    torch.testing.assert_close(*results)


def test_a_profile_of_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = nn.Linear(1024, 1024, bias=False)
    output = tmp_path / "profile"
    profile = profiling.get_model_profile(model, (1, 1024), print_profile=True, output_file=str(output))
    assert profile == ("2.1 M", "1.05 MMACs", "1.05 M") and "GFLOP  Linear" in output.read_text()
    profiler = profiling.FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(2, 1024))
    profiler.print_model_profile(profile_step=3)
    assert "GFLOP  forward" in capsys.readouterr().out
    assert (profiler.get_total_flops(), profiler.get_total_macs()) == (4 << 20, 2 << 20)
    profiler.end_profile()
    assert profiler.get_total_flops() == 0 and profiler.get_total_params() == 1 << 20


BILLION = 10**9


def test_memory_of_states(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(print_table: Any, *arguments: Any) -> str:
        print_table(*arguments)
        return capsys.readouterr().out

    cold_2, cold_3 = (
        profiling.estimate_zero2_model_states_mem_needs_all_cold,
        profiling.estimate_zero3_model_states_mem_needs_all_cold,
    )
    # Weights 2 bytes, gradients 2, optimizer 12 of each parameter; what rests on the host half as much again.
    for table, rows in (
        (printed(cold_2, BILLION, 8), [(21, 2, "host", "device"), (0, 3.75, "device", "device")]),
        (printed(cold_2, BILLION, 8, 2, 1), [(7, 2, "host", "device")]),
        (printed(cold_3, BILLION, BILLION // 10, 8),
         [(24, 0.2, "host", "host"), (21, 0.45, "host", "device"), (0, 2.2, "device", "device")]),
    ):  # fmt: skip
        for host, device, optimizer, parameters in rows:
            sizes = f"{format_bytes(int(host * BILLION)):>16} | {format_bytes(int(device * BILLION)):>12}"
            assert f"{sizes} | optimizer: {optimizer}, parameters: {parameters}\n" in table
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(100_000, 1000), nn.Linear(1000, 2000, bias=False))
    model.append(model[0])  # It is shared, so it counts once.
    live = printed(profiling.estimate_zero3_model_states_mem_needs_all_live, model, 4, 2)
    assert live == printed(cold_3, 102_000_000, 100_000_000, 4, 2) and live.count("optimizer: ") == 3
    assert "102M parameters, 100M in the largest layer" in live and "on 2 nodes with 4 GPUs each" in live
    live = printed(profiling.estimate_zero2_model_states_mem_needs_all_live, model)
    assert live == printed(cold_2, 102_000_000) and live.count("optimizer: ") == 2


@pytest.mark.parametrize(("enabled", "inside"), [(False, torch.float32), (True, torch.bfloat16)])
def test_around_an_engine_the_config_decides(monkeypatch: pytest.MonkeyPatch, enabled: bool, inside: torch.dtype):
    # As on a GPU, which is the device that it is asked of.
    on_cpu = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu": on_cpu(device))
    warned: list[str] = []
    monkeypatch.setattr(engines, "warning_once", warned.append)
    engine = engine_of(torch_autocast={"enabled": enabled, "dtype": "bfloat16"})
    x = torch.randn(2, 4)
    assert engine(x).dtype is inside and not warned
    with torch.autocast("cpu", torch.bfloat16):
        assert engine(x).dtype is inside and torch.mm(x, x.T).dtype is torch.bfloat16
    assert [text.startswith("torch.autocast is on around") for text in warned] == [True] * (not enabled)
    engine.destroy()


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_gradients_are_clipped_as_torch_clips_them(alone: None, norm_type: float) -> None:
    ours, theirs = ([nn.Parameter(torch.zeros(size)) for size in (2, 3, 1)] for _ in range(2))
    for parameter in (*ours[:2], *theirs[:2]):
        parameter.grad = torch.arange(1.0, 1.0 + parameter.numel())
    norm = runtime_utils.clip_grad_norm_(ours, 0.1, norm_type)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, 0.1, norm_type))
    for one, other in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(one.grad, other.grad)
