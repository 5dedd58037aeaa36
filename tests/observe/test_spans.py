"""Spans of a step: seen by the profiler, and summed up by the wall clock."""

from contextlib import suppress

import torch

from wherry.observe.spans import SILENT, Spans, span


def _recorded(body):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        body()
    return {event.key for event in profile.key_averages()}


def test_spans_are_seen_by_the_profiler():
    def body():
        with Spans()("wherry::gather (blocks.3)"), span("forward"), span("reduce", "blocks.1"):
            torch.ones(1) + 1

    assert {"wherry::gather (blocks.3)", "wherry::forward", "wherry::reduce (blocks.1)"} <= _recorded(body)


def test_nothing_is_made_without_a_reader():
    spans = Spans()
    assert spans("a") is spans("b") is SILENT
    with spans("a"):
        pass
    assert spans.seconds == {}


def test_the_wall_clock_adds_up_and_waits_for_the_device_also_after_an_exception():
    waits = []
    spans = Spans(wall_clock=True, synchronize=lambda: waits.append(1))
    for _ in range(3):
        with suppress(KeyError), spans("forward"), spans("gather"):
            raise KeyError
    assert {name: len(seconds) for name, seconds in spans.seconds.items()} == {"forward": 3, "gather": 3}
    assert sum(spans.seconds["forward"]) >= sum(spans.seconds["gather"]) > 0
    assert len(waits) == 12
    told = spans.breakdown()
    assert told.startswith("forward ") and "gather" in told and "(3x)" in told and spans.seconds == {}
