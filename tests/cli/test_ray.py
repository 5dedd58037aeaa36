"""Ranks on a Ray cluster of two machines, both of them this one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from wherry.cli.ray_nodes import _shape
from wherry.cli.run import build_parser, main
from wherry.errors import WherryError

from .programs import WRITE_PID, gone, pids_in, script, start, wait_for, wherry

ray = pytest.importorskip("ray", reason="an extra of 80 MB: pip install wherry[ray]")


@pytest.fixture(scope="module")
def ray_address() -> Iterator[dict[str, str]]:
    """The environment of a driver. Nothing is sent to Ray's makers, and no dashboard runs; the GPUs are numbers."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        settings: dict[str, Any] = {
            "num_cpus": 2,
            "num_gpus": 2,
            "object_store_memory": 80 << 20,
            "include_dashboard": False,
        }
        cluster = Cluster(initialize_head=True, head_node_args=settings)
        cluster.add_node(**settings)
        yield {"RAY_ADDRESS": cluster.address}
        cluster.shutdown()


def test_ranks_of_two_machines_talk_and_say_who_they_are(tmp_path: Path, ray_address: dict[str, str]) -> None:
    body = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1) * dist.get_rank()\n"
        "dist.all_reduce(total)\n"
        "names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NCCL_TEST CUDA_VISIBLE_DEVICES'.split()\n"
        "print('sum', total.item(), *(os.environ[name] for name in names), *sys.argv[1:])\n"
        "assert os.environ['MASTER_ADDR'] and os.environ['MASTER_PORT']\n"
        # What is handed on stands on no command line.
        "import psutil\n"
        "lines = [' '.join(found.info['cmdline'] or ()) for found in psutil.process_iter(['cmdline'])]\n"
        "assert not [line for line in lines if 'NCCL_TEST' in line]\n"
        "dist.destroy_process_group()\n"
    )
    done = wherry("run", "--on", "ray", script(tmp_path, body), "a b", cwd=tmp_path, NCCL_TEST="kept", **ray_address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "sum" in line) == [
        f"[rank {rank}] sum 6.0 {rank} 4 {rank % 2} 2 {rank // 2} kept 0,1 a b" for rank in range(4)
    ]


def test_all_start_again_when_a_machine_is_lost_and_a_failure_ends_all(
    tmp_path: Path, ray_address: dict[str, str]
) -> None:
    body = (
        "import psutil\n"
        + WRITE_PID
        + "while len(list(HERE.glob('pid.*'))) % 2: time.sleep(0.01)\n"
        + "if os.environ['RANK'] == '1':\n"
        + "    if len(list(HERE.glob('pid.*'))) > 2: raise KeyError('unwell')\n"
        + "    psutil.Process().parent().parent().kill()\n"  # Ray's process, which has started the launcher
        + "time.sleep(600)\n"
    )
    done = wherry(
        "run", "--on", "ray", "--nproc", 1, "--max-restarts", 1, script(tmp_path, body), cwd=tmp_path, **ray_address
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "is lost: " in done.stdout
    lines = done.stderr.rstrip().splitlines()
    again = lines.index("wherry: a rank failed; all start again (restart 1 of 1)")
    assert lines[again - 1].endswith("ended with status 1")
    assert lines[again + 1].startswith("wherry: on host ")
    assert lines[again + 2] == "wherry: rank 1 failed, and all ranks have ended. Its traceback:"
    assert lines[-1] == "KeyError: 'unwell'"
    assert len(pids_in(tmp_path)) == 4
    wait_for(lambda: gone(pids_in(tmp_path)))


def test_ctrl_c_reaches_every_machine(tmp_path: Path, ray_address: dict[str, str]) -> None:
    body = (
        "try:\n    " + WRITE_PID + "    time.sleep(600)\nexcept KeyboardInterrupt:\n"
        "    (HERE / f\"told.{os.environ['RANK']}\").touch()\n"
    )
    driver = start("run", "--on", "ray", "--nproc", 1, script(tmp_path, body), cwd=tmp_path, **ray_address)
    wait_for(lambda: len(pids_in(tmp_path)) == 2)
    driver.send_signal(signal.SIGINT)
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 130, output
    assert {path.name for path in tmp_path.glob("told.*")} == {"told.0", "told.1"}
    assert gone(pids_in(tmp_path))


def test_more_than_there_is_is_waited_for_aloud(tmp_path: Path, ray_address: dict[str, str]) -> None:
    driver = start(
        "run", "--on", "ray", "--nproc", 1, "--num_nodes", 3, script(tmp_path, ""), cwd=tmp_path, **ray_address
    )
    assert driver.stdout is not None
    line = driver.stdout.readline()
    driver.send_signal(signal.SIGINT)
    driver.communicate(timeout=60)
    assert line == "wherry: waiting until Ray has 3 machines with 1 CPU and 1 GPU free\n"
    assert driver.returncode == 130


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--hostfile", "hosts"), "--on ray: --hostfile has no place here"),
        (("--master_addr", "head"), "--on ray: --master_addr has no place here"),
        ((), "--on ray: no Ray cluster is here; start one with `ray start --head`"),
    ],
)
def test_what_cannot_be_is_told(monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], message: str) -> None:
    def nobody(**_: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", nobody)
    with pytest.raises(WherryError, match=message):
        main(["--on", "ray", *flags, "train.py"])


def test_ranks_take_gpus_where_there_are_some() -> None:
    gpus = {"CPU": 32.0, "GPU": 8.0}
    machines = [{"Alive": alive, "Resources": found} for alive, found in ((True, gpus), (True, gpus), (False, gpus))]
    machines.append({"Alive": True, "Resources": {"CPU": 64.0}})

    def shape(*flags: object) -> tuple[int, dict[str, int]]:
        return _shape(build_parser().parse_args([*map(str, flags), "train.py"]), machines)

    assert shape() == (2, {"CPU": 8, "GPU": 8})
    assert _shape(build_parser().parse_args(["train.py"]), machines[-1:]) == (1, {"CPU": 1})
    assert shape("--num_nodes", 1, "--num_gpus", 4) == (1, {"CPU": 4, "GPU": 4})
    assert shape("--num_nodes", 3) == (3, {"CPU": 8, "GPU": 8})
