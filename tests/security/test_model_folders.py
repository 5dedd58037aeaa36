"""Folders of weights that load, by way of links and indexes.

Files that do not fit are in test_hostile_files and test_refusals.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.security.forgery import Model
from tests.security.kinds import FIRST, INDEX, digest, weights, write_two_files

import wherry
from wherry.errors import WherryError


def write_whole(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": write_two_files(folder)}))


def assert_loads(path: Path) -> None:
    wherry.load_pretrained(model := Model(), path)
    (expected := Model()).load_state_dict(weights())
    assert digest(model) == digest(expected)


def test_the_hub_s_cache_loads(tmp_path: Path) -> None:
    """Files of the cache are links to blobs beside the snapshots; links inside a folder load as well."""
    (blobs := tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
    (snapshot := tmp_path / "models--a--b" / "snapshots" / "0123").mkdir(parents=True)
    write_whole(snapshot)
    for number, path in enumerate(list(snapshot.iterdir())):
        path.rename(blobs / f"{number:064x}")
        path.symlink_to(f"../../blobs/{number:064x}")
    (tmp_path / "link").symlink_to(snapshot)
    for path in (snapshot, snapshot / INDEX, tmp_path / "link"):
        assert_loads(path)
    # A file that is given by its own path may be a link to anywhere.
    wherry.load_pretrained(Model(), snapshot / FIRST, strict=False)
    (folder := tmp_path / "folder" / "data").mkdir(parents=True)
    write_whole(folder.parent)
    (folder.parent / FIRST).rename(folder / "x")
    (folder.parent / FIRST).symlink_to("data/x")
    save_file({"first.weight": torch.zeros(4, 4)}, folder.parent / "model-3.safetensors")  # the index does not name it
    assert_loads(folder.parent)


def test_a_cache_s_links_lead_to_its_own_blobs(tmp_path: Path) -> None:
    (snapshot := tmp_path / "models--a--b" / "snapshots" / "0123").mkdir(parents=True)
    (other := tmp_path / "models--c--d" / "blobs").mkdir(parents=True)
    write_whole(snapshot)
    (snapshot / FIRST).rename(other / "x")
    (tmp_path / "models--a--b" / "blobs").symlink_to(other)  # nor may they be a link to somewhere else
    for target in ("../../../models--c--d/blobs/x", "../../blobs/x"):
        (snapshot / FIRST).symlink_to(target)
        with pytest.raises(WherryError, match="leads out of its folder"):
            wherry.load_pretrained(Model(), snapshot)
        (snapshot / FIRST).unlink()
