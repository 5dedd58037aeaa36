"""What differs between `import wherry` and the alias: each row of the page's table is what both are seen to do."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable
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
from wherry.nn.tiled import TiledLinear as WherryTiledLinear

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-deepspeed.md"
SIZES = {"train_micro_batch_size_per_gpu": 2}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
Pair = tuple[str, str]
ROWS: dict[str, Callable[[], Pair]] = {}


def row(what: str) -> Callable[[Callable[[], Pair]], Callable[[], Pair]]:
    def keep(check: Callable[[], Pair]) -> Callable[[], Pair]:
        ROWS[what] = check
        return check

    return keep


def told(call: Callable[[], Any], done: str) -> str:
    """The kind of error that a call ends with, or what it does."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return done


def both(use: Callable[[Any], str], weight: float = 1.0, **config: Any) -> Pair:
    """What is seen of an engine of either kind, whose loss is the sum of the input times `weight`."""
    seen = []
    for initialize in (wherry.initialize, engines.initialize):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, weight)
        given = {**SIZES, **SGD, **copy.deepcopy(config)}
        engine, *_ = initialize(model=model, config=given, model_parameters=model.parameters())
        seen.append(use(engine))
        engine.close()
    return seen[0], seen[1]


def loss(engine: Any, size: float = 3.0) -> torch.Tensor:
    return engine(torch.full((1, 1), size, dtype=engine.working_dtype or torch.float32)).float().sum()


def step(engine: Any, size: float = 3.0) -> None:
    engine.backward(loss(engine, size))
    engine.step()


def read(given: dict[str, Any], done: str, left: str) -> Pair:
    """What each says of a config."""
    config = {**SIZES, **given}
    ours = told(lambda: configs.load(copy.deepcopy(config)), done)
    return ours, told(lambda: theirs.load(copy.deepcopy(config)), left)


# Numbers.


@row("`gradient_clipping` left out")
def _() -> Pair:
    return both(lambda engine: str(engine.gradient_clipping()))


@row("the fp32 master of a weight of 1.001 in bf16")
def _() -> Pair:
    return both(lambda engine: f"{float(engine.states.full('weight', 'master')):.3f}", 1.001, bf16={"enabled": True})


@row("the master of a weight of 1.001 in bf16 after a load with `load_module_only`")
def _() -> Pair:
    def loaded(engine: Any) -> str:
        with torch.no_grad():
            engine.states.set_full("weight", "master", torch.full((1, 1), 1.001))
        with tempfile.TemporaryDirectory() as folder:
            engine.save_checkpoint(folder)
            engine.load_checkpoint(folder, load_module_only=True)
        return f"{float(engine.states.full('weight', 'master')):.3f}"

    return both(loaded, bf16={"enabled": True})


@row("the steps that an Adam in bf16 at stage 0 begins with")
def _() -> Pair:
    def steps(engine: Any) -> str:
        step(engine)
        return f"{float(next(iter(engine.optimizer.state_dict()['state'].values()))['step']) - 1:g}"

    return both(steps, bf16={"enabled": True}, optimizer={"type": "AdamW", "params": {"lr": 0.1}})


@row("the learning rates of a `Muon` that is given none, of its matrices and of the rest")
def _() -> Pair:
    def rates_of(load: Callable[[Any], Any]) -> str:
        _, options = load({**SIZES, "optimizer": {"type": "Muon"}}).optimizer.build_args()
        return f"{options['lr']:g}, {options['adamw_lr']:g}"

    return rates_of(configs.load), rates_of(theirs.load)


@row("who updates the one layer of a model, of a `Muon`")
def _() -> Pair:
    def whose(engine: Any) -> str:
        return "Muon" if engine.optimizer.param_groups[0]["use_muon"] else "AdamW"

    return both(whose, optimizer={"type": "Muon"})


def rates(engine: Any) -> str:
    seen = []
    for _ in range(4):
        seen.append(f"{engine.optimizer.param_groups[0]['lr']:g}")
        step(engine)
    return ", ".join(seen)


