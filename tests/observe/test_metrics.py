import csv
import json
import math
import sys
import types
from unittest.mock import ANY

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
    """A service's package that writes down what is called of it."""

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


@pytest.mark.parametrize(
    ("module", "block", "begins", "sent", "ends"),
    [
        (
            *("torch.utils.tensorboard", {"tensorboard": {"output_path": "logs", "job_name": "mine"}}),
            *({"SummaryWriter": (("logs/mine",), {})}, {"add_scalar": (("loss", 1.5, 2), {})}, "close"),
        ),
        (
            *("wandb", {"wandb": {"project": "p", "team": "t", "group": "g"}}),
            {"init": ((), {"project": "p", "entity": "t", "group": "g", "dir": "runs", "config": ANY})},
            *({"log": (({"loss": 1.5},), {"step": 2})}, "finish"),
        ),
        (
            *("mlflow", {"mlflow": {"tracking_uri": "file:runs", "experiment_name": "e", "run_name": "r"}}),
            {"set_experiment": (("e",), {}), "start_run": ((), {"run_name": "r"}), "log_dict": ((ANY, ANY), {})},
            *({"log_metrics": (({"loss": 1.5},), {"step": 2})}, "end_run"),
        ),
    ],
)
def test_a_service_gets_the_config_and_numbers(module, block, begins, sent, ends, monkeypatch):
    service = _Service(active_run=None)
    monkeypatch.setitem(sys.modules, module, service)
    ((key, values),) = block.items()
    monitor = Monitor(load({key: {"enabled": True, **values}, "wherry": {"run_dir": "runs"}}).to_dict())
    monitor.log(2, {"loss": 1.5})
    monitor.close()
    calls = {name: (args, options) for name, args, options in service.calls}
    assert {name: calls[name] for name in begins | sent} == begins | sent
    assert service.calls[-1] == (ends, (), {})


def test_a_run_of_mlflow_that_the_script_began_goes_on(monkeypatch):
    service = _Service(active_run="the script's")
    monkeypatch.setitem(sys.modules, "mlflow", service)
    monitor = Monitor(load({"mlflow": {"enabled": True}}).to_dict())
    monitor.log(2, {"loss": 1.5})
    monitor.close()
    assert [name for name, *_ in service.calls] == ["active_run", "log_dict", "log_metrics"]


def test_comet_gets_a_step_in_so_many_samples_and_no_key_with_the_config(monkeypatch):
    service = _Service()
    monkeypatch.setitem(sys.modules, "comet_ml", service)
    block = {"enabled": True, "project": "p", "api_key": "secret", "experiment_name": "e", "samples_log_interval": 10}
    monitor = Monitor(load({"comet": block}).to_dict())
    for step, values in enumerate(({"samples": 4}, {"samples": 8}, {"samples": 16}, {"loss": 2.5}), 1):
        monitor.log(step, values)
    monitor.close()
    calls = {name: (args, more) for name, args, more in service.calls}
    assert calls["start"][1]["api_key"] == "secret" and calls["set_name"][0] == ("e",)
    assert "secret" not in str(calls["log_parameters"]) and "end" in calls
    sent = [(args[0], more["step"]) for name, args, more in service.calls if name == "log_metrics"]
    assert sent == [({"samples": 4}, 1), ({"samples": 16}, 3), ({"loss": 2.5}, 4)]


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
