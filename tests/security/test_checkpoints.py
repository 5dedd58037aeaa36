"""Every hostile checkpoint is refused, with one clear error, and leaves the engine to the bit as it was."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.security.forgery import CLIENT_STATE, CONFIG, Forgery, Model, engine_of, everything, sign

import wherry
from wherry.checkpoint import folder as folders
from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.export import verified
from wherry.checkpoint.format import KIND

Change = Callable[[Forgery], Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    engine = engine_of(3)
    engine.save_checkpoint(folder, client_state=CLIENT_STATE)
    engine.close()
    return folder / "global_step3"


@pytest.fixture(scope="module")
def engine(whole: Path) -> Iterator[Any]:
    found = engine_of(1, seed=7)
    yield found
    found.close()


def refused(engine: Any, path: Path, told: str) -> None:
    before = everything(engine)
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(path)
    assert "broken off" not in str(error.value) and len(str(error.value)) < 5000
    assert str(error.value).isprintable()  # and so in one line
    assert told in str(error.value), str(error.value)
    assert everything(engine) == before


def test_what_is_changed_by_nobody_loads(engine: Any, whole: Path, tmp_path: Path) -> None:
    """The cases below are refused for what they change, and for nothing else."""
    before = everything(engine)
    _, state = engine.load_checkpoint(Forgery(whole).write(tmp_path / "same"))
    assert everything(engine) != before and engine.global_steps == 3
    assert state is not None and torch.equal(state.pop("tensor"), CLIENT_STATE["tensor"])
    assert state.pop("array").tolist() == [0, 1, 2, 3]
    assert state == {key: value for key, value in CLIENT_STATE.items() if key not in ("tensor", "array")}


# What a manifest says. The words are those that stand in the error.

HUGE = 10**24
MANIFEST: dict[str, tuple[str, Change]] = {}
for _place, _at in {
    "files": lambda f: f.manifest["files"],
    "tensors": lambda f: f.manifest["tensors"],
}.items():
    for _name in ("../out", "/etc/passwd", "a/b", "..", ".", "", "\0", "manifest.json", "absent.safetensors"):

        def _elsewhere(f: Forgery, place: str = _place, name: str = _name) -> None:
            record = f.manifest["files"][f.file]
            if place == "files":
                f.manifest["files"][name] = dict(record)
            else:
                f.manifest["tensors"] = dict.fromkeys(f.manifest["tensors"], name)

        MANIFEST[f"{_place} {_name!r}"] = (
            "" if _place == "files" else "of which there are no checksums",
            _elsewhere,
        )
for _name in ("../out.safetensors", "/etc/hostname", "other.safetensors", "manifest.json", "", "..", "\x1b[2J"):
    MANIFEST[f"a slice of {_name!r}"] = (
        "of which there are no checksums",
        lambda f, name=_name: f.piece.update(file=name),
    )
for _key in ("start", "stop", "phase", "addend"):
    for _value in (-1, HUGE, 1.5, "3", None if _key == "start" else [1], True, {}):
        MANIFEST[f"{_key} {_value!r}"] = (_key, lambda f, key=_key, value=_value: f.piece.update({key: value}))
for _key in ("offsets", "shape"):
    for _value in ([-1, 0], [HUGE, 1], ["a", 0], [0.5, 1], 7, "ab", [0] * 65):
        MANIFEST[f"a slice's {_key} {str(_value)[:20]!r}"] = (
            _key,
            lambda f, key=_key, value=_value: f.piece.update({"offsets": [0, 0], "shape": [4, 4]} | {key: value}),
        )
for _value in ([4], [4, 4, 1], [2, 8], [-4, -4], [4, HUGE], "4x4", [4, "4"], None, [1 << 52, 1 << 52], [4.0, 4], []):
    MANIFEST[f"shape {_value!r}"] = ("first.weight", lambda f, v=_value: f.entries["first.weight"].update(shape=v))
for _value in ("object", "load", "Tensor", "float31", "", "__dict__", 32, None, ["float32"]):
    MANIFEST[f"dtype {_value!r}"] = ("", lambda f, v=_value: f.entries["first.weight"].update(dtype=v))
for _key, _values in {
    "world_size": (0, -1, HUGE, "2", None, 1.0),
    "entries": ([], "x", None, 5),
    "files": ([], None, "x"),
    "tensors": ([], {"a": 3}),
    "engine": ([], None, "x"),
    "ranks": ({}, [[]], None, 3),
    "placement": ([["a"]], "x", [[1, 2, 3]]),
    "versions": ([], {"wherry": 3}),
    "tag": (3, None),
    "config": (3, []),
    "created": (7, None),
}.items():
    for _value in _values:
        MANIFEST[f"{_key} is {_value!r}"] = (_key, lambda f, key=_key, value=_value: f.manifest.update({key: value}))
for _key in ("entries", "files", "tag", "created", "versions", "world_size"):
    MANIFEST[f"no {_key}"] = (_key, lambda f, key=_key: f.manifest.pop(key))
MANIFEST |= {
    "a slice with a key more": ("surprise", lambda f: f.piece.update(surprise=1)),
    "a slice without a tensor": ("tensor", lambda f: f.piece.pop("tensor")),
    "a slice of another tensor": ("said to be this one", lambda f: f.piece.update(tensor="first.bias:weight")),
    "a slice of no tensor": ("holds no tensor", lambda f: f.piece.update(tensor="nothing")),
    "a slice of a tensor of another kind": (
        "slices or values are said to be this one tensor",
        lambda f: f.piece.update(tensor="second.weight:weight"),
    ),
    "a hole": ("expected 16", lambda f: f.piece.update(stop=15)),
    "too much": ("expected 16", lambda f: f.piece.update(stop=17)),
    "backwards": ("", lambda f: f.piece.update(start=16, stop=0)),
    "no slices": ("expected 16", lambda f: f.entries["first.weight"]["states"].update(weight=[])),
    "no weight": ("no rank wrote it", lambda f: f.entries["first.weight"]["states"].pop("weight")),
    "twice the same slice": (
        "32 elements",
        lambda f: f.entries["first.weight"]["states"]["weight"].append(dict(f.piece)),
    ),
    "an addend alone": ("wrote 0 elements", lambda f: f.piece.update(addend=0)),
    "a kind that there is not": ("kind", lambda f: f.entries["first.weight"].update(kind="code")),
    "aliases that are none": ("aliases", lambda f: f.entries["first.weight"].update(aliases=[3])),
    "scales of nothing": ("said in no place", lambda f: f.piece.update(scales="nothing")),
    "an entry that is a list": ("entries", lambda f: f.entries.update({"first.weight": []})),
    "states that are a list": ("states", lambda f: f.entries["first.weight"].update(states=[])),
    "one weight less": ("it lacks first.bias", lambda f: f.entries.pop("first.bias")),
    "one weight more": ("which the model has not", lambda f: f.entries.update(other=_second(f))),
    "a buffer of another type": ("is of int64", lambda f: f.entries["norm.num_batches_tracked"].update(dtype="int32")),
    "a record of fewer checksums": ("checksums", lambda f: f.manifest["files"].update(more=_record(blocks=[]))),
    "a record of negative bytes": ("bytes", lambda f: f.manifest["files"].update(more=_record(bytes=-1))),
    "a record of data before its header": ("", lambda f: f.manifest["files"].update(more=_record(data_start=0))),
    "a record of a petabyte": ("checksums", lambda f: f.manifest["files"].update(more=_record(bytes=1 << 50))),
    "a record with words": ("blocks", lambda f: f.manifest["files"].update(more=_record(blocks=["a"]))),
    # Values beside the tensors.
    "another optimizer": ("its optimizer is AdamW with exp_avg,", lambda f: _rename_state(f, "exp_avg_sq", "sum")),
    "no optimizer": ("it holds no optimizer", lambda f: f.engine.pop("optimizer")),
    "an optimizer without groups": ("groups", lambda f: f.engine["optimizer"].pop("groups")),
    "an optimizer of a list": ("optimizer", lambda f: f.engine.update(optimizer=[])),
    "negative steps": ("steps", lambda f: f.engine["optimizer"].update(steps=-1)),
    "more steps than there are numbers": ("steps", lambda f: f.engine["optimizer"].update(steps=1 << 63)),
    "steps of a parameter in words": ("parameter_steps", lambda f: _parameter_steps(f, "many")),
    "a number in the place of a state": ("one number for each", lambda f: _scalars(f, {"exp_avg": 0.5})),
    "a number in the place of a weight": ("one number for each", lambda f: _scalars(f, {"master": 0.5})),
    "a scalar in words": ("scalars", lambda f: _scalars(f, {"step": "x"})),
    "options that are no options": ("options", lambda f: f.engine["optimizer"]["groups"][0].update(options=3)),
    "options with parameters": ("params", lambda f: _option(f, "params", [])),
    "a learning rate in words": ("lr is 'fast'", lambda f: _option(f, "lr", "fast")),
    "a learning rate of a tensor": ("lr is", lambda f: _option(f, "lr", [1, 2])),
    "betas in words": ("betas is", lambda f: _option(f, "betas", "ab")),
    "counts in words": ("global_steps", lambda f: f.engine.update(global_steps="3")),
    "negative counts": ("micro_steps", lambda f: f.engine.update(micro_steps=-3)),
    "counts of half a step": ("samples", lambda f: f.engine.update(samples=1.5)),
    "a norm in words": ("norm is", lambda f: f.engine.update(norm="large")),
    "a window of words": ("window", lambda f: f.engine.update(window="open")),
    "a window of words inside": ("window", lambda f: f.engine.update(window={"backwards": "1", "steps": 0})),
    "client_state a list": ("client_state is a list", lambda f: f.engine.update(client_state=[1])),
    "client_state of an unknown kind": ("not known", lambda f: _client(f, {"$": "code", "value": "x"})),
    "client_state without a value": ("client_state", lambda f: _client(f, {"$": "bytes"})),
    "bytes that are none": ("client_state", lambda f: _client(f, {"$": "bytes", "value": "?"})),
    "a float in words": ("client_state", lambda f: _client(f, {"$": "float", "value": "much"})),
    "a float of a list": ("client_state", lambda f: _client(f, {"$": "float", "value": []})),
    "a set of lists": ("client_state", lambda f: _client(f, {"$": "set", "value": [[1]]})),
    "pairs of three": ("client_state", lambda f: _client(f, {"$": "dict", "value": [[1, 2, 3]]})),
    "a counter of nothing": ("client_state", lambda f: _client(f, {"$": "counter", "value": 5})),
    "a dtype that is none": ("no dtype", lambda f: _client(f, {"$": "dtype", "value": "nn"})),
    "a tensor that is nowhere": ("said in no place", lambda f: _client(f, {"$": "tensor", "value": "nowhere"})),
    "a tensor of a number": ("said in no place", lambda f: _client(f, {"$": "tensor", "value": 3})),
    "a tensor again and again": (
        "said to be this one tensor",
        lambda f: _client(f, [{"$": "tensor", "value": next(iter(f.manifest["tensors"]))}] * 1000),
    ),
    "a value that is a weight": (
        "said to be this one tensor",
        lambda f: (
            f.manifest["tensors"].update({"first.weight:weight": f.file}),
            _client(f, {"$": "tensor", "value": "first.weight:weight"}),
        ),
    ),
    "an array of objects": ("client_state", lambda f: _array(f, dtype="O")),
    "an array of another size": ("client_state", lambda f: _array(f, shape=[10**9])),
    "an array of fields": ("client_state", lambda f: _array(f, dtype="i4,(1000000,1000000)i8")),
    "an array of a list": ("client_state", lambda f: _array(f, dtype=["x"])),
    "a schedule of a list": ("schedule", lambda f: f.engine.update(lr_scheduler=[1])),
    "a schedule whose step is a number": ("'step'", lambda f: f.engine["lr_scheduler"].update(step=3)),
    "a schedule with another optimizer": ("'optimizer'", lambda f: f.engine["lr_scheduler"].update(optimizer=None)),
    "a schedule in words": ("last_epoch", lambda f: f.engine["lr_scheduler"].update(last_epoch="late")),
    "random numbers of nothing": ("", lambda f: f.manifest["ranks"][0].update(rng={})),
    "random numbers of a list": ("", lambda f: f.manifest["ranks"][0].update(rng=[1, 2])),
    "random numbers of python's in words": ("", lambda f: f.manifest["ranks"][0]["rng"].update(python="x")),
    "random numbers of numpy's in words": ("", lambda f: f.manifest["ranks"][0]["rng"].update(numpy=["MT"])),
}


for _name in ("\x1b[2J", "a\nwherry: all is well", "\u202egnp", "\0", "n" * 1_000_000):
    MANIFEST[f"a name like {_name[:9]!r}"] = (
        "no rank wrote it",
        lambda f, name=_name: f.entries.update({name: _none()}),
    )


def _none() -> dict[str, Any]:
    return {"shape": [1], "dtype": "float32", "kind": "parameter", "states": {}}


def _second(f: Forgery) -> dict[str, Any]:
    f.add("other", "F32", [1], b"\0" * 4)
    slices = [{"file": f.file, "tensor": "other", "start": 0, "stop": 1}]
    return {"shape": [1], "dtype": "float32", "kind": "parameter", "states": {"weight": slices}}


def _record(**more: Any) -> dict[str, Any]:
    return {"bytes": 4096, "data_start": 4096, "header_crc32": 0, "blocks": []} | {"bytes": 8192, **more}


def _rename_state(f: Forgery, old: str, new: str) -> None:
    for entry in f.entries.values():
        if old in entry["states"]:
            entry["states"][new] = entry["states"].pop(old)


def _parameter_steps(f: Forgery, value: Any) -> None:
    f.engine["optimizer"]["parameter_steps"] = {"first.weight": value}


def _scalars(f: Forgery, value: Any) -> None:
    f.engine["optimizer"]["scalars"] = {"first.weight": value}


def _option(f: Forgery, key: str, value: Any) -> None:
    f.engine["optimizer"]["groups"][0]["options"][key] = value


def _client(f: Forgery, value: Any) -> None:
    f.engine["client_state"] = {"mine": value}


def _array(f: Forgery, **more: Any) -> None:
    f.add("array", "U8", [8], b"\0" * 8)
    f.manifest["tensors"]["array"] = f.file
    _client(f, {"$": "array", "dtype": "<i4", "shape": [2], "value": "array"} | more)


@pytest.mark.parametrize("case", MANIFEST)
def test_a_manifest(engine: Any, whole: Path, tmp_path: Path, case: str) -> None:
    told, change = MANIFEST[case]
    forged = Forgery(whole)
    change(forged)
    refused(engine, forged.write(tmp_path / "forged"), told)


# Slices in several parts: (start, stop, offsets, shape) of a weight of 4 x 4, each with a tensor of its own.

PARTS: dict[str, tuple[str, list[tuple[int, int, Any, Any]]]] = {
    "overlap in a run": ("overlap", [(0, 9, None, None), (8, 15, None, None)]),
    "one twice, one never": ("overlap", [(0, 8, None, None), (0, 8, None, None)]),
    "boxes that overlap": ("overlap", [(0, 8, [0, 0], [2, 4]), (0, 8, [1, 0], [2, 4])]),
    "a box in a box": ("overlap", [(0, 12, [0, 0], [3, 4]), (0, 4, [1, 1], [2, 2])]),
    "a box beyond the end": ("are not in a tensor", [(0, 8, [0, 0], [2, 4]), (0, 8, [3, 0], [2, 4])]),
    "a box of fewer dims": ("are not in a tensor", [(0, 8, [0], [8]), (0, 8, [2, 0], [2, 4])]),
    "more than its box holds": ("are not in a tensor", [(0, 12, [0, 0], [2, 4]), (0, 4, [2, 0], [2, 4])]),
    "the second half of a box": ("overlap", [(0, 8, [0, 0], [2, 4]), (8, 16, None, None)]),
}


def _in_parts(f: Forgery, parts: list[tuple[int, int, Any, Any]]) -> None:
    slices = []
    for number, (start, stop, offsets, shape) in enumerate(parts):
        f.add(f"part{number}", "F32", [stop - start], b"\0" * 4 * (stop - start))
        boxed = {} if offsets is None else {"offsets": offsets, "shape": shape}
        slices.append({"file": f.file, "tensor": f"part{number}", "start": start, "stop": stop} | boxed)
    f.entries["first.weight"]["states"]["weight"] = slices


@pytest.mark.parametrize("case", PARTS)
def test_slices(engine: Any, whole: Path, tmp_path: Path, case: str) -> None:
    told, parts = PARTS[case]
    forged = Forgery(whole)
    _in_parts(forged, parts)
    refused(engine, forged.write(tmp_path / "forged"), told)


def test_parts_that_fit_are_read(whole: Path, tmp_path: Path) -> None:
    forged = Forgery(whole)
    quarters = [(0, 4, [row, column], [2, 2]) for row in (0, 2) for column in (0, 2)]
    _in_parts(forged, [*quarters[:3], (0, 1, [2, 2], [2, 2]), (1, 4, [2, 2], [2, 2])])
    assert verified(forged.write(tmp_path / "forged")).entries["first.weight"].numel == 16


# What a file's header says.


def _offsets(f: Forgery, name: str, start: Any, stop: Any) -> None:
    f.header[name]["data_offsets"] = [start, stop]


def _shift(f: Forgery, count: int) -> None:
    f.data[f.file] = b"\0" * count + f.data[f.file]
    for entry in f.header.values():
        entry["data_offsets"] = [place + count for place in entry["data_offsets"]]


def _twice(f: Forgery) -> None:
    again = json.dumps({"first.weight:weight": f.header["first.weight:weight"]})
    f.headers[f.file] = (again[:-1] + ", " + json.dumps(f.header)[1:]).encode()


HEADER: dict[str, tuple[str, Change]] = {
    "no JSON": ("header cannot be read", lambda f: f.headers.update({f.file: b"{"})),
    "no object": ("it is no object", lambda f: f.headers.update({f.file: b"[1]"})),
    "no text": ("header cannot be read", lambda f: f.headers.update({f.file: b"\xff\xfe{}"})),
    "deep": ("header cannot be read", lambda f: f.headers.update({f.file: b'{"a":' + b"[" * 200_000})),
    "a name twice": ("stands twice", _twice),
    "an entry of a list": ("TypeError", lambda f: f.header.update({"first.weight:weight": []})),
    "no dtype": ("KeyError", lambda f: f.header["first.weight:weight"].pop("dtype")),
    "another dtype": ("do not hold", lambda f: f.header["first.weight:weight"].update(dtype="F64")),
    "an unknown dtype": ("KeyError", lambda f: f.header["first.weight:weight"].update(dtype="F31")),
    "a dtype of a list": ("TypeError", lambda f: f.header["first.weight:weight"].update(dtype=["F32"])),
    "a dtype of integers": ("expected", lambda f: f.header["first.weight:weight"].update(dtype="I32")),
    "states of integers": ("expected", lambda f: f.header["first.weight:exp_avg"].update(dtype="U32")),
    "another shape": ("do not hold", lambda f: f.header["first.weight:weight"].update(shape=[15])),
    "a shape below zero": ("whole numbers", lambda f: f.header["first.weight:weight"].update(shape=[-4, -4])),
    "a shape of halves": ("whole numbers", lambda f: f.header["first.weight:weight"].update(shape=[4.0, 4])),
    "a shape of a word": ("whole numbers", lambda f: f.header["first.weight:weight"].update(shape="44")),
    "a shape of a number": ("TypeError", lambda f: f.header["first.weight:weight"].update(shape=16)),
    "a huge shape": ("whole numbers", lambda f: f.header["first.weight:weight"].update(shape=[HUGE])),
    "truth for a size": ("whole numbers", lambda f: f.header["first.weight:weight"].update(shape=[16, True])),
    "three offsets": ("ValueError", lambda f: f.header["first.weight:weight"].update(data_offsets=[0, 1, 2])),
    "offsets of words": ("whole numbers", lambda f: _offsets(f, "first.weight:weight", "0", "64")),
    "offsets below zero": ("whole numbers", lambda f: _offsets(f, "first.weight:weight", -64, 0)),
    "offsets backwards": ("do not hold", lambda f: _offsets(f, "first.weight:weight", 64, 0)),
    "offsets beyond the end": ("begins at byte", lambda f: _offsets(f, "first.weight:weight", 1 << 20, (1 << 20) + 64)),
    "offsets beyond all": ("whole numbers", lambda f: _offsets(f, "first.weight:weight", HUGE, HUGE + 64)),
    "a tensor over another": ("begins at byte", lambda f: _offsets(f, "first.weight:weight", 64, 128)),
    "out of line": ("do not hold", lambda f: _offsets(f, "first.weight:weight", 3, 67)),
    "a gap before the first": ("begins at byte", lambda f: _shift(f, 64)),
    "a gap at the end": ("the file at", lambda f: f.data.update({f.file: f.data[f.file] + b"\0" * 64})),
    "the end is missing": ("the file at", lambda f: f.data.update({f.file: f.data[f.file][:-8]})),
    "one tensor less": ("begins at byte", lambda f: f.header.pop("first.weight:weight")),
    "a tensor of nothing": ("elements", lambda f: f.header.update({"first.weight:weight": _empty(f)})),
}


def _empty(f: Forgery) -> dict[str, Any]:
    f.header["anonymous"] = f.header["first.weight:weight"]
    return {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


@pytest.mark.parametrize("case", HEADER)
def test_a_header(engine: Any, whole: Path, tmp_path: Path, case: str) -> None:
    told, change = HEADER[case]
    forged = Forgery(whole)
    change(forged)
    refused(engine, forged.write(tmp_path / "forged"), told)


# The folder itself.


def _behind_a_link(path: Path, target: Path) -> None:
    path.rename(target)
    path.symlink_to(target)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


FOLDER: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a FIFO": ("FIFO", _fifo),
    "a device": ("/dev/zero", _device),
    "a folder": ("directory", _folder),
    "a circle of links": ("", _circle),
    "a link out of the folder": ("leads out of its folder", lambda path: _behind_a_link(path, path.parents[1] / "out")),
    "nothing": ("", lambda path: path.unlink()),
    "an empty file": ("", lambda path: path.write_bytes(b"")),
    "a file without end": ("", lambda path: os.truncate(path, 1 << 40)),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("case", FOLDER)
def test_a_file(engine: Any, whole: Path, tmp_path: Path, case: str, file: str) -> None:
    told, change = FOLDER[case]
    path = Forgery(whole).write(tmp_path / "forged")
    change(path / file)
    if case == "nothing" and file == "manifest.json":
        assert engine.load_checkpoint(path) == (None, None)
        return
    refused(engine, path, told)


TEXT = {
    "nothing": "",
    "no text": "\udcff",
    "no object": "[]",
    "deep": '{"format":' + "[" * 200_000,
    "a long number": '{"format": ' + "9" * 10_000 + "}",
    "a key twice": '{"format": "wherry checkpoint", "format": "wherry checkpoint"}',
    "another format": '{"format": "another", "version": 1}',
    "a version of another kind": '{"format": "wherry checkpoint", "version": [1]}',
    "no checksum": '{"format": "wherry checkpoint", "version": 1}',
    "an empty checksum": '{"format": "wherry checkpoint", "version": 1, "sha256": ""}',
    "a checksum alone": '{"format": "wherry checkpoint", "version": 1, "sha256": "' + "0" * 64 + '"}',
}


@pytest.mark.parametrize("case", TEXT)
def test_the_text_of_a_manifest(engine: Any, whole: Path, tmp_path: Path, case: str) -> None:
    path = Forgery(whole).write(tmp_path / "forged")
    if case == "no text":
        (path / "manifest.json").write_bytes(b"\xff{}")
    else:
        sign(path, TEXT[case])
    refused(engine, path, "manifest.json")


# What stands beside checkpoints.


def _deep(folder: Path) -> None:
    here = os.open(folder, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)


def _remove_deep(folder: Path) -> None:
    os.system(f"rm -rf '{folder}'")


def _text(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "manifest.json").write_text(text) and None


NEIGHBOURS: dict[str, Callable[[Path], Any]] = {
    "broken": _text("{"),
    "of a newer version": _text('{"format": "wherry checkpoint", "version": 9}'),
    "of another program": _text('{"files": []}'),
    "deep text": _text("[" * 200_000),
    "a FIFO": lambda folder: os.mkfifo(folder / "manifest.json"),
    "a device": lambda folder: (folder / "manifest.json").symlink_to("/dev/zero"),
    "a folder": lambda folder: (folder / "manifest.json").mkdir(),
    "empty": lambda folder: None,
    "deep": _deep,
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["global_step1", ".global_step1.removed.0123456789ab"])
@pytest.mark.parametrize("case", NEIGHBOURS)
def test_a_bad_neighbour_harms_nobody(tmp_path: Path, case: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(1, more={"wherry": {"checkpoint": {"keep_last": 1}}})
    beside = tmp_path / name
    beside.mkdir()
    NEIGHBOURS[case](beside)
    (tmp_path / ".elses.removed.folder").mkdir()
    try:
        for _ in range(2):
            engine.global_steps += 1
            engine.save_checkpoint(tmp_path)
        found = engine.load_checkpoint(tmp_path)[0]
        assert found == str(tmp_path / "global_step3")
        (tmp_path / "latest").unlink()
        assert folders.newest_whole(tmp_path) == "global_step3"
        named = (tmp_path / name / "manifest.json").is_file() and not name.startswith(".")
        assert not named or f"{beside} is passed over" in caplog.text
        assert (tmp_path / ".elses.removed.folder").is_dir()  # another program's
    finally:
        engine.close()
        _remove_deep(beside)


def test_a_folder_of_the_users_is_no_checkpoint_to_replace(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").write_text("mine")
    with pytest.raises(CheckpointError, match="is there and is no checkpoint"):
        engine.save_checkpoint(tmp_path, tag="data")
    assert (tmp_path / "data" / "precious").read_text() == "mine"


def test_a_save_that_is_committed_does_not_raise(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine.save_checkpoint(tmp_path, tag="first")
    write = folders.write_text

    def full(path: Path, text: str) -> None:
        if path.name == "latest":
            raise OSError(28, "No space left on device", str(path))
        write(path, text)

    monkeypatch.setattr(folders, "write_text", full)
    engine.save_checkpoint(tmp_path, tag="second")
    assert "second is whole, and latest cannot be written" in caplog.text
    assert verified(tmp_path / "second").tag == "second"


def test_the_newest_is_that_of_the_highest_step_whatever_the_clock_says(engine: Any, tmp_path: Path) -> None:
    for step, created in ((10, "2031-01-01"), (30, "2029-01-01"), (20, "2030-01-01")):
        engine.global_steps = step
        engine.save_checkpoint(tmp_path)
        forged = Forgery(tmp_path / f"global_step{step}")
        forged.manifest["created"] = created
        forged.write(tmp_path / f"global_step{step}")
    assert folders.newest_first(tmp_path) == ["global_step30", "global_step20", "global_step10"]
    assert folders.newest_whole(tmp_path) == "global_step20"  # which `latest` says, after a run was taken back
    (tmp_path / "latest").unlink()
    assert folders.newest_whole(tmp_path) == "global_step30"


def test_a_hub_s_cache_of_a_checkpoint_loads(engine: Any, whole: Path, tmp_path: Path) -> None:
    folder, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    Forgery(whole).write(folder)
    for path in list(folder.iterdir()):
        _behind_a_link(path, blobs / path.name)
    engine.load_checkpoint(folder)
    assert engine.global_steps == 3


class Own(torch.optim.lr_scheduler.LambdaLR):
    """A user's: its state grows, and changes its kinds."""

    best = None

    def __init__(self, optimizer: Any) -> None:
        self.history: list[float] = []
        self.phase: Any = 0
        super().__init__(optimizer, lambda step: 0.5)

    def step(self, *more: Any) -> None:
        super().step(*more)
        self.history.append(1.0)
        self.best, self.phase = 0.1, "warm"


