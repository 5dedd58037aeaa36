"""Flags of `wherry run`, without starting anything."""

import os
import subprocess
from dataclasses import replace

import psutil
import pytest
import yaml

from wherry.cli import run
from wherry.cli.run import build_parser, given_processes, main, number_of_processes, resolve
from wherry.cli.supervise import RankFailure, root_cause
from wherry.errors import WherryError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PET_NNODES", "PET_NPROC_PER_NODE"):
        # So that what a test sets is taken back, though the variable was absent.
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)


def _parse(*flags):
    return build_parser().parse_args([*map(str, flags), "script.py", "--lr", "1"])


def _resolved(*flags, nodes="1"):
    arguments = _parse(*flags)
    resolve(arguments, nodes)
    return arguments


def test_every_flag_of_torchrun_is_accepted():
    from torch.distributed.run import get_args_parser

    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    ours = {name for action in build_parser()._actions for name in action.option_strings}
    assert theirs <= ours
    assert {"--num_nodes", "--num_gpus", "--hostfile", "--include", "--exclude", "--module", "--nproc"} <= ours


def test_one_machine_meets_on_a_free_port_of_its_own():
    arguments = _resolved("--num_gpus", 1)
    assert (arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_conf) == ("wherry", "127.0.0.1:0", "rank=0")
    assert arguments.nproc_per_node == "1" and arguments.training_script_args == ["--lr", "1"]


def test_ranks_of_one_machine_talk_over_the_loopback_unless_told_otherwise(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    _resolved("--nproc", 1, "--num_nodes", 2, "--master_addr", "head", nodes="2")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    _resolved("--nproc", 1)
    places = psutil.net_if_addrs()[os.environ["GLOO_SOCKET_IFNAME"]]
    assert "127.0.0.1" in [place.address for place in places]
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize(
    ("seen", "flags", "left"),
    [
        (None, ("--include", "localhost:0,2"), "0,2"),
        ("4,5,GPU-6f2a,7", ("--include", "localhost:0,2"), "4,GPU-6f2a"),
        ("4,5,6,7", ("--exclude", "localhost:1"), "4,6,7"),
    ],
)
def test_devices_are_chosen_among_those_in_sight(monkeypatch, seen, flags, left):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen or "")
    monkeypatch.setattr(run, "device_count", lambda: 4)
    arguments = _parse(*flags)
    run._restrict_this_machine(arguments)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left
    assert arguments.nproc_per_node == str(left.count(",") + 1)


def test_several_machines_meet_at_the_master():
    arguments = _resolved("--num_nodes", 2, "--master_addr", "head", "--nproc", 1, nodes="2")
    assert (arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_conf) == ("wherry", "head:29500", "")
    ordered = _resolved("--master_addr", "head", "--master_port", 4, "--node_rank", 1, "--nproc", 1, nodes="2")
    assert (ordered.rdzv_backend, ordered.rdzv_endpoint, ordered.rdzv_conf) == ("wherry", "head:4", "rank=1")
    with pytest.raises(WherryError, match="need a place to meet"):
        _resolved("--nproc", 1, nodes="2")


def test_what_torchrun_is_told_stays():
    arguments = _resolved("--rdzv-backend", "c10d", "--rdzv-endpoint", "h:1", "--rdzv-id", "x", "--nproc-per-node", 3)
    assert (arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.rdzv_id) == ("c10d", "h:1", "x")
    assert arguments.nproc_per_node == "3"


def test_the_environment_of_torchrun_is_heard(monkeypatch):
    monkeypatch.setenv("PET_NPROC_PER_NODE", "5")
    assert given_processes(_parse()) == "5"


@pytest.mark.parametrize(
    "flags,message",
    [
        (("--num_gpus", 2, "--nproc", 3), "--num_gpus 2 and --nproc 3 differ"),
        (("--nproc", 0), "--nproc: expected a number from 1 to 1024, got '0'"),
        (("--num_nodes", 2, "--nnodes", 3), "--num_nodes 2 and --nnodes 3 differ"),
        (("--nnodes", "1:2:3"), "expected a number of machines"),
    ],
)
def test_contradictions_are_told(flags, message):
    with pytest.raises(WherryError, match=message):
        main([*map(str, flags), "--master_addr", "x", "script.py"])


def test_a_script_that_is_not_there_is_told_before_anything_starts(tmp_path):
    with pytest.raises(WherryError, match=r"nope\.py: there is no such script; a module goes with --module"):
        main(["--nproc", "2", str(tmp_path / "nope.py")])
    with pytest.raises(WherryError, match="this is a folder; name the script in it"):
        main(["--nproc", "2", str(tmp_path)])


def test_more_gpus_than_there_are_is_a_mistake_only_where_there_are_some(monkeypatch):
    monkeypatch.setattr("wherry.cli.run.device_count", lambda: 2)
    with pytest.raises(WherryError, match="this machine has 2"):
        number_of_processes(_parse("--num_gpus", 3))
    assert number_of_processes(_parse()) == "2"
    monkeypatch.setattr("wherry.cli.run.device_count", lambda: 0)
    assert number_of_processes(_parse("--num_gpus", 3)) == "3"
    assert number_of_processes(_parse()) == "1"


def test_the_root_cause_is_neither_a_lost_peer_nor_an_ordered_end():
    lost = RankFailure(0, 1, "E: closed", "Traceback ... Connection closed by peer", time_ns=1)
    ended = RankFailure(1, -15, "", "", time_ns=0, recorded=False)
    cause = RankFailure(2, 1, "E: cause", "Traceback ...", time_ns=5)
    later = RankFailure(3, 1, "E: cause", "Traceback ...", time_ns=9)
    assert root_cause([lost, ended, later, cause]) is cause
    assert root_cause([lost, ended]) is lost
    stopped = replace(ended, unanswering="was stopped")
    assert root_cause([lost, stopped]) is stopped and root_cause([lost, stopped, cause]) is cause
    assert RankFailure.from_line(cause.to_line()) == cause
    assert RankFailure.from_line("wherry-failure {") is RankFailure.from_line('wherry-failure {"a": 1}') is None
    told = cause.describe([lost, ended, later, cause], 4)
    assert told == (
        "wherry: the same error on ranks 2, 3, and all ranks have ended. The traceback of rank 2:\n\nTraceback ..."
    )


