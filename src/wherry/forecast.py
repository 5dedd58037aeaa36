"""`wherry.estimate`: the numbers behind `wherry plan`, for programs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wherry import config as configs
from wherry.config import Config
from wherry.errors import WherryError
from wherry.plan.estimate import Estimate, answer_of_count
from wherry.plan.forecaster import Forecaster
from wherry.plan.grid import Grid
from wherry.plan.machines import Machine, known
from wherry.plan.probe import disk_folder, this_machine
from wherry.sources import around, find, located

if TYPE_CHECKING:
    from torch import nn


def estimate(
    model_or_params: str | int | float | nn.Module | Callable[..., Any],
    config: Config | dict[str, Any] | str | None = None,
    machine: Machine | str | None = None,
    *,
    ranks: int | None = None,
    sequence: int | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> Estimate:
    """What training keeps and how long a step takes, without training, and without the model's memory.

    The model is a preset, a Hugging Face config or folder, `"module:callable"`, a callable that returns a model and the
    inputs of a micro-batch, a model (on the meta device, if it is large), or a number of parameters. `machine` is one
    of those that `wherry plan --machine` knows, or this one. `ranks` are all ranks; some of them may share the model.

        found = wherry.estimate("gpt2-1.5b", {"bf16": {"enabled": True}}, "4090")
        print(found.fits, found.tightest, found.seconds)
    """
    for name, value in (("ranks", ranks), ("sequence", sequence)):
        if value is not None and value < 1:
            raise WherryError(f"{name}: expected 1 or more, got {value}")
    resolved = config if isinstance(config, Config) else configs.load(config)
    if machine is None:
        where = this_machine(disk_folder(resolved)).with_host_memory(resolved.wherry.host_memory)
    else:
        where = machine if isinstance(machine, Machine) else known(machine)
    ranks = ranks or where.ranks()
    where = where.holding(ranks)
    grid = Grid(tensor_parallel, pipeline_parallel)
    if isinstance(model_or_params, int | float):
        if not 1 <= model_or_params < math.inf:
            raise WherryError(f"parameters: expected 1 or more, got {model_or_params}")
        return answer_of_count(int(model_or_params), resolved, where, ranks, grid)
    model = located(model_or_params)
    with around(model):
        return Forecaster(find(model), where, ranks, sequence, grid).exact(resolved)
