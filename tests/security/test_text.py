"""Text of files reaches a terminal escaped and cut to a length, by errors, logs, tables and commands."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.security.hostile import changed
from tests.security.kinds import Kind, write_model

from wherry.cli import main
from wherry.errors import PeerError, WherryError, one_line, printable
from wherry.observe.log import get_logger, say, warn
from wherry.observe.screen import Screen, table

# What a terminal would act on, and as it is to be seen.
ACTING = {
    "\x1b[2J": r"\x1b[2J",
    "\x1b]0;title\x07": r"\x1b]0;title\x07",
    "\r": r"\r",
    "\x00": r"\x00",
    "\x7f": r"\x7f",
    "\u202etxt": r"\u202etxt",
    "\u2028": r"\u2028",
    "\ufeff": r"\ufeff",
    "\ud800": r"\ud800",
    "\U000e0041": r"\U000e0041",
}
EVIL = "\x1b[2J\x07\x9b\u202e\r"
SEEN = r"\x1b[2J\x07\x9b\u202e\r"


def harmless(text: str) -> bool:
    return not set(text) & set("\x1b\x07\x9b\u202e\r")


def test_what_a_terminal_acts_on_is_shown_as_what_it_is() -> None:
    for text, seen in ACTING.items():
        assert printable(f"a{text}b") == f"a{seen}b" == one_line(f"a{text}b")
        assert str(WherryError(f"a{text}b")) == f"a{seen}b" == str(PeerError(f"a{text}b"))
    for text in ("\u00e9\u4e2d\U0001f642", "two\nlines\tand tabs", "a\u200db", "100 % [bold] {x}"):
        assert printable(text) == text == str(WherryError(text))
    told = "".join(traceback.format_exception(WherryError(f"a{EVIL}")))
    assert f"a{SEEN}" in told and harmless(told)


def test_a_name_begins_no_line_and_has_a_length() -> None:
    assert one_line("a\nwherry: all is well") == r"a\nwherry: all is well"
    for long in ("x" * 10**6, EVIL * 10**5):
        for shown, most in ((one_line(long), 240), (printable(long), 20_000), (str(WherryError(long)), 20_000)):
            assert len(shown) <= most and "characters) ..." in shown and harmless(shown)
            assert printable(shown, most) == shown


def test_logged_lines_are_escaped_for_every_handler(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="wherry"):
        say("of %s", Path(f"a{EVIL}"))
        warn(f"b{EVIL} 100 %")
        get_logger(0).error("%s: %d", WherryError(f"c{EVIL}"), 7)
    assert [record.getMessage() for record in caplog.records] == [f"of a{SEEN}", f"b{SEEN} 100 %", f"c{SEEN}: 7"]
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    warn("d%s", EVIL)
    screen, rows = Screen(width=200), table("name")
    rows.add_row(f"a{EVIL}")
    screen.print(rows)
    screen.print(f"b{EVIL}", markup=False)
    shown = capsys.readouterr()
    assert shown.err == f"wherry: d{SEEN}\n"
    assert f"a{SEEN}" in shown.out and f"b{SEEN}" in shown.out and harmless(shown.out)


# Commands, on files that somebody made.


def in_config(folder: Path, config: Any) -> list[str]:
    (folder / "config.json").write_text(json.dumps(config))
    return ["config", "check", str(folder / "config.json")]


def of_model(folder: Path, **values: Any) -> list[str]:
    return ["plan", write_model(folder, **values), "--machine", "a100"]


GIVEN_TWICE = {"zero_optimization.stage": f"a{EVIL}", "zero_optimization": {"stage": 2}}
NAME = f"a{EVIL}<script>x"
COMMANDS: dict[str, tuple[Callable[[Path], list[str]], int]] = {
    "unknown key": (lambda folder: in_config(folder, {f"a{EVIL}": 1}), 2),
    "wrong assignment": (lambda folder: [*in_config(folder, {}), "--set", f"a{EVIL}"], 2),
    "key that is noted": (lambda folder: in_config(folder, GIVEN_TWICE), 0),
    "folder of a config": (lambda folder: ["plan", str(folder / f"a{EVIL}"), "--machine", "a100"], 2),
    "kind of model": (lambda folder: of_model(folder, model_type=f"a{EVIL}"), 2),
    "path of a checkpoint": (lambda folder: ["inspect", str(folder / f"a{EVIL}")], 2),
    "name of a model": (lambda folder: [*of_model(folder / NAME), "--html", str(folder / "page.html")], 0),
}
LONG = {"name of a model"}  # which is planned


@pytest.mark.parametrize(
    ("make", "status"),
    [pytest.param(*row, id=name, marks=[pytest.mark.long] * (name in LONG)) for name, row in COMMANDS.items()],
)
def test_a_command_shows_nothing_that_acts(
    make: Callable[[Path], list[str]], status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(make(tmp_path)) == status
    shown = "".join(capsys.readouterr())
    # Names are shown, and escaped.
    assert harmless(shown) and r"\x1b[2J" in shown
    for page in tmp_path.glob("*.html"):
        text = page.read_text()
        assert harmless(text) and r"\x1b[2J" in text and "<script>x" not in text and "&lt;script&gt;x" in text


# Paths in a manifest, and values there that `wherry inspect` shows.
NAMED: list[tuple[tuple[Any, ...], Any]] = [
    (("entries", f"a{EVIL}"), {"shape": [0], "dtype": "float32", "kind": "parameter", "states": {}}),
    (("entries", "first.weight", "aliases"), [f"a{EVIL}"]),
    (("engine", "client_state"), {f"a{EVIL}": 1}),
    (("engine", "optimizer", "type"), f"a{EVIL}"),
    (("versions", "wherry"), f"a{EVIL}"),
    (("placement",), [[f"a{EVIL}", "whole", "host"]]),
    (("created",), f"{EVIL}2026"),
]
LEFT_OUT: list[tuple[tuple[Any, ...], Any]] = [(("versions",), {}), (("engine", "client_state"), [1, "a"])]


def test_inspect_shows_nothing_that_acts(kind_of: Callable[[str], Kind], capsys: pytest.CaptureFixture[str]) -> None:
    kind = kind_of("manifest")
    beside = kind.folder.parent / f"a{EVIL}"
    beside.symlink_to(kind.folder)
    for path, value in (*NAMED, *LEFT_OUT):
        kind.write(changed(kind.tree, path, value))
        for flag in ("--tensors", "--json"):
            status = main(["inspect", str(kind.folder), flag])
            shown = capsys.readouterr()
            assert harmless(shown.out + shown.err) and "Traceback" not in shown.err, path
            assert bool(shown.err) is (status == 2), path
            if (path, value) in NAMED:
                assert "\\x1b[2J" in "".join(shown) or "\\u001b[2J" in "".join(shown), path
    beside.unlink()
