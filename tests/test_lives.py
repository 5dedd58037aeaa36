"""Lives on ranks that are threads, in which every two factors of a training meet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.covering import Case, name_of
from tests.life import BASE, Machine, cases, check

from wherry.errors import WherryError

MACHINE = Machine()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "every" in metafunc.fixturenames:
        marks = metafunc.config.getoption("markexpr")
        asked = "nightly" in marks and "not nightly" not in marks  # they take seconds to choose
        metafunc.parametrize("every", cases(3, ranks=(1, 2, 4)) if asked else (), ids=name_of)


@pytest.mark.parametrize("case", cases(), ids=name_of)
def test_a_life_has_the_bits_of_a_calm_one(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path, MACHINE)


@pytest.mark.nightly
def test_every_three_factors_meet(every: Case, tmp_path: Path) -> None:
    check(every, tmp_path, MACHINE)


class KnownFaultError(Exception):
    """A fault that a test expects until it is mended."""


@contextmanager
def failing(error: type[Exception], text: str) -> Iterator[None]:
    """Expect this error: another is a failure of the test, and none means that the fault is mended."""
    try:
        yield
    except error as raised:
        assert re.search(text, str(raised)), raised
        raise KnownFaultError from raised


@pytest.mark.xfail(strict=True, reason="a gather ahead begins a joined flat twice", raises=KnownFaultError)
def test_a_block_used_twice_is_gathered_with_others(tmp_path: Path) -> None:
    with failing(AssertionError, "gathering"):
        check(BASE | {"model": "twice", "tiers": "device", "ranks": 2}, tmp_path, MACHINE)


@pytest.mark.xfail(
    strict=True,
    reason="torch's optimizers take all segments of a bucket, and are given a piece",
    raises=KnownFaultError,
)
def test_optimizers_of_torch_update_large_flats_in_pieces(tmp_path: Path, small_sizes: Any) -> None:
    small_sizes(piece=512)
    with failing(WherryError, r"zip\(\) argument 2 is longer"):
        check(BASE | {"tiers": "parameters-only", "optimizer": "SGD"}, tmp_path, MACHINE)


def test_a_rank_of_padding_alone_loads(tmp_path: Path) -> None:
    check(BASE | {"optimizer": "AMSGrad", "ranks": 4, "flats": "alone"}, tmp_path, MACHINE)
