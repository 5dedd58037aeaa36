"""Metrics of an engine: sinks of the config and of code, counts of operations, sums of time and communication."""

from __future__ import annotations

import csv
import json
import logging

import torch
from tests.engine.harness import engine_of, make_model, settings, train

from wherry.observe.metrics import JSONLines
from wherry.testing import run_ranks


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_sinks_of_the_config_and_of_code_get_every_update_from_rank_zero_only(tmp_path):
    config = {
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"},
        "wherry": {"run_dir": str(tmp_path / "run")},
    }

    def body(comm):
        engine = engine_of(make_model(), settings(2, more=config), comm)
        assert engine.monitor.enabled == (comm.rank == 0)
        if comm.rank == 0:
            engine.monitor.add(JSONLines("mine.jsonl"))
        losses = train(engine, 3)
        engine.monitor.log(3, {"validation_loss": 1.5})
        engine.close()
        return losses

    losses = run_ranks(2, body)[0]
    rows = rows_of(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 3]
    assert [row["loss"] for row in rows[:3]] == losses
    assert rows[2]["samples"] == 12 and rows[2]["lr"] == 3e-3 and rows[2]["gradient_norm"] > 0
    assert rows[3] == {"step": 3, "validation_loss": 1.5}
    assert rows_of(tmp_path / "run" / "mine.jsonl") == rows
    with open(tmp_path / "csv" / "job" / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in table] == losses


def test_the_loss_of_fp16_is_reported_without_its_scale(tmp_path):
    config = settings(2, more={"fp16": {"enabled": True}, "wherry": {"run_dir": str(tmp_path)}})
    engine = engine_of(make_model(), config)
    losses = train(engine, 3)
    engine.close()
    assert [row["loss"] for row in rows_of(tmp_path / "metrics.jsonl")] == losses


def test_operations_are_counted_in_the_step_that_is_named(tmp_path):
    width, rows = 64, 8
    model = torch.nn.Sequential(torch.nn.Linear(width, width, bias=False), torch.nn.Linear(width, width, bias=False))
    block = {"enabled": True, "profile_step": 2, "output_file": str(tmp_path / "operations")}
    config = settings(2, more={"flops_profiler": block, "gradient_accumulation_steps": 2})
    engine = engine_of(model, config)
    for micro_batch in range(6):
        assert engine.flops is None or micro_batch >= 4
        engine.backward(engine(torch.ones(rows, width)).sum())
        engine.step()
    forward = 2 * 2 * rows * width * width
    # Of both micro-batches; the first layer's input needs no gradient.
    assert engine.flops == 2 * (forward + 3 * 2 * rows * width * width)
    text = (tmp_path / "operations").read_text()
    assert "operations of step 2" in text and "forward" in text and "backward" in text
    engine.close()


def test_time_and_communication_are_summed_up(caplog):
    def body(comm):
        more = {"wall_clock_breakdown": True, "comms_logger": {"enabled": True}, "steps_per_print": 2}
        engine = engine_of(make_model(), settings(3, more=more), comm)
        train(engine, 4)
        engine.close()

    with caplog.at_level(logging.INFO, logger="wherry"):
        run_ranks(2, body)
    lines = [record.getMessage() for record in caplog.records]
    sent = [line for line in lines if line.startswith("communication of 2 steps")]
    assert len(sent) == 2 and "all_gather" in sent[0] and "reduce_scatter" in sent[0]
    times = [line for line in lines if line.startswith("time of 2 steps")]
    assert len(times) == 2 and "forward" in times[0] and "backward" in times[0]
