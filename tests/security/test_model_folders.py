"""Folders of weights: each file that does not fit is refused before a weight changes, by a model and by an engine.

Values of the index and of headers are in test_hostile_files and test_refusals.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.security.forgery import Model, engine_of, everything
from tests.security.kinds import FIRST, INDEX, digest, weights, with_header, write_two_files

import wherry
from wherry.errors import WherryError
from wherry.sharding import safetensors_folder

ONE = "first.weight"


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    made = engine_of(1)
    yield made
    made.close()


def write_whole(folder: Path) -> dict[str, str]:
    """Two files and their index, which load; returns the index's map."""
    names = write_two_files(folder)
    write_index(folder, names)
    return names


def write_index(folder: Path, names: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def refused(path: Path, told: str, engine: Any) -> None:
    """By a model and by an engine, neither of which changes."""
    for target, state in ((model := Model(), lambda: digest(model)), (engine, lambda: everything(engine))):
        before = state()
        with pytest.raises(WherryError) as error:
            wherry.load_pretrained(target, path)
        assert re.search(told, str(error.value)), str(error.value)
        assert state() == before


def assert_loads(path: Path) -> None:
    wherry.load_pretrained(model := Model(), path)
    (expected := Model()).load_state_dict(weights())
    assert digest(model) == digest(expected)


def test_a_folder_with_an_index_loads(tmp_path: Path) -> None:
    write_whole(tmp_path)
    assert_loads(tmp_path)


def test_an_index_names_files_of_its_folder(tmp_path: Path, engine: Any) -> None:
    save_file(weights(), tmp_path / FIRST)  # where it must not be looked for
    (folder := tmp_path / "inner" / "model").mkdir(parents=True)
    names = write_whole(folder)
    for file in (f"../{FIRST}", f"../../{FIRST}", f"x/../../../{FIRST}", str(tmp_path / FIRST), 1, [FIRST], None):
        write_index(folder, {**names, ONE: file})
        refused(folder, "expected the name of a file in its folder", engine)


TEXTS: list[tuple[bytes, str]] = [
    (b'{"weight_map": ' + b"[" * 100_000, "is not an index"),
    (b"[]", "has no weight_map"),
    (b"9" * 5000, "is not an index"),
    (b'{"weight_map": {"\xff": "a"}}', "is not an index"),
    (b"", "is not an index"),
    (b" " * 3000, "is longer than the 2,000 bytes"),
]


def test_an_index_is_a_short_text(tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path)
    for text, told in TEXTS:
        (tmp_path / INDEX).write_bytes(text)
        if "longer" in told:
            monkeypatch.setattr(safetensors_folder, "LONGEST_INDEX", 2000)
        refused(tmp_path, told, engine)


def test_a_name_in_two_files_needs_an_index(tmp_path: Path, engine: Any) -> None:
    write_whole(tmp_path)
    save_file({ONE: torch.zeros(4, 4)}, tmp_path / "model-3.safetensors")
    assert_loads(tmp_path)  # the index does not name it
    (tmp_path / INDEX).unlink()
    refused(tmp_path, "model-1.safetensors and .*model-3.safetensors both have first.weight", engine)


# Where files are.


def test_only_regular_files_of_the_folder_are_opened(tmp_path: Path, engine: Any) -> None:
    """Without an index; with one, files are in test_irregular_files."""
    (folder := tmp_path / "model").mkdir()
    save_file(weights(), tmp_path / "secret")
    write_two_files(folder)
    (folder / "step").symlink_to("../secret")
    for target in ("/dev/zero", "../secret", "step", ".."):
        (folder / FIRST).unlink()
        (folder / FIRST).symlink_to(target)
        refused(folder, "leads out of its folder", engine)


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
    assert_loads(folder.parent)


def test_a_cache_s_links_lead_to_its_own_blobs(tmp_path: Path, engine: Any) -> None:
    (snapshot := tmp_path / "models--a--b" / "snapshots" / "0123").mkdir(parents=True)
    (other := tmp_path / "models--c--d" / "blobs").mkdir(parents=True)
    write_whole(snapshot)
    (snapshot / FIRST).rename(other / "x")
    (snapshot / FIRST).symlink_to("../../../models--c--d/blobs/x")
    refused(snapshot, "leads out of its folder", engine)
    # Nor may they be a link to somewhere else.
    (snapshot.parent.parent / "blobs").symlink_to(other)
    (snapshot / FIRST).unlink()
    (snapshot / FIRST).symlink_to("../../blobs/x")
    refused(snapshot, "leads out of its folder", engine)


# Headers that safetensors lets pass, and that it does not.


def tensor(dtype: str = "F32", shape: list[Any] | None = None, begin: int = 0, end: int = 64) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [16] if shape is None else shape, "data_offsets": [begin, end]}


