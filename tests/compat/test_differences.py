"""The page "Coming from DeepSpeed": what differs between `import wherry` and the alias, and what keys do."""

from __future__ import annotations

import copy
import logging
import re
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wherry
from wherry import config as configs
from wherry.checkpoint.errors import CheckpointError
from wherry.compat.deepspeed import config as theirs
from wherry.compat.deepspeed import engine as engines
from wherry.compat.deepspeed.engine import DeepSpeedEngine
from wherry.compat.deepspeed.tensor_fragment import safe_get_full_grad
from wherry.compat.deepspeed.zero import Init, TiledLinear
from wherry.config.reference import catalog
from wherry.nn.tiled import TiledLinear as WherryTiledLinear

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-deepspeed.md"
SIZES = {"train_micro_batch_size_per_gpu": 2}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
BF16, FP16 = {"bf16": {"enabled": True}}, {"enabled": True, "initial_scale_power": 4}
Pair = tuple[str, str]


def outcome(call: Callable[[], Any], done: str) -> str:
    """Name the error that a call ends with, or what it does."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return done


def both(use: Callable[[Any], object], weight: float = 1.0, **config: Any) -> Pair:
    """Look at an engine of either kind, whose loss is the sum of the input times `weight`."""
    seen = []
    for initialize in (wherry.initialize, engines.initialize):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, weight)
        given = {**SIZES, **SGD, **copy.deepcopy(config)}
        engine, *_ = initialize(model=model, config=given, model_parameters=model.parameters())
        value = use(engine)
        seen.append(f"{value:.3g}" if isinstance(value, float) else str(value))
        engine.close()
    return seen[0], seen[1]


def loss(engine: Any, size: float = 3.0) -> torch.Tensor:
    return engine(torch.full((1, 1), size, dtype=engine.working_dtype or torch.float32)).float().sum()


def step(engine: Any, size: float = 3.0) -> None:
    engine.backward(loss(engine, size))
    engine.step()


def read(given: dict[str, Any], done: str = "accepted", left: str = "left aside") -> Pair:
    """Read a config by either."""
    config = {**SIZES, **given}
    ours = outcome(lambda: configs.load(copy.deepcopy(config)), done)
    return ours, outcome(lambda: theirs.load(copy.deepcopy(config)), left)


# Numbers.


def master(engine: Any) -> str:
    return f"{float(engine.states.full('weight', 'master')):.3f}"


def master_after_a_load(engine: Any) -> str:
    with torch.no_grad():
        engine.states.set_full("weight", "master", torch.full((1, 1), 1.001))
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)
        engine.load_checkpoint(folder, load_module_only=True)
    return master(engine)


def first_step(engine: Any) -> float:
    step(engine)
    return float(next(iter(engine.optimizer.state_dict()["state"].values()))["step"]) - 1


def muon_rates() -> Pair:
    read = [
        load({**SIZES, "optimizer": {"type": "Muon"}}).optimizer.build_args()[1] for load in (configs.load, theirs.load)
    ]
    ours, same = (f"{options['lr']:g}, {options['adamw_lr']:g}" for options in read)
    return ours, same


def option(engine: Any, name: str) -> Any:
    return engine.optimizer.param_groups[0][name]


def rates(engine: Any) -> list[float]:
    seen = []
    for _ in range(4):
        seen.append(option(engine, "lr"))
        step(engine)
    return [*seen, option(engine, "lr")]


def steps_until_the_scale_grows(engine: Any) -> int:
    first = engine.loss_scale
    for count in range(1, 6):
        step(engine, 0.01)
        if engine.loss_scale != first:
            return count
    raise AssertionError("it does not grow")


def norm_after_an_overflow(engine: Any) -> float:
    step(engine, 60000.0)
    return float(engine.get_global_grad_norm())


LINEAR = {"warmup_num_steps": 4, "warmup_max_lr": 1.0, "warmup_type": "linear"}
DECAY = {"warmup_num_steps": 2, "total_num_steps": 1000, "warmup_type": "linear"}
NUMBERS: dict[str, Callable[[], Pair]] = {
    "`gradient_clipping` left out": lambda: both(lambda engine: str(engine.gradient_clipping())),
    "the fp32 master of a weight of 1.001 in bf16": lambda: both(master, 1.001, **BF16),
    "the master of a weight of 1.001 in bf16 after a load with `load_module_only`": lambda: both(
        master_after_a_load, **BF16
    ),
    "the steps that an Adam in bf16 at stage 0 begins with": lambda: both(
        first_step, **BF16, optimizer={"type": "AdamW", "params": {"lr": 0.1}}
    ),
    "the learning rates of a `Muon` that is given none, of its matrices and of the rest": muon_rates,
    "who updates the one layer of a model, of a `Muon`": lambda: both(
        lambda engine: "Muon" if option(engine, "use_muon") else "AdamW", optimizer={"type": "Muon"}
    ),
    "learning rates of a linear warm-up to 1 in 4 steps": lambda: both(
        lambda engine: ", ".join(f"{rate:g}" for rate in rates(engine)[:4]),
        scheduler={"type": "WarmupLR", "params": LINEAR},
    ),
    "`WarmupDecayLR` without `warmup_max_lr`, of an optimizer with 0.5": lambda: both(
        lambda engine: max(rates(engine)[1:]), scheduler={"type": "WarmupDecayLR", "params": DECAY}
    ),
    "what a schedule's `state_dict()` counts with": lambda: both(
        lambda engine: next(key for key in engine.lr_scheduler.state_dict() if key.startswith("last_")),
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
    ),
    "what `backward` returns for a loss of 3 and two micro-batches": lambda: both(
        lambda engine: float(engine.backward(loss(engine)).detach()), gradient_accumulation_steps=2
    ),
    "good steps until a dynamic scale with a window of 2 grows": lambda: both(
        steps_until_the_scale_grows, fp16=FP16 | {"loss_scale_window": 2}, zero_optimization={"stage": 1}
    ),
    "the norm after a step that is skipped": lambda: both(
        norm_after_an_overflow, fp16=FP16 | {"initial_scale_power": 16}, zero_optimization={"stage": 1}
    ),
    "`weight_decay` left out of an `AdamW` with `torch_adam`": lambda: both(
        lambda engine: float(option(engine, "weight_decay")),
        optimizer={"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    ),
}

# Configs.


def job_name() -> Pair:
    ours, same = (
        load({**SIZES, "csv_monitor": {"enabled": True}}).csv_monitor.job_name for load in (configs.load, theirs.load)
    )
    return ours, same


def no_batch_size() -> Pair:
    def build(initialize: Any) -> None:
        initialize(model=nn.Linear(1, 1), config=copy.deepcopy(SGD))[0].close()

    ours = outcome(lambda: build(wherry.initialize), "1")
    return ours, outcome(lambda: build(engines.initialize), "accepted")


CONFIGS: dict[str, Callable[[], Pair]] = {
    "`job_name` left out of a `csv_monitor`": job_name,
    "a key that nobody knows, at the top of a config": partial(read, {"steps_per_prnit": 10}),
    "`offload_param` below stage 3": partial(
        read, {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
    ),
    "`AdamW` with `adam_w_mode: false`": partial(
        read, {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}
    ),
    '`gradient_allreduce_op: "sum"` at stage 3': partial(
        read, {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}, "sums", "sums"
    ),
    "no batch size at all": no_batch_size,
}

# Calls.


def built_shape() -> Pair:
    zero = {"zero_optimization": {"stage": 3}}
    layers: list[nn.Linear] = []
    for context in (wherry.Init(config=zero), Init(config_dict_or_path={**SIZES, **zero})):
        with context:
            layers.append(nn.Linear(2, 2, bias=False))
    ours, same = (str(list(layer.weight.shape)) for layer in layers)
    return ours, same


def enter_no_sync(engine: Any) -> str:
    return outcome(lambda: ExitStack().enter_context(engine.no_sync()), "accepted")


def gradient_within_a_window(engine: Any) -> object:
    engine.backward(loss(engine))
    if isinstance(engine, DeepSpeedEngine):
        return safe_get_full_grad(engine.module.weight).item()  # type: ignore[union-attr]
    return outcome(lambda: engine.gradients("weight"), "readable")


def grad_attribute(engine: Any) -> object:
    engine.backward(loss(engine))
    grad = engine.module.weight.grad
    return grad if grad is None else grad.item()


def first_tile() -> Pair:
    ours = next(iter(WherryTiledLinear(4, 4, 2, 2).state_dict()))
    return ours, next(iter(TiledLinear(4, 4, in_splits=2, out_splits=2).state_dict()))


STAGE_2 = {"zero_optimization": {"stage": 2}}
CALLS: dict[str, Callable[[], Pair]] = {
    "the class of `engine.optimizer` at stage 2": lambda: both(
        lambda engine: type(engine.optimizer).__name__, **STAGE_2
    ),
    "the shape of a weight of `[2, 2]` after `zero.Init`": built_shape,
    "`no_sync` at stage 2": lambda: both(enter_no_sync, **STAGE_2),
    "`loss.backward()` without `engine.scale`, in fp16 with a dynamic scale": lambda: both(
        lambda engine: outcome(loss(engine).backward, "scaled"),
        fp16=FP16,
        **STAGE_2,
    ),
    "a gradient within a window, of a loss of 3 and two micro-batches": lambda: both(
        gradient_within_a_window, gradient_accumulation_steps=2, **STAGE_2
    ),
    "a weight's `.grad` after the backward of a loss of 3, at stage 0": lambda: both(grad_attribute),
    "`TiledLinear`'s first weight in a state dict": first_tile,
}

# Checkpoints.


def saved(engine: Any, **how: Any) -> str:
    engine.save_checkpoint(folder := type(engine).__name__, **how)
    return folder


def load_a_tag_that_is_not_there(engine: Any) -> object:
    try:
        return engine.load_checkpoint(saved(engine), tag="other")[0]
    except CheckpointError as error:
        return "an AssertionError" if isinstance(error, AssertionError) else "a CheckpointError"


CHECKPOINTS: dict[str, Callable[[], Pair]] = {
    "`load_checkpoint` of a folder without `latest`": lambda: both(
        lambda engine: engine.load_checkpoint(saved(engine, save_latest=False))[0] and "the newest"
    ),
    "`load_checkpoint` of a tag that is not there": lambda: both(load_a_tag_that_is_not_there),
    "the files of a checkpoint at stage 2": lambda: both(
        lambda engine: min((path.name for path in Path(saved(engine)).rglob("*.pt")), default="none of torch's"),
        **STAGE_2,
    ),
}

ROWS = NUMBERS | CONFIGS | CALLS | CHECKPOINTS


def rows_of(section: str) -> list[list[str]]:
    """Read the cells of a section's table."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {section}", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip().strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


