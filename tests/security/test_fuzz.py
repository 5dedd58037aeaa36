"""Any changes of a manifest or a header, with checksums that match: the load is refused and changes nothing, or weights
are the checkpoint's. WHERRY_FUZZ asks for more cases."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.harness import weights_of
from tests.security import hostile
from tests.security.kinds import Kind

from wherry.checkpoint.errors import CheckpointError
from wherry.errors import WherryError

CASES = int(os.environ.get("WHERRY_FUZZ", "15"))

NUMBERS = [0, 1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 4096, 1 << 31, 1 << 53, 1 << 63, -0.0, 1e300]
WORDS = ["a", "..", "/dev/zero", "$", "weight", "master", "exp_avg", "F32", "BF16", "int64", "tensor", "value:0:0"]
WORDS += ["first.weight:weight", "norm.num_batches_tracked:weight", "rank-00000.safetensors"]
KINDS = [{"$": "tensor", "value": "value:0:0"}, {"$": "array"}, {"$": "float", "value": "nan"}]
VALUES = [*NUMBERS, *WORDS, *KINDS, *(value for values in hostile.BAD.values() for value in values)]
# Of the run, and of no consequence here; or not to be believed at all.
LEFT_ALONE = ("config", "format", "sha256")


@settings(max_examples=CASES, deadline=5000, suppress_health_check=list(HealthCheck), derandomize=CASES <= 1000)
@given(data=st.data())
def test_no_change_brings_foreign_bytes_or_half_a_load(kind_of: Callable[[str], Kind], data: st.DataObject) -> None:
    kind: Any = kind_of(data.draw(st.sampled_from(["manifest", "header"])))
    kind.load()
    engine, tree = kind.load.engine, kind.tree
    expected = weights_of(engine)
    engine.load_checkpoint(kind.load.own)
    before = weights_of(engine)
    for _ in range(data.draw(st.integers(1, 3))):
        paths = [path for path in hostile.paths(tree, most=4) if path[0] not in LEFT_ALONE]
        tree = hostile.changed(tree, data.draw(st.sampled_from(paths)), data.draw(st.sampled_from(VALUES)))
    kind.write(tree)
    try:
        kind.load(load_module_strict=data.draw(st.booleans()))
    except CheckpointError:
        return
    # What was left out, as with load_module_strict=False, is as it was; nothing else is anything but the checkpoint's.
    for name, weight in weights_of(engine).items():
        assert torch.equal(weight, expected[name]) or torch.equal(weight, before[name]), name
    try:
        engine.backward(engine(torch.ones(3, 4)))
        engine.step()
    except WherryError:
        pass  # momenta of 1, and the like, are told by the update
