"""GPT-2 over a tensor-parallel axis, and cut into pipeline stages: torch's own ways, an engine under each stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from wherry.errors import WherryError
from wherry.parallel.topology import Topology, find
from wherry.plan.grid import Grid
from wherry.train.model import GPT, loss_of, through


def lay_out(world: Topology, grid: Grid) -> tuple[Topology, Any]:
    """The topology of all ranks, and the device mesh if ranks share a model: tensor fastest, then data, then pipe."""
    if grid.size == 1:
        return world, None
    from torch.distributed.device_mesh import init_device_mesh

    shape = (grid.pipe, grid.data_ranks(world.world_size), grid.tensor)
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
    return find(mesh), mesh


# How the matrices of a block are cut among tensor-parallel ranks: heads and hidden units are, the rest is whole.
CUT = {"attention.qkv": "colwise", "attention.out": "rowwise", "mlp.up": "colwise", "mlp.down": "rowwise"}


def cut_blocks(model: nn.Module, mesh: Any) -> None:
    """Share the blocks' matrices out over the axis `tp`. The embedding and the head are small in a deep model."""
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan: dict[str, ParallelStyle] = {name: styles[style]() for name, style in CUT.items()}
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        parallelize_module(block, mesh["tp"], plan)


class Stage(nn.Module):
    """One pipeline stage of a GPT: some of its blocks, with the embeddings at the first and the head at the last."""

    def __init__(self, model: GPT, index: int, stages: int) -> None:
        super().__init__()
        blocks = list(model.blocks)
        self.config = model.config
        self.first, self.last = index == 0, index == stages - 1
        begin, end = (len(blocks) * i // stages for i in (index, index + 1))
        if self.first:
            self.tokens, self.positions = model.tokens, model.positions
        # Named by their places in the whole model: a checkpoint of all stages is one of the model.
        self.blocks = nn.ModuleDict({str(place): blocks[place] for place in range(begin, end)})
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        x = through(self.blocks.values(), x, self.config)
        return self.head(self.norm(x)) if self.last else x


class Pipeline:
    """An engine on one stage, called as the training loop calls an engine.

    Each micro-batch of an accumulation window goes through all stages, one after another; forwards of some overlap
    backwards of others, as torch's schedule has it.
    """

    def __init__(self, engine: Any) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self.engine = engine
        pipe = engine.topology.pipe
        self.pipe = pipe
        self.last = pipe.rank == pipe.size - 1
        self.micro_batches = engine.gradient_accumulation_steps()
        if self.micro_batches < pipe.size:
            raise WherryError(
                f"--pipeline-parallel {pipe.size}: gradient_accumulation_steps is {self.micro_batches}, and a pipeline "
                f"is only full with a micro-batch for each stage; set it to {pipe.size} or more"
            )
        stage = PipelineStage(engine, pipe.rank, pipe.size, engine.device, group=pipe.group)
        # The engine divides by the number of micro-batches itself.
        self.schedule = Schedule1F1B(stage, self.micro_batches, loss_fn=loss_of, scale_grads=False)

    def __getattr__(self, name: str) -> Any:
        """All else is the engine's."""
        return getattr(self.engine, name)

    def train_batch(self, data: Iterator[Any]) -> Tensor:
        """One window through the pipeline, and the update; returns the mean loss on every stage."""
        batches = [next(data) for _ in range(self.micro_batches)]
        ids, labels = (torch.cat(parts).to(self.engine.device) for parts in zip(*batches, strict=True))
        loss = self._run(self.schedule.step, ids, labels)
        self.engine.step()
        return loss

    def __call__(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The loss of one batch, for validation: as many samples as a window has micro-batches, or a multiple."""
        return self._run(self.schedule.eval, ids, labels)

    def _run(self, run: Callable[..., Any], ids: Tensor, labels: Tensor) -> Tensor:
        losses: list[Tensor] = []
        given = (ids,) if self.pipe.rank == 0 else ()
        if self.last:
            run(*given, target=labels, losses=losses)
        else:
            run(*given)
        # One stage knows it; the others add nothing.
        mean = torch.zeros((), device=self.engine.device)
        if self.last:
            mean += torch.stack([loss.detach() for loss in losses]).mean()
        self.pipe.all_reduce(mean).wait()
        return mean
