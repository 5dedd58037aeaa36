"""Arguments of `wherry.initialize` in every form, and its errors for those that do not fit."""

from __future__ import annotations

import argparse
import copy
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engine.harness import assert_near
from tests.models import rotate
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, StepLR
from torch.utils.data import DataLoader, IterableDataset

import wherry
from wherry import config as configs
from wherry.errors import WherryError
from wherry.parallel.comm import Comm, SoloComm
from wherry.testing import run_ranks

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 3,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "SGD", "params": {"lr": 0.25, "momentum": 0.5}},
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def on_disk(folder: str) -> dict[str, Any]:
    return CONFIG | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": folder}}}


# The config.

FORMS: dict[str, Callable[[Path], Any]] = {
    "a dict": lambda path: CONFIG,
    "a path": lambda path: path,
    "a path in a string": str,
    "JSON text": lambda path: path.read_text(),
    "a loaded config": lambda path: configs.load(CONFIG),
}
WAYS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "config": lambda value: {"config": value},
    "config_params": lambda value: {"config_params": value},
    "args.wherry_config": lambda value: {"args": argparse.Namespace(wherry_config=value, local_rank=0)},
    "args.deepspeed_config": lambda value: {"args": argparse.Namespace(deepspeed_config=value, wherry_config=None)},
}


@pytest.mark.parametrize(("form", "way"), list(zip(FORMS, [*WAYS, "args.wherry_config"], strict=True)))
def test_the_config_in_every_form_and_every_way(form: str, way: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    with wherry.initialize(model=net(), **WAYS[way](FORMS[form](path)))[0] as engine:
        assert engine.config == configs.load(CONFIG).to_dict()
        assert (engine.zero_optimization_stage(), engine.train_micro_batch_size_per_gpu()) == (2, 3)
        assert (engine.get_lr(), engine.get_mom()) == ([0.25], [0.5])


@pytest.mark.parametrize(
    "twice",
    [
        ("config", "config_params"),
        ("config", "args.wherry_config"),
        ("config_params", "args.deepspeed_config"),
        ("args.wherry_config", "args.deepspeed_config"),
    ],
)
def test_a_config_given_twice_is_refused_even_if_both_agree(twice: tuple[str, str]) -> None:
    given: dict[str, Any] = {"args": argparse.Namespace()}
    for way in twice:
        if way.startswith("args."):
            setattr(given["args"], way.removeprefix("args."), CONFIG)
        else:
            given[way] = CONFIG
    with pytest.raises(WherryError, match=f"given 2 times, as {twice[0]} and as {twice[1]}; give it once"):
        wherry.initialize(model=net(), **given)


def test_nothing_but_a_model() -> None:
    engine, *others = wherry.initialize(model=net(), args=argparse.Namespace(deepspeed_config="", lr=1.0))
    assert others == [None, None, None]
    assert engine.zero_optimization_stage() == 0
    engine.close()
    with pytest.raises(WherryError, match=r"model: expected a torch.nn.Module, got NoneType"):
        wherry.initialize(model=None)  # type: ignore[arg-type]


# Parameters and optimizers.


def first_weight(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = (p for p in model.parameters() if p.dim() > 1)
    return [{"params": matrices, "lr": 0.5}, {"params": [p for p in model.parameters() if p.dim() == 1]}]


# `model_parameters`, and the same for torch's own optimizer.
PARAMETERS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any]]] = {
    "nothing": (lambda model: None, lambda model: model.parameters()),
    "an empty list": (lambda model: [], lambda model: model.parameters()),
    "a generator": (lambda model: model.parameters(), lambda model: model.parameters()),
    "named": (lambda model: model.named_parameters(), lambda model: model.parameters()),
    "a list": (lambda model: list(model.parameters()), lambda model: model.parameters()),
    "a part": (lambda model: [first_weight(model)], lambda model: [first_weight(model)]),
    "groups": (two_groups, two_groups),
    "a part in a group": (
        lambda model: [{"params": first_weight(model), "lr": 0.5, "momentum": 0.0}],
        lambda model: [{"params": first_weight(model), "lr": 0.5, "momentum": 0.0}],
    ),
}
MAKERS: dict[str, Callable[[Any], Any]] = {
    "by the config": lambda parameters: None,
    "a callable": lambda parameters: partial(torch.optim.SGD, lr=0.25, momentum=0.5),
    "an instance": lambda parameters: torch.optim.SGD(parameters, lr=0.25, momentum=0.5),
}


def two_steps(step: Callable[[torch.Tensor], None]) -> None:
    for number in (1.0, 2.0):
        step(torch.arange(12.0).view(3, 4) / 10 + number)


