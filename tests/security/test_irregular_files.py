"""Only regular files of the right folder are opened: nothing waits for a writer or reads without end."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.engine.harness import assert_same
from tests.security.forgery import Model
from tests.security.kinds import FIRST, INDEX, KINDS, weights, write_two_files

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


# Folders of weights that load, by way of links and indexes.


def assert_loads(path: Path) -> None:
    wherry.load_pretrained(model := Model(), path)
    assert_same(model.state_dict(), weights())


def test_the_hub_s_cache_loads(tmp_path: Path) -> None:
    """Files of the cache are links to blobs beside the snapshots; links inside a folder load as well."""
    (blobs := tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
    (snapshot := tmp_path / "models--a--b" / "snapshots" / "0123").mkdir(parents=True)
    write_two_files(snapshot)
    for number, path in enumerate(list(snapshot.iterdir())):
        path.rename(blobs / f"{number:064x}")
        path.symlink_to(f"../../blobs/{number:064x}")
    (tmp_path / "link").symlink_to(snapshot)
    for path in (snapshot, snapshot / INDEX, tmp_path / "link"):
        assert_loads(path)
    # A file that is given by its own path may be a link to anywhere.
    wherry.load_pretrained(Model(), snapshot / FIRST, strict=False)
    (folder := tmp_path / "folder" / "data").mkdir(parents=True)
    write_two_files(folder.parent)
    (folder.parent / FIRST).rename(folder / "x")
    (folder.parent / FIRST).symlink_to("data/x")
    save_file({"first.weight": torch.zeros(4, 4)}, folder.parent / "model-3.safetensors")  # the index does not name it
    assert_loads(folder.parent)


def test_a_cache_s_links_lead_to_its_own_blobs(tmp_path: Path) -> None:
    (snapshot := tmp_path / "models--a--b" / "snapshots" / "0123").mkdir(parents=True)
    (other := tmp_path / "models--c--d" / "blobs").mkdir(parents=True)
    write_two_files(snapshot)
    (snapshot / FIRST).rename(other / "x")
    (tmp_path / "models--a--b" / "blobs").symlink_to(other)  # nor may they be a link to somewhere else
    for target in ("../../../models--c--d/blobs/x", "../../blobs/x"):
        (snapshot / FIRST).symlink_to(target)
        with pytest.raises(WherryError, match="leads out of its folder"):
            wherry.load_pretrained(Model(), snapshot)
        (snapshot / FIRST).unlink()
