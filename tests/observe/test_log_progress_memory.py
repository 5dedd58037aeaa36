"""Log lines by rank, progress on terminals and off them, and memory of hosts, containers and devices."""

import io
import itertools
import logging
import mmap
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from rich.live import Live

from wherry.config import load
from wherry.observe import memory
from wherry.observe.log import follow, get_logger, say, warn
from wherry.observe.memory import DeviceMemory, control_groups, device_memory, format_bytes, free_on_gpu, host_memory
from wherry.observe.progress import Progress, is_terminal
from wherry.tiers import host

LOGGER = logging.getLogger("wherry")


@pytest.fixture
def level():
    before = LOGGER.level
    yield before
    LOGGER.setLevel(before)


def test_warnings_come_from_all_ranks_and_news_that_a_config_asks_for_from_rank_0(capsys, monkeypatch, level):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a program that has set up no logging
    follow(load({"gradient_clipping": 1.0}))
    LOGGER.warning("one of %d", 1)
    warn("of all ranks")
    say("asked for by nobody")
    for _ in range(2):  # two engines
        follow(load({"steps_per_print": 2}))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        LOGGER.warning("one of %d", 2)
        warn("of all ranks")
        say("step %d", 2)
        get_logger().info("its engine's")
    get_logger(1).warning("an engine's")
    get_logger(1).info("unheard")
    assert capsys.readouterr().err.splitlines() == [
        "wherry: one of 1",
        "wherry: of all ranks",
        "wherry: [rank 0] one of 2",
        "wherry: [rank 0] of all ranks",
        "wherry: step 2",
        "wherry: its engine's",
        "wherry: [rank 1] one of 2",
        "wherry: [rank 1] an engine's",
    ]


def test_the_programs_own_logging_decides(capsys, monkeypatch, level):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    follow(load({"steps_per_print": 2}))
    logging.basicConfig(level=logging.ERROR, format="theirs: %(message)s")  # late
    LOGGER.warning("heard")
    logging.getLogger().handlers[0].setLevel(logging.ERROR)
    LOGGER.warning("unheard")
    LOGGER.error("heard")
    logging.getLogger().setLevel(logging.WARNING)
    assert capsys.readouterr().err == "theirs: heard\n" * 2


def _progress(stream, **settings):
    seconds = map(float, itertools.count())
    return Progress("reading", 10, unit="files", stream=stream, every=4.0, clock=lambda: next(seconds), **settings)


@pytest.mark.parametrize(("rank", "shown"), [(0, ["4/10", "8/10"]), (1, [])])
def test_progress_is_a_line_now_and_then_off_a_terminal(rank, shown):
    stream = io.StringIO()
    with _progress(stream, rank=rank) as progress:
        for _ in range(10):
            progress.advance()
    assert progress.done == 10
    # The clock moves a second at each look, and a line's own two looks count.
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == shown
    assert rank or stream.getvalue().startswith("reading: 4/10 files (40%)\n")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_a_bar_on_a_terminal_and_lines_above_a_live_display(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Progress("reading", 4, stream=stream) as progress:
        progress.advance(4)
    assert "reading" in stream.getvalue() and "4/4" in stream.getvalue()
    # A bar below a live display would overwrite it, and be overwritten.
    monkeypatch.setattr(sys, "stderr", Terminal())
    screen = Terminal()
    with Live("panel", console=Console(file=screen, force_terminal=True), auto_refresh=False):
        with _progress(None) as progress:
            for _ in range(10):
                progress.advance()
        shown = sys.stderr.rich_proxied_file.getvalue()
    assert shown == "" and "reading: 8/10 files (80%)" in screen.getvalue()
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal(stream)


@pytest.mark.parametrize(("count", "text"), [(1023, "1023 B"), (1536, "1.5 KiB"), (2**43, "8.0 TiB")])
def test_bytes_are_written_for_people(count, text):
    assert format_bytes(count) == text


def test_host_memory_sees_what_this_process_takes():
    before = host_memory()
    # Pages of its own: a tensor may get memory back that the allocator kept.
    with mmap.mmap(-1, 64 * 2**20) as held:
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        after = host_memory()
    assert after.resident - before.resident > 0.9 * 64 * 2**20
    assert after.peak >= after.resident * 0.99
    assert 0 < after.available <= after.total


@pytest.mark.parametrize(
    ("folder", "limit", "use", "cached"),
    [
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_container_limits_memory_and_what_it_caches_is_free(tmp_path, monkeypatch, folder, limit, use, cached):
    assert control_groups(tmp_path) == []
    group = tmp_path / folder
    group.mkdir(exist_ok=True)
    (group / limit).write_text("max\n")
    (group / use).write_text("3000\n")
    (group / "memory.stat").write_text(f"anon 1000\n{cached} 1800\nactive_file 200\n")
    assert control_groups(tmp_path) == []
    (group / limit).write_text("5000\n")
    (found,) = control_groups(tmp_path)
    assert (found.limit, found.used, found.free, found.file) == (5000, 1200, 3800, group / limit)
    monkeypatch.setattr(memory, "control_groups", lambda: [found])
    assert (host_memory().available, host_memory().total) == (3800, 5000)
    monkeypatch.setattr(host, "control_groups", lambda: [found])
    monkeypatch.setattr(host, "untouched", lambda: 700)
    assert host.free_host_memory(2) == 2400


GPU = torch.device("privateuseone", 0)


def _answer(monkeypatch, **module):
    """Fake a device's module, and torch's figures of its allocator."""
    answers = {name: lambda device, figure=figure: figure for name, figure in module.items()}
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**answers))
    for name, figure in (("memory_allocated", 30), ("max_memory_allocated", 33), ("memory_reserved", 35)):
        monkeypatch.setattr(torch.accelerator, name, lambda device, figure=figure: figure)


def test_memory_of_a_device_is_as_much_as_it_tells(monkeypatch):
    assert device_memory(torch.device("cpu")) is None
    for part, expected in ((1.0, 45), (0.5, 20), (0.2, 0)):  # that a process may have
        _answer(monkeypatch, mem_get_info=(40, 100), get_per_process_memory_fraction=part)
        assert free_on_gpu(GPU) == expected
    _answer(monkeypatch, mem_get_info=(40, 100))
    assert free_on_gpu(GPU) == 45 and device_memory(GPU) == DeviceMemory(30, 33, free=40, total=100)
    _answer(monkeypatch)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (50, 90), raising=False)
    assert free_on_gpu(GPU) == 55 and device_memory(GPU) == DeviceMemory(30, 33, free=50, total=90)
    monkeypatch.delattr(torch.accelerator, "get_memory_info")
    assert free_on_gpu(GPU) == 5 and device_memory(GPU) == DeviceMemory(30, 33, free=0, total=0)
