"""The message of each refusal: one change of a valid file for each branch that raises."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
import torch
from tests.security.hostile import DROP, REPEAT, SPARSE, VAST, Runs, changed, nested
from tests.security.kinds import FIRST, INDEX, SECOND, Kind

HUGE = 10**24
FILE = "rank-00000.safetensors"
WEIGHT = "entries/first.weight/states/weight"


class Made:
    """A new value that is made of the old one."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make


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


def _endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


BIG = torch.ones(10_000)
NONE = {"shape": [0], "dtype": "float32", "kind": "parameter", "states": {}}
STATE_0 = "optimizer_state_dict/base_optimizer_state/state/0"
INNER_3 = "optimizer_state_dict/optimizer_state_dict"
FLATS = "optimizer_state_dict/single_partition_of_fp32_groups"
OPTIONS = "engine/optimizer/groups/0/options"
MINE = "engine/client_state"

# Kind of file, path in its tree ("" is all of it), another value there, and a pattern of the message.
ROWS: list[tuple[str, str, Any, str]] = [
    # The manifest: its text and its types.
    ("manifest", "format", "another", "is not the manifest of a Wherry checkpoint"),
    ("manifest", "version", 9, "has version 9 of the format, and this Wherry reads version 1"),
    ("manifest", "world_size", REPEAT, "is damaged: 'world_size' stands twice in one object"),
    ("manifest", "world_size", 0, "is damaged: world_size: Input should be greater than or equal to 1, got '0'"),
    ("manifest", "entries", DROP, "is damaged: entries: Field required"),
    ("manifest", "entries/first.weight/shape", [4, HUGE], r"entries\.first\.weight\.shape\.1"),
    ("manifest", "entries/first.weight/shape", [1] * 65, r"entries\.first\.weight\.shape"),
    ("manifest", "entries/first.weight/kind", "code", r"entries\.first\.weight\.kind"),
    ("manifest", f"{WEIGHT}/0", more(surprise=1), "surprise"),
    ("manifest", f"{WEIGHT}/0/stop", True, r"states\.weight\.0\.stop"),
    ("manifest", f"{WEIGHT}/0", more(phase=1 << 20), r"states\.weight\.0\.phase"),
    ("manifest", "placement", [["a"]], "placement"),
    ("manifest", "engine/global_steps", "3", r"engine\.global_steps"),
    ("manifest", "engine/optimizer/steps", 1 << 63, r"engine\.optimizer\.steps"),
    # The manifest: its parts together.
    ("manifest", "files", Made(lambda files: {"../out": files[FILE]}), r"'\.\./out' is no file of its own folder"),
    ("manifest", "files", Made(lambda files: {"..": files[FILE]}), r"'\.\.' is no file of its own folder"),
    ("manifest", f"files/{FILE}/blocks", [], f"{FILE}: its 0 checksums are not those of"),
    ("manifest", f"files/{FILE}/data_start", 1 << 40, f"{FILE}: its 1 checksums are not those of"),
    ("manifest", f"{WEIGHT}/0/file", "other.safetensors", "it is in 'other.safetensors', of which there are no check"),
    ("manifest", "entries/first.weight/dtype", "load", "'load' is no dtype of this torch"),
    ("manifest", "entries/first.weight/dtype", "float31", "'float31' is no dtype of this torch"),
    ("manifest", WEIGHT, DROP, "first.weight: no rank wrote it"),
    ("manifest", f"{WEIGHT}/0", more(own=[16]), "first.weight, weight: it cannot have a shape of its own"),
    ("manifest", f"{WEIGHT}/0/stop", 15, "first.weight, weight: the ranks wrote 15 elements, expected 16"),
    ("manifest", WEIGHT, [], "first.weight, weight: the ranks wrote 0 elements, expected 16"),
    ("manifest", f"{WEIGHT}/0", more(addend=0), "first.weight, weight: the ranks wrote 0 elements, expected 16"),
    ("manifest", WEIGHT, Made(lambda slices: slices * 2), "first.weight, weight: the ranks wrote 32 elements"),
    ("manifest", WEIGHT, parts((0, 9, None, None), (8, 15, None, None)), r"slices overlap in a box of \[4, 4\]"),
    ("manifest", WEIGHT, parts((0, 8, [0, 0], [2, 4]), (0, 8, [1, 0], [2, 4])), r"slices overlap in a box of \[2, 4\]"),
    ("manifest", WEIGHT, parts((0, 12, [0, 0], [3, 4]), (0, 4, [1, 1], [2, 2])), "slices overlap in a box"),
    ("manifest", WEIGHT, parts((0, 8, [0, 0], [2, 4]), (0, 8, [3, 0], [2, 4])), "are not in a tensor of"),
    ("manifest", WEIGHT, parts((0, 8, [0], [8]), (0, 8, [2, 0], [2, 4])), "are not in a tensor of"),
    ("manifest", WEIGHT, parts((0, 12, [0, 0], [2, 4]), (0, 4, [2, 0], [2, 4])), "are not in a tensor of"),
    ("manifest", "engine/optimizer/groups", DROP, "its optimizer lacks groups"),
    ("manifest", f"{WEIGHT}/0/tensor", "first.bias:weight", "2 slices or values are said to be this one tensor"),
    ("manifest", f"{WEIGHT}/0", more(scales="nothing"), "'nothing': it is said in no place which file holds it"),
    # The manifest against the files and the model.
    ("manifest", f"{WEIGHT}/0/tensor", "nothing", "it holds no tensor 'nothing'"),
    ("manifest", WEIGHT, Made(lambda s: [s[0] | {"stop": 8}, {**s[0], "start": 8, "tensor": "x"}]), "16 elements, exp"),
    ("manifest", "entries/norm.num_batches_tracked/dtype", "int32", "is of int64, expected int32"),
    ("manifest", "entries/first.weight/shape", [2, 8], r"first.weight has shape \(2, 8\) in the checkpoint"),
    ("manifest", "entries/first.bias", DROP, "it lacks first.bias; load_module_strict=False"),
    ("manifest", "entries", more(other=NONE), "it has other, which the model has not"),
    ("manifest", "entries", more(**{"a\nwherry: all is well": NONE}), r"it has a\\nwherry: all is well, which"),
    ("manifest", "engine/optimizer", DROP, "it holds no optimizer; load_optimizer_states=False"),
    ("manifest", "entries", Made(without_moments), "its AdamW keeps no state, AdamW keeps exp_avg, exp_avg_sq"),
    ("manifest", "entries", Made(with_another_moment), "its optimizer is AdamW with exp_avg, sum, the engine's is"),
    ("manifest", "engine/optimizer/scalars", {"first.weight": {"master": 0.5}}, "one number for each parameter as mas"),
    ("manifest", "engine/optimizer/scalars", {"first.weight": {"exp_avg": 0.5}}, "one number for each parameter as ex"),
    # The run's values.
    ("manifest", OPTIONS, more(params=[]), r"param_groups\[0\]: params are no option"),
    ("manifest", f"{OPTIONS}/lr", "fast", r"param_groups\[0\]: lr is 'fast', expected the like of"),
    ("manifest", f"{OPTIONS}/betas", [1], r"param_groups\[0\]: betas is '\[1\]', expected the like of"),
    ("manifest", MINE, [1], "client_state is a list, expected a dict"),
    ("manifest", MINE, {"a": {"$": "code", "value": "x"}}, "a value of kind 'code' is not known"),
    ("manifest", MINE, {"a": {"$": "dtype", "value": "nn"}}, "'nn' is no dtype of this torch"),
    ("manifest", MINE, {"a": {"$": "tensor", "value": 3}}, "'3': it is said in no place which file holds it"),
    ("manifest", MINE, {"a": {"$": "bytes", "value": "?"}}, "client_state"),
    ("manifest", MINE, {"a": [{"$": "tensor", "value": "value:0:0"}] * 9}, "values are said to be this one tensor"),
    ("manifest", f"{MINE}/value/2/1/dtype", "O", "client_state"),
    ("manifest", f"{MINE}/value/2/1/shape", [10**9], "client_state"),
    ("manifest", "engine/norm", "large", "counts: norm is 'large', expected the like of"),
    ("manifest", "engine/window", "open", "window is a str, expected a dict"),
    ("manifest", "engine/lr_scheduler", [1], "the state of the learning rate schedule is a list"),
    ("manifest", "engine/lr_scheduler", more(step=3), "schedule has 'step', which is none of its own"),
    ("manifest", "engine/lr_scheduler", more(optimizer=None), "schedule has 'optimizer', which is none of its own"),
    ("manifest", "engine/lr_scheduler/last_epoch", "late", "last_epoch is 'late', expected the like of"),
    ("manifest", "ranks/0", more(objects=[1]), "objects: expected them by parameter, got a list"),
    ("manifest", "ranks/0/rng/python", "x", "loading"),
    # The header of a checkpoint's file.
    ("header", "", [1], r"its header cannot be read \(it is no object\)"),
    ("header", "first.weight:weight", [], r"\(first.weight:weight: TypeError"),
    ("header", "first.weight:weight/dtype", "F31", r"\(first.weight:weight: KeyError: 'F31'"),
    ("header", "first.weight:weight/data_offsets", [0, 1, 2], r"\(first.weight:weight: ValueError"),
    ("header", "first.weight:weight/shape", [4.0, 4], "sizes and offsets are whole numbers"),
    ("header", "first.weight:weight/dtype", "F64", r"do not hold \[16\] of F64"),
    ("header", "first.weight:weight/data_offsets", [64, 128], "begins at byte"),
    ("header", "first.weight:weight", DROP, "begins at byte"),
    ("header", "first.weight:weight", REPEAT, "'first.weight:weight' stands twice in one object"),
    ("header", "first.weight:weight/dtype", "I32", "first.weight:weight is of int32, expected bfloat16 or"),
    ("header", "", Made(without_last), "its tensors end at byte"),
    # Folders of weights.
    ("index", "weight_map/first.weight", f"../{FIRST}", "first.weight is in '../.*expected the name of a file in its"),
    ("index", "weight_map/first.weight", "/etc/passwd", "expected the name of a file in its folder"),
    ("index", "weight_map/first.weight", f"{FIRST}\0", r"first.weight is in 'model-1.safetensors\\x00'; expected"),
    ("index", "weight_map/first.weight", "x.safetensors", "names files that are not there: x.safetensors"),
    ("index", "weight_map", {f"a{i}": f"{i}.safetensors" for i in range(1000)}, "not there: .*, and 980 more"),
    ("index", "weight_map/first.weight", SECOND, "the index says that .* has first.weight, and it does not"),
    ("index", "weight_map", more(**{"x\nwherry: fine": FIRST}), r"has x\\nwherry: fine, and it does not"),
    ("index", "weight_map", more(**{"x" * 10**6: FIRST}), "the index says that .{1,600}, and it does not$"),
    ("index", "weight_map/first.weight", "folder", "is a directory, expected a regular file"),
    ("index", "weight_map/first.weight", INDEX, "is not a whole safetensors file"),
    ("index", "weight_map", {}, "has no weight_map"),
    ("index", "weight_map", REPEAT, "weight_map is there twice"),
    ("index", "weight_map/first.weight", REPEAT, "first.weight is there twice, and not the same"),
    ("weights_file", "first.weight/data_offsets", [64, 0], "is not a whole safetensors file"),
    ("weights_file", "first.weight/dtype", "O", "is not a whole safetensors file"),
    ("weights_file", "first.weight", Made(lambda t: t | {"dtype": "F4", "shape": [128]}), "of dtype F4, which can"),
    ("weights_file", "first.weight/shape", [2, 8], r"1 of another shape: first.weight: \[2, 8\] in the file, \[4, 4\]"),
    ("weights_file", "first.weight/dtype", "I32", "1 of another kind: first.weight: torch.int32 in the file"),
    # DeepSpeed's files.
    ("deepspeed_model", "module", DROP, "module: field required"),
    ("deepspeed_model", "module", more(x=SPARSE), "module: x: expected a plain tensor"),
    ("deepspeed_model", "module", more(x=VAST), "module: x: expected 4,000,000,000,000 bytes in the file, got 4"),
    ("deepspeed_model", "module", more(**{f"x{i}": BIG for i in range(100)}), "are the same bytes of the file"),
    ("deepspeed_model", "module", more(**{"x\x1b[2J": torch.ones(1)}), r"x\\x1b\[2J: expected a name that can be pri"),
    ("deepspeed_model", "module", more(**{"x" * 100_000: torch.ones(1)}), "at most 1000 characters"),
    ("deepspeed_model", "module/a.weight", torch.ones(4, 3).long(), "a.weight is trained, and its weight is of"),
    ("deepspeed_model", "module", more(x=Runs()), "mkdir, which is not loaded: nothing in a checkpoint is run"),
    ("deepspeed_model", "param_shapes", [], "has no param_shapes"),
    ("deepspeed_model", "param_shapes", [{"a": (-4, -3)}], "param_shapes: 0: a: 0: "),
    ("deepspeed_model", "param_shapes", [{"a": (20,)}], "has weights of 2 groups, and the model has 1"),
    ("deepspeed_model", "param_shapes", [{"a": (17,)}, {"a": (3,)}], "a is in two groups"),
    ("deepspeed_model", "param_shapes", [{"a": (4, 300)}, {"b": (3,)}], "elements are there"),
    ("deepspeed_model", "frozen_param_shapes", {"a.bias": (3,)}, "a.bias is in two groups, or trained and frozen"),
    ("deepspeed_model", "frozen_param_shapes", {"head": (3,)}, "head is in two groups, or trained and frozen or tied"),
    ("deepspeed_model", "frozen_param_shapes", {"f": (300,)}, "of 300 elements are there"),
    ("deepspeed_model", "frozen_param_fragments", None, "f: of one dtype 0 of 3 elements"),
    ("deepspeed_model", "buffer_names", VAST, "buffer_names: expected a list, got a tensor"),
    ("deepspeed_model", "param_shapes", VAST, "param_shapes: expected a list, got a tensor"),
    ("deepspeed_model", "global_steps", "5", "global_steps: input should be a valid integer"),
    ("deepspeed_model", "epoch", _endless(), "epoch: expected at most 1,000,000 values, at most 64 deep"),
    ("deepspeed_optimizer", "optimizer_state_dict", DROP, "optimizer_state_dict: field required"),
    ("deepspeed_optimizer", FLATS, DROP, "holds no fp32 weights with their states"),
    ("deepspeed_optimizer", FLATS, [], "has weights of 0 groups"),
    ("deepspeed_optimizer", f"{FLATS}/0", torch.ones(3, 3), "expected floating-point numbers in one dim"),
    ("deepspeed_optimizer", f"{FLATS}/0", torch.ones(1), "elements are there"),
    ("deepspeed_optimizer", f"{STATE_0}/exp_avg", torch.ones(9).int(), "exp_avg: expected floating-point numbers in"),
    ("deepspeed_optimizer", f"{STATE_0}/exp_avg", torch.ones(1), "of exp_avg"),
    ("deepspeed_optimizer", f"{STATE_0}/exp_avg", DROP, "of exp_avg"),
    ("deepspeed_optimizer", f"{STATE_0}/step", torch.tensor(-5.0), "step: input should be greater than or equal to 0"),
    ("deepspeed_optimizer", STATE_0, more(**{"exp_avg:0": torch.ones(9)}), "string should match pattern"),
    ("deepspeed_optimizer_3", "optimizer_state_dict/fp32_flat_groups", [torch.ones(9)], "each has|groups"),
    ("deepspeed_optimizer_3", "optimizer_state_dict/optimizer_state_dict", [{}], "has 2 flat weights, and states of 1"),
    ("deepspeed_optimizer_3", f"{INNER_3}/state", {}, r"has states \['weight'\]; expected \['exp_avg', 'weight'\]"),
    ("deepspeed_optimizer_3", f"{INNER_3}/param_groups/0/lr", BIG, "step: param_groups: a tensor is not expected"),
    ("deepspeed_stage_0", "optimizer", BIG, "optimizer: input should be a valid dictionary"),
    ("deepspeed_stage_0", "optimizer/cur_scale", -1.0, "cur_scale: input should be greater than 0"),
    ("deepspeed_stage_0", "optimizer/scale_window", 0, "scale_window: input should be greater than or equal to 1"),
    ("deepspeed_stage_0", "optimizer/optimizer_state_dict/state/0/exp_avg", torch.ones(1), "of exp_avg"),
    ("universal_optimizer", "param_groups", DROP, "param_groups: field required"),
    ("universal_optimizer", "loss_scale/scale", 0.0, "loss_scale: scale: input should be greater than 0"),
    ("universal_state", "param", DROP, "param: field required"),
    ("universal_state", "param", torch.ones(12).int(), "expected floating-point numbers"),
    ("universal_state", "param", torch.ones(1), "of weight|1 of 12 elements|elements"),
    # Configs of models.
    ("model_config", "n_embd", HUGE, "n_embd: expected a number of at most 1,000,000,000,000"),
    ("model_config", "n_embd", 10**8, "describes a model of [0-9,]+ parameters; none is as large"),
    ("model_config", "n_embd", 0, "fails: ZeroDivisionError"),
    ("model_config", "n_layer", 10**9, "n_layer: expected a number from 0 to 10,000, got 1,000,000,000"),
    ("model_config", "num_labels", 10**9, "num_labels: expected a number from 0 to 100,000"),
    ("model_config", "", more(depths=[2, 10**9]), "depths: expected a number from -10,000 to 10,000"),
    ("model_config", "", more(x={"y": [HUGE]}), "x.y: expected a number of at most"),
    ("model_config", "", more(x=nested(50)), "is nested too deeply to be a Hugging Face config"),
    ("model_config", "", more(cls=1, self=2), "does not take"),
    ("model_config", "n_positions", -8, "max_position_embeddings: expected 1 or more, got -8"),
    ("model_config", "vocab_size", -8, "negative dimension -8"),
    ("model_config", "architectures", 0.5, "architectures: expected a list of names, got 0.5"),
    ("model_config", "architectures", True, "architectures: expected a list of names, got True"),
    ("model_config", "model_type", DROP, 'has no "model_type"'),
    ("model_config", "model_type", "gpt2\0", r"Unrecognized model identifier: gpt2\\x00"),
    ("adapter", "base_model_name_or_path", "nowhere", "is an adapter of nowhere, which is not here"),
    ("adapter", "base_model_name_or_path", "x" * 5000, r"is an adapter of x+\.\.\. .*, which is not here"),
    ("adapter", "base_model_name_or_path", "x" * 5000 + "/y", r"is an adapter of x+\.\.\. .*, which is not here"),
    ("adapter", "base_model_name_or_path", DROP, "does not say whose adapter it is"),
    ("bits", "quantization_config", [1], "quantization_config cannot be read"),
    ("bits", "quantization_config", {"quant_method": "gptq"}, "holds weights in few bits by gptq"),
]  # fmt: skip


def _change(kind: Kind, path: str, value: Any) -> None:
    keys: list[Any] = []
    node = kind.tree
    for key in path.split("/") if path else ():
        keys.append(int(key) if isinstance(node, list) else next((each for each in node if str(each) == key), key))
        node = node[keys[-1]]
    value = value.make(node) if isinstance(value, Made) else value
    kind.write(changed(kind.tree, tuple(keys), value) if keys else value)


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
    monkeypatch.chdir(kind.folder)
    others = {}
    for _, path, value, told in rows:
        _change(kind, path, value)
        with pytest.raises(kind.error) as error:
            kind.load()
        if not re.search(told, str(error.value)):
            others[told] = str(error.value)
    assert others == {}
    assert not (kind.folder / "ran").exists()


@pytest.mark.long  # a million values take their time
def test_values_of_a_client_state_end(kind_of: Callable[[str], Kind]) -> None:
    kind = kind_of("deepspeed_model")
    _change(kind, "epoch", [[0] * 1000] * 1001)
    with pytest.raises(kind.error, match="epoch: expected at most 1,000,000 values, at most 64 deep"):
        kind.load()
