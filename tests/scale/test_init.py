"""Models that are partitioned while they are built: their weights, their memory, and the end of the context."""

from __future__ import annotations

import copy
import errno
import os
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import TinyLM, assert_near, assert_same, engine_of, masters_of, settings, train, train_plain
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import wherry
from wherry.errors import PeerError, WherryError
from wherry.parallel.comm import Comm, SoloComm
from wherry.sharding.param_shard import Sharing, shard_of
from wherry.testing import run_ranks
from wherry.tiers import elastic
from wherry.tiers.disk_errors import DiskError

STAGE3 = settings(3)
CPU = torch.device("cpu")


class Custom(nn.Module):
    """Ways in which user code initializes weights of its children; more are in test_meta."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(7, 8))
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.lstm = nn.LSTM(8, 4)
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.position, std=0.02)
        self.apply(self.initialize_)
        with torch.no_grad():
            self.layers[1].weight.copy_(self.layers[0].weight.t() + torch.eye(8))
        nn.init.orthogonal_(self.layers[0].weight)
        self.layers[2].bias = nn.Parameter(self.layers[2].bias + 1)
        self.twin = copy.deepcopy(self.layers[0])
        self.register_buffer("norm", self.layers[0].weight.norm().detach())
        # weight_norm makes a new parameter of the old one.
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def initialize_(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)
            if module.bias is not None:
                nn.init.uniform_(module.bias)


def seeded(build: Any, seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return build()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    with wherry.gathered(model):
        return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def assert_nothing_is_left() -> None:
    assert not torch_module._global_module_registration_hooks
    assert not torch_module._global_parameter_registration_hooks
    assert torch._C._len_torch_function_stack() == 0


def test_weights_are_those_of_plain_construction() -> None:
    plain = seeded(Custom)
    after = torch.rand(1)
    with wherry.Init(STAGE3):
        model = seeded(Custom)
    assert torch.equal(torch.rand(1), after)
    assert all(shard_of(p) is not None and bool(p.detach().isnan().all()) for p in model.parameters())
    assert_same(whole(model), dict(plain.named_parameters(remove_duplicate=False)))
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))
    assert_nothing_is_left()
    engine = engine_of(model, STAGE3)
    assert_same(engine.module.state_dict(), plain.state_dict())
    assert not any(shard_of(p) for p in model.parameters())
    engine.close()


class Drawn(nn.Module):
    """Linear layers drawn from an own generator, as ranks that are threads share torch's."""

    def __init__(self, seed: int, width: int = 24, layers: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer = nn.Linear(width, width)
            nn.init.normal_(layer.weight, generator=generator)
            self.layers.append(layer)
        for layer in self.layers:
            nn.init.uniform_(layer.bias, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.square().mean()


def rows(step: int, micro: int, rank: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * step + rank)),)


@pytest.mark.parametrize(("ranks", "precision"), [(1, {}), (2, {"bf16": {"enabled": True}}), (3, {})])
def test_ranks_hold_shards_of_rank_0s_values_and_train_on_them(ranks: int, precision: dict[str, Any]) -> None:
    plain, config = Drawn(0), settings(3, more=precision)

    def body(comm: Comm) -> tuple[list[float], dict[str, torch.Tensor]]:
        with wherry.Init(config, mesh=comm):
            model = Drawn(comm.rank)
        for parameter in model.parameters():
            part = shard_of(parameter)
            assert part is not None and part.shard.numel() == -(-parameter.numel() // ranks)
        assert_same(whole(model), dict(plain.named_parameters()))
        comm.traffic.clear()
        engine = engine_of(model, config, comm)
        assert not comm.traffic.calls["broadcast"]
        assert_same(masters_of(engine), dict(plain.named_parameters()))
        return train(engine, 3, batch=rows), whole(engine.module)

    results = run_ranks(ranks, body)
    if not precision:
        expected = train_plain(plain, ranks=ranks, steps=3, batch=rows)
        losses = [sum(step) / ranks for step in zip(*(losses for losses, _ in results), strict=True)]
        assert losses == pytest.approx(expected.losses, rel=1e-5)
        assert_near(results[0][1], expected.weights)


class LiveBytes(TorchDispatchMode):
    """Track the storages that operations return; `peak` is the most bytes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    @property
    def live(self) -> int:
        # Sizes change: a flat's storage is emptied and grows again.
        return sum(storage.nbytes() for known in list(self._known.values()) if (storage := known()) is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                storage = value.untyped_storage()
                key = storage._cdata
                if key not in self._known or self._known[key]() is None:
                    self._known[key] = weakref.ref(storage)
        self.peak = max(self.peak, self.live)
        return result


@pytest.mark.parametrize("ranks", [1, 4])
def test_peak_memory_is_one_submodule_above_the_shards(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "_system", lambda: None)  # mapped storages do not report their used bytes
    width, layers = 128, 12
    largest = 4 * (width * width + width)
    shards = layers * 4 * (-(-width * width // ranks) + -(-width // ranks))

    def body(comm: Comm) -> tuple[int, int]:
        with LiveBytes() as live, wherry.Init(STAGE3, mesh=comm):
            model = Drawn(comm.rank, width, layers)
        built = live.peak
        model.requires_grad_(False)  # gradients would take as many bytes again
        live.peak = live.live
        with live:
            engine, *_ = wherry.initialize(model=model, config=STAGE3, mesh=comm)
        engine.close()
        return built, live.peak

    for built, taken in run_ranks(ranks, body):
        assert built <= 1.15 * (shards + largest) + 8192  # the bytes of torch's generators
        # The flats of a unit beside its shards: that unit whole, and one of its parameters.
        assert taken <= 1.15 * (shards + largest + 2 * largest) + 8192


def _memory_of_a_build(rank: int) -> tuple[int, int]:
    """Build layers on the allocator's heap, between small objects that stay; the peak of their memory, and its need."""

    def resident(which: str) -> int:
        return 1024 * int(re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

    with wherry.Init(STAGE3):
        nn.Linear(1024, 1024)  # imports at first use are not counted
    Path("/proc/self/clear_refs").write_text("5")
    before, layers, largest = resident("VmRSS"), 40, 4 * (1024 * 1024 + 1024)
    with wherry.Init(STAGE3):
        many = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(layers)))
        many.apply(lambda module: nn.init.zeros_(module.weight) if isinstance(module, nn.Linear) else None)
    return resident("VmHWM") - before, layers * largest // 2 + largest


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_the_heap_gives_back_the_memory_of_partitioned_parameters(warm: Any) -> None:
    for taken, needed in warm(2).run(_memory_of_a_build):
        assert taken <= 1.15 * needed


