"""Show a table before a run, a line or a panel for each step, and a summary however the run ended."""

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


def _display(*, terminal=False, **settings):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    return Display(console, 40, lambda: MEMORY, **settings), console.file


def _begin(display):
    offloaded = Placement.of_stage(3, optimizer=Tier.HOST)
    display.begin("GPT-2 of 1M parameters", [("batch", "16 samples")], offloaded, activations=2048)


def test_placement_and_expected_memory_come_first_and_then_a_line_for_a_step():
    display, out = _display()
    _begin(display)
    text = out.getvalue()
    assert "Placement: ZeRO-3 Offload" in text and "16 samples" in text and "about 2.0 KiB" in text
    cells = [line.replace("│", "").split() for line in text.splitlines() if "optimizer" in line]
    assert cells == [["optimizer", "partitioned", "host", "4.0", "KiB"]]
    for step in (9, 10):
        display.step(_record(step, validation_loss=3.5, skipped_steps=2))
    first, memory, second = out.getvalue().splitlines()[-3:]
    assert memory == "memory of rank 0: device: parameters 1.0 KiB; host: optimizer 2.0 KiB"
    assert first.startswith("step 9/40") and second == (
        "step 10/40  loss 3.2500  validation 3.5000  lr 1.00e-03  norm 0.75  2 skipped  12,345 tokens/s  0:01:00 left"
    )
    assert "\x1b" not in out.getvalue()


def test_lines_may_be_thinned_but_not_the_ends():
    for steps, expected in ((range(1, 41), [1, 10, 20, 30, 40]), ((23, 24), [23])):
        display, out = _display(line_every=10)
        for step in steps:
            display.step(_record(step))
        shown = [line.split("/")[0] for line in out.getvalue().splitlines() if line.startswith("step")]
        assert shown == [f"step {step}" for step in expected]


def test_a_terminal_gets_a_panel_that_is_given_back():
    asked = []
    display, out = _display(terminal=True, ending=lambda: asked)
    _begin(display)
    display.step(_record(10))
    assert "Ctrl-C again" not in out.getvalue()
    asked.append("Ctrl-C")
    display.step(_record(11, loss=math.nan))
    display.non_finite(11, math.nan, ended=True)
    display.end(Outcome(ending=Ending.FINISHED, steps=40, seconds=80.0, tokens=640), Path("runs/x"))
    text = out.getvalue()
    for part in ("step 11 of 40", "loss nan", "12,345 tokens/s", "norm 0.75", "0:00:58 left", "of 4.0 KiB", "process"):
        assert part in text
    assert "ends after this step; Ctrl-C again ends at once" in text
    assert "\x1b[1;37;41mTHE LOSS IS NAN at step 11." in text and "Lower --lr" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0  # the cursor, hidden and shown


@pytest.mark.parametrize(
    ("ending", "word"),
    [
        (Ending.FINISHED, "Finished."),
        (Ending.INTERRUPTED, "Interrupted."),
        (Ending.DIVERGED, "The loss is lost"),
        (Ending.FAILED, "Stopped by an error."),
    ],
)
def test_the_summary_tells_how_it_ended_and_what_can_be_done_next(ending, word):
    display, out = _display()
    resumed = {"steps": 20, "tokens": 3840, "tokens_here": 1280, "seconds": 10.0}
    outcome = Outcome(ending, **resumed, first_loss=5.5, last_losses=deque([9.0, 2.0, 4.0]))
    command = "wherry generate runs/" + 100 * "x"
    display.end(outcome, Path("runs/x"), [("see what it has learned", command)])
    text = out.getvalue()
    loss = "5.5000 at first, 3.0000 at last (mean of the last 2 logged)"
    for part in (word, "20 of 40 in 0:00:10", loss, "3,840 at 128 tokens/s", "runs/x"):
        assert part in text
    assert "validation" not in text
    assert text.endswith(f"Next\n  see what it has learned\n    {command}\n")


def test_a_summary_before_the_first_step_has_no_numbers_to_show():
    display, out = _display()
    display.end(Outcome(), Path("runs/x"))
    assert "0 of 40" in out.getvalue() and "Next" not in out.getvalue()


def test_the_course_of_the_loss_in_a_line_of_blocks():
    assert sparkline([1, 2, 3, math.nan, 8]) == "▁▂▃█"
    assert sparkline([math.nan]) == "" and sparkline([2.0, 2.0]) == "▁▁"
