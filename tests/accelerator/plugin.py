"""Gives the whole process an emulated accelerator: pytest -p tests.accelerator.plugin tests/accelerator."""

from __future__ import annotations

import os
from importlib import import_module

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # The controller of pytest-xdist runs no tests, but compiles before its workers wait for each other.
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        from tests.accelerator.build import build

        build()
        return
    import torch

    torch.set_num_threads(1)
    # Before any test, and so before the first backward pass.
    import_module("tests.accelerator.process_group")


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("long")  # a CPU computes for the device, and checks what it does