@pytest.mark.parametrize("words", ["--nproc 5 --help --include x", "--n 5", "-- --x", "-h", "--r=1 -m", "-H", ""])
@pytest.mark.parametrize("flags", ["--nproc 2", "--nproc=2", "--max-r 1", "-t3", "-t 3 -m", "--nproc 2 --", ""])
def test_the_script_s_own_words_are_handed_on_unread(flags, words):
    found, rest = run.parse_up_to_script(build_parser(), [*flags.split(), "train.py", *words.split()])
    assert (found.training_script, rest) == ("train.py", words.split())
    assert (found.nproc, found.max_restarts) == (2 if "nproc" in flags else None, int("max" in flags))
    assert (found.tee, found.module) == ("3" if "-t" in flags else "0", "-m" in flags.split())


SOMEWHERE = ("--install", "git+https://git.example/wherry")


def _emit(capsys, scheduler, *flags):
    assert main(["--emit", scheduler, *map(str, flags), "my_train.py", "--name", "two words"]) == 0
    return capsys.readouterr().out


def test_slurm_job(capsys):
    text = _emit(capsys, "slurm", "--num_nodes", 3, "--num_gpus", 8)
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert "#SBATCH --nodes=3" in text and "#SBATCH --gpus-per-node=8" in text and "--job-name=my-train" in text
    assert (
        "srun --kill-on-bad-exit=1 bash -c 'exec torchrun --node-rank" in text
        and "my_train.py --name 'two words'" in text
    )


def test_kubernetes_job(capsys):
    job = yaml.safe_load(_emit(capsys, "k8s", "--num_nodes", 2, "--num_gpus", 4))
    assert job["kind"] == "TrainJob" and job["spec"]["runtimeRef"]["name"] == "torch-distributed"
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["command"] == ["torchrun", "my_train.py", "--name", "two words"]
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 4}


def test_sky_job(capsys):
    job = yaml.safe_load(_emit(capsys, "sky", *SOMEWHERE, "--num_nodes", 2, "--nproc", 4))
    assert job["setup"] == f"python -m pip install {SOMEWHERE[1]}\n"
    assert job["num_nodes"] == 2 and "accelerators" not in job["resources"]
    assert "--nproc-per-node=4" in job["run"] and "SKYPILOT_NODE_RANK" in job["run"]
    assert subprocess.run(["bash", "-n"], input=job["run"], text=True).returncode == 0
    assert "H100:8" in _emit(capsys, "sky", *SOMEWHERE, "--num_gpus", 8)


def test_jobs_install_from_where_they_are_told_and_never_by_a_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wherry").mkdir()
    for scheduler in ("slurm", "k8s"):
        text = _emit(capsys, scheduler)
        assert "pip install" not in text and ("already" in text or "holds your script and Wherry" in text)
        for given, told in (("/shared/w.whl", "/shared/w.whl"), ("wherry", "./wherry"), (SOMEWHERE[1], SOMEWHERE[1])):
            assert f"python -m pip install {told}" in _emit(capsys, scheduler, "--install", given)
    command = yaml.safe_load(_emit(capsys, "k8s", "--install", "w.whl"))["spec"]["trainer"]["command"]
    assert command[2] == 'python -m pip install ./w.whl && exec "$@"'
    for given in ("wherry", tmp_path / "wherry"):
        assert yaml.safe_load(_emit(capsys, "sky", "--install", given))["setup"] == "python -m pip install ./wherry\n"
    for flags, message in (
        ((), "--emit sky: new machines have no Wherry; give --install"),
        (("--install", "w.whl"), "--install w.whl: expected a wheel or a clone in this folder"),
        (("--install", "/"), "--install /: expected a wheel or a clone in this folder"),
    ):
        with pytest.raises(WherryError, match=message):
            main(["--emit", "sky", *flags, "my_train.py"])
    with pytest.raises(WherryError, match="it goes with --emit"):
        main(["--install", "w.whl", "my_train.py"])


def test_a_job_for_a_script_written_for_deepspeed(capsys):
    alias = 'PYTHONPATH="$(python -m wherry.compat.deepspeed --path)'
    slurm = _emit(capsys, "slurm", "--as-deepspeed", "--num_gpus", 8)
    assert slurm.index(alias) < slurm.index("srun")
    k8s = yaml.safe_load(_emit(capsys, "k8s", "--as-deepspeed"))["spec"]["trainer"]["command"]
    assert (
        k8s[:2] == ["bash", "-c"] and alias in k8s[2].replace("$$(", "$(") and k8s[4:6] == ["torchrun", "my_train.py"]
    )
    sky = yaml.safe_load(_emit(capsys, "sky", *SOMEWHERE, "--as-deepspeed"))
    assert alias in sky["run"].splitlines()[0]
    for scheduler in ("slurm", "k8s", "sky"):
        assert alias not in _emit(capsys, scheduler, *SOMEWHERE)


@pytest.mark.parametrize("flags", [("--hostfile", "hosts"), ("--include", "localhost:0"), ("--local_rank_arg",)])
def test_what_has_no_place_in_a_job_file_is_refused(flags):
    with pytest.raises(WherryError, match="has no place in a job file"):
        main(["--emit", "slurm", *flags, "my_train.py"])
