import csv
import json
import math
import sys
import types

import pytest

from wherry.config import load
from wherry.errors import WherryError
from wherry.observe.metrics import Monitor


def test_json_lines_and_csv_hold_every_step(tmp_path):
    monitor = Monitor(load().to_dict(), columns=["loss", "lr"], folder=tmp_path / "run")
    lines, table = (tmp_path / "run" / name for name in ("metrics.jsonl", "metrics.csv"))
    monitor.log(1, {"loss": 2.5, "lr": 0.1})
    assert all("2.5" in path.read_text() for path in (lines, table))  # at once
    monitor.log(2, {"loss": math.nan})
    monitor.close()
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert rows == [{"step": 1, "loss": 2.5, "lr": 0.1}, {"step": 2, "loss": None}]
    with open(table, newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"step": "1", "loss": "2.5", "lr": "0.1"},
            {"step": "2", "loss": "nan", "lr": ""},
        ]


def test_a_service_that_is_not_installed_is_told_with_its_key(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monitor = Monitor(load({"wandb": {"enabled": True}}).to_dict())
    with pytest.raises(WherryError, match=r"wandb\.enabled: .* `pip install wandb`, or set wandb\.enabled to false"):
        monitor.open()
    monitor.close()


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
    block = {"enabled": True, "job_name": "mine"}
    for output_path, folder in (("", tmp_path / "tensorboard"), ("logs", "logs/mine")):
        service.calls.clear()
        config = load({"tensorboard": {**block, "output_path": output_path}, "wherry": {"run_dir": str(tmp_path)}})
        monitor = Monitor(config.to_dict())
        monitor.log(3, {"loss": 1.5, "note": "text"})
        monitor.close()
        assert service.calls == [
            ("SummaryWriter", (str(folder),), {}),
            ("add_scalar", ("loss", 1.5, 3), {}),
            ("close", (), {}),
        ]


def test_wandb_gets_the_config_and_the_steps(tmp_path, monkeypatch):
    service = _Service()
    monkeypatch.setitem(sys.modules, "wandb", service)
    block = {"enabled": True, "project": "p", "team": "t", "group": "g"}
    config = load({"wandb": block, "wherry": {"run_dir": str(tmp_path)}}).to_dict()
    monitor = Monitor(config)
    monitor.log(2, {"loss": 1.5})
    monitor.close()
    expected = {"project": "p", "entity": "t", "group": "g", "dir": str(tmp_path), "config": config}
    assert service.calls == [("init", (), expected), ("log", ({"loss": 1.5},), {"step": 2}), ("finish", (), {})]
