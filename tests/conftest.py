"""Tiers of the suite, its order, and what every test begins with.

A test that asks for `forks`, `launched` or `warm` starts processes and is a door test; one marked `long` needs seconds
by nature. All others are fast, and so are the few door tests marked `smoke`. The marks `fast` and `door` are derived
here: `make test` runs `fast`, `make test-all` the rest, `make test-nightly` what is marked `nightly`.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
# Seconds that each test file took, written by `pytest --record-durations`.
DURATIONS = HERE / "durations.json"
# Of a file that none were recorded for.
UNKNOWN_SECONDS = 20.0
PROCESS_FIXTURES = {"forks", "launched", "warm"}
# multiprocessing's spawn and forkserver raise no event of Python's own; `_audit_multiprocessing` adds one.
STARTS_PROCESS = {
    "subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "multiprocessing.Process.start"
}  # fmt: skip
FAST_CPU_SECONDS = 1.5
# CPU time of `_spin` on a core of 2025. The limit was chosen for such a core, and grows with the time of a slower one.
SPIN_SECONDS = 0.02
# Imports are paid once a worker, by whichever test comes first.
MANY_MODULES = 40

# The time that an example takes depends on the machine's load. `pytest --hypothesis-profile search` draws new examples.
patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("search", max_examples=1000, **patient)
settings.register_profile("tests", derandomize=True, **patient)
settings.load_profile("tests")

# The test that runs in this process, unless it may start processes.
_without_processes: pytest.Item | None = None


def _is_importing() -> bool:
    """Tell a package that queries the system while it is imported, as bitsandbytes does."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
    return False


def _refuse_processes(event: str, _: Any) -> None:
    if event in STARTS_PROCESS and _without_processes is not None and not _is_importing():
        raise AssertionError(
            f"{_without_processes.nodeid}: {event} in a fast test; only door tests start processes; "
            "ask for the fixture forks, launched or warm, or test this without a process"
        )


def _audit_multiprocessing() -> None:
    start = BaseProcess.start

    def audited(self: BaseProcess) -> None:
        sys.audit("multiprocessing.Process.start")
        start(self)

    BaseProcess.start = audited  # type: ignore[method-assign]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write {DURATIONS.name} from this run")
    parser.addoption("--cheap-first", action="store_true", help="run short files first: a fault shows sooner")
    parser.addoption("--cpu-limit", type=float, default=FAST_CPU_SECONDS, help="CPU seconds of a fast test")


def wants_gpu(paths: Iterable[str], marks: str) -> bool:
    """Tell a run of the GPU's tests from all others, which would compute on a GPU that they are not for."""
    marked = "gpu" in marks and "not gpu" not in marks
    return marked or all(Path(path.partition("::")[0]).absolute().is_relative_to(HERE / "gpu") for path in paths)


def pytest_configure(config: pytest.Config) -> None:
    if not wants_gpu(config.args, config.getoption("markexpr")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if config.getoption("dist", "no") == "no" or "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        # Ranks are threads already, and test workers share the cores.
        torch.set_num_threads(1)
        sys.addaudithook(_refuse_processes)
        _audit_multiprocessing()
    if config.getoption("record_durations") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Recorder())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Background jobs of a shell ignore Ctrl-C, and so do their children. The tests send some.
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Recorder:
    """Sum the seconds of each test file over the workers."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
        known |= {name: round(seconds, 1) for name, seconds in self.seconds.items()}
        there = {name: known[name] for name in sorted(known) if (HERE.parent / name).exists() and known[name]}
        DURATIONS.write_text(json.dumps(there, indent=0) + "\n")


def starts_processes(item: pytest.Item) -> bool:
    return not PROCESS_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if starts_processes(item):
            item.add_marker("door")
        is_door = starts_processes(item) and not item.get_closest_marker("smoke")
        if not is_door and not any(item.get_closest_marker(name) for name in ("long", "nightly", "gpu")):
            item.add_marker("fast")
    # Longest files first: the last tests that a worker takes from another are short.
    seconds = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    sign = 1 if config.getoption("cheap_first") else -1
    items.sort(key=lambda item: sign * seconds.get(item.nodeid.partition("::")[0], UNKNOWN_SECONDS))


def _freeze() -> None:
    """Exempt what was imported from garbage collection: every full collection would walk it, hundreds of times."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _without_processes
    # Triton starts a compiler where a kernel is launched first.
    _without_processes = None if starts_processes(item) or item.get_closest_marker("gpu") else item
    try:
        return (yield)
    finally:
        _without_processes = None


def _spin() -> float:
    """Spend a fixed amount of work; return its CPU seconds, more of them on a slow or busy machine."""
    start = time.process_time()
    table: dict[int, int] = {}
    for n in range(200_000):
        table[n % 5003] = table.get(n * 7 % 5003, 0) + n
    return time.process_time() - start


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Fail a fast test that takes more CPU time than a suite of thousands can give to each."""
    modules, start = len(sys.modules), time.process_time()
    result = yield
    spent = time.process_time() - start
    if len(sys.modules) - modules >= MANY_MODULES:
        _freeze()
        return result
    limit = pyfuncitem.config.getoption("cpu_limit")
    if pyfuncitem.get_closest_marker("fast") and not starts_processes(pyfuncitem) and spent > limit:
        limit *= max(1.0, _spin() / SPIN_SECONDS)
        if spent > limit:
            pytest.fail(
                f"took {spent:.1f} s of CPU; on this machine a fast test takes at most {limit:.1f}; give it fewer "
                "steps or a smaller shape, or mark it `long`, which moves it to `make test-all`",
                pytrace=False,
            )
    return result


def pytest_runtest_setup() -> None:
    # A test draws the same numbers whichever tests ran before it on its worker.
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def forks() -> Any:
    """Forks of a process that has imported the engine; `forks.of(*modules)` gives forks of one with others."""
    from tests.forks import engine

    return engine()


@pytest.fixture(scope="session")
def launched() -> Any:
    """Commands, launchers and other processes; the functions are those of `tests.cli.programs`."""
    from tests.cli import programs

    return programs


@pytest.fixture(scope="session")
def warm() -> Iterator[Any]:
    """Gloo ranks that live as long as their worker: `warm(2).run(function, *arguments)` gives each rank's result."""
    from tests.warm import Pools

    with Pools() as pools:
        yield pools


@pytest.fixture
def small_sizes() -> Iterator[Any]:
    """Set `wherry.testing.small_sizes` until the end of the test: `small_sizes(bucket=1)`."""
    from wherry import testing

    with ExitStack() as stack:
        yield lambda **numel: stack.enter_context(testing.small_sizes(**numel))


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Caches of machines, profiles and texts: one folder for all workers of a run, and never the user's."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    folder.mkdir(exist_ok=True)
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if (users / "torch_extensions").is_dir():
        # Extensions that other engines compiled, for comparisons with them: compiling takes minutes.
        with suppress(FileExistsError):
            (folder / "torch_extensions").symlink_to(users / "torch_extensions")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder
