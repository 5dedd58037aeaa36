"""Only regular files of the right folder are opened: nothing waits for a writer or reads without end."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.security.kinds import FIRST, INDEX, KINDS, write_universal

import wherry
from wherry.cli import main
from wherry.config import ConfigError
from wherry.errors import WherryError
from wherry.regular import open_regular, read_regular


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(path))  # an address is short


def _long(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 33)  # without a block on the disk


ABSENT = "No such file|there is no such|not there|holds no|holds? not|no file or folder|none of rank 0|no rank"
# What a path may be instead of a regular file, and a pattern of the error.
IRREGULAR: dict[str, tuple[Callable[[Path], Any], str]] = {
    "FIFO": (os.mkfifo, "is a FIFO, expected a regular file"),
    "directory": (Path.mkdir, "is a directory, expected a regular file|Is a directory"),
    "socket": (_socket, "is a socket, expected a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device, expected|leads out of its folder, to /dev/z"),
    "loop of links": (lambda path: path.symlink_to(path.name), f"[Ss]ymbolic links|{ABSENT}"),
    "link to nothing": (lambda path: path.symlink_to("nowhere"), f"nowhere|{ABSENT}"),
    "nothing": (lambda path: None, ABSENT),
    "empty file": (Path.touch, ""),
    "file of 8 GB": (_long, ""),
}  # fmt: skip
# Kinds of files, and paths in their folders that are opened for them; whether links may lead out of the folder.
FILES = [
    ("manifest", "manifest.json", False),
    ("manifest", "rank-00000.safetensors", False),
    ("index", INDEX, False),
    ("index", FIRST, False),
    ("deepspeed_model", "latest", True),
    ("deepspeed_model", "step/mp_rank_00_model_states.pt", True),
    ("deepspeed_model", "step/zero_pp_rank_0_mp_rank_00_optim_states.pt", True),
    ("universal_state", "step/zero/a/fp32.pt", True),
    ("config", "config.json", True),
    ("model_config", "config.json", True),
    ("adapter", "adapter_config.json", True),
    ("hostfile", "hosts", True),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("name", "file", "may_lead_out"), FILES)
def test_a_file_is_regular(
    name: str, file: str, may_lead_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    kind = KINDS[name](tmp_path / "in")
    monkeypatch.chdir(kind.folder)
    kind.write(kind.tree)
    valid = kind.load()
    path, aside = kind.folder / file, tmp_path / "aside"
    threads, descriptors = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    for what, (make, told) in IRREGULAR.items():
        if (file, what) == (INDEX, "nothing"):  # without an index all files of the folder count
            continue
        path.rename(aside)
        make(path)
        with pytest.raises(kind.error) as error:
            kind.load()
        assert re.search(told, str(error.value)), (what, str(error.value))
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        aside.rename(path)
    path.rename(aside)
    path.symlink_to(aside)
    if may_lead_out:
        assert kind.load() == valid
    else:
        with pytest.raises(kind.error, match="leads out of its folder"):
            kind.load()
    assert len(os.listdir("/proc/self/fd")) <= descriptors and len(os.listdir("/proc/self/task")) <= threads + 1


def test_every_command_names_a_config_that_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo(path := tmp_path / "config.json")
    with pytest.raises(ConfigError, match="cannot be read: is a FIFO"):
        wherry.initialize(model=torch.nn.Linear(2, 2), config=str(path))
    for command in (
        ["config", "check", str(path)],
        ["plan", "gpt2-10m", "--machine", "a100", "--config", str(path)],
        ["train", "--nproc", "1", "--config", str(path)],
        ["plan", str(tmp_path), "--machine", "a100"],
    ):
        assert main(command) == 2
        told = capsys.readouterr().err
        assert "config.json" in told and "Traceback" not in told and told.count("\n") == 1


def test_a_path_that_is_none_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("a\0b", "\ud800"):
        with pytest.raises(OSError, match="is no path"):
            open_regular(path)
    for path in ("a\0b", "\ud800", "x" * 5000, ""):
        with pytest.raises(WherryError, match=r"there is no file or folder|has no ..safetensors file"):
            wherry.load_pretrained(torch.nn.Linear(2, 2), path)


def test_a_regular_file_is_read_to_its_limit(tmp_path: Path) -> None:
    (path := tmp_path / "file").write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(OSError, match="is longer than the 4 bytes"):
        read_regular(path, 4)
    # A file of /proc has no length before it is read.
    assert len(read_regular("/proc/self/status", 1 << 20)) > 100
    with pytest.raises(OSError, match="is longer than"):
        read_regular("/proc/self/status", 100)


# The texts of `latest`.

TEXTS = [b"../in/step", b"..", b"/etc", b"", b"step\0", b"step\nx", b"\x1b[2J", b"\xff\xfe", b"x" * 5000, b"step7"]


@pytest.mark.parametrize("name", ["manifest", "deepspeed_model"])
def test_latest_names_a_folder_beside_it(name: str, tmp_path: Path) -> None:
    (folder := tmp_path / "in").mkdir()
    kind = KINDS[name](folder)
    if name == "manifest":
        shutil.move(kind.folder, folder / "step")
        kind.folder.mkdir()
        load: Callable[[], Any] = lambda: kind.load.engine.load_checkpoint(folder)  # type: ignore[attr-defined]  # noqa: E731
    else:
        load = kind.load
    for text in TEXTS:
        (folder / "latest").write_bytes(text)
        if name == "manifest" and not text:
            assert load()[0] == str(folder / "step")
            continue
        with pytest.raises(WherryError) as error:
            load()
        assert "latest" in str(error.value) or "step7" in str(error.value) or "tag" in str(error.value)
        assert all(line.isprintable() for line in str(error.value).splitlines())
    (folder / "latest").write_bytes(b"step")
    load()


def test_a_tag_stays_inside_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_universal(tmp_path / "in")
    for tag in ("../in/step", "/etc", "..", "a\0b"):
        assert main(["import-deepspeed", str(tmp_path / "in"), str(tmp_path / "out"), "--tag", tag]) == 2
        assert "expected the name of a folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