def test_nested_contexts_and_enabled_false() -> None:
    with wherry.Init(STAGE3):
        outer = nn.Linear(4, 4)
        with wherry.Init(STAGE3):
            inner = nn.Linear(4, 4)
        with wherry.Init(enabled=False):
            nothing = nn.Linear(4, 4)
        last = nn.Linear(4, 4)
    assert all(shard_of(module.weight) is not None for module in (outer, inner, nothing, last))
    with wherry.Init(STAGE3, enabled=False):
        plain = nn.Linear(4, 4)
    with wherry.Init(settings(2)):
        stage2 = nn.Linear(4, 4)
    assert shard_of(plain.weight) is None and shard_of(stage2.weight) is None
    assert_nothing_is_left()


def test_models_built_partly_outside_and_modules_attached_later() -> None:
    before, after = nn.Linear(6, 6), nn.Linear(6, 6)
    expected = {"0.weight": before.weight.detach().clone(), "2.weight": after.weight.detach().clone()}
    with wherry.Init(STAGE3):
        model = nn.Sequential(before, nn.Linear(6, 6))
    model.append(after)
    assert shard_of(before.weight) is not None and shard_of(after.weight) is None
    state = engine_of(model, STAGE3).module.state_dict()
    assert_near(state, expected, 0.0)
    assert not any(value.isnan().any() for value in state.values())


def test_an_exception_ends_the_context() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)
            raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"), wherry.Init(STAGE3), wherry.Init(STAGE3):
        Failing()
    assert_nothing_is_left()
    linear = nn.Linear(4, 4)
    assert shard_of(linear.weight) is None and torch.isfinite(linear.weight).all()


@pytest.mark.parametrize("holder", [0, 1])
def test_ranks_release_alike_when_one_of_them_holds_a_weights_memory(holder: int) -> None:
    """Hold memory as a backend does after a gather, and garbage until it is collected; rank 0's values are used."""
    plain = Drawn(0)

    def body(comm: Comm) -> dict[str, torch.Tensor]:
        comm.traffic.clear()
        with wherry.Init(STAGE3, mesh=comm):
            model = Drawn(comm.rank)
            with torch.no_grad():
                model.layers[0].weight.mul_(1.0)
            held = model.layers[0].weight.data if comm.rank == holder else None
            with torch.no_grad():
                model.layers[1].weight.mul_(1.0)
                model.layers[2].weight.mul_(1.0)
            wholes = [shard_of(layer.weight).whole for layer in model.layers]
            assert wholes == [holder == 0, False, True], "memory that rank 0 holds stays whole on all"
            del held
            with torch.no_grad():
                model.layers[1].weight.mul_(1.0)
            assert not shard_of(model.layers[0].weight).whole
        assert len(set(map(str, comm.gather_objects(dict(comm.traffic.calls))))) == 1
        return whole(model)

    for values in run_ranks(2, body):
        assert_same(values, dict(plain.named_parameters()))


