"""Several hosts, reached by a command that stands in for ssh."""

import signal

import pytest
from tests.cli.programs import WHERRY, WRITE_PID, gone, launched, pids_in, script, start_fork, wait_for, wherry

from wherry.errors import WherryError
from wherry.parallel.hostfile import Host, read_hostfile, select

HOSTS = [Host("a", (0, 1)), Host("b", (0, 1, 2, 3))]


@pytest.fixture(name="fleet")
def _fleet(tmp_path, launched):
    """Flags for two hosts of one slot each, which are this machine."""
    return launched.fleet(tmp_path)


def test_ranks_follow_the_order_of_the_hosts(tmp_path, fleet):
    body = (
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'GROUP_RANK', 'CUDA_VISIBLE_DEVICES', 'NCCL_TEST')\n"
        "print('seen', *(os.environ[name] for name in names), *sys.argv[1:], flush=True)\n"
    )
    done = wherry("run", *fleet, "--max-restarts", 0, script(tmp_path, body), "a b", cwd=tmp_path, NCCL_TEST="kept")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "seen" in line) == [
        "[alpha] seen 0 2 0 0 0 kept a b",
        "[beta] seen 1 2 0 1 0 kept a b",
    ]
    assert sorted((tmp_path / "reached").read_text().split()) == ["alpha", "beta"]


@pytest.mark.smoke
def test_ranks_that_start_again_have_a_new_store(tmp_path, fleet):
    body = (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "if attempt == '0': raise ValueError('unwell')\n"
        "print('attempt', attempt, flush=True)\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    done = launched("run", *fleet, "--max-restarts", 1, script(tmp_path, body), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("] attempt 1\n") == 2


def test_a_failure_on_one_host_ends_the_others_and_comes_last(tmp_path, fleet):
    body = (
        WRITE_PID
        + "while len(list(HERE.glob('pid.*'))) < 2: time.sleep(0.01)\n"
        + "if os.environ['RANK'] == '1':\n    raise KeyError('beta is unwell')\ntime.sleep(600)\n"
    )
    done = launched("run", *fleet, script(tmp_path, body), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1] == "KeyError: 'beta is unwell'"
    assert done.stderr.startswith("wherry: on host beta:\nwherry: rank 1 failed, and all ranks have ended.")
    assert (done.stdout + done.stderr).count("Traceback") == 1
    assert "wherry-failure" not in done.stdout + done.stderr
    assert len(pids_in(tmp_path)) == 2
    wait_for(lambda: gone(pids_in(tmp_path)))


def test_ctrl_c_reaches_every_host(tmp_path, fleet):
    body = (
        "try:\n    " + WRITE_PID + "    time.sleep(600)\nexcept KeyboardInterrupt:\n"
        "    (HERE / f\"interrupted.{os.environ['RANK']}\").touch()\n"
    )
    launcher = start_fork(*WHERRY, "run", *fleet, script(tmp_path, body), cwd=tmp_path)
    wait_for(lambda: len(pids_in(tmp_path)) == 2)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert {path.name for path in tmp_path.glob("interrupted.*")} == {"interrupted.0", "interrupted.1"}
    assert gone(pids_in(tmp_path))


def test_a_host_out_of_reach_is_named(tmp_path, fleet):
    (tmp_path / "ssh").write_text('#!/bin/sh\necho "ssh: no route to $1"\nexit 255\n')
    done = launched("run", *fleet, script(tmp_path, ""), cwd=tmp_path)
    assert done.returncode == 255
    assert "no route to" in done.stdout
    assert "the launcher on" in done.stderr and "ended with status 255" in done.stderr


def test_a_hostfile_is_read(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# cluster\na slots=2\n\n  b   slots = 4 # big\n")
    assert read_hostfile(str(path)) == HOSTS
    for text, message in (
        ("a slots=2\nb\n", r"hosts:2: expected `name slots=N`, got 'b'"),
        ("a slots=2\na slots=3\n", r"hosts:2: a stands in the file twice"),
        ("# nobody\n", r"names no host"),
    ):
        path.write_text(text)
        with pytest.raises(WherryError, match=message):
            read_hostfile(str(path))
    with pytest.raises(WherryError, match="no such file"):
        read_hostfile(str(path) + ".missing")


def test_hosts_and_slots_are_selected():
    for include, exclude, left in (
        ("", "", HOSTS),
        ("a@b:3,1", "", [Host("a", (0, 1)), Host("b", (1, 3))]),
        ("b:0@b:2", "", [Host("b", (0, 2))]),
        ("", "a:0@b:1,2", [Host("a", (1,)), Host("b", (0, 3))]),
        ("", "a:0,1", [Host("b", (0, 1, 2, 3))]),
    ):
        assert select(HOSTS, include, exclude) == left
    for include, exclude, message in (
        ("a", "b", "cannot be given together"),
        ("c", "", "unknown host 'c'; the hosts are a, b"),
        ("a:2", "", "a has no slot 2; it has 0, 1"),
        ("", "a:x", "expected host:0,1"),
        ("", "a@b", "no slot is left"),
    ):
        with pytest.raises(WherryError, match=message):
            select(HOSTS, include, exclude)
