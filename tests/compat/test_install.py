"""How the alias is asked for, and how it refuses."""

import os
import subprocess
import sys

import pytest
from tests.cli.programs import environment, forked, free_port, launched, script
from tests.forks import Forks

from wherry.compat import deepspeed as alias

LOOK = """
import importlib.metadata, importlib.util, deepspeed
import wherry
assert importlib.util.find_spec("deepspeed").origin == deepspeed.__file__
assert importlib.metadata.version("deepspeed") == deepspeed.__version__ == "0.19.6+wherry"
assert "not DeepSpeed" in importlib.metadata.metadata("deepspeed")["Summary"]
assert issubclass(deepspeed.DeepSpeedEngine, wherry.Engine)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Runs code in a process that has imported torch, and nothing of Wherry."""
    with Forks("torch") as forks:
        yield lambda code, **extra: forks.run(
            "-c", code, folder=tmp_path_factory.mktemp("python"), launched=False, **extra
        )


@pytest.fixture(scope="module")
def folder():
    found = subprocess.run(
        [sys.executable, "-m", "wherry.compat.deepspeed", "--path"], env=environment(), capture_output=True, text=True
    )
    return found.stdout.strip()


def test_nothing_is_aliased_until_it_is_asked_for(python):
    done = python("import wherry, wherry.compat.deepspeed as c\nassert not c.installed()")
    assert (done.returncode, done.stderr) == (0, "")


def test_install_gives_the_alias_and_its_metadata_and_says_so(python):
    done = python(
        "import wherry.compat.deepspeed as c\nc.install()\nc.install()\nassert c.installed()\n"
        + LOOK
        + "c.uninstall()\n"
        "import sys\nassert not c.installed() and not {'deepspeed', 'deepspeed.zero'} & set(sys.modules)"
    )
    assert done.returncode == 0, done.stderr
    assert "import deepspeed gives Wherry" in done.stderr


def test_the_folder_on_the_path_gives_the_same_to_a_process_that_knows_nothing(python, folder):
    code = "import sys\nassert 'wherry.compat' not in sys.modules\n" + LOOK
    done = python(code, PYTHONPATH=os.pathsep.join([folder, environment()["PYTHONPATH"]]))
    assert done.returncode == 0, done.stderr
    assert "import deepspeed gives Wherry" in done.stderr


def test_only_rank_zero_says_it(python, folder):
    done = python("import deepspeed", RANK="1", PYTHONPATH=os.pathsep.join([folder, environment()["PYTHONPATH"]]))
    assert done.returncode == 0
    assert done.stderr == ""


def test_it_refuses_when_the_real_one_is_imported(python, tmp_path):
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("real = True")
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    code = "import deepspeed\nassert deepspeed.real\nimport wherry.compat.deepspeed as c\nc.install()"
    done = python(code, PYTHONPATH=path)
    assert done.returncode == 1
    assert f"deepspeed is imported already, from {package}" in done.stderr
    # One that is merely installed is passed over.
    done = python(
        "import wherry.compat.deepspeed as c\nc.install()\nimport deepspeed\ndeepspeed.zero.Init", PYTHONPATH=path
    )
    assert done.returncode == 0, done.stderr


CHILD = """
import multiprocessing, os, sys

def look(queue):
    import importlib.metadata, deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.moe.layer import MoE
    queue.put((deepspeed.__version__, importlib.metadata.version("deepspeed"), os.getppid()))

if __name__ == "__main__":
    if "--install" in sys.argv:
        import wherry.compat.deepspeed as c
        c.install()
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    child = context.Process(target=look, args=(queue,))
    child.start()
    print(queue.get(timeout=100))
    child.join()
    assert child.exitcode == 0
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_child_processes_see_it(tmp_path, folder, method):
    path = script(tmp_path, CHILD)
    done = subprocess.run(
        [sys.executable, str(path), method],
        env=environment(PYTHONPATH=os.pathsep.join([folder, environment()["PYTHONPATH"]])),
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "'0.19.6+wherry', '0.19.6+wherry'" in done.stdout


def test_forked_children_inherit_the_hook(tmp_path):
    path = script(tmp_path, CHILD)
    done = subprocess.run(
        [sys.executable, str(path), "fork", "--install"], env=environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr


def test_the_launcher_gives_it_to_every_rank(tmp_path):
    path = script(tmp_path, LOOK + "print('rank', os.environ['RANK'], 'sees it')\n")
    done = launched("run", "--as-deepspeed", "--nproc", 2, path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sees it") == 2
    assert done.stderr.count("import deepspeed gives Wherry") == 1
    without = script(tmp_path, "import wherry.compat.deepspeed as c\nassert not c.installed()\n", "without.py")
    assert launched("run", without).returncode == 0


def test_the_command_of_the_alias_takes_the_flags_of_the_other_launcher(tmp_path):
    path = script(tmp_path, LOOK + "print(sys.argv[1:])\n")
    program = [sys.executable, str(alias.PROGRAMS / "deepspeed")]

    def deepspeed(*arguments):
        return subprocess.run(
            [*program, *map(str, arguments)], env=environment(), capture_output=True, text=True, timeout=200
        )

    done = deepspeed("--num_gpus", 1, "--master_port", free_port(), "--no_ssh", path, "--deepspeed_config", "c.json")
    assert done.returncode == 0, done.stderr
    assert "['--local_rank=0', '--deepspeed_config', 'c.json']" in done.stdout
    without = script(tmp_path, "print(sys.argv[1:])\n", "without.py")
    done = forked(alias.PROGRAMS / "deepspeed", "--no_local_rank", without, "--n", "5", "--help")
    assert "['--n', '5', '--help']" in done.stdout
    assert os.access(alias.PROGRAMS / "deepspeed", os.X_OK)
    done = deepspeed("--autotuning", "run", path)
    assert (done.returncode, done.stderr) == (
        2,
        "deepspeed: --autotuning is not part of Wherry; use `wherry plan` to choose a config\n",
    )
    done = deepspeed("--launcher", "slurm", path)
    assert done.returncode == 2 and "wherry run --emit slurm" in done.stderr


def test_the_command_as_one_of_the_hosts_and_flags_without_effect(tmp_path, capsys):
    from wherry.compat.deepspeed.launcher import build_parser, to_run
    from wherry.errors import WherryError

    (tmp_path / "hosts").write_text("alpha slots=2\nbeta slots=4\n")

    def flags(*given):
        words = ["--hostfile", str(tmp_path / "hosts"), "--no_ssh", "--no_local_rank", *given, "train.py"]
        return " ".join(to_run(build_parser().parse_args(words)))

    place = "--num_nodes 2 --master_addr alpha --node_rank 1"
    found = flags("--node_rank", "1")
    assert "hostfile" not in found and "--num_gpus 4" in found
    assert all(part in found for part in (*place.split(" --")[1:], "train.py"))
    assert "--include localhost:1,3" in flags("--node_rank", "1", "--include", "alpha@beta:1,3")
    assert capsys.readouterr().err == ""
    with pytest.raises(WherryError, match="2 machines; give --node_rank, from 0 to 1"):
        flags()
    flags("--node_rank", "0", "--bind_core_list", "0-3")
    assert capsys.readouterr().err == "deepspeed: --bind_core_list has no effect here\n"
