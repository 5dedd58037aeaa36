"""`initialize` and the engine, with the arguments and the method names of DeepSpeed's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from wherry.build import initialize as wherry_initialize
from wherry.build import resolve_config
from wherry.compat.deepspeed import checkpointing, not_part_of_wherry, parameters
from wherry.compat.deepspeed.comm import init_distributed
from wherry.dataloader import make_dataloader
from wherry.engine import Engine
from wherry.errors import WherryError
from wherry.observe.log import say
from wherry.sharding.access import gathered

# Those of `load_checkpoint` before `custom_load_fn`.
LOAD_ARGUMENTS = 6

# Beside every checkpoint.
EXPORTER = """# Whole fp32 weights of the checkpoint beside this file: python zero_to_fp32.py FOLDER OUTPUT
from wherry.compat.deepspeed.export import main

raise SystemExit(main())
"""


class DeepSpeedEngine(Engine):
    """Wherry's engine, with the rest of the names that scripts call."""

    CLOSED = (
        "this engine has been destroyed; call deepspeed.initialize again for a new one. A Trainer of transformers "
        "destroys its engine when it is to train once more: save the model, and give what was saved to another Trainer"
    )

    mpu: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shown = ExitStack()
        parameters.mark(self)
        if self.optimizer is not None:
            self.optimizer.parameter_offload = Hooked(self.module)  # type: ignore[attr-defined]

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        allreduce_gradients: bool = True,
        release_loss: bool = False,
    ) -> torch.Tensor:
        if not allreduce_gradients:
            raise not_part_of_wherry(
                "backward(allreduce_gradients=False)", "use engine.no_sync() around the micro-batches to accumulate"
            )
        return super().backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)

    # Several backwards whose gradients are reduced together, by the step that follows.
    coalesce_grad_reduction = Engine.no_sync

    def close(self) -> None:
        self._shown.close()
        parameters.unmark(self)
        super().close()

    # Names for what the engine says under another one.

    @property
    def mp_world_size(self) -> int:
        return self.world_size // self.dp_world_size

    @property
    def communication_data_type(self) -> torch.dtype | None:
        return self._config.communication_dtype() or self._config.working_dtype()

    def zero_optimization_partition_gradients(self) -> bool:
        return self.placement.gradients.partitioned

    def zero_optimization_partition_weights(self) -> bool:
        return self.placement.parameters.partitioned

    def get_type(self) -> list[str]:
        return [type(self.optimizer.instance).__name__] if self.optimizer is not None else []

    def get_batch_info(self) -> tuple[int, int, int]:
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        return make_dataloader(
            dataset,
            self,
            collate_fn=collate_fn,
            batch_size=batch_size,
            sampler=data_sampler,
            shuffle=route == "train",
            workers=num_local_io_workers or 0,
        )

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(self, state: dict[str, Any], strict: bool = True, custom_load_fn: Any = None) -> None:
        if custom_load_fn is not None:
            custom_load_fn(src=state, dst=self.module)
        else:
            self.module.load_state_dict(state, strict=strict)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Whole working weights in one `torch.save` file, unless the name is `model.safetensors`."""
        return super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The whole working weights on rank 0's host; None on the other ranks, which hold a unit at a time."""
        self._shown.close()
        state = self.consolidated_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        self._show_trained()
        return state

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def _show_trained(self) -> None:
        """Of a model with an adapter, what is trained stays whole until the next forward or step.

        PEFT saves next, on one rank, and asks for the state dicts of layers that it trains whole.
        """
        if self.placement.parameters.partitioned and hasattr(self.module, "peft_config"):
            self._shown.enter_context(gathered([p for p in self.module.parameters() if p.requires_grad]))

    def forward_begins(self) -> None:
        self._shown.close()
        super().forward_begins()

    def step(self, *given: Any, **named: Any) -> None:
        self._shown.close()
        super().step(*given, **named)

    def save_checkpoint(  # transformers looks for the names of its arguments
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As the engine's own; beside it lies the script that people take whole weights out with."""
        saved = super().save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        if self.global_rank == 0:
            Path(save_dir, "zero_to_fp32.py").write_text(EXPORTER, encoding="utf-8")
        return saved

    def load_checkpoint(self, *where: Any, custom_load_fn: Any = None, **how: Any) -> tuple[str | None, Any]:
        """As the engine's own, which has all arguments but DeepSpeed's last."""
        if custom_load_fn is not None or any(given is not None for given in where[LOAD_ARGUMENTS:]):
            raise not_part_of_wherry("load_checkpoint(custom_load_fn=...)", "load the weights with engine.module")
        self._shown.close()
        return super().load_checkpoint(*where[:LOAD_ARGUMENTS], **how)

    def empty_partition_cache(self) -> None:
        """Let go of weights that are gathered and not in use: none are, between steps."""


class Hooked:
    """What libraries take the hooks off for generation, and put them on again, reach for.

    Here hooks stay: on weights that are gathered anyway they do nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        return None

    _register_hooks_recursively = _register_deepspeed_module


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Build an engine; returns `(engine, optimizer, dataloader, lr_scheduler)`."""
    if model is None:
        raise WherryError("deepspeed.initialize requires a model; give model=...")
    named = [value for value in (config, config_params, getattr(args, "deepspeed_config", None)) if value is not None]
    if not named:
        raise WherryError(
            "deepspeed.initialize requires a config: give config= (a dict or a path), or --deepspeed_config FILE"
        )
    if dist_init_required is not False:
        init_distributed(distributed_port=distributed_port)
    give_back(model)
    engine, optimizer, loader, scheduler = wherry_initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        collate_fn=collate_fn,
        config=checkpointing.laid_over(resolve_config(config, config_params, args)),
        mesh=_mesh_of(mpu, mesh_param),
        engine_class=DeepSpeedEngine,
    )
    assert isinstance(engine, DeepSpeedEngine)
    engine.mpu = mpu
    return engine, optimizer, loader, scheduler


def give_back(model: nn.Module) -> None:
    """A model that an engine trains is taken out of it whole, as scripts expect that evaluate after training."""
    earlier = {parameters.engine_of(parameter) for parameter in model.parameters()}
    for engine in earlier:
        if engine is not None and not engine.closed and engine.module is model:
            say("this model has an engine already, which is closed; the model goes on with its weights")
            engine.unwrap()


def _mesh_of(mpu: Any, mesh_param: Any) -> Any:
    """The groups of a model-parallel unit that has any; else None, for all ranks share the data."""
    if mesh_param is not None:
        raise not_part_of_wherry(
            "initialize(mesh_param=...)", "give wherry.initialize a DeviceMesh, whose axis dp shares the data"
        )
    if mpu is None:
        return None

    def size(axis: str) -> int:
        return int(getattr(mpu, f"get_{axis}_world_size", lambda: 1)())

    if size("sequence_parallel") > 1:
        raise not_part_of_wherry(
            f"initialize(mpu=...) with get_sequence_parallel_world_size() == {size('sequence_parallel')}",
            "use torch's context parallelism around the engine",
        )
    axes = ("tensor_model_parallel", "model_parallel", "pipeline_model_parallel", "pipe_parallel")
    return mpu if any(size(axis) > 1 for axis in axes) else None


@contextmanager
def OnDevice(dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> Iterator[None]:
    """Build a model on a device, in a dtype."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
