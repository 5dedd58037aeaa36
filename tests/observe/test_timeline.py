"""Memory over a step, by state and tier, equals the engine's own figures and the bytes of torch's tensors."""

from __future__ import annotations

import gzip
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import Run, assert_equal, engine_of, make_model, settings, token_batch, train_engine
from tests.engine.harness import train as train_steps
from tests.tiers.rows import offload

from wherry.observe.footprint import Footprint
from wherry.observe.memory_page import memory_page


def train(config: dict[str, Any], stage: int, folder: Path | None) -> tuple[Run, Any, int]:
    """Train two ranks; the run, the engine's memory after the last step, and the number of its hooks."""
    own = dict(config.get("wherry", {}))
    if folder is not None:
        own["profile"] = {"memory_step": 3, "folder": str(folder)}

    def seen(engine: Any, step: int) -> tuple[Any, int]:
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.module.modules())
        return engine.memory(), hooks

    common: dict[str, Any] = {"stage": stage, "ranks": 2, "accumulation": 2, "steps": 3, "each_step": seen}
    run = train_engine(make_model(), config=config | {"wherry": own}, **common)
    assert torch._C._len_torch_dispatch_stack() == 0
    return run, *run.extra[-1]


def column(told: dict[str, Any], state: str, tier: str = "device") -> list[int]:
    place = told["series"].index([state, tier])
    return [sizes[place] for *_, sizes in told["samples"]]


@pytest.mark.parametrize("row", ["2", "3", "infinity"])
def test_states_are_those_of_the_engine_and_training_keeps_its_bits(row: str, tmp_path: Path) -> None:
    stage = int(row) if row.isdigit() else 3
    config = {} if row.isdigit() else offload(row, tmp_path / "disk", "at_step")
    calm, _, hooks = train(config, stage, None)
    recorded, rows, left = train(config, stage, tmp_path)
    assert_equal(recorded, calm)
    assert left == hooks
    told = json.loads((tmp_path / "memory-rank0.json").read_text())
    phases = [phase for phase, _, _ in told["phases"]]
    assert phases == ["forward", "backward"] * 2 + ["step"]

    held: Counter[tuple[str, str]] = Counter()
    for state, tier, _, actual in rows:
        held[state.removesuffix(" read"), "disk" if tier == "disk" else "device"] += actual
    last = dict(zip(map(tuple, told["series"]), told["samples"][-1][3], strict=True))
    for place in [("parameters", "device"), ("optimizer", "device"), ("parameters", "disk"), ("optimizer", "disk")]:
        assert last.get(place, 0) == held[place], place
    # Beside the sums there are buffers that gradients are reduced in.
    assert last["gradients", "device"] >= held["gradients", "device"] > 0

    # Units are there while they are at work; at the end only the loss is left.
    gathered = [expected for state, _, expected, _ in rows if state == "gathered"]
    if stage == 3:
        assert 0 < max(column(told, "gathered")) <= gathered[0] and last["gathered", "device"] == 0
    else:
        assert ["gathered", "device"] not in told["series"]
    assert last["activations", "device"] == 4
    for phase in ("forward", "backward"):
        named = {unit for _, now, unit, _ in told["samples"] if now == phase}
        assert {"blocks.0", "blocks.1", "blocks.2", "root"} <= named
    top = max(sum(sizes for (_, tier), sizes in zip(told["series"], found, strict=True) if tier == "device")
              for *_, found in told["samples"])  # fmt: skip
    assert sum(told["peaks"]["device"]["bytes"]) == top


def test_activations_equal_those_that_plain_pytorch_keeps(tmp_path: Path) -> None:
    model, batch = make_model(), token_batch(0, 0, 0)
    with Footprint() as plain:
        plain.label("there before", [*model.parameters(), *batch])
        loss = model(*batch)
        kept = plain.live["activations"]
    del loss
    config = settings(0, more={"wherry": {"profile": {"memory_step": 1, "folder": str(tmp_path)}}})
    engine = engine_of(model, config)
    with torch.no_grad():
        engine(*batch)  # a validation does not count
    engine.backward(engine(*batch))
    engine.zero_grad()  # nor does a window that is dropped
    engine.backward(engine(*batch))
    engine.step()
    engine.close()
    told = json.loads((tmp_path / "memory-rank0.json").read_text())
    assert [phase for phase, _, _ in told["phases"]] == ["forward", "backward", "step"]
    after = [sizes for _, phase, _, sizes in told["samples"] if phase == "forward"][-1]
    assert after[told["series"].index(["activations", "device"])] == kept
    page = memory_page(told)
    assert "<title>backward blocks.1: " in page and "http" not in page.replace("http://www.w3.org", "")


def test_a_trace_of_the_steps_and_memory_after_them(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("WHERRY_PROFILE", "2-3")
    monkeypatch.chdir(tmp_path)
    engine = engine_of(make_model(), settings(3))
    with caplog.at_level(logging.INFO, logger="wherry"):
        train_steps(engine, 5)
    engine.close()
    with gzip.open("profile/trace-rank0.json.gz") as file:
        spans = Counter(
            event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "user_annotation"
        )
    assert [spans[f"wherry::{phase}"] for phase in ("forward", "backward", "step", "update")] == [2, 2, 2, 2]
    assert json.loads(Path("profile/memory-rank0.json").read_text())["step"] == 4
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("profile: ")]
    assert len(told) == 1 and "memory.html" in told[0] and "ui.perfetto.dev" in told[0]


def test_reasons_for_missing_records_are_logged(tmp_path: Path, caplog: Any) -> None:
    profile = {"steps": 1, "memory_step": 2, "folder": str(tmp_path)}
    engine = engine_of(make_model(), settings(0, more={"wherry": {"profile": profile}}))
    engine.compile(backend="eager")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        train_steps(engine, 2)
    engine.close()
    later = engine_of(make_model(), settings(0, more={"wherry": {"profile": {"steps": 7, "folder": str(tmp_path)}}}))
    later.close()
    told = [record.getMessage() for record in caplog.records]
    for words in ("another profiler records already", "the model is compiled", "did not come to it: the trace, memory"):
        assert sum(words in line for line in told) == 1, words
    assert not list(tmp_path.iterdir())