def table() -> dict[str, Pair]:
    """Give the rows of the page, with what each cell begins with."""
    return {what: (ours, same) for what, ours, same, *_ in rows_of("What differs")}


def test_the_table_has_the_rows_that_are_checked_here() -> None:
    assert list(table()) == list(ROWS)


@pytest.mark.parametrize("what", ROWS)
def test_a_row_is_what_both_do(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO, "wherry"):
        ours, same = ROWS[what]()
    assert ours != same, "no difference"
    cells = table()[what]
    assert [cell.split(": ")[0].strip("`") for cell in cells] == [ours, same]
    if "left aside" in (ours, same):
        assert "left aside" in caplog.text  # with a line


# How a row begins, and what the schema may say of its keys.
CLAIMS = {"same": {"acts"}, "accepted, not needed": {"none"}, "not needed": {"none"}, "not here": {"refused"}}
# Rows that are about values, or about keys that nobody knows.
NO_KEYS = {'`"auto"`', "an unknown key", "a key that has no effect here"}


def keys_in(cell: str) -> list[str]:
    """Split a cell into dotted keys: ".stage" stands in the block of the key before it."""
    block, keys = "", []
    for name in re.findall("`([^`]+)`", cell):
        keys.append(block + name if name.startswith(".") else name)
        if not name.startswith("."):
            block = name.rpartition(".")[0]
    assert keys, f"a row without a key: {cell}"
    return keys


def test_the_key_table_names_keys_that_the_schema_knows_and_what_they_do() -> None:
    effects = {info.path: info.effect for info in catalog() if not info.of}
    rows = [row for row in rows_of("Keys") if row[0] not in NO_KEYS]
    assert len(rows) > 12
    for cell, text, *_ in rows:
        for key in keys_in(cell):
            assert key in effects, key
            for claim, allowed in CLAIMS.items():
                if text.startswith(claim):
                    assert effects[key] in allowed, f"{key}: the page says {claim!r}, the schema {effects[key]!r}"
    # `"wherry": {"unit_classes": [...]}` and the like, anywhere on the page.
    paths = {info.path for info in catalog()}
    named = re.findall(r'`"(\w+)": \{"(\w+)":', PAGE.read_text())
    assert named and all(f"{block}.{key}" in paths for block, key in named), named