@pytest.mark.parametrize(("form", "maker"), rotate(PARAMETERS, list(MAKERS)))
def test_parameters_and_optimizers_in_every_form(form: str, maker: str) -> None:
    model = net()
    give, oracle = PARAMETERS[form]
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(oracle(plain), lr=0.25, momentum=0.5)

    def plainly(x: torch.Tensor) -> None:
        plain.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()

    two_steps(plainly)

    def body(comm: Comm) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        # An instance has its parameters already.
        made = MAKERS[maker](give(mine) or mine.parameters())
        zero = {"stage": 3 if form == "groups" else 2, "stage3_param_persistence_threshold": 0}
        engine, *_ = wherry.initialize(
            model=mine,
            optimizer=made,
            model_parameters=give(mine),
            config={"zero_optimization": zero} | ({"optimizer": CONFIG["optimizer"]} if made is None else {}),
            mesh=comm,
        )

        def engines(x: torch.Tensor) -> None:
            engine.backward(engine(x).square().mean())
            engine.step()

        two_steps(engines)
        weights = engine.module.state_dict()
        engine.close()
        return weights

    for weights in run_ranks(2, body):
        assert_near(weights, plain.state_dict(), 1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": "AdamW"}, r"optimizer: expected a torch.optim.Optimizer or a callable .* got 'AdamW'"),
        ({"optimizer": lambda parameters: None}, r"expected a torch.optim.Optimizer or a callable .* got None"),
        ({"model_parameters": torch.zeros(2)}, "model_parameters: expected parameters, .* got one Tensor"),
        ({"model_parameters": {"params": []}}, "model_parameters: expected parameters, .* got one dict"),
        ({"model_parameters": ["0.weight"]}, r"optimizer\.params: SGD does not take these: .*str"),
        ({"model_parameters": list(net().parameters())}, "4 of its parameters are not the model's"),
        ({"mesh": "dp"}, "mesh: expected axes named dp, cp, tp .*no axis names"),
        ({"mesh": SimpleNamespace(mesh_dim_names=("dp", "rows"))}, "mesh: expected axes named dp, cp, tp .*rows"),
        ({"training_data": iter([1, 2])}, "training_data: expected samples with a length and an index.*list_iterator"),
        ({"training_data": DataLoader([1, 2])}, "training_data: .*got DataLoader"),
        ({"lr_scheduler": lambda optimizer: None, "config": {}}, "lr_scheduler: this engine has no optimizer"),
        ({"lr_scheduler": ConstantLR(torch.optim.SGD(net().parameters())), "config": {}}, "engine has no optimizer"),
        ({"config": on_disk("/nowhere/a")}, r"offload_optimizer\.nvme_path: disk path '/nowhere/a' .* cannot be made"),
        ({"config": on_disk("."), "model": net().double()}, r"0: it has torch.float64 weights, .* at most 32 bits"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_fit_are_refused(
    given: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # one nvme_path is relative
    model = given.get("model") or net()
    with pytest.raises(WherryError, match=message):
        wherry.initialize(**{"model": model, "config": CONFIG, **given})
    # The error leaves the model unchanged.
    wherry.initialize(model=model, config=CONFIG)[0].close()


def test_a_frozen_model_with_an_optimizer_is_refused() -> None:
    model = net().requires_grad_(False)
    for given in ({"config": CONFIG}, {"config": {}, "optimizer": torch.optim.SGD}):
        with pytest.raises(WherryError, match="no parameter of the model requires a gradient, so there is nothing to"):
            wherry.initialize(model=model, **given)
    wherry.initialize(model=model, config={})[0].close()


def test_a_model_wrapped_by_fsdp_or_data_parallel_is_refused() -> None:
    from torch.distributed.fsdp import FSDPModule

    class Sharded(FSDPModule, nn.Linear):
        """A layer as `fully_shard` makes it."""

    sharded = nn.Linear(4, 4)
    sharded.__class__ = Sharded
    for model, message in (
        (nn.DataParallel(net()), "model: it is wrapped already, by torch's DataParallel; give initialize the model as"),
        (nn.Sequential(sharded), "model: its part 0 is wrapped already, by torch's fully_shard"),
    ):
        with pytest.raises(WherryError, match=message):
            wherry.initialize(model=model, config=CONFIG)


def test_lazy_layers_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))
    with pytest.raises(WherryError, match=r"1\.weight: it has no shape before a lazy layer's first batch; run one"):
        wherry.initialize(model=model, config=CONFIG)
    with torch.no_grad():
        model(torch.zeros(1, 4))
    wherry.initialize(model=model, config=CONFIG)[0].close()


def test_max_norm_of_an_embedding_is_logged_where_ranks_would_differ(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Embedding(4, 4, max_norm=1.0))
    run_ranks(2, lambda comm: wherry.initialize(model=copy.deepcopy(model), config=CONFIG, mesh=comm)[0].close())
    assert "0: max_norm rescales the rows" in caplog.text
    caplog.clear()
    wherry.initialize(model=model, config=CONFIG)[0].close()
    assert "max_norm" not in caplog.text


@pytest.mark.parametrize("form", ["named", "groups", "a part", "nothing"])
def test_parameters_outside_of_a_given_optimizer_are_logged(form: str, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = torch.optim.SGD([first_weight(model)], lr=0.25)
    with caplog.at_level(logging.INFO, logger="wherry"):
        engine, *_ = wherry.initialize(
            model=model, optimizer=optimizer, model_parameters=PARAMETERS[form][0](model), config={}
        )
    engine.close()
    logged = [record.getMessage() for record in caplog.records if "model_parameters" in record.getMessage()]
    left_out = 0 if form in ("a part", "nothing") else 3
    assert len(logged) == bool(left_out) and all(f": {left_out} that require" in line for line in logged), logged


def test_an_iterable_dataset_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(4))

    with pytest.raises(WherryError, match=r"training_data: .*got Stream"):
        wherry.initialize(model=net(), config=CONFIG, training_data=Stream())


# Learning rates.


def built_on_the_users(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, gamma=0.5)}


