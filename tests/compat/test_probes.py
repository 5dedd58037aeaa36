"""What libraries ask while they are imported is answered, and what scripts take from the small modules behaves."""

from __future__ import annotations

import csv
import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from wherry import errors
from wherry.compat import deepspeed as compat
from wherry.compat.deepspeed import (
    builders,
    comm,
    launcher,
    monitor,
    nvtx,
    runtime_utils,
    sparse_tensor,
    tiled,
    timer,
    utils,
)
from wherry.compat.deepspeed.accelerator import Host
from wherry.compat.deepspeed.comms_logging import CommsLogger, convert_size
from wherry.compat.deepspeed.config import DeepSpeedConfig
from wherry.compat.deepspeed.engine import initialize
from wherry.compat.deepspeed.names import ABSENT_MODULES, why_absent
from wherry.compat.deepspeed.profiling import FlopsProfiler, get_model_profile


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one, for what asks torch.distributed."""
    comm.init_distributed("gloo")
    yield
    dist.destroy_process_group()


# --- operations ---


def test_every_builder_says_its_name_and_whether_it_is_there() -> None:
    for name, operation in builders.OPERATIONS.items():
        builder = getattr(builders, name)
        assert operation == builder.NAME
        assert builder().is_compatible() == builders.COMPATIBLE_OPS[operation]
        with pytest.raises(NotImplementedError, match=f"{name}\\(\\).load\\(\\) is not part of Wherry"):
            builder().load()
    assert builders.InferenceBuilder.NAME == "transformer_inference" and builders.CPUAdamBuilder().is_compatible()
    assert not builders.COMPATIBLE_OPS["deepspeed_not_implemented"]
    with pytest.raises(KeyError):
        builders.COMPATIBLE_OPS["nothing"]
    assert not hasattr(builders, "NothingBuilder")
    assert builders.ALL_OPS["cpu_adam"].absolute_name() == "deepspeed.ops.cpu_adam"


def test_a_builder_is_found_in_an_absent_module_too(monkeypatch: pytest.MonkeyPatch) -> None:
    module = compat.AliasModule("deepspeed.ops.aio")
    assert module.AsyncIOBuilder.NAME == "async_io" and not module.AsyncIOBuilder().is_compatible()
    with pytest.raises(NotImplementedError, match=r"deepspeed.ops.aio.aio_handle is not part of Wherry"):
        module.aio_handle()


def test_what_is_absent_is_there_by_name_only() -> None:
    absent = compat.absent("deepspeed.pipe.PipelineModule", "use something else")

    class Mine(absent):
        pass

    assert not hasattr(absent, "NAME") and getattr(absent, "NAME", 3) == 3 and not isinstance(nn.Linear(1, 1), absent)
    for use in (Mine, absent, lambda: absent.NAME):
        with pytest.raises(NotImplementedError, match=r"PipelineModule.* is not part of Wherry; use something else"):
            use()
    assert all(why_absent(f"{path}.below") for path in ABSENT_MODULES)


# --- accelerator ---

_METHODS = """
is_synchronized_device use_host_timers resolves_data_dependency handles_memory_backpressure device_name device
set_device current_device current_device_name device_count synchronize random set_rng_state get_rng_state manual_seed
manual_seed_all initial_seed default_generator stream current_stream default_stream empty_cache memory_allocated
max_memory_allocated reset_max_memory_allocated memory_cached max_memory_cached reset_max_memory_cached memory_stats
reset_peak_memory_stats memory_reserved max_memory_reserved total_memory available_memory is_bf16_supported
is_fp16_supported is_fp64_supported supported_dtypes is_available range_push range_pop lazy_call
communication_backend_name is_triton_supported prefer_triton_grouped_mm create_graph capture_to_graph replay_graph
BFloat16Tensor ByteTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor pin_memory is_pinned unpin_memory
on_accelerator op_builder_dir create_op_builder get_op_builder build_extension export_envs visible_devices_envs
set_visible_devices_envs get_compile_backend set_compile_backend
"""
ASKED = _METHODS.split()


def test_the_host_answers_to_every_method_of_an_accelerator() -> None:
    host = Host()
    assert all(callable(getattr(host, name)) for name in ASKED) and (host.Stream, host.Event) == (None, None)
    # Those without an argument have an answer.
    for name in ASKED:
        method = getattr(host, name)
        if inspect.ismethod(method) and not [
            each for each in inspect.signature(method).parameters.values() if each.default is each.empty
        ]:
            method()
    assert host.memory_stats()["allocated_bytes.all.current"] > 0 and host.lazy_call(lambda: 3) == 3
    assert host.FloatTensor([1.0]).dtype == torch.float32 and host.capture_to_graph(host.create_graph())
    assert host.get_op_builder("CPUAdamBuilder").NAME == "cpu_adam"
    assert host.create_op_builder("nothing").NAME == "deepspeed_not_implemented"
    tensor = torch.ones(2)
    assert host.pin_memory(tensor, make_copy=False) is tensor and host.unpin_memory(tensor) is None
    environment: dict[str, str] = {}
    host.set_visible_devices_envs(environment, [1, 3])
    assert environment == {"CUDA_VISIBLE_DEVICES": "1,3"}
    host.set_compile_backend("eager")
    assert host.get_compile_backend() == "eager"
    with pytest.raises(ValueError, match="is no backend"):
        host.set_compile_backend("nothing")


def test_a_machine_says_how_many_devices_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Host().device_count() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert Host().device_count() == 3
    monkeypatch.setenv("LOCAL_SIZE", "4")
    assert Host().device_count() == 4


# --- collectives ---


def test_starting_is_refused_where_it_is_not_wanted(alone: None) -> None:
    comm.init_distributed(dist_init_required=False)
    dist.destroy_process_group()
    with pytest.raises(AssertionError, match=r"torch.distributed has not started"):
        comm.init_distributed(dist_init_required=False)
    comm.init_distributed("gloo")


def test_a_scripts_own_collectives_are_timed_when_it_asks(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "_comms", None)
    tensor = torch.ones(4)
    comm.all_reduce(tensor, log_name="unheard", prof=True)
    assert comm._comms is None and comm.get_all_ranks_from_group() == [0]
    comm.configure(enabled=True, prof_all=False, prof_ops=["mine"])
    comm.all_reduce(tensor, log_name="mine")
    comm.all_reduce(tensor)
    comm.inference_all_reduce(tensor, prof=True)
    assert comm.get_logged_comm_ops() == ["mine", "inference_all_reduce"] and comm.get_comm_operation_count() == 2
    told = comm.log_summary(return_dict=True, show_straggler=True)
    assert told is not None
    row = told["summary"]["mine"][16]
    assert (row["count"], row["msg_size_str"]) == (1, "16.0 B") and row["total_latency_ms"] > 0
    assert told["straggler_analysis"]["mine"][16]["total_straggler_ms"] == 0
    assert told["metadata"]["world_size"] == 1
    comm.reset_log()
    assert not comm.has_comm_data() and comm.log_summary() is None


def test_a_summary_leaves_what_was_recorded_as_it_is() -> None:
    log = CommsLogger()
    for latency in (3.0, 1.0, 2.0):
        log.append("broadcast", "broadcast", latency, 1 << 20)
    before = [list(values) for values in log.get_raw_data()["broadcast"][1 << 20][1:]]
    summary = log.get_operation_summary("broadcast")
    assert summary is not None and summary[1 << 20]["avg_latency_ms"] == 2.0
    assert before == log.get_raw_data()["broadcast"][1 << 20][1:] and before[0] == [3.0, 1.0, 2.0]
    # Gbit/s of 1 MiB in 2 ms.
    assert before[1][2] == pytest.approx(2**20 * 8 / 2e-3 / 1e9) and convert_size(1 << 20) == "1.0 MB"
    log.stop_profiling_comms()
    assert not log.prof_all and not log.wants("broadcast")


# --- monitors ---


def test_monitors_write_as_their_blocks_say(tmp_path: Path) -> None:
    config = monitor.get_monitor_config(
        {
            "train_batch_size": 2,
            "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"},
            "tensorboard": {},
        }
    )
    assert config.enabled and config.tensorboard.job_name == "DeepSpeedJobName" and config.wandb.project == "deepspeed"
    master = monitor.MonitorMaster(config)
    assert master.tb_monitor is None and master.csv_monitor.job_name == "run"
    master.write_events([("Train/Samples/lr", 0.5, 1)])
    master.write_events([("Train/Samples/lr", 0.25, 2)])
    with open(tmp_path / "run" / "Train_Samples_lr.csv", newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["step", "lr"], ["1", "0.5"], ["2", "0.25"]]
    idle = monitor.TensorBoardMonitor(monitor.TensorBoardConfig())
    assert not idle.enabled and idle.get_summary_writer() is None
    idle.write_events([("a", 1.0, 1)])
    with pytest.raises(errors.WherryError, match=r"comet.enabled: .* its package cannot be imported"):
        monitor.CometMonitor(monitor.CometConfig(enabled=True))


def test_monitors_are_made_of_a_whole_config(tmp_path: Path) -> None:
    block = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    config = DeepSpeedConfig({"train_batch_size": 1, "csv_monitor": block, "comet": {"samples_log_interval": 7}})
    assert not config.monitor_config.wandb.enabled
    config.monitor_config.tensorboard.job_name = "mine"
    master = monitor.MonitorMaster(config.monitor_config)
    master.write_events([("loss", 0.5, 1)])
    assert master.enabled and (tmp_path / "run" / "loss.csv").read_text().split() == ["step,loss", "1,0.5"]
    assert config.monitor_config.comet.samples_log_interval == 7


def test_comet_is_told_of_an_event_once_in_so_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    experiment = SimpleNamespace(
        set_name=told.append, log_metric=lambda name, value, step: told.append((name, value, step))
    )
    monkeypatch.setitem(
        sys.modules, "comet_ml", SimpleNamespace(start=lambda **given: told.append(given) or experiment)
    )
    block = monitor.CometConfig(enabled=True, samples_log_interval=10, experiment_name="mine", mode="get")
    comet = monitor.CometMonitor(block)
    for step in (1, 5, 11):
        comet.write_events([("loss", 0.5, step)])
    given = dict.fromkeys(("api_key", "project", "workspace", "experiment_key", "online")) | {"mode": "get"}
    assert told == [given, "mine", ("loss", 0.5, 1), ("loss", 0.5, 11)] and comet.experiment is experiment


def test_tensorboard_events_are_in_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    block = monitor.TensorBoardConfig(enabled=True, output_path=str(tmp_path), job_name="run")
    monitor.TensorBoardMonitor(block).write_events([("Train/loss", 0.5, 1)])
    assert [path.stat().st_size > 0 for path in (tmp_path / "run").iterdir()] == [True]


# --- timers, spans, logs ---


def test_timers_add_up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ticks = iter(float(tick) for tick in range(100))
    monkeypatch.setattr(timer.time, "perf_counter", lambda: next(ticks))
    timers = timer.SynchronizedWallClockTimer()
    for _ in range(2):
        timers("fwd").start()
        timers("fwd").stop()
    with pytest.raises(AssertionError, match="fwd timer is not started"):
        timers("fwd").stop()
    assert timers("fwd").elapsed(reset=False) == 2000.0 and timers("fwd").mean() == 1000.0
    timers.log(["fwd", "nothing"], normalizer=2)
    assert capsys.readouterr().out == "[Rank 0] time (ms) | fwd: 1000.00\n" and timers("fwd").elapsed() == 0
    data = [3.0, 1.0, 2.0, 9.0, 0.0]
    assert timer.trim_mean(data, 0.2) == 2.0 and data[0] == 3.0 and timer.trim_mean([], 0.1) == 0
    idle = timer.NoopTimer()
    idle("fwd").start()
    assert idle("fwd").elapsed() == 0
    speed = timer.ThroughputTimer(SimpleNamespace(enabled=True, synchronized=False), batch_size=4, start_step=1)
    for _ in range(3):
        speed.start()
        speed.stop(global_step=True)
    assert speed.avg_samples_per_sec() == 4.0


def test_an_engine_times_its_micro_batches(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, "optimizer": {"type": "SGD"}}
    engine, *_ = initialize(model=nn.Linear(1, 1), config=config)
    speed = engine.tput_timer
    assert (speed.batch_size, speed.start_step, speed.initialized, speed.start_time) == (6, 2, False, 0)
    monkeypatch.setattr(speed, "_now", iter(float(tick) for tick in range(1, 100)).__next__)
    for micro_batch in range(8):
        engine.eval()(torch.ones(3, 1))
        engine.backward(engine.train()(torch.ones(3, 1)).sum())
        engine.step()
        assert speed.initialized and not speed.started and speed.micro_step_count == micro_batch + 1
    assert (speed.global_step_count, speed.total_elapsed_time) == (4, 4.0)  # a tick each from the third step on
    assert speed.avg_samples_per_sec() == 6 * 2 / 4.0
    engine.destroy()


def test_a_span_is_that_of_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Device:
        supports_nvtx_domain = True

        def range_push(self, msg: str, domain: str) -> None:
            calls.append((msg.rpartition(".")[2], domain))

        def range_pop(self, domain: str) -> None:
            calls.append(domain)

    monkeypatch.setattr(nvtx, "get_accelerator", Device)

    @nvtx.instrument_w_nvtx
    def work(x: int) -> int:
        return x + 1

    assert work(2) == 3 and calls == [("work", "DeepSpeed"), "DeepSpeed"]
    monkeypatch.setattr(nvtx, "enable_nvtx", False)
    assert work(2) == 3 and len(calls) == 2


def test_levels_and_lines_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    own = logging.Logger("own")
    handler = logging.StreamHandler()
    own.addHandler(handler)
    utils.set_log_level_from_string("ERROR", own)
    assert own.level == handler.level == logging.ERROR
    with pytest.raises(ValueError, match="there is no log level 'loud'"):
        utils.get_log_level_from_string("loud")
    assert utils.should_log_le("critical")
    utils.print_dist("to all")
    utils.print_dist("to another", ranks=[1])
    assert capsys.readouterr().out == "[Rank 0] to all\n"
    assert utils.required_torch_version(min_version="2.1") and not utils.required_torch_version(max_version=1.9)
    assert utils.parse_range_list("0,2-4,6") == [0, 2, 3, 4, 6]
    for wrong in ("0,2-6,5-9", "8,2-6", "1,6-2"):
        with pytest.raises(ValueError, match="expected numbers and ranges that ascend"):
            utils.parse_range_list(wrong)


# --- runtime.utils ---


def test_gradients_are_clipped_as_torch_clips_them(alone: None) -> None:
    def grads() -> list[nn.Parameter]:
        made = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1))]
        for i, parameter in enumerate(made[:2]):
            parameter.grad = torch.full_like(parameter, i + 1.0)
        return made

    for norm_type in (2.0, float("inf")):
        ours, theirs = grads(), grads()
        norm = runtime_utils.clip_grad_norm_(ours, 0.1, norm_type)
        assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(theirs, 0.1, norm_type).item())
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    tensors = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert runtime_utils.get_global_norm_of_tensors(tensors).item() == 5.0
    assert runtime_utils.get_weight_norm(tensors) == 5.0 and runtime_utils.get_global_norm([3.0, 4.0]) == 5.0
    assert runtime_utils.get_weight_norm([torch.tensor([float("nan")])]) == -1
    runtime_utils.clip_tensors_by_global_norm(tensors, max_norm=1.0)
    torch.testing.assert_close(torch.cat(tensors), torch.tensor([0.6, 0.8]))


def test_an_overflow_is_found(alone: None) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, float("inf")])
    assert runtime_utils.CheckOverflow([[parameter]]).check() and not runtime_utils.CheckOverflow([[]]).check()
    assert runtime_utils.CheckOverflow().check_using_norm([1.0, -1])


def least_difference(weights: list[float], parts: int) -> float:
    """Of the heaviest and the lightest of that many parts, by trying all."""

    def ways(start: int, left: int) -> Iterator[list[float]]:
        if left == 1:
            yield [sum(weights[start:])]
            return
        for stop in range(start + 1, len(weights) - left + 2):
            for rest in ways(stop, left - 1):
                yield [sum(weights[start:stop]), *rest]

    return min(max(way) - min(way) for way in ways(0, parts))


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_parts_weigh_as_nearly_the_same_as_may_be(parts: int) -> None:
    for weights in ([0.0, 1, 2, 3, 3, 3], [5.0, 1, 1, 1, 1, 4, 2], [1.0] * 8):
        borders = runtime_utils.partition_balanced(weights, parts)
        sums = [sum(weights[a:b]) for a, b in itertools.pairwise(borders)]
        assert (borders[0], borders[-1], len(borders)) == (0, len(weights), parts + 1)
        assert max(sums) - min(sums) == least_difference(weights, parts)
    assert runtime_utils.partition_uniform(7, 4) == [0, 2, 4, 6, 7] and runtime_utils.partition_uniform(2, 4)[-1] == 2
    assert runtime_utils.partition_balanced([0, 1, 2, 3, 3, 3], 4) == [0, 3, 4, 5, 6]


def test_a_partitioned_tensor_and_a_coalesced_mean(alone: None) -> None:
    whole = torch.arange(6.0).view(2, 3)
    part = runtime_utils.PartitionedTensor(whole, dist.group.WORLD)
    again = runtime_utils.PartitionedTensor.from_meta(part.to_meta(), part.data(), dist.group.WORLD)
    assert torch.equal(again.full(), whole) and list(part.local_size()) == [6] and again.full_size() == [2, 3]
    one, two = runtime_utils.reduce_scatter_coalesced([whole, torch.ones(3)])
    assert torch.equal(one, whole.view(-1)) and torch.equal(two, torch.ones(3))


def test_rows_that_are_not_zero_are_kept_and_added() -> None:
    dense = torch.tensor([[1.0, -1], [0, 0], [2, 3]])
    rows = sparse_tensor.SparseTensor(dense)
    assert rows.sparse_size() == (2 + 4, 6) and torch.equal(rows.to_dense(), dense)
    rows.add(sparse_tensor.SparseTensor(dense.to_sparse(1)))
    assert torch.equal(rows.to_dense(), 2 * dense) and torch.equal(rows.to_coo_tensor().to_dense(), 2 * dense)
    with pytest.raises(AssertionError, match="the sizes are"):
        rows.add(sparse_tensor.SparseTensor(dense[:2]))


def test_values_are_moved_and_named() -> None:
    inner = torch.ones(2)
    moved = runtime_utils.move_to_device({"a": [inner, 3], "b": (inner,)}, "meta")
    assert moved["a"][0].is_meta and moved["a"][1] == 3 and moved["b"][0].is_meta and not inner.is_meta
    same = runtime_utils.move_to_device([inner], "cpu", torch.is_tensor)
    assert same[0] is inner
    assert runtime_utils.call_to_str("f", 1, "a", b=2) == "f(1, 'a', b=2)" and runtime_utils.call_to_str("f") == "f()"


def test_parameters_of_a_backward_are_counted() -> None:
    used, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    found: list[int] = []
    used.register_hook(lambda grad: found.append(runtime_utils.count_used_parameters_in_backward([used, unused])))
    (used * 2).sum().backward()
    assert found == [1]
    with pytest.raises(RuntimeError, match="no backward runs"):
        runtime_utils.count_used_parameters_in_backward([used])


# --- tiles ---


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        self.largest = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest = max(self.largest, x.shape[-2])
        return self.down(torch.relu(self.up(x)))


def gradients(run: Callable[[Mlp, torch.Tensor], torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    mlp, x = Mlp(), torch.rand(2, 13, 6, requires_grad=True)
    result = run(mlp, x)
    result.square().sum().backward()
    return [result.detach(), x.grad, mlp.up.weight.grad, mlp.down.weight.grad], mlp.largest  # type: ignore[list-item]


@pytest.mark.parametrize("how", ["mlp", "sequence", "apply"])
def test_a_tiled_part_gives_the_numbers_of_the_whole(how: str) -> None:
    def run(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
        forward, parameters = Mlp.forward, list(mlp.parameters())
        if how == "mlp":
            return tiled.TiledMLP.apply(forward, mlp, x, 4, parameters)
        if how == "sequence":
            return tiled.sequence_tiled_compute(forward, 13, 4, {"x": x}, {"self": mlp}, "x", parameters, 1, None)
        return tiled.SequenceTiledCompute.apply(forward, 13, 4, ["x"], ["self"], "x", parameters, 1, None, x, mlp)

    whole, _ = gradients(Mlp.__call__)
    tiles, largest = gradients(run)
    assert largest == 4
    for one, other in zip(tiles, whole, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_tiled_loss_gives_the_numbers_of_its_tiles(reduction: str, masked: bool) -> None:
    y = torch.arange(26).view(2, 13) % 6
    mask = (torch.arange(26).view(2, 13) % 3 > 0) if masked else None

    def loss(mlp: Mlp, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        each = nn.functional.cross_entropy(mlp(x).view(-1, 6), y.view(-1), reduction="none")
        return each.mean() if mask is None else (each * mask.view(-1)).sum() / mask.sum()

    def expected(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
        rows = [slice(start, start + 7) for start in range(0, 26, 7)]
        flat_mask = None if mask is None else mask.view(-1)
        losses = [
            loss(mlp, x.view(26, 6)[row], y.view(-1)[row], *(() if flat_mask is None else (flat_mask[row],)))
            for row in rows
        ]
        return sum(losses) / (len(rows) if reduction == "mean" else 1)  # type: ignore[return-value]

    whole, _ = gradients(expected)
    tiles, largest = gradients(
        lambda mlp, x: tiled.TiledFusedLogitsLoss.apply(loss, mlp, x, y, mask, 4, list(mlp.parameters()), reduction)
    )
    assert largest == 7
    for one, other in zip(tiles, whole, strict=True):
        torch.testing.assert_close(one, other)


def test_a_tiled_loss_says_what_does_not_go_together() -> None:
    x, y = torch.ones(2, 4, 6), torch.ones(2, 4)
    with pytest.raises(ValueError, match="expected mean or sum, got 'none'"):
        tiled.TiledFusedLogitsLoss.apply(max, None, x, y, None, 2, None, "none")
    with pytest.raises(ValueError, match="a batch and a sequence of the same sizes"):
        tiled.TiledFusedLogitsLoss.apply(max, None, x, y[:1], None, 2, None, "mean")
    with pytest.raises(ValueError, match="mask: expected the sizes"):
        tiled.TiledFusedLogitsLoss.apply(max, None, x, y, y[:1], 2, None, "mean")


# --- launcher and profiler ---


def test_the_launchers_own_functions() -> None:
    hosts = launcher._parse_hostfile("# all\nworker-0 slots=4\n\nworker-1 slots=2".splitlines())
    assert hosts == {"worker-0": 4, "worker-1": 2} and launcher.fetch_hostfile("/nowhere/hostfile") is None
    for wrong in ("a slots=1\na slots=2", "this is bad slots=1", "", "name"):
        with pytest.raises(ValueError, match="hostfile: "):
            launcher._parse_hostfile(wrong.splitlines())
    slots = {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1]}
    assert launcher.parse_resource_filter(slots, exclude_str="worker-0:0,1@worker-1") == {"worker-0": [2, 3]}
    assert launcher.parse_resource_filter(slots, exclude_str="worker-0@worker-1") == {}
    assert launcher.parse_inclusion_exclusion(hosts, "worker-1:1", "") == {"worker-1": [1]}
    for include, exclude in (("a", "b"), ("jeff", ""), ("", "worker-1:7")):
        with pytest.raises(ValueError):
            launcher.parse_resource_filter(slots, include, exclude)
    for argument in ("--num_nodes 1 -i localhost", "--num_gpus 1 -e localhost"):
        with pytest.raises(ValueError, match="cannot be given with --include"):
            launcher.main([*argument.split(), "train.py"])
    assert launcher.encode_world_info({"a": [0]}) == "eyJhIjogWzBdfQ=="


def test_operations_as_text_have_the_units_of_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(128, 128)
    assert get_model_profile(model, (64, 128), print_profile=False) == ("2.1 M", "1.05 MMACs", "16.51 K")
    profiler = FlopsProfiler(model)
    profiler.ds_engine = SimpleNamespace(world_size=8, dp_world_size=None, seq_dp_world_size=4, mp_world_size=1)
    profiler.start_profile()
    model(torch.randn(64, 128))
    profiler.print_model_profile(detailed=False)
    profiler.end_profile()
    assert "data parallel size:" in capsys.readouterr().out