@row("learning rates of a linear warm-up to 1 in 4 steps")
def _() -> Pair:
    params = {"warmup_num_steps": 4, "warmup_max_lr": 1.0, "warmup_type": "linear"}
    return both(rates, scheduler={"type": "WarmupLR", "params": params})


@row("`WarmupDecayLR` without `warmup_max_lr`, of an optimizer with 0.5")
def _() -> Pair:
    params = {"warmup_num_steps": 2, "total_num_steps": 1000, "warmup_type": "linear"}

    def highest(engine: Any) -> str:
        seen = []
        for _ in range(4):
            step(engine)
            seen.append(engine.optimizer.param_groups[0]["lr"])
        return f"{max(seen):.3g}"

    return both(highest, scheduler={"type": "WarmupDecayLR", "params": params})


@row("what a schedule's `state_dict()` counts with")
def _() -> Pair:
    params = {"warmup_num_steps": 2}

    def key(engine: Any) -> str:
        return next(name for name in ("last_epoch", "last_batch_iteration") if name in engine.lr_scheduler.state_dict())

    return both(key, scheduler={"type": "WarmupLR", "params": params})


@row("what `backward` returns for a loss of 3 and two micro-batches")
def _() -> Pair:
    return both(lambda engine: f"{float(engine.backward(loss(engine)).detach()):g}", gradient_accumulation_steps=2)


@row("good steps until a dynamic scale with a window of 2 grows")
def _() -> Pair:
    def steps(engine: Any) -> str:
        first = engine.loss_scale
        for count in range(1, 6):
            step(engine, 0.01)
            if engine.loss_scale != first:
                return str(count)
        raise AssertionError("it does not grow")

    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}
    return both(steps, fp16=fp16, zero_optimization={"stage": 1})


@row("the norm after a step that is skipped")
def _() -> Pair:
    def norm(engine: Any) -> str:
        step(engine, 60000.0)
        return f"{float(engine.get_global_grad_norm()):g}"

    return both(norm, fp16={"enabled": True, "initial_scale_power": 16}, zero_optimization={"stage": 1})


@row("`weight_decay` left out of an `AdamW` with `torch_adam`")
def _() -> Pair:
    block = {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}
    return both(lambda engine: f"{engine.optimizer.param_groups[0]['weight_decay']:g}", optimizer=block)


# Configs.


@row("`job_name` left out of a `csv_monitor`")
def _() -> Pair:
    given = {**SIZES, "csv_monitor": {"enabled": True}}
    ours, others = configs.load(given), theirs.load(copy.deepcopy(given))
    return ours.csv_monitor.job_name, others.csv_monitor.job_name


@row("a key that nobody knows, at the top of a config")
def _() -> Pair:
    return read({"steps_per_prnit": 10}, "accepted", "left aside")


