"""Commands, programs and configs of the README and the pages: checked by name, and run as they are written."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.programs import environment
from tests.docs.fences import KINDS, commands_of, fences_of
from tests.integrations import HUGGING_FACE

import wherry.config
from wherry.cli import main

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")])
PARTS = [page for page in PAGES if fences_of(page)]
# Commands that set a machine up are not run.
SET_UP = ("make ", "pip install ", "source .venv/", "git clone ", "docker ", "cd ")
# The largest answer of `wherry plan` says by its status that a model does not fit.
MAY_SAY_NO = ("wherry plan ", "wherry doctor")
TOY = "import sys; from tests.docs.toy import main; sys.exit(main())"
LAUNCHER = ("torch.distributed.run", "torch.distributed.launcher.api", "wherry.cli.run", "wherry.train.job")


each_page = pytest.mark.parametrize("page", PARTS, ids=lambda page: str(page.relative_to(ROOT)))


@each_page
def test_what_a_page_shows_is_well_formed(page: Path) -> None:
    """Programs compile, configs load, and commands, targets of make and extras have the names and flags shown."""
    assert len(PARTS) > 15
    for fence in fences_of(page):
        where = f"{page.name}:{fence.line}"
        assert fence.kind in KINDS, f"{where}: expected one of {', '.join(KINDS)} behind the fence, got {fence.kind!r}"
        if fence.not_run is not None:
            assert len(fence.not_run.split()) >= 3, f"{where}: give a reason"
        if fence.kind == "json":
            values = json.loads(fence.text)
            assert fence.not_run or wherry.config.load(values).to_dict(), where
        elif fence.kind == "python":
            compile(fence.text, where, "exec")
        elif fence.kind == "console":
            for command in commands_of(fence.text):
                if command.startswith(SET_UP):
                    _check_set_up(where, command)
                elif command.startswith("wherry "):
                    _check_flags(where, shlex.split(command, comments=True)[1:])


@pytest.fixture(scope="session")
def processes(forks: Any) -> Iterator[Any]:
    """Forks of a process that has imported what any page needs; their launchers fork the ranks."""
    from tests.forks import ENGINE, Forks

    with Forks(*ENGINE, *LAUNCHER, *HUGGING_FACE, as_deepspeed=True, forked_ranks=True) as made:
        yield made


@each_page
def test_a_page_runs_from_top_to_bottom(page: Path, processes: Any, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for fence in fences_of(page):
        where = f"{page.name}:{fence.line}"
        if fence.title is not None:
            (tmp_path / fence.title).write_text(fence.text)
        if fence.not_run is not None:
            continue
        if fence.kind == "python" and fence.title is None:
            runs = [("", processes.run("-c", fence.text, folder=tmp_path, launched=False))]
        elif fence.kind == "console":
            commands = [command for command in commands_of(fence.text) if not command.startswith(SET_UP)]
            runs = ((command, _run(command, processes, tmp_path)) for command in commands)
        else:
            continue
        for command, done in runs:
            allowed = (0, 1) if command.startswith(MAY_SAY_NO) else (0,)
            told = f"{where}: {command}\nended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            assert done.returncode in allowed and "Traceback" not in done.stderr, told


@functools.cache
def _help_of(*words: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return out.getvalue()


def _check_flags(where: str, words: list[str]) -> None:
    """The command and its flags are in its help; flags behind a script or a module are its own."""
    # A command of a command stands in a line of its own.
    command = words[:2] if re.search(rf"^    {' '.join(words[1:2])}\b", _help_of(words[0]), re.M) else words[:1]
    known = _help_of(*command).replace("_", "-")
    assert known, f"{where}: there is no command {' '.join(command)}"
    own = words[: next((at for at, word in enumerate(words) if word.endswith(".py") or word == "--module"), None)]
    for word in own:
        if word.startswith("--"):
            flag = word.partition("=")[0].replace("_", "-")
            assert re.search(rf"{flag}\b(?!-)", known), f"{where}: {' '.join(command)} has no flag {word}"


def _run(command: str, processes: Any, folder: Path) -> subprocess.CompletedProcess[str]:
    words, out = shlex.split(command, comments=True), None
    if words[-2:-1] == [">"]:
        words, out, command = words[:-2], folder / words[-1], command.partition(" > ")[0]
    alone = not set("|<>&;*$") & set(command.partition(" #")[0])
    if words[0] in ("wherry", "python") and alone:
        program = ("-c", TOY) if words[0] == "wherry" else ()
        done = processes.run(*program, *words[1:], folder=folder, launched=False, timeout=280)
        if out is not None:
            out.write_text(done.stdout)
        return done
    assert words[0] != "wherry", f"{command}: expected a command of its own, which is run at the size of a toy"
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    env = environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", PATH=path)
    shell = ["bash", "-o", "pipefail", "-c", command]
    return subprocess.run(shell, cwd=folder, env=env, capture_output=True, text=True, timeout=280)


def _check_set_up(where: str, command: str) -> None:
    """Look up the targets of make and the extras of the package."""
    if target := re.match(r"make ([\w-]+)", command):
        assert re.search(rf"^{target[1]}:", (ROOT / "Makefile").read_text(), re.M), f"{where}: no target {target[1]}"
    for extra in re.findall(r"(?:wherry|\.)\[([\w,]+)\]", command):
        text = (ROOT / "pyproject.toml").read_text()
        for name in extra.split(","):
            assert re.search(rf"^{name} = \[", text, re.M), f"{where}: no extra {name}"
