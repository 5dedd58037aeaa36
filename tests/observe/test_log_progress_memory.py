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


@pytest.fixture
def shown():
    stream = io.StringIO()
    level = logging.getLogger("wherry").level
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logging.getLogger("wherry").addHandler(handler)
    logging.getLogger("wherry").setLevel(logging.INFO)
    yield stream
    logging.getLogger("wherry").removeHandler(handler)
    logging.getLogger("wherry").setLevel(level)


def test_news_comes_from_rank_0_and_warnings_from_all(shown):
    for rank in (0, 1):
        logger = get_logger(rank)
        logger.info("news of %d", rank)
        logger.warning("warning of %d", rank)
    assert shown.getvalue().splitlines() == [
        "wherry: news of 0",
        "wherry: warning of 0",
        "wherry: [rank 1] warning of 1",
    ]


def test_lines_that_a_config_asks_for_are_seen_once(capsys, monkeypatch):
    logger = logging.getLogger("wherry")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a program that has set up no logging
    level = logger.level
    try:
        follow(load({"gradient_clipping": 1.0}))
        say("asked for by nobody")
        for _ in range(2):  # two engines
            follow(load({"steps_per_print": 2}))
        say("step 2")
        assert capsys.readouterr().err == "wherry: step 2\n"
        logging.basicConfig(format="theirs: %(message)s")  # late, and it shows the same lines
        say("step 4")
        assert capsys.readouterr().err == "theirs: step 4\n"
    finally:
        logger.setLevel(level)


def test_warnings_reach_standard_error_with_name_and_rank(capsys, monkeypatch):
    logger = logging.getLogger("wherry")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a program that has set up no logging
    logger.warning("one of %d", 1)
    warn("of all ranks")
    say("unheard")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        logger.warning("one of %d", 2)
        warn("of all ranks")
    get_logger(1).warning("an engine's")
    assert capsys.readouterr().err.splitlines() == [
        "wherry: one of 1",
        "wherry: of all ranks",
        "wherry: [rank 0] one of 2",
        "wherry: [rank 0] of all ranks",
        "wherry: [rank 1] one of 2",
        "wherry: [rank 1] an engine's",
    ]


def test_the_programs_own_logging_decides(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logging.basicConfig(level=logging.ERROR, format="theirs: %(message)s")
    logging.getLogger("wherry").warning("unheard")
    logging.getLogger("wherry").error("heard")
    logging.getLogger().setLevel(logging.WARNING)
    assert capsys.readouterr().err == "theirs: heard\n"


def test_the_rank_comes_from_the_environment_unless_given(shown, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    get_logger().info("unheard")
    say("unheard")
    get_logger().warning("heard")
    monkeypatch.setenv("RANK", "0")
    say("also %s", "heard")
    assert shown.getvalue().splitlines() == ["wherry: [rank 3] heard", "wherry: also heard"]


def _progress(stream, **settings):
    seconds = map(float, itertools.count())
    return Progress("reading", 10, unit="files", stream=stream, every=4.0, clock=lambda: next(seconds), **settings)


def test_progress_is_a_line_now_and_then_off_a_terminal():
    stream = io.StringIO()
    with _progress(stream) as progress:
        for _ in range(10):
            progress.advance()
    assert progress.done == 10
    # The clock moves a second at each look, and a line's own two looks count.
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["4/10", "8/10"]
    assert stream.getvalue().startswith("reading: 4/10 files (40%)\n")


def test_progress_is_silent_on_other_ranks():
    stream = io.StringIO()
    with _progress(stream, rank=1) as progress:
        progress.advance(10)
    assert (progress.done, stream.getvalue()) == (10, "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Progress("reading", 4, stream=stream) as progress:
        progress.advance(4)
    assert "reading" in stream.getvalue() and "4/4" in stream.getvalue()
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal(stream)


def test_progress_is_lines_above_a_live_display(monkeypatch):
    """A bar below it would overwrite it, and be overwritten."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    screen = Terminal()
    with Live("panel", console=Console(file=screen, force_terminal=True), auto_refresh=False):
        with _progress(None) as progress:
            for _ in range(10):
                progress.advance()
        shown = sys.stderr.rich_proxied_file.getvalue()
    assert shown == "" and "reading: 8/10 files (80%)" in screen.getvalue()


@pytest.mark.parametrize(
    "count,text", [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**30, "5.0 GiB"), (2**43, "8.0 TiB")]
)
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


def test_the_cpu_has_no_memory_of_its_own():
    assert device_memory(torch.device("cpu")) is None


GPU = torch.device("privateuseone", 0)


def _answer(monkeypatch, **module):
    """Of a device of any kind: what its module answers, beside what torch does of its allocator."""
    answers = {name: lambda device, figure=figure: figure for name, figure in module.items()}
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**answers))
    for name, figure in (("memory_allocated", 30), ("max_memory_allocated", 33), ("memory_reserved", 35)):
        monkeypatch.setattr(torch.accelerator, name, lambda device, figure=figure: figure)


@pytest.mark.parametrize(("part", "expected"), [(1.0, 45), (0.5, 20), (0.2, 0)])
def test_memory_of_a_gpu_is_free_within_the_part_that_a_process_may_have(monkeypatch, part, expected):
    _answer(monkeypatch, mem_get_info=(40, 100), get_per_process_memory_fraction=part)
    assert free_on_gpu(GPU) == expected


def test_memory_of_a_device_is_as_much_as_it_tells(monkeypatch):
    _answer(monkeypatch, mem_get_info=(40, 100))
    assert free_on_gpu(GPU) == 45 and device_memory(GPU) == DeviceMemory(30, 33, free=40, total=100)
    _answer(monkeypatch)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (50, 90), raising=False)
    assert free_on_gpu(GPU) == 55 and device_memory(GPU) == DeviceMemory(30, 33, free=50, total=90)
    monkeypatch.delattr(torch.accelerator, "get_memory_info")
    assert free_on_gpu(GPU) == 5 and device_memory(GPU) == DeviceMemory(30, 33, free=0, total=0)
