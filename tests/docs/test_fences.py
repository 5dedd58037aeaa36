"""Every command, program and config that the README and the pages show runs as it is written."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.programs import WHERE, environment
from tests.docs.fences import KINDS, Fence, commands_of, fences_of
from tests.forks import ENGINE, QUIET, Forks

import wherry.config

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")])
PARTS = [page for page in PAGES if fences_of(page)]
# Commands that set a machine up, by how they begin: what they name is looked for instead.
SET_UP = ("make ", "pip install ", "source .venv/", "git clone ", "docker ", "cd ")
# The largest answer of `wherry plan` says by its status that a model does not fit.
MAY_SAY_NO = ("wherry plan ", "wherry doctor")
TOY = "import sys; from tests.docs.toy import main; sys.exit(main())"


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks(*ENGINE, "wherry.train.job", as_deepspeed=True) as forks:
        yield forks


@pytest.mark.parametrize("page", PARTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs_from_top_to_bottom(page: Path, forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for fence in fences_of(page):
        where = f"{page.name}:{fence.line}"
        assert fence.kind in KINDS, f"{where}: expected one of {', '.join(KINDS)} behind the fence, got {fence.kind!r}"
        if fence.title is not None:
            (tmp_path / fence.title).write_text(fence.text)
        if fence.kind == "json":
            _check_config(where, fence)
        elif fence.kind == "python":
            compile(fence.text, where, "exec")
            if fence.title is None and fence.not_run is None:
                _check(where, forks.run("-c", fence.text, folder=tmp_path, launched=False), fence.text)
        elif fence.kind == "console":
            for command in commands_of(fence.text):
                if command.startswith(SET_UP):
                    _check_set_up(where, command)
                elif fence.not_run is None:
                    allowed = (0, 1) if command.startswith(MAY_SAY_NO) else (0,)
                    _check(where, _run(command, forks, tmp_path), command, allowed)


def _run(command: str, forks: Forks, folder: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command, comments=True)
    alone = not set("|<>&;*$") & set(command.partition(" #")[0])
    if words[0] == "wherry" and alone:
        return forks.run("-c", TOY, *words[1:], folder=folder, launched=False, timeout=280)
    # Where a command is one of several, or another program, a shell runs it.
    toy = folder / "bin" / "wherry"
    if not toy.exists():
        toy.parent.mkdir()
        toy.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tests.docs.toy "$@"\n')
        toy.chmod(0o755)
    path = os.pathsep.join([str(toy.parent), os.path.dirname(sys.executable), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=environment(**QUIET, PATH=path) | {"PYTHONPATH": f"{WHERE}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=280,
    )


def _check(where: str, done: subprocess.CompletedProcess[str], what: str, allowed: tuple[int, ...] = (0,)) -> None:
    told = f"{where}: {what}\nended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode in allowed and "Traceback" not in done.stderr, told


def _check_config(where: str, fence: Fence) -> None:
    values = json.loads(fence.text)
    if fence.not_run is None:
        assert wherry.config.load(values).to_dict(), where


def _check_set_up(where: str, command: str) -> None:
    """Targets of make and extras of the package that are named are there."""
    if target := re.match(r"make ([\w-]+)", command):
        assert re.search(rf"^{target[1]}:", (ROOT / "Makefile").read_text(), re.M), f"{where}: no target {target[1]}"
    for extra in re.findall(r"(?:wherry|\.)\[([\w,]+)\]", command):
        text = (ROOT / "pyproject.toml").read_text()
        for name in extra.split(","):
            assert re.search(rf"^{name} = \[", text, re.M), f"{where}: no extra {name}"


def test_what_is_not_run_has_a_reason() -> None:
    reasons = [fence.not_run for page in PAGES for fence in fences_of(page) if fence.not_run is not None]
    assert all(len(reason.split()) >= 3 for reason in reasons), reasons


def test_a_fence_is_found_with_its_title_and_its_reason(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    program = '```python title="a.py"\nx = 1\n```\n'
    commands = "<!-- not run: it needs a GPU -->\n```console\nwherry \\\n  run\n# no\n```\n"
    page.write_text(f"Text.\n\n{program}\n{commands}")
    first, second = fences_of(page)
    assert (first.kind, first.title, first.text, first.not_run) == ("python", "a.py", "x = 1\n", None)
    assert (second.line, second.not_run, commands_of(second.text)) == (8, "it needs a GPU", ["wherry run"])
