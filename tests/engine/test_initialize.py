"""Arguments of `wherry.initialize` in every form, and its errors for those that do not fit."""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engine.harness import assert_near, engine_of, make_model, settings, train, train_plain, weights_of
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


class Loss(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def on_disk(folder: str) -> dict[str, Any]:
    return CONFIG | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": folder}}}


# The config.


def test_the_config_in_every_form_and_every_way(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    forms: list[dict[str, Any]] = [
        {"config": CONFIG},
        {"config": configs.load(CONFIG)},
        {"config_params": path},
        {"args": argparse.Namespace(wherry_config=str(path), local_rank=0)},
        {"args": argparse.Namespace(deepspeed_config=path.read_text(), wherry_config=None)},
    ]
    for given in forms:
        with wherry.initialize(model=net(), **given)[0] as engine:
            assert engine.config == configs.load(CONFIG).to_dict()
            assert (engine.zero_optimization_stage(), engine.train_micro_batch_size_per_gpu()) == (2, 3)
            assert (engine.get_lr(), engine.get_mom()) == ([0.25], [0.5])


def test_nothing_but_a_model() -> None:
    engine, *others = wherry.initialize(model=net(), args=argparse.Namespace(deepspeed_config="", lr=1.0))
    assert others == [None, None, None]
    assert engine.zero_optimization_stage() == 0
    engine.close()


def test_keys_without_effect_are_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Warn, so that scripts without logging print it too; omit keys whose value is the default."""
    zero = {"overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e6}
    config = {"zero_optimization": zero, "memory_breakdown": True, "train_micro_batch_size_per_gpu": 1}
    with caplog.at_level(logging.INFO, logger="wherry"):
        wherry.initialize(model=make_model(), config=config)[0].close()
        wherry.initialize(model=make_model(), config={**config, "zero_optimization": {}, "memory_breakdown": False})
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "without effect here: zero_optimization.sub_group_size, memory_breakdown;" in line


def test_unit_classes_choose_the_units() -> None:
    own = {"wherry": {"unit_classes": ["Linear", "Embedding"]}}
    engine, *_ = wherry.initialize(model=make_model(), config=settings(3, more=own))
    names = [unit.name for unit in engine.units]
    assert "blocks.0.mix" in names and "blocks.0" not in names


# Parameters and optimizers.


def first_weight(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = (p for p in model.parameters() if p.dim() > 1)
    return [{"params": matrices, "lr": 0.5}, {"params": [p for p in model.parameters() if p.dim() == 1]}]


PARAMETERS: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda model: None,
    "an empty list": lambda model: [],
    "a generator": nn.Module.parameters,
    "named": nn.Module.named_parameters,
    "a list": lambda model: list(model.parameters()),
    "a part": lambda model: [first_weight(model)],
    "groups": two_groups,
    "a part in a group": lambda model: [{"params": first_weight(model), "lr": 0.5, "momentum": 0.0}],
}
MAKERS: dict[str, Callable[[Any], Any]] = {
    "by the config": lambda parameters: None,
    "a callable": lambda parameters: partial(torch.optim.SGD, lr=0.25, momentum=0.5),
    "an instance": lambda parameters: torch.optim.SGD(parameters, lr=0.25, momentum=0.5),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int16, torch.bool], ids=str)
def test_every_rank_begins_with_the_buffers_of_the_first(dtype: torch.dtype) -> None:
    def body(comm: Comm) -> torch.Tensor:
        model = nn.Linear(2, 2)
        model.register_buffer("own", torch.full((3,), comm.rank, dtype=dtype))
        with wherry.initialize(model=model, config=settings(1), mesh=comm)[0] as engine:
            return engine.module.own.clone()

    assert torch.equal(run_ranks(2, body)[1], torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize(("form", "maker"), list(zip(PARAMETERS, itertools.cycle(MAKERS))))
def test_parameters_and_optimizers_in_every_form(form: str, maker: str) -> None:
    def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor]:
        return (torch.arange(12.0).view(3, 4) / 10 + step,)

    model = nn.Sequential(net(), Loss())
    give, plain = PARAMETERS[form], copy.deepcopy(model)
    made = torch.optim.SGD(give(plain) or plain.parameters(), lr=0.25, momentum=0.5)
    train_plain(plain, steps=2, optimizer=lambda _: made, batch=batch, in_place=True)

    def body(comm: Comm) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        # An instance has its parameters already.
        made = MAKERS[maker](give(mine) or mine.parameters())
        config = settings(3 if form == "groups" else 2) | ({"optimizer": CONFIG["optimizer"]} if made is None else {})
        engine, *_ = wherry.initialize(
            model=mine, optimizer=made, model_parameters=give(mine), config=config, mesh=comm
        )
        train(engine, 2, batch=batch)
        return weights_of(engine)

    for weights in run_ranks(2, body):
        assert_near(weights, dict(plain.named_parameters()), 1e-6)


def frozen() -> nn.Module:
    return net().requires_grad_(False)


def sharded() -> nn.Module:
    from torch.distributed.fsdp import FSDPModule

    layer = nn.Linear(4, 4)
    layer.__class__ = type("Sharded", (FSDPModule, nn.Linear), {})  # as `fully_shard` makes it
    return nn.Sequential(layer)


def sharing(view: Callable[[torch.Tensor], torch.Tensor], buffer: bool = False) -> nn.Module:
    """Give a layer's weight, or a buffer, memory of another layer's weight."""
    model = net()
    if buffer:
        model[1].register_buffer("view", view(model[0].weight.data))
    else:
        model[1].weight.data = view(model[0].weight.data)
    return model


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


# A batch of two ranks.
OF_TWO = {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": "AdamW"}, r"optimizer: expected a torch.optim.Optimizer or a callable .* got 'AdamW'"),
        ({"optimizer": lambda parameters: None}, r"expected a torch.optim.Optimizer or a callable .* got None"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS cannot be sharded: it needs the whole gradient"),
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
        ({"model": None}, "model: expected a torch.nn.Module, got NoneType"),
        (
            {"model": frozen(), "config": CONFIG},
            "no parameter of the model requires a gradient, so there is nothing to",
        ),
        (
            {"model": frozen(), "config": {}, "optimizer": torch.optim.SGD},
            "no parameter of the model requires a gradient",
        ),
        ({"model": nn.DataParallel(net())}, "wrapped already, by torch's DataParallel; give initialize the model as"),
        ({"model": sharded()}, "model: its part 0 is wrapped already, by torch's fully_shard"),
        (
            {"model": nn.Sequential(nn.LazyLinear(2))},
            "0.weight: it has no shape before a lazy layer's first batch; run",
        ),
        (
            {"model": sharing(lambda weight: weight)},
            r"0\.weight, 1\.weight: .*share memory.* \(0\.weight = 1\.weight\)",
        ),
        ({"model": sharing(lambda weight: weight[1:3])}, r"0\.weight, 1\.weight: two parameters share memory"),
        ({"model": sharing(lambda weight: weight[:, ::2].t())}, r"0\.weight, 1\.weight: two parameters share memory"),
        ({"model": sharing(torch.t, buffer=True)}, r"1\.view: this buffer shares memory with 0\.weight.* clone\(\)"),
        ({"training_data": Stream()}, "training_data: .*got Stream"),
        (
            {"lr_scheduler": StepLR(torch.optim.SGD(net().parameters()), 1)},
            r"StepLR was built on another optimizer \(SGD",
        ),
        ({"config_params": CONFIG}, "given 2 times, as config and as config_params; give it once"),
        ({"args": argparse.Namespace(deepspeed_config=CONFIG)}, "2 times, as config and as args.deepspeed_config"),
        ({"config": OF_TWO}, "on 1 data-parallel rank, as no launcher has set WORLD_SIZE"),
        ({"config": OF_TWO, "mesh": SoloComm()}, "on 1 data-parallel rank, as the mesh given to initialize has them"),
        ({"config": {"wherry": {"unit_classes": ["Line"]}}}, r"unit_classes: .* no module of class Line; .*Linear"),
        ({"config": {"wherry": {"state_dtype": "bf16"}, "optimizer": {"type": "RMSprop"}}}, "needs Adam.*RMSprop"),
        (
            {"config": on_disk(".") | {"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}},
            "on disk needs Adam, .* got AdamW with amsgrad, which its kernels do not have; leave amsgrad out, or keep",
        ),
        (
            {"config": {"wherry": {"state_dtype": "int8"}}, "optimizer": partial(torch.optim.SGD, differentiable=True)},
            "state_dtype: int8 needs Adam, .* got SGD with differentiable, which its kernels do not have; leave",
        ),
        ({"config": on_disk("/nowhere/a")}, r"offload_optimizer\.nvme_path: disk path '/nowhere/a' .* cannot be made"),
        ({"config": on_disk("."), "model": net().double()}, r"0: it has torch.float64 weights, .* at most 32 bits"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_fit_are_refused(
    given: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # one nvme_path is relative
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = net()
    with pytest.raises(WherryError, match=message):
        wherry.initialize(**{"model": model, "config": CONFIG, **given})
    # The error leaves the model unchanged.
    wherry.initialize(model=model, config=CONFIG)[0].close()


def _by_rows(model: nn.Module) -> None:
    model[0].weight.data, model[1].weight.data = torch.arange(24.0).view(6, 4).div(24).split([4, 2])


def _by_columns(model: nn.Module) -> None:
    model[0].weight.data, model[1].weight.data = torch.arange(32.0).view(4, 8).div(32).split(4, 1)
    model[1].weight.data = model[1].weight.data[:2]


def _of_frozen(model: nn.Module) -> None:
    model[0].weight.requires_grad_(False)
    model.register_buffer("view", model[0].weight.data.t())


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("change", [_by_rows, _by_columns, _of_frozen])
def test_views_of_one_buffer_that_share_no_trained_element_are_trained(
    change: Callable[[nn.Module], None], stage: int
) -> None:
    model, batch = nn.Sequential(*net(), Loss()), lambda *_: (torch.arange(12.0).view(3, 4) / 10,)
    change(model)
    plain = train_plain(model, steps=2, batch=batch).weights
    engine = engine_of(model, settings(stage))
    train(engine, 2, batch=batch)
    assert_near(weights_of(engine), plain, 1e-6)
    engine.close()


def test_max_norm_of_an_embedding_is_logged_where_ranks_would_differ(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Embedding(4, 4, max_norm=1.0))
    wherry.initialize(model=copy.deepcopy(model), config=CONFIG)[0].close()
    assert "max_norm" not in caplog.text
    run_ranks(2, lambda comm: wherry.initialize(model=copy.deepcopy(model), config=CONFIG, mesh=comm)[0].close())
    assert "0: max_norm rescales the rows" in caplog.text


@pytest.mark.parametrize(("form", "logged"), [("named", True), ("groups", True), ("a part", False)])
def test_parameters_outside_of_a_given_optimizer_are_logged(
    form: str, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    given = {"optimizer": torch.optim.SGD([first_weight(model)]), "model_parameters": PARAMETERS[form](model)}
    with caplog.at_level(logging.INFO, logger="wherry"):
        wherry.initialize(model=model, config={}, **given)[0].close()
    assert (": 3 that require" in caplog.text) == logged


# Learning rates.


@pytest.mark.parametrize(
    ("given", "kind", "rates"),
    [
        (partial(StepLR, step_size=1, gamma=0.5), StepLR, [0.25, 0.125, 0.0625]),
        (ConstantLR, ConstantLR, [0.25 / 3] * 3),
    ],
)
def test_a_given_schedule_overrides_the_configs(
    given: Any, kind: type, rates: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    config = {**CONFIG, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 9.0}}}
    with caplog.at_level(logging.INFO, logger="wherry"):
        engine, _, _, schedule = wherry.initialize(model=net(), config=config, lr_scheduler=given)
    assert "scheduler: the config's WarmupLR is not used, as initialize was given one" in caplog.text
    assert isinstance(schedule, kind) and schedule is engine.lr_scheduler
    seen = []
    for _ in range(3):
        seen += engine.get_lr()
        engine.backward(engine(torch.ones(3, 4)).mean())
        engine.step()
    assert seen == pytest.approx(rates)
    engine.close()


# Data, and ranks.


def collated(samples: list[int]) -> dict[str, torch.Tensor]:
    return {"input": torch.tensor([[float(sample)] * 4 for sample in samples])}


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [3, 3, 1]), (True, [3, 3])])
def test_training_data_pass_through_the_collate_fn(drop_last: bool, sizes: list[int]) -> None:
    model = net()
    given = {"config": {**CONFIG, "dataloader_drop_last": drop_last}, "training_data": range(14)}

    def body(comm: Comm) -> list[float]:
        engine, _, loader, _ = wherry.initialize(model=copy.deepcopy(model), collate_fn=collated, mesh=comm, **given)
        batches = [batch["input"] for batch in loader]
        engine(batches[0])
        engine.close()
        assert [len(batch) for batch in batches] == sizes
        return [float(x) for batch in batches for x in batch[:, 0]]

    first, second = run_ranks(2, body)
    assert sorted(first + second) == list(range(14)) if not drop_last else len({*first, *second}) == 12
