"""The benchmark of accumulation runs, and counts what it says it counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from benchmarks import accumulation, bounds, steps, summary, systems, worker
from wherry.observe import bench


@pytest.mark.usefixtures("forked_rooms")
def test_both_orders_train_the_same_model(tmp_path: Path, capsys) -> None:
    path = tmp_path / "accumulation.json"
    arguments = ["--quick", "--models", "tiny", "--windows", "3", "--few-windows", "2", "--peers", "fsdp2"]
    arguments += ["--steps", "1", "--path", str(tmp_path)]
    assert accumulation.main([*arguments, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["reason"] for row in rows} == {None, "FSDP2 keeps states on the device or on the host"}
    assert all(row["system"].startswith("fsdp2-nvme k=") for row in rows if row["reason"] is not None)
    seen = {(row["system"], row["case"]["measure"]): row for row in rows if row["reason"] is None}
    kinds = ("", f" {accumulation.ON_DISK}")
    kinds += tuple(f" {order}{tight}" for order in accumulation.ORDERS for tight in ("", accumulation.TIGHT))
    checked = 0
    for window, tokens in (("k=3", 64), ("k=2, 16 tokens", 16)):
        plain = seen[f"plain {window}", "step"]
        for kind in kinds:
            step, read = (seen[f"wherry-3-nvme{kind} {window}", measure] for measure in ("step", "read"))
            assert step["case"]["tokens"] == read["case"]["tokens"] == tokens
            assert step["of_limit"] == pytest.approx(plain["value"] / step["value"])
            # How often weights are, and by which order, is for tests of counts.
            assert (read["of_limit"] is not None) == kind.endswith(accumulation.TIGHT)
            assert read["value"] >= bounds.STATE_BYTES["fp32"] * steps.MODELS["tiny"].parameters
            assert plain["losses"] == pytest.approx(step["losses"], rel=1e-4)
            assert plain["loss_difference"] == 0 <= step["loss_difference"] < 1e-4
            checked += 2
    assert len(seen) == checked + 2
    shown = capsys.readouterr().out
    assert "layer_major k=3" in shown and shown.count("fsdp2-nvme: FSDP2 keeps states") == 1
    assert all(len(line) <= bench.WIDTH for line in shown.splitlines() if not line.startswith("written:"))


@pytest.mark.usefixtures("forked_rooms")
def test_with_states_on_the_host_fsdp2_trains_the_same_model(tmp_path: Path) -> None:
    path = tmp_path / "accumulation.json"
    arguments = ["--quick", "--models", "tiny", "--place", "3-cpu", "--windows", "3", "--few-windows", "none"]
    assert accumulation.main([*arguments, "--peers", "fsdp2", "--steps", "3", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    rows = {row["system"]: row for row in result["rows"]}
    assert {row["case"]["measure"] for row in result["rows"]} == {"step"}  # nothing is on a disk
    assert result["part"] == "3-cpu"
    assert len(rows["plain k=3"]["losses"]) > 3
    assert rows["fsdp2-cpu k=3"]["losses"] == pytest.approx(rows["plain k=3"]["losses"], rel=systems.SAME_LOSS)
    assert 0 <= rows["fsdp2-cpu k=3"]["loss_difference"] <= systems.SAME_LOSS
    # Beside what Wherry does by itself.
    found = summary.times(rows["fsdp2-cpu k=3"], result["rows"])
    assert found == rows["wherry-3-cpu k=3"]["ratio"]["fsdp2-cpu k=3"]


def test_what_a_step_reads_is_all_that_it_puts_off(monkeypatch) -> None:
    """Updates read beside the steps: on a busy machine it may all be read behind the last of them."""

    class Late:
        put_off = 0

        def step(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            self.put_off += 100
            return torch.tensor(1.0)

        def settle(self) -> None:
            worker.DiskReads.total += self.put_off
            self.put_off = 0

    monkeypatch.setattr(worker.DiskReads, "total", 7)  # when it was built
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    rank = worker.Worker()
    rank.trainees["wherry-late"], rank.recipes["wherry-late"] = Late(), steps.MODELS["tiny"]
    assert [rank.time("wherry-late", count)["read_bytes"] for count in (3, 1)] == [100, 100]


def test_fsdp2_reduces_gradients_once_in_a_window() -> None:
    class Sharded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.said: list[tuple[str, bool]] = []

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return (self.weight * (ids - labels).float().mean()).sum()

        def set_requires_gradient_sync(self, wanted: bool) -> None:
            self.said.append(("reduce", wanted))

        def set_reshard_after_backward(self, wanted: bool) -> None:
            self.said.append(("shard", wanted))

    def said_in_a_step(**recipe: Any) -> list[tuple[str, bool]]:
        model = Sharded()
        ids = torch.arange(24).reshape(6, 4)
        systems.FullyShard(model, replace(steps.MODELS["tiny"], **recipe)).step(ids, ids + 1)
        return model.said

    window = [("reduce", False), ("shard", False)] * 2 + [("reduce", True), ("shard", True)]
    assert said_in_a_step(accumulation=3) == window
    assert said_in_a_step() == []


def test_ddp_reduces_gradients_once_in_a_window() -> None:
    class Copies(nn.Linear):
        inside = False
        said: ClassVar[list[bool]] = []

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            result = super().forward((ids - labels).float()).mean()
            result.register_hook(lambda gradient: self.said.append(self.inside))  # in the backward
            return result

        @contextmanager
        def no_sync(self) -> Iterator[None]:
            self.inside = True
            yield
            self.inside = False

    model, ids = Copies(4, 1), torch.arange(24).reshape(6, 4)
    systems.Replicated(model, replace(steps.MODELS["tiny"], accumulation=3)).step(ids, ids + 1)
    systems.Replicated(model, steps.MODELS["tiny"]).step(ids, ids + 1)
    assert model.said == [True, True, False, False]


def test_deepspeed_keeps_gradients_in_memory_that_it_would_not_read_from_disk() -> None:
    small, large = steps.MODELS["10m"], steps.MODELS["125m"]
    place = systems.PLACES["3-nvme"]
    assert small.hidden // 2 * 4 % systems.SECTOR != 0  # a bias is no whole number of sectors
    told = systems.right_gradients(place, small, 2)["aio"]["block_size"]
    partitions = [weight.numel() * 4 // 2 for weight in small.model().parameters()]
    assert max(partitions) < told < 4 * small.parameters // 2 // systems.GROUPED.groups  # states rest on disk
    assert systems.right_gradients(place, small, 1) == systems.right_gradients(place, large, 2) == {}
    assert systems.right_gradients(systems.PLACES["3-cpu"], small, 2) == {}


def test_the_aim_counts_states_on_disk_alone() -> None:
    (aim,) = (aim for aim in summary.AIMS if "accumulation" in aim.benchmarks)
    case = {"window": 8, "measure": "step"}
    for place, counts in (("3-nvme", True), (f"3-nvme {accumulation.ON_DISK}", True), ("3-cpu", False)):
        rows = [bench.row(case, f"{who}-{place} k=8", "s", [1.0]) for who in ("wherry", "deepspeed")]
        bench.compare(rows)
        assert (aim.figure(rows[1], rows) is not None) is counts
    names = {"wherry-3-nvme": 1.0, f"wherry-3-nvme {accumulation.ON_DISK}": 2.0, "wherry-3-nvme layer_major": 0.5}
    names |= {"deepspeed-3-nvme": 4.0, f"deepspeed-3-nvme {accumulation.ON_DISK}": 6.0}
    rows = [bench.row(case, f"{name} k=8", "s", [seconds]) for name, seconds in names.items()]
    bench.compare(rows)
    assert [aim.figure(row, rows) for row in rows[3:]] == [4.0, 3.0]  # each beside the same of ours


def test_weights_on_disk_have_their_peer_and_enough_buffers() -> None:
    found = accumulation.entries_of("10m", "3-nvme", (4, 8), ("deepspeed", "fsdp2"), 1)
    peers = {entry.label: entry.recipe for entry in found if entry.system == "deepspeed-3-nvme"}
    assert list(peers) == [f"deepspeed-3-nvme k={k}" for k in (4, 8)] + ["deepspeed-3-nvme weights on disk k=8"]
    tight = peers["deepspeed-3-nvme weights on disk k=8"]
    weights = [weight.numel() for weight in tight.model().parameters()]
    told = systems.enough_buffers(tight)
    assert told["buffer_size"] == max(weights)
    assert told["buffer_count"] > sum(4 * numel >= 2**20 for numel in weights)  # those that it reads from disk
    assert systems.enough_buffers(peers["deepspeed-3-nvme k=8"]) == {}
    config = systems.config_of(systems.PLACES["3-nvme"], tight, 1)
    assert config["zero_optimization"]["offload_param"]["max_in_cpu"] == 0


@pytest.mark.parametrize(("system", "ends"), [("wherry-3-nvme k=8", True), ("deepspeed-3-nvme k=8", False)])
def test_losses_of_peers_are_compared_too(system: str, ends: bool, capsys) -> None:
    def turn(*losses: float) -> steps.Turn:
        return steps.Turn([1.0], 0, 0, list(losses), 0.0, [])

    one = accumulation.micro_batch("tiny", None)
    recipe = replace(one, accumulation=8, batch=8 * one.batch)
    entry = steps.Entry("tiny", 1, system.partition(" ")[0], 1, recipe=recipe, label=system)
    entry.reason = None
    rows = accumulation.rows_of(entry, [turn(5.0, 4.02)], [turn(5.0, 4.0)])
    assert rows[0]["loss_difference"] == pytest.approx(0.005)
    if ends:
        with pytest.raises(SystemExit, match=f"{system} has other losses than plain PyTorch: 5e-03 off"):
            accumulation._check_losses(rows)
    else:
        accumulation._check_losses(rows)
        accumulation.table(rows)
        assert f"{system}: NOT THE LOSSES OF PLAIN PYTORCH, 5e-03 off" in capsys.readouterr().out
