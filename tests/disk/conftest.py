"""A store on every backend that the machine has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from wherry.tiers.buffers import HostPool
from wherry.tiers.disk import DiskStore, DiskUseError, probe

KINDS = {
    "io_uring": {"backend": "io_uring", "native": True},
    "threads": {"backend": "threads", "native": True},
    "buffered": {"backend": "buffered", "native": True},
    "python": {"backend": "threads", "native": False},
    "python-buffered": {"backend": "buffered", "native": False},
}


@pytest.fixture(params=KINDS)
def kind(request, tmp_path) -> dict:
    options = KINDS[request.param]
    try:
        probe(str(tmp_path), **options)
    except DiskUseError as error:
        pytest.skip(str(error))
    return options


@pytest.fixture
def pool() -> Iterator[HostPool]:
    with HostPool() as made:
        yield made


@pytest.fixture
def roots(tmp_path) -> list[Path]:
    """Two folders for stores; nothing may be left in them."""
    made = [tmp_path / "a", tmp_path / "b"]
    for root in made:
        root.mkdir()
    return made


@pytest.fixture
def make(kind, roots) -> Iterator[Callable[..., DiskStore]]:
    """Makes stores, striped over both roots unless told otherwise, closed at the end."""
    stores: list[DiskStore] = []

    def made(paths=None, **options) -> DiskStore:
        stores.append(DiskStore(paths or roots, **{"block_size": 64 << 10, "queue_depth": 4, **kind, **options}))
        return stores[-1]

    yield made
    for store in stores:
        store.close()
    assert [left for root in roots for left in root.iterdir()] == []


@pytest.fixture
def store(make) -> DiskStore:
    return make()
