"""Small modules of the alias: operations, accelerators, collectives, tiles, estimators, autocast."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.compat.harness import engine_of
from torch import nn

from wherry.compat import deepspeed as compat
from wherry.compat.deepspeed import autocast, builders, comm, profiling, runtime_utils, tiled
from wherry.compat.deepspeed.accelerator import Accelerator, Host
from wherry.compat.deepspeed.names import ABSENT_MODULES, why_absent
from wherry.errors import WherryError


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
    # A builder is found in a module that is absent otherwise.
    module = compat.AliasModule("deepspeed.ops.aio")
    assert module.AsyncIOBuilder.NAME == "async_io" and not module.AsyncIOBuilder().is_compatible()
    assert builders.CPUAdamBuilder().is_compatible() and not builders.COMPATIBLE_OPS["deepspeed_not_implemented"]
    for use, name in ((module.aio_handle, r"deepspeed.ops.aio.aio_handle"), (module.AsyncIOBuilder().load, "AsyncIO")):
        with pytest.raises(NotImplementedError, match=f"{name}.* is not part of Wherry"):
            use()


def test_the_host_answers_to_the_methods_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    for name, method in inspect.getmembers(host, inspect.ismethod):
        needed = [each for each in inspect.signature(method).parameters.values() if each.default is each.empty]
        if not name.startswith("_") and not needed:
            method()
    assert host.memory_stats()["allocated_bytes.all.current"] > 0 and host.lazy_call(lambda: 3) == 3
    assert host.FloatTensor([1.0]).dtype == torch.float32 and host.capture_to_graph(host.create_graph())
    assert host.create_op_builder("CPUAdamBuilder").NAME == "cpu_adam"
    tensor = torch.ones(2)
    assert host.pin_memory(tensor, make_copy=False) is tensor
    environment: dict[str, str] = {}
    host.set_visible_devices_envs(environment, [1, 3])
    assert environment == {"CUDA_VISIBLE_DEVICES": "1,3"}
    with pytest.raises(ValueError, match="is no backend"):
        host.set_compile_backend("nothing")
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for count, name in ((1, "OTHER"), (3, "LOCAL_WORLD_SIZE"), (4, "LOCAL_SIZE")):
        monkeypatch.setenv(name, str(count))
        assert host.device_count() == count


def test_a_device_that_is_named_is_asked_and_else_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    module = SimpleNamespace(
        current_device=lambda: 1,
        get_rng_state=lambda at: asked.append(at) or torch.empty(0),
        set_rng_state=lambda state, at: asked.append(at),
        get_device_properties=lambda at: SimpleNamespace(total_memory=asked.append(at) or 7),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    accelerator = Accelerator("cuda")
    for index in (None, 0, 1):
        accelerator.set_rng_state(accelerator.get_rng_state(index), index)
        assert accelerator.total_memory(index) == 7
    assert asked == [1] * 3 + [0] * 3 + [1] * 3
    device = Accelerator("meta")
    assert (device.HalfTensor([1]).dtype, device.HalfTensor([1]).device.type) == (torch.float16, "meta")


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


def test_a_scripts_own_collectives_are_timed_when_it_asks(alone: None) -> None:
    tensor = torch.ones(4)
    comm.configure(enabled=True, prof_all=False, prof_ops=["mine"])
    comm.all_reduce(tensor, log_name="mine")
    comm.all_reduce(tensor)
    comm.inference_all_reduce(tensor, prof=True)
    assert comm.get_logged_comm_ops() == ["mine", "inference_all_reduce"]
    summary = comm.log_summary(return_dict=True, show_straggler=True)
    assert summary is not None
    row = summary["summary"]["mine"][16]
    assert (row["count"], row["msg_size_str"]) == (1, "16.0 B") and row["total_latency_ms"] > 0
    assert summary["straggler_analysis"]["mine"][16]["total_straggler_ms"] == 0
    comm.reset_log()
    comm.configure(enabled=False, prof_ops=[])
    comm.all_reduce(tensor, log_name="mine", prof=True)
    assert not comm.has_comm_data() and comm.log_summary() is None


LABELS = torch.arange(26).view(2, 13) % 6
MASK = torch.arange(26).view(2, 13) % 3 > 0


class Counted(nn.Linear):
    """A layer that counts its rows."""

    rows: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += (x.shape[-2],)
        return super().forward(x)


def loss(layer: nn.Module, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (nn.functional.cross_entropy(layer(x), y, reduction="none") * mask).sum()


@pytest.mark.parametrize(
    ("run", "whole", "rows"),
    [
        (lambda layer, x: tiled.TiledMLP.apply(Counted.forward, layer, x, 4), Counted.__call__, 4),
        (lambda layer, x: tiled.sequence_tiled_compute(
            Counted.forward, 13, 4, {"x": x}, {"self": layer}, "x", output_reduction=None
        ), Counted.__call__, 4),
        (lambda layer, x: tiled.TiledFusedLogitsLoss.apply(loss, layer, x, LABELS, MASK, 4, None, "mean"),
         lambda layer, x: loss(layer, x.view(26, 6), LABELS.view(26), MASK.view(26)) / 4, 7),
    ],
)  # fmt: skip
def test_tiles_give_the_numbers_of_the_whole(run: Any, whole: Any, rows: int) -> None:
    found = []
    for call in (run, whole):
        torch.manual_seed(0)
        layer, x = Counted(6, 6), torch.rand(2, 13, 6, requires_grad=True)
        result = call(layer, x)
        found.append([result, *torch.autograd.grad(result.square().sum(), [x, layer.weight])])
        assert call is whole or max(layer.rows) == rows
    torch.testing.assert_close(*found)


ZERO2, ZERO3 = profiling.estimate_zero2_model_states_mem_needs, profiling.estimate_zero3_model_states_mem_needs
BILLION = 10**9
LAYER = BILLION // 10


def test_bytes_of_a_node_and_of_a_gpu() -> None:
    # Weights 2 bytes, gradients 2, optimizer 12 of each parameter; what rests on the host half as much again.
    assert ZERO2(BILLION, 8) == (21 * BILLION, 2 * BILLION)
    assert ZERO2(BILLION, 8, cpu_offload=False) == (0, 2 * BILLION + 14 * BILLION // 8)
    assert ZERO2(BILLION, 8, 2, cpu_offload=True, additional_buffer_factor=1) == (7 * BILLION, 2 * BILLION)
    assert ZERO3(BILLION, LAYER, 8) == (24 * BILLION, 2 * LAYER, 2 * LAYER)
    assert ZERO3(BILLION, LAYER, 8, cpu_offload_params=False) == (21 * BILLION, BILLION // 4 + 2 * LAYER, 2 * LAYER)
    assert ZERO3(BILLION, LAYER, 8, cpu_offload=False) == (0, 2 * BILLION + 2 * LAYER, 2 * LAYER)
    with pytest.raises(WherryError, match="ranks: expected 1 or more, got 0"):
        ZERO2(BILLION, 0)


def test_tables_of_a_model_and_of_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(100_000, 1000), nn.Linear(1000, 2000, bias=False))
    model.append(model[0])  # shared, so it counts once
    profiling.estimate_zero3_model_states_mem_needs_all_live(model, 4, 2)
    live = capsys.readouterr().out
    profiling.estimate_zero3_model_states_mem_needs_all_cold(102_000_000, 100_000_000, 4, 2)
    assert live == capsys.readouterr().out
    assert "102M parameters, 100M in the largest layer" in live and "on 2 nodes with 4 GPUs each" in live
    profiling.estimate_zero2_model_states_mem_needs_all_live(model)
    assert (live.count("optimizer: "), capsys.readouterr().out.count("optimizer: ")) == (3, 2)


@pytest.mark.parametrize(("enabled", "inside"), [(False, torch.float32), (True, torch.bfloat16)])
def test_around_an_engine_the_config_decides(monkeypatch: pytest.MonkeyPatch, enabled: bool, inside: torch.dtype):
    # As on a GPU, which is the device that it is asked of.
    on_cpu = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu": on_cpu(device))
    warned: list[str] = []
    monkeypatch.setattr(autocast, "warning_once", warned.append)
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
