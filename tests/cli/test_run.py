"""Flags of `wherry run`, its job files, and its choice of a root cause; no rank is started."""

import itertools
import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

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
        # Set first, so that a variable which was absent is absent again after the test.
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)


def parse(*flags):
    return build_parser().parse_args([*map(str, flags), "script.py", "--lr", "1"])


def resolved(*flags, nodes="1"):
    arguments = parse(*flags)
    resolve(arguments, nodes)
    return arguments


def test_every_flag_of_torchrun_is_accepted():
    from torch.distributed.run import get_args_parser

    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    ours = {name for action in build_parser()._actions for name in action.option_strings}
    assert theirs <= ours
    assert {"--num_nodes", "--num_gpus", "--hostfile", "--include", "--exclude", "--module", "--nproc"} <= ours


def test_ranks_rendezvous_on_this_machine_or_at_the_master(monkeypatch):
    for flags, nodes, met in (
        (("--num_gpus", 1), "1", ("wherry", "127.0.0.1:0", "rank=0")),
        (("--num_nodes", 2, "--master_addr", "head"), "2", ("wherry", "head:29500", "")),
        (("--master_addr", "head", "--master_port", 4, "--node_rank", 1), "2", ("wherry", "head:4", "rank=1")),
        (("--rdzv-backend", "c10d", "--rdzv-endpoint", "h:1", "--rdzv-id", "x"), "1", ("c10d", "h:1", "")),
    ):
        found = resolved(*flags, "--nproc", 1, nodes=nodes)
        assert (found.rdzv_backend, found.rdzv_endpoint, found.rdzv_conf) == met
        assert found.nproc_per_node == "1" and found.training_script_args == ["--lr", "1"]
    with pytest.raises(WherryError, match="need a place to meet"):
        resolved("--nproc", 1, nodes="2")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "5")
    assert given_processes(parse()) == "5"


def test_ranks_of_one_machine_use_the_loopback_unless_the_environment_names_another(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    resolved("--nproc", 1, "--num_nodes", 2, "--master_addr", "head", nodes="2")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    resolved("--nproc", 1)
    places = psutil.net_if_addrs()[os.environ["GLOO_SOCKET_IFNAME"]]
    assert "127.0.0.1" in [place.address for place in places]
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"


def test_devices_are_chosen_among_the_visible_ones(monkeypatch):
    monkeypatch.setattr(run, "device_count", lambda: 4)
    for seen, flags, left in (
        ("", ("--include", "localhost:0,2"), "0,2"),
        ("4,5,GPU-6f2a,7", ("--include", "localhost:0,2"), "4,GPU-6f2a"),
        ("4,5,6,7", ("--exclude", "localhost:1"), "4,6,7"),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
        arguments = parse(*flags)
        run._restrict_this_machine(arguments)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == left
        assert arguments.nproc_per_node == str(left.count(",") + 1)


def test_more_gpus_than_there_are_is_a_mistake_only_where_there_are_some(monkeypatch):
    monkeypatch.setattr("wherry.cli.run.device_count", lambda: 2)
    with pytest.raises(WherryError, match="this machine has 2"):
        number_of_processes(parse("--num_gpus", 3))
    assert number_of_processes(parse()) == "2"
    monkeypatch.setattr("wherry.cli.run.device_count", lambda: 0)
    assert number_of_processes(parse("--num_gpus", 3)) == "3"
    assert number_of_processes(parse()) == "1"


# Arguments, and the message.
MISTAKES = [
    ("--num_gpus 2 --nproc 3 script.py", "--num_gpus 2 and --nproc 3 differ"),
    ("--nproc 0 script.py", "--nproc: expected a number from 1 to 1024, got '0'"),
    ("--num_nodes 2 --nnodes 3 script.py", "--num_nodes 2 and --nnodes 3 differ"),
    ("--nnodes 1:2:3 --master_addr x script.py", "expected a number of machines"),
    ("--nproc 2 nope.py", r"nope\.py: there is no such script; a module goes with --module"),
    ("--nproc 2 .", "this is a folder; name the script in it"),
    ("--on ray --hostfile hosts train.py", "--on ray: --hostfile has no place here"),
    ("--on ray train.py", "--on ray: no Ray cluster is here; start one with `ray start --head`"),
    ("--emit slurm --hostfile hosts train.py", "has no place in a job file"),
    ("--emit slurm --include localhost:0 train.py", "has no place in a job file"),
    ("--emit slurm --local_rank_arg train.py", "has no place in a job file"),
    ("--emit sky train.py", "--emit sky: new machines have no Wherry; give --install"),
    ("--emit sky --install w.whl train.py", "--install w.whl: expected a wheel or a clone in this folder"),
    ("--emit sky --install / train.py", "--install /: expected a wheel or a clone in this folder"),
    ("--install w.whl train.py", "it goes with --emit"),
]


def test_mistakes_are_errors_before_ranks_start(monkeypatch, tmp_path):
    def init(**_):
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    for words, message in MISTAKES:
        with pytest.raises(WherryError, match=message):
            main(words.split())


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
    shown = cause.describe([lost, ended, later, cause], 4)
    assert shown == (
        "wherry: the same error on ranks 2, 3, and all ranks have ended. The traceback of rank 2:\n\nTraceback ..."
    )
    other = RankFailure(0, 1, "KeyError: 'also'", "Traceback ...", time_ns=9)
    assert cause.describe([other, cause], 2).splitlines()[:2] == [
        "wherry: rank 0 failed as well: KeyError: 'also'",
        "wherry: rank 2 failed, and all ranks have ended. Its traceback:",
    ]


def test_arguments_of_the_script_are_not_parsed():
    parser = build_parser()
    flags = ("--nproc 2", "--nproc=2", "--max-r 1", "-t3", "-t 3 -m", "--nproc 2 --", "")
    words = ("--nproc 5 --help --include x", "--n 5", "-- --x", "-h", "--r=1 -m", "-H", "")
    for given, rest in itertools.product(flags, words):
        found, left = run.parse_up_to_script(parser, [*given.split(), "train.py", *rest.split()])
        assert (found.training_script, left) == ("train.py", rest.split())
        assert (found.nproc, found.max_restarts) == (2 if "nproc" in given else None, int("max" in given))
        assert (found.tee, found.module) == ("3" if "-t" in given else "0", "-m" in given.split())


def test_ranks_on_ray_take_gpus_where_machines_have_some():
    from wherry.cli.ray_nodes import _shape

    gpus = {"CPU": 32.0, "GPU": 8.0}
    machines = [{"Alive": alive, "Resources": found} for alive, found in ((True, gpus), (True, gpus), (False, gpus))]
    machines.append({"Alive": True, "Resources": {"CPU": 64.0}})

    def shape(*flags, of=machines):
        return _shape(build_parser().parse_args([*map(str, flags), "train.py"]), of)

    assert shape() == (2, {"CPU": 8, "GPU": 8})
    assert shape(of=machines[-1:]) == (1, {"CPU": 1})
    assert shape("--num_nodes", 1, "--num_gpus", 4) == (1, {"CPU": 4, "GPU": 4})
    assert shape("--num_nodes", 3) == (3, {"CPU": 8, "GPU": 8})


def test_a_wait_for_machines_of_ray_is_announced(monkeypatch, capsys):
    group = SimpleNamespace(wait=mock.Mock(side_effect=[False, KeyboardInterrupt]))
    ray = mock.Mock(**{"util.placement_group.return_value": group})
    ray.nodes.return_value = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}}]
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert main(["--on", "ray", "--nproc", "1", "--num_nodes", "3", "train.py"]) == 130
    assert capsys.readouterr().err == "wherry: waiting until Ray has 3 machines with 1 CPU and 1 GPU free\n"


