"""States that do not fit are found before training; with disk, less memory than they take is enough."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import TinyLM, adamw, make_model, settings
from tests.forks import Forks
from tests.tiers.rows import offload

import wherry
from wherry.errors import WherryError
from wherry.sharding.grouping import plan_units
from wherry.tiers import disk
from wherry.tiers.buffers import untouched
from wherry.tiers.disk_errors import DiskSpaceError
from wherry.tiers.host import HostMemoryError, check_host


def start(config: dict[str, Any], blocks: int = 3) -> None:
    model = make_model(lambda: TinyLM(blocks))
    wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=settings(3, more=config))[0].close()


def units_of(blocks: int = 3) -> list[int]:
    """Elements of the root, and of each block."""
    plans = plan_units(make_model(lambda: TinyLM(blocks)))
    return [sum(parameter.numel() for _, parameter in plan.parameters) for plan in plans]


def test_too_little_host_memory_is_found_before_training(tmp_path: Path) -> None:
    limit = 200_000
    with pytest.raises(HostMemoryError) as caught:
        start({"wherry": {"host_memory": limit}}, blocks=12)
    message = str(caught.value)
    assert "host_memory allows 195.31 KiB" in message
    # Weights, gradients and moments in fp32.
    _, block, *_ = units = units_of(12)
    numel = sum(units)
    assert caught.value.missing == 16 * numel - limit
    assert '"offload_optimizer": {"device": "nvme", "nvme_path": ...} or "offload_param": {"device": "nvme"' in message
    # What is advised works. In memory are moments of four blocks at a time, and gradients of nine, which wait for their
    # updates.
    needed = 4 * numel + 9 * 4 * block + 4 * 8 * block
    advised = offload("disk-3", tmp_path, "auto")
    advised["wherry"]["host_memory"] = needed
    advised["zero_optimization"]["offload_optimizer"]["buffer_count"] = 4
    start(advised, blocks=12)
    advised["wherry"]["host_memory"] = needed - 1
    with pytest.raises(HostMemoryError, match="1 byte"):
        start(advised, blocks=12)
    # With fewer buffers fewer gradients wait, too.
    with pytest.raises(HostMemoryError) as caught:
        start(offload("disk-3", tmp_path, "in_backward") | {"wherry": {"host_memory": "1B"}}, blocks=12)
    assert caught.value.missing == 4 * numel + 2 * 8 * block + 5 * 4 * block - 1
    # State that is not offloaded is in memory all the while.
    kept = offload("disk-3", tmp_path, "before_use", optimizer={"ratio": 0.5})
    kept["wherry"]["host_memory"] = "1B"
    with pytest.raises(HostMemoryError) as caught:
        start(kept, blocks=12)
    stays = units[0] + block * ((numel // 2 - units[0]) // block)  # whole units, as far as half of the elements goes
    assert caught.value.missing == 8 * numel + 8 * stays + 2 * 8 * block - 1


def test_weights_that_stay_in_memory_need_no_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_free", lambda folder: 0)
    config = offload("disk-parameters", tmp_path, "at_step")
    config["zero_optimization"]["offload_param"]["max_in_cpu"] = 10_000
    start(config)
    config["zero_optimization"]["offload_param"]["max_in_cpu"] = 1_000
    with pytest.raises(DiskSpaceError):
        start(config)


def test_the_copies_of_delayed_updates_are_counted() -> None:
    """Beside 16 bytes a parameter: the gradients that a late update reads, and the weights that it has written."""
    with pytest.raises(HostMemoryError) as caught:
        start({"wherry": {"host_memory": "50000B", "update_policy": "delayed"}})
    assert caught.value.missing == 24 * sum(units_of()) - 50_000


def test_states_on_one_disk_have_to_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 weights are 4 and moments 8 bytes a parameter: room for each of them is not enough."""
    parameters = sum(p.numel() for p in make_model().parameters())
    monkeypatch.setattr(disk, "_free", lambda folder: 9 * parameters)
    with pytest.raises(DiskSpaceError, match=r"the disk tier needs .* are missing") as caught:
        start(offload("infinity", tmp_path, "at_step"))
    assert caught.value.missing == -(-12 * parameters // 4096) * 4096 - 9 * parameters
    assert 'keep more in memory, with "device": "cpu" in offload_optimizer or offload_param' in str(caught.value)


def test_advice_for_a_host_that_is_full() -> None:
    with pytest.raises(HostMemoryError, match=r"50 bytes are missing; what helps: less or a larger wherry.host_memory"):
        check_host(150, 1, 100, 0, ["less"])
    with pytest.raises(HostMemoryError, match=r"150 bytes on each of 2 ranks here.*or more ranks on other machines"):
        check_host(150, 2, 100, 0, [])


def test_policies_that_cannot_be_say_why(tmp_path: Path) -> None:
    for more, why in (
        ({"bf16": {"enabled": True, "check_grad_overflow": True}}, "check_grad_overflow may skip a step"),
        ({"optimizer": {"ratio": 0.5}}, None),
    ):
        policy = "in_backward" if why else "delayed"
        with pytest.raises(WherryError, match=why or "delayed is for state that is all offloaded"):
            start(offload("offload-3", tmp_path, policy, **more))


@pytest.mark.skipif(sys.platform != "linux", reason="what nobody has written to is asked of Linux")
@pytest.mark.parametrize("tier", ["device", "host"])
def test_new_state_takes_memory_with_the_first_update(tier: str) -> None:
    """Until then it is promised, and counts as taken."""
    model = torch.nn.Linear(1024, 1024)
    offloaded = {} if tier == "device" else {"offload_optimizer": {"device": "cpu"}}
    before, moments = untouched(), 8 * sum(p.numel() for p in model.parameters())
    engine = wherry.initialize(
        model=model, optimizer=adamw(model.parameters()), config=settings(2, more={"zero_optimization": offloaded})
    )[0]
    assert untouched() - before > 0.9 * moments
    engine.backward(engine(torch.randn(2, 1024)).sum())
    engine.step()
    assert untouched() - before < 0.1 * moments
    engine.close()


SMALL = """
import resource, sys
import torch, wherry
from torch import nn
torch.set_num_threads(1)

class Net(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.square().mean()

folder, limit = sys.argv[1], int(sys.argv[2])
width, blocks = 1024, 24
torch.randn(64, 64) @ torch.randn(64, 64)
wherry.initialize(model=nn.Linear(2, 2), config={"optimizer": {"type": "AdamW", "params": {}}})[0].close()
# Memory of its own that the process may have, from here on: the data segment, which holds private mappings.
now = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmData"))) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (now + limit, now + limit))
where = {"device": "nvme", "nvme_path": folder}
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {**where, "buffer_count": 2},
        "offload_param": {**where, "max_in_cpu": 0, "buffer_count": 2},
    } if folder != "-" else {"stage": 3},
}
with wherry.Init(config=config):
    model = Net(width, blocks)
states = 16 * sum(p.numel() for p in model.parameters())
engine, *_ = wherry.initialize(model=model, config=config)
torch.manual_seed(0)
for step in range(2):
    loss = engine(torch.randn(4, width))
    engine.backward(loss)
    engine.step()
print("states", states, "loss", float(loss))
engine.close()
"""


def run_small(tmp_path: Path, folder: str, limit: int) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "small.py"
    script.write_text(SMALL)
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), folder, str(limit)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)


