"""The `wherry` command: its parsers, mistakes, output, and what it imports."""

import subprocess
import sys

import pytest
from tests.cli.programs import WHERRY, environment, start_fork, unread

from wherry import cli
from wherry.cli import main

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


def _modules_after(*stages, every=False):
    """Run stages of a program in a new interpreter and return the modules that are loaded after each."""
    chosen = "sys.modules" if every else "(m for m in sys.modules if '.' not in m)"
    program = "".join(f"import sys\n{code}\nprint('LOADED', *sorted({chosen}))\n" for code in stages)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    return [set(part.split()) for part in done.stdout.split("LOADED")[1:]]


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
@pytest.mark.usefixtures("launched")
def test_a_command_imports_no_heavy_module_that_it_does_not_need(code, absent):
    (loaded,) = _modules_after(code)
    assert not loaded & set(absent)


@pytest.mark.usefixtures("launched")
def test_an_engine_imports_only_what_it_uses():
    """Leave the schema of configs until there is one, and checkpoints, displays and torch's compiler altogether."""
    imported, training = _modules_after("import wherry; wherry.initialize, wherry.Init", TRAINS, every=True)
    assert {"wherry.engine", "wherry.sharding.hooks"} <= imported
    assert not imported & UNUSED_BY_AN_ENGINE
    assert {"wherry.engine", "pydantic"} <= training
    assert not training & (UNUSED_BY_AN_ENGINE - {"pydantic", "psutil", "wherry.config.schema"})


def test_every_command_is_listed_with_its_meaning(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for command in ("run", "train", "bench", "config", "doctor", "version"):
        assert f"\n    {command} " in shown


def test_a_mistake_prints_its_message_alone(tmp_path, capsys):
    assert main(["train", "--data", "/nowhere/at/all"]) == 2
    assert capsys.readouterr().err == "wherry: --data /nowhere/at/all: there is no such file or folder\n"
    path = tmp_path / "config.json"
    path.write_text('{\n  "zero_optimization": {"stge": 2},\n  "gradient_cliping": 1\n}\n')
    assert main(["train", "--config", str(path)]) == 2
    shown = capsys.readouterr().err
    assert "stge" in shown and "gradient_cliping" in shown and "Traceback" not in shown


@pytest.mark.parametrize(
    "words, message",
    [
        (["trian"], 'there is no command "trian", did you mean "train"?'),
        (["config", "chekc", "x.json"], 'config: there is no command "chekc", did you mean "check"?'),
        (["xyzzy"], 'there is no command "xyzzy"; there are run, train, '),
    ],
)
def test_an_unknown_command_names_a_similar_one(words, message, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"wherry: {message}")


@pytest.mark.parametrize(
    "words, message",
    [
        ("train --setts a=1", '--setts a=1, did you mean "--set"?'),
        ("config check x.json --sett a=1", '--sett a=1, did you mean "--set"?'),
        ("run --nprco 2 x.py", '--nprco, did you mean "--nproc"?'),
    ],
)
def test_an_unknown_flag_names_a_similar_one(words, message, capsys):
    with pytest.raises(SystemExit):
        main(words.split())
    assert f"unrecognized arguments: {message}" in capsys.readouterr().err


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


def test_bench_names_what_it_can_measure_and_where_the_rest_is(capsys):
    assert main(["bench"]) == 0
    listed = capsys.readouterr().out
    assert "adam" in listed and "disk" in listed and max(map(len, listed.splitlines())) <= 80
    with pytest.raises(SystemExit) as refused:
        main(["bench", "steps"])
    assert refused.value.code == 2
    said = capsys.readouterr().err
    assert "no measure 'steps'; expected adam or disk" in said and "python benchmarks/steps.py" in said


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("at_once", [False, True], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("command", ["version", "plan --params 1e9", "plan --help"])
def test_output_that_cannot_be_written_is_no_traceback(command, at_once, tmp_path):
    ends = []
    with unread() as pipe, open("/dev/full", "w") as full, open(pipe, "w", closefd=False) as closed:
        for out in (closed, full):
            with open(tmp_path / "errors", "w+") as errors:
                words = ["-u"] * at_once + [*WHERRY, *command.split()]
                ended = start_fork(*words, stdout=out, stderr=errors).wait()
                ends.append((ended, (tmp_path / "errors").read_text()))
    line = "wherry: standard output cannot be written (No space left on device)\n"
    expected = [[(141, ""), (2, line)]]
    if at_once and "--help" in command:  # argparse of some Pythons ignores such an error
        expected.append([(0, "")] * 2)
    assert ends in expected
