"""Hostile variants of a valid tree of values: every node, replaced by every bad value."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

DROP, REPEAT, SWAP = object(), object(), object()
# Written behind a key that `content` writes a second time without it.
_MARK = "\ue000"


def nested(depth: int, leaf: Any = None) -> Any:
    for _ in range(depth):
        leaf = {"a": leaf}
    return leaf


class Runs:
    """Unpickling an instance creates the folder `ran` in the current one."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


SPARSE = torch.ones(3).to_sparse()
VAST = torch.ones(1).expand(10**9, 1000)  # 4 TB in one element of storage

ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)

BAD: dict[str, list[Any]] = {
    "numbers": [-1, 0.5, 1 << 40, 10**24, float("nan"), float("inf"), True],
    "texts": ["", "../outside", "a\0b", "\x1b[2J\nwherry: fine", "x" * 20_000, "\ud800"],
    "shapes": [None, [], {}, [[]], {"a": 1}, nested(200)],
    "structure": [DROP, REPEAT, SWAP],
}
# Values that only a pickle holds.
PICKLED: dict[str, list[Any]] = {
    "objects": [Runs(), SimpleNamespace(a=1), ENDLESS, b"x", {1}],
    "tensors": [
        SPARSE, VAST, torch.empty(3, device="meta"), torch.ones(2, dtype=torch.complex64).conj(), torch.ones(3, 3),
        torch.ones(9, dtype=torch.int32), torch.tensor(-1.0), torch.tensor(float("nan")),
    ],
}  # fmt: skip


def paths(tree: Any, path: tuple[Any, ...] = (), *, most: int = 2) -> Iterator[tuple[Any, ...]]:
    """The paths of a tree's nodes; of a list's items the first `most`."""
    if path:
        yield path
    if isinstance(tree, dict | list):
        for key in list(tree) if isinstance(tree, dict) else range(min(most, len(tree))):
            yield from paths(tree[key], (*path, key), most=most)


def name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of a tree with another value at a path."""
    tree = copy.deepcopy(tree)
    *outer, last = path
    node = tree
    for key in outer:
        node = node[key]
    if value is DROP:
        del node[last]
    elif value is REPEAT and isinstance(node, list):
        node.append(copy.deepcopy(node[last]))
    elif value is REPEAT:
        node[f"{last}{_MARK}" if isinstance(last, str) else last] = 0
    elif value is SWAP:
        others = [node[key] for key in (node if isinstance(node, dict) else range(len(node))) if key != last]
        node[last] = copy.deepcopy(next((other for other in others if type(other) is type(node[last])), node[last]))
    else:
        node[last] = value
    return tree


def content(tree: Any) -> bytes:
    """Bytes as they are; other values as JSON with repeated keys, and with NaN and Infinity as Python writes them."""
    return tree if isinstance(tree, bytes) else json.dumps(tree).replace(json.dumps(_MARK)[1:-1], "").encode()
