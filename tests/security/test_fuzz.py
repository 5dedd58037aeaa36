"""Any change at all of a manifest or of a header, with checksums that match: it is refused, and the engine is as it
was, or weights are the checkpoint's. WHERRY_FUZZ asks for more cases."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.security.forgery import CLIENT_STATE, Forgery, engine_of, everything

from wherry.checkpoint.errors import CheckpointError
from wherry.errors import WherryError

CASES = int(os.environ.get("WHERRY_FUZZ", "15"))

NUMBERS = [0, 1, -1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 4096, 1 << 31, 1 << 53, 1 << 63, 10**24, 0.5, -0.0, 1e300, True]
WORDS = ["", "a", "..", "../x", "/dev/zero", "\0", "\ud800", "$", "weight", "master", "exp_avg", "F32", "BF16", "int64"]
WORDS += ["first.weight:weight", "norm.num_batches_tracked:weight", "rank-00000.safetensors", "value:0:0", "tensor"]
THINGS = [
    None,
    [],
    {},
    [[]],
    [1, 2],
    {"$": "tensor", "value": "value:0:0"},
    {"$": "array"},
    {"$": "float", "value": "nan"},
]
VALUES = st.sampled_from([*NUMBERS, *WORDS, *THINGS])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something may be changed."""
    if path:
        yield path
    if isinstance(value, dict | list) and len(path) < 9:
        keys = list(value) if isinstance(value, dict) else range(min(4, len(value)))
        for key in keys:
            if key in ("config", "format", "sha256") and not path:
                continue  # of the run, and of no consequence here; or not to be believed at all
            yield from places(value[key], (*path, key))


def change(tree: Any, path: tuple[Any, ...], how: str, value: Any) -> None:
    for key in path[:-1]:
        tree = tree[key]
    last = path[-1]
    if how == "drop":
        del tree[last]
    elif how == "again" and isinstance(tree, list):
        tree.append(copy.deepcopy(tree[last]))
    elif how == "add" and isinstance(tree[last], dict):
        tree[last][value if isinstance(value, str) else "more"] = value
    elif how == "nudge" and type(tree[last]) in (int, float):
        tree[last] += value if type(value) in (int, float) else 1
    else:
        tree[last] = copy.deepcopy(value)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Forgery, dict[str, torch.Tensor], Path]]:
    folder = tmp_path_factory.mktemp("fuzz")
    trained = engine_of(3)
    trained.save_checkpoint(folder, client_state=CLIENT_STATE)
    weights = {name: parameter.detach().clone() for name, parameter in trained.module.named_parameters()}
    trained.close()
    engine = engine_of(1, seed=7)
    engine.save_checkpoint(folder, tag="own")
    yield engine, Forgery(folder / "global_step3"), weights, folder
    engine.close()


@settings(max_examples=CASES, deadline=5000, suppress_health_check=list(HealthCheck), derandomize=CASES <= 1000)
@given(data=st.data())
def test_no_change_brings_foreign_bytes_or_half_a_load(
    base: tuple[Any, Forgery, dict[str, torch.Tensor], Path], data: st.DataObject
) -> None:
    engine, whole, weights, folder = base
    forged = whole.copy()
    in_header = data.draw(st.booleans())
    tree = forged.header if in_header else forged.manifest
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(places(tree))))
        change(
            tree, path, data.draw(st.sampled_from(["set", "set", "drop", "again", "add", "nudge"])), data.draw(VALUES)
        )
    try:
        path = forged.write(folder / "forged")
    except (TypeError, KeyError, AttributeError):
        return  # the record of a file is none any more, so that there is no place for its checksums
    before = everything(engine)
    try:
        engine.load_checkpoint(path, load_module_strict=data.draw(st.booleans()))
    except CheckpointError as error:
        assert "broken off" not in str(error) and everything(engine) == before, json.dumps(forged.manifest)[:2000]
        return
    # What was left out, as with load_module_strict=False, is as it was; nothing else is anything but the checkpoint's.
    own = {name: parameter.detach() for name, parameter in engine_weights(folder).items()}
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(parameter, weights[name]) or torch.equal(parameter, own[name]), name
    try:
        engine.backward(engine(torch.ones(3, 4)))
        engine.step()
    except WherryError:
        pass  # momenta of 1, and the like, are told by the update
    engine.load_checkpoint(folder, tag="own")


_OWN: dict[Path, dict[str, torch.Tensor]] = {}


def engine_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Those of the engine before each case."""
    if folder not in _OWN:
        from wherry.checkpoint.reader import CheckpointReader

        with CheckpointReader(folder / "own") as reader:
            _OWN[folder] = {name: reader.tensor(name, "weight") for name, _ in reader.manifest.parameters()}
    return _OWN[folder]
