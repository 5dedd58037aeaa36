"""A process that builds one engine, in one of the ways that people do, takes a step, and says what it took."""

from __future__ import annotations

import gc
import importlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks import systems
from benchmarks.systems import PLACES, Recipe
from benchmarks.worker import answer_requests, forget_peak, peak_bytes, resident_bytes

if TYPE_CHECKING:
    from torch import nn

# Bytes of a parameter in fp32, with AdamW: of the states that a system must have when it is built, and after a step.
WEIGHTS, WEIGHTS_AND_MOMENTS = 4, 12
# Tokens of the first step, of one sequence: enough to make every state.
FIRST_TOKENS = 16


@dataclass(frozen=True)
class Way:
    """How an engine comes to be: the module it is in, and what is done."""

    module: str
    build: Callable[[Recipe, str], Any]
    loads: bool = False


def _config(recipe: Recipe) -> dict[str, Any]:
    options = {"lr": systems.LEARNING_RATE, "weight_decay": systems.WEIGHT_DECAY}
    return systems.config_of(PLACES["3"], recipe, 1) | {"optimizer": {"type": "AdamW", "params": options}}


def _wherry(model: nn.Module, recipe: Recipe) -> Any:
    import wherry

    return wherry.initialize(model=model, config=_config(recipe))[0]


def _plain(recipe: Recipe, file: str) -> Any:
    model = recipe.model()
    return model, systems.adamw(model.parameters())


def _whole(recipe: Recipe, file: str) -> Any:
    return _wherry(recipe.model(), recipe)


def _init(recipe: Recipe, file: str) -> Any:
    import wherry

    with wherry.Init(config=_config(recipe)):
        model = recipe.model()
    return _wherry(model, recipe)


def _meta(recipe: Recipe, file: str) -> Any:
    import wherry

    with wherry.Init(meta=True):
        model = recipe.model()
    return _wherry(model, recipe)


def _fsdp2_empty(recipe: Recipe) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    systems.start_group()
    mesh = init_device_mesh("cpu", (1,))
    with torch.device("meta"):
        model: Any = recipe.model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    return model


def _fsdp2_meta(recipe: Recipe, file: str) -> Any:
    model = _fsdp2_empty(recipe)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model, systems.adamw(model.parameters())


def _deepspeed_config(recipe: Recipe) -> dict[str, Any]:
    config = _config(recipe) | {"steps_per_print": 2**31}
    config["optimizer"]["params"]["torch_adam"] = True  # its own is compiled at first use
    return config


def _deepspeed_engine(model: nn.Module, recipe: Recipe) -> Any:
    import deepspeed

    config = _deepspeed_config(recipe)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def _deepspeed(recipe: Recipe, file: str) -> Any:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    return _deepspeed_engine(recipe.model(), recipe)


def _deepspeed_init(recipe: Recipe, file: str) -> Any:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    with deepspeed.zero.Init(config_dict_or_path=_deepspeed_config(recipe)):
        model = recipe.model()
    return _deepspeed_engine(model, recipe)


def _loaded(recipe: Recipe, file: str) -> nn.Module:
    """As transformers loads a model: on the meta device, which takes the tensors of the file as they are."""
    import torch
    from safetensors.torch import load_file

    with torch.device("meta"):
        model = recipe.model()
    model.load_state_dict(load_file(file), strict=False, assign=True)  # a tied head is in the file once
    model.head.weight = model.tokens.weight
    return model


def _plain_load(recipe: Recipe, file: str) -> Any:
    model = _loaded(recipe, file)
    return model, systems.adamw(model.parameters())


def _fsdp2_load(recipe: Recipe, file: str) -> Any:
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model = _fsdp2_empty(recipe)
    set_model_state_dict(model, load_file(file), options=StateDictOptions(full_state_dict=True, strict=False))
    return model, systems.adamw(model.parameters())


def _deepspeed_load(recipe: Recipe, file: str) -> Any:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    return _deepspeed_engine(_loaded(recipe, file), recipe)