def test_a_schedule_of_the_users_takes_over_what_it_has_saved(tmp_path: Path) -> None:
    engines = [engine_of(0, more={"scheduler": None}) for _ in range(2)]
    for engine in engines:
        engine.lr_scheduler = Own(engine.optimizer)
    for _ in range(2):
        engines[0].backward(engines[0](torch.ones(3, 4)))
        engines[0].step()
    engines[0].save_checkpoint(tmp_path)
    engines[1].load_checkpoint(tmp_path)
    schedule = engines[1].lr_scheduler
    assert (len(schedule.history), schedule.best, schedule.phase) == (3, 0.1, "warm")
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("kind", ["lr_scheduler", "dataloader", "extra state"])
def test_an_object_that_refuses_its_state_changes_nothing(whole: Path, tmp_path: Path, kind: str) -> None:
    """A program's own objects may raise in the middle of a load: what was taken over by then is taken back."""
    engine = engine_of(1, seed=7)

    class Refusing:
        state = 1

        def state_dict(self) -> dict[str, int]:
            return {"state": self.state}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.state = state["state"]
            if self.state == 2:
                raise KeyError("none of mine")

    forged = Forgery(whole)
    if kind == "dataloader":
        engine.training_dataloader = Refusing()
        forged.manifest["ranks"][0]["data"] = {"state": 2}
    else:
        engine.training_dataloader = Refusing()
        forged.manifest["ranks"][0]["data"] = {"state": 3}
        if kind == "lr_scheduler":
            forged.engine["lr_scheduler"]["_last_lr"] = "x"
        else:
            module = engine.module.norm
            type(module).get_extra_state = lambda self: {"b": 1}  # type: ignore[method-assign]
            type(module).set_extra_state = lambda self, state: state["b"]  # type: ignore[method-assign]
            forged.engine["extra_state"] = {"norm._extra_state": {"c": 1}}
    try:
        refused(engine, forged.write(tmp_path / "forged"), "")
        assert engine.training_dataloader.state == 1
    finally:
        if kind == "extra state":
            del type(module).get_extra_state, type(module).set_extra_state
        engine.close()


