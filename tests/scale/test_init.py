"""Models that are partitioned while they are built: their weights, their memory, and the end of the context."""

from __future__ import annotations

import copy
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    TinyLM,
    adamw,
    assert_near,
    assert_same,
    engine_of,
    masters_of,
    settings,
    train,
    train_plain,
)
from tests.forks import Forks
from tests.scale.live import LiveBytes
from torch import nn
from torch.nn.modules import module as torch_module

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
    """Every way in which user code initializes weights of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(7, 8))
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.lstm = nn.LSTM(8, 4)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.position, std=0.02)
        self.apply(self.initialize_)
        with torch.no_grad():
            self.layers[0].weight.mul_(0.5)
            self.layers[0].bias[2:4] = 3.0
            self.layers[1].weight.copy_(self.layers[0].weight.t() + torch.eye(8))
        self.layers[1].bias.data.fill_(7.0)
        one, other = self.layers[2].weight.data, self.layers[1].weight.data
        one.copy_(other * 2)
        nn.init.orthogonal_(self.layers[0].weight)
        self.layers[2].bias = nn.Parameter(self.layers[2].bias + 1)
        self.twin = copy.deepcopy(self.layers[0])
        self.scaled = nn.Parameter(torch.empty(3))
        self.scaled.data = torch.arange(3.0)
        self.register_buffer("norm", self.layers[0].weight.norm().detach())
        # weight_norm makes a new parameter of the old one.
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def initialize_(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)
            if module.bias is not None:
                nn.init.uniform_(module.bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position[: ids.shape[1]] + self.scaled.sum()
        for layer in [*self.layers, self.twin, self.normed]:
            x = torch.tanh(layer(x))
        return self.head(self.encoder(self.lstm(x)[0].repeat(1, 1, 2))).square().mean() + self.norm


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


@pytest.mark.parametrize("model_class", [Custom, TinyLM])
def test_weights_are_those_of_plain_construction(model_class: type[nn.Module]) -> None:
    plain = seeded(model_class)
    after = torch.rand(1)
    with wherry.Init(STAGE3):
        model = seeded(model_class)
    assert torch.equal(torch.rand(1), after)
    assert all(shard_of(p) is not None and bool(p.detach().isnan().all()) for p in model.parameters())
    assert_same(whole(model), dict(plain.named_parameters(remove_duplicate=False)))
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))
    assert_nothing_is_left()
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=STAGE3)
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
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.parametrize(("ranks", "precision"), [(2, {"bf16": {"enabled": True}}), (3, {})])
def test_ranks_hold_shards_of_rank_0s_values(ranks: int, precision: dict[str, Any]) -> None:
    plain = Drawn(0)

    def body(comm: Comm) -> None:
        with wherry.Init(settings(3, more=precision), mesh=comm):
            model = Drawn(comm.rank)
        for parameter in model.parameters():
            part = shard_of(parameter)
            assert part is not None and part.shard.numel() == -(-parameter.numel() // ranks)
        assert_same(whole(model), dict(plain.named_parameters()))
        optimizer = adamw(model.parameters())
        engine, *_ = wherry.initialize(model=model, optimizer=optimizer, config=settings(3, more=precision), mesh=comm)
        assert_same(masters_of(engine), {name: value.float() for name, value in plain.named_parameters()})
        engine.close()

    run_ranks(ranks, body)


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_equals_plain(ranks: int) -> None:
    def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * step + rank)),)

    def body(comm: Comm) -> tuple[list[float], dict[str, torch.Tensor]]:
        with wherry.Init(STAGE3, mesh=comm):
            model = Drawn(comm.rank)
        engine = engine_of(model, STAGE3, comm)
        losses = train(engine, 3, batch=batch)
        return losses, whole(engine.module)

    plain = train_plain(Drawn(0), ranks=ranks, steps=3, batch=batch)
    results = run_ranks(ranks, body)
    assert [sum(step) / ranks for step in zip(*(losses for losses, _ in results), strict=True)] == pytest.approx(
        plain.losses, rel=1e-5
    )
    assert_near(results[0][1], plain.weights)


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


def test_unattached_parameters_are_partitioned_when_the_next_are_built() -> None:
    with LiveBytes() as live, wherry.Init(STAGE3):
        layers = [nn.Linear(64, 64) for _ in range(8)]
        parts = [shard_of(p) for layer in layers for p in layer.parameters()]
        assert sum(part is not None and not part.whole for part in parts) == 14
    assert live.live <= 8 * 4 * (64 * 64 + 64) + 8192


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
    torch.manual_seed(0)
    before, after = nn.Linear(6, 6), nn.Linear(6, 6)
    expected = {f"{i}.{n}": p.detach().clone() for i, m in ((0, before), (2, after)) for n, p in m.named_parameters()}
    with wherry.Init(STAGE3):
        model = nn.Sequential(before, nn.Linear(6, 6))
    model.append(after)
    assert shard_of(before.weight) is not None and shard_of(after.weight) is None
    engine, *_ = wherry.initialize(model=model, config=STAGE3)
    state = engine.module.state_dict()
    for name, value in expected.items():
        assert torch.equal(state[name], value)
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


def test_a_context_works_again() -> None:
    context = wherry.Init(STAGE3)
    for _ in range(2):
        with context:
            model = nn.Linear(4, 4)
        assert shard_of(model.weight) is not None


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
    def build(comm: Comm) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if comm.rank == 1:
            raise MemoryError("no memory left")
        return model.append(nn.Linear(4, 4))

    def body(comm: Comm) -> Exception | None:
        try:
            with wherry.Init(STAGE3, mesh=comm):
                build(comm)
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


def test_values_of_any_dtype_and_stride_are_rank_0s() -> None:
    def build(seed: int) -> nn.Module:
        model = Mixed(seed)
        with torch.no_grad():  # an edit that differs between ranks
            model.leaves[0].weight[-1] = seed
            model.leaves[2].weight.fill_(seed)
            model.leaves[2].weight[0, 0, 0], model.leaves[2].weight[0, 0, 1] = -0.0, torch.nan
        return model

    plain = build(5)

    def body(comm: Comm) -> None:
        with wherry.Init(STAGE3, mesh=comm):
            model = build(5 + comm.rank)
        for name, value in whole(model).items():
            expected = plain.get_parameter(name).detach()
            assert torch.equal(value.nan_to_num(7.0), expected.nan_to_num(7.0)), name
            assert torch.equal(value.signbit(), expected.signbit())

    run_ranks(3, body)


@pytest.mark.parametrize("stage", [0, 3])
def test_rank_0s_whole_model_is_used_where_ranks_differ(stage: int) -> None:
    models = [Mixed(rank) for rank in range(2)]
    expected = {name: value.clone() for name, value in models[0].state_dict().items()}

    def body(comm: Comm) -> None:
        engine, *_ = wherry.initialize(model=models[comm.rank], config=settings(stage), mesh=comm)
        assert_same(engine.module.state_dict(), expected)

    run_ranks(2, body)


def test_partitioned_weights_are_not_broadcast_again() -> None:
    def body(comm: Comm) -> None:
        with wherry.Init(STAGE3, mesh=comm):
            model = Drawn(comm.rank)
        comm.traffic.clear()
        wherry.initialize(model=model, config=STAGE3, mesh=comm)
        assert not comm.traffic.calls["broadcast"]

    run_ranks(2, body)


def test_gathered_edits_shards() -> None:
    def body(comm: Comm) -> None:
        with wherry.Init(STAGE3, mesh=comm):
            model = nn.Linear(5, 3)
            with wherry.gathered(model.weight, modifier_rank=1):
                if comm.rank == 1:
                    nn.init.constant_(model.weight, 4.0)
        with wherry.gathered(model.bias):
            with wherry.gathered(model.bias, modifier_rank=1):
                if comm.rank == 1:
                    model.bias.data.fill_(2.0)
            assert bool((model.bias == 2.0).all())
        wrong = wherry.gathered(model.bias, modifier_rank=2)
        with pytest.raises(WherryError, match="modifier_rank 2 is not a rank of 0 to 1"), wrong:
            pass
        state = whole(model)
        assert bool((state["weight"] == 4.0).all()) and bool((state["bias"] == 2.0).all())

    run_ranks(2, body)


def test_an_edit_that_fails_is_dropped_without_communication() -> None:
    def body(comm: Comm) -> None:
        with wherry.Init(STAGE3, mesh=comm):
            model = Drawn(0, width=5, layers=1)
        before = whole(model)
        comm.traffic.clear()
        with pytest.raises(KeyError, match="missing"), wherry.gathered(model, modifier_rank=1):
            for parameter in model.parameters():
                parameter.data.fill_(9.0)
            raise KeyError("missing")
        assert dict(comm.traffic.calls) == {"all_gather": 2}
        assert all(bool(p.detach().isnan().all()) for p in model.parameters())
        assert_same(whole(model), before)

    run_ranks(2, body)


def test_edits_of_weights_of_an_outer_context() -> None:
    def body(comm: Comm) -> None:
        with wherry.Init(STAGE3, mesh=comm):
            model = nn.Linear(5, 3)
            with wherry.Init(STAGE3, mesh=comm), wherry.gathered(model.weight, modifier_rank=1):
                model.weight.data.fill_(float(comm.rank))
        assert bool((whole(model)["weight"] == 1.0).all())

    run_ranks(2, body)


def test_a_single_rank_keeps_the_memory_of_the_build() -> None:
    """Copy only memory that other references hold."""
    with wherry.Init(STAGE3):
        mine, other = nn.Linear(8, 8), nn.Linear(8, 8)
        address, held = mine.weight.data_ptr(), other.weight.data
        values = held.clone()
    kept, copied = shard_of(mine.weight), shard_of(other.weight)
    assert kept is not None and kept.shard.data_ptr() == address
    assert copied is not None and copied.shard.data_ptr() != held.data_ptr()
    held.fill_(7)
    with wherry.gathered(other):
        assert torch.equal(other.weight, values)


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


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_a_model_that_does_not_fit_is_built_within_its_limit(tmp_path: Path, forks: Forks) -> None:
    program = "from tests.scale.rss_of_init import main; main()"
    result = forks.run("-c", program, folder=tmp_path, launched=False)
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert "memory" in seen["plain"], seen
    assert seen["took"] <= 1.15 * seen["owed"], seen
    assert seen["small took"] <= 1.15 * seen["small owed"], seen
    assert seen["meta rest"] <= 1.05 * seen["meta owed"], seen


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse at allocation: a write to a sparse file would end the process by a signal."""

    def full(handle: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match=r"Init: there is no room for 4\.00 KiB under .*No space left.*free some space"):
        Sharing(SoloComm(), CPU, CPU, str(tmp_path)).allocate(1024, torch.float32)
    assert not list(tmp_path.iterdir())
