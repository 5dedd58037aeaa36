"""Whole accumulation windows through `engine.train_batch`, on ranks that are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tests.engine.harness import Batch, Run, adamw, settings, token_batch
from torch import nn

import wherry
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks


def train_windows(
    model: nn.Module,
    *,
    stage: int,
    order: str,
    accumulation: int,
    ranks: int = 1,
    steps: int = 4,
    clip: float = 0.0,
    batch: Batch = token_batch,
    config: dict[str, Any] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    each_step: Callable[[Any, int], Any] | None = None,
) -> Run:
    """What rank 0 saw, losses averaged over ranks; `extra` has what `each_step` returned on rank 0."""

    def body(comm: Comm) -> Run:
        run = Run(extra=[])
        mine = copy.deepcopy(model)
        more = dict(config or {})
        more["wherry"] = {"accumulation": order, **more.get("wherry", {})}
        engine, *_ = wherry.initialize(
            model=mine,
            optimizer=optimizer(mine.parameters()),
            mesh=comm,
            config=settings(stage, accumulation, clip, more),
        )
        for step in range(steps):
            comm.traffic.clear()
            loss = float(engine.train_batch(iter([batch(step, micro, comm.rank) for micro in range(accumulation)])))
            if each_step is not None:
                run.extra.append(each_step(engine, step))
            run.norms.append(engine.get_global_grad_norm())
            run.losses.append(sum(comm.gather_objects(loss)) / comm.size)
        with wherry.gathered(engine.module):
            run.weights = {name: p.detach().clone() for name, p in mine.named_parameters()}
        engine.close()
        return run

    return run_ranks(ranks, body)[0]
