"""A process that trains under one system, saves, and loads what it saved, and says how long each took."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.systems import PLACES, SYSTEMS, Engine, Recipe, adamw, config_of, start_group
from benchmarks.worker import answer_requests

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Keeping:
    """One way to keep a state: what it imports, what trains, and its calls."""

    package: str
    system: str
    save: Callable[[Any, Path], None]
    load: Callable[[Any, Path], None]
    # What is left when training goes on; it returns when all is on the disk.
    wait: Callable[[Any, Path], None] | None = None
    # Without it every rank would write the whole.
    one_rank: bool = False


def _states(trainee: Any) -> dict[str, Any]:
    return {"model": trainee.model.state_dict(), "optimizer": trainee.optimizers[0].state_dict()}


def _sync(trainee: Any, folder: Path) -> None:
    """To the disk, as Wherry's own saves are: a benchmark of the system's cache would say nothing.

    What leaves its files in that cache trains on meanwhile.
    """
    for path in [found for found in folder.rglob("*") if found.is_file()]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def _torch_save(trainee: Any, folder: Path) -> None:
    import torch

    torch.save(_states(trainee), folder / "states.pt")


def _tensors(trainee: Any) -> list[torch.Tensor]:
    """Weights and both moments."""
    optimizer = trainee.optimizers[0]
    kept = [optimizer.state[p][moment] for p in trainee.parameters for moment in ("exp_avg", "exp_avg_sq")]
    return [p.detach() for p in trainee.parameters] + kept


def _shares(trainee: Any) -> list[memoryview]:
    """This rank's part of the bytes of each tensor."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    views = [memoryview(tensor.numpy()).cast("B") for tensor in _tensors(trainee)]
    return [view[rank * view.nbytes // ranks : (rank + 1) * view.nbytes // ranks] for view in views]


def _bytes_file(folder: Path) -> Path:
    return folder / f"states-{os.environ['RANK']}.bin"


def _bytes_save(trainee: Any, folder: Path) -> None:
    with open(_bytes_file(folder), "wb", buffering=0) as file:
        for view in _shares(trainee):
            assert file.write(view) == view.nbytes
        os.fsync(file.fileno())


def _bytes_load(trainee: Any, folder: Path) -> None:
    with open(_bytes_file(folder), "rb", buffering=0) as file:
        for view in _shares(trainee):
            assert file.readinto(view) == view.nbytes


def _torch_load(trainee: Any, folder: Path) -> None:
    import torch

    found = torch.load(folder / "states.pt", weights_only=True)
    trainee.model.load_state_dict(found["model"])
    trainee.optimizers[0].load_state_dict(found["optimizer"])


def _sharded_states(trainee: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(trainee.model, trainee.optimizers[0])
    return {"model": model, "optimizer": optimizer}


def _dcp_save(trainee: Any, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(_sharded_states(trainee), checkpoint_id=folder)  # it syncs each file


def _dcp_begin(trainee: Any, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    trainee.under_way = dcp.async_save(_sharded_states(trainee), checkpoint_id=folder)


def _dcp_wait(trainee: Any, folder: Path) -> None:
    trainee.under_way.result()


def _dcp_load(trainee: Any, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    found = _sharded_states(trainee)
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(
        trainee.model, trainee.optimizers[0], model_state_dict=found["model"], optim_state_dict=found["optimizer"]
    )


def _engine_save(trainee: Any, folder: Path) -> None:
    trainee.engine.save_checkpoint(str(folder))


def _engine_load(trainee: Any, folder: Path) -> None:
    path, _ = trainee.engine.load_checkpoint(str(folder))
    assert path is not None, folder


def _wherry_behind(recipe: Recipe, ranks: int) -> Any:
    import wherry

    model = recipe.model()
    config = config_of(PLACES["3"], recipe, ranks) | {"wherry": {"checkpoint": {"async_save": True}}}
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    return Engine(engine, recipe)


def _wherry_wait(trainee: Any, folder: Path) -> None:
    trainee.engine.wait_for_checkpoint()


_DCP = "torch.distributed.checkpoint.state_dict"
# What no way to keep these bytes is sooner than.
LIMIT = "limit: the same bytes"
KEEPINGS: dict[str, Keeping] = {
    LIMIT: Keeping("torch", "plain", _bytes_save, _bytes_load),
    "torch-save": Keeping("torch", "plain", _torch_save, _torch_load, _sync, one_rank=True),
    "dcp": Keeping(_DCP, "fsdp2", _dcp_save, _dcp_load),
    "dcp-async": Keeping(_DCP, "fsdp2", _dcp_begin, _dcp_load, _dcp_wait),
    "deepspeed": Keeping("deepspeed", "deepspeed-3", _engine_save, _engine_load, _sync),
    "wherry": Keeping("wherry", "wherry-3", _engine_save, _engine_load),
    "wherry-async": Keeping("wherry", "wherry-3", _engine_save, _engine_load, _wherry_wait),
}


class CheckpointWorker:
    """One system in one process: trains a little, then saves and loads as often as asked."""

    def __init__(self) -> None:
        self.trainee: Any = None
        self.keeping: Keeping | None = None

    def build(self, keeping: str, recipe: dict[str, Any]) -> int:
        """Train until every state is there; returns the bytes of weights and moments of the whole model."""
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self.keeping = KEEPINGS[keeping]
        importlib.import_module(self.keeping.package)
        made, rank, ranks = Recipe(**recipe), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if ranks > 1 and self.keeping.system == "plain":
            start_group()  # as the others have one, to meet in
        build = _wherry_behind if keeping == "wherry-async" else SYSTEMS[self.keeping.system]
        self.trainee = build(made, ranks)
        for step in range(2):
            self.trainee.step(*made.batch_of(step, rank, ranks))
        gc.collect()
        return 3 * 4 * made.parameters

    def take(self, folder: str) -> dict[str, Any]:
        """Save, wait until it is there, load it. Seconds that training stood still, of the save and of the load."""
        assert self.keeping is not None
        path, rank = Path(folder), int(os.environ["RANK"])
        path.mkdir(parents=True, exist_ok=True)
        self._meet()
        begun = time.perf_counter()
        self.keeping.save(self.trainee, path)
        stall = time.perf_counter() - begun
        if self.keeping.wait is not None:
            self.keeping.wait(self.trainee, path)
        self._meet()
        saved = time.perf_counter() - begun
        written = sum(found.stat().st_size for found in path.rglob("*") if found.is_file())
        begun = time.perf_counter()
        self.keeping.load(self.trainee, path)
        self._meet()
        loaded = time.perf_counter() - begun
        if rank == 0:
            shutil.rmtree(path)
        return {"stall": stall, "save": saved, "load": loaded, "written_bytes": written}

    def _meet(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.barrier()


if __name__ == "__main__":
    answer_requests(CheckpointWorker)
