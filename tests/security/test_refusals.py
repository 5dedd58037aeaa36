"""The message of each refusal: one change of a valid file for each branch that raises."""

from __future__ import annotations

import copy
import re
import shutil
import zipfile
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.security.hostile import DROP, ENDLESS, REPEAT, SPARSE, VAST, Runs, changed, nested
from tests.security.kinds import FIRST, INDEX, SECOND, WEIGHTS, Kind, with_header

from wherry.config.source import LONGEST

HUGE = 10**24
FILE = "rank-00000.safetensors"
WEIGHT = "entries/first.weight/states/weight"


class Made:
    """A new value that is made of the old one."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make


class Folder:
    """A change of the folder that the valid file is in, by a function or to a file of this content."""

    def __init__(self, change: Callable[[Path], object] | str, content: bytes = b"") -> None:
        self.change = change if callable(change) else lambda folder: (folder / change).write_bytes(content)


def more(**values: Any) -> Made:
    return Made(lambda old: {**old, **values})


def parts(*runs: tuple[int, int, Any, Any]) -> list[dict[str, Any]]:
    """Slices of a weight of 4 x 4: start, stop, and offsets and shape of the box that they are in."""
    return [
        {"file": FILE, "tensor": f"part{number}", "start": start, "stop": stop}
        | ({} if offsets is None else {"offsets": offsets, "shape": shape})
        for number, (start, stop, offsets, shape) in enumerate(runs)
    ]


def without_moments(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: entry | {"states": {"weight": entry["states"]["weight"]}} for name, entry in entries.items()}


def with_another_moment(entries: dict[str, Any]) -> dict[str, Any]:
    entries = copy.deepcopy(entries)
    for entry in entries.values():
        if "exp_avg_sq" in entry["states"]:
            entry["states"]["sum"] = entry["states"].pop("exp_avg_sq")
    return entries


def without_last(header: dict[str, Any]) -> dict[str, Any]:
    last = max(header, key=lambda name: header[name]["data_offsets"][1])
    return {name: entry for name, entry in header.items() if name != last}


def cross(folder: Path) -> None:
    """A link inside of the folder to a link that leads out of it."""
    (folder / WEIGHTS).rename(folder.parent / "secret")
    (folder / "step").symlink_to("../secret")
    (folder / WEIGHTS).symlink_to("step")


def two_names(folder: Path) -> None:
    save_file({"first.weight": torch.zeros(4, 4)}, folder / "model-3.safetensors")
    (folder / INDEX).unlink()


def rename(before: str, after: str) -> Folder:
    return Folder(lambda folder: (folder / before).rename(folder / after))


def remove(name: str) -> Folder:
    return Folder(lambda folder: (folder / name).unlink())


def saved(name: str, value: Any) -> Folder:
    return Folder(lambda folder: torch.save(value, folder / name))


def again(before: str, after: str) -> Folder:
    def copy(folder: Path) -> None:
        (shutil.copytree if (folder / before).is_dir() else shutil.copy)(folder / before, folder / after)

    return Folder(copy)


def compressed(folder: Path) -> None:
    """Records that are far longer than the file."""
    with zipfile.ZipFile(folder / RANK_1, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(5_000_000))


DEEP = b"[" * 100_000
RANK_0, RANK_1 = (f"step/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))
LATEST = [
    *[(text, "expected the name of a folder|latest") for text in (b"../in/step", b"..", b"/etc", b"\x1b[2J", b"\xff")],
    (b"step7", "step7"),
]
# Lines of a hostfile.
NAMES = [
    b"-lroot", b"`reboot`", b"a|b", b"a&b", b"a>b", b"a'b", b'a"b', b"a\\b", b"../a", b"a\x00b", b"a\x1b[2Jb", b"a\x7f",
    "\u202ealpha".encode(), b"@a", b"a" * 256, b"$(x)", "\u0430lpha".encode(), b"-oProxyCommand=x", b"a;reboot",
]  # fmt: skip
COUNTS = [b"0", b"1025", b"1_0", b"-1", b"+1", b"1e3", b"0x10", b"1.5", b"nan", "\u00b2".encode(), b"9" * 5000]
LINES = [b"slots=2", b"a slots", b"a b slots=2", b"{json: true}", b"a gpus=2", b"x" * 100_000]
MODEL = "step/mp_rank_00_model_states.pt"
F32 = {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}
MANY = {f"x{i:04}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(500)}
BIG = torch.ones(10_000)
NONE = {"shape": [0], "dtype": "float32", "kind": "parameter", "states": {}}
STATE_0 = "optimizer_state_dict/base_optimizer_state/state/0"
STAGE_3 = {"optimizer_state_dict": {"fp32_flat_groups": [BIG], "optimizer_state_dict": {"state": {}}}}
FLATS = "optimizer_state_dict/single_partition_of_fp32_groups"
OPTIONS = "engine/optimizer/groups/0/options"
MINE = "engine/client_state"

# Kind of file, path in its tree ("" is all of it), another value there or the file's bytes, and a pattern of the error,
# or None where the file loads.
ROWS: list[tuple[str, str, Any, str | None]] = [
    # The manifest: its text and its types.
    ("manifest", "", b"\xff{}", "manifest.json cannot be read"),
    ("manifest", "", b'{"format":' + DEEP, "manifest.json"),
    ("manifest", "format", "another", "is not the manifest of a Wherry checkpoint"),
    ("manifest", "version", 9, "has version 9 of the format, and this Wherry reads version 1"),
    ("manifest", "world_size", REPEAT, "is damaged: 'world_size' stands twice in one object"),
    ("manifest", "world_size", 0, "is damaged: world_size: Input should be greater than or equal to 1, got '0'"),
    ("manifest", "entries/first.weight/shape", [4, HUGE], r"entries\.first\.weight\.shape\.1"),
    ("manifest", f"{WEIGHT}/0", more(surprise=1), "surprise"),
    # The manifest: its parts together.
    ("manifest", "files", Made(lambda files: {"../out": files[FILE]}), r"'\.\./out' is no file of its own folder"),
    ("manifest", f"files/{FILE}/blocks", [], f"{FILE}: its 0 checksums are not those of"),
    ("manifest", f"{WEIGHT}/0/file", "other.safetensors", "it is in 'other.safetensors', of which there are no check"),
    ("manifest", "entries/first.weight/dtype", "float31", "'float31' is no dtype of this torch"),
    ("manifest", WEIGHT, DROP, "first.weight: no rank wrote it"),
    ("manifest", f"{WEIGHT}/0", more(own=[16]), "first.weight, weight: it cannot have a shape of its own"),
    ("manifest", f"{WEIGHT}/0/stop", 15, "first.weight, weight: the ranks wrote 15 elements, expected 16"),
    ("manifest", WEIGHT, Made(lambda slices: slices * 2), "first.weight, weight: the ranks wrote 32 elements"),
    ("manifest", WEIGHT, parts((0, 8, [0, 0], [2, 4]), (0, 8, [1, 0], [2, 4])), r"slices overlap in a box of \[2, 4\]"),
    ("manifest", WEIGHT, parts((0, 8, [0, 0], [2, 4]), (0, 8, [3, 0], [2, 4])), "are not in a tensor of"),
    ("manifest", "engine/optimizer/groups", DROP, "its optimizer lacks groups"),
    ("manifest", f"{WEIGHT}/0/tensor", "first.bias:weight", "2 slices or values are said to be this one tensor"),
    ("manifest", f"{WEIGHT}/0", more(scales="nothing"), "'nothing': it is said in no place which file holds it"),
    # The manifest against the files and the model.
    ("manifest", f"{WEIGHT}/0/tensor", "nothing", "it holds no tensor 'nothing'"),
    ("manifest", "entries/norm.num_batches_tracked/dtype", "int32", "is of int64, expected int32"),
    ("manifest", "entries/first.weight/shape", [2, 8], r"first.weight has shape \(2, 8\) in the checkpoint"),
    ("manifest", "entries/first.bias", DROP, "it lacks first.bias; load_module_strict=False"),
    ("manifest", "entries", more(other=NONE), "it has other, which the model has not"),
    ("manifest", "engine/optimizer", DROP, "it holds no optimizer; load_optimizer_states=False"),
    ("manifest", "entries", Made(without_moments), "its AdamW keeps no state, AdamW keeps exp_avg, exp_avg_sq"),
    ("manifest", "entries", Made(with_another_moment), "its optimizer is AdamW with exp_avg, sum, the engine's is"),
    ("manifest", "engine/optimizer/scalars", {"first.weight": {"master": 0.5}}, "one number for each parameter as mas"),
    # The run's values.
    ("manifest", OPTIONS, more(params=[]), r"param_groups\[0\]: params are no option"),
    ("manifest", f"{OPTIONS}/lr", "fast", r"param_groups\[0\]: lr is 'fast', expected the like of"),
    ("manifest", f"{OPTIONS}/eps", None, r"param_groups\[0\]: eps is 'None', expected the like of 1e-08"),
    ("manifest", f"{OPTIONS}/fused", [1], r"param_groups\[0\]: fused is '\[1\]', expected the like of None"),
    ("manifest", MINE, [1], "client_state is a list, expected a dict"),
    ("manifest", MINE, {"a": {"$": "code", "value": "x"}}, "a value of kind 'code' is not known"),
    ("manifest", MINE, {"a": [{"$": "tensor", "value": "value:0:0"}] * 9}, "values are said to be this one tensor"),
    ("manifest", f"{MINE}/value/2/1/dtype", "O", "client_state"),
    ("manifest", "engine/norm", "large", "counts: norm is 'large', expected the like of"),
    ("manifest", "engine/window", "open", "window is a str, expected a dict"),
    ("manifest", "engine/lr_scheduler", [1], "the state of the learning rate schedule is a list"),
    ("manifest", "engine/lr_scheduler/min_lrs", None, "min_lrs is 'None', expected the like of"),
    ("manifest", "engine/lr_scheduler/last_epoch", None, "last_epoch is 'None', expected the like of 1"),
    ("manifest", "engine/lr_scheduler", more(step=3), "schedule has 'step', which is none of its own"),
    ("manifest", "ranks/0", more(objects=[1]), "objects: expected them by parameter, got a list"),
    # The header of a checkpoint's file.
    ("header", "", [1], r"its header cannot be read \(it is no object\)"),
    ("header", "", b"{", "header cannot be read"),
    ("header", "first.weight:weight/dtype", "F31", r"\(first.weight:weight: KeyError: 'F31'"),
    ("header", "first.weight:weight/shape", [4.0, 4], "sizes and offsets are whole numbers"),
    ("header", "first.weight:weight/dtype", "F64", r"do not hold \[16\] of F64"),
    ("header", "first.weight:weight/data_offsets", [64, 128], "begins at byte"),
    ("header", "first.weight:weight", REPEAT, "'first.weight:weight' stands twice in one object"),
    ("header", "first.weight:weight/dtype", "I32", "first.weight:weight is of int32, expected bfloat16 or"),
    ("header", "", Made(without_last), "its tensors end at byte"),
    # Folders of weights.
    ("index", "weight_map/first.weight", f"../{FIRST}", "first.weight is in '../.*expected the name of a file in its"),
    ("index", "weight_map/first.weight", "x.safetensors", "names files that are not there: x.safetensors"),
    ("index", "weight_map", {f"a{i}": f"{i}.safetensors" for i in range(1000)}, "not there: .*, and 980 more"),
    ("index", "weight_map/first.weight", SECOND, "the index says that .* has first.weight, and it does not"),
    ("index", "weight_map", more(**{"x\nwherry: fine": FIRST}), r"has x\\nwherry: fine, and it does not"),
    ("index", "weight_map", {}, "has no weight_map"),
    ("index", "weight_map", REPEAT, "weight_map is there twice"),
    ("index", "weight_map/first.weight", REPEAT, "first.weight is there twice, and not the same"),
    ("index", "", b'{"weight_map": ' + DEEP, "is not an index"),
    ("index", "", Folder(two_names), "model-1.safetensors and .*model-3.safetensors both have first.weight"),
    ("weights_file", "", Folder(cross), "leads out of its folder"),
    ("weights_file", "", with_header({"a": F32}, length=2**63), "is not a whole safetensors file"),
    ("weights_file", "", with_header(b'{"a":' + DEEP), "is not a whole safetensors file"),
    ("weights_file", "", with_header({"first.weight": F32 | {"shape": [4, 4]}}), "missing from the files"),
    ("weights_file", "", with_header({"a\x1b[2J\nwherry: fine": F32}), r"does not have: a\\x1b\[2J\\nwherry: fine"),
    ("weights_file", "", with_header(MANY, bytes(500)), "500 that .* 480 more"),
    ("weights_file", "first.weight", Made(lambda t: t | {"dtype": "F4", "shape": [128]}), "of dtype F4, which can"),
    ("weights_file", "first.weight/shape", [2, 8], r"1 of another shape: first.weight: \[2, 8\] in the file, \[4, 4\]"),
    ("weights_file", "first.weight/dtype", "I32", "1 of another kind: first.weight: torch.int32 in the file"),
    # DeepSpeed's files.
    ("deepspeed_model", "module", more(x=SPARSE), "module: x: expected a plain tensor"),
    ("deepspeed_model", "module", more(**{f"x{i}": BIG for i in range(100)}), "are the same bytes of the file"),
    ("deepspeed_model", "module", more(**{"x\x1b[2J": torch.ones(1)}), r"x\\x1b\[2J: expected a name that can be pri"),
    ("deepspeed_model", "module/a.weight", torch.ones(4, 3).long(), "a.weight is trained, and its weight is of"),
    ("deepspeed_model", "module", more(x=Runs()), "mkdir, which is not loaded: nothing in a checkpoint is run"),
    ("deepspeed_model", "param_shapes", [{"a": (20,)}], "has weights of 2 groups, and the model has 1"),
    ("deepspeed_model", "param_shapes", [{"a": (17,)}, {"a": (3,)}], "a is in two groups"),
    ("deepspeed_model", "frozen_param_fragments", None, "f: of one dtype 0 of 3 elements"),
    ("deepspeed_model", "buffer_names", VAST, "buffer_names: expected a list, got a tensor"),
    ("deepspeed_model", "epoch", ENDLESS, "epoch: expected at most 1,000,000 values, at most 64 deep"),
    ("deepspeed_optimizer", FLATS, DROP, "holds no fp32 weights with their states"),
    ("deepspeed_optimizer", FLATS, [], "has weights of 0 groups"),
    ("deepspeed_optimizer", f"{FLATS}/0", torch.ones(3, 3), "expected floating-point numbers in one dim"),
    ("deepspeed_optimizer", f"{STATE_0}/exp_avg", torch.ones(1), "of exp_avg"),
    ("deepspeed_optimizer", STATE_0, more(**{"exp_avg:0": torch.ones(9)}), "string should match pattern"),
    ("universal_optimizer", "", remove("step/zero/a/fp32.pt"), "zero/a/fp32.pt cannot be read: No such"),
    ("universal_optimizer", "", rename("step/zero/a", "step/zero/c"), "has no folder of a, whi"),
    ("universal_optimizer", "", again("step/zero/a", "step/zero/x\x1b"), "expected a name that can be printed"),
    ("universal_optimizer", "", again("step/zero/a/fp32.pt", "step/zero/a/\x1b.pt"), "expected the name of a state"),
    ("universal_optimizer", "", saved("step/zero/a/step.pt", "5"), "step: input should be a valid integer"),
    ("deepspeed_optimizer", "", remove(MODEL), r"holds no \*_model_states.pt"),
    ("deepspeed_optimizer", "", remove(RANK_0), "and none of rank 0"),
    ("deepspeed_optimizer", "", remove(RANK_1), "elements are there"),
    ("deepspeed_optimizer", "", again(RANK_1, RANK_1.replace("zero", "bf16_zero")), "are both of rank 1"),
    ("deepspeed_optimizer", "", saved(RANK_1, STAGE_3), "is of another ZeRO stage"),
    ("deepspeed_optimizer", "", b"\x80\x02}q\0.", "is not a zip file"),
    ("deepspeed_optimizer", "", Folder(compressed), "is not as torch stores one"),
    ("deepspeed_optimizer", "", saved(RANK_1, {"optimizer_state_dict": Runs()}), "mkdir, which is not loaded"),
    ("deepspeed_optimizer", "", Folder("step/layer_00"), "tensor or pipeline parallelism, which is not"),
    *[("deepspeed_optimizer", "", Folder("latest", text), told) for text, told in LATEST],
    # Configs.
    ("config", "wherry/run_dir", "a\0b", "wherry.run_dir: holds a NUL or half of a character"),
    ("config", "", b'{"optimizer": {"type": "Ad\0am"}}', "Invalid control character"),
    ("config", "train_batch_size", HUGE, "train_batch_size: is a number of 25 digits"),
    ("config", "train_batch_size", 1e24, "train_batch_size: nothing that can be set here is as large as"),
    ("config", "wherry/host_memory", "1" + "0" * 400 + "GB", "nothing that can be set here is as large as"),
    ("config", "", b'{"train_batch_size": ' + b"9" * 5000 + b"}", "a number in it has thousands of digits"),
    ("config", "", nested(100), "nested too deeply"),
    ("config", "", b'{"train_batch_size": 4,\n"train_batch_size": 8}', "given twice, first on line 1"),
    ("config", "", {f"k{i}": 1 for i in range(2000)}, "and more; this does not look like a config"),
    ("config", "", {"k" * (LONGEST - 200): 1}, r"characters\) \.\.\."),
    ("config", "", b"{" * 20_000, "not valid JSON or Hjson"),
    ("config", "", b"{a " + b"/* " * 20_000, r"{ not closed \({ of line 1\): is the file whole"),
    ("config", "", b"{" + b" " * LONGEST + b"}", "is longer than the 1,048,576"),
    ("config", "", b"", "is empty; write {} to take every default"),
    ("config", "", b"[1]", "expected an object with config keys"),
    ("config", "", b'{"train_batch_size": "\xff"}', r"is not UTF-8 text \(byte 22\)"),
    ("config", "optimizer/type", "os.system", "unknown optimizer"),
    ("config", "", {"a\nwherry: all is well": 1}, r"a\\nwherry"),
    *[("hostfile", "", b"good slots=2\n" + line + b" slots=1\n", "hosts:2: .*a host's name or") for line in NAMES],
    *[("hostfile", "", b"a slots=" + count, "hosts:1: .*slots: expected a number from 1 to 1024") for count in COUNTS],
    *[("hostfile", "", line, "hosts:1: .*expected `name slots=N`") for line in LINES],
    ("hostfile", "", b"good slots=2\ngood slots=3", "hosts:2: .*good stands in the file twice"),
    ("hostfile", "", b"\xff\xfea slots=1", "expected text in UTF-8, got the byte 0xff"),
    # Configs of models.
    ("model_config", "", b'{"model_type": "gpt2", "n_layer": ' + b"9" * 5000 + b"}", "4300 digits"),
    ("model_config", "", b'{"model_type": "gpt2", "x": ' + DEEP, "nested too deeply"),
    ("model_config", "", b"[1]", 'has no "model_type"'),
    ("model_config", "", b" " * (16 << 20) + b"{}", "is longer than the 16,777,216 bytes"),
    ("model_config", "", more(vision_feature_layer=-2, out_layers=[-1, 3], model_max_length=10**30), None),
    ("model_config", "n_embd", HUGE, "n_embd: expected a number of at most 1,000,000,000,000"),
    ("model_config", "n_embd", 10**8, "describes a model of [0-9,]+ parameters; none is as large"),
    ("model_config", "n_layer", 10**9, "n_layer: expected a number from 0 to 10,000, got 1,000,000,000"),
    ("model_config", "", more(x={"y": [HUGE]}), "x.y: expected a number of at most"),
    ("model_config", "", more(x=nested(50)), "is nested too deeply to be a Hugging Face config"),
    ("model_config", "n_positions", -8, "max_position_embeddings: expected 1 or more, got -8"),
    ("model_config", "", more(cls=1, self=2), "does not take"),
    ("model_config", "architectures", 0.5, "architectures: expected a list of names, got 0.5"),
    ("model_config", "model_type", DROP, 'has no "model_type"'),
    ("adapter", "base_model_name_or_path", "nowhere", "is an adapter of nowhere, which is not here"),
    ("adapter", "base_model_name_or_path", "x" * 5000 + "/y", r"is an adapter of x+\.\.\. .*, which is not here"),
    ("adapter", "base_model_name_or_path", DROP, "does not say whose adapter it is"),
]  # fmt: skip


def _change(kind: Kind, path: str, value: Any) -> None:
    if isinstance(value, Folder):
        kind.write(kind.tree)
        shutil.copytree(kind.folder, kind.folder.parent / "kept")
        value.change(kind.folder)
        return
    keys: list[Any] = []
    node = kind.tree
    for key in path.split("/") if path else ():
        keys.append(int(key) if isinstance(node, list) else next((each for each in node if str(each) == key), key))
        node = node[keys[-1]]
    value = value.make(node) if isinstance(value, Made) else value
    kind.write(changed(kind.tree, tuple(keys), value) if keys else value)


def _outcome(kind: Kind, path: str, value: Any, told: str | None) -> str | None:
    """Load a changed file: what is wrong with the outcome, if anything is."""
    _change(kind, path, value)
    try:
        kind.load()
    except kind.error as error:
        if told is not None and re.search(told, str(error)):
            return kind.flaw(error)
        return str(error)[:1000]
    finally:
        if isinstance(value, Folder):
            shutil.rmtree(kind.folder)
            (kind.folder.parent / "kept").rename(kind.folder)
    return None if told is None else "loaded"


# Rows of one case.
MOST = 16
CASES = [
    pytest.param(rows[at : at + MOST], id=f"{name} {at}")
    for name, found in groupby(ROWS, key=lambda row: row[0])
    for rows in [list(found)]
    for at in range(0, len(rows), MOST)
]


@pytest.mark.parametrize("rows", CASES)
def test_a_refusal_names_the_mistake(
    rows: list[Any], kind_of: Callable[[str], Kind], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = kind_of(rows[0][0])
    monkeypatch.chdir(kind.folder.parent)
    outcomes = {f"{path} {told}": _outcome(kind, path, value, told) for _, path, value, told in rows}
    assert {row: outcome for row, outcome in outcomes.items() if outcome is not None} == {}
    assert not (kind.folder.parent / "ran").exists()


@pytest.mark.long  # a million values take their time
def test_values_of_a_client_state_end(kind_of: Callable[[str], Kind]) -> None:
    kind = kind_of("deepspeed_model")
    _change(kind, "epoch", [[0] * 1000] * 1001)
    with pytest.raises(kind.error, match="epoch: expected at most 1,000,000 values, at most 64 deep"):
        kind.load()
