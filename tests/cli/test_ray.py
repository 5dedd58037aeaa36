"""Ranks on a Ray cluster of two machines, both of which are this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.cli.programs import WRITE_PID, gone, pids_in, script, wait_for, wherry

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("launched")]


@pytest.fixture(scope="module")
def ray_address() -> Iterator[dict[str, str]]:
    """Start a cluster, without usage reports or dashboard, whose GPUs are numbers; return a driver's environment."""
    Cluster = pytest.importorskip("ray.cluster_utils", reason="needs the extra ray: pip install wherry[ray]").Cluster

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


def test_ranks_of_two_machines_sum_and_know_their_place(tmp_path, ray_address):
    body = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1) * dist.get_rank()\n"
        "dist.all_reduce(total)\n"
        "names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NCCL_TEST CUDA_VISIBLE_DEVICES'.split()\n"
        "print('sum', total.item(), *(os.environ[name] for name in names), *sys.argv[1:])\n"
        "assert os.environ['MASTER_ADDR'] and os.environ['MASTER_PORT']\n"
        "dist.destroy_process_group()\n"
    )
    done = wherry("run", "--on", "ray", script(tmp_path, body), "a b", cwd=tmp_path, NCCL_TEST="kept", **ray_address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "sum" in line) == [
        f"[rank {rank}] sum 6.0 {rank} 4 {rank % 2} 2 {rank // 2} kept 0,1 a b" for rank in range(4)
    ]


def test_all_start_again_when_a_machine_is_lost_and_a_failure_ends_all(tmp_path, ray_address):
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
