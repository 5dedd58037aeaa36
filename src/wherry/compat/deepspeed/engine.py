"""`initialize` and the engine, with the arguments and the method names of DeepSpeed's."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from wherry.build import initialize as wherry_initialize
from wherry.checkpoint.errors import CheckpointError, on_first, together
from wherry.compat.deepspeed import (
    VERSION,
    checkpointing,
    leaf_modules,
    not_part_of_wherry,
    parameters,
    schedules,
)
from wherry.compat.deepspeed.comm import init_distributed
from wherry.compat.deepspeed.config import DeepSpeedConfigError, check_batch, given_to, load, loss_scaler
from wherry.compat.deepspeed.gradients import Attributes
from wherry.compat.deepspeed.optimizer import (
    BF16_Optimizer,
    FP16_Optimizer,
    FP16_UnfusedOptimizer,
    face,
    resolve,
)
from wherry.compat.deepspeed.timer import ThroughputTimer
from wherry.compat.deepspeed.utils import warning_once
from wherry.config import Config
from wherry.dataloader import make_dataloader
from wherry.engine import Engine
from wherry.errors import ConfigError, WherryError
from wherry.observe.log import say
from wherry.parallel.topology import local_rank, world_of
from wherry.sharding.access import gathered
from wherry.update.optimizer import ShardedOptimizer

# Beside every checkpoint.
EXPORTER = """# Whole fp32 weights of the checkpoint beside this file: python zero_to_fp32.py FOLDER OUTPUT
from wherry.compat.deepspeed.export import main

