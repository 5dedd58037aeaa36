from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.security.kinds import KINDS, Kind


@pytest.fixture(scope="session")
def kind_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Kind]]:
    """A kind of file by its name, with the valid file written."""
    kinds: dict[str, Kind] = {}

    def made(name: str) -> Kind:
        if name not in kinds:
            (folder := tmp_path_factory.mktemp(name) / "in").mkdir()
            kinds[name] = KINDS[name](folder)
        kind = kinds[name]
        kind.write(kind.tree)
        return kind

    yield made
    for kind in kinds.values():
        if hasattr(kind.load, "engine"):
            kind.load.engine.close()