@pytest.mark.usefixtures("launched")
def test_a_model_whose_states_are_several_times_the_memory_trains(tmp_path: Path) -> None:
    """402 MB of states within 100 MB; without the disk the same process is out of memory."""
    swap = tmp_path / "swap"
    swap.mkdir()
    done = run_small(tmp_path, str(swap), 100_000_000)
    assert done.returncode == 0, done.stderr[-2000:]
    states = int(done.stdout.split()[1])
    assert states > 4 * 100_000_000
    assert list(swap.iterdir()) == []
    assert run_small(tmp_path, "-", 100_000_000).returncode != 0


KILLED = """
import sys, time
import torch, wherry
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
where = {"device": "nvme", "nvme_path": sys.argv[1]}
config = {"optimizer": {"type": "AdamW", "params": {}}, "zero_optimization": {"stage": 2, "offload_optimizer": where}}
engine, *_ = wherry.initialize(model=model, config=config)
while True:
    engine.backward(engine(torch.randn(2, 64)).sum())
    engine.step()
    print("step", flush=True)
    if len(sys.argv) > 2:
        break
engine.close()
"""


def test_after_a_kill_the_next_run_sweeps_what_is_left(tmp_path: Path, forks: Forks) -> None:
    script, swap = tmp_path / "killed.py", tmp_path / "swap"
    script.write_text(KILLED)
    swap.mkdir()
    child = forks.start([str(script), str(swap)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"step\n"
    child.kill()
    child.wait()
    child.stdout.close()
    assert len(list(swap.iterdir())) == 1
    assert forks.start([str(script), str(swap), "once"]).wait() == 0
    assert list(swap.iterdir()) == []