raise SystemExit(main())
"""


class Misuse(WherryError, AssertionError):
    """A call that DeepSpeed asserts against."""


class Unscaled(WherryError, RuntimeError):
    """The backward of a loss without the scale that its gradients are divided by."""


class NotCoalesced(WherryError, NotImplementedError):
    """Gradients that are not reduced for several backwards together."""


class DeepSpeedEngine(Engine):
    """Wherry's engine, with the rest of the names that scripts call."""

    CLOSED = (
        "this engine has been destroyed; call deepspeed.initialize again for a new one. A Trainer of transformers "
        "destroys its engine when it is to train once more: save the model, and give what was saved to another Trainer"
    )

    resolve_optimizer = staticmethod(resolve)
    build_schedule = staticmethod(schedules.build)
    make_scaler = staticmethod(loss_scaler)
    mpu: Any = None
    _accumulates = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._in_grad = Attributes(self)
        # Whether the next backward begins a new window, though no step has ended this one.
        self._begins_anew = False
        super().__init__(*args, **kwargs)
        self._in_grad.watch()
        self._shown = ExitStack()
        self.tput_timer = ThroughputTimer()
        if isinstance(self.optimizer, FP16_Optimizer | FP16_UnfusedOptimizer):
            # DeepSpeed makes their states so: it decays weights, and counts as Adam's first update.
            self.update_on_zeros()
        parameters.mark(self)
        if self.zero_optimization_stage() == 3 and self.optimizer is not None:
            self.optimizer.parameter_offload = Hooked(self.module)  # type: ignore[attr-defined]

    def make_optimizer(self, instance: torch.optim.Optimizer) -> ShardedOptimizer:
        return face(instance, self)

    def make_autocast(self) -> Callable[[], AbstractContextManager[Any]]:
        if self.settings.torch_autocast.enabled:
            return super().make_autocast()
        return partial(_without_autocast, self.device.type)

    def _take_gradients_set_by_hand(self) -> None:
        """Use the gradients that a script has set, the same on each rank, for this step."""
        weights = [
            w for group in self.param_groups() for w in group["params"] if w.requires_grad and w.grad is not None
        ]
        have = self.comm.gather_objects(len(weights))
        if len({*have}) > 1:
            raise WherryError(f"step: gradients were set by hand for {have} weights of the ranks; set the same on each")
        if not weights:
            return
        alike = 1 / self.comm.size if self.settings.gradient_allreduce_op == "sum" else 1.0
        gradients = {weight: weight.grad * alike for weight in weights if weight.grad is not None}
        for weight in weights:
            weight.grad = None
        self.take_gradients(gradients)

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> torch.Tensor:
        """Run the backward of `loss`; return the loss as it counts in the window's mean."""
        self._check_loss("backward", loss)
        super().backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
        self._in_grad.show()
        return loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        self._check_loss("scale", loss)
        return super().scale(loss)

    def _check_loss(self, call: str, loss: Any) -> None:
        if self.closed:
            return  # of which the call itself tells
        if self.optimizer is None:
            raise Misuse(f"{call}: this engine has no optimizer; must provide optimizer during init in order to use it")
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
            shape = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise Misuse(
                f"{call}: loss must be a scalar tensor with grad_fn, got {shape}; reduce it, as with loss.mean(), or "
                "call backward(gradient) of the output itself"
            )

    def backward_begins(self) -> None:
        if self.misses_loss_scale():
            self.drop_window()
            raise Unscaled(
                "Loss scaling is required: gradients in fp16 are of a loss times its scale; call "
                "engine.backward(loss), or engine.scale(loss).backward()"
            )
        super().backward_begins()

    def backward_ends(self) -> None:
        super().backward_ends()
        self._in_grad.show()

    def begin_backward(self, makes_gradients: Callable[[], bool] = lambda: True, **how: Any) -> None:
        if self._begins_anew and makes_gradients():
            self._begins_anew = False
            if self.has_gradients():
                Engine.zero_grad(self)
        self._in_grad.take()
        super().begin_backward(makes_gradients, **how)

    def drop_gradients(self) -> list[str]:
        self._in_grad.drop()
        return super().drop_gradients()

    def _complete_window(self) -> None:
        with self._in_grad.taken():
            self.flat_gradients.complete_window()

    def update(self) -> bool:
        """As the engine's own; the norm stays that of the last update, where this one is skipped."""
        parameters.check_all_used(self)
        if not (self.window.backwards or self.zero_optimization()):
            self._take_gradients_set_by_hand()
        self._in_grad.take()
        self._begins_anew = False
        before = self.last_norm
        applied = super().update()
        if not applied:
            self.last_norm = before or 0.0
        return applied

    # When gradients are reduced.

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Finish the reduction at the boundary; mostly the backward has done it."""
        self.check_open()
        if self.window.backwards and self.is_gradient_accumulation_boundary():
            self._complete_window()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate only, without `step`; at stages 0 and 1."""
        if self.zero_optimization_partition_gradients():
            raise Misuse(
                "no_sync: gradients that are partitioned are reduced with every micro-batch, as with ZeRO stage "
                f"{self.zero_optimization_stage()}; leave it out, and set gradient_accumulation_steps"
            )
        with self._accumulating("no_sync"):
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backwards inside, of one step outside; their gradients are reduced together, at the end."""
        if not self.managed_gradient_accumulation():
            raise Misuse(
                "coalesce_grad_reduction: managed_gradient_accumulation is false, so gradients wait for step() as it "
                "is; leave the call out"
            )
        if self.zero_optimization_stage() == 0:
            raise NotCoalesced("coalesce_grad_reduction requires ZeRO stage 1/2/3, got stage 0; use no_sync()")
        if isinstance(self.optimizer, BF16_Optimizer):
            raise NotCoalesced(
                "coalesce_grad_reduction does not support the optimizer wrapper BF16_Optimizer, which sums in fp32 at "
                "stage 1; use no_sync(), or stage 2"
            )
        with self._accumulating("coalesce_grad_reduction"):
            yield
        if self.window.backwards:
            self._complete_window()

    @contextmanager
    def _accumulating(self, call: str) -> Iterator[None]:
        if self._accumulates:
            raise Misuse(f"{call} cannot be nested in another no_sync or coalesce_grad_reduction; end that before")
        self._accumulates = True
        try:
            with super().no_sync():
                yield
        finally:
            self._accumulates = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what autograd would hold in `.grad`: this rank's own sum of micro-batches, that is not reduced yet.

        Gradients that have been reduced wait for their step, or for the next backward, and the count of micro-batches
        goes on.
        """
        reduced = self.has_gradients() and self.zero_optimization()
        if reduced or self.zero_optimization_partition_gradients():
            self.check_turn("zero_grad")
            self._begins_anew = reduced and not self.zero_optimization_partition_weights()
            return
        steps = 0 if self.has_gradients() else self.window.steps
        super().zero_grad(set_to_none)
        self.window.steps = steps

    def zero_grad_of_loop(self) -> None:
        super().zero_grad_of_loop()
        self._begins_anew = self.has_gradients() and self.zero_optimization()

    def close(self) -> None:
        self._in_grad.close()
        self._shown.close()
        parameters.unmark(self)
        super().close()

    # Names for what the engine says under another one.

    @property
    def mp_world_size(self) -> int:
        return self.world_size // self.dp_world_size

    @property
    def communication_data_type(self) -> torch.dtype | None:
        return self.settings.communication_dtype() or self.settings.working_dtype()

    def zero_optimization_partition_gradients(self) -> bool:
        return self.placement.gradients.partitioned

    def zero_optimization_partition_weights(self) -> bool:
        return self.placement.parameters.partitioned

    def _backward_epilogue(self) -> None:
        """What a script calls after a backward of one loss for several engines: each has ended its own part by then."""

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        if not self.managed_gradient_accumulation():
            raise Misuse(
                "set_gradient_accumulation_boundary: managed_gradient_accumulation is false, so every step() is the "
                "boundary; leave the call out"
            )
        super().set_gradient_accumulation_boundary(is_boundary)

    def managed_gradient_accumulation(self) -> bool:
        return self.settings.managed_gradient_accumulation

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

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
        dtype: torch.dtype | None = None,
    ) -> bool:
        """Whole working weights in one `torch.save` file, unless the name is `model.safetensors`."""
        return super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters, dtype)

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
        if self._accumulates:
            raise Misuse("step: it is illegal inside no_sync or coalesce_grad_reduction; call it when that has ended")
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
        """As the engine's own; beside it lies the script that people take whole weights out with.

        In the checkpoint are files under DeepSpeed's names too. Where every rank holds the whole model, that is in them
        once more.
        """
        saved = super().save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        from wherry.compat.deepspeed import saved_files

        module: dict[str, Any] | None = None
        if self.mp_world_size == 1 and not self.saves_behind:
            state_dict = (
                saved_files.without_weights
                if self.zero_optimization_partition_weights()
                else type(self).module_state_dict
            )
            module = state_dict(self, exclude_frozen_parameters=exclude_frozen_parameters)
        world = world_of(self.topology)

        def write() -> None:
            folder = Path(save_dir, f"global_step{self.global_steps}" if tag is None else str(tag))
            if world.rank == 0:
                Path(save_dir, "zero_to_fp32.py").write_text(EXPORTER, encoding="utf-8")
                if module is not None:
                    saved_files.write_model_file(self, folder, module)
            if module is not None and self.optimizer is not None and self.zero_optimization():
                saved_files.write_optimizer_file(self, folder, world.rank)

        together(world, f"writing beside {save_dir}", write)
        return saved

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, Any]:
        """Load a checkpoint of Wherry's, or one that DeepSpeed has written and `latest` names.

        The client state includes DeepSpeed's own entries, such as `ds_version`, `ds_config`, `param_shapes` and
        `global_samples`.
        """
        if custom_load_fn is not None:
            raise not_part_of_wherry(
                "load_checkpoint(custom_load_fn=...)", "load what differs into engine.module inside GatheredParameters"
            )
        from wherry.compat.deepspeed import loading, saved_files

        self.check_open()
        self._shown.close()
        folder, world, what = Path(load_dir), world_of(self.topology), f"loading from {load_dir}"
        world.meet("load_checkpoint()")
        as_universal = self.settings.checkpoint.load_universal
        location = on_first(world, what, lambda: loading.locate(folder, tag, universal=as_universal))
        if location is None:
            return None, None
        if isinstance(location, CheckpointError):
            raise location
        own, theirs = location
        how = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        with ExitStack() as stack:
            source = folder
            if theirs:
                names = {parameter: name for name, parameter in self.module.named_parameters()}
                groups = [[names[each] for each in group["params"] if each in names] for group in self.param_groups()]
                source = stack.enter_context(loading.as_ours(world, folder, own, groups))
            super().load_checkpoint(source, None if own == "." else own, *how)
            taken = ["module"] if load_module_only else [*saved_files.TAKEN]
            taken += ["lr_scheduler"] * load_lr_scheduler_states + ["optimizer"] * load_optimizer_states
            client_states = saved_files.client_states(source / own, taken)
        return str(folder / own), client_states

    def empty_partition_cache(self) -> None:
        """Release weights that `all_gather` of a parameter has gathered; between steps no others are.

        Small weights that stay on every rank are kept, as are those inside `GatheredParameters`.
        """
        for parameter in self.module.parameters():
            if isinstance(parameter, parameters.Marks):
                parameter.partition()


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Disable a torch.autocast of a GPU around a forward, where the engine's config has no `torch_autocast`."""
    if not torch.is_autocast_enabled():
        return nullcontext()
    warning_once(
        "torch.autocast is on around the engine, whose config has no torch_autocast: inside it is off. Give "
        '"torch_autocast": {"enabled": true}, or leave it to bf16 or fp16'
    )
    return torch.autocast(device_type, enabled=False)


class Hooked:
    """What libraries take the hooks off for generation, and put them on again, reach for.

    Here hooks stay: on weights that are gathered anyway they do nothing. What is listed stands for them.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._register_deepspeed_module(module)

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        self.forward_hooks: list[Any] = [RemovableHandle(OrderedDict())]
        self.backward_hooks: list[Any] = [RemovableHandle(OrderedDict())]

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
        raise DeepSpeedConfigError("deepspeed.initialize requires a model; give model=...")
    # Transformers' tests look for the first words, to see that the engine is in use.
    say("DeepSpeed info: version=%s", VERSION)
    config = load(given_to(args, config, config_params))
    check_batch(config)
    _check_unmanaged(config)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    if hasattr(args, "local_rank"):  # scripts go by it, also where their launcher does not give it
        args.local_rank = local_rank()
    give_back(model)
    parameters.show_shapes(model)
    zero = config.written.get("zero_optimization")
    leaf_modules.apply_zero_leaf_module_config(model, zero.get("leaf_module") if isinstance(zero, dict) else None)
    try:
        engine, optimizer, loader, scheduler = wherry_initialize(
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            collate_fn=collate_fn,
            config=checkpointing.laid_over(config),
            mesh=_mesh_of(mpu, mesh_param),
            engine_class=DeepSpeedEngine,
        )
    except ConfigError as error:
        raise DeepSpeedConfigError(str(error), error.problems) from None
    assert isinstance(engine, DeepSpeedEngine)
    engine.mpu = mpu
    return engine, optimizer, loader, scheduler


def _check_unmanaged(config: Config) -> None:
    zero = config.written.get("zero_optimization")
    overlaps = isinstance(zero, dict) and zero.get("overlap_comm") is True and config.zero_optimization.stage < 2
    if overlaps and not config.managed_gradient_accumulation:
        raise Misuse(
            "managed_gradient_accumulation: false goes with overlap_comm only with ZeRO stage 2 or 3, got "
            f"zero_optimization.overlap_comm: true at stage {config.zero_optimization.stage}; leave it out"
        )


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
