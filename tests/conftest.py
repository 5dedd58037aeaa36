from __future__ import annotations

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# Files that take longest, in that order. They begin first, so that no worker is left alone with one at the end.
LONGEST = [
    "benchmarks/test_scripts.py",
    "tiers/test_placements.py",
    "integrations/test_lightning.py",
    "integrations/test_hugging_face.py",
    "checkpoint/test_faults.py",
    "parallel/test_torch_axes.py",
    "cli/test_launch.py",
    "compat/test_install.py",
    "plan/test_tiers.py",
    "engine/test_equality.py",
    "compat/test_scripts.py",
    "train/test_job.py",
    "tiers/test_room.py",
    "checkpoint/test_resume.py",
    "plan/test_model_command.py",
    "plan/test_dryrun.py",
    "scale/test_groups.py",
    "scale/test_transformers.py",
    "activations/test_equality.py",
    "parallel/test_handmade_tensor.py",
    "cli/test_hosts.py",
    "disk/test_store.py",
    "examples/test_examples.py",
    "parallel/test_peers.py",
    "checkpoint/test_tensor.py",
    "checkpoint/test_restart.py",
]


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") == "no" or "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        # Ranks are threads already, and test workers share the cores.
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"tests/{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(LONGEST)))


def pytest_collection_finish() -> None:
    # Else every full collection looks at all that was imported, hundreds of times.
    gc.collect()
    gc.freeze()
