"""Only regular files of the right folder are opened: nothing waits for a writer or reads without end."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.security.kinds import FIRST, INDEX, KINDS

import wherry
from wherry.errors import WherryError
from wherry.regular import open_regular, read_regular


def _long(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 33)  # without a block on the disk


ABSENT = "No such file|there is no such|not there|holds no|holds? not|no file or folder|none of rank 0|no rank"
# What a path may be instead of a regular file, and a pattern of the error.
IRREGULAR: dict[str, tuple[Callable[[Path], Any], str]] = {
    "FIFO": (os.mkfifo, "is a FIFO, expected a regular file"),
    "directory": (Path.mkdir, "is a directory, expected a regular file|Is a directory"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device, expected|leads out of its folder, to /dev/z"),
    "nothing": (lambda path: None, ABSENT),
    "empty file": (Path.touch, ""),
    "file of 8 GB": (_long, ""),
}
# Kinds of files, and paths in their folders that are opened for them; whether links may lead out of the folder.
FILES = [
    ("manifest", "manifest.json", False),
    ("manifest", "rank-00000.safetensors", False),
    ("index", INDEX, False),
    ("index", FIRST, False),
    ("deepspeed_model", "latest", True),
    ("deepspeed_model", "step/mp_rank_00_model_states.pt", True),
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
    descriptors = len(os.listdir("/proc/self/fd"))
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
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_path_that_is_none_is_an_error_of_the_system() -> None:
    for path in ("a\0b", "\ud800"):
        with pytest.raises(OSError, match="is no path"):
            open_regular(path)
        with pytest.raises(WherryError, match="there is no file or folder"):
            wherry.load_pretrained(torch.nn.Linear(2, 2), path)


def test_a_regular_file_is_read_to_its_limit(tmp_path: Path) -> None:
    (path := tmp_path / "file").write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    # A file of /proc has no length before it is read.
    for longer, limit in ((path, 4), ("/proc/self/status", 100)):
        with pytest.raises(OSError, match=f"is longer than the {limit} bytes"):
            read_regular(longer, limit)
