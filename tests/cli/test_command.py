import subprocess
import sys

import pytest

from wherry import cli
from wherry.cli import main

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


HELPED = "from wherry.cli import main\ntry: main({})\nexcept SystemExit: pass"


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import wherry", HEAVY),
        (HELPED.format(["--help"]), HEAVY),
        (HELPED.format(["train", "--help"]), ["torch"]),
    ],
    ids=["import", "help", "help of train"],
)
def test_what_is_not_needed_is_not_loaded(code, absent):
    assert not _modules_after(code) & set(absent)


def test_an_engine_loads_what_it_uses_and_nothing_more():
    """Not the schema of configs before there is one, nor checkpoints and displays; nor torch's compiler, a second."""
    imported = _modules_after("import wherry; wherry.initialize, wherry.Init", every=True)
    assert {"wherry.engine", "wherry.sharding.hooks"} <= imported
    assert not imported & UNUSED_BY_AN_ENGINE
    training = _modules_after(TRAINS, every=True)
    assert {"wherry.engine", "pydantic"} <= training
    assert not training & (UNUSED_BY_AN_ENGINE - {"pydantic", "psutil", "wherry.config.schema"})


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


@pytest.mark.parametrize(
    "words, told",
    [
        (["trian"], 'there is no command "trian", did you mean "train"?'),
        (["config", "chekc", "x.json"], 'config: there is no command "chekc", did you mean "check"?'),
        (["xyzzy"], 'there is no command "xyzzy"; there are run, train, '),
    ],
)
def test_an_unknown_command_is_refused_with_the_one_that_is_meant(words, told, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"wherry: {told}")


@pytest.mark.parametrize(
    "words, told",
    [
        ("train --setts a=1", '--setts a=1, did you mean "--set"?'),
        ("config check x.json --sett a=1", '--sett a=1, did you mean "--set"?'),
        ("run --nprco 2 x.py", '--nprco, did you mean "--nproc"?'),
    ],
)
def test_a_flag_that_is_not_known_is_refused_with_the_one_that_is_meant(words, told, capsys):
    with pytest.raises(SystemExit):
        main(words.split())
    assert f"unrecognized arguments: {told}" in capsys.readouterr().err


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


def test_output_that_is_cut_off_is_no_error():
    code = "import sys; from wherry.cli import main; sys.exit(main(['doctor', '--json']))"
    done = subprocess.run(
        f'{sys.executable} -c "{code}" | head -n 1', shell=True, capture_output=True, text=True, env=environment()
    )
    assert done.stdout.strip() == "[" and "Traceback" not in done.stderr


def test_bench_names_what_it_can_measure_and_where_the_rest_is(capsys):
    assert main(["bench"]) == 0
    listed = capsys.readouterr().out
    assert "adam" in listed and "disk" in listed and max(map(len, listed.splitlines())) <= 80
    with pytest.raises(SystemExit) as refused:
        main(["bench", "steps"])
    assert refused.value.code == 2
    said = capsys.readouterr().err
    assert "no measure 'steps'; expected adam or disk" in said and "python benchmarks/steps.py" in said


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
    expected = [[(141, ""), (2, line)]]
    if at_once and "--help" in command:  # argparse of some Pythons lets such an error go
        expected.append([(0, "")] * 2)
    assert told in expected