NOT_WHOLE = "is not a whole safetensors file"
FILES: list[tuple[bytes, str]] = [
    (with_header({"a": tensor(shape=[8], end=32), "b": tensor(shape=[12], begin=16)}), NOT_WHOLE),
    (with_header({"a": tensor(shape=[4], end=16), "b": tensor(shape=[8], begin=32)}), NOT_WHOLE),
    (with_header({"a": tensor("U8", [2**62], end=2**62)}), NOT_WHOLE),
    (with_header({"a": tensor()}, length=2**63), NOT_WHOLE),
    (with_header(b'{"a":' + b"[" * 100_000), NOT_WHOLE),
    (b"\x80\x04\x95" + bytes(100), NOT_WHOLE),
    (with_header({ONE: tensor(shape=[4, 4])}), "missing from the files"),
    (with_header({"a\x1b[2J\nwherry: fine": tensor()}), r"does not have: a\\x1b\[2J\\nwherry: fine"),
    (with_header({"a" * 10**5: tensor()}), r"characters\) \.\.\."),
    (with_header({f"x{i:04}": tensor("U8", [1], i, i + 1) for i in range(500)}, bytes(500)), "500 that .* 480 more"),
]


def test_a_header_is_right_before_a_weight_changes(tmp_path: Path, engine: Any) -> None:
    for content, told in FILES:
        (tmp_path / "model.safetensors").write_bytes(content)
        for path in (tmp_path, tmp_path / "model.safetensors"):
            refused(path, told, engine)


def test_a_file_that_was_cut_is_refused_at_any_length(tmp_path: Path, engine: Any) -> None:
    save_file(weights(), path := tmp_path / "model.safetensors")
    content = path.read_bytes()
    for length in range(0, len(content), 197):
        path.write_bytes(content[:length])
        refused(tmp_path, NOT_WHOLE, engine)


# Models of transformers, whose names and layouts are converted.


@pytest.mark.parametrize("name", ["model." + "9" * 5000 + ".x", "a" * 10**5], ids=["digits", "long"])
def test_what_transformers_cannot_convert_is_told(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    before = digest(model)
    (tmp_path / "model.safetensors").write_bytes(with_header({name: tensor()}))
    with pytest.raises(WherryError, match=r"transformers cannot convert|does not fit the model") as error:
        wherry.load_pretrained(model, tmp_path)
    assert len(str(error.value)) < 10_000 and digest(model) == before


def test_what_is_put_together_from_several_dtypes_is_told_before_a_weight_changes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, intermediate_size=8,
        vocab_size=8, num_local_experts=2,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    model.save_pretrained(tmp_path)
    state = load_file(path := tmp_path / "model.safetensors")
    name = next(name for name in state if "experts.1.w1" in name)
    save_file(state | {name: state[name].to(torch.float8_e4m3fn)}, path)
    with torch.no_grad():
        model.lm_head.weight.fill_(7.0)
    before = digest(model)
    with pytest.raises(WherryError, match="transformers cannot convert"):
        wherry.load_pretrained(model, tmp_path)
    assert digest(model) == before
