import json
import subprocess
import sys

import pytest

from wherry import cli
from wherry.cli import main
from wherry.cli.doctor import NOTE, OK, PROBLEM, _release, examine, numa_nodes
from wherry.observe import memory
from wherry.observe.memory import HostMemory

from .programs import environment, unread, wherry

HEAVY = ("torch", "numpy", "rich", "pydantic", "psutil", "hjson")
UNUSED_BY_AN_ENGINE = {
    *("pydantic", "hjson", "rich", "psutil", "greenlet", "safetensors", "sympy"),
    *("torch._dynamo", "torch.distributed.tensor"),
    *("wherry.config.schema", "wherry.checkpoint.save", "wherry.checkpoint.load", "wherry.plan.choose"),
}
TRAINS = """
import torch, wherry
with wherry.Init(meta=True):
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4))
config = {"optimizer": {"type": "AdamW", "params": {}}, "zero_optimization": {"stage": 3}, "gradient_clipping": 1}
engine, *_ = wherry.initialize(model=model, config=config)
for _ in range(2):
    engine.backward(engine(torch.arange(3)).sum())
    engine.step()
engine.close()
"""


def _modules_after(code, every=False):
    chosen = "sys.modules" if every else "(m for m in sys.modules if '.' not in m)"
    program = f"import sys\n{code}\nprint('LOADED', *sorted({chosen}))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    return set(done.stdout.split("LOADED")[1].split())


def test_help_loads_nothing_heavy():
    loaded = _modules_after("from wherry.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass")
    assert not loaded & set(HEAVY)


def test_importing_wherry_adds_nothing_heavy():
    assert not _modules_after("import wherry") & set(HEAVY)


def test_an_engine_loads_what_it_uses_and_nothing_more():
    """Not the schema of configs before there is one, nor checkpoints and displays; nor torch's compiler, a second."""
    imported = _modules_after("import wherry; wherry.initialize, wherry.Init", every=True)
    assert {"wherry.engine", "wherry.sharding.hooks"} <= imported
    assert not imported & UNUSED_BY_AN_ENGINE
    training = _modules_after(TRAINS, every=True)
    assert {"wherry.engine", "pydantic"} <= training
    assert not training & (UNUSED_BY_AN_ENGINE - {"pydantic", "psutil", "wherry.config.schema"})


def test_flags_of_train_are_told_without_torch():
    loaded = _modules_after("from wherry.cli import main\ntry: main(['train', '--help'])\nexcept SystemExit: pass")
    assert "torch" not in loaded


def test_every_command_is_listed_with_its_meaning():
    done = wherry("--help")
    assert done.returncode == 0
    for command in ("run", "train", "bench", "config", "doctor", "version"):
        assert f"\n    {command} " in done.stdout


def test_a_mistake_prints_its_message_alone():
    done = wherry("train", "--data", "/nowhere/at/all")
    assert done.returncode == 2
    assert done.stderr.strip() == "wherry: --data /nowhere/at/all: there is no such file or folder"


