"""Lightning's Trainer on the engine: `Trainer(strategy="wherry")` once this module is imported.

    import wherry.integrations.lightning
    trainer = lightning.Trainer(strategy="wherry", devices=8, precision="bf16-true", accumulate_grad_batches=4)

or with a config: `Trainer(strategy=WherryStrategy(config="config.json"))`. The module stays as it is, with
`configure_optimizers` and, to be built partitioned, `configure_model`.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from wherry import config as configs
from wherry.build import initialize, without_layer_major
from wherry.config import Config
from wherry.engine import Engine
from wherry.errors import WherryError
from wherry.parallel import topology
from wherry.parallel.topology import Topology

try:
    from lightning.pytorch import Trainer
    from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning_utilities.core.apply_func import apply_to_collection
except ImportError as error:
    raise WherryError(
        f"wherry.integrations.lightning needs the package lightning ({error}); run `pip install lightning`"
    ) from error

__all__ = ["WherryPrecision", "WherryStrategy"]

TAG = "checkpoint"
# Lightning's precision -> the config's block. "mixed" keeps fp32 masters, and so does Wherry always.
PRECISIONS = {"32-true": None, "bf16-true": "bf16", "bf16-mixed": "bf16", "16-true": "fp16", "16-mixed": "fp16"}


class WherryPrecision(Precision):
    """Leaves dtypes, loss scaling and clipping to the engine."""

    def __init__(self, precision: str = "32-true") -> None:
        super().__init__()
        self.precision = precision  # type: ignore[assignment]

    def backward(self, tensor: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        # Lightning has divided the loss by accumulate_grad_batches.
        model.trainer.strategy.engine.backward(tensor, scale_wrt_gas=False, **kwargs)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        result = closure()
        self._after_closure(model, optimizer)
        if result is None and model.automatic_optimization:
            raise WherryError("training_step returned None: at every stage each rank must run a backward in each step")
        optimizer.step()
        return result

    def clip_gradients(self, optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """The engine clips, in the update."""


class WherryStrategy(DDPStrategy):
    """Trains the LightningModule on a Wherry engine. `config`: a path, a dict, or nothing for ZeRO of the `stage`."""

    strategy_name = "wherry"

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None,
        stage: int = 3,
        exclude_frozen_parameters: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._config = configs.load(config if config is not None else {"zero_optimization": {"stage": stage}})
        self._exclude_frozen = exclude_frozen_parameters
        self.engine: Engine | None = None
        # Of the model that is being built, for its engine.
        self._place: Topology | None = None

    # Setting up.

    def _find(self) -> Topology:
        """All ranks, and Lightning's device for this one: batches come there, and a Trainer may choose among GPUs."""
        return topology.find(device=self.root_device, timeout=self._config.wherry.timeout_s)

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else WherryPrecision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is None:  # one of a strategy's own would go before the Trainer's `precision`
            self._precision_plugin = None
            return
        name = str(plugin.precision)
        if name not in PRECISIONS:
            raise WherryError(f"precision {name!r}: expected one of {', '.join(PRECISIONS)}")
        self._precision_plugin = plugin if isinstance(plugin, WherryPrecision) else WherryPrecision(name)

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        optimizer: Any = None
        schedules: list[Any] = []
        module: Any = self.lightning_module
        earlier = _engine_of(module)
        if earlier is not None and not fitting:
            self.model = self.engine = earlier
            return
        if earlier is not None:
            earlier.unwrap()
        if fitting and self._config.optimizer is None:
            optimizers, schedules = _init_optimizers_and_lr_schedulers(module)
            if len(optimizers) != 1:
                raise WherryError(f"configure_optimizers: expected one optimizer, got {len(optimizers)}")
            optimizer = optimizers[0]
        place, self._place = self._place or self._find(), None
        self.engine, sharded, _, schedule = initialize(
            model=module, optimizer=optimizer, config=self._resolved(trainer, fitting), mesh=place
        )
        self.model = self.engine
        if fitting and any(unit.travelling for unit in self.engine.units):
            _refuse_averages(trainer)
        _engines[module] = weakref.ref(self.engine)
        # Lightning ends torch.distributed when the process ends; what the engine has open must be closed before that.
        atexit.register(_close, weakref.ref(self.engine))
        # Lightning moves the schedules on, by epoch or by step as the module asks.
        self.engine.lr_scheduler = None
        if schedule is not None:
            from lightning.pytorch.utilities.types import LRSchedulerConfig

            schedules = [LRSchedulerConfig(schedule, interval="step")]
        self.optimizers = [sharded] if sharded is not None else []
        self.lr_scheduler_configs = schedules
        self.setup_precision_plugin()
        self.barrier()

    def _resolved(self, trainer: Trainer, fitting: bool) -> Config:
        given = self._config.written
        for key, name, value in (
            ("gradient_accumulation_steps", "accumulate_grad_batches", trainer.accumulate_grad_batches),
            ("gradient_clipping", "gradient_clip_val", trainer.gradient_clip_val),
        ):
            if fitting and value is not None and given.get(key, "auto") not in ("auto", None, value):
                raise WherryError(
                    f"{key}: the config has {given[key]}, and Trainer(...) {name}={value}; leave it out of the config"
                )
        overrides: dict[str, Any] = {"gradient_accumulation_steps": trainer.accumulate_grad_batches}
        if given.get("train_batch_size") == "auto" or "train_micro_batch_size_per_gpu" in given:
            overrides["train_batch_size"] = None
        block = PRECISIONS[str(self.precision_plugin.precision)]
        if block is not None:
            overrides[f"{block}.enabled"] = True
        if trainer.gradient_clip_val is not None:
            if str(trainer.gradient_clip_algorithm or "norm") not in ("norm", "GradClipAlgorithmType.NORM"):
                raise WherryError(
                    'gradient_clip_algorithm: expected "norm", got "value"; Wherry clips by the global norm'
                )
            overrides["gradient_clipping"] = float(trainer.gradient_clip_val)
        if not fitting:
            overrides |= {"optimizer": None, "scheduler": None}
        why = "Lightning's Trainer runs the backward of each micro-batch by itself"
        return without_layer_major(configs.load(self._config, overrides=overrides), why)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """`setup` has done it, with the engine."""

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around `configure_model`: what is built in it goes to its shards as it is built."""
        import wherry

        partitioned = self._config.placement().parameters.partitioned
        self._place = self._find()
        with wherry.Init(config=self._config, mesh=self._place) if partitioned else nullcontext():
            yield

    def model_to_device(self) -> None:
        """The engine places the model, a unit at a time."""

    def teardown(self) -> None:
        """The engine stays, with its weights, for what comes after a fit; a fit that follows begins with them."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None and self.cluster_environment is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self.cluster_environment.teardown()

    def on_train_end(self) -> None:
        assert self.engine is not None
        self.engine.settle()  # a delayed update has no next step to follow in

    # A step.

    @property
    def handles_gradient_accumulation(self) -> bool:
        return False

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        moved = super().batch_to_device(batch, device, dataloader_idx)
        dtype = self.engine.working_dtype if self.engine is not None else None
        if dtype is None:
            return moved
        return apply_to_collection(moved, torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        assert self.engine is not None and self.lightning_module is not None
        trainer = self.lightning_module.trainer
        boundary = not trainer.fit_loop._should_accumulate() if self.lightning_module.automatic_optimization else True
        self.engine.set_gradient_accumulation_boundary(boundary)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """The engine has reduced what there was to reduce."""

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """`pre_backward` tells the engine where the window ends."""
        yield

    # Checkpoints: a folder, written by all ranks.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        assert self.engine is not None
        state = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        self.engine.save_checkpoint(
            os.fspath(self.broadcast(filepath)),
            tag=TAG,
            client_state=state,
            exclude_frozen_parameters=self._exclude_frozen,
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.engine is not None and self.lightning_module is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        path, state = self.engine.load_checkpoint(
            os.fspath(checkpoint_path),
            load_module_strict=self.lightning_module.strict_loading,
            load_optimizer_states=fitting,
            load_lr_scheduler_states=False,
            load_module_only=not fitting,
        )
        if path is None:
            raise WherryError(f"{checkpoint_path}: holds no checkpoint of the engine's")
        return state or {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """`load_checkpoint` has done it."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """`load_checkpoint` has done it."""

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            import shutil

            shutil.rmtree(filepath)


def _refuse_averages(trainer: Trainer) -> None:
    """Lightning's averages of weights are written over the model's, which are partitioned or rest elsewhere."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for name in (base.__name__ for base in type(callback).__mro__):
            if name in ("StochasticWeightAveraging", "WeightAveraging"):
                raise WherryError(
                    f"{type(callback).__name__}: it writes over the model's weights, which are partitioned over the "
                    "ranks or rest on another tier here; use stage 1 or 2, or average them in a callback of your own, "
                    "inside wherry.gathered"
                )


def _register() -> None:
    for name, stage in (("wherry", 3), ("wherry_stage_1", 1), ("wherry_stage_2", 2), ("wherry_stage_3", 3)):
        StrategyRegistry.register(name, WherryStrategy, description=f"Wherry, ZeRO stage {stage}", stage=stage)


# The engine that holds a module's weights, after the Trainer that made it has ended.
_engines: weakref.WeakKeyDictionary[Any, weakref.ref[Engine]] = weakref.WeakKeyDictionary()


def _engine_of(module: Any) -> Engine | None:
    reference = _engines.get(module)
    engine = reference() if reference is not None else None
    return engine if engine is not None and not engine.closed else None


def _close(reference: weakref.ref[Engine]) -> None:
    engine = reference()
    if engine is not None:
        engine.close()


_register()
