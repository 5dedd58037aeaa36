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


@pytest.mark.parametrize("block, module", [("wandb", "wandb"), ("comet", "comet_ml"), ("mlflow", "mlflow")])
def test_a_service_that_is_not_installed_is_told_with_its_key(block, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    config = load({block: {"enabled": True}}).to_dict()
    assert not Monitor(config, rank=1).enabled
    told = rf"{block}\.enabled: .* `pip install {module}`, or set {block}\.enabled to false"
    with pytest.raises(WherryError, match=told):
        Monitor(config)


class _Service(types.ModuleType):
    """What a service's package offers, with its calls written down."""

    def __init__(self, **answers):
        super().__init__("service")
        self.calls = []
        self.answers = answers

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self.answers.get(name, self)

        return call


def test_tensorboard_gets_scalars(tmp_path, monkeypatch):
    service = _Service()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", service)
    for job, output_path, folder in (
        ({"job_name": "mine"}, "", tmp_path / "tensorboard"),
        ({"job_name": "mine"}, "logs", "logs/mine"),
        ({}, "logs", "logs/wherry"),
    ):
        service.calls.clear()
        block = {"enabled": True, "output_path": output_path, **job}
        config = load({"tensorboard": block, "wherry": {"run_dir": str(tmp_path)}})
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


def test_comet_gets_a_step_in_so_many_samples_and_no_key_with_the_config(monkeypatch):
    service = _Service()
    monkeypatch.setitem(sys.modules, "comet_ml", service)
    block = {"enabled": True, "project": "p", "api_key": "secret", "experiment_name": "e", "samples_log_interval": 10}
    config = load({"comet": block}).to_dict()
    monitor = Monitor(config)
    for step, values in enumerate(({"samples": 4}, {"samples": 8}, {"samples": 16}, {"loss": 2.5}), 1):
        monitor.log(step, values)
    monitor.close()
    start = {"api_key": "secret", "project": "p", **dict.fromkeys(("workspace", "experiment_key", "mode", "online"))}
    told = {**config, "comet": {**config["comet"], "api_key": None}}
    assert service.calls == [
        ("start", (), start),
        ("set_name", ("e",), {}),
        ("log_parameters", (told,), {}),
        ("log_metrics", ({"samples": 4},), {"step": 1}),
        ("log_metrics", ({"samples": 16},), {"step": 3}),
        ("log_metrics", ({"loss": 2.5},), {"step": 4}),
        ("end", (), {}),
    ]


def test_mlflow_gets_a_run_of_its_own_or_the_scripts(monkeypatch):
    block = {"enabled": True, "tracking_uri": "file:runs", "experiment_name": "e", "run_name": "r"}
    config = load({"mlflow": block}).to_dict()
    begun = [
        ("set_tracking_uri", ("file:runs",), {}),
        ("set_experiment", ("e",), {}),
        ("start_run", (), {"run_name": "r"}),
    ]
    for running, begin, end in ((None, begun, [("end_run", (), {})]), ("a run", [], [])):
        service = _Service(active_run=running)
        monkeypatch.setitem(sys.modules, "mlflow", service)
        monitor = Monitor(config)
        monitor.log(2, {"loss": 1.5, "note": "text"})
        monitor.close()
        sent = [("log_dict", (config, "config.json"), {}), ("log_metrics", ({"loss": 1.5},), {"step": 2})]
        assert service.calls == [("active_run", (), {}), *begin, *sent, *end]


def test_a_service_that_refuses_is_told_and_one_that_is_lost_is_left_out(tmp_path, monkeypatch, caplog):
    class Down(Exception):
        pass

    def refuse(*_, **__):
        raise Down("no key, or no server")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=refuse))
    refused = Monitor(load({"wandb": {"enabled": True}}).to_dict())
    with pytest.raises(WherryError, match=r"wandb\.enabled: WandB .*no key, or no server.*set wandb\.enabled to false"):
        refused.log(1, {"loss": 1.0})
    lost = _Service(active_run="a run")
    lost.log_metrics = refuse
    monkeypatch.setitem(sys.modules, "mlflow", lost)
    monitor = Monitor(load({"mlflow": {"enabled": True}}).to_dict(), folder=tmp_path)
    for step in (1, 2):
        monitor.log(step, {"loss": 1.0})
    monitor.close()
    assert caplog.text.count("metrics of MLflow are lost from step 1 on: no key, or no server") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