class Seeing(torch.optim.AdamW):
    """With a count of its own for each parameter, and one that is a list."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state.update(seen=state.get("seen", 0) + 1, lasts=[state["exp_avg"].sum()])


def seeing(steps: int) -> Any:
    model = Model()
    config = {
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "scheduler": CONFIG["scheduler"],
    }
    engine, *_ = wherry.initialize(model=model, optimizer=Seeing(model.parameters()), config=config)
    for _ in range(steps):
        engine.backward(engine(torch.randn(3, 4)))
        engine.step()
    return engine


@pytest.mark.parametrize(
    "objects",
    [
        [1],
        None,
        {"first.weight": [1, 2]},
        {"first.weight": None},
        {"first.weight": {KIND: "what", "value": 1}},
        {"first.weight": {KIND: "tensor", "value": "nowhere"}},
        {"first.weight": {"exp_avg": 3}},
        {"first.weight": {"step": "x"}},
    ],
    ids=repr,
)
def test_what_an_optimizer_keeps_that_is_no_tensor(objects: Any, tmp_path: Path) -> None:
    saved, engine = seeing(2), seeing(1)
    saved.save_checkpoint(tmp_path)
    forged = Forgery(tmp_path / "global_step2")
    assert forged.manifest["ranks"][0]["objects"]["first.weight"]["seen"] == 2
    forged.manifest["ranks"][0]["objects"] = objects
    refused(engine, forged.write(tmp_path / "forged"), "")
    engine.backward(engine(torch.randn(3, 4)))
    engine.step()
    for each in (saved, engine):
        each.close()


def test_a_disk_that_fails_in_the_middle_leaves_an_engine_that_says_so(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wherry.checkpoint import files

    engine = engine_of(1, seed=7)
    read, calls = files.TensorReader.read, []

    def failing(self: Any, name: str, *more: Any) -> torch.Tensor:
        calls.append(name)
        if name.endswith("second.weight:weight"):
            raise CheckpointError("the disk has a fault")
        return read(self, name, *more)

    monkeypatch.setattr(files.TensorReader, "read", failing)
    with pytest.raises(CheckpointError, match="the disk has a fault"):
        engine.load_checkpoint(whole)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="was broken off"):
        engine.save_checkpoint(whole.parent, tag="half")
    engine.load_checkpoint(whole)
    assert engine.global_steps == 3
    engine.close()


@pytest.mark.timeout(60)
def test_no_thread_waits_behind_a_load_that_was_refused(engine: Any, whole: Path, tmp_path: Path) -> None:
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        path = Forgery(whole).write(tmp_path / "forged")
        _fifo(path / "rank-00000.safetensors")
        refused(engine, path, "FIFO")
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
