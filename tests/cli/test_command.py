"""The `wherry` command: its parsers, mistakes, output, and what it imports."""

import os
from pathlib import Path

import pytest
from tests.cli.page import markdown
from tests.cli.programs import WHERRY, start_fork

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


MAIN = "from wherry.cli import main\ntry: main({})\nexcept SystemExit: pass\n"
CONFIG = """
from wherry.config import load
config = load({"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}, "bf16": {"enabled": True}})
config.placement(); config.batch(2); config.to_dict()
"""


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import wherry", HEAVY),
        (MAIN.format(["--help"]) + "import wherry.cli.config", HEAVY),
        (MAIN.format(["train", "--help"]), ["torch"]),
        (MAIN.format(["config", "schema"]) + MAIN.format(["config", "explain", "stage"]) + CONFIG, ["torch"]),
        (MAIN.format(["plan", "--params", "7B"]) + MAIN.format(["plan", "--infinity", "--json"]), ["torch", "numpy"]),
        # An engine needs the schema of configs where there is one, and no checkpoints, displays or torch's compiler.
        ("import wherry; wherry.initialize, wherry.Init", UNUSED_BY_AN_ENGINE),
        (TRAINS, UNUSED_BY_AN_ENGINE - {"pydantic", "psutil", "wherry.config.schema"}),
    ],
    ids=["import", "help", "help of train", "config", "plan", "engine", "training"],
)
def test_no_heavy_module_is_imported_that_is_not_needed(code, absent, launched):
    shown = launched.interpret(f"{code}\nimport sys\nprint('LOADED', *sys.modules)")
    assert not set(shown.split("LOADED")[1].split()) & set(absent)


def test_a_mistake_prints_its_message_alone(tmp_path, capsys):
    assert main(["train", "--data", "/nowhere/at/all"]) == 2
    assert capsys.readouterr().err == "wherry: --data /nowhere/at/all: there is no such file or folder\n"
    path = tmp_path / "config.json"
    path.write_text('{\n  "zero_optimization": {"stge": 2},\n  "gradient_cliping": 1\n}\n')
    assert main(["train", "--config", str(path)]) == 2
    shown = capsys.readouterr().err
    assert "stge" in shown and "gradient_cliping" in shown and "Traceback" not in shown


def test_an_unknown_command_or_flag_names_a_similar_one(capsys):
    for words, message in (
        ("trian", 'wherry: there is no command "trian", did you mean "train"?'),
        ("config chekc x.json", 'wherry: config: there is no command "chekc", did you mean "check"?'),
        ("xyzzy", 'wherry: there is no command "xyzzy"; there are run, train, '),
        ("train --setts a=1", 'unrecognized arguments: --setts a=1, did you mean "--set"?'),
        ("config check x.json --sett a=1", 'unrecognized arguments: --sett a=1, did you mean "--set"?'),
        ("run --nprco 2 x.py", 'unrecognized arguments: --nprco, did you mean "--nproc"?'),
    ):
        try:
            assert main(words.split()) == 2
        except SystemExit as ended:
            assert ended.code == 2
        assert message in capsys.readouterr().err


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


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("at_once", [False, True], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("command", ["version", "plan --params 1e9", "plan --help"])
def test_output_that_cannot_be_written_is_no_traceback(command, at_once, tmp_path):
    ends = []
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed, open("/dev/full", "w") as full:
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


def test_the_page_of_commands_is_what_their_parsers_say():
    page = Path(__file__).parents[2] / "docs" / "commands.md"
    assert page.read_text() == markdown(), "write it anew: python -m tests.cli.page > docs/commands.md"
