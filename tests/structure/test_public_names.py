"""Tests use public names, so that everything behind them can change."""

from __future__ import annotations

import json
import re

import pytest
from tests.structure.private_uses import ALLOWED, TESTS, counts, private_uses

# The underscored name is one that scripts use.
PRIVATE = re.compile(r"engine[.]_(?!_|zero3_consolidated_16bit_state_dict)\w+")
UPDATE = "python -m tests.structure.private_uses --update"


def test_no_test_reaches_into_an_engine():
    found = {path.relative_to(TESTS): PRIVATE.findall(path.read_text()) for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("third", range(3))
def test_uses_of_private_names_only_become_fewer(third):
    part = slice(third, None, 3)
    files = sorted(TESTS.rglob("*.py"))
    others = {str(path.relative_to(TESTS)) for path in files if path not in files[part]}
    allowed = {path: count for path, count in json.loads(ALLOWED.read_text()).items() if path not in others}
    found = counts(part)
    more = {path: (count, allowed.get(path, 0)) for path, count in found.items() if count > allowed.get(path, 0)}
    assert more == {}, "uses of the package's private names and those allowed; use a public name"
    fewer = {path: (found.get(path, 0), count) for path, count in allowed.items() if count > found.get(path, 0)}
    assert fewer == {}, f"fewer uses than allowed; store them: {UPDATE}"


def test_a_use_of_a_private_name_is_seen():
    for text, count in (
        ("from wherry.cli import _run", 1),
        ("import wherry.update._inner as inner", 1),
        ("import wherry.cli\nwherry.cli._run()", 1),
        ("from wherry.update.updater import Updater as U\nU._send(1)", 1),
        ("def f(patch):\n    from wherry import build\n    patch.setattr(build, '_described', 1)", 1),
        ("monkeypatch.setattr('wherry.sources._MOST_MODULES', 5)", 1),
        ("mock.patch('wherry.cli._run')", 1),
        ("from wherry.update import updater\nrows = [('at_step', updater.Updater, '_send', 1)]", 1),
        ("from wherry.cli import rendezvous\nrendezvous.SignedState(None)._signature()", 1),
        ("from wherry import build\ngetattr(build, '_x')\nbuild._y._z", 3),
        ("from wherry import __version__\nimport torch\ntorch._dynamo\nmock.patch('torch._C')", 0),
        ("thing._private\nself._own\nlog('_x')", 0),
    ):
        assert len(list(private_uses(text))) == count, text
