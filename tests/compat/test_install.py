"""Ways to turn the alias on, and what it refuses."""

import functools
import os
import subprocess
import sys

import pytest
from tests.cli.programs import environment, free_port, script

from wherry.compat import deepspeed as alias
from wherry.compat.deepspeed.launcher import build_parser, to_run
from wherry.errors import WherryError

LOOK = """
import importlib.metadata, importlib.util, deepspeed
import wherry
assert importlib.util.find_spec("deepspeed").origin == deepspeed.__file__
assert importlib.metadata.version("deepspeed") == deepspeed.__version__ == "0.19.6+wherry"
assert "not DeepSpeed" in importlib.metadata.metadata("deepspeed")["Summary"]
assert issubclass(deepspeed.DeepSpeedEngine, wherry.Engine)
"""


# Puts the alias on the path of every Python that starts.
ON_PATH = os.pathsep.join([str(alias.FOLDER), environment()["PYTHONPATH"]])


@pytest.fixture
def python(forks, tmp_path):
    """Run code in a process without the alias."""
    return functools.partial(forks.run, "-c", folder=tmp_path, launched=False)


def test_install_gives_the_alias_and_its_metadata_and_says_so(python):
    done = python("import wherry.compat.deepspeed as c\nc.install()\nc.install()\n" + LOOK)
    assert done.returncode == 0, done.stderr
    assert "import deepspeed gives Wherry" in done.stderr


@pytest.mark.smoke
def test_the_folder_on_the_path_gives_the_same_and_rank_zero_says_so(python):
    done = python("import sys\nassert 'wherry.compat' not in sys.modules\n" + LOOK, PYTHONPATH=ON_PATH)
    assert done.returncode == 0, done.stderr
    assert "import deepspeed gives Wherry" in done.stderr
    done = python("import deepspeed", RANK="1", PYTHONPATH=ON_PATH)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_refuses_when_the_real_one_is_imported(python, tmp_path):
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("real = True")
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    install = "import wherry.compat.deepspeed as c\nc.install()\nimport deepspeed\ndeepspeed.zero.Init"
    done = python(f"import deepspeed\nassert deepspeed.real\n{install}", PYTHONPATH=path)
    assert done.returncode == 1
    assert f"deepspeed is imported already, from {package}" in done.stderr
    # One that is merely installed is passed over.
    done = python(install, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr


CHILD = """
import multiprocessing, os, sys

def look(queue):
    import importlib.metadata, deepspeed
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


def test_the_commands_give_it_to_every_rank_and_take_the_flags_of_the_other_launcher(launched, tmp_path):
    path = script(tmp_path, LOOK + "print(sys.argv[1:])\n")
    done = launched.launched("run", "--as-deepspeed", "--nproc", 2, path, "sees it")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sees it") == 2
    assert done.stderr.count("import deepspeed gives Wherry") == 1

    def deepspeed(*arguments):
        return launched.forked(alias.PROGRAMS / "deepspeed", *arguments, timeout=200)

    done = deepspeed("--num_gpus", 1, "--master_port", free_port(), "--no_ssh", path, "--deepspeed_config", "c.json")
    assert done.returncode == 0, done.stderr
    assert "['--local_rank=0', '--deepspeed_config', 'c.json']" in done.stdout
    without = script(tmp_path, "print(sys.argv[1:])\n", "without.py")
    # As a process of its own, by its first line.
    command = [sys.executable, alias.PROGRAMS / "deepspeed", "--no_local_rank", without, "--n", "5", "--help"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=True)
    assert "['--n', '5', '--help']" in done.stdout
    assert os.access(alias.PROGRAMS / "deepspeed", os.X_OK)
    done = deepspeed("--autotuning", "run", path)
    message = "deepspeed: --autotuning is not part of Wherry; use `wherry plan` to choose a config\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_the_command_as_one_of_the_hosts_and_flags_without_effect(tmp_path, capsys):
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
    flags("--node_rank", "0", "--bind_core_list", "0-3")
    assert capsys.readouterr().err == "deepspeed: --bind_core_list has no effect here\n"
    for given, message in (
        ([], "2 machines; give --node_rank, from 0 to 1"),
        (["--num_gpus", "1", "-e", "localhost"], "cannot be given with --include"),
        (["--launcher", "slurm"], "wherry run --emit slurm"),
    ):
        with pytest.raises(WherryError, match=message):
            flags(*given)
