"""States that do not fit are found before training; with disk, less memory than they take is enough."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.engine.harness import TinyLM, engine_of, make_model, settings, train
from tests.tiers.rows import offload

from wherry.errors import WherryError
from wherry.sharding.grouping import plan_units
from wherry.tiers import disk
from wherry.tiers.disk_errors import DiskSpaceError
from wherry.tiers.host import HostMemoryError, check_host, free_host_memory


def start(config: dict[str, Any], blocks: int = 3) -> None:
    engine_of(make_model(lambda: TinyLM(blocks)), settings(3, more=config)).close()


def missing(config: dict[str, Any], blocks: int = 12) -> int:
    """Start within one byte of host memory; return the bytes that the error misses, and that one."""
    wherry = config.get("wherry", {}) | {"host_memory": "1B"}
    with pytest.raises(HostMemoryError) as caught:
        start(config | {"wherry": wherry}, blocks)
    return caught.value.missing + 1


def units_of(blocks: int = 12) -> list[int]:
    """Count the elements of the root, and of each block."""
    plans = plan_units(make_model(lambda: TinyLM(blocks)))
    return [sum(parameter.numel() for _, parameter in plan.parameters) for plan in plans]


def test_too_little_host_memory_is_found_before_training(tmp_path: Path) -> None:
    root, block, *_ = units = units_of()
    numel = sum(units)
    with pytest.raises(HostMemoryError, match=r"host_memory allows 195\.31 KiB") as caught:
        start({"wherry": {"host_memory": 200_000}}, blocks=12)
    # Weights, gradients and moments in fp32.
    assert caught.value.missing == 16 * numel - 200_000
    advice = '"offload_optimizer": {"device": "nvme", "nvme_path": ...} or "offload_param": {"device": "nvme"'
    assert advice in str(caught.value)
    with pytest.raises(HostMemoryError, match=r"150 bytes on each of 2 ranks here.*or more ranks on other machines"):
        check_host(150, 2, 100, 0, [])
    # The advice works. In memory are weights, gradients, and moments of four blocks at a time.
    needed = 8 * numel + 4 * 8 * block
    advised = offload("disk-3", tmp_path, "auto", optimizer={"buffer_count": 4})
    assert missing(advised) == needed
    advised["wherry"]["host_memory"] = needed
    start(advised, blocks=12)
    # In the backward the gradients of nine blocks wait for updates, and with fewer buffers those of fewer.
    early = offload("disk-3", tmp_path, "in_backward", optimizer={"buffer_count": 4})
    assert missing(early) == 4 * numel + 9 * 4 * block + 4 * 8 * block
    assert missing(offload("disk-3", tmp_path, "in_backward")) == 4 * numel + 2 * 8 * block + 5 * 4 * block
    # State that is not offloaded is in memory all the while.
    stays = root + block * ((numel // 2 - root) // block)  # whole units, as far as half of the elements goes
    kept = offload("disk-3", tmp_path, "before_use", optimizer={"ratio": 0.5})
    assert missing(kept) == 8 * numel + 8 * stays + 2 * 8 * block
    # Beside 16 bytes a parameter: the gradients that a late update reads, and the weights that it has written.
    assert missing({"wherry": {"update_policy": "delayed"}}) == 24 * numel


def test_memory_that_grows_as_it_is_used_is_what_the_config_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """States, activations and saves take it, though the system has almost nothing free."""
    real = psutil.virtual_memory
    monkeypatch.setattr(psutil, "virtual_memory", lambda: real()._replace(available=1000))
    with pytest.raises(HostMemoryError, match=r"what helps: .* or wherry\.host_memory, if memory grows as it is used"):
        start({}, blocks=12)
    caplog.set_level("INFO", "wherry")
    own = {"host_memory": "20GB", "checkpoint": {"async_save": True}}
    config = {"activation_checkpointing": {"policy": "auto"}, "wherry": own}
    with closing(engine_of(make_model(), settings(3, more=config))) as engine:
        train(engine, 3)
        engine.save_checkpoint(tmp_path)
    assert "units: 3 kept, 0 recomputed; " in caplog.text and "stands still" not in caplog.text
    assert free_host_memory() <= 1000 < 10 * 10**9 < free_host_memory(limit=20 * 10**9) < 20 * 10**9


def test_weights_that_stay_in_memory_need_no_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_free", lambda folder: 0)
    config = offload("disk-parameters", tmp_path, "at_step")
    config["zero_optimization"]["offload_param"]["max_in_cpu"] = 10_000
    start(config)
    config["zero_optimization"]["offload_param"]["max_in_cpu"] = 1_000
    with pytest.raises(DiskSpaceError):
        start(config)


def test_states_on_one_disk_have_to_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 weights are 4 and moments 8 bytes a parameter: room for each of them is not enough."""
    parameters = sum(p.numel() for p in make_model().parameters())
    monkeypatch.setattr(disk, "_free", lambda folder: 9 * parameters)
    with pytest.raises(DiskSpaceError, match=r"the disk tier needs .* are missing") as caught:
        start(offload("infinity", tmp_path, "at_step"))
    assert caught.value.missing == -(-12 * parameters // 4096) * 4096 - 9 * parameters
    assert 'keep more in memory, with "device": "cpu" in offload_optimizer or offload_param' in str(caught.value)


def test_policies_that_cannot_be_say_why(tmp_path: Path) -> None:
    overflow: dict[str, Any] = {"bf16": {"enabled": True, "check_grad_overflow": True}}
    with pytest.raises(WherryError, match="check_grad_overflow may skip a step"):
        start(offload("offload-3", tmp_path, "in_backward", **overflow))
    with pytest.raises(WherryError, match="delayed is for state that is all offloaded"):
        start(offload("offload-3", tmp_path, "delayed", optimizer={"ratio": 0.5}))


SMALL = """
import resource, sys
import torch, wherry
from torch import nn
torch.set_num_threads(1)
where, limit = {"device": "nvme", "nvme_path": sys.argv[1], "buffer_count": 2}, 120_000_000
torch.randn(64, 64) @ torch.randn(64, 64)
wherry.initialize(model=nn.Linear(2, 2), config={"optimizer": {"type": "AdamW", "params": {}}})[0].close()
# Memory of its own that the process may have, from here on: the data segment, which holds private mappings.
now = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmData"))) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (now + limit, now + limit))
offload = {"offload_optimizer": where, "offload_param": {**where, "max_in_cpu": 0}}
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, **(offload if sys.argv[1] != "-" else {})},
    "wherry": {"update_policy": "in_backward"},
}
with wherry.Init(config=config):
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24)))
assert 16 * sum(p.numel() for p in model.parameters()) > 3 * limit
engine, *_ = wherry.initialize(model=model, config=config)
for step in range(2):
    engine.backward(engine(torch.randn(4, 1024)).square().mean())
    engine.step()
engine.close()
"""


def test_a_model_whose_states_are_several_times_the_memory_trains(tmp_path: Path, launched: object) -> None:
    """402 MB of states within 120 MB; without the disk the same process is out of memory."""
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    for folder, fails in ((str(tmp_path), False), ("-", True)):
        command = [sys.executable, "-c", SMALL, folder]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
        assert bool(done.returncode) == fails, done.stderr[-2000:]
    assert "memory" in done.stderr and list(tmp_path.iterdir()) == []