@row("`offload_param` below stage 3")
def _() -> Pair:
    return read({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "accepted", "left aside")


@row("`AdamW` with `adam_w_mode: false`")
def _() -> Pair:
    return read({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}, "accepted", "left aside")


@row("`sparse_gradients: true`")
def _() -> Pair:
    return read({"sparse_gradients": True}, "accepted", "left aside")


@row('`gradient_allreduce_op: "sum"` at stage 3')
def _() -> Pair:
    return read({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}, "sums", "sums")


@row("no batch size at all")
def _() -> Pair:
    def there(initialize: Any) -> Callable[[], Any]:
        model = nn.Linear(1, 1)
        return lambda: initialize(model=model, config=copy.deepcopy(SGD))[0].close()

    return told(there(wherry.initialize), "1"), told(there(engines.initialize), "accepted")


# Calls.


@row("the class of `engine.optimizer` at stage 2")
def _() -> Pair:
    return both(lambda engine: type(engine.optimizer).__name__, zero_optimization={"stage": 2})


@row("the shape of a weight of `[2, 2]` after `zero.Init`")
def _() -> Pair:
    zero = {"zero_optimization": {"stage": 3}}
    shapes = []
    for context in (wherry.Init(config=zero), Init(config_dict_or_path={**SIZES, **zero})):
        with context:
            layer = nn.Linear(2, 2, bias=False)
        shapes.append(str(list(layer.weight.shape)))
    return shapes[0], shapes[1]


@row("`no_sync` at stage 2")
def _() -> Pair:
    def enter(engine: Any) -> None:
        with engine.no_sync():
            pass

    return both(lambda engine: told(lambda: enter(engine), "accepted"), zero_optimization={"stage": 2})


@row("`loss.backward()` without `engine.scale`, in fp16 with a dynamic scale")
def _() -> Pair:
    fp16 = {"enabled": True, "initial_scale_power": 4}
    return both(lambda engine: told(loss(engine).backward, "scaled"), fp16=fp16, zero_optimization={"stage": 2})


@row("a gradient within a window, of a loss of 3 and two micro-batches")
def _() -> Pair:
    def gradient(engine: Any) -> str:
        engine.backward(loss(engine))
        if isinstance(engine, DeepSpeedEngine):
            whole = safe_get_full_grad(engine.module.weight)
            assert whole is not None
            return f"{float(whole):g}"
        return told(lambda: engine.gradients("weight"), "readable")

    return both(gradient, gradient_accumulation_steps=2, zero_optimization={"stage": 2})


@row("a weight's `.grad` after the backward of a loss of 3, at stage 0")
def _() -> Pair:
    def found(engine: Any) -> str:
        engine.backward(loss(engine))
        grad = engine.module.weight.grad
        engine.zero_grad()
        return "None" if grad is None else f"{float(grad):g}"

    return both(found)


@row("`TiledLinear`'s first weight in a state dict")
def _() -> Pair:
    ours = next(iter(WherryTiledLinear(4, 4, 2, 2).state_dict()))
    return ours, next(iter(TiledLinear(4, 4, in_splits=2, out_splits=2).state_dict()))


# Checkpoints.


@row('`save_checkpoint("")`')
def _() -> Pair:
    return both(lambda engine: told(lambda: engine.save_checkpoint(""), "saved"))


@row("`load_checkpoint` of a folder without `latest`")
def _() -> Pair:
    def after(engine: Any) -> str:
        folder = f"kept-{type(engine).__name__}"
        engine.save_checkpoint(folder, save_latest=False)
        found, _ = engine.load_checkpoint(folder)
        return "the newest" if found is not None else "None"

    return both(after)


@row("`load_checkpoint` of a tag that is not there")
def _() -> Pair:
    def after(engine: Any) -> str:
        folder = f"tagged-{type(engine).__name__}"
        engine.save_checkpoint(folder)
        try:
            found, _ = engine.load_checkpoint(folder, tag="other")
        except CheckpointError as error:
            return "an AssertionError" if isinstance(error, AssertionError) else "a CheckpointError"
        return str(found)

    return both(after)


@row("the files of a checkpoint at stage 2")
def _() -> Pair:
    def names(engine: Any) -> str:
        folder = f"files-{type(engine).__name__}"
        engine.save_checkpoint(folder, tag="one")
        found = sorted(path.name for path in Path(folder).rglob("*.pt"))
        return found[0] if found else "none of torch's"

    return both(names, zero_optimization={"stage": 2})


def table() -> dict[str, Pair]:
    """The rows of the page, with what each cell begins with."""
    text = PAGE.read_text(encoding="utf-8").split("## What differs", 1)[1].split("\n## ", 1)[0]
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] != "what":
            found[cells[0]] = (cells[1], cells[2])
    return found


def test_the_table_has_the_rows_that_are_checked_here() -> None:
    assert list(table()) == list(ROWS)


@pytest.mark.parametrize("what", ROWS)
def test_a_row_is_what_both_do(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engines, "init_distributed", lambda **_: None)
    with caplog.at_level(logging.INFO, "wherry"):
        ours, same = ROWS[what]()
    assert ours != same, "no difference"
    cells = table()[what]
    assert [cell.split(": ")[0].strip("`") for cell in cells] == [ours, same]
    if "left aside" in (ours, same):
        assert "left aside" in caplog.text  # with a line