def test_an_error_of_one_ranks_build_is_raised_on_all() -> None:
    def body(comm: Comm) -> Exception | None:
        try:
            with wherry.Init(STAGE3, mesh=comm):
                model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
                if comm.rank == 1:
                    raise MemoryError("no memory left")
                model.append(nn.Linear(4, 4))
        except Exception as error:
            return error
        return None

    waited, failed = run_ranks(2, body)
    assert isinstance(failed, MemoryError)
    assert isinstance(waited, PeerError) and "rank 1 has failed" in str(waited), waited
    assert "MemoryError: no memory left" in str(waited)


class Mixed(nn.Module):
    """Weights of several dtypes, shapes and strides, drawn from an own generator."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        kinds = [(torch.float32, 70, 61), (torch.float32, 9001), (torch.bfloat16, 3, 5, 701), (torch.float64, 5, 5)]
        self.leaves = nn.ModuleList()
        for dtype, *shape in kinds:
            leaf = nn.Module()
            leaf.weight = nn.Parameter(torch.empty(shape, dtype=dtype).normal_(generator=generator))
            if len(shape) > 1:
                leaf.turned = nn.Parameter(torch.empty(shape, dtype=dtype).normal_(generator=generator).mT)
            self.leaves.append(leaf)


@pytest.mark.parametrize("stage", [None, 0, 3])
def test_values_of_any_dtype_and_stride_are_rank_0s(stage: int | None) -> None:
    """Build models within `Init`, or whole ones."""

    def build(seed: int) -> nn.Module:
        model = Mixed(seed)
        with torch.no_grad():  # an edit that differs between ranks
            model.leaves[0].weight[-1] = seed
            model.leaves[2].weight.fill_(seed)
            model.leaves[2].weight[0, 0, 0], model.leaves[2].weight[0, 0, 1] = -0.0, torch.nan
        return model

    plain = build(5)

    def body(comm: Comm) -> None:
        with wherry.Init(STAGE3, mesh=comm, enabled=stage is None):
            model = build(5 + comm.rank)
        values = whole(model)
        if stage is not None:
            values = engine_of(model, settings(stage), comm).module.state_dict()
        for name, value in values.items():
            expected = plain.get_parameter(name).detach()
            assert torch.equal(value.nan_to_num(7.0), expected.nan_to_num(7.0)), name
            assert torch.equal(value.signbit(), expected.signbit())

    run_ranks(3, body)


def test_edits_of_gathered_weights_reach_the_shards_and_one_that_fails_is_dropped() -> None:
    def body(comm: Comm) -> None:
        with wherry.Init(STAGE3, mesh=comm):
            model = nn.Linear(5, 3)
            with wherry.Init(STAGE3, mesh=comm), wherry.gathered(model.weight, modifier_rank=1):
                model.weight.data.fill_(float(comm.rank))
        with wherry.gathered(model.bias):
            with wherry.gathered(model.bias, modifier_rank=1):
                if comm.rank == 1:
                    model.bias.data.fill_(2.0)
            assert bool((model.bias == 2.0).all())
        comm.traffic.clear()
        with pytest.raises(KeyError, match="missing"), wherry.gathered(model, modifier_rank=1):
            for parameter in model.parameters():
                parameter.data.fill_(9.0)
            raise KeyError("missing")
        assert dict(comm.traffic.calls) == {"all_gather": 2}
        assert all(bool(p.detach().isnan().all()) for p in model.parameters())
        wrong = wherry.gathered(model.bias, modifier_rank=2)
        with pytest.raises(WherryError, match="modifier_rank 2 is not a rank of 0 to 1"), wrong:
            pass
        assert_same(whole(model), {"weight": torch.ones(3, 5), "bias": torch.full((3,), 2.0)})

    run_ranks(2, body)


def test_memory_that_other_references_hold_is_copied() -> None:
    with wherry.Init(STAGE3):
        linear = nn.Linear(8, 8)
        held = linear.weight.data
        values = held.clone()
    held.fill_(7)
    assert torch.equal(whole(linear)["weight"], values)


def test_shards_of_parameters_on_disk_are_in_files(tmp_path: Any) -> None:
    config = settings(3)
    config["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    plain = seeded(TinyLM)
    with wherry.Init(config):
        model = seeded(TinyLM)
    assert not list(tmp_path.iterdir()), "the file is gone as soon as it is mapped"
    assert_same(whole(model), dict(plain.named_parameters(remove_duplicate=False)))
    with wherry.Init(config):
        linear, _ = nn.Linear(4, 4), nn.Linear(4, 4)
        linear.double()
    part = shard_of(linear.weight)
    assert part is not None and part.dtype == torch.float64 and part.shard.untyped_storage().filename is not None


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse at allocation: a write to a sparse file would end the process by a signal."""

    def full(handle: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match=r"Init: there is no room for 4\.00 KiB under .*No space left.*free some space"):
        Sharing(SoloComm(), CPU, CPU, str(tmp_path)).allocate(1024, torch.float32)
    assert not list(tmp_path.iterdir())
