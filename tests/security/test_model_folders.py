"""Folders of weights that somebody made who means harm: each is refused before a weight changes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.security.forgery import Model, engine_of, everything

import wherry
from wherry.errors import WherryError
from wherry.sharding import safetensors_folder

INDEX = "model.safetensors.index.json"
A, B = "model-1.safetensors", "model-2.safetensors"


def weights(seed: int = 5) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return Model().state_dict()


def whole(folder: Path) -> dict[str, str]:
    """Two files and their index, which load; the map of the index."""
    state = weights()
    names = {name: (A if name.startswith("first") else B) for name in state}
    for file in (A, B):
        save_file({name: value for name, value in state.items() if names[name] == file}, folder / file)
    write_index(folder, names)
    return names


def write_index(folder: Path, names: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def digest(model: torch.nn.Module) -> bytes:
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).digest()


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    found = engine_of(1)
    yield found
    found.close()


def refused(path: Path, told: str, engine: Any) -> None:
    """By a model and by an engine, neither of which changes."""
    for target, state in ((model := Model(), lambda: digest(model)), (engine, lambda: everything(engine))):
        before = state()
        with pytest.raises(WherryError) as error:
            wherry.load_pretrained(target, path)
        assert re.search(told, str(error.value)), str(error.value)
        assert state() == before


def test_what_is_whole_loads(tmp_path: Path) -> None:
    whole(tmp_path)
    wherry.load_pretrained(model := Model(), tmp_path)
    assert digest(model) == digest_of(weights())


def digest_of(state: dict[str, torch.Tensor]) -> bytes:
    (model := Model()).load_state_dict(state)
    return digest(model)


# What an index says.

NAMES = {name: (A if name.startswith("first") else B) for name in Model().state_dict()}
ONE = "first.weight"

INDEXES: dict[str, tuple[Any, str]] = {
    "a folder above": ({**NAMES, ONE: f"../{A}"}, "first.weight is in '../.*expected the name of a file in its folder"),
    "and back": ({**NAMES, ONE: f"x/../../{A}"}, "expected the name of a file in its folder"),
    "absolute": ({**NAMES, ONE: "/etc/passwd"}, "expected the name of a file in its folder"),
    "no name": ({**NAMES, ONE: ""}, "first.weight is in ''; expected"),
    "itself": ({**NAMES, ONE: "."}, "first.weight is in '.'; expected"),
    "NUL": ({**NAMES, ONE: f"{A}\0"}, r"first.weight is in 'model-1.safetensors\\x00'; expected"),
    "half a character": ({**NAMES, ONE: "\ud800"}, "expected the name of a file|not there"),
    "number": ({**NAMES, ONE: 1}, "first.weight is in 1; expected"),
    "list": ({**NAMES, ONE: [A]}, r"first.weight is in \['model-1.safetensors'\]; expected"),
    "null": ({**NAMES, ONE: None}, "first.weight is in None; expected"),
    "object": ({**NAMES, ONE: {"a": 1}}, "expected the name of a file in its folder"),
    "a file that is not there": ({**NAMES, ONE: "x.safetensors"}, "names files that are not there: x.safetensors"),
    "many that are not there": ({f"a{i}": f"{i}.safetensors" for i in range(1000)}, "not there: .*, and 980 more"),
    "another file's": ({**NAMES, ONE: B}, "the index says that .* has first.weight, and it does not"),
    "a name that none has": ({**NAMES, "x": A}, "the index says that .* has x, and it does not"),
    "a name with a line": ({**NAMES, "x\nwherry: fine": A}, r"has x\\nwherry: fine, and it does not"),
    "a long name": ({**NAMES, "x" * 10**6: A}, r"the index says that .{1,600}, and it does not$"),
    "a long file": ({**NAMES, ONE: "x" * 5000}, "names files that are not there: x.* characters"),
    "a folder of that name": ({**NAMES, ONE: "folder"}, "is a directory, expected a regular file"),
    "itself as a file": ({**NAMES, ONE: INDEX}, "is not a whole safetensors file"),
    "no map": (None, "has no weight_map"),
    "an empty map": ({}, "has no weight_map"),
    "a list of names": ([ONE], "has no weight_map"),
    "text": ("x", "has no weight_map"),
}


@pytest.mark.parametrize(("names", "told"), INDEXES.values(), ids=INDEXES)
def test_an_index_names_files_of_its_folder(names: Any, told: str, tmp_path: Path, engine: Any) -> None:
    (tmp_path / "folder").mkdir()
    # There is something to be found where it must not be looked for.
    save_file(weights(), tmp_path / A)
    (inner := tmp_path / "inner" / "model").mkdir(parents=True)
    whole(inner)
    (inner / "folder").mkdir()
    write_index(inner, names)
    refused(inner, told, engine)


TEXTS: dict[str, tuple[bytes, str]] = {
    "deep": (b'{"weight_map": ' + b"[" * 100_000, "is not an index"),
    "a list": (b"[]", "has no weight_map"),
    "a number": (b"1", "has no weight_map"),
    "digits": (b"9" * 5000, "is not an index"),
    "no JSON": (b"PK\3\4", "is not an index"),
    "no UTF-8": (b'{"weight_map": {"\xff": "a"}}', "is not an index"),
    "empty": (b"", "is not an index"),
    "twice": (
        f'{{"weight_map": {{"{ONE}": "{A}", "{ONE}": "{B}"}}}}'.encode(),
        "first.weight is there twice, and not the same",
    ),
    "two maps": (f'{{"weight_map": {{"{ONE}": "{A}"}}, "weight_map": {{}}}}'.encode(), "weight_map is there twice"),
    "too long": (b" " * 3000, "is longer than the 2,000 bytes"),
}


@pytest.mark.parametrize(("text", "told"), TEXTS.values(), ids=TEXTS)
def test_an_index_is_a_short_text_that_says_one_thing(
    text: bytes, told: str, tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole(tmp_path)
    (tmp_path / INDEX).write_bytes(text)
    if "longer" in told:
        monkeypatch.setattr(safetensors_folder, "LONGEST_INDEX", 2000)
    refused(tmp_path, told, engine)


def test_a_name_in_two_files_needs_an_index(tmp_path: Path, engine: Any) -> None:
    names = whole(tmp_path)
    extra = tmp_path / "model-3.safetensors"
    save_file({ONE: torch.zeros(4, 4)}, extra)
    # The index does not have this one.
    wherry.load_pretrained(model := Model(), tmp_path)
    assert digest(model) == digest_of(weights())
    (tmp_path / INDEX).unlink()
    refused(tmp_path, "model-1.safetensors and .*model-3.safetensors both have first.weight", engine)
    save_file({"x": torch.zeros(1), ONE: weights()[ONE]}, extra)
    save_file(
        {name: value for name, value in weights().items() if names[name] == A} | {"x": torch.ones(1)}, tmp_path / A
    )
    write_index(tmp_path, {**names, ONE: extra.name})
    refused(tmp_path, "model-1.safetensors and .*model-3.safetensors both have x|have x, and no index", engine)


# Where files are.


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "FIFO": (make_fifo, "is a FIFO, expected a regular file"),
    "folder": (lambda path: path.mkdir(), "is a directory, expected a regular file"),
    "socket": (make_socket, "is a socket, expected a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "leads out of its folder, to /dev/zero"),
    "loop": (lambda path: path.symlink_to(path.name), "not there|Too many levels|no file or folder"),
    "file elsewhere": (lambda path: path.symlink_to(path.parent.parent / "secret"), "leads out of its folder"),
    "file elsewhere in two steps": (
        lambda path: ((path.parent / "x").symlink_to("../secret"), path.symlink_to("x")),
        "leads out of its folder",
    ),
    "a folder elsewhere": (lambda path: path.symlink_to(path.parent.parent), "leads out of its folder"),
    "nowhere": (lambda path: path.symlink_to("nowhere"), "not there|No such file"),
}


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
@pytest.mark.parametrize(("make", "told"), KINDS.values(), ids=KINDS)
def test_only_regular_files_of_the_folder_are_opened(
    make: Callable[[Path], Any], told: str, indexed: bool, tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "model").mkdir()
    save_file(weights(), tmp_path / "secret")
    names = whole(folder)
    (folder / A).unlink()
    if not indexed:
        (folder / INDEX).unlink()
    make(folder / A)
    assert names
    refused(folder, told, engine)


@pytest.mark.parametrize(("make", "told"), KINDS.values(), ids=KINDS)
def test_an_index_is_a_regular_file_of_the_folder(
    make: Callable[[Path], Any], told: str, tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "model").mkdir()
    whole(folder)
    (folder / INDEX).rename(tmp_path / "secret")
    make(folder / INDEX)
    refused(folder, told, engine)


def test_the_hub_s_cache_loads(tmp_path: Path) -> None:
    """Its files are links to blobs beside the snapshots; a folder of it may itself be reached by a link."""
    (blobs := tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
    (snapshot := tmp_path / "models--a--b" / "snapshots" / "0123").mkdir(parents=True)
    whole(snapshot)
    for number, path in enumerate(list(snapshot.iterdir())):
        path.rename(blobs / f"{number:064x}")
        path.symlink_to(f"../../blobs/{number:064x}")
    (tmp_path / "link").symlink_to(snapshot)
    for path in (snapshot, snapshot / INDEX, tmp_path / "link"):
        wherry.load_pretrained(model := Model(), path)
        assert digest(model) == digest_of(weights())
    # A file that is named itself may be anywhere.
    wherry.load_pretrained(Model(), snapshot / A, strict=False)


def test_a_cache_s_links_lead_to_its_own_blobs(tmp_path: Path, engine: Any) -> None:
    (snapshot := tmp_path / "models--a--b" / "snapshots" / "0123").mkdir(parents=True)
    (other := tmp_path / "models--c--d" / "blobs").mkdir(parents=True)
    whole(snapshot)
    (snapshot / A).rename(other / "x")
    (snapshot / A).symlink_to("../../../models--c--d/blobs/x")
    refused(snapshot, "leads out of its folder", engine)
    # Nor may they be a link to somewhere else.
    (snapshot.parent.parent / "blobs").symlink_to(other)
    (snapshot / A).unlink()
    (snapshot / A).symlink_to("../../blobs/x")
    refused(snapshot, "leads out of its folder", engine)


def test_links_inside_the_folder_load(tmp_path: Path) -> None:
    whole(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / A).rename(tmp_path / "data" / "x")
    (tmp_path / A).symlink_to("data/x")
    wherry.load_pretrained(model := Model(), tmp_path)
    assert digest(model) == digest_of(weights())


# What a file's header says.


def tensor(dtype: str = "F32", shape: list[Any] | None = None, begin: Any = 0, end: Any = 64) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [16] if shape is None else shape, "data_offsets": [begin, end]}


def file_of(header: Any, data: int = 64, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


WHOLE, DTYPE, LACKS = (
    "is not a whole safetensors file",
    "of dtype .*, which cannot be read here",
    "missing from the files",
)
FILES: dict[str, tuple[bytes, str]] = {
    "overlap": (file_of({"a": tensor(shape=[8], end=32), "b": tensor(shape=[12], begin=16)}), WHOLE),
    "the same bytes": (file_of({"a": tensor(), "b": tensor()}), WHOLE),
    "hole": (file_of({"a": tensor(shape=[4], end=16), "b": tensor(shape=[8], begin=32)}), WHOLE),
    "hole before": (file_of({"a": tensor(shape=[8], begin=32)}), WHOLE),
    "hole behind": (file_of({"a": tensor(shape=[8], end=32)}), WHOLE),
    "beyond the end": (file_of({"a": tensor(shape=[32], end=128)}), WHOLE),
    "far beyond the end": (file_of({"a": tensor("U8", [2**62], end=2**62)}), WHOLE),
    "before the start": (file_of({"a": tensor(begin=-64, end=0)}), WHOLE),
    "backwards": (file_of({"a": tensor(begin=64, end=0)}), WHOLE),
    "more than it says": (file_of({"a": tensor(shape=[17])}), WHOLE),
    "less than it says": (file_of({"a": tensor(shape=[15])}), WHOLE),
    "a shape below 0": (file_of({"a": tensor(shape=[-4, -4])}), WHOLE),
    "a shape of 25 digits": (file_of({"a": tensor(shape=[10**24])}), WHOLE),
    "a shape that overflows": (file_of({"a": tensor(shape=[2**33, 2**33])}), WHOLE),
    "a shape that overflows, times 0": (file_of({"a": tensor(shape=[2**62, 2**62, 0], end=0), "b": tensor()}), WHOLE),
    "a shape of floats": (file_of({"a": tensor(shape=[16.0])}), WHOLE),
    "a shape of text": (file_of({"a": tensor(shape=["16"])}), WHOLE),
    "offsets of floats": (file_of({"a": tensor(end=64.0)}), WHOLE),
    "one offset": (file_of({"a": {"dtype": "F32", "shape": [16], "data_offsets": [0]}}), WHOLE),
    "no offsets": (file_of({"a": {"dtype": "F32", "shape": [16]}}), WHOLE),
    "no number": (file_of(b'{"a":{"dtype":"F32","shape":[16],"data_offsets":[0,NaN]}}'), WHOLE),
    "no dtype": (file_of({"a": {"shape": [16], "data_offsets": [0, 64]}}), WHOLE),
    "a dtype that is none": (file_of({"a": tensor("F33")}), WHOLE),
    "a dtype of Python's": (file_of({"a": tensor("O")}), WHOLE),
    "half bytes": (file_of({"first.weight": tensor("F4", [128])}), DTYPE),
    "three quarters of bytes": (
        file_of({"first.weight": tensor("F6_E2M3", [64], end=48), "b": tensor("U8", begin=48)}),
        DTYPE,
    ),
    "the rest is not there": (file_of({"first.weight": tensor(shape=[4, 4])}), LACKS),
    "nothing is there": (file_of({}, 0), LACKS),
    "a list": (file_of([1]), WHOLE),
    "deep": (file_of(b'{"a":' + b"[" * 100_000), WHOLE),
    "no UTF-8": (file_of(b'{"\xff":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}}'), WHOLE),
    "half a character": (file_of(b'{"\\ud800":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}}'), WHOLE),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}, "b": tensor()}), WHOLE),
    "metadata as a list": (file_of({"__metadata__": [], "b": tensor()}), WHOLE),
    "text behind it": (file_of(json.dumps({"a": tensor()}).encode() + b"{}"), WHOLE),
    "a header of 2**63 bytes": (file_of({"a": tensor()}, length=2**63), WHOLE),
    "a header longer than the file": (file_of({"a": tensor()}, length=99_000_000), WHOLE),
    "a header of nothing": (file_of({"a": tensor()}, length=0), WHOLE),
    "a few bytes": (b"abc", WHOLE),
    "no bytes": (b"", WHOLE),
    "a pickle": (b"\x80\x04\x95" + bytes(100), WHOLE),
    "twice, over each other": (
        file_of(
            b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"F32","shape":[12],"data_offsets":[16,64]}}'
        ),
        WHOLE,
    ),
    "a name to be shown": (file_of({"a\x1b[2J\nwherry: fine": tensor()}), r"does not have: a\\x1b\[2J\\nwherry: fine"),
    "a long name": (file_of({"a" * 10**6: tensor()}), r"characters\) \.\.\."),
    "another shape": (
        file_of(
            {
                **{n: tensor("I64", [], 0, 8) for n in ["norm.num_batches_tracked"]},
                "first.weight": tensor(shape=[2, 7], begin=8),
            }
        ),
        "of another shape: first.weight",
    ),
    "many names": (
        file_of({f"x{i:05}": tensor("U8", [1], i, i + 1) for i in range(3000)}, 3000),
        "3000 that .* and 2980 more",
    ),
}


@pytest.mark.parametrize(("content", "told"), FILES.values(), ids=FILES)
def test_a_header_is_right_before_a_weight_changes(content: bytes, told: str, tmp_path: Path, engine: Any) -> None:
    """safetensors checks where tensors are; what it lets pass is checked here."""
    (tmp_path / "model.safetensors").write_bytes(content)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        refused(path, told, engine)


def test_a_file_that_was_cut_is_refused_at_any_length(tmp_path: Path, engine: Any) -> None:
    save_file(weights(), path := tmp_path / "model.safetensors")
    content = path.read_bytes()
    for length in range(0, len(content), 97):
        path.write_bytes(content[:length])
        refused(tmp_path, WHOLE, engine)


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "x" * 5000, ""], ids=["NUL", "half", "long", "none"])
def test_a_path_that_is_none(path: str, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(path, "there is no file or folder|has no ..safetensors file", engine)  # type: ignore[arg-type]


# Models of transformers, whose names and layouts are converted.


@pytest.mark.parametrize("name", ["model." + "9" * 5000 + ".x", "a" * 10**5], ids=["digits", "long"])
def test_what_transformers_cannot_convert_is_told(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    before = digest(model)
    (tmp_path / "model.safetensors").write_bytes(file_of({name: tensor()}))
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
