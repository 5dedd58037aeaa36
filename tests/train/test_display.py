import io
import math
from collections import deque
from pathlib import Path

import pytest
from rich.console import Console

from wherry.placement import Placement, Tier
from wherry.train.display import Display, sparkline
from wherry.train.loop import Ending, Outcome, Record

MEMORY = [("parameters", "device", 1024, 1024), ("optimizer", "host", 4096, 2048), ("gradients", "device", 512, 0)]


def _record(step, loss=3.25, **settings):
    values = {"lr": 1e-3, "gradient_norm": 0.75, "tokens": 64 * step, "tokens_per_second": 12345.0, "skipped_steps": 0}
    return Record(step=step, loss=loss, step_seconds=2.0, **{**values, **settings})


def _display(*, terminal=False, steps=40, **settings):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    return Display(console, steps, lambda: MEMORY, **settings), console.file


def _begin(display):
    offloaded = Placement.of_stage(3, optimizer=Tier.HOST)
    display.begin("GPT-2 of 1M parameters", [("batch", "16 samples")], offloaded, activations=2048)


def test_placement_and_expected_memory_come_first():
    display, out = _display()
    _begin(display)
    text = out.getvalue()
    assert "Placement: ZeRO-3 Offload" in text and "16 samples" in text
    # The words of engine.memory(), inspect and config check.
    assert [line.split() for line in text.splitlines() if "optimizer" in line] == [
        ["│", "optimizer", "│", "partitioned", "│", "host", "│", "4.0", "KiB", "│"]
    ]
    assert "about 2.0 KiB" in text


def test_plain_lines_are_short_and_what_the_states_take_is_told_once():
    display, out = _display()
    _begin(display)
    for step in (9, 10):
        display.step(_record(step, validation_loss=3.5, skipped_steps=2))
    first, memory, second = out.getvalue().splitlines()[-3:]
    assert memory == "memory of rank 0: device: parameters 1.0 KiB; host: optimizer 2.0 KiB"
    assert first.startswith("step 9/40") and second == (
        "step 10/40  loss 3.2500  validation 3.5000  lr 1.00e-03  norm 0.75  2 skipped  12,345 tokens/s  0:01:00 left"
    )
    assert "\x1b" not in out.getvalue()


def test_a_lost_loss_has_room_in_its_line():
    display, _ = _display()
    assert "  loss 1.03e+11  lr" in display.line(_record(10, loss=103088160768.0))


def test_plain_lines_may_be_thinned_but_not_the_ends():
    display, out = _display(line_every=10)
    for step in range(1, 41):
        display.step(_record(step))
    shown = [line.split("/")[0] for line in out.getvalue().splitlines() if line.startswith("step")]
    assert shown == ["step 1", "step 10", "step 20", "step 30", "step 40"]
    resumed, out = _display(line_every=10)
    resumed.step(_record(23))
    resumed.step(_record(24))
    assert out.getvalue().startswith("step 23/") and out.getvalue().count("step ") == 1


def test_a_terminal_gets_a_panel_that_is_given_back():
    asked = []
    display, out = _display(terminal=True, ending=lambda: asked)
    _begin(display)
    display.step(_record(10))
    display.step(_record(11, loss=math.nan))
    assert "Ctrl-C again" not in out.getvalue()
    asked.append("Ctrl-C")
    display._live.refresh()
    assert "ends after this step; Ctrl-C again ends at once" in out.getvalue()
    display.end(Outcome(ending=Ending.FINISHED, steps=40, seconds=80.0, tokens=640), Path("runs/x"))
    text = out.getvalue()
    assert "step 10 of 40" in text or "step 11 of 40" in text
    for part in ("loss nan", "12,345 tokens/s", "norm 0.75", "0:00:58 left", "parameters", "of 4.0 KiB", "process"):
        assert part in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0  # the cursor, hidden and shown
    assert display._live is None


@pytest.mark.parametrize(
    "ending,word",
    [
        (Ending.FINISHED, "Finished."),
        (Ending.INTERRUPTED, "Interrupted."),
        (Ending.DIVERGED, "The loss is lost"),
        (Ending.FAILED, "Stopped by an error."),
    ],
)
def test_the_summary_tells_how_it_ended(ending, word):
    display, out = _display()
    resumed = {"steps": 20, "tokens": 3840, "tokens_here": 1280, "seconds": 10.0}
    outcome = Outcome(ending, **resumed, first_loss=5.5, last_losses=deque([9.0, 2.0, 4.0]))
    display.end(outcome, Path("runs/x"))
    text = out.getvalue()
    loss = "5.5000 at first, 3.0000 at last (mean of the last 2 logged)"
    for part in (word, "20 of 40 in 0:00:10", loss, "3,840 at 128 tokens/s", "runs/x"):
        assert part in text
    assert "validation" not in text and "Next" not in text


def test_what_can_be_done_next_comes_with_commands_to_copy():
    display, out = _display()
    command = "wherry generate runs/" + 100 * "x"
    display.end(Outcome(), Path("runs/x"), [("see what it has learned", command)])
    assert out.getvalue().endswith(f"Next\n  see what it has learned\n    {command}\n")


def test_a_summary_before_the_first_step_has_no_numbers_to_show():
    display, out = _display()
    display.end(Outcome(), Path("runs/x"))
    assert "0 of 40" in out.getvalue()


def test_a_lost_loss_is_said_loudly():
    display, out = _display(terminal=True)
    display.non_finite(7, math.nan, ended=False)
    display.non_finite(9, math.inf, ended=True)
    text = out.getvalue()
    assert "THE LOSS IS NAN at step 7." in text and "THE LOSS IS INF at step 9." in text
    assert "Lower --lr" in text and "\x1b[1;37;41m" in text


def test_the_course_of_the_loss_in_a_line_of_blocks():
    assert sparkline([1, 2, 3, math.nan, 8]) == "▁▂▃█"
    assert sparkline([math.nan]) == "" and sparkline([2.0, 2.0]) == "▁▁"