def _wherry_load(recipe: Recipe, file: str) -> Any:
    import wherry

    with wherry.Init(meta=True):
        model = recipe.model()
    wherry.load_pretrained(model, file)
    return _wherry(model, recipe)


def _first_step(built: Any, recipe: Recipe) -> float:
    """The loss of it."""
    import torch

    ids, labels = replace(recipe, batch=1, length=min(recipe.length, FIRST_TOKENS)).batch_of(0, 0, 1)
    if isinstance(built, tuple):
        model, optimizer = built
        loss = model(ids, labels)
        loss.backward()
        if recipe.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())
    loss = built(ids, labels)
    built.backward(loss)
    built.step()
    if hasattr(built, "settle"):
        built.settle()  # what the engine has put off belongs to the step
    return float(loss.detach())


_ENGINE, _FSDP2 = "wherry.engine", "torch.distributed.fsdp"
WAYS: dict[str, Way] = {
    "plain": Way("torch", _plain),
    "wherry": Way(_ENGINE, _whole),
    "wherry-init": Way(_ENGINE, _init),
    "wherry-meta": Way(_ENGINE, _meta),
    "fsdp2-meta": Way(_FSDP2, _fsdp2_meta),
    "deepspeed": Way("deepspeed", _deepspeed),
    "deepspeed-init": Way("deepspeed", _deepspeed_init),
    "plain-load": Way("torch", _plain_load, loads=True),
    "wherry-load": Way(_ENGINE, _wherry_load, loads=True),
    "fsdp2-load": Way(_FSDP2, _fsdp2_load, loads=True),
    "deepspeed-load": Way("deepspeed", _deepspeed_load, loads=True),
}


def _next_to_nothing(recipe: Recipe) -> Recipe:
    return replace(recipe, layers=1, hidden=2 * recipe.heads, vocabulary=8, sequence=8, length=8)


class BuildWorker:
    """One build in one process: a second one would find the memory of the first."""

    def save(self, recipe: dict[str, Any], file: str) -> None:
        """A model's weights as a safetensors file, tied ones once."""
        from safetensors.torch import save_file

        model = Recipe(**recipe).model()
        save_file({name: parameter.detach() for name, parameter in model.named_parameters()}, file)

    def build(self, way: str, recipe: dict[str, Any], file: str) -> dict[str, dict[str, float]]:
        """What a build took, and what it took with the first step, which makes what a system had put off."""
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        made = Recipe(**recipe)
        begun = time.perf_counter()
        first = self._rehearse(way, made)
        first_use = time.perf_counter() - begun
        gc.collect()
        forget_peak()
        empty = resident_bytes()
        begun = time.perf_counter()
        built = WAYS[way].build(made, file)
        seconds = time.perf_counter() - begun
        gc.collect()
        found = {"empty_bytes": empty, "first_use_s": first_use}
        ready = {"seconds": seconds, "peak_bytes": peak_bytes(), "states_bytes": WEIGHTS * made.parameters}
        begun = time.perf_counter()
        loss = _first_step(built, made)
        seconds += time.perf_counter() - begun
        del first
        states = WEIGHTS_AND_MOMENTS * made.parameters
        stepped = {"seconds": seconds, "peak_bytes": peak_bytes(), "states_bytes": states, "loss": loss}
        return {"ready": found | ready, "stepped": found | stepped}

    def _rehearse(self, way: str, recipe: Recipe) -> Any:
        """The way gone with a model of next to nothing: what is loaded and started at first use is not of the model.

        Which is seconds and tens of megabytes: torch's first optimizer alone loads 800 modules.
        """
        for module in (WAYS[way].module, "wherry.train.model"):
            importlib.import_module(module)
        small = _next_to_nothing(recipe)
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "small.safetensors")
            if WAYS[way].loads:
                self.save(vars(small), file)
            built = WAYS[way].build(small, file)
            _first_step(built, small)
        return built


if __name__ == "__main__":
    answer_requests(BuildWorker)
