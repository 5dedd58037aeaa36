"""What a file says reaches a terminal escaped, in a line of its own length, whichever way it gets there."""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.security.forgery import Forgery, engine_of

from wherry.cli import main
from wherry.config import ConfigError
from wherry.errors import PeerError, WherryError, one_line, printable
from wherry.observe.log import get_logger, say, warn
from wherry.observe.screen import Screen, table
from wherry.sources import find

# What a terminal would act on, and as it is to be seen.
ACTING = {
    "\x1b[2J": r"\x1b[2J",
    "\x1b]0;title\x07": r"\x1b]0;title\x07",
    "\x9b31m": r"\x9b31m",
    "\x90q\x9c": r"\x90q\x9c",
    "\r": r"\r",
    "\x00": r"\x00",
    "\x08\x08": r"\x08\x08",
    "\x7f": r"\x7f",
    "\u202etxt": r"\u202etxt",
    "\u2066x\u2069": r"\u2066x\u2069",
    "\u200f": r"\u200f",
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


def test_a_name_begins_no_line_and_has_a_length() -> None:
    assert one_line("a\nwherry: all is well") == r"a\nwherry: all is well"
    for long in ("x" * 10**7, EVIL * 10**6):
        for shown, most in ((one_line(long), 240), (printable(long), 20_000), (str(WherryError(long)), 20_000)):
            assert len(shown) <= most and "characters) ..." in shown and harmless(shown)
            assert printable(shown, most) == shown


def test_a_traceback_shows_an_error_escaped() -> None:
    try:
        raise ConfigError(f"a{EVIL}")
    except ConfigError as error:
        assert f"a{SEEN}" in (told := "".join(traceback.format_exception(error))) and harmless(told)


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
    assert capsys.readouterr().err == f"wherry: d{SEEN}\n"


def test_tables_and_pages_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    screen, rows = Screen(width=200), table("name")
    rows.add_row(f"a{EVIL}")
    screen.print(rows)
    screen.print(f"b{EVIL}", markup=False)
    shown = capsys.readouterr().out
    assert f"a{SEEN}" in shown and f"b{SEEN}" in shown and harmless(shown)


# Commands, on files that somebody made.


def config_of(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "config.json"
    path.write_text(text)
    return ["config", "check", str(path)]


def folder_of_a_config(tmp_path: Path) -> list[str]:
    return ["plan", str(tmp_path / f"a{EVIL}"), "--machine", "a100"]


def model_config(tmp_path: Path, name: str = "model", **values: Any) -> list[str]:
    folder = tmp_path / name
    folder.mkdir()
    shape = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 8, "n_positions": 8}
    (folder / "config.json").write_text(json.dumps(shape | values))
    return ["plan", str(folder), "--machine", "a100"]


def path_of_a_checkpoint(tmp_path: Path) -> list[str]:
    return ["inspect", str(tmp_path / f"a{EVIL}")]


def latest_of_deepspeed(tmp_path: Path) -> list[str]:
    (tmp_path / "latest").write_text(f"a{EVIL}x")
    return ["import-deepspeed", str(tmp_path), str(tmp_path / "out")]


def name_in_deepspeed_s_file(tmp_path: Path) -> list[str]:
    torch.save({"module": {f"a{EVIL}": torch.ones(1)}}, tmp_path / "mp_rank_00_model_states.pt")
    return ["import-deepspeed", str(tmp_path), str(tmp_path / "out")]


def page_of_a_model(tmp_path: Path) -> list[str]:
    return [*model_config(tmp_path, f"a{EVIL}<script>x"), "--html", str(tmp_path / "page.html")]


GIVEN_TWICE = {"zero_optimization.stage": f"a{EVIL}", "zero_optimization": {"stage": 2}}
COMMANDS: dict[str, tuple[Callable[[Path], list[str]], int]] = {
    "unknown key": (lambda folder: config_of(folder, json.dumps({f"a{EVIL}": 1})), 2),
    "wrong value": (lambda folder: config_of(folder, json.dumps({"optimizer": {"type": f"a{EVIL}"}})), 2),
    "wrong assignment": (lambda folder: [*config_of(folder, "{}"), "--set", f"a{EVIL}"], 2),
    "key that is noted": (lambda folder: config_of(folder, json.dumps(GIVEN_TWICE)), 0),
    "folder of a config": (folder_of_a_config, 2),
    "kind of model": (lambda folder: model_config(folder, model_type=f"a{EVIL}"), 2),
    "key of a model": (lambda folder: model_config(folder, **{f"a{EVIL}": 10**30}), 2),
    "name of a model": (page_of_a_model, 0),
    "path of a checkpoint": (path_of_a_checkpoint, 2),
    "latest of DeepSpeed's": (latest_of_deepspeed, 2),
    "name in DeepSpeed's file": (name_in_deepspeed_s_file, 2),
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


def test_a_model_s_name_ends_no_comment_of_a_chosen_config(tmp_path: Path) -> None:
    _, folder, *_ = model_config(tmp_path, 'a\n"gradient_clipping": 7,')
    assert find(folder).name == r'a\n"gradient_clipping": 7, (gpt2)'


# A checkpoint with such names in it.


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    engine = engine_of(1)
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    engine.close()
    return folder / "global_step1"


def rename(tree: dict[str, Any], before: str, after: str) -> None:
    tree[after] = tree.pop(before)


NAMED: dict[str, Callable[[Forgery], Any]] = {
    "tensor": lambda found: rename(found.entries, "first.weight", f"a{EVIL}"),
    "alias": lambda found: found.entries["first.weight"].update(aliases=[f"a{EVIL}"]),
    "client state": lambda found: found.engine["client_state"].update({f"a{EVIL}": 1}),
    "optimizer": lambda found: found.engine["optimizer"].update(type=f"a{EVIL}"),
    "version": lambda found: found.manifest["versions"].update(wherry=f"a{EVIL}"),
    "placement": lambda found: found.manifest["placement"].append([f"a{EVIL}", "whole", "host"]),
    "date": lambda found: found.manifest.update(created=f"{EVIL}2026"),
}


def test_inspect_shows_nothing_that_acts(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, change in NAMED.items():
        forged = Forgery(whole)
        change(forged)
        path = forged.write(tmp_path / "forged")
        for command in (["inspect", str(path), "--tensors"], ["inspect", str(path), "--json"]):
            assert main(command) in (0, 2)
            shown = "".join(capsys.readouterr())
            assert harmless(shown) and ("\\x1b[2J" in shown or "\\u001b[2J" in shown), name


LEFT_OUT: dict[str, Callable[[Forgery], Any]] = {
    "versions": lambda found: found.manifest.update(versions={}),
    "placement": lambda found: found.manifest.update(placement=[["a"], []]),
    "optimizer": lambda found: found.engine.update(optimizer={}),
    "client state": lambda found: found.engine.update(client_state=[1, "a"]),
}


def test_inspect_does_without_what_is_not_said(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A clear error where the manifest must say it."""
    statuses = {}
    for name, change in LEFT_OUT.items():
        forged = Forgery(whole)
        change(forged)
        statuses[name] = main(["inspect", str(forged.write(tmp_path / "forged"))])
        error = capsys.readouterr().err
        assert "Traceback" not in error and bool(error) is (statuses[name] == 2)
    assert statuses["versions"] == 0 and statuses["placement"] == 2


def test_names_beside_a_checkpoint_are_escaped(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beside = whole.parent / f"a{EVIL}"
    os.symlink(whole, beside)
    try:
        assert main(["inspect", str(whole), "--no-verify"]) == 0
        assert harmless("".join(capsys.readouterr()))
    finally:
        beside.unlink()