# Job files.

SOMEWHERE = ("--install", "git+https://git.example/wherry")


def emit(capsys, scheduler, *flags):
    assert main(["--emit", scheduler, *map(str, flags), "my_train.py", "--name", "two words"]) == 0
    return capsys.readouterr().out


def test_a_job_of_each_scheduler(capsys):
    text = emit(capsys, "slurm", "--num_nodes", 3, "--num_gpus", 8)
    for line in ("#SBATCH --nodes=3", "#SBATCH --gpus-per-node=8", "--job-name=my-train", "my_train.py --name 'two wo"):
        assert line in text
    assert "srun --kill-on-bad-exit=1 bash -c 'exec torchrun --node-rank" in text
    job = yaml.safe_load(emit(capsys, "k8s", "--num_nodes", 2, "--num_gpus", 4))
    assert job["kind"] == "TrainJob" and job["spec"]["runtimeRef"]["name"] == "torch-distributed"
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["command"] == ["torchrun", "my_train.py", "--name", "two words"]
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 4}
    job = yaml.safe_load(emit(capsys, "sky", *SOMEWHERE, "--num_nodes", 2, "--nproc", 4))
    assert job["setup"] == f"python -m pip install {SOMEWHERE[1]}\n"
    assert job["num_nodes"] == 2 and "accelerators" not in job["resources"]
    assert "--nproc-per-node=4" in job["run"] and "SKYPILOT_NODE_RANK" in job["run"]
    assert "H100:8" in emit(capsys, "sky", *SOMEWHERE, "--num_gpus", 8)


def test_jobs_install_from_the_given_place_and_never_by_a_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wherry").mkdir()
    for scheduler in ("slurm", "k8s"):
        text = emit(capsys, scheduler)
        assert "pip install" not in text and ("already" in text or "holds your script and Wherry" in text)
        for given, shown in (("/shared/w.whl", "/shared/w.whl"), ("wherry", "./wherry"), (SOMEWHERE[1], SOMEWHERE[1])):
            assert f"python -m pip install {shown}" in emit(capsys, scheduler, "--install", given)
    command = yaml.safe_load(emit(capsys, "k8s", "--install", "w.whl"))["spec"]["trainer"]["command"]
    assert command[2] == 'python -m pip install ./w.whl && exec "$@"'
    for given in ("wherry", tmp_path / "wherry"):
        assert yaml.safe_load(emit(capsys, "sky", "--install", given))["setup"] == "python -m pip install ./wherry\n"


def test_a_job_for_a_script_written_for_deepspeed(capsys):
    alias = 'PYTHONPATH="$(python -m wherry.compat.deepspeed --path)'
    slurm = emit(capsys, "slurm", "--as-deepspeed", "--num_gpus", 8)
    assert slurm.index(alias) < slurm.index("srun")
    k8s = yaml.safe_load(emit(capsys, "k8s", "--as-deepspeed"))["spec"]["trainer"]["command"]
    assert k8s[:2] == ["bash", "-c"] and alias in k8s[2].replace("$$(", "$(")
    assert k8s[4:6] == ["torchrun", "my_train.py"]
    sky = yaml.safe_load(emit(capsys, "sky", *SOMEWHERE, "--as-deepspeed"))
    assert alias in sky["run"].splitlines()[0]
    for scheduler in ("slurm", "k8s", "sky"):
        assert alias not in emit(capsys, scheduler, *SOMEWHERE)