def test_a_wrong_config_is_told_at_once_before_any_rank_starts(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{\n  "zero_optimization": {"stge": 2},\n  "gradient_cliping": 1\n}\n')
    done = wherry("train", "--config", path)
    assert done.returncode == 2
    assert "stge" in done.stderr and "gradient_cliping" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as refused:
        main(["trian"])
    assert refused.value.code == 2
    assert "trian" in capsys.readouterr().err


def test_ctrl_c_in_a_command_is_quiet(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_dispatch", interrupted)
    assert main(["version"]) == 130
    assert capsys.readouterr().err == ""


def test_version_names_all_three(capsys):
    assert main(["version"]) == 0
    line = capsys.readouterr().out
    assert line.startswith("wherry ") and "Python 3." in line and "torch 2." in line


@pytest.fixture
def roomy(monkeypatch):
    """Memory that others may have taken by now is no fault of this machine."""
    seen = HostMemory(resident=0, peak=0, available=8 << 30, total=16 << 30)
    monkeypatch.setattr(memory, "host_memory", lambda: seen)


def test_doctor_finds_this_machine_fit(capsys, tmp_path, monkeypatch, roomy):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json"]) == 0
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {"torch", "cores", "host memory", "native core", "disk I/O here", "locked memory"} <= findings.keys()
    assert all(finding["verdict"] in (OK, NOTE) for finding in findings.values())
    # Whatever is noted comes with what to do about it or what follows from it.
    assert all(finding["advice"] for finding in findings.values() if finding["verdict"] == NOTE)


def test_doctor_looks_at_all_that_training_stands_on(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    findings = {finding.name: finding for finding in examine()}
    assert {"Python", "CUDA", "NCCL", "threads", "NUMA", "shared memory", "open files", "huge pages"} <= findings.keys()
    assert "GPU" in findings and "disk space here" in findings


def test_numa_nodes_without_cores_are_left_out(tmp_path):
    for name, cores in (("node0", "0-7\n"), ("node1", "8-15\n"), ("node10", "\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cores)
    assert numa_nodes(tmp_path) == {"node0": "0-7", "node1": "8-15"}
    assert numa_nodes(tmp_path / "none") == {}


def test_versions_are_compared_by_their_numbers():
    assert _release("5.23.0.dev0") == (5, 23)
    assert _release("4") == (4, 0)
    assert _release("1.0rc1") == (1, 0)
    assert _release("0.9") < (0, 14) < _release("0.21.2")


def test_output_that_is_cut_off_is_no_error():
    code = "import sys; from wherry.cli import main; sys.exit(main(['doctor', '--json']))"
    done = subprocess.run(
        f'{sys.executable} -c "{code}" | head -n 1', shell=True, capture_output=True, text=True, env=environment()
    )
    assert done.stdout.strip() == "[" and "Traceback" not in done.stderr


def test_doctor_reports_a_failing_check_as_a_problem(monkeypatch, capsys, roomy):
    monkeypatch.setenv("WHERRY_ISA", "z80")
    found = [finding for finding in examine() if finding.verdict == PROBLEM]
    assert {finding.name for finding in found} == {"native", "disk backend"}
    assert all("z80" in finding.advice for finding in found)
    assert main(["doctor"]) == 1
    assert "2 problems." in capsys.readouterr().out


def test_doctor_says_what_updates_states_on_the_host(monkeypatch):
    from wherry import native

    def core():
        return next(finding for finding in examine() if finding.name == "native core")

    isas = native.available_isas()
    monkeypatch.delenv("WHERRY_ISA", raising=False)
    best = core()
    if len(isas) > 1:
        assert best.found == f"{isas[0]} kernels, {native.default_pool().threads} threads of its own"
        monkeypatch.setenv("WHERRY_ISA", "portable")
        slower = core()
        assert slower.found.startswith("portable kernels")
        assert isas[0] == "portable" or f"unset it for {isas[0]}" in slower.advice
    monkeypatch.setenv("WHERRY_ISA", "torch")
    fallback = core()
    assert (fallback.found, fallback.verdict) == ("not in use: torch fallback", NOTE)
    assert fallback.advice.startswith("WHERRY_ISA=torch asks for the torch fallback; meanwhile updates on the host run")


def test_bench_names_what_it_can_measure_and_where_the_rest_is(capsys):
    assert main(["bench"]) == 0
    listed = capsys.readouterr().out
    assert "adam" in listed and "disk" in listed and max(map(len, listed.splitlines())) <= 80
    with pytest.raises(SystemExit) as refused:
        main(["bench", "steps"])
    assert refused.value.code == 2
    said = capsys.readouterr().err
    assert "no measure 'steps'; expected adam or disk" in said and "python benchmarks/steps.py" in said


# argparse is silent about help that it cannot write, where it is told at once.
@pytest.mark.parametrize("at_once", [False, True], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("command", ["version", "plan --params 1e9", "plan --help"])
def test_output_that_cannot_be_written_is_no_traceback(command, at_once):
    told = []
    with unread() as pipe, open("/dev/full", "w") as full:
        for out in (pipe, full):
            words = [sys.executable, "-m", "wherry", *command.split()]
            unbuffered = environment(PYTHONUNBUFFERED="1" if at_once else "")
            done = subprocess.run(words, env=unbuffered, stdout=out, stderr=subprocess.PIPE, text=True)
            told.append((done.returncode, done.stderr))
    line = "wherry: standard output cannot be written (No space left on device)\n"
    silent = at_once and "--help" in command
    assert told == ([(0, "")] * 2 if silent else [(141, ""), (2, line)])
