import csv
import json
import math
import sys
import types

import pytest

from wherry.errors import WherryError
from wherry.observe.metrics import CSV, JSONLines, TensorBoard, WandB, sinks_of


def test_json_lines_and_csv_hold_every_step(tmp_path):
    sinks = sinks_of({}, ["loss", "lr"])
    sinks.open(tmp_path / "run", {})
    sinks.log(1, {"loss": 2.5, "lr": 0.1})
    sinks.log(2, {"loss": math.nan})
    sinks.close()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 2.5, "lr": 0.1}, {"step": 2, "loss": None}]
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"step": "1", "loss": "2.5", "lr": "0.1"},
            {"step": "2", "loss": "nan", "lr": ""},
        ]


def test_what_is_logged_can_be_read_at_once(tmp_path):
    for sink, name in ((JSONLines(), "metrics.jsonl"), (CSV(["loss"]), "metrics.csv")):
        sink.open(tmp_path, {})
        sink.log(1, {"loss": 1.25})
        assert "1.25" in (tmp_path / name).read_text()
        sink.close()


def test_a_service_that_is_not_installed_is_told_with_its_key(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    sinks = sinks_of({"wandb": {"enabled": True}}, ["loss"])
    with pytest.raises(WherryError, match=r"wandb\.enabled: .* `pip install wandb`, or set wandb\.enabled to false"):
        sinks.open(tmp_path, {})
    sinks.close()


def test_services_are_those_that_the_config_enables(tmp_path):
    config = {
        "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "mine"},
        "wandb": {"enabled": False},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path / "elsewhere"), "job_name": "mine"},
    }
    sinks = sinks_of(config, ["loss"]).sinks
    assert [type(sink).__name__ for sink in sinks] == ["JSONLines", "CSV", "TensorBoard", "CSV"]
    assert (sinks[2].output_path, sinks[2].job_name) == ("logs", "mine")
    sinks[3].open(tmp_path, {})
    sinks[3].log(1, {"loss": 1.0})
    sinks[3].close()
    assert (tmp_path / "elsewhere" / "mine" / "metrics.csv").read_text().splitlines() == ["step,loss", "1,1.0"]


class _Service(types.ModuleType):
    """What TensorBoard and wandb offer, with their calls written down."""

    def __init__(self):
        super().__init__("service")
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call


def test_tensorboard_gets_scalars(tmp_path, monkeypatch):
    service = _Service()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", service)
    sink = TensorBoard()
    sink.open(tmp_path, {})
    sink.log(3, {"loss": 1.5, "note": "text"})
    sink.close()
    assert service.calls == [
        ("SummaryWriter", (str(tmp_path / "tensorboard"),), {}),
        ("add_scalar", ("loss", 1.5, 3), {}),
        ("close", (), {}),
    ]


def test_wandb_gets_the_config_and_the_steps(tmp_path, monkeypatch):
    service = _Service()
    monkeypatch.setitem(sys.modules, "wandb", service)
    sink = WandB(project="p", team="t", group="g")
    sink.open(tmp_path, {"seed": 1})
    sink.log(2, {"loss": 1.5})
    sink.close()
    expected = {"project": "p", "entity": "t", "group": "g", "dir": str(tmp_path), "config": {"seed": 1}}
    assert service.calls == [("init", (), expected), ("log", ({"loss": 1.5},), {"step": 2}), ("finish", (), {})]