SCHEDULERS: dict[str, tuple[Callable[[nn.Module], dict[str, Any]], type, list[float]]] = {
    "an instance": (built_on_the_users, StepLR, [0.25, 0.125, 0.0625]),
    "a callable": (lambda _: {"lr_scheduler": partial(StepLR, step_size=1, gamma=0.5)}, StepLR, [0.25, 0.125, 0.0625]),
    "a class": (lambda _: {"lr_scheduler": ConstantLR}, ConstantLR, [0.25 / 3] * 3),
}


@pytest.mark.parametrize("form", SCHEDULERS)
def test_a_scheduler_in_every_form_overrides_the_configs(form: str, caplog: pytest.LogCaptureFixture) -> None:
    give, kind, expected = SCHEDULERS[form]
    model = net()
    given = give(model)
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 9.0}}
    with caplog.at_level(logging.INFO, logger="wherry"):
        engine, optimizer, _, schedule = wherry.initialize(model=model, config={**CONFIG, "scheduler": warmup}, **given)
    logged = [record.getMessage() for record in caplog.records]
    assert "scheduler: the config's WarmupLR is not used, as initialize was given one" in logged
    assert ("optimizer: the config's SGD is not used, as initialize was given one" in logged) == ("optimizer" in given)
    assert isinstance(schedule, kind) and schedule is engine.lr_scheduler
    rates = []
    for _ in range(3):
        rates += engine.get_lr()
        engine.backward(engine(torch.ones(3, 4)).mean())
        engine.step()
    assert rates == pytest.approx(expected)
    assert isinstance(optimizer, torch.optim.Optimizer)
    engine.close()


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    model = net()
    strange = StepLR(torch.optim.SGD(model.parameters(), lr=0.25), 1)
    with pytest.raises(WherryError, match=r"lr_scheduler: StepLR was built on another optimizer \(SGD\)"):
        wherry.initialize(model=model, config=CONFIG, lr_scheduler=strange)


def test_a_batch_that_fits_no_ranks_names_the_source_of_their_count(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3}
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(WherryError, match="on 1 data-parallel rank, as no launcher has set WORLD_SIZE"):
        wherry.initialize(model=net(), config=config)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(WherryError, match="on 1 data-parallel rank, as WORLD_SIZE=1 of the launcher says"):
        wherry.initialize(model=net(), config=config)
    with pytest.raises(WherryError, match="on 1 data-parallel rank, as the mesh given to initialize has them"):
        wherry.initialize(model=net(), config=config, mesh=SoloComm())


def test_a_schedule_of_the_config_without_an_optimizer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="wherry"):
        engine, optimizer, _, schedule = wherry.initialize(
            model=net(), config={"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 9.0}}}
        )
    assert optimizer is schedule is engine.lr_scheduler is None
    assert any("WarmupLR is not used, as there is no optimizer" in r.getMessage() for r in caplog.records)
    engine.close()


# Data, and ranks.


def collated(samples: list[int]) -> dict[str, torch.Tensor]:
    return {"input": torch.tensor([[float(sample)] * 4 for sample in samples])}


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [3, 3, 1]), (True, [3, 3])])
def test_training_data_pass_through_the_collate_fn(drop_last: bool, sizes: list[int]) -> None:
    model = net()

    def body(comm: Comm) -> tuple[list[int], list[float]]:
        engine, _, loader, _ = wherry.initialize(
            model=copy.deepcopy(model),
            config={**CONFIG, "dataloader_drop_last": drop_last},
            training_data=range(14),
            collate_fn=collated,
            mesh=comm,
        )
        batches = list(loader)
        engine(**batches[0])
        engine.close()
        return [len(batch["input"]) for batch in batches], [float(x) for b in batches for x in b["input"][:, 0]]

    first, second = run_ranks(2, body)
    assert first[0] == second[0] == sizes
    shared = sorted(first[1] + second[1])
    assert shared == [float(i) for i in range(14)] if not drop_last else len(set(shared)) == 12


def test_a_comm_is_a_mesh() -> None:
    comm = SoloComm()
    with wherry.initialize(model=net(), config=CONFIG, mesh=comm)[0] as engine:
        assert engine.comm is comm and engine.world_size == 1
