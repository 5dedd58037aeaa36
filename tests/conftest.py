from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is; and a change is not held up by what another run would not
# have found. `pytest --hypothesis-profile search` looks for new examples.
patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("search", max_examples=1000, **patient)
settings.register_profile("tests", derandomize=True, **patient)
settings.load_profile("tests")

# Files that take longest, in that order. They begin first, so that no worker is left alone with one at the end.
LONGEST = [
    "benchmarks/test_scripts.py",
    "tiers/test_placements.py",
    "integrations/test_hugging_face.py",
    "integrations/test_lightning.py",
    "plan/test_tiers.py",
    "cli/test_launch.py",
    "cli/test_ray.py",
    "checkpoint/test_matrix.py",
    "checkpoint/test_resume.py",
    "engine/test_equality.py",
    "compat/test_install.py",
    "checkpoint/test_faults.py",
    "train/test_job.py",
    "scale/test_groups.py",
    "engine/test_merging.py",
    "tiers/test_room.py",
    "compat/test_scripts.py",
    "native/test_wheel.py",
    "plan/test_model_command.py",
    "plan/test_dryrun.py",
    "cli/test_hosts.py",
    "checkpoint/test_restart.py",
    "scale/test_accumulation.py",
    "engine/test_models.py",
    "disk/test_store.py",
    "scale/test_transformers.py",
    "examples/test_examples.py",
    "parallel/test_torch_axes.py",
    "parallel/test_peers.py",
    "checkpoint/test_tensor.py",
    "engine/test_counts.py",
    "parallel/test_handmade_tensor.py",
]


def wants_gpu(paths: Iterable[str], marks: str) -> bool:
    """Whether a run is of the tests for a GPU. All others are for the CPU, and would compute on one that is there."""
    folder = Path(__file__).parent / "gpu"
    marked = "gpu" in marks and "not gpu" not in marks
    return marked or all(Path(path.partition("::")[0]).absolute().is_relative_to(folder) for path in paths)


def pytest_configure(config: pytest.Config) -> None:
    if not wants_gpu(config.args, config.getoption("markexpr")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if config.getoption("dist", "no") == "no" or "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        # Ranks are threads already, and test workers share the cores.
        torch.set_num_threads(1)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's background jobs hear no Ctrl-C, nor do their children. The tests send some.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"tests/{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(LONGEST)))


def pytest_collection_finish() -> None:
    # Else every full collection looks at all that was imported, hundreds of times.
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    # What a test draws does not depend on the tests before it, which are others on each worker.
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What is kept of machines, profiles and texts: one folder for all workers of a run, and none of the user's."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    folder.mkdir(exist_ok=True)
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if (users / "torch_extensions").is_dir():
        # What other engines have compiled, for comparisons with them: it takes minutes.
        with suppress(FileExistsError):
            (folder / "torch_extensions").symlink_to(users / "torch_extensions")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder
